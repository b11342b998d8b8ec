"""Trackers: they get all metrics, a resumed run continues in the same one, nothing leaks."""

import contextlib
import errno
import json
import os
import re
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from functools import partial, partialmethod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from accelerate import tracking
from accelerate.utils import LoggerType
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.compat.tensorflow_stub.io.gfile import LocalFileSystem
from tensorboard.summary.writer import event_file_writer

from accel_gpt import train
from accel_gpt.training import metrics, unsupported
from tests.conftest import launch
from tests.test_train import around_updates, records

Arguments = Callable[..., list[str]]
ROOT = Path(__file__).resolve().parents[2]
LAYOUT = "custom_scalars__config__"
SHORT = ["--train.max_steps", "8", "--schedule.decay_steps", "10"]
LONGER = ["--schedule.decay_steps", "10", "--checkpoint.allow_change", "train.max_steps"]
# trains without a network: any connection to another machine is an error
ALONE = """
import socket, sys
def alone(function):
    def call(self, address, *more):
        if isinstance(address, tuple) and address[0] not in ("127.0.0.1", "::1", "localhost"):
            sys.stderr.write(f"LEAVES THE MACHINE: {address}\\n")
            raise OSError("there is no network")
        return function(self, address, *more)
    return call
socket.socket.connect = alone(socket.socket.connect)
socket.socket.connect_ex = alone(socket.socket.connect_ex)
from accel_gpt.commands.train import main
from accel_gpt.console import run_main
sys.exit(run_main(main, sys.argv[1:]))
"""


def run_name(run: Path) -> str:
    return (run / "tracker_run").read_text().strip()


def tags(path: Path) -> list[str]:
    """Return the tags of all events in a file of curves."""
    return [v.tag for event in EventFileLoader(str(path)).Load() for v in event.summary.value]


class Stub:
    """Stands in for the package trackio, and records its calls."""

    def __init__(self) -> None:
        self.inits: list[dict[str, Any]] = []
        self.told: list[tuple[int, dict[str, Any]]] = []
        self.config = SimpleNamespace(update=lambda values, **_: self.configs.append(values))
        self.configs: list[dict[str, str]] = []
        self.run = SimpleNamespace(log=lambda v, step: self.told.append((step, v)), finish=int)

    def init(self, **kwargs: Any) -> SimpleNamespace:
        self.inits.append(kwargs)
        return self.run


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Stub:
    stub = Stub()
    monkeypatch.setitem(sys.modules, "trackio", stub)
    available = [LoggerType.TENSORBOARD, LoggerType.TRACKIO]
    monkeypatch.setattr(tracking, "_available_trackers", available)
    monkeypatch.setattr(unsupported, "get_available_trackers", lambda: available)
    return stub


def test_a_resumed_run_goes_on_in_the_same_one(
    stub: Stub, small_run: Arguments, tmp_path: Path
) -> None:
    both = ["--log.trackers", "[tensorboard, trackio]"]
    assert launch(small_run(*SHORT, *both)) == 0
    assert launch(small_run(*LONGER, *both)) == 0
    first, second = stub.inits
    assert first == second == {"project": "accel_gpt", "name": run_name(tmp_path / "run"),
                               "resume": "allow"}  # fmt: skip
    assert re.fullmatch(r"run-[0-9a-f]{8}", first["name"])
    told = [(step, values) for step, values in stub.told if "train/loss" in values]
    lines = records(tmp_path / "run")
    assert [step for step, _ in told] == list(range(1, 13)) == [line["step"] for line in lines]
    assert [v["train/loss"] for _, v in told] == [line["train/loss"] for line in lines]
    samples = [(step, values["samples"]) for step, values in stub.told if "samples" in values]
    assert [step for step, _ in samples] == [6, 8, 12]
    kept = (tmp_path / "run" / "samples" / "step_00000012.txt").read_bytes().decode()
    assert samples[-1][1] + "\n" == kept
    curves = sorted((tmp_path / "run" / "tensorboard").rglob("events.*"))
    assert [tags(path).count(LAYOUT) for path in curves] == [1, 1]  # the layout of related curves
    for config in stub.configs:
        assert config["optim.lr"] == "0.01"


