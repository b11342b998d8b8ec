"""Trackers: after kills and resumes each shows each step once; nothing leaks."""

import errno
import json
import os
import shutil
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator

from accel_gpt import files, train
from accel_gpt.runs.folder import RunFolder
from tests.conftest import launch
from tests.test_train import around_updates, records

Arguments = Callable[..., list[str]]
Rows = list[tuple[int, str, Any]]  # step, name and value of each point that a tracker shows
ROOT = Path(__file__).resolve().parents[2]
KILLED = -9
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
    return (run / "run_name").read_text().strip()


def shown_by_tensorboard(run: Path) -> Rows:
    """Return the numbers and the texts that TensorBoard shows, in its order."""
    sizes = {"tensors": 0}  # keep all
    found: Any = EventAccumulator(str(run / "tensorboard" / "accel_gpt"), sizes).Reload()
    rows: Rows = []
    for tag in found.Tags()["tensors"]:
        for event in found.Tensors(tag):
            numbers = list(event.tensor_proto.float_val)
            texts = [text.decode() for text in event.tensor_proto.string_val]
            rows.append((event.step, tag.removesuffix("/text_summary"), (numbers + texts)[0]))
    return rows


def assert_shows(rows: Rows, run: Path) -> None:
    """Assert that a tracker shows each value of metrics.jsonl, and each sample, exactly once."""
    shown = {(step, name): value for step, name, value in rows if name != "config"}
    counts = Counter((step, name) for step, name, _ in rows)
    assert [point for point, count in counts.items() if count > 1] == []
    wanted = set()
    for record in RunFolder(run).records():
        for name in record.keys() - {"step", "tokens", "time"}:
            if name.startswith("launch/"):  # of metrics.jsonl alone
                continue
            wanted.add((record["step"], name))
            if not name.startswith("perf/"):  # of the launch that logged the step first
                value = shown[record["step"], name]
                assert value == pytest.approx(record[name], rel=1e-6), (record["step"], name)
    for path in (run / "samples").glob("step_*.txt"):
        wanted.add((int(path.stem.removeprefix("step_")), "samples"))
    assert shown.keys() == wanted


def test_steps_after_the_one_to_resume_from_are_shown_once(
    small_run: Arguments, tmp_path: Path
) -> None:
    """The second launch begins at step 4 of 10."""
    run = tmp_path / "run"
    asked = small_run("--log.trackers", "tensorboard", "--checkpoint.keep_last", "3")
    assert launch([*asked, "--train.stop_at", "10"]) == 0
    for name in ("step_00000010", "step_00000008"):
        shutil.rmtree(run / "checkpoints" / name)
    time.sleep(1)  # the names of event files begin with the second
    assert launch(asked) == 0
    assert_shows(shown_by_tensorboard(run), run)
    assert [step for step, name, _ in shown_by_tensorboard(run) if name == "train/loss"] == [
        *range(1, 13)
    ]


def test_a_tracker_that_does_not_start_is_one_sentence(
    small_run: Arguments,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise KeyError("no key")

    monkeypatch.setattr("accelerate.Accelerator.init_trackers", refuse)
    assert launch(small_run("--log.trackers", "tensorboard")) == 2
    told = capfd.readouterr().err.splitlines()[-1]
    assert told.startswith("error: a tracker of log.trackers (tensorboard) did not start: ")


def test_a_disk_that_was_full_is_told_once_and_no_metric_is_lost(
    small_run: Arguments,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The disk is full from step 4 to 7; metrics.jsonl catches up later."""
    full = False
    write_all = files.write_all

    def refuse(*given: Any) -> None:
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")
        write_all(*given)

    def fill(run: train.Training) -> None:
        nonlocal full
        full = 3 <= run.state.step < 7

    around_updates(monkeypatch, before=fill)
    monkeypatch.setattr(files, "write_all", refuse)
    bare = ("--sample.every", "0", "--checkpoint.every", "0")
    assert launch(small_run("--log.trackers", "tensorboard", *bare)) == 0
    said = capsys.readouterr().err
    assert said.count("WARNING") == 1
    assert (
        f"metrics could not be written in {tmp_path / 'run'}: No space left on device; training"
        in said
    )
    assert "Traceback" not in said
    assert [line["step"] for line in records(tmp_path / "run")] == list(range(1, 13))


# --------------------------------------------------------------------------- the real packages


def train_alone(arguments: list[str], folder: Path, fault: str = "", code: int = 0) -> None:
    """Train in a process without a network."""
    environment = {
        **{"HOME": str(folder), "XDG_CACHE_HOME": str(folder / "cache"), "PYTHONPATH": str(ROOT)},
        **{"WANDB_MODE": "offline", "TRACKIO_DIR": str(folder / "trackio")},
        "ACCEL_GPT_FAULT": fault,
    }
    done = subprocess.run(
        [sys.executable, "-c", ALONE, *arguments], cwd=folder, capture_output=True,
        text=True, env={**os.environ, **environment}, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    assert "LEAVES" not in done.stderr


def wandb_records(content: bytes) -> Iterator[bytes]:
    """Yield the records of a log of wandb.

    It has a header of 7 bytes, then blocks as in the log of LevelDB. A block holds pieces of
    records, each behind a checksum (4 bytes), its size (2 bytes) and its kind.
    """
    record = b""
    position = 7
    while position < len(content):
        left = 2**15 - position % 2**15
        if left < 7:
            position += left
        size, kind = struct.unpack_from("<HB", content, position + 4)
        record += content[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (1, 4):  # a whole record, or its last piece
            yield record
            record = b""


def shown_by_wandb(run: Path) -> Rows:
    """Return what `wandb sync` would send of the newest log."""
    from wandb.proto.wandb_internal_pb2 import Record

    path = run / "wandb" / "latest-run" / f"run-{run_name(run)}.wandb"
    rows: Rows = []
    for content in wandb_records(path.read_bytes()):
        record = Record.FromString(content)
        assert not record.run.resume  # else a sync appends to the run on the server
        items = record.history.item
        values = {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in items}
        step = values.get("_step")
        rows += [(step, name, values[name]) for name in values if not name.startswith("_")]
    return rows


READERS = {
    "tensorboard": shown_by_tensorboard,
    "wandb": shown_by_wandb,
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the packages, among themselves
@pytest.mark.parametrize("tracker", READERS)
def test_after_two_kills_a_tracker_shows_each_step_once(
    tracker: str, small_run: Arguments, tmp_path: Path
) -> None:
    """SIGKILL at steps 140 and 270.

    The first kill loses records that wandb holds back, and leaves 39 steps that come again.
    """
    pytest.importorskip(tracker)
    steps = ["--train.max_steps", "400", "--checkpoint.every", "50", "--sample.every", "30"]
    asked = small_run(*steps, "--eval.every", "20", "--log.trackers", tracker)
    train_alone(asked, tmp_path, fault="step:140=kill", code=KILLED)
    train_alone(asked, tmp_path, fault="step:170=kill", code=KILLED)
    train_alone(asked, tmp_path)
    rows = READERS[tracker](tmp_path / "run")
    assert_shows(rows, tmp_path / "run")
