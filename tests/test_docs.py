"""README.md and docs/: commands run as written, and all names exist.

The tree in docs/explanation/architecture.md, the pages of `reference.py`, and
the estimates in configs/ are made from the code; `ACCEL_GPT_DOCS=write pytest tests/test_docs.py`
renews them.
"""

import ast
import contextlib
import dataclasses
import functools
import io
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from accel_gpt import errors
from accel_gpt.cli import dispatch
from accel_gpt.commands import options
from accel_gpt.config.experiment import Config
from accel_gpt.config.options import own_options
from accel_gpt.config.values import leaves
from accel_gpt.console import format_clock
from accel_gpt.errors import AccelGPTError
from accel_gpt.launch.devices import DEVICES
from accel_gpt.launcher import PREEMPTED
from accel_gpt.runs.folder import RunFolder
from accel_gpt.training.metrics import COLUMNS
from accel_gpt.transformers_io import pretrained
from tests.conftest import THOROUGH
from tests.helpers import reference

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "accel_gpt"
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    "tests/GUARDS.md",
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")),
)
# pages whose commands must parse as written; the others are read
FOLLOWED = ("README.md", *(page for page in PAGES if page.startswith("docs/get-started/")))
RESULTS = "benchmarks/RESULTS.md"
FILES = (".py", ".bin", ".json", ".safetensors")  # endings of files that look like keys
NOT_OURS = ("my.py", "variant.py", "gated.py", "code.py")  # of the reader, a copy in a run
# pages that name files of other projects
FOREIGN_FILES = ("fast.md", "from-nanogpt.md", "from-hf-trainer.md", "export.md", "evaluation.md")


@dataclasses.dataclass(frozen=True)
class Line:
    """A command line of a shell block; continued lines are joined."""

    command: str
    comment: str
    """Behind the command, or on the line above it."""

    @property
    def needs(self) -> bool:
        """Return whether the line is marked with a requirement, such as `# needs a GPU`."""
        return self.comment.startswith("needs ")

    def simple_commands(self) -> list[list[str]]:
        """Return the words of each simple command, without assignments and redirections."""
        lexer = shlex.shlex(self.command, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        found: list[list[str]] = [[]]
        words = iter(lexer)
        for word in words:
            if word in ("&&", "|", ";"):
                found.append([])
            elif word == ">":
                next(words)
            elif word == "do" and not found[-1]:
                continue
            elif found[-1] or not re.match(r"\w+=", word):
                found[-1].append(word)
        return found


def shell_lines(page: str, section: str = "") -> list[Line]:
    """Return the lines of the shell blocks of a page, or below one of its headings."""
    text = (ROOT / page).read_text(encoding="utf-8")
    below = text.partition(f"\n## {section}\n")[2].partition("\n## ")[0] if section else text
    blocks = re.findall(r"^ *```(?:sh|bash|shell|console)\n(.*?)^ *```$", below, flags=re.S | re.M)
    found: list[Line] = []
    above = ""
    for line in "".join(blocks).replace("\\\n", " ").splitlines():
        command, _, comment = line.strip().partition("# ")
        if command:
            found.append(Line(" ".join(command.split()), comment or above))
        above = "" if command else comment
    return found


def commands(page: str, section: str = "") -> list[str]:
    """Return the commands of the shell blocks of a page, or below one of its headings."""
    return [line.command for line in shell_lines(page, section)]


def tree() -> Iterator[str]:
    """Return a line for each folder and top-level file of the package, from its docstring."""
    for path in sorted(PACKAGE.iterdir(), key=lambda path: (path.is_dir(), path.name)):
        source = path / "__init__.py" if path.is_dir() else path
        if source.suffix == ".py" and source.exists() and path.name != "__init__.py":
            text = (ast.get_docstring(ast.parse(source.read_text())) or "").partition("\n")[0]
            files = sorted(f.stem for f in path.glob("*.py") if f.stem != "__init__")
            name = path.name + "/" * path.is_dir()
            yield f"{name:12}  {text}".rstrip()
            yield from textwrap.wrap(", ".join(files), 100, **INDENT) if path.is_dir() else ()


INDENT = {"initial_indent": " " * 14, "subsequent_indent": " " * 14}


def check(page: str, made: str, pattern: str = "(.*)") -> None:
    """Compare the text between the groups of `pattern` in a page; replace it on request."""
    path = ROOT / page
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    found = re.search(pattern, text, flags=re.S)
    assert found, pattern
    if os.environ.get("ACCEL_GPT_DOCS") == "write":
        path.write_text(text[: found.start(1)] + made + text[found.end(1) :], encoding="utf-8")
    else:
        assert found[1] == made, "ACCEL_GPT_DOCS=write pytest tests/test_docs.py renews it"


def test_what_is_made_from_the_code_is_up_to_date() -> None:
    page = "docs/explanation/architecture.md"
    check(page, "".join(f"{line}\n" for line in tree()), r"<!-- tree -->\n```\n(.*?)```")
    for name, lines in reference.PAGES.items():
        check(name, "\n".join(lines()).rstrip() + "\n")
    interface = "\n".join(reference.python_section()).rstrip()
    parts = "\n".join(reference.parts_table())
    table = r"\| part \| constructor \| methods \|\n[|-]+\n(.*?)\n\n"
    check("docs/how-to/own-code.md", parts, table)
    check("docs/reference/python.md", interface, r"<!-- interface -->\n(.*?)\n<!-- end -->")


def first_cells(page: str) -> set[str]:
    """Return the code in the first column of the tables of a page."""
    rows = re.findall(r"^\| (`[^|]*) \|", (ROOT / page).read_text(encoding="utf-8"), flags=re.M)
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row)}


