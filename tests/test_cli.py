"""The commands as a user types them, and what they say."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from accel_gpt.cli import COMMANDS, dispatch
from accel_gpt.console import run_main
from accel_gpt.errors import UserError
from tests.conftest import run_here

Arguments = Callable[..., list[str]]


def call(*words: str) -> int:
    return run_here(dispatch, words)


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert call() == call("--help") == 0
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown for name in COMMANDS)


@pytest.mark.parametrize("command", list(COMMANDS))
def test_each_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        call(command, "--help")
    assert not stopped.value.code
    assert f"usage: accel-gpt {command}" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--version") == 0
    assert capsys.readouterr().out.startswith("accel-gpt 0.")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["smple"], "unknown command 'smple'; did you mean sample?"),
        (["sample"], "RUN missing; see --help"),
        (["sample", "x", "--temprature", "1"], "did you mean temperature?"),
        (["sample", "./nowhere"], "./nowhere is neither a folder nor a repository on the Hub"),
        (
            ["sample", "x", "--temperature", "-1"],
            "sample.temperature is -1.0; it must be 0 or more",
        ),
        (["sample", "x", "--top-p", "0"], "sample.top_p is 0.0; it must lie in (0, 1]"),
        (["evaluate", "x", "--tokens", "²"], "--tokens is ²; expected a whole number above 0"),
        (["sample", "x", "y"], "unexpected argument 'y'"),
        (["prepare", "--path", "nowhere.txt", "--out", "o"], "nowhere.txt"),
        (["prepare", "--tokenizer", "bpe", "--vocab-size", "12"], "vocab_size is 12"),
        (
            ["prepare", "--source", "stdlib", "--path", "x.txt"],
            "source is stdlib but x.txt is given",
        ),
        (["verify-resume", "--steps", "1", "x.yaml"], "steps is 1; it must be 2 or more"),
        (["verify-resume", "nowhere.yaml"], "config file nowhere.yaml does not exist"),
        (["train"], "no config file given"),
        (["train", "nowhere.yaml"], "config file nowhere.yaml does not exist"),
        (["train", "quickstart", "--out_dir", " "], "out_dir is ' '; name the run's folder"),
    ],
)
def test_mistake_is_one_sentence_and_exit_code_2(
    words: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert call(*words) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1
    assert not list(tmp_path.glob("o*"))


def test_closed_streams_lead_nowhere(tmp_path: Path) -> None:
    """`2>&-`: neither the next file that is opened nor an error is mistaken for one of them."""
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


@pytest.mark.slow
def test_prepare_train_and_sample_from_another_folder(
    tmp_path: Path, small_run: Arguments, capsys: pytest.CaptureFixture[str]
) -> None:
    """The three commands in a row, each in a process of its own."""
    words = [sys.executable, "-m", "accel_gpt.cli"]

    def step(*arguments: str) -> str:
        done = subprocess.run(
            [*words, *arguments], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    text = tmp_path / "text.txt"
    step("prepare", "--path", str(text), "--tokenizer", "bytes", "--out", "mine")
    step("train", *small_run("--data.train", "mine", "--out_dir", "here"))
    options = ["--prompt", "the ", "--num", "2", "--max-new-tokens", "8", "--seed", "3"]
    first = step("sample", "here", *options)
    assert first == step("sample", "here", *options)
    assert first.count("the ") >= 2
    here = str(tmp_path / "here")
    greedy = []
    for seed in ("1", "2"):
        assert call("sample", here, "--temperature", "0", "--seed", seed) == 0
        greedy.append(capsys.readouterr().out)
    assert greedy[0] == greedy[1]


def test_a_sentence_keeps_its_beginning_and_end(capsys: pytest.CaptureFixture[str]) -> None:
    def main(_: object) -> int:
        raise UserError(f"a value is {'x' * 9000}; expected another")

    assert run_main(main, []) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: a value is xxx")
    assert told.endswith("xxx; expected another\n")
    assert len(told) < 1600
