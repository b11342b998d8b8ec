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


def test_every_part_of_a_measurement_on_a_gpu_runs_on_this_cpu(
    tmp_path: Path, peer: tuple[str, str]
) -> None:
    parts = ("speed", "ddp", "first_step", "kernels", "trace", "curve")
    picture = tmp_path / "losses.png"
    options = ("--tiny", "--micro_batches", "2", "--rounds", "1", "--picture", str(picture))
    found = report_of(tmp_path, "gpu.py", *peer, *options, "--only", *parts)
    assert set(found["speed"]["2"]) == {"nanoGPT", "Trainer", "accel_gpt"}
    assert all(found[part] for part in parts)
    one, other = found["curve"]["nanoGPT"], found["curve"]["accel_gpt"]
    for key in ("val_sha256", "val_tokens", "tokens_per_step"):
        assert one[key] == other[key]
    assert picture.stat().st_size > 10_000


def test_each_change_by_itself_trains_to_the_same_loss(
    tmp_path: Path, peer: tuple[str, str]
) -> None:
    found = report_of(tmp_path, "gpu.py", *peer, "--tiny", "--only", "ablate")
    ablated = found["ablate"]
    assert None not in ablated.values()
    losses = {
        name: variant["loss"]
        for name, variant in ablated.items()
        if variant["tokens"] == ablated["baseline"]["tokens"] and name != "all, Muon"
    }
    assert len(losses) > 9
    assert losses["baseline again"] == losses["baseline"]
    assert losses["bf16 residual stream"] != losses["baseline"]
    for name, loss in losses.items():
        assert loss == pytest.approx(losses["baseline"], abs=1e-3), name


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


def test_the_pictures_of_rates_are_drawn_from_the_notes(tmp_path: Path) -> None:
    report_of(tmp_path, "transfer.py", "--out", str(tmp_path / "out"), "--only", "redraw")
    for name in ("coordinates", "coordinates_dark", "rates", "rates_dark"):
        assert (tmp_path / "out" / f"{name}.png").stat().st_size > 10_000


def test_rules_that_keep_changes(tmp_path: Path) -> None:
    text = tmp_path / "input.txt"
    text.write_text(text_of(60_000), encoding="utf-8")
    options = ("--out", str(tmp_path / "out"), "--text", str(text))
    few = ("--of_each", "1", "--seeds", "5", "--steps", "12")
    found = report_of(tmp_path, "keep_rule.py", *options, *few)
    losses = found["losses"]
    baseline = losses.pop("baseline")
    assert set(losses) == {
        "redrawn 1",
        "rounded rate 1",
        "rolled batch 1",
        "rate x 1.02",
        "rate x 1.02, redrawn",
    }
    assert losses["redrawn 1"] != baseline
    assert losses["rolled batch 1"] == pytest.approx(baseline, abs=1e-2)
    shares = {row["changes"]: row for row in found["changes"]}
    for name, by_seed in losses.items():
        lower = [by_seed[seed] < before for seed, before in baseline.items()]
        assert shares[name.removesuffix(" 1")]["one run, the same seed"] == sum(lower) / 5
    for row in found["rules"]:
        for which, changes in (("nothing", 3), ("help", 2)):
            judged = [row[f"{which}, {verdict}"] for verdict in ("kept", "rejected", "undecided")]
            assert sum(judged) == pytest.approx(changes)
    one_run, _, _, sweep = found["rules"]
    assert one_run["runs"] == 6
    assert 6 * 3 <= sweep["runs"] <= 6 * 5  # no verdict from fewer than three seeds
