"""Layout of the code: downward imports, no shadowing names, nothing unsafe."""

import ast
import functools
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "accel_gpt"
FILES = sorted(PACKAGE.rglob("*.py"))
# from the bottom up; a module imports its own level and those below
TRAINER = [
    ["errors"],
    ["own_code"],
    ["console", "launcher"],
    ["files"],
    ["damage"],
    ["config"],
    ["hub", "json_files"],
    ["model"],
    ["optim"],
    ["data"],
    ["launch", "runs", "training"],
    ["evals"],
    ["train"],
]
TOOLS = [
    ["children"],
    ["cost"],
    ["prepare"],
    ["report"],
    ["health"],
    ["transformers_io"],
    ["publish"],
    ["commands"],
    ["api", "pieces"],
    ["cli"],
]
LEVELS = TRAINER + TOOLS
# Libraries that only functions import, since not every command needs them. CPU seconds of the
# import after torch and accelerate, best of three on an AMD EPYC, one process each:
# torch._dynamo 1.0, datasets 0.6, torch.distributed.fsdp 0.5, transformers 0.4, matplotlib 0.3,
# pandas 0.2, huggingface_hub 0.1, tensorboard 0.05; together more than 3 s.
HEAVY = {
    *("transformers", "tokenizers", "datasets", "huggingface_hub", "lm_eval", "matplotlib"),
    *("tensorboard", "tiktoken", "pandas", "pyarrow", "sympy"),
    *("torch._dynamo", "torch._inductor", "torch.distributed.tensor", "torch.distributed.fsdp"),
    "numpy.ma",
}
# calls that could execute a file's content, or that hide behaviour
UNSAFE = {"exec", "eval", "compile", "globals", "locals", "__import__"}
UNSAFE_MODULES = {"pickle", "dill", "cloudpickle", "shelve", "marshal", "joblib", "code", "runpy"}
UNSAFE_ATTRIBUTES = {
    *("yaml.load", "yaml.full_load", "yaml.unsafe_load"),
    *("yaml.safe_load", "yaml.Loader"),  # `files.load_yaml` rejects duplicate keys
    *("sys.path", "os.system", "os.popen", "torch.hub", "subprocess.getoutput"),
    *("torch.distributed.checkpoint", "torch.package"),
}
ALLOWED = {
    "data/foreign.py": {"pickle"},  # its unpickler finds no class
    "__main__.py": {"sys.path"},  # takes the working folder off it
}
# keywords whose value must be a constant
REQUIRED = {
    **{"allow_pickle": False, "trust_remote_code": False, "shell": False},
    "weights_only": True,
}


def level(room: str) -> int:
    return next(i for i, rooms in enumerate(LEVELS) if room in rooms)


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def named(path: Path, *problems: str) -> list[str]:
    """Return the problems of a file of the package, each with its path."""
    return [f"{path.relative_to(PACKAGE)}: {problem}" for problem in problems]


def loaded_by(code: str, *arguments: str) -> dict[str, str]:
    """Return the file of each module that `code` loads in a new process."""
    modules = "{name: getattr(m, '__file__', None) or '' for name, m in sys.modules.items()}"
    code = f"import json, sys\n{code}\nprint(json.dumps({modules}))"
    words = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
def test_a_model_that_is_loaded_brings_no_compiler() -> None:
    code = "from accel_gpt.model.gpt import GPT, ModelConfig\nGPT.allocate(ModelConfig(), 9)"
    assert "torch._dynamo" not in loaded_by(code)


def test_the_child_of_a_copy_starts_without_torch() -> None:
    """It has a low priority beside a run that uses all cores."""
    assert "torch" not in loaded_by("import accel_gpt.publish.copies")


@pytest.mark.slow
def test_a_run_without_trackers_loads_nothing_heavy(small_run: Callable[..., list[str]]) -> None:
    """Steps, evaluations, samples and checkpoints."""
    code = "from accel_gpt.commands import train as command\nassert command.main(sys.argv[1:]) == 0"
    quiet = ("--log.trackers", "[]", "--train.max_steps", "3", "--eval.every", "2")
    assert not HEAVY & loaded_by(code, *small_run(*quiet, "--optim.name", "muon")).keys()


