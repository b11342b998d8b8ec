"""`accel-gpt inspect`: its report is correct, and it lists every damage."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from accel_gpt.cli import dispatch
from accel_gpt.console import run_main
from accel_gpt.runs.folder import RunFolder

EOT = 256
Printed = pytest.CaptureFixture[str]


def call(*words: str | Path) -> int:
    return run_main(dispatch, [str(word) for word in words])


def reported(printed: Printed, *words: str | Path, code: int = 0) -> dict[str, Any]:
    """Return the JSON that the command prints; assert its exit code."""
    printed.readouterr()
    assert call("inspect", *words, "--json") == code
    value: dict[str, Any] = json.loads(printed.readouterr().out)
    return value


# --------------------------------------------------------------------------- data


def test_report_on_data(corpus: Path, capsys: Printed) -> None:
    report = reported(capsys, corpus)
    assert reported(capsys, corpus.as_uri()) == report | {"path": corpus.as_uri()}
    assert (report["vocab_size"], report["eot_id"], report["dtype"]) == (257, EOT, "uint16")
    assert report["tokenizer"] == "bytes"
    train, val = report["splits"]["train"], report["splits"]["val"]
    size = (corpus.parent / "text.txt").stat().st_size
    assert train["tokens"] + val["tokens"] == size + 2  # and the ends of two documents
    assert (train["shards"], train["documents"]) == (3, 1)
    assert (corpus.parent / "text.txt").read_text().startswith(train["begins"])
    assert call("inspect", corpus) == 0
    shown = capsys.readouterr().out
    for fact in ("bytes", "257", "256", "uint16", f"{train['tokens']:,}"):
        assert fact in shown


def test_damage_is_listed(corpus: Path, capsys: Printed) -> None:
    for name in ("train_000000.npy", "train_000001.npy"):
        flipped = bytearray((corpus / name).read_bytes())
        flipped[-4] ^= 1
        (corpus / name).write_bytes(flipped)
    (corpus / "val_000000.npy").unlink()
    assert call("inspect", corpus) == 3
    printed = capsys.readouterr()
    errors = [line for line in printed.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 3
    for number in (0, 1):
        assert f"train_00000{number}.npy was altered: its SHA-256" in errors[number]
    assert "val_000000.npy is missing" in errors[2]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"documents": 7}, "has 1 end-of-text token, but its index says 7 documents"),
        ({"max_token": 300}, "holds token 300, expected less than vocab_size 257"),
    ],
)
def test_an_index_that_lies(
    corpus: Path, capsys: Printed, change: dict[str, int], problem: str
) -> None:
    index = json.loads((corpus / "dataset.json").read_text())
    index["splits"]["train"][0].update(change)
    (corpus / "dataset.json").write_text(json.dumps(index))
    (told,) = reported(capsys, corpus, code=3)["problems"]
    assert problem in told


def test_files_of_another_project(tmp_path: Path, capsys: Printed) -> None:
    np.array([*b"aaab", EOT, *b"cd", EOT], "<u2").tofile(tmp_path / "train.bin")
    report = reported(capsys, tmp_path, "--data.tokenizer", "bytes")
    assert list(report["splits"]) == ["train"]
    train = report["splits"]["train"]
    assert (train["tokens"], train["documents"], train["begins"][:4]) == (8, 2, "aaab")
    np.array([*b"x", 300], "<u2").tofile(tmp_path / "val.bin")
    (problem,) = reported(capsys, tmp_path, "--data.tokenizer", "bytes", code=3)["problems"]
    assert "holds token 300 at index 1, beyond the vocabulary of 257" in problem


# --------------------------------------------------------------------------- runs


@pytest.fixture
def run(trained: Callable[..., Path]) -> Path:
    """A run with checkpoints of steps 2 and 4."""
    every = ("--eval.every", "2", "--checkpoint.every", "2", "--sample.every", "0")
    return trained("--train.max_steps", "4", "--checkpoint.keep_best", "true", *every)


def test_report_on_a_run_and_a_checkpoint(run: Path, capsys: Printed) -> None:
    newest, last = run / "checkpoints" / "step_00000004", [*RunFolder(run).records()][-1]
    report = reported(capsys, run)
    assert report["best"] == "4"
    first, second = report["checkpoints"].values()
    assert (first["state"], first["step"]) == ("intact", 2)
    losses = (last["train/loss"], last["eval/val_loss"])
    assert (second["tokens"], second["train_loss"], second["val_loss"]) == (1024, *losses)
    weights = load_file(newest / "model.safetensors")
    assert second["parameters"] == sum(weight.numel() for weight in weights.values())
    assert call("inspect", run) == 0
    shown = capsys.readouterr().out
    for fact in (f"{second['parameters']:,}", *(f"{loss:.5g}" for loss in losses), newest.name):
        assert fact in shown
    assert reported(capsys, newest)["checkpoints"] == {newest.name: second}


def test_a_damaged_checkpoint_is_named(run: Path, capsys: Printed) -> None:
    newest = run / "checkpoints" / "step_00000004"
    weights = newest / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\xff")
    for place in (run, newest):
        report = reported(capsys, place, code=4)
        assert [*report["checkpoints"].values()][-1] == {"state": "DAMAGED"}
        (told,) = report["problems"]
        assert weights.name in told
        assert str(newest) in told
    assert call("inspect", run) == 4
    printed = capsys.readouterr()
    assert re.search("step_00000002\n +state +intact", printed.out)
    assert re.search("step_00000004\n +state +DAMAGED", printed.out)
    assert printed.err.count("error: ") == 1


def test_a_best_checkpoint_that_is_gone_is_named(run: Path, capsys: Printed) -> None:
    (run / "best").write_text("9\n")
    report = reported(capsys, run, code=4)
    assert (report["best"], len(report["checkpoints"])) == ("9", 2)
    assert report["problems"] == ["the best checkpoint, of step 9, is missing"]
