"""The scripts in benchmarks/ run, at settings too small to measure anything.

Set ACCEL_GPT_PEERS to a folder with a checkout of nanoGPT for the scripts that compare with it.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import text_of

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


def report_of(tmp_path: Path, script: str, *options: str) -> dict[str, Any]:
    """Return the report of a script, without the facts of the machine."""
    report = tmp_path / "report.json"
    command = [sys.executable, str(ROOT / "benchmarks" / script), *options, "--json", str(report)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(report.read_text())
    assert found.pop("facts")["versions"]["torch"]
    return found


@pytest.fixture
def peer(tmp_path: Path) -> tuple[str, str]:
    """A checkout of nanoGPT and a text that it can prepare."""
    if "ACCEL_GPT_PEERS" not in os.environ:
        pytest.skip("ACCEL_GPT_PEERS is not set")
    text = tmp_path / "input.txt"
    text.write_text(text_of(60_000), encoding="utf-8")
    return str(Path(os.environ["ACCEL_GPT_PEERS"]) / "nanoGPT"), str(text)


def test_loading_and_checkpoints(tmp_path: Path) -> None:
    options = ("--only", "load", "checkpoint", "--rounds", "1", "--tiny")
    found = report_of(tmp_path, "disk_io.py", *options)
    assert set(found["load"]) == {
        "nanoGPT's get_batch",
        "accel_gpt, 1 shard",
        "accel_gpt, 1,000 shards",
    }
    assert len(found["checkpoint"]["saves"]["accel_gpt, async_save"]) == 2


@pytest.mark.usefixtures("gpt2_vocabulary")
def test_a_preparation(tmp_path: Path) -> None:
    text = tmp_path / "text.jsonl"
    line = json.dumps({"text": text_of(500)}) + "\n"
    text.write_text(line * 3, encoding="utf-8")
    options = ("--only", "prepare", "--rounds", "1", "--text", str(text))
    found = report_of(tmp_path, "disk_io.py", *options)
    assert set(found["prepare"]) == {"tiktoken, one thread", "accel-gpt prepare, 2 workers"}


def test_peers_take_steps(tmp_path: Path, peer: tuple[str, str]) -> None:
    options = ("--only", "steps", "--sizes", "char4", "--steps", "60", "--rounds", "1")
    systems = ("nanoGPT", "Trainer", "accel_gpt")
    found = report_of(tmp_path, "peers.py", *peer, *options, "--systems", *systems)
    assert set(found["steps"]["char4"]["rounds"]) == set(systems)


def test_peers_run_whole_commands(tmp_path: Path, peer: tuple[str, str]) -> None:
    options = ("--only", "whole", "--steps", "8", "--rounds", "1")
    found = report_of(tmp_path, "peers.py", *peer, *options)
    for name in ("nanoGPT", "shakespeare_char_cpu", "fast_shakespeare_cpu"):
        assert found["whole"][name][0]["val_loss"] < 5


def test_a_gpu_is_measured_as_this_cpu_is(tmp_path: Path, peer: tuple[str, str]) -> None:
    options = ("--tiny", "--micro_batches", "2", "--rounds", "1")
    found = report_of(tmp_path, "gpu.py", *peer, *options)
    assert set(found["speed"]["2"]) == {"nanoGPT", "Trainer", "accel_gpt"}
    assert set(found["ablations"]) == {"accel_gpt", "all logits at once", "Muon"}
    assert len(found["first_step"]) == 2


def test_losses_are_those_of_nanogpt(tmp_path: Path, peer: tuple[str, str]) -> None:
    options = ("--steps", "30", "--train.cpu_threads", "1")
    found = report_of(tmp_path, "parity.py", *peer, *options)
    assert len(found["losses"]) == 30
    assert found["largest"] <= 1e-4


def test_the_transfer_of_rates(tmp_path: Path) -> None:
    options = ("--out", str(tmp_path / "out"), "--only", "coordinates")
    found = report_of(tmp_path, "transfer.py", *options)
    assert {row["step"] for row in found["coordinates"]} == set(range(11))
    assert (tmp_path / "out" / "coordinates.png").stat().st_size > 10_000