def module_name(path: Path) -> str:
    """Return the module of a file: `accel_gpt.data.order` for data/order.py."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


MODULES = {module_name(path): path for path in FILES}


@functools.cache
def own_imports(node: ast.AST) -> set[str]:
    """Return the modules of the package that a node imports, including inside functions."""
    found = set()
    for inner in ast.walk(node):
        if isinstance(inner, ast.Import):
            found |= {alias.name for alias in inner.names if alias.name in MODULES}
        elif isinstance(inner, ast.ImportFrom):
            assert not inner.level, "relative import"
            source = inner.module or ""
            for alias in inner.names:  # a module of a package, or a name of a module
                whole = f"{source}.{alias.name}"
                found |= {whole if whole in MODULES else source} & MODULES.keys()
    return found - {"accel_gpt"}


@functools.cache
def as_module(path: Path) -> ast.Module:
    """Return the statements of a file that run when it is imported: not what a script runs."""
    body = tree(path).body
    script = [n for n in body if isinstance(n, ast.If) and "__main__" in ast.unparse(n.test)]
    return ast.Module([node for node in body if node not in script], [])


def room_of(module: str) -> str:
    return module.split(".")[1]


def test_importing_the_trainer_reaches_no_tool() -> None:
    reached: set[str] = set()
    new = {"accel_gpt.train"}
    while new:
        reached |= new
        new = set().union(*(own_imports(as_module(MODULES[module])) for module in new)) - reached
    assert {room_of(module) for module in reached} == {room for rooms in TRAINER for room in rooms}


@pytest.mark.slow
def test_importing_the_trainer_loads_nothing_heavy() -> None:
    assert not HEAVY & loaded_by("import accel_gpt.train").keys()


def test_imports_stand_at_the_top_of_a_module_and_point_down() -> None:
    """So a room of the trainer imports no tool.

    Functions may import heavy third-party packages; only cli.py imports commands there, and
    resolve.py the readers of models, for `model.init_from`.
    """
    found = []
    for module, path in MODULES.items():
        # these load an interface, a command or the readers of models on first use
        if module in ("accel_gpt", "accel_gpt.cli", "accel_gpt.commands.resolve"):
            continue
        own = own_imports(as_module(path))
        above = [other for other in own if level(room_of(other)) > level(room_of(module))]
        found += named(path, *(f"imports {other}, which is above it" for other in above))
        functions = (n for n in tree(path).body if isinstance(n, ast.FunctionDef | ast.ClassDef))
        inside = {other for function in functions for other in own_imports(function)}
        found += named(path, *(f"imports {other} inside a function" for other in inside))
    assert not found


def test_no_imports_go_round_in_a_circle() -> None:
    circles = {module: own_imports(as_module(path)) for module, path in MODULES.items()}
    while True:  # drop modules that import nothing of the rest, or that nothing imports
        imported = set().union(*circles.values())
        ends = {module for module, own in circles.items() if not own or module not in imported}
        if not ends:
            break
        circles = {module: own - ends for module, own in circles.items() if module not in ends}
    assert not circles


def test_the_benchmarks_import_what_there_is() -> None:
    for path in (ROOT / "benchmarks").glob("*.py"):
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ImportFrom) and node.module in MODULES:
                text = MODULES[node.module].read_text(encoding="utf-8")
                for name in (alias.name for alias in node.names):
                    pattern = rf"^(?:class |def )?{name}\b|^from .*\b{name}\b"
                    defined = re.search(pattern, text, flags=re.M)
                    assert defined or f"{node.module}.{name}" in MODULES, name


def unsafe(node: ast.AST) -> str | None:
    """Return the unsafe parts of a node: they could execute the content of a file or a text."""
    if isinstance(node, ast.Call):
        name = ast.unparse(node.func)
        if name in UNSAFE or name.endswith("register_for_checkpointing"):
            return name
        if name == "torch.load" and "weights_only=True" not in ast.unparse(node):
            return "torch.load without weights_only=True"
    if isinstance(node, ast.Import | ast.ImportFrom):
        names = {alias.name.partition(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            names = {(node.module or "").partition(".")[0]}
            if (node.module or "").startswith("torch.distributed.checkpoint"):  # DCP unpickles
                return node.module
        return next(iter(names & UNSAFE_MODULES), None)
    if isinstance(node, ast.Attribute) and ast.unparse(node) in UNSAFE_ATTRIBUTES:
        return ast.unparse(node)
    if isinstance(node, ast.keyword) and node.arg in REQUIRED:
        value = node.value.value if isinstance(node.value, ast.Constant) else node
        return None if value is REQUIRED[node.arg] else ast.unparse(node)
    if isinstance(node, ast.keyword) and node.arg == "load_kwargs":  # could reopen weights_only
        return "load_kwargs"
    return None


def test_nothing_unsafe_and_no_mutable_module_state() -> None:
    found = []
    for path in FILES:
        module = tree(path)
        allowed = ALLOWED.get(str(path.relative_to(PACKAGE)), set())
        whats = {what for node in ast.walk(module) if (what := unsafe(node))}
        found += named(path, *(whats - allowed))
        assigned = [n for n in module.body if isinstance(n, ast.Assign)]
        mutable = [n for n in assigned if isinstance(n.value, ast.List | ast.Dict | ast.Set)]
        found += named(path, *(ast.unparse(n.targets[0]) for n in mutable))
    assert not found


UNSAFE_CODE = (
    *("exec(x)", "eval(x)", "compile(x, y, z)", "__import__(x)", "globals()"),
    *("import pickle", "from pickle import loads", "import dill.source", "import marshal"),
    *("from torch.distributed.checkpoint.format_utils import x", "import shelve as s"),
    *("yaml.load(x)", "yaml.unsafe_load(x)", "yaml.safe_load(x)", "read = yaml.full_load"),
    *("torch.load(x)", "torch.load(x, weights_only=False)", "load(x, weights_only=False)"),
    *("np.load(x, allow_pickle=True)", "np.load(x, allow_pickle=given)", "os.system(x)"),
    *("run(x, shell=True)", "f(trust_remote_code=True)", "f(trust_remote_code=None)"),
    *("accelerator.register_for_checkpointing(x)", "a.load_state(x, load_kwargs=y)"),
    *("os.popen(x)", "sys.path.insert(0, x)", "torch.hub.load(x)", "subprocess.getoutput(x)"),
)


def test_the_guard_sees_what_is_unsafe() -> None:
    missed = [c for c in UNSAFE_CODE if not any(map(unsafe, ast.walk(ast.parse(c))))]
    assert not missed


def test_no_name_shadows_a_module() -> None:
    """`accelerate launch accel_gpt/train.py` puts this folder first on `sys.path`."""
    names = {p.stem for p in PACKAGE.iterdir() if p.suffix == ".py" or p.is_dir()}
    names -= {"__init__", "__main__", "__pycache__"}
    installed = {name: importlib.util.find_spec(name) for name in names}
    assert not [name for name, spec in installed.items() if spec and spec.origin]


def test_command_lines_and_light_commands_need_no_torch() -> None:
    modules = ["cli", "commands.options", "commands.plan", "commands.prepare"]
    loaded = loaded_by("\n".join(f"import accel_gpt.{name}" for name in modules))
    assert not {"torch", "transformers", "datasets"} & loaded.keys()
