"""`accel-gpt inspect`: its report is correct, and it lists every damage."""

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from accel_gpt.cli import dispatch
from accel_gpt.console import run_main
from accel_gpt.data.shards import open_split
from accel_gpt.data.tokenizer import BytesTokenizer
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


def write_data(folder: Path, splits: dict[str, Sequence[bytes]], shard_tokens: int) -> Path:
    """A data folder of bytes, written without the code that writes ours."""
    tokenizer = BytesTokenizer()
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(folder)
    listed: dict[str, list[dict[str, Any]]] = {}
    for name, documents in splits.items():
        tokens = np.array([i for document in documents for i in (*document, EOT)], np.uint16)
        listed[name] = []
        for number, start in enumerate(range(0, len(tokens), shard_tokens)):
            part = tokens[start : start + shard_tokens]
            path = folder / f"{name}_{number:06d}.npy"
            np.save(path, part)
            first = number == 0
            listed[name].append(
                {
                    "name": path.name,
                    "tokens": len(part),
                    "documents": len(documents) if first else 0,
                    "bytes": sum(map(len, documents)) if first else 0,
                    "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
                    "max_token": int(part.max()),
                }
            )
    index = {
        "format": "accel_gpt-dataset",
        "version": 1,
        "tokenizer": {"kind": "bytes", "fingerprint": tokenizer.fingerprint},
        "vocab_size": 257,
        "eot_id": EOT,
        "prepared": {"source": "text", "path": "some.txt"},
        "splits": listed,
    }
    (folder / "dataset.json").write_text(json.dumps(index))
    return folder


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Two train shards of 12 and 11 tokens, one val shard."""
    documents = [b"Once \x1b[2J", b"      a tale"]
    assert len(b"".join(documents)) + len(documents) == 23
    return write_data(tmp_path / "data", {"train": documents, "val": [b"end."]}, 12)


def change_index(folder: Path, **changes: object) -> None:
    """Set fields of the first train shard in the index."""
    index = json.loads((folder / "dataset.json").read_text())
    index["splits"]["train"][0].update(changes)
    (folder / "dataset.json").write_text(json.dumps(index))


# --------------------------------------------------------------------------- data


def test_report_on_data(data: Path, capsys: Printed) -> None:
    report = reported(capsys, data)
    assert reported(capsys, data.as_uri()) == report | {"path": data.as_uri()}
    assert (report["vocab_size"], report["eot_id"], report["dtype"]) == (257, EOT, "uint16")
    assert report["tokenizer"] == "bytes"
    assert report["splits"]["train"]["fingerprint"] == open_split(data, "train").fingerprint
    assert report["prepared"] == {"source": "text", "path": "some.txt"}
    assert list(report["splits"]) == ["train", "val"]
    train = report["splits"]["train"]
    sizes = ("shards", "tokens", "documents", "bytes")
    assert [train[key] for key in sizes] == [2, 23, 2, 21]
    assert train["begins"] == "Once \x1b[2J<|endoftext|>  "
    assert call("inspect", data) == 0
    shown = capsys.readouterr().out
    for fact in ("bytes", "257", "256", "uint16", "path some.txt", "'Once \\x1b"):
        assert fact in shown


def test_damage_is_listed_and_the_rest_reported(data: Path, capsys: Printed) -> None:
    for name in ("train_000000.npy", "train_000001.npy"):
        flipped = bytearray((data / name).read_bytes())
        flipped[-4] ^= 1
        (data / name).write_bytes(flipped)
    (data / "val_000000.npy").unlink()
    assert call("inspect", data) == 3
    printed = capsys.readouterr()
    errors = [line for line in printed.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 3
    assert "val_000000.npy is missing" in errors[0]
    for number in (0, 1):
        assert f"train_00000{number}.npy was altered: its SHA-256" in errors[number + 1]
    (data / "train_000001.npy").write_bytes(b"x")
    assert call("inspect", data) == 3  # no split can be opened
    assert "was altered" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"documents": 7}, "has 2 end-of-text tokens, but its index says 7 documents"),
        ({"max_token": 300}, "holds token 300, expected less than vocab_size 257"),
        ({"sha256": "0" * 64}, "was altered: its SHA-256 begins with"),
    ],
)
def test_an_index_that_lies(
    data: Path, capsys: Printed, change: dict[str, Any], problem: str
) -> None:
    change_index(data, **change)
    problems = reported(capsys, data, code=3)["problems"]
    assert len(problems) == 1
    assert problem in problems[0]


def test_files_of_another_project(tmp_path: Path, capsys: Printed) -> None:
    """Facts that the files do not hold are counted, or unknown."""
    np.array([*b"aaab", EOT, *b"cd", EOT], "<u2").tofile(tmp_path / "train.bin")
    report = reported(capsys, tmp_path, "--data.tokenizer", "bytes")
    assert list(report["splits"]) == ["train"]
    train = report["splits"]["train"]
    assert (train["tokens"], train["documents"], train["bytes"]) == (8, 2, 6)
    assert report["prepared"] is None
    np.array([*b"x", 300], "<u2").tofile(tmp_path / "val.bin")
    (problem,) = reported(capsys, tmp_path, "--data.tokenizer", "bytes", code=3)["problems"]
    assert "token 300, expected less than vocab_size 257" in problem
    (tmp_path / "raw").mkdir()
    np.array([65_535, 5, EOT], "<u4").tofile(tmp_path / "raw" / "part-0.bin")
    assert call("inspect", tmp_path / "raw", "--data.tokenizer", "bytes") == 2
    assert "set data.dtype to uint16 or uint32" in capsys.readouterr().err
    options = ("--data.tokenizer", "bytes", "--data.dtype", "uint32")
    train = reported(capsys, tmp_path / "raw", *options, code=3)["splits"]["train"]
    assert (train["tokens"], train["largest_id"]) == (3, 65_535)


# --------------------------------------------------------------------------- runs


@pytest.fixture
def run(trained: Callable[..., Path]) -> Path:
    """A run with checkpoints of steps 2 and 4."""
    every = ("--eval.every", "2", "--checkpoint.every", "2", "--sample.every", "0")
    return trained("--train.max_steps", "4", "--checkpoint.keep_best", "true", *every)


def test_report_on_a_run_and_a_checkpoint(run: Path, capsys: Printed) -> None:
    newest, last = run / "checkpoints" / "step_00000004", [*RunFolder(run).records()][-1]
    report = reported(capsys, run)
    assert report["best"] == newest.name
    first, second = report["checkpoints"].values()
    assert (first["state"], first["step"]) == ("intact", 2)
    losses = (last["train/loss"], last["eval/val_loss"])
    assert (second["tokens"], second["train_loss"], second["val_loss"]) == (1024, *losses)
    weights = load_file(newest / "model.safetensors")
    assert second["parameters"] == sum(weight.numel() for weight in weights.values())
    assert call("inspect", run) == 0
    shown = capsys.readouterr().out
    for fact in (f"{second['parameters']:,}", *(f"{loss:.4f}" for loss in losses), newest.name):
        assert fact in shown
    assert reported(capsys, newest)["checkpoints"] == {newest.name: second}


@pytest.mark.parametrize("name", ["model.safetensors", "trainer_state.json", "manifest.json"])
def test_a_damaged_checkpoint_is_named(run: Path, capsys: Printed, name: str) -> None:
    newest = run / "checkpoints" / "step_00000004"
    content = bytearray((newest / name).read_bytes())
    content[len(content) // 2 :] = b"\xff"
    (newest / name).write_bytes(content)
    for place in (run, newest):
        report = reported(capsys, place, code=4)
        assert [*report["checkpoints"].values()][-1] == {"state": "DAMAGED"}
        assert len(report["problems"]) == 1
        assert name in report["problems"][0]
        assert str(newest) in report["problems"][0]
    assert call("inspect", run) == 4
    printed = capsys.readouterr()
    assert re.search("step_00000002 +intact", printed.out)
    assert re.search("step_00000004 +DAMAGED", printed.out)
    assert printed.err.count("error: ") == 1


def test_a_best_checkpoint_that_is_gone_is_named(run: Path, capsys: Printed) -> None:
    (run / "best").write_text("9\n")
    report = reported(capsys, run, code=4)
    assert (report["best"], len(report["checkpoints"])) == ("step_00000009", 2)
    assert report["problems"] == ["the best checkpoint, step_00000009, is missing"]
