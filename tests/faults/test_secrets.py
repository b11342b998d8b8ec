"""Secrets: no token of the environment, no password of a URL where others can read it."""

import glob
import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from accel_gpt import cli
from accel_gpt.config.data import DataConfig, PrepareConfig
from accel_gpt.config.experiment import Config
from accel_gpt.console import visible
from accel_gpt.data.sources import open_data
from accel_gpt.data.tokenizer import BytesTokenizer
from accel_gpt.errors import DataError
from accel_gpt.hub import export as exporting
from accel_gpt.hub.pretrained import Pretrained
from accel_gpt.model.gpt import GPT
from accel_gpt.training import setup
from tests.conftest import launch, run_here, tiny
from tests.hub_server import HubServer, environment, no_waiting, point_at

Arguments = Callable[..., list[str]]
REPO = "tester/tiny"
TOKEN, KEY = "hf_CANARY" + "x" * 25, "WANDBCANARY" + "y" * 29
PASSWORD = "S3CRETPASSWORD"
CONTROLS = "a\x1b]0;x\x07b\x7f\x9b\u202e"  # what a terminal would obey
SHORT = ["--train.max_steps", "2", "--eval.every", "0", "--sample.every", "0"]
SHORT += ["--schedule.warmup_steps", "0"]


def holding(folder: Path, *secrets: str) -> list[Path]:
    """Files that hold any of the secrets."""
    found = (path for path in folder.rglob("*") if path.is_file())
    return [p for p in found if any(secret.encode() in p.read_bytes() for secret in secrets)]


@pytest.mark.slow
def test_tokens_of_the_environment_reach_no_file_log_upload_or_command_line(
    small_run: Arguments, tmp_path: Path
) -> None:
    root = Path(__file__).resolve().parents[2]
    asked = small_run(*SHORT, "--hub.repo_id", REPO, "--hub.push", "end", "--hub.include_state")
    command = [sys.executable, str(root / "accel_gpt" / "train.py"), *asked]
    shown: list[str] = []
    over = threading.Event()

    def watch() -> None:
        """Look at the command lines of all processes, again and again."""
        while not over.wait(0.1):
            for place in glob.glob("/proc/[0-9]*/cmdline"):
                try:
                    words = Path(place).read_bytes().decode(errors="replace")
                except OSError:
                    continue
                shown.append(words) if "accel_gpt" in words and str(tmp_path) in words else None

    with HubServer() as hub:
        hub.token = TOKEN
        hub.fail_next(401, 1, "/commit/", X_Error_Message=f"{TOKEN} is wrong")
        seen = {**os.environ, **environment(hub, tmp_path / "home"), "WANDB_API_KEY": KEY}
        watching = threading.Thread(target=watch, daemon=True)
        watching.start()
        runs = [
            subprocess.run(
                command, cwd=tmp_path, env=seen, capture_output=True, text=True, check=False
            )
            for _ in range(2)  # the upload of the first is refused and retried
        ]
        over.set()
        watching.join()
        told = "".join(done.stdout + done.stderr for done in runs)
        assert "it does not know you" in told
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


def test_a_token_that_the_hub_echoes_is_not_told(
    small_run: Arguments,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert launch(small_run(*SHORT)) == 0
    with HubServer() as hub:
        hub.token = TOKEN
        point_at(monkeypatch, hub, tmp_path / "home")
        no_waiting(monkeypatch)
        for status in (401, 403, 400):
            hub.fail_next(status, 1, "/repos/create", X_Error_Message=f"{TOKEN} is wrong")
            assert run_here(cli.dispatch, ["push", str(tmp_path / "run"), "--repo", REPO]) == 2
    assert TOKEN not in "".join(capfd.readouterr())


def test_the_record_of_a_launch_holds_no_password(
    small_run: Arguments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = small_run(*SHORT, "--data.prepare.path", f"https://user:{PASSWORD}@host/x?k={PASSWORD}")
    monkeypatch.setattr(sys, "argv", ["/opt/accel-gpt", "train", *words])
    assert launch(words) == 0
    record = (tmp_path / "run" / "run.json").read_text()
    assert PASSWORD not in record
    assert "accel-gpt train" in record
    assert "https://***@host/x?***" in record


def test_what_makes_the_data_is_not_told_on_a_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []
    start = subprocess.Popen

    def noted(command: list[str], **given: Any) -> Any:
        commands.append(command)
        return start(command, **given)

    monkeypatch.setattr(subprocess, "Popen", noted)
    text = tmp_path / f"{PASSWORD} \u00e9\U0001f600.txt"
    text.write_text("the king of the sea " * 200)
    asked = PrepareConfig(source="text", path=str(text), tokenizer="bytes", workers=1)
    data = DataConfig(train=str(tmp_path / "made"), prepare=asked)
    setup.ensure_data(replace(Config(), data=data))
    assert (tmp_path / "made" / "dataset.json").is_file()
    assert PASSWORD not in str(commands)


def test_preparing_from_a_url_keeps_and_tells_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text("the king of the sea " * 200)

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given, directory=str(tmp_path))

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as served:
        threading.Thread(target=served.serve_forever, daemon=True).start()
        place = f"http://127.0.0.1:{served.server_port}"
        words = ["prepare", "--tokenizer", "bytes", "--workers", "1", "--out", str(tmp_path / "o")]
        for number, code in ((0, 0), (0, 0), (1, 2)):  # of another query is another text
            url = f"{place}/text.txt?token={PASSWORD}{number}"
            assert run_here(cli.dispatch, [*words, "--path", url]) == code
        index = tmp_path / "o" / "dataset.json"
        made = json.loads(index.read_text())
        assert not holding(tmp_path / "o", PASSWORD)
        assert made["prepared"]["path"].startswith(f"{place}/text.txt?sha256=")
        made["prepared"]["path"] = f"{place}/text.txt?token={PASSWORD}0"  # as once written
        index.write_text(json.dumps(made))
        assert run_here(cli.dispatch, [*words, "--path", made["prepared"]["path"]]) == 0
        words[-1] += "ther"
        missing = f"{place.replace('//', f'//user:{PASSWORD}@')}/no.txt?k={PASSWORD}"
        assert run_here(cli.dispatch, [*words, "--path", missing]) == 2
        served.shutdown()
    told = "".join(capsys.readouterr())
    assert "already prepared" in told
    assert "could not be downloaded" in told
    assert PASSWORD not in told


@pytest.mark.parametrize("reached", [True, False])
def test_what_an_export_was_compared_on_is_described_without_secrets(
    reached: bool, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"https://user:{PASSWORD}@host/corpus?sig={PASSWORD}"

    def opened(path: str, *rest: Any) -> Any:
        if reached:
            return open_data(str(corpus), *rest)
        raise DataError(f"{path} cannot be reached; try again")

    monkeypatch.setattr(exporting, "val_path", lambda _: url)
    monkeypatch.setattr(exporting, "open_data", opened)
    pretrained = Pretrained("x", Path(), is_checkpoint=True)
    found = exporting.compared_tokens(GPT(tiny(), 257), BytesTokenizer(), pretrained)[1]
    assert "https://***@host/corpus?***" in found
    assert PASSWORD not in found


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
    assert piped.startswith(CONTROLS)  # to a file goes what the model wrote
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert run_here(cli.dispatch, words) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(r"a\x1b]0;x\x07b\x7f\x9b\u202e")
    assert not {*shown} & ({*map(chr, range(32)), "\x7f", "\x9b", "\u202e"} - {*"\n\t\r"})
    assert shown == visible(piped, sys.stdout)
