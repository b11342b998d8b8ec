"""`accel-gpt verify-resume`: find, name and keep a run that differs; leave nothing else."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import psutil
import pytest
import torch
from safetensors.torch import save_file

from accel_gpt.cli import dispatch
from accel_gpt.commands import verify_resume
from accel_gpt.commands.verify_resume import describe_value, differing_values, run_values
from accel_gpt.errors import UserError
from tests.conftest import run_here

Arguments = Callable[..., list[str]]
Printed = pytest.CaptureFixture[str]
STEPS = 4
NEXT = 2.5000000000000004  # the float after 2.5


def call(*words: str) -> int:
    return run_here(dispatch, ["verify-resume", *words])


@pytest.fixture
def rooms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The parent of temporary folders."""
    folder = tmp_path / "rooms"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


# --------------------------------------------------------------------------- the comparison


def make_run(folder: Path, **doctored: Any) -> Path:
    """Write a finished run of `STEPS` steps; the options change its metrics or tensors."""
    folder.mkdir(parents=True)
    lines = [
        {
            **{"step": step, "tokens": 100 * step, "time": time.monotonic()},
            **{"train/loss": 5.0 / step, "train/lr": 0.1, "train/grad_norm": 1.5 + step},
            **{"data/epochs": step / 64, "perf/step_ms": time.monotonic()},
        }
        for step in range(1, STEPS + 1)
    ]
    lines[-1]["eval/val_loss"] = 2.5
    lines[1] |= doctored.get("line", {})
    kept = [line for line in lines if line["step"] != doctored.get("without")]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
    checkpoint = folder / "checkpoints" / f"step_{STEPS:08d}"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").touch()
    weights = {"a.weight": torch.arange(6.0).reshape(2, 3), "b.bias": torch.ones(2)}
    save_file(weights | doctored.get("weights", {}), checkpoint / "model.safetensors")
    averages = weights | doctored.get("averages", {})
    save_file(averages, checkpoint / "evaluated.safetensors")
    moments = {"step": torch.tensor(4.0), "exp_avg": torch.ones(3)} | doctored.get("moments", {})
    groups = [{"lr": 0.1, "betas": (0.9, 0.95), "fused": None, "params": [0]}]
    torch.save({"state": {0: moments}, "param_groups": groups}, checkpoint / "optimizer.bin")
    return folder


def differences(folder: Path, **doctored: Any) -> list[str]:
    """Return the names of the values of a changed run that differ."""
    whole = run_values(make_run(folder / "whole"))
    other = run_values(make_run(folder / "other", **doctored))
    return [line.partition(": ")[0] for line in differing_values(whole, other)]


def test_the_same_run_is_equal_and_one_without_checkpoint_is_refused(tmp_path: Path) -> None:
    assert not differences(tmp_path)
    (tmp_path / "other" / "checkpoints" / f"step_{STEPS:08d}" / "manifest.json").unlink()
    with pytest.raises(UserError, match="other holds no checkpoint"):
        run_values(tmp_path / "other")


def test_differences_are_found_and_the_first_of_each_kind_is_named(tmp_path: Path) -> None:
    line = {"train/loss": NEXT, "train/lr": 0.2, "data/epochs": 5, "eval/x": 1}
    line |= {"train/z_loss": 3.0, "perf/mfu": 0.5}
    zero = {"a.weight": torch.tensor([[0, 1, 2], [3, 4.5, 5]]), "b.bias": torch.tensor([1.0, -0.0])}
    moments = {"step": torch.tensor(5.0), "more": 1.0}
    assert differences(tmp_path / "1", line=line, weights=zero, moments=moments) == [
        *("train/loss at step 2", "train/lr at step 2", "data/epochs at step 2"),
        *("a.weight", "b.bias", "optimizer.state.0.step"),
        *("eval/x at step 2", "train/z_loss at step 2", "optimizer.state.0.more"),
    ]
    lost = differences(tmp_path / "2", without=3, weights={"b.bias": torch.ones(3)})
    assert {"step of record 3", "train/loss at step 3", "b.bias"} <= {*lost}
    averages = {"b.bias": torch.tensor([1.0, 2.0])}
    assert differences(tmp_path / "3", averages=averages) == ["b.bias, evaluated"]
    assert describe_value(torch.zeros(2)) != describe_value(torch.tensor([0.0, -0.0]))


# --------------------------------------------------------------------------- launches

# stands in for training: some time, then the folder of a finished run
PRETENDED = """
import shutil, sys, time
time.sleep(0.3)
shutil.copytree(sys.argv[1], sys.argv[2], dirs_exist_ok=True)
"""
Pretended = Callable[[Path, Path], list[int]]


