"""`accel-gpt bench`: measure the real training step, and keep nothing."""

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from accel_gpt import train
from accel_gpt.cli import dispatch
from accel_gpt.commands import bench
from tests.conftest import run_here
from tests.test_launch import PLAIN, TORCHRUN

Arguments = Callable[..., list[str]]
SHORT = ("--steps", "3")


@pytest.fixture(autouse=True)
def without_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "WARM_UP_SECONDS", 0.0)
    monkeypatch.setattr(bench, "RANDOM_TOKENS", 10_000)


def call(*words: str) -> int:
    return run_here(dispatch, ("bench", *words))


def test_bench_times_the_training_step_and_keeps_nothing(
    small_run: Arguments,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The run: 12 steps of 256 tokens; 512 tokens of both splits after 4, 8 and 12 steps."""
    steps: list[int] = []
    update = train.update

    def counted(run: Any) -> None:
        update(run)
        steps.append(run.state.step)

    monkeypatch.setattr(train, "update", counted)
    before = sorted(tmp_path.rglob("*"))
    assert call(*small_run(*SHORT, "--json", "--train.micro_batch_size", "2")) == 0
    report = json.loads(capsys.readouterr().out)
    assert len(steps) == 2 + 3  # the first compiles, the second tells how many warm up: none
    assert sorted(tmp_path.rglob("*")) == sorted({*before, tmp_path / "small.yaml"})
    assert report["plan"]["accumulation_steps"] == 4
    assert report["plan"]["tokens_per_step"] == 256
    low, high = report["tokens_per_second_quartiles"]
    assert low <= report["tokens_per_second"] <= high
    assert report["tokens_per_second"] == pytest.approx(256_000 / report["step_ms"])
    assert report["mfu"] is None
    assert report["memory_gb"] > 0
    hour = 3600 * report["tokens_per_second"]  # tokens
    assert report["run"]["steps"] == 12
    assert report["run"]["evaluation_hours"] == pytest.approx(3 * 2 * 512 / 3 / hour)
    assert report["run"]["hours"] == pytest.approx((12 * 256 + 3 * 2 * 512 / 3) / hour)


def test_steps_that_warm_up_do_not_count(
    small_run: Arguments, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def time_steps(_: Any, number: Callable[[float], int]) -> tuple[float, list[float]]:
        return 9.0, [0.5, *[0.5] * (number(0.5) - 3), 0.25, 0.25, 0.25]

    monkeypatch.setattr(bench, "WARM_UP_SECONDS", 3.0)
    monkeypatch.setattr(bench, "time_steps", time_steps)
    assert call(*small_run(*SHORT, "--json")) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["steps"], report["step_ms"]) == (3, 250)


def test_no_data_is_prepared_or_read(
    small_run: Arguments,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--data.train", str(tmp_path / "missing"), "--data.prepare.source", "no/such"]
    assert call(*small_run(*SHORT, *words, "--data.document_mask", "true")) == 0
    assert re.search("^vocabulary\n  tokens +50,257$", capsys.readouterr().out, re.MULTILINE)
    assert not (tmp_path / "missing").exists()


@pytest.mark.slow
def test_two_processes_print_one_report(small_run: Arguments, tmp_path: Path) -> None:
    words = ["bench", *small_run(*SHORT, "--json", "--train.micro_batch_size", "4")]
    done = subprocess.run(
        [*TORCHRUN, "--nproc_per_node", "2", "-m", "accel_gpt", *words],
        cwd=tmp_path,
        env=PLAIN,
        stdout=subprocess.PIPE,
        check=True,
    )
    report = json.loads(done.stdout)
    assert (report["processes"], report["plan"]["accumulation_steps"]) == (2, 1)
