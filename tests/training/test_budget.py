"""Runs with `train.budget`: a rehearsal leaves no trace, and the length never changes again."""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from accel_gpt import train
from accel_gpt.config.budget import Costs
from accel_gpt.config.experiment import Config
from accel_gpt.config.plan import Budget
from accel_gpt.launcher import PREEMPTED
from accel_gpt.training import budget
from accel_gpt.training.budget import WINDOW_SECONDS, Pace
from tests.conftest import launch
from tests.test_launch import TORCHRUN, TRAIN, finish
from tests.test_train import records

Arguments = Callable[..., list[str]]
FOR_TEN_MINUTES = ("--train.budget", "10m")


@pytest.fixture
def eight_steps(monkeypatch: pytest.MonkeyPatch) -> list[Costs]:
    """Let a budget come to eight steps, whatever this machine measures; return what it measures."""
    measured: list[Costs] = []

    def fit(config: Config, costs: Costs, _: float) -> tuple[int, Budget]:
        measured.append(costs)
        return 8, Budget(str(config.train.budget), thin=2, step_seconds=costs.step)

    monkeypatch.setattr(budget, "fit", fit)
    monkeypatch.setattr(train, "MOST_SECONDS", 0.0)
    return measured


def without_speed(run: Path) -> list[dict[str, Any]]:
    """Return the records of a run without what depends on the machine."""
    return [
        {k: v for k, v in one.items() if not k.startswith("perf/") and k != "time"}
        for one in records(run)
    ]


@pytest.mark.parametrize(
    "options",
    [(), ("--model.dropout", "0.1", "--optim.name", "muon"), ("--train.micro_batch_size", "auto")],
    ids=["adamw", "muon with dropout", "auto"],
)
def test_a_rehearsal_leaves_no_trace(
    options: Sequence[str], small_run: Arguments, eight_steps: list[Costs], tmp_path: Path
) -> None:
    """The run equals one whose config sets the steps, bit for bit."""
    assert launch(small_run(*FOR_TEN_MINUTES, *options)) == 0
    (costs,) = eight_steps
    assert min(costs.step, costs.evaluation, costs.samples, costs.save, costs.start) > 0
    assert not [*(tmp_path / "run").glob(".re*")]
    again = ["--out_dir", str(tmp_path / "again")]
    assert launch([str(tmp_path / "run/config.yaml"), *again]) == 0
    assert without_speed(tmp_path / "run") == without_speed(tmp_path / "again")
    plan = json.loads((tmp_path / "run/run.json").read_text())["launches"][-1]["plan"]
    assert plan["max_steps"] == 8
    assert plan["budget"]["asked"] == "10m"