def start_code(code: str, *words: str, stdout: IO[bytes]) -> subprocess.Popen[str]:
    """Start Python code instead of a launch."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *words], stdout=stdout, stderr=stdout, text=True
    )


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> Pretended:
    """Let launches leave these folders: undisturbed, then disturbed. Return the world sizes."""

    def give(whole: Path, disturbed: Path) -> list[int]:
        worlds: list[int] = []

        def start(argv: list[str], processes: int, stdout: IO[bytes], **_: Any) -> Any:
            worlds.append(processes)
            folder = Path(argv[argv.index("--out_dir") + 1])
            source = whole if folder.name == "undisturbed" else disturbed
            return start_code(PRETENDED, str(source), str(folder), stdout=stdout)

        monkeypatch.setattr(verify_resume, "launch_child", start)
        return worlds

    return give


def test_runs_are_killed_until_the_kills_are_used_up_and_nothing_is_left(
    small_run: Arguments, rooms: Path, tmp_path: Path, pretended: Pretended, capsys: Printed
) -> None:
    whole = make_run(tmp_path / "whole")
    (whole / "run.json").write_text('{"launches": [{"step": 2}]}')  # one resumed from step 2
    worlds = pretended(whole, whole)
    options = ["--steps", "4", "--kills", "4", "--processes", "2,1,4"]
    options += ["--train.micro_batch_size", "2"]
    assert call(*small_run(*options)) == 2  # not equal bit for bit
    assert call(*small_run(*options, "--train.reproducible")) == 0
    shown = capsys.readouterr()
    assert worlds[0] == 2
    assert len(set(worlds)) > 1
    assert shown.err.count("killed at step") == 4
    assert "with 4 kills, compared with an undisturbed run" in shown.out
    assert "launches resumed: 2\n" in shown.out
    assert "equals never stopping, bit for bit" in shown.out
    assert not list(rooms.iterdir())
    (whole / "run.json").unlink()
    assert call(*small_run("--steps", "4", "--kills", "1")) == 1
    assert "no launch resumed between the first and the last step" in capsys.readouterr().out


def test_a_difference_ends_with_1_and_the_folder_is_kept_and_named(
    small_run: Arguments, rooms: Path, tmp_path: Path, pretended: Pretended, capsys: Printed
) -> None:
    pretended(make_run(tmp_path / "a"), make_run(tmp_path / "b", line={"train/loss": NEXT}))
    assert call(*small_run("--steps", "4", "--kills", "1")) == 1
    shown = capsys.readouterr()
    assert f"train/loss at step 2: 2.5 undisturbed, {NEXT} here" in shown.out
    assert "stop and resume is NOT the same as never stopping" in shown.out
    assert f"kept: {next(rooms.iterdir())}" in shown.err


# a process with a child in another session, as under torchrun; both would run for long
FAMILY = """
import subprocess, sys, time
words = [sys.executable, "-c", "import time; time.sleep(60)"]
child = subprocess.Popen(words, start_new_session=True)
with open(sys.argv[1], "w") as file:
    file.write(f"{child.pid}\\n")
time.sleep(60)
"""


def test_ctrl_c_ends_all_processes_and_cleans_up(
    small_run: Arguments, rooms: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "pid"

    def start(*_: Any, stdout: IO[bytes], **__: Any) -> subprocess.Popen[str]:
        return start_code(FAMILY, str(file), stdout=stdout)

    monkeypatch.setattr(verify_resume, "launch_child", start)

    def interrupt() -> None:
        while not (file.exists() and file.read_text().endswith("\n")):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    assert call(*small_run("--steps", "4")) == 130
    thread.join()
    below = int(file.read_text())
    assert not psutil.pid_exists(below) or psutil.Process(below).status() == psutil.STATUS_ZOMBIE
    assert not list(rooms.iterdir())


@pytest.mark.slow
def test_training_killed_on_changing_numbers_of_processes_equals_never_stopped(
    small_run: Arguments, rooms: Path, capsys: Printed
) -> None:
    options = ["--steps", "8", "--kills", "2", "--processes", "1,2"]
    options += ["--train.reproducible", "--train.micro_batch_size", "2"]
    assert call(*small_run(*options)) == 0
    shown = capsys.readouterr()
    assert "on 1 process" in shown.err
    assert "on 2 processes" in shown.err
    assert "with 2 kills" in shown.out
    assert "bit for bit" in shown.out
    assert not list(rooms.iterdir())