def test_a_tracker_that_does_not_start_is_one_sentence(
    stub: Stub,
    small_run: Arguments,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def refuse(**_: Any) -> None:
        raise KeyError("no key")

    monkeypatch.setattr(stub, "init", refuse)
    assert launch(small_run(*SHORT[:4], "--log.trackers", "trackio")) == 2
    told = capfd.readouterr().err.splitlines()[-1]
    assert told.startswith("error: a tracker of log.trackers (trackio) did not start: 'no key'; ")


def test_a_disk_that_was_full_is_told_once_and_the_curves_go_on(
    small_run: Arguments,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The disk is full from step 4 to 7; metrics.jsonl catches up later, TensorBoard does not.

    The run's two event files have the numbers 9 and 10 of this process: 10 must not be read first.
    """
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(9))
    full = False

    def refuse(function: Callable[..., None], *given: Any) -> None:
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")
        function(*given)

    def fill(run: train.Training) -> None:
        nonlocal full
        full = 3 <= run.state.step < 7

    around_updates(monkeypatch, before=fill)
    write = partialmethod(lambda self, *given: refuse(plain_write, self, *given))
    plain_write = LocalFileSystem._write
    monkeypatch.setattr(LocalFileSystem, "_write", write)
    monkeypatch.setattr(
        metrics, "append_all_or_nothing", partial(refuse, metrics.append_all_or_nothing)
    )
    bare = ("--sample.every", "0", "--checkpoint.every", "0")
    assert launch(small_run("--log.trackers", "tensorboard", *bare)) == 0
    said = capsys.readouterr().err
    assert said.count("WARNING") == 1
    assert f"metrics could not be written in {tmp_path / 'run'}: No space left on device (" in said
    assert "Traceback" not in said
    assert [line["step"] for line in records(tmp_path / "run")] == list(range(1, 13))
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard" / "accel_gpt")).Reload()
    steps = {event.step for event in events.Scalars("train/loss")}
    assert steps == {1, 2, 3, *range(8, 13)}


def train_alone(arguments: list[str], folder: Path, **environment: str) -> None:
    """Train in a process without a network; assert that it succeeds."""
    home = {"HOME": str(folder), "XDG_CACHE_HOME": str(folder / "cache"), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", ALONE, *arguments], cwd=folder, capture_output=True, text=True,
        env={**os.environ, **home, **environment}, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "LEAVES" not in done.stderr


@pytest.mark.slow
def test_trackio_on_this_machine(small_run: Arguments, tmp_path: Path) -> None:
    pytest.importorskip("trackio")
    place = {"TRACKIO_DIR": str(tmp_path / "trackio")}
    for options in (SHORT, LONGER):
        train_alone(small_run(*options, "--log.trackers", "trackio"), tmp_path, **place)
    (database,) = (tmp_path / "trackio").glob("accel_gpt*.db")
    asked = "select run_name, step, cast(metrics as text) from metrics"
    with contextlib.closing(sqlite3.connect(database)) as connection:
        rows = connection.execute(asked).fetchall()
    told = {step: json.loads(text) for _, step, text in rows if "train/loss" in text}
    assert {run for run, _, _ in rows} == {run_name(tmp_path / "run")}
    assert sorted(told) == list(range(1, 13))
    for line in records(tmp_path / "run"):
        assert told[line["step"]]["train/loss"] == pytest.approx(line["train/loss"])
    assert any("samples" in text and "--- " in text for _, _, text in rows)


@pytest.mark.slow
def test_wandb_offline(small_run: Arguments, tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    for options in (SHORT, LONGER):
        asked = small_run(*options, "--log.trackers", "wandb")
        train_alone(asked, tmp_path, WANDB_MODE="offline")
    folders = sorted((tmp_path / "run" / "wandb").glob("offline-run-*"))
    assert len(folders) == 2
    name = run_name(tmp_path / "run")
    assert all(folder.name.endswith(name) for folder in folders)  # wandb sync joins them
