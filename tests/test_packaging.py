"""Installation: declared dependencies, a complete wheel, configs by name."""

import ast
import functools
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable
from importlib.metadata import packages_distributions
from importlib.util import find_spec
from pathlib import Path

import pytest

from accel_gpt.commands.resolve import load_config
from accel_gpt.config.parse import resolve_config, shipped_folder

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
# private names of other packages that we use; any version may remove them
PRIVATE = {
    "_backward_hooks": "torch",
    "_backward_pre_hooks": "torch",
    "_compiled_call_impl": "torch",
    "_foreach_norm": "torch",
    "_forward_hooks": "torch",
    "_forward_pre_hooks": "torch",
    "_shared_state": "accelerate",
}
PUBLIC = {"_asdict", "_exit", "_replace"}  # documented names of os and named tuples


def normal(name: str) -> str:
    """Return the normalized name of a distribution."""
    return re.sub(r"[-_.]+", "-", name).lower()


def requirements(*extras: str) -> dict[str, str]:
    """Return the bounds of each declared distribution, including extras."""
    lines = PROJECT["dependencies"] + [line for extra in extras for line in EXTRAS[extra]]
    parts = (re.match(r"([\w.-]+)(?:\[.*\])?(.*)", line) for line in lines)
    return {normal(part[1]): part[2] for part in parts if part}


@functools.cache
def nodes() -> list[ast.AST]:
    files = sorted((ROOT / "accel_gpt").rglob("*.py"))
    return [node for path in files for node in ast.walk(ast.parse(path.read_text("utf-8")))]


# --------------------------------------------------------------------------- dependencies


def test_every_imported_package_is_declared() -> None:
    modules: set[str] = set()
    for node in nodes():
        if isinstance(node, ast.Import):
            modules |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules.add((node.module or "").partition(".")[0])
    others = modules - set(sys.stdlib_module_names) - {"accel_gpt"}
    assert {"torch", "yaml", "pyarrow"} <= others
    known = packages_distributions()
    declared = set(requirements("gguf", "lm-eval", "notebook", "trackio", "wandb"))
    missing = {m for m in others if not {normal(d) for d in known.get(m, [m])} & declared}
    assert not missing


def test_private_names_are_listed_and_bound_from_above() -> None:
    own = {n.attr for n in nodes() if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)}
    own |= {n.name for n in nodes() if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    used = {n.attr for n in nodes() if isinstance(n, ast.Attribute) and n.attr.startswith("_")}
    foreign = {name for name in used - own - PUBLIC if not name.startswith("__")}
    assert foreign | {"_compiled_call_impl"} == set(PRIVATE)  # the last is also assigned to
    assert all("<" in requirements()[package] for package in PRIVATE.values())


def test_lowest_constraints_are_the_lower_bounds() -> None:
    lines = (ROOT / "constraints-lowest.txt").read_text().splitlines()
    pinned = {normal(name): version for name, _, version in (x.partition("==") for x in lines)}
    for name, bounds in requirements("lm-eval", "dev").items():
        if name not in ("torch", "accel-gpt"):
            lower = re.match(r">=([\d.]+)", bounds)
            assert lower, f"{name} has no lower bound"
            want, got = (re.sub(r"(\.0)+$", "", text) for text in (lower[1], pinned[name]))
            assert got == want, name


@pytest.mark.slow
def test_training_needs_neither_datasets_nor_pyarrow(
    small_run: Callable[..., list[str]], tmp_path: Path
) -> None:
    """Only the preparation of a text does."""
    code = (
        "import sys; sys.modules.update(datasets=None, pyarrow=None)\n"
        "import accel_gpt.cli, accel_gpt.commands.report, accel_gpt.transformers_io.export\n"
        "sys.exit(accel_gpt.cli.dispatch(sys.argv[1:]))"
    )
    words = [sys.executable, "-c", code, "train", *small_run("--train.max_steps", "3")]
    done = subprocess.run(
        words, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run/checkpoints/step_00000003").is_dir()


# --------------------------------------------------------------------------- configs by name


def test_a_shipped_config_is_known_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert shipped_folder() == ROOT / "configs"
    for word in ("quickstart", "quickstart.yaml"):
        assert resolve_config(word) == ROOT / "configs/quickstart.yaml"
        assert load_config([word], "") == load_config([str(ROOT / "configs/quickstart.yaml")], "")
    Path("quickstart").mkdir()  # a folder is not a config
    assert resolve_config("quickstart").parent == ROOT / "configs"
    Path("gpt2_124m").write_text("seed: 8")  # a path goes before a name
    assert load_config(["gpt2_124m"], "").seed == 8


# --------------------------------------------------------------------------- the wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a wheel from a copy of the tree, since a build leaves files in the sources."""
    if find_spec("setuptools") is None:
        pytest.skip("setuptools is not installed, which builds the wheel")
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("accel_gpt", "configs"):
        shutil.copytree(ROOT / name, folder / "tree" / name)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / "tree")
    words = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*words, "-w", str(folder), str(folder / "tree")], check=True)
    return next(folder.glob("*.whl"))


@pytest.mark.slow
def test_the_wheel_holds_every_file_of_package_and_configs(wheel: Path) -> None:
    files = {p.relative_to(ROOT) for p in (ROOT / "accel_gpt").rglob("*") if p.is_file()}
    configs = {p.relative_to(ROOT) for p in (ROOT / "configs").rglob("*") if p.is_file()}
    wanted = {str(path) for path in files if "__pycache__" not in path.parts}
    wanted |= {f"accel_gpt/{path}" for path in configs}
    held = set(zipfile.ZipFile(wheel).namelist())
    assert {"accel_gpt/py.typed", "accel_gpt/report/page.js"} <= wanted
    assert wanted == {name for name in held if name.startswith("accel_gpt/")}


@pytest.mark.slow
def test_the_wheel_alone_trains_by_name_and_reports(wheel: Path, tmp_path: Path) -> None:
    """In an empty folder, with the wheel first on the path."""
    target, folder = tmp_path / "installed", tmp_path / "folder"
    words = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index"]
    subprocess.run([*words, "--target", str(target), str(wheel)], check=True)
    folder.mkdir()
    (folder / "text.txt").write_text("the king went to war by the sea\n" * 400)
    environment = {**os.environ, "PYTHONPATH": str(target)}

    def shown(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, str(target / "bin/accel-gpt"), *words], cwd=folder, env=environment,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    code = "import accel_gpt; print(accel_gpt.__file__)"
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, check=True
    )
    assert Path(found.stdout.decode().strip()).is_relative_to(target)
    assert "--train.max_steps" in shown("train", "quickstart", "--help").replace("-steps", "_steps")
    assert "1 x CPU process" in shown("plan", "quickstart")
    few_steps = [
        *("--data.prepare.source", "text.txt"),
        *("--data.prepare.tokenizer", "bpe", "--data.prepare.vocab_size", "270"),
        *("--data.train", "data/text", "--train.max_steps", "3"),
        *("--model.n_layer", "1", "--model.n_embd", "32", "--model.block_size", "32"),
        *("--train.tokens_per_step", "128", "--train.micro_batch_size", "4"),
        *("--schedule.warmup_steps", "1", "--sample.every", "0", "--log.trackers", "[]"),
        *("--eval.tokens", "256"),
    ]
    shown("train", "quickstart", *few_steps)
    run = folder / "runs/quickstart"
    assert (run / "checkpoints/step_00000003").is_dir()
    shown("report", "runs/quickstart")
    assert (run / "report.html").exists()
