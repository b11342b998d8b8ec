"""Access tokens of the environment reach no file, log, upload or command line."""

import glob
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from accel_gpt import cli
from accel_gpt.console import printable
from tests.conftest import launch, run_here
from tests.helpers.hub_server import HubServer, environment

Arguments = Callable[..., list[str]]
REPO = "tester/tiny"
TOKEN, KEY = "hf_CANARY" + "x" * 25, "WANDBCANARY" + "y" * 29
CONTROLS = "a\x1b]0;x\x07b\x7f\x9b"  # control characters of a terminal
SHORT = ["--train.max_steps", "2", "--eval.every", "0", "--sample.every", "0"]
SHORT += ["--schedule.warmup_steps", "0"]


def holding(folder: Path, *secrets: str) -> list[Path]:
    """Return the files that hold any of the secrets."""
    found = (path for path in folder.rglob("*") if path.is_file())
    return [p for p in found if any(secret.encode() in p.read_bytes() for secret in secrets)]


@pytest.mark.slow
def test_tokens_of_the_environment_reach_no_file_log_upload_or_command_line(
    small_run: Arguments, tmp_path: Path
) -> None:
    root = Path(__file__).resolve().parents[2]
    asked = small_run(*SHORT, "--hub.repo_id", REPO, "--hub.push", "every_checkpoint")
    asked += ["--checkpoint.every", "1"]
    command = [sys.executable, str(root / "accel_gpt" / "train.py"), *asked]
    shown: list[str] = []
    over = threading.Event()

    def watch() -> None:
        """Poll the command lines of all processes."""
        while not over.wait(0.1):
            for place in glob.glob("/proc/[0-9]*/cmdline"):
                try:
                    words = Path(place).read_bytes().decode(errors="replace")
                except OSError:
                    continue
                shown.append(words) if "accel_gpt" in words and str(tmp_path) in words else None

    with HubServer() as hub:
        hub.token = TOKEN
        hub.fail_next(401, 1, "/commit/")
        seen = {**os.environ, **environment(hub, tmp_path / "home"), "WANDB_API_KEY": KEY}
        watching = threading.Thread(target=watch, daemon=True)
        watching.start()
        done = subprocess.run(  # the first upload is refused, and the next checkpoint uploaded
            command, cwd=tmp_path, env=seen, capture_output=True, text=True, check=False
        )
        over.set()
        watching.join()
        told = done.stdout + done.stderr
        assert "the Hub answered with status 401" in told
        assert hub.tags(REPO).keys() == {"step-2"}, told
        for name, content in hub.files(REPO).items():
            assert TOKEN.encode() not in content, name
            assert KEY.encode() not in content, name
    assert TOKEN not in told
    assert KEY not in told
    assert not holding(tmp_path / "run", TOKEN, KEY)
    assert not holding(tmp_path / "home", TOKEN, KEY)
    uploads = [words for words in shown if "\0push\0" in words]
    assert uploads, "the upload was seen"
    assert not any(TOKEN in words or KEY in words for words in shown)


def test_a_terminal_obeys_no_text_of_a_model(
    trained: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A prompt or a model that writes ESC or BEL could retitle a terminal, or type into it."""
    words = ["sample", str(trained(*SHORT)), "--prompt", CONTROLS]
    words += ["--max_new_tokens", "200", "--temperature", "2", "--top_k", "null"]
    assert run_here(cli.dispatch, words) == 0
    piped = capsys.readouterr().out
    assert piped.startswith(CONTROLS)  # a file gets what the model wrote
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert run_here(cli.dispatch, words) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(r"a\x1b]0;x\x07b\x7f\x9b")
    assert not {*shown} & ({*map(chr, range(32)), "\x7f", "\x9b"} - {*"\n\t\r"})
    assert shown == printable(piped)


def test_samples_of_a_training_are_escaped_on_the_terminal(
    small_run: Arguments, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*SHORT, "--sample.every", "2", "--sample.prompts", r'["a\x1b[2J\rb"]']
    assert launch(small_run(*words)) == 0
    assert "a\x1b[2J\rb" in (tmp_path / "run/samples/step_00000002.txt").read_bytes().decode()
    told = capsys.readouterr().err
    assert r"a\x1b[2J\rb" in told
    assert "\x1b" not in told
