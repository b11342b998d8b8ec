"""Golden texts: help, config keys, errors, exit codes, files and their keys.

The expected text is in `tests/golden/`. To accept a change, write it again and read the
diff: `ACCEL_GPT_GOLDEN=write pytest tests/test_golden.py`. `errors.txt` is written by hand.
"""

import contextlib
import fcntl
import hashlib
import io
import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from accel_gpt import cli
from accel_gpt.commands import train as command
from accel_gpt.commands.options import COMMANDS
from accel_gpt.commands.resolve import load_config
from accel_gpt.config.parse import read_given
from accel_gpt.config.values import to_plain
from accel_gpt.health.text import STATISTICS
from tests.conftest import text_of
from tests.helpers.hermetic import kept_settings

ROOT = Path(__file__).resolve().parents[1]
GOLDEN = ROOT / "tests" / "golden"


def check(name: str, lines: list[str]) -> None:
    """Compare `lines` with the stored file, or write it."""
    path, text = GOLDEN / name, "\n".join(lines).strip() + "\n"
    if os.environ.get("ACCEL_GPT_GOLDEN") == "write":
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert text.splitlines() == path.read_text(encoding="utf-8").splitlines(), f"{path} differs"


def call(*words: str) -> int:
    """Run `accel-gpt WORDS` in this process; return the exit code."""
    with kept_settings(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["accel-gpt", *words])
        with pytest.raises(SystemExit) as end:
            cli.main()
    return int(end.value.code or 0)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data and a run, damaged copies of them, and the files of `golden/room`."""
    room = tmp_path_factory.mktemp("room")
    (room / "text.txt").write_text(text_of(5000))
    (room / "empty").mkdir()
    with contextlib.chdir(room):
        for kind in ("bytes", "chars", "bpe"):
            words = ["prepare", "text.txt", "--tokenizer", kind, "--out", kind]
            words += ["--vocab-size", "300"] if kind == "bpe" else []
            assert call(*words, "--shard-tokens", "7000") == 0
        assert call("train", str(GOLDEN / "room" / "small.yaml")) == 0
    for data in ("cut", "not_json", "newer", "gone", "other_tokenizer"):
        shutil.copytree(room / "bytes", room / data, dirs_exist_ok=True)
    for run in ("damaged", "newer_run", "evaluated"):
        shutil.copytree(room / "run", room / run, dirs_exist_ok=True)
    shutil.copytree(GOLDEN / "room", room, dirs_exist_ok=True)
    (room / "gone" / "val_000000.npy").unlink()
    return room


@pytest.fixture
def room(made: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Make `made` the current folder, with a run that another process is writing."""
    monkeypatch.chdir(made)
    monkeypatch.setenv("COLUMNS", "100")
    with open("busy/.lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield made


def shown_help(*words: str) -> list[str]:
    with contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO(), "utf-8")) as out:
        assert call(*words, "--help") == 0
        out.seek(0)
        return out.read().splitlines()


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help(command: str, room: Path) -> None:
    check(f"help/{command or 'accel-gpt'}.txt", shown_help(*command.split()))


def test_help_of_train_py(room: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "main", lambda: command.main(sys.argv[1:]))
    first, *rest = shown_help()
    assert first == "usage: train.py CONFIG [--option value ...]"
    check("help/train.txt", ["usage: accel-gpt train CONFIG [--option value ...]", *rest])


def flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Flatten a config to dotted keys, with YAML values."""
    if not isinstance(value, dict):
        return {prefix: value}
    parts = (flat(part, f"{prefix}.{key}".strip(".")) for key, part in value.items())
    return {key: part for found in parts for key, part in found.items()}


def resolved(*words: str) -> dict[str, Any]:
    config = to_plain(load_config(words, "accel-gpt train"))
    return flat(json.loads(json.dumps(config)))


def kind_of(key: str) -> str:
    """Return the kind of values of a key, from the error for a wrong value."""
    found = []
    for value in ("[[1.5]]", "null"):
        try:
            accepted = read_given(["empty.yaml", f"--{key}={value}"], "")[key]
            found.append("null" if accepted is None else "text")
        except ValueError as error:
            expected = str(error).partition("; ")[2].removeprefix("expected ")
            if value == "null":  # the error names all kinds
                found.clear()
            found.append(expected.removesuffix(" or null"))
    return " or ".join(dict.fromkeys(found))


@pytest.mark.usefixtures("gpt2_shapes")
def test_config_keys(room: Path) -> None:
    """Each key with its default and kind; for shipped configs the keys that differ."""
    defaults = resolved("empty.yaml")
    lines = [f"{key}: {json.dumps(value)} ({kind_of(key)})" for key, value in defaults.items()]
    for path in sorted((ROOT / "configs").glob("*.yaml")):
        values = resolved(str(path)).items()
        lines += [
            "",
            path.name,
            *(f"{k}: {json.dumps(v)}" for k, v in values if defaults.get(k, ...) != v),
        ]
    check("config.txt", lines)


def told_by(command: str, room: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[str]]:
    """Return the exit code of a command line, and its errors."""
    capsys.readouterr()
    code = call(*shlex.split(command))
    told = capsys.readouterr().err.replace(str(room), "ROOM").splitlines()
    return code, [line for line in told if "error" in line]


def mistakes() -> list[str]:
    lines = (GOLDEN / "errors.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


@pytest.mark.parametrize("mistake", mistakes())
def test_errors(mistake: str, room: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A mistake has its exit code, and one sentence that names what is wrong."""
    expected, name, command = mistake.split(maxsplit=2)
    code, errors = told_by(command, room, capsys)
    assert code == int(expected), errors
    if name == "-":
        assert not errors
    else:
        assert any(name in line for line in errors), errors


def test_sentences(room: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Compare a few errors as a whole: examples of how they read."""
    lines: list[str] = []
    for case in (GOLDEN / "sentences.txt").read_text(encoding="utf-8").splitlines():
        if case.startswith("$ accel-gpt "):
            lines += [case, *told_by(case.removeprefix("$ accel-gpt "), room, capsys)[1], ""]
    check("sentences.txt", lines)


@pytest.mark.parametrize("kind", ["bytes", "chars", "bpe"])
def test_prepared_folder(kind: str, room: Path) -> None:
    files = sorted(path for path in Path(kind).iterdir() if path.name != STATISTICS)
    content = {path.name: path.read_bytes() for path in files}
    index = json.dumps(json.loads(content.pop("dataset.json")), indent=1)
    sums = [f"{name} {hashlib.sha256(content[name]).hexdigest()}" for name in content]
    check(f"prepared_{kind}.txt", [*sums, *index.splitlines()])


def keys(value: Any, prefix: str = "") -> set[str]:
    """Return the dotted keys of a JSON value; elements of a list are merged."""
    if isinstance(value, list):
        return {prefix}.union(*(keys(part, f"{prefix}[]") for part in value if part))
    if not isinstance(value, dict) or prefix.endswith(".versions"):  # depends on the installation
        return {prefix}
    return set().union(*(keys(part, f"{prefix}.{key}") for key, part in value.items()))


def test_files_of_a_run(room: Path) -> None:
    """Compare names, keys of JSON files, tensors, and the metrics of each record."""
    paths = sorted(path for path in Path("run").rglob("*") if path.is_file())
    lines = [re.sub(r"(tfevents).*", r"\1", str(path)) for path in paths]
    for path in paths:
        ours = path.suffix == ".json" and path.name != "tokenizer.json"
        if ours and "step_00000002" not in path.parts:
            lines += ["", *sorted(keys(json.loads(path.read_text()), path.name))]
    header = Path("run/checkpoints/step_00000004/model.safetensors").read_bytes()
    tensors = json.loads(header[8 : 8 + int.from_bytes(header[:8], "little")])
    lines += ["", *(f"{k} {v.get('dtype')} {v.get('shape')}" for k, v in sorted(tensors.items()))]
    lines += ["", *Path("run/metrics.csv").read_text().splitlines()[0].split(",")]
    for record in map(json.loads, Path("run/metrics.jsonl").read_text().splitlines()):
        known = sorted(record.keys() - {"perf/mfu"})  # only recorded if the device's peak is known
        lines += ["", f"metrics of step {record['step']}", *known]
    check("run.txt", lines)


REPORTS = ("inspect bytes", "inspect run", "plan small.yaml", "evaluate evaluated")


@pytest.mark.parametrize("command", REPORTS)
def test_json_reports(command: str, room: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(*command.split(), "--json") == 0
    found = keys(json.loads(capsys.readouterr().out))
    check(f"json/{command.replace(' ', '_')}.txt", sorted(found))
