"""Push with the real client to a Hub on the loopback address."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import HfApi

import accel_gpt
from accel_gpt import cli
from accel_gpt.config.experiment import CheckpointConfig, Config, HubConfig
from accel_gpt.config.values import leaves
from accel_gpt.publish import uploader
from accel_gpt.transformers_io.load import load_pretrained
from tests.conftest import launch, run_here, thorough
from tests.helpers.hub_server import HubServer, environment, no_waiting, point_at
from tests.test_train import assert_same_weights, records

Arguments = Callable[..., list[str]]
Trained = Callable[..., Path]
REPO = "tester/tiny"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A Hub for this process and its children."""
    with HubServer() as server:
        point_at(monkeypatch, server, tmp_path / "home")
        no_waiting(monkeypatch)
        yield server


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the slow comparison (see `test_export.py`) and plot (see `test_card.py`)."""
    same = {"difference": 0.0, "transformers": "5"}
    monkeypatch.setattr("accel_gpt.transformers_io.export.prove_equal", lambda *_: same)
    plot = "accel_gpt.publish.model_card.loss_curves"
    monkeypatch.setattr(plot, lambda _, path: path.write_bytes(b"a plot"))


@pytest.fixture
def run(trained: Trained) -> Path:
    """A run with checkpoints of steps 4 and 8."""
    return trained("--train.max_steps", "8", "--log.trackers", "tensorboard")


def push(run: Path, *options: str) -> int:
    return run_here(cli.dispatch, ["push", str(run), "--repo", REPO, *options])


@pytest.mark.usefixtures("compared")
def test_a_push_holds_everything_and_a_later_one_sends_what_changed_or_nothing(
    run: Path,
    hub: HubServer,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert push(run, "--private", "--license", "mit") == 0
    assert f"{hub.url}/{REPO}/tree/step-8" in capsys.readouterr().out
    files = hub.files(REPO)
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md", "loss.png"} <= set(
        files
    )
    assert len(files["metrics.jsonl"].splitlines()) == 8
    assert b"license: mit\n" in files["README.md"]
    assert hub.repos[REPO].private
    assert hub.tags(REPO).keys() == {"step-8"}
    ours, again = load_pretrained(str(run))[0], load_pretrained(f"hf://{REPO}@step-8")[0]
    tokens = torch.randint(257, (2, 32))
    assert torch.equal(ours(tokens), again(tokens))

    sent, commits = len(hub.lfs_uploads), hub.commits(REPO)
    assert push(run, "--license", "mit") == 0
    assert len(hub.lfs_uploads) == sent
    assert hub.commits(REPO) == commits
    assert accel_gpt.Run(run).push_to_hub(REPO, license="mit") == f"{hub.url}/{REPO}/tree/step-8"
    assert not list((run / "checkpoints").glob(".push_*"))


@pytest.mark.usefixtures("compared")
def test_a_push_removes_the_weights_of_an_earlier_one_and_nothing_else(
    run: Path, hub: HubServer
) -> None:
    api = HfApi()
    api.create_repo(REPO)
    for name in ("model-00001-of-00002.safetensors", "notes.md"):
        api.upload_file(path_or_fileobj=b"of before", path_in_repo=name, repo_id=REPO)
    assert push(run) == 0
    files = hub.files(REPO)
    assert "notes.md" in files
    assert [name for name in files if name.endswith(".safetensors")] == ["model.safetensors"]


@pytest.mark.slow
@pytest.mark.usefixtures("compared")
def test_each_push_has_the_tag_of_its_step(run: Path, hub: HubServer) -> None:
    assert push(run, "--checkpoint", "4") == 0
    assert push(run) == 0
    assert hub.tags(REPO).keys() == {"step-4", "step-8"}
    assert hub.commits(REPO) == ["step 8", "step 4", "initial commit"]
    four, eight = (load_pretrained(str(run), step)[0].state_dict() for step in ("4", "8"))
    for place, expected in ((f"{REPO}@step-4", four), (REPO, eight)):
        found = load_pretrained(f"hf://{place}")[0].state_dict()
        assert_same_weights(found, expected)


def test_a_damaged_checkpoint_is_not_pushed(run: Path, hub: HubServer) -> None:
    (run / "checkpoints" / "step_00000008" / "model.safetensors").write_bytes(b"half")
    assert push(run) == 4
    assert REPO not in hub.repos


# --------------------------------------------------------------------------- while training


FINISHED = """
def after_evaluation(run):
    run.finish("enough")