def test_every_metric_and_file_of_a_run_has_a_row(train_once: Callable[..., Path]) -> None:
    folder = train_once() / "run"
    page = first_cells("docs/reference/metrics.md")
    names = {*COLUMNS}.union(*RunFolder(folder).records())
    names = {re.sub("(?<=^train/update_ratio/)(?!least).*", "PART", name) for name in names}
    assert {re.sub("^eval/(val|train)_", "eval/SPLIT_", name) for name in names} <= page
    page = first_cells("docs/reference/run-folder.md")
    known = {re.sub(r"\d+|(?<=_)R(?=\.)", "N", name).rstrip("/") for name in page}
    checkpoint = RunFolder(folder).checkpoints.popitem()[1]
    names = {path.name for path in (*folder.iterdir(), *checkpoint.iterdir())}
    top = {name.partition("/")[0] for name in known}
    assert {re.sub(r"\d+", "N", name) for name in names} <= known | top


def test_every_exit_code_has_a_row() -> None:
    text = (ROOT / "docs/reference/exit-codes.md").read_text(encoding="utf-8")
    page = {int(code) for code in re.findall(r"^\| (\d+) \|", text, flags=re.M)}
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    codes = {kind.exit_code for kind in kinds if issubclass(kind, AccelGPTError)}
    assert page == codes | {0, 1, PREEMPTED, 130, 141}


CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


