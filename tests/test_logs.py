"""The logs that go along to the Hub: curves and samples, and nothing private."""

import json
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.compat.proto.event_pb2 import Event, LogMessage, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from torch.utils.tensorboard import SummaryWriter

from accel_gpt.hub.logs import copy_logs

TOKEN = "hf_AbCdEfGhIjKlMnOpQrStUvWxYz012345"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of two launches, the second from step 2 on, with everything that TensorBoard takes."""
    folder = tmp_path / "run"
    logs = folder / "tensorboard" / "accel_gpt"
    for launch, steps in enumerate((range(3), range(2, 5))):
        start = {"purge_step": 2} if launch else {}
        writer = SummaryWriter(str(logs), filename_suffix=f".{launch}", **start)
        writer.add_text("config", "    out_dir: /home/alice/run")
        for step in steps:
            writer.add_scalar("train/loss", 3 - step / 10 - launch, step)
            writer.add_scalar("data/epochs//home/alice/books", step, step)
        writer.add_text("samples", f"    once upon {TOKEN}", 1)
        writer.add_hparams({"path": "/home/alice/data"}, {"loss": 1.0}, run_name="hparams")
        extra = writer.file_writer.event_writer
        log = LogMessage(message="started by alice")
        extra.add_event(Event(wall_time=1.0, log_message=log))
        mark = SessionLog(
            status=SessionLog.CHECKPOINT, checkpoint_path="/home/alice/x", msg="alice"
        )
        extra.add_event(Event(wall_time=1.0, step=1, session_log=mark))
        value = Summary.Value(tag="eval/val_loss", simple_value=2.5, node_name="/home/alice")
        extra.add_event(Event(wall_time=1.0, step=4, summary=Summary(value=[value])))
        writer.close()
        written = max(logs.glob("*tfevents*"), key=lambda path: path.name.endswith(f".{launch}"))
        written.rename(logs / f"events.out.tfevents.179524635{launch}.build-node-17.1.{launch}")
    (folder / "tensorboard" / "hparams.yml").write_text("path: /home/alice\n")
    return folder


def everything(folder: Path) -> bytes:
    return b"".join(p.name.encode() + p.read_bytes() for p in folder.rglob("*") if p.is_file())


def curves(folder: Path) -> Any:
    found = EventAccumulator(str(folder / "tensorboard"))
    found.Reload()
    return found


def test_curves_and_samples_are_kept(run: Path, tmp_path: Path) -> None:
    copy_logs(run, tmp_path / "out")
    found = curves(tmp_path / "out")
    losses = [(one.step, round(one.value, 4)) for one in found.Scalars("train/loss")]
    assert losses == [(0, 3.0), (1, 2.9), (2, 1.8), (3, 1.7), (4, 1.6)]  # step 2 forgotten, redone
    assert found.Scalars("eval/val_loss")[0].value == 2.5
    tags = found.Tags()
    assert tags["tensors"] == ["samples/text_summary"]
    assert any(tag.startswith("data/epochs/books-") for tag in tags["scalars"])
    text = found.Tensors("samples/text_summary")[0].tensor_proto.string_val[0]
    assert text == b"    once upon ***"


def test_nothing_private_is_copied(run: Path, tmp_path: Path) -> None:
    copy_logs(run, tmp_path / "out")
    content = everything(tmp_path / "out")
    for word in (b"alice", b"build-node-17", b"/home", b"hf_", b"hparams", b"config", b"out_dir"):
        assert word in everything(run) or word == b"hparams"
        assert word not in content
    names = sorted(path.name for path in (tmp_path / "out" / "tensorboard").iterdir())
    assert all(name.startswith("events.out.tfevents.") for name in names)
    assert all(name.endswith(".accel_gpt") for name in names)


def test_a_torn_event_file_keeps_what_is_whole(run: Path, tmp_path: Path) -> None:
    first = min((run / "tensorboard" / "accel_gpt").glob("*tfevents*"))
    first.write_bytes(first.read_bytes()[:-5])
    (first.parent / "events.out.tfevents.2.empty").write_bytes(b"")
    copy_logs(run, tmp_path / "out")
    assert len(curves(tmp_path / "out").Scalars("train/loss")) == 5


def test_metrics_are_copied_as_they_are_but_for_places(tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    run.mkdir()
    (run / "metrics.csv").write_text("step,tokens\n1,2\n")
    plain = '{"step": 1,  "tokens": 2, "train/loss": null, "eval/val_loss/books": 2.0}\n'
    key = f"eval/val_loss/s3://acme/books?key={TOKEN}"
    torn = '{"step": 3, "/home/al'
    (run / "metrics.jsonl").write_text(plain + json.dumps({"step": 2, key: 1.5}) + "\n" + torn)
    copy_logs(run, out)
    assert (out / "metrics.csv").read_text() == "step,tokens\n1,2\n"
    lines = (out / "metrics.jsonl").read_text().splitlines(keepends=True)
    assert lines[0] == plain
    (name,) = set(json.loads(lines[1])) - {"step"}
    assert name.startswith("eval/val_loss/books-")
    assert len(lines) == 2


def test_a_run_without_logs_gives_none(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    copy_logs(tmp_path / "run", tmp_path / "out")
    assert not any(path.is_file() for path in (tmp_path / "out").rglob("*"))
