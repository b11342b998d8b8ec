"""Metrics files: format, and truncation at a resume."""

import csv
import io
import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType

from accel_gpt import files
from accel_gpt.config.experiment import Config, TrainConfig
from accel_gpt.config.model import PRESETS
from accel_gpt.config.plan import make_plan
from accel_gpt.model.gpt import GPT
from accel_gpt.model.sizes import flops_per_token, parameter_counts
from accel_gpt.training.metrics import COLUMNS, MetricsLog, RankClock, Speed, Stopwatch
from accel_gpt.training.updates import RATIO
from tests.conftest import QUIET, launch, tiny


def record(step: int) -> dict[str, float]:
    return {"step": step, "tokens": step * 100, "time": step * 0.5, "train/loss": 2.0}


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_resume_cuts_both_files_back_and_repeats_nothing(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, 0, 0)
    for step in range(1, 8):
        log.write(record(step), 10)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "tok')  # torn by a kill
    log = MetricsLog(tmp_path, 5, 500)
    for step in range(6, 11):
        log.write(record(step), 10)
    assert steps(tmp_path / "metrics.jsonl") == list(range(1, 11))
    rows = list(csv.DictReader((tmp_path / "metrics.csv").read_text().splitlines()))
    assert [int(row["step"]) for row in rows] == list(range(1, 11))
    assert tuple(rows[0]) == COLUMNS
    assert rows[-1]["progress"] == "100.0"
    assert rows[-1]["tokens_this_launch"] == "500"
    assert float(rows[-1]["train/perplexity"]) == pytest.approx(7.389, abs=1e-3)
    assert rows[-1]["eval/val_loss"] == ""


def test_mfu_is_a_share_of_the_peak_of_all_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accel_gpt.training.metrics.peak_flops", lambda name, dtype: 1e12)
    gpt, accelerator = GPT(tiny(), 100), Accelerator(cpu=True)
    plan = make_plan(Config(model=gpt.config, train=TrainConfig(65536, max_steps=9)), 8)
    speed = Speed(gpt, plan, accelerator)
    work = 65536 * flops_per_token(gpt.config, 100)
    assert speed.metrics(0.5, 1)["perf/mfu"] == pytest.approx(work / 0.5 / 8e12)


@pytest.mark.parametrize("preset", PRESETS)
def test_parameters_and_flops_are_those_of_the_model(preset: str) -> None:
    gpt = GPT(tiny(**PRESETS[preset]), 100)
    assert gpt.parameter_count() == parameter_counts(gpt.config, 100)["total"]
    assert gpt.flops_per_token() == flops_per_token(gpt.config, 100)
    parameters, flops = gpt.parameter_count(), gpt.flops_per_token()
    gpt.blocks[0].mlp.more = torch.nn.Linear(7, 5)
    assert gpt.parameter_count() == parameters + 7 * 5 + 5
    assert gpt.flops_per_token() == flops + 6 * 7 * 5


def test_the_table_has_every_metric_of_a_run(
    small_run: Callable[..., list[str]], tmp_path: Path
) -> None:
    assert launch(small_run(*QUIET, "--train.max_steps", "3")) == 0
    rows = list(csv.DictReader((tmp_path / "run" / "metrics.csv").read_text().splitlines()))
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    listed = {key: value for key, value in last.items() if not key.startswith(RATIO)}
    assert {key: float(rows[-1][key]) for key in listed} == listed
    parts = {"wte", "wpe", "blocks.attn", "blocks.mlp", "least"}
    assert last.keys() - listed.keys() == {f"{RATIO}/{part}" for part in parts}


def test_pauses_are_summed_by_what_was_done(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 3.0, 10.0, 14.0, 20.0, 20.5])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    watch = Stopwatch(torch.device("cpu"), step=0, seconds_before=0)
    for name in ("save", "save", "evaluation"):
        with watch.spend(name):
            pass
    assert watch.take_pauses() == {"perf/save_s": 6.0, "perf/evaluation_s": 0.5}
    assert watch.take_pauses() == {}


def test_the_time_left_is_not_told_from_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch compiles in it."""
    clock = iter([0.0, 63.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    watch = Stopwatch(torch.device("cpu"), step=5, seconds_before=0)
    assert watch.left(6, 65) is None
    assert watch.left(8, 65) == 21 * 57


def test_the_slowest_rank_is_compared_with_the_median(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([1.0, 1.5])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    gathered: list[float] = []

    def gather(own: torch.Tensor) -> torch.Tensor:
        gathered.extend(own.tolist())
        return torch.tensor([0.4, 0.5, 2.0, 0.6])

    engine: Any = SimpleNamespace(
        num_processes=4,
        distributed_type=DistributedType.MULTI_CPU,
        device=torch.device("cpu"),
        gather=gather,
    )
    ranks = RankClock(engine)
    ranks.begin_step()
    ranks.end_forward()
    ranks.end_forward()  # of the next micro-step: not counted
    assert ranks.metrics() == {"perf/slowest_rank": pytest.approx(4.0)}
    assert gathered == [0.5]
    engine.num_processes = 1
    assert RankClock(engine).metrics() == {}


def test_a_record_that_finds_no_room_is_written_whole_with_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half(file: io.FileIO, data: memoryview) -> None:
        file.write(data[: len(data) // 2])
        raise OSError(28, "No space left on device")

    log = MetricsLog(tmp_path, 0, 0)
    log.write({"step": 1, "tokens": 8}, 10)
    with monkeypatch.context() as patch:
        patch.setattr(files, "write_all", half)
        with pytest.raises(OSError, match="No space"):
            log.write({"step": 2, "tokens": 16}, 10)
    with pytest.raises(OSError, match="metrics wait for room"):
        log.sync()  # a checkpoint must not be newer than the files
    log.write({"step": 3, "tokens": 24}, 10)
    log.sync()
    steps = [json.loads(line)["step"] for line in log.jsonl.read_text().splitlines()]
    rows = [row.partition(",")[0] for row in log.csv.read_text().splitlines()]
    assert (steps, rows) == ([1, 2, 3], ["step", "1", "2", "3"])