def planned(command: str) -> dict[str, Any]:
    """Return what `accel-gpt plan --json` prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert dispatch([*shlex.split(command)[1:], "--json"]) == 0
    report: dict[str, Any] = json.loads(printed.getvalue())
    return report


def estimate(command: str) -> str:
    """Return the memory and time that `accel-gpt plan` estimates, on one line."""
    report = planned(command)
    memory, hours = report["memory"], report["time"] and report["time"]["hours"]
    parts = [f"{memory['total_gb']:.1f} GB"]
    if memory["device_gb"]:
        parts[0] += f" of {memory['device_gb']:.0f}"
    if hours is not None:
        parts.append(format_clock(3600 * hours))
    return ", ".join(parts)


OWN_TEXT = "--data.train own --data.prepare.source own --data.prepare.tokenizer bpe"


def test_the_sizes_for_an_own_text_are_those_of_plan() -> None:
    """In the table of configs: parameters and memory; in that of GPUs: memory, time and cost."""
    page = (ROOT / "docs/get-started/one-rented-gpu.md").read_text(encoding="utf-8")
    gpu = f"{OWN_TEXT} --gpu 'rtx 4090'"
    rows = re.findall(r"\| `(\w+)` \| ([\d.]+) million \| a .*?(\d+ GB)? \|", page)
    shipped = {path.stem for path in CONFIGS}
    for config, parameters, memory in (row for row in rows if row[0] in shipped):
        report = planned(f"accel-gpt plan {config} {gpu}")
        assert f"{report['parameters']['total'] / 1e6:.{'.' in parameters:d}f}" == parameters
        needed = math.ceil(report["memory"]["total_gb"])
        assert not memory or needed == int(memory.removesuffix(" GB"))
    asked = commands("docs/get-started/one-rented-gpu.md", "3. Plan before you rent")[0]
    for name, gpu, price in (("RTX 4090", "rtx 4090", "0.50"), ("H100", "h100", "2.50")):
        command = asked.replace("'rtx 4090' --price 0.5", f"'{gpu}' --price {price}")
        report = planned(command.replace("--data.train data/notes", OWN_TEXT))
        memory, time = report["memory"], report["time"]
        minutes = 60 * time["hours"]
        shown = f"{minutes:.1f} minutes" if minutes >= 1 else f"{60 * minutes:.0f} seconds"
        gigabytes = f"{memory['total_gb']:.1f} of {memory['device_gb']:.0f} GB"
        assert f"| {name} | {gigabytes} | {shown} | {time['cost']:.2f}, if {price} |" in page


@pytest.mark.usefixtures("gpt2_shapes")
@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_the_estimates_in_a_config_are_up_to_date(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`#   accel-gpt plan ...  what it estimates`, aligned."""
    monkeypatch.chdir(tmp_path)
    text = path.read_text(encoding="utf-8")
    rows = re.findall(r"^#   (accel-gpt plan .*?)  +(.*)$", text, flags=re.M)
    assert rows
    width = max(len(command) for command, _ in rows)
    made = "\n".join(f"#   {command:{width}}   {estimate(command)}" for command, _ in rows)
    row = r"#   accel-gpt plan [^\n]*"
    check(f"configs/{path.name}", made, rf"({row}(?:\n{row})*)")


def test_the_plan_shown_is_the_one_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    plan = "configs/gpt2_124m.yaml --gpus 8 --gpu h100 --price 2.5"
    assert dispatch(["plan", *plan.split()]) == 0
    check(
        "docs/explanation/cost.md",
        capsys.readouterr().out.rstrip(),
        r"```\n(config +configs/gpt2_124m\.yaml.*?)\n```",
    )


