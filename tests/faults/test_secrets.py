"""Access tokens of the environment reach no file, log, upload or command line."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from accel_gpt import cli
from accel_gpt.console import printable
from accel_gpt.publish import uploader
from accel_gpt.runs.folder import PROMPT_END
from tests.conftest import launch, run_here
from tests.helpers.hub_server import HubServer, point_at

Arguments = Callable[..., list[str]]
REPO = "tester/tiny"
TOKEN, KEY = "hf_CANARY" + "x" * 25, "WANDBCANARY" + "y" * 29
CONTROLS = "a\x1b]0;x\x07b\x7f\x9b"  # control characters of a terminal
SHORT = ["--train.max_steps", "2", "--eval.every", "0", "--sample.every", "0"]
SHORT += ["--schedule.warmup_steps", "0"]


def holding(folder: Path, secret: str) -> list[Path]:
    """Return the files that hold the secret."""
    found = (path for path in folder.rglob("*") if path.is_file())
    return [path for path in found if secret.encode() in path.read_bytes()]


@pytest.mark.slow
@pytest.mark.usefixtures("in_this_process")
def test_tokens_of_the_environment_reach_no_file_log_upload_or_command_line(
    small_run: Arguments,
    uploads_in_turn: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The first upload is refused, and the checkpoint after it is uploaded."""
    words: list[str] = []
    start = uploader.launch_child

    def launch_child(argv: Sequence[str], **options: Any) -> Any:
        words.extend([options["module"], *argv])
        return start(argv, **options)

    monkeypatch.setattr(uploader, "launch_child", launch_child)
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    with HubServer() as hub:
        hub.token = TOKEN
        hub.fail_next(401, 1, "/commit/")
        point_at(monkeypatch, hub, tmp_path / "home")
        asked = small_run(*SHORT, "--hub.repo_id", REPO, "--hub.push", "every_checkpoint")
        assert launch([*asked, "--checkpoint.every", "1"]) == 0
        told = "".join(capfd.readouterr())
        assert "the Hub answered with status 401" in told
        assert hub.tags(REPO).keys() == {"step-2"}, told
        uploaded = b"".join(hub.files(REPO).values())
    assert "accel_gpt.publish.push" in words
    for secret in (TOKEN, KEY):
        assert secret.encode() not in uploaded
        assert secret not in told + " ".join(words)
        assert not holding(tmp_path / "run", secret)
        assert not holding(tmp_path / "home", secret)


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
    prompt = r"a\x1b]0;x\x07b\x7f\x9b"
    assert shown.startswith(prompt + PROMPT_END)
    assert not {*shown} & ({*map(chr, range(32)), "\x7f", "\x9b"} - {*"\n\t\r"})
    assert shown.replace(PROMPT_END, "", 1) == printable(piped)


def test_samples_of_a_training_are_escaped_on_the_terminal(
    small_run: Arguments, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*SHORT, "--sample.every", "2", "--sample.prompts", r'["a\x1b[2J\rb"]']
    assert launch(small_run(*words)) == 0
    assert "a\x1b[2J\rb" in (tmp_path / "run/samples/step_00000002.txt").read_bytes().decode()
    told = capsys.readouterr().err
    assert r"a\x1b[2J\rb" + PROMPT_END in told
    assert "\x1b" not in told