"""
ALWAYS = ["--hub.repo_id", REPO, "--hub.push", "every_checkpoint", "--sample.every", "0"]


@pytest.mark.usefixtures("compared", "uploads_here")
def test_only_the_end_is_pushed(small_run: Arguments, hub: HubServer, tmp_path: Path) -> None:
    asked = ["--hub.repo_id", REPO, "--hub.push", "end", "--sample.every", "0"]
    asked += ["--hub.private", "true"]
    asked += ["--checkpoint.copy_to", str(tmp_path / "copies")]
    assert launch(small_run(*asked)) == 0
    assert hub.tags(REPO).keys() == {"step-12"}
    assert hub.repos[REPO].private
    assert len(list((tmp_path / "copies").glob("*/step_00000012/manifest.json"))) == 1


@pytest.mark.usefixtures("compared", "uploads_here")
def test_a_run_that_its_file_finishes_is_pushed(
    small_run: Arguments, hub: HubServer, tmp_path: Path
) -> None:
    file = tmp_path / "my.py"
    file.write_text(FINISHED)
    asked = ["--hub.repo_id", REPO, "--hub.push", "end", "--code", str(file), "--eval.every", "3"]
    assert launch(small_run(*asked)) == 0
    assert hub.tags(REPO).keys() == {"step-3"}
    repo = hub.repos[REPO]
    assert "GPT2LMHeadModel" in repo.files[repo.head]["config.json"].decode()


@pytest.mark.usefixtures("compared")
def test_a_failed_upload_never_ends_a_run_and_is_tried_again(
    small_run: Arguments,
    hub: HubServer,
    uploads_in_turn: list[int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = small_run(*ALWAYS, "--train.max_steps", "8")
    hub.refuse(403)
    assert launch(asked) == 0
    shown = capsys.readouterr().err
    assert shown.count(f"WARNING: upload of step 4 to hf://{REPO} failed: ") == 1
    assert shown.count("it will be retried") == 1  # step 8 failed too
    assert f"WARNING: step 8 was not uploaded to hf://{REPO}; launch the same" in shown
    assert uploads_in_turn == [2, 2]  # of steps 4 and 8
    assert records(tmp_path / "run")[-1]["step"] == 8
    hub.refuse(0)
    assert launch(asked) == 0
    assert hub.tags(REPO).keys() == {"step-8"}
    assert not (tmp_path / "run" / ".uploading").exists()
    commits = hub.commits(REPO)
    monkeypatch.setattr("accel_gpt.publish.push.load_exportable", None)
    assert launch(asked) == 0
    assert uploads_in_turn[-1] == 0  # the Hub has this step, so it is not exported again
    assert hub.commits(REPO) == commits


def test_an_upload_that_cannot_start_never_ends_a_run(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left")

    monkeypatch.setattr(uploader, "launch_child", fail)
    told: list[str] = []
    hub = HubConfig(repo_id=REPO, push="every_checkpoint")
    uploads = uploader.Uploader(CheckpointConfig(), hub, run, told.append)
    uploads.start()
    uploads.on_checkpoint(run / "checkpoints" / "step_00000004")
    assert not uploads.finish(lambda: False)
    failed = [line for line in told if "failed: [Errno 28] No space left; it will be" in line]
    assert len(failed) == 1
    assert f"WARNING: step 4 was not uploaded to hf://{REPO}" in told[-1]


@pytest.mark.usefixtures("compared")
def test_private_paths_and_names_planted_in_a_run_are_not_pushed(
    run: Path, hub: HubServer, tmp_path: Path
) -> None:
    checkpoint = run / "checkpoints" / "step_00000008"
    host = "build-node-17"
    url = f"https://alice:PASSWORD@{host}/home/alice/shards?sig=PASSWORD"
    words = (str(tmp_path), host, "alice", "PASSWORD")
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    for key, hint in leaves(Config).items():
        if hint in (str, str | None):
            state["config"][key] = url
    state["versions"] |= {url: "1"}
    state["data_read"][0]["sources"][0]["name"] = url
    text = json.dumps(state).encode()
    (checkpoint / "trainer_state.json").write_bytes(text)
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    entry = {"size": len(text), "sha256": hashlib.sha256(text).hexdigest()}
    manifest["files"]["trainer_state.json"] = entry
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    planted = {"step": 0, "command": f"accel-gpt train {url}", "versions": {url: url}, "host": host}
    (run / "run.json").write_text(json.dumps({"launches": [planted]}))
    (run / "config.yaml").write_text(f"out_dir: {url}\n")
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 8, url: 1, f"eval/val_loss/{url}": 2, "note": url}) + "\n")
    (run / "tensorboard" / f"events.out.tfevents.1.{host}").write_text(url)

    assert push(run) == 0
    files = hub.files(REPO)
    assert not [name for name, text in files.items() for w in words if w.encode() in text]
    assert not [name for name in files for word in words if word in name]


@thorough
@pytest.mark.slow
def test_uploads_run_beside_the_training_and_survive_its_signals(
    small_run: Arguments, tmp_path: Path
) -> None:
    """Real processes: a slow connection, a SIGTERM during an upload, the same launch again."""
    root = Path(__file__).resolve().parents[2]
    asked = small_run(*ALWAYS, "--train.max_steps", "20", "--checkpoint.every", "10")
    command = [sys.executable, str(root / "accel_gpt" / "train.py"), *asked]
    with HubServer() as hub:
        hub.upload_delay = 20.0
        seen = {**os.environ, **environment(hub, tmp_path / "home")}
        process = subprocess.Popen(
            command, cwd=tmp_path, env=seen, stderr=subprocess.PIPE, text=True
        )
        deadline = time.monotonic() + 400
        while not any("/storage/" in path for _, path in hub.requests):
            assert time.monotonic() < deadline
            assert process.poll() is None  # it waits for its uploads
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        _, shown = process.communicate(timeout=120)
        assert process.returncode == 75  # all steps were done, and something is left to do
        assert f"WARNING: step 20 was not uploaded to hf://{REPO}" in shown
        hub.upload_delay = 0.0
        done = subprocess.run(
            [*command], cwd=tmp_path, env=seen, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert "step-20" in hub.tags(REPO)
        assert hub.token not in shown + done.stderr
        assert not (tmp_path / "run" / ".uploading").exists()
        config = json.loads(hub.files(REPO, "step-20")["config.json"])
        assert config["architectures"] == ["GPT2LMHeadModel"]