def test_the_table_of_sizes_and_of_gpus_are_up_to_date(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    page = "docs/get-started/what-can-i-train.md"
    assert dispatch(["plan"]) == 0
    check(page, capsys.readouterr().out, r"<!-- sizes -->\n```\n(.*?)```\n<!-- end -->")
    check(page, gpu_table(), r"<!-- gpus -->\n(.*?)<!-- end -->")


def gpu_table() -> str:
    """Return the GPUs that `plan` knows, by their memory."""
    by_memory: dict[int, list[str]] = {}
    for name, device in DEVICES.items():
        for memory in device.memory_gb:
            by_memory.setdefault(memory, []).append(name)
    rows = [f"| {memory} GB | {', '.join(names)} |" for memory, names in sorted(by_memory.items())]
    return "\n".join(["| memory | `--gpu` |", "|---|---|", *rows, ""])


NUMBER = r"\d[\d,]*(?:\.\d+)?"
MEASURED = {  # a figure of a page -> a word that its paragraph or table of the results has
    rf"({NUMBER})(?: to ({NUMBER}))? \[?bits per byte": "bits per byte",
    rf"({NUMBER}) tokens/s": "tokens/s",
    rf"({NUMBER}) times nanoGPT's rate": "over nanoGPT's",
    rf"({NUMBER}) times its memory": "over nanoGPT's",
    rf"({NUMBER})% \[?MFU": "MFU",
}


def numbers(text: str) -> set[str]:
    """Return the numbers in a text, without commas."""
    return {number.replace(",", "") for number in re.findall(NUMBER, text)}


@pytest.mark.parametrize("page", PAGES)
def test_a_figure_that_was_measured_stands_in_the_results(page: str) -> None:
    """As exactly as the page says it: 549,000 may be 549,300 there, and 47 % a share of 0.474."""
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = (ROOT / RESULTS).read_text(encoding="utf-8").split("\n\n")
    for pattern, word in MEASURED.items():
        known = {float(one) for block in blocks if word in block for one in numbers(block)}
        for match in re.finditer(pattern, text):
            for figure in filter(None, match.groups()):
                assert is_among(figure.replace(",", ""), known, share=word == "MFU"), match[0]


def is_among(figure: str, known: set[float], share: bool) -> bool:
    """Return whether a number is the figure, rounded as the figure is; `share`: not in percent."""
    decimals = len(figure.partition(".")[2])
    zeros = 0 if decimals else len(figure) - len(figure.rstrip("0"))
    unit = 100 if share else 1
    return any(round(unit * one, decimals - zeros) == float(figure) for one in known)


def test_the_sizes_in_the_readme_are_those_of_plan(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    row = r"\| (.*), (\d+) (hours|minutes) \| `fast_124m` at depth (\d+) \| (\d+)M param"
    found = re.findall(row, text)
    assert found
    assert dispatch(["plan", "--json"]) == 0
    table = {row["depth"]: row for row in json.loads(capsys.readouterr().out)}
    gpus = {"a GPU with 8 GB": "rtx 4060", "an H100": "h100"}
    for machine, time, unit, depth, millions in found:
        row = table[int(depth)]
        hours = row["gpus"][gpus[machine]]["hours"]
        assert float(time) == pytest.approx(hours * (60 if unit == "minutes" else 1), rel=0.15)
        assert float(millions) == pytest.approx(row["parameters"] / 1e6, abs=0.5)


def anchors(page: Path) -> set[str]:
    """Return the anchors of the headings of a page on GitHub, and those that it sets."""
    text = page.read_text(encoding="utf-8")
    headings = re.findall(r"^#+ (?:<a .*?</a>)?(.*)$", text, flags=re.M)
    names = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return names | set(re.findall(r'<a id="(.*?)">', text))


@functools.cache
def names_of(command: str) -> set[str]:
    """Return the options of a command, with those of its config."""
    kind = options.COMMANDS[command]
    names = {name.removesuffix("_") for name in own_options(kind)} | {"help", "help-all"}
    if "config" in {field.name for field in dataclasses.fields(kind)}:
        names |= {*leaves(Config), "section.key"}
    if kind is options.InspectCommand:
        names |= {"data.tokenizer"}
    return names


@pytest.mark.parametrize("page", PAGES)
def test_what_is_named_exists(page: str) -> None:
    """Keys, options, links, tests (`tests/faults/test_x.py::test_y`, `tests/` or not) and files."""
    text, known = (ROOT / page).read_text(encoding="utf-8"), leaves(Config)
    sections = {key.partition(".")[0] for key in known if "." in key}
    for name in re.findall(rf"`((?:{'|'.join(sections)})\.[a-z_0-9.]+)", text):
        assert name in {*known, "data.prepare"} or name.endswith(FILES), name
    for command, given in re.findall(r"accel-gpt ([a-z-]+)([^`\n|]*)", text.replace("\\\n", " ")):
        for option in re.findall(r" --([a-z][\w.-]*)", given):
            assert option in names_of(command) or option.startswith("model.extra."), option
    for link, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)", text):
        target = (ROOT / page).parent.joinpath(link) if link else ROOT / page
        assert target.exists(), link
        assert not anchor or target.suffix != ".md" or anchor in anchors(target), anchor
    contents = []
    for file, test in re.findall(r"([\w/]*\btest_\w+\.py)(?:::(\w+))?", text):
        content = (ROOT / "tests" / file.removeprefix("tests/")).read_text()
        assert not test or f"\ndef {test}(" in content, test
        contents.append(content)
    for test in re.findall(r"`::(\w+)`", text):  # of a file that the page names
        assert any(f"\ndef {test}(" in content for content in contents), test
    for name in re.findall(r"`((?:benchmarks|configs|docs)/[\w./-]+)`", text):
        assert (ROOT / name).exists(), name
    linked = re.sub(r"\[[^]]*\]\([^)]*\)", "", text)
    assert not page.startswith("docs/") or "benchmarks/" not in linked, "link it"
    for name in re.findall(r"`(?:accel_gpt/)?([a-z_/]+\.py)`", text):
        places = (PACKAGE, ROOT / "benchmarks", ROOT / "tests", ROOT / "tests/faults", ROOT)
        ours = name in NOT_OURS or any((place / name).exists() for place in places)
        assert ours or page.endswith(FOREIGN_FILES), name


# --------------------------------------------------------------------------- commands parse

# other projects' programs: neither parsed nor run
OTHERS = ("cp", "mkdocs", "pip", "pytest", "python3", "tensorboard", ".", "")
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def parse_ours(words: Sequence[str]) -> None:
    """Parse a command line of accel-gpt; raises if an option does not exist."""
    options.COMMANDS[words[0]].parse(words[1:])


def parse_words(words: Sequence[str], marked: bool) -> None:
    """Parse a simple command; an unknown command must be marked with a requirement."""
    from accelerate.commands.launch import launch_command_parser

    program, *rest = words or [""]
    if program == "accel-gpt":
        parse_ours(rest)
    elif program == "accelerate" and rest[0] == "launch":
        launched = launch_command_parser().parse_args(rest[1:])
        assert not launched.config_file or (ROOT / launched.config_file).is_file()
        assert launched.training_script == "accel_gpt/train.py"
        parse_ours(["train", *launched.training_script_args])
    elif program == "sbatch":
        assert (ROOT / rest[0]).is_file()
        parse_ours(["train", *rest[1:]])
    elif program == "python" and rest[0] == "-c":
        compile(rest[1], "command", "exec")
    else:
        assert marked or program in OTHERS, f"{program} is not known; mark it as `# needs ...`"
    if program == "pip":
        asked = re.findall(r"\.\[(.*)\]", " ".join(rest))
        assert {name for names in asked for name in names.split(",")} <= EXTRAS.keys()


@pytest.mark.parametrize("page", FOLLOWED)
def test_every_command_parses(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Options and shipped configs must exist; models, runs and files need not."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "configs", "configs")
    Path("notes").mkdir()
    Path("notes/note.md").write_text("a note")
    for name in ("my.yaml", "runs/quickstart/config.yaml"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text("data: {train: data/own}\ntrain: {max_steps: 8}\n")
    monkeypatch.setattr(pretrained, "inherit", dict)
    for line in shell_lines(page):
        for words in line.simple_commands():
            try:
                parse_words(words, line.needs)
            except (AccelGPTError, AssertionError, KeyError, SystemExit) as error:
                pytest.fail(f"{page}: {line.command}\n{error!r}")


MANUALS = [  # not configs/cloud, whose commands are those of other tools
    path
    for folder in ("", "accelerate", "slurm")
    for path in sorted((ROOT / "configs" / folder).iterdir())
    if path.suffix in (".yaml", ".sbatch")
]


@pytest.mark.parametrize("path", MANUALS, ids=lambda path: path.stem)
def test_every_command_in_a_config_parses(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command is an indented line of a comment; three spaces separate an estimate."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(pretrained, "inherit", dict)
    text = path.read_text(encoding="utf-8").replace("\\\n#", " ")
    found = re.findall(
        r"^# {3,}((?:accel-gpt|accelerate|pip|sbatch|ACC\w+=true) .*)$", text, flags=re.M
    )
    assert found
    inline = re.findall(r"^#.* accel-gpt \w+ .*(?:--\w|/).*$", text, flags=re.M)
    assert [line for line in inline if line.lstrip("# ") not in found] == []
    for line in found:
        command = re.split(r" {3,}(?=\d)", line)[0].replace(" TEXT ", " README.md ")
        for words in Line(command, "").simple_commands():
            parse_words(words, marked=False)


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """Another folder, with only the configs."""
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    return tmp_path


def run(command: str, folder: Path) -> str:
    """Run a command; assert that it succeeds, and return its output."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, env={**os.environ, "PATH": path},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
def test_quickstart_reaches_what_the_readme_claims(elsewhere: Path) -> None:
    """All steps but the installation; 60 training steps, or three minutes if thorough."""
    *_, train, sample = commands("README.md", "Quickstart")[:4]
    fewer = "" if THOROUGH else " --train.max_steps 60"
    shown = run(train + fewer, elsewhere)
    assert "runs/quickstart" in shown
    last = json.loads((elsewhere / "runs/quickstart/metrics.jsonl").read_text().splitlines()[-1])
    assert last["eval/val_bits_per_byte"] <= (1.75 if THOROUGH else 3.5)  # the README says 1.57
    assert run(sample, elsewhere).count("def read(") >= 3  # the model may write one too


# --------------------------------------------------------------------------- commands run

TINY = {
    "data": {
        "train": "data/input",
        "prepare": {"source": "input.txt", "tokenizer": "bpe", "vocab_size": 300},
    },
    "model": {"n_layer": 1, "n_embd": 32},
    "train": {
        "budget": None,
        "max_steps": 12,
        "mixed_precision": "no",
        "compile": False,
    },
    "schedule": {"warmup_steps": 2},
    "eval": {"every": 4, "tokens": 4096},
    "sample": {"every": 0},
    "checkpoint": {"every": 4},
}
# steps and sizes in the pages, and in the tiny runs
SHORTER = {
    "--train.budget 3m": "--train.max_steps 12",
    "--vocab_size 4096": "--vocab_size 300",
}
NOT_RUN = {*OTHERS, "accelerate"}


def merged(one: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merge nested mappings; `over` overrides `one`."""
    nested = {k: merged(one.get(k, {}), v) for k, v in over.items() if isinstance(v, Mapping)}
    return {**one, **over, **nested}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that the pages assume: texts, and the finished run of a tiny quickstart."""
    folder = tmp_path_factory.mktemp("world")
    shutil.copytree(ROOT / "configs", folder / "configs")
    tiny = merged(yaml.safe_load((ROOT / "configs/quickstart.yaml").read_text()), TINY)
    for name in ("quickstart", "shakespeare_char", "shakespeare_char_cpu"):
        (folder / name).write_text(yaml.safe_dump(tiny))  # a path overrides a shipped name
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (folder / "input.txt").write_text(4 * text)
    for number in range(4):
        part = folder / "notes" / f"part{number}"
        part.mkdir(parents=True)
        (part / "note.md").write_text(text * (number + 1))
    run("accel-gpt train quickstart", folder)
    return folder


def can_run(line: Line) -> bool:
    """Return whether a test can run a line: it is not marked, and its program is allowed."""
    programs = {words[0] if words else "" for words in line.simple_commands()}
    return not line.needs and not programs & NOT_RUN


@pytest.mark.slow
def test_every_command_of_the_readme_runs(world: Path, tmp_path: Path) -> None:
    """In order, as written except for steps and sizes."""
    folder = tmp_path / "folder"
    shutil.copytree(world, folder)
    for command in (line.command for line in shell_lines("README.md") if can_run(line)):
        for long, short in SHORTER.items():
            command = command.replace(long, short)
        run(command, folder)
