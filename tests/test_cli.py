"""The commands as a user types them, and their output."""

import io
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from accel_gpt import __version__
from accel_gpt.cli import dispatch
from accel_gpt.commands.options import COMMANDS
from accel_gpt.console import run_main, write_err, write_out
from accel_gpt.errors import UserError
from tests.conftest import run_here

Arguments = Callable[..., list[str]]


def call(*words: str) -> int:
    return run_here(dispatch, words)


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["train", "quickstart", "--out_dir", "runs/PLACE"], "out_dir is runs/"),
        (["train", "quickstart", "--data.train", "PLACE"], "data.train is "),
        (["prepare", "PLACE"], "SOURCE is "),
        (["prepare", "text.txt", "--out", "PLACE", "--tokenizer", "bytes"], "--out is "),
        (["sample", "PLACE"], "RUN is "),
    ],
)
def test_a_path_that_is_not_utf8_is_refused_before_anything_is_made(
    words: list[str],
    key: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    place = os.fsdecode(b"caf\xe9")
    Path(place).write_text("the king of the sea " * 200)
    Path("text.txt").write_text("the king of the sea " * 200)
    assert call(*(word.replace("PLACE", place) for word in words)) == 2
    error = capsys.readouterr().err
    assert key in error
    assert "caf\\xe9, but must be UTF-8; rename the file or folder\n" in error
    assert error.count("\n") == 1
    assert sorted(os.listdir()) == [place, "text.txt"]


def test_python_m_is_the_command_and_takes_no_module_of_the_working_folder(tmp_path: Path) -> None:
    for name in ("accel_gpt/cli.py", "random.py", "tempfile.py", "tokenizers.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("raise SystemExit('executed')")
    command = [sys.executable, "-m", "accel_gpt", "--version"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == (f"accel-gpt {__version__}\n", "")


def test_closed_streams_lead_nowhere(tmp_path: Path) -> None:
    """`2>&-`: neither the next opened file nor an error takes the place of a stream."""
    program = (
        "import sys, accel_gpt.console as e\n"
        "def main(argv):\n"
        "    print(1, file=sys.stderr), print(2, flush=True)\n"
        "    return open(argv[0], 'w').fileno()\n"
        "sys.exit(e.run_main(main, sys.argv[1:]))\n"
    )
    closed = "import os, sys; os.closerange(1, 3); os.execv(sys.executable, sys.argv[1:])"
    words = [sys.executable, "-c", program, str(tmp_path / "file")]
    done = subprocess.run([sys.executable, "-c", closed, *words], check=False)
    assert done.returncode > 2
    assert (tmp_path / "file").read_text() == ""


@pytest.mark.parametrize(
    ("encoding", "shown"),
    [
        ("latin-1", "\xe9 \\u2615 \\udc80"),
        ("ascii", "\\xe9 \\u2615 \\udc80"),
        ("utf-8", "\xe9 \N{HOT BEVERAGE} \\udc80"),
    ],
)
def test_a_stream_escapes_what_its_encoding_lacks(
    encoding: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = [io.TextIOWrapper(io.BytesIO(), encoding, errors="strict") for _ in range(2)]

    def main(_: object) -> int:
        write_out("\xe9 \N{HOT BEVERAGE} \udc80")
        write_err("\xe9 \N{HOT BEVERAGE} \udc80")
        return 0

    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", streams[0])
        patch.setattr(sys, "stderr", streams[1])
        assert run_main(main, []) == 0
    for stream in streams:
        stream.flush()
        assert stream.buffer.getvalue().decode(encoding).strip() == shown  # type: ignore[attr-defined]


def test_the_launcher_prints_the_sentence_last(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def main(_: object) -> int:
        raise UserError("optim.lr is -1")

    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    assert run_main(main, []) == 2
    other = ProcessFailure(0, 1, 2, str(tmp_path / "none.json"))
    own = ProcessFailure(1, 2, 2, str(tmp_path / "error.json"))
    *_, line, border = str(ChildFailedError("train.py", {0: other, 1: own})).splitlines()
    assert line.endswith(capsys.readouterr().err.strip())
    assert set(border) == {"="}


@pytest.mark.parametrize("name", COMMANDS)
def test_help_lists_the_options_of_its_examples(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Except --section.key, which `accel-gpt train --help-all` lists."""
    with pytest.raises(SystemExit):
        call(name, "--help")
    examples, _, listed = capsys.readouterr().out.partition("Examples:")[2].partition("\n\n")
    for option in re.findall(r"--\w+(?![\w.])", examples):
        assert f"\n  {option} " in listed, option


def test_help_is_a_command_too(capsys: pytest.CaptureFixture[str]) -> None:
    shown = []
    for words in (["help"], ["--help"], ["help", "plan"], ["plan", "--help"]):
        with pytest.raises(SystemExit) as stopped:
            sys.exit(dispatch(words))
        assert not stopped.value.code
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1] != shown[2] == shown[3]
