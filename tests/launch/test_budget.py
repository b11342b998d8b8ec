"""Runs with `train.budget`: a rehearsal leaves no trace, and the length never changes again."""

import contextlib
import io
import itertools
import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from accel_gpt import train
from accel_gpt.commands import clock
from accel_gpt.config import budget as lengths
from accel_gpt.config.experiment import Config, SampleConfig
from accel_gpt.config.plan import Budget, Costs
from accel_gpt.launch import resolve
from accel_gpt.training.metrics import Stopwatch
from tests.conftest import launch
from tests.test_launch import TORCHRUN, TRAIN, finish
from tests.test_train import records

Arguments = Callable[..., list[str]]
FOR_TEN_MINUTES = ("--train.budget", "10m")


def budget_of(costs: Costs, steps: int, seconds: float, asked: str = "10m") -> Budget:
    return Budget(asked, seconds, costs, first_steps=steps, steps=steps)


@pytest.fixture
def eight_steps(monkeypatch: pytest.MonkeyPatch) -> list[Costs]:
    """Let a budget come to eight steps, whatever this machine measures; return what it measures."""
    measured: list[Costs] = []

    def fit(config: Config, costs: Costs, seconds: float) -> Budget:
        measured.append(costs)
        return budget_of(costs, steps=8, seconds=seconds, asked=str(config.train.budget))

    monkeypatch.setattr(resolve, "fit", fit)
    monkeypatch.setattr(clock, "MOST_SECONDS", 0.0)
    return measured


def without_speed(run: Path) -> list[dict[str, Any]]:
    """Return the records of a run without what depends on the machine."""
    return [
        {k: v for k, v in one.items() if not k.startswith(("perf/", "launch/")) and k != "time"}
        for one in records(run)
    ]


def planned(run: Path) -> dict[str, Any]:
    """Return the plan of the last launch of a run."""
    launches = json.loads((run / "run.json").read_text())["launches"]
    plan: dict[str, Any] = launches[-1]["plan"]
    return plan


@pytest.mark.parametrize(
    "options",
    [
        ("--model.dropout", "0.1", "--optim.name", "muon"),
        pytest.param(("--train.micro_batch_size", "auto"), marks=pytest.mark.slow),
    ],
    ids=["muon with dropout", "auto"],
)
def test_a_rehearsal_leaves_no_trace(
    options: Sequence[str], small_run: Arguments, eight_steps: list[Costs], tmp_path: Path
) -> None:
    """The run equals one whose config sets the steps, bit for bit."""
    assert launch(small_run(*FOR_TEN_MINUTES, *options)) == 0
    (costs,) = eight_steps
    assert min(costs.step, costs.evaluation, costs.samples, costs.save) > 0
    assert costs.start >= 0  # 0 if the first step was no slower than the others
    assert not [*(tmp_path / "run").glob(".re*")]
    again = ["--out_dir", str(tmp_path / "again")]
    assert launch([str(tmp_path / "run/config.yaml"), *again]) == 0
    assert without_speed(tmp_path / "run") == without_speed(tmp_path / "again")
    plan = planned(tmp_path / "run")
    assert plan["max_steps"] == 8
    assert plan["budget"]["asked"] == "10m"


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.usefixtures("eight_steps")
@pytest.mark.usefixtures("uploads_here")
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