def test_a_later_launch_keeps_the_length(
    small_run: Arguments,
    eight_steps: list[Costs],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """And the last line says how to train on: from the config of the run."""
    whole = tmp_path / "whole"
    run = tmp_path / "run"
    assert launch(small_run(*FOR_TEN_MINUTES, "--out_dir", str(whole))) == 0
    assert launch(small_run(*FOR_TEN_MINUTES, "--train.stop_at", "5")) == 0
    capsys.readouterr()
    assert launch(small_run(*FOR_TEN_MINUTES)) == 0
    assert len(eight_steps) == 2  # the last launch measured nothing
    shown = capsys.readouterr().err
    assert f"8 steps in 10m: as in {run / 'config.yaml'}" in shown
    assert without_speed(whole)[-1] == without_speed(run)[-1]
    config = (whole / "config.yaml").read_text().replace("/whole", "/run")
    assert (run / "config.yaml").read_text() == config
    more = re.search(r"train more  accel-gpt train (.*) N (.*)", shown)
    assert more
    assert launch([*more[1].split(), "10", *more[2].split()]) == 0
    assert records(run)[-1]["step"] == 10


@pytest.mark.usefixtures("eight_steps")
def test_a_launch_of_the_runs_own_config_keeps_the_budget(
    small_run: Arguments, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = str(tmp_path / "run/config.yaml")
    assert launch(small_run(*FOR_TEN_MINUTES, "--train.stop_at", "3")) == 0
    assert launch([own, "--train.stop_at", "5"]) == 0
    assert launch(small_run(*FOR_TEN_MINUTES)) == 0
    assert f"8 steps in 10m: as in {own}" in capsys.readouterr().err
    assert launch([own, *FOR_TEN_MINUTES]) == 2
    assert f"{own} sets the length of its run already" in capsys.readouterr().err
    longer = ("--train.max_steps", "10", "--checkpoint.allow_change", "train.max_steps")
    assert launch([own, *longer]) == 0
    assert launch(small_run(*FOR_TEN_MINUTES)) == 2
    assert "has 10 steps, and no budget changes" in capsys.readouterr().err


@pytest.mark.usefixtures("eight_steps")
def test_a_rehearsal_makes_no_step_after_the_last_one(
    small_run: Arguments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The config sets 12 steps; an own rate need not be defined after them."""
    monkeypatch.setattr(train, "FEWEST_MEASURED", 20)
    code = tmp_path / "own.py"
    code.write_text("def lr(step, config, plan):\n    return 1 / (plan.max_steps - step)\n")
    assert launch(small_run(*FOR_TEN_MINUTES, "--code", str(code))) == 0
    assert records(tmp_path / "run")[-1]["step"] == 8


@pytest.mark.usefixtures("eight_steps")
def test_a_time_limit_stops_the_run_not_the_rehearsal(small_run: Arguments, tmp_path: Path) -> None:
    assert launch(small_run(*FOR_TEN_MINUTES, "--train.time_limit", "1s")) == PREEMPTED
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["step_00000001"]


@pytest.mark.usefixtures("eight_steps")
def test_another_budget_is_another_run(
    small_run: Arguments, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch(small_run(*FOR_TEN_MINUTES)) == 0
    before = (tmp_path / "run/metrics.jsonl").read_bytes()
    assert launch(small_run("--train.budget", "20m")) == 2
    assert "has 8 steps, from train.budget 10m" in capsys.readouterr().err
    fixed = str(tmp_path / "fixed")
    assert launch(small_run("--out_dir", fixed)) == 0
    assert launch(small_run(*FOR_TEN_MINUTES, "--out_dir", fixed)) == 2
    assert "has 12 steps, and no budget changes" in capsys.readouterr().err
    edited = (tmp_path / "run/run.json").read_text().replace('"asked": "10m"', '"asked": 10')
    (tmp_path / "run/run.json").write_text(edited)
    assert launch(small_run(*FOR_TEN_MINUTES)) == 2
    assert "has 8 steps, and no budget changes" in capsys.readouterr().err
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == before


@pytest.mark.usefixtures("eight_steps")
def test_an_older_checkpoint_brings_its_length(
    small_run: Arguments, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch(small_run(*FOR_TEN_MINUTES, "--checkpoint.every", "4")) == 0
    older = min((tmp_path / "run/checkpoints").iterdir())
    again = ("--checkpoint.resume", str(older), "--out_dir", str(tmp_path / "again"))
    assert launch(small_run("--train.budget", "20m", *again)) == 2
    assert "has 8 steps, from train.budget 10m" in capsys.readouterr().err
    assert launch(small_run(*FOR_TEN_MINUTES, *again)) == 0
    assert without_speed(tmp_path / "run")[-1] == without_speed(tmp_path / "again")[-1]


@pytest.mark.usefixtures("eight_steps")
def test_a_copy_knows_the_length(
    small_run: Arguments, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copied = ("--checkpoint.copy_to", str(tmp_path / "copies"))
    assert launch(small_run(*FOR_TEN_MINUTES, *copied, "--train.stop_at", "4")) == 0
    (tmp_path / "run").rename(tmp_path / "lost")
    other = ("--train.budget", "20m", "--out_dir", str(tmp_path / "other"))
    assert launch(small_run(*copied, *other)) == 2
    assert "has 8 steps, from train.budget 10m" in capsys.readouterr().err
    assert launch(small_run(*FOR_TEN_MINUTES, *copied, "--train.stop_at", "6")) == 0
    assert launch(small_run(*FOR_TEN_MINUTES, *copied)) == 0  # once more, without the copy
    assert records(tmp_path / "run")[-1]["step"] == 8


def test_too_short_a_budget(
    small_run: Arguments, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch(small_run("--train.budget", "0.01s")) == 2
    shown = capsys.readouterr().err
    assert re.search(r"error: one evaluation takes more than a tenth of train.budget 0.01s", shown)
    assert not [*(tmp_path / "run").glob(".re*")]


@pytest.mark.slow
def test_ranks_agree_on_the_length(small_run: Arguments, tmp_path: Path) -> None:
    """Real figures: each rank measures other times, and the slowest rank's count.

    An own evaluation counts its batches in its own way, and takes 4 s longer on rank 1.
    """
    code = tmp_path / "own.py"
    code.write_text(
        "import time\n\n\n"
        "def evaluate(run):\n"
        "    rank = run.accelerator.process_index\n"
        "    for i in range(rank, 12, 2):\n"
        "        run.on_progress(i, 12)\n"
        "    time.sleep(4 * rank)\n"
        "    return {'own/batches': 6.0}\n"
    )
    pair = ("--train.micro_batch_size", "2", "--train.budget", "2m", "--code", str(code))
    command = [*TORCHRUN, "--nproc_per_node", "2", TRAIN, *small_run(*pair)]
    shown = finish([*command, "--train.stop_at", "6"], tmp_path)
    line = r"^budget   ([\d,]+) steps in 2m: a step .* an evaluation ([\d.]+) s,"
    steps = re.search(line, shown, re.MULTILINE)
    assert steps, shown
    assert float(steps[2]) >= 4
    assert f"train.stop_at: saved at step 6 of {steps[1]}" in shown
    assert f"{steps[1]} steps in 2m: as in" in finish([*command, "--train.stop_at", "7"], tmp_path)


def test_a_slow_moment_is_told_once() -> None:
    told: list[str] = []
    pace = Pace(Budget("5m", thin=1, step_seconds=0.5), told.append)
    for step in range(10, 1000, 10):  # as planned, then three times as slow, then as planned
        pace.note(step, 10, 1.5 if 300 < step <= 500 else 0.6)
    assert len(told) == 1
    assert "a step took 3.0 times as long as the 0.5 s" in told[0]
    Pace(None, told.append).note(10, 10, WINDOW_SECONDS)
    assert len(told) == 1


def test_the_compilation_of_a_launch_is_no_slow_moment() -> None:
    told: list[str] = []
    pace = Pace(Budget("5m", thin=1, step_seconds=0.5), told.append)
    pace.note(10, 10, 2 * WINDOW_SECONDS)
    pace.note(20, 10, 0.5)
    assert not told