def test_the_cost_of_a_step_is_that_of_the_fastest_third(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow first steps and a machine that is busy at times do not count. Only steps take time."""
    taken = itertools.chain([40.0, 9.0, 9.0], itertools.cycle([3.0, 1.0, 1.0]))
    now = 0.0

    def update(_: Any) -> None:
        nonlocal now
        now += next(taken)

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    monkeypatch.setattr(train, "update", update)
    monkeypatch.setattr(train, "save", lambda *_, **__: None)
    run: Any = SimpleNamespace(
        accelerator=SimpleNamespace(device=torch.device("cpu")),
        config=Config(sample=SampleConfig(every=0)),
        state=SimpleNamespace(),
        reporter=SimpleNamespace(heartbeat=lambda: None),
        evaluations=[],
    )
    costs = clock.measure_costs(run, seconds=1800.0)
    assert costs.step == 1.0  # of 9, 9, 3, 1, 1, 3
    assert costs.start == 39.0


@pytest.mark.slow
def test_of_a_long_evaluation_a_part_is_measured(
    small_run: Arguments,
    eight_steps: list[Costs],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A batch takes at least 10 ms here, so 64 batches take 0.64 s."""
    monkeypatch.setattr(clock, "MEASURED_SHARE", 0.0)
    code = tmp_path / "own.py"
    code.write_text(
        "import time\n\n\n"
        "def evaluate(run):\n"
        "    for i in range(64):\n"
        "        run.on_progress(i, 64)\n"
        "        time.sleep(0.01)\n"
        "        print('batch')\n"
        "    return {'own/batches': 64.0}\n"
    )
    words = ("--code", str(code), "--train.stop_at", "1", "--eval.every", "0")
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        assert launch(small_run(*FOR_TEN_MINUTES, *words)) == 0
    assert eight_steps[0].evaluation >= 0.64
    assert shown.getvalue().count("batch") <= 4 + 64  # 64 at the step where the launch stops


@pytest.mark.slow
def test_ranks_agree_on_the_length(small_run: Arguments, tmp_path: Path) -> None:
    """Real figures: each rank measures other times, and the slowest rank's count.

    An own evaluation counts its batches in its own way, and takes 1 s longer on rank 1.
    """
    code = tmp_path / "own.py"
    code.write_text(
        "import time\n\n"
        "from accel_gpt.config import budget\n\n"
        "budget.LOOK_SHARE = 0.0\n\n\n"
        "def evaluate(run):\n"
        "    rank = run.accelerator.process_index\n"
        "    for i in range(rank, 12, 2):\n"
        "        run.on_progress(i, 12)\n"
        "    time.sleep(rank)\n"
        "    return {'own/batches': 6.0}\n"
    )
    pair = ["--train.micro_batch_size", "2", "--train.budget", "1m", "--code", str(code)]
    pair += ["--schedule.name", "wsd"]
    command = [*TORCHRUN, "--nproc_per_node", "2", TRAIN, *small_run(*pair)]
    shown = finish([*command, "--train.stop_at", "6"], tmp_path)
    line = r"^budget   ([\d,]+) steps in 1m: a step .* an evaluation ([\d.]+) s,"
    steps = re.search(line, shown, re.MULTILINE)
    assert steps, shown
    assert float(steps[2]) >= 1
    again = re.search(rf"^budget   ([\d,]+) steps in 1m, not {steps[1]}: a step", shown, re.M)
    length = again[1] if again else steps[1]
    assert planned(tmp_path / "run")["budget"]["looked_at"] == 4
    assert f"train.stop_at: saved at step 6 of {length}" in shown
    assert f"{length} steps in 1m: as in" in finish([*command, "--train.stop_at", "7"], tmp_path)


# --------------------------------------------------------------------------- the second look


@pytest.fixture
def forty_steps(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Let a budget come to 40 steps that leave so many seconds for the training."""

    def leave(seconds: float) -> None:
        def fit(config: Config, costs: Costs, _: float) -> Budget:
            return budget_of(replace(costs, step=100.0), steps=40, seconds=seconds)

        monkeypatch.setattr(resolve, "fit", fit)
        monkeypatch.setattr(clock, "MOST_SECONDS", 0.0)

    return leave


@pytest.mark.parametrize("schedule", ["wsd", pytest.param("constant", marks=pytest.mark.slow)])
def test_a_run_of_another_length_equals_one_that_has_it_from_the_start(
    schedule: str,
    small_run: Arguments,
    forty_steps: Callable[[float], None],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The budget is spent after a tenth of the run, so the run gets as many steps again."""
    forty_steps(0.0)
    often = ["--eval.every", "3", "--checkpoint.every", "3", "--schedule.name", schedule]
    often += ["--train.max_steps", "40"]  # so that no interval is scaled at first
    often += ["--sample.every", "0", "--eval.tokens", "64"]
    often += ["--log.every", "20"]  # scaled to 5 at the second look
    assert launch(small_run(*FOR_TEN_MINUTES, *often)) == 0
    run = tmp_path / "run"
    assert planned(run)["max_steps"] == 8
    assert planned(run)["budget"]["looked_at"] == 4
    assert [record["step"] for record in records(run)] == [1, 3, 5, 6, 8]
    assert re.search(r"^budget   8 steps in 10m, not 40: a step", capsys.readouterr().err, re.M)
    assert launch([str(run / "config.yaml"), "--out_dir", str(tmp_path / "again")]) == 0
    assert without_speed(run) == without_speed(tmp_path / "again")
    assert launch(small_run(*FOR_TEN_MINUTES, *often)) == 0
    assert f"8 steps in 10m: as in {run / 'config.yaml'}" in capsys.readouterr().err
    older = run / "checkpoints/step_00000006"
    other = ("--checkpoint.resume", str(older), "--out_dir", str(tmp_path / "other"))
    assert launch(small_run(*FOR_TEN_MINUTES, *often, *other)) == 0
    assert f"8 steps in 10m: as in {older}" in capsys.readouterr().err
    assert without_speed(tmp_path / "other")[-1] == without_speed(run)[-1]


@pytest.mark.parametrize(
    ("saved", "seconds", "share", "longest"),
    [
        pytest.param("nothing", 100.0, "0.125", None, marks=pytest.mark.slow),
        pytest.param("before", 100.0, "0.125", None, marks=pytest.mark.slow),
        ("before", 0.0, "0.7", 8),  # the decay becomes shorter than that of the checkpoint
        ("at", 100.0, "0.125", None),
    ],
)
def test_the_second_look_is_made_once_whatever_was_saved_before_a_kill(
    saved: str,
    seconds: float,
    share: str,
    longest: int | None,
    small_run: Arguments,
    forty_steps: Callable[[float], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A second one would come to another length: it depends on the speed."""
    forty_steps(seconds)
    every = {"nothing": "0", "before": "3", "at": "4"}[saved]
    words = ["--schedule.name", "wsd", "--checkpoint.every", every, "--train.stop_at", "9"]
    words += ["--schedule.decay_share", share]
    words += ["--sample.every", "0", "--eval.tokens", "64"]
    words += ["--train.max_steps", "40"]  # so that no interval is scaled at first
    monkeypatch.setattr(lengths, "LOOK_SHARE", 0.0)  # after four steps of a launch
    update = train.update

    def killed(run: Any) -> None:
        if run.plan.budget and run.state.step == 5:
            raise KeyboardInterrupt
        update(run)

    with monkeypatch.context() as patched:
        patched.setattr(train, "update", killed)
        assert launch(small_run(*FOR_TEN_MINUTES, *words)) != 0
    run = tmp_path / "run"
    plan = planned(run)
    assert plan["budget"]["looked_at"] == 4
    assert plan["max_steps"] == longest if longest else plan["max_steps"] > 40
    assert launch(small_run(*FOR_TEN_MINUTES, *words)) == 0
    assert planned(run) == plan
    assert len(records(run)) == (longest or 9)


@pytest.mark.slow
def test_a_launch_after_a_kill_looks_if_none_has(
    small_run: Arguments, forty_steps: Callable[[float], None], tmp_path: Path
) -> None:
    """Also one that names the config of the run in place of the budget."""
    forty_steps(0.0)
    words = ("--schedule.name", "wsd")
    run = tmp_path / "run"
    assert launch(small_run(*FOR_TEN_MINUTES, *words, "--train.stop_at", "3")) == 0
    assert planned(run)["budget"]["looked_at"] is None
    assert launch([str(run / "config.yaml"), "--train.stop_at", "40"]) == 0
    assert planned(run)["budget"]["looked_at"] == 7
    assert planned(run)["max_steps"] == records(run)[-1]["step"] == 14


def test_the_first_lap_of_a_launch_is_not_the_speed_of_its_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It compiles."""
    now = [0.0]
    monkeypatch.setattr("accel_gpt.training.metrics.time.monotonic", lambda: now[0])
    watch = Stopwatch(torch.device("cpu"), step=3, seconds_before=0)
    for seconds, step in ((50.0, 4), (56.0, 6), (62.0, 9)):
        now[0] = seconds
        watch.lap(step)
    assert watch.step_seconds == 12 / 5
