"""Time the parts of a run on this machine: steps for `bench`, all parts for `train.budget`.

`rehearse` makes a few steps of a run that is discarded. It writes to a hidden folder of the run,
and removes it.
"""

import gc
import math
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils.memory import clear_device_cache

from accel_gpt import train
from accel_gpt.config.experiment import Config
from accel_gpt.config.plan import Costs, Plan
from accel_gpt.config.stages import longest_stage, stage_configs
from accel_gpt.cost.forecast import evaluated_tokens
from accel_gpt.evals.evaluation import Evaluation, evaluate
from accel_gpt.launch.context import Context, Initialize
from accel_gpt.launch.machine import synchronize
from accel_gpt.launch.ranks import on_main
from accel_gpt.launch.stopping import Watchdog
from accel_gpt.model.language_model import draw_weights
from accel_gpt.train import Training
from accel_gpt.training.display import Display

REHEARSAL = ".rehearsal"  # folder in the run's folder
FEWEST_MEASURED = 5  # measured steps, unless they take the whole budget
MEASURED_SHARE = 0.03  # of the budget: for the steps, and the most for an evaluation; assumption
MOST_SECONDS = 30.0  # for each of these, if the budget is long
COUNTED_SHARE = 1 / 3  # of the measured steps: the fastest. Others wait for other processes


def set_up_unseen(
    config: Config,
    plan: Plan,
    accelerator: Accelerator,
    initialize: Initialize = draw_weights,
) -> Training:
    """Set up a run that is only measured, and prints nothing."""
    with (
        Display(False) as display,
        Watchdog(config.train.step_timeout, "has not opened data and model"),
    ):
        context = Context(config, plan, accelerator, log=display.log)
        return train.set_up(context, display, initialize)


def timed(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds that `work` takes, including its work on the device."""
    synchronize(device)
    start = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - start


def time_steps(run: Training, number: Callable[[float], int]) -> tuple[float, list[float]]:
    """Return the seconds of the first step, which compiles, and of each later step; a collective.

    `number` gets the seconds of the second step, and returns how many follow it. On CUDA, nothing
    waits between them.
    """
    device = run.accelerator.device

    def step() -> None:
        run.state.step = 0  # own rates and schedules need not be defined after the run's last step
        train.update(run)
        run.reporter.heartbeat()

    first = timed(step, device)
    second = timed(step, device)
    count = on_main(lambda: number(second))
    if device.type != "cuda":
        return first, [second, *(timed(step, device) for _ in range(count))]
    marks: list[Any] = [
        torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch has no types
        for _ in range(count + 1)
    ]
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    synchronize(device)
    return first, [second, *(a.elapsed_time(b) / 1000 for a, b in pairwise(marks))]


def undisturbed(seconds: Sequence[float]) -> float:
    """Return the mean of the fastest third of measured `seconds`."""
    return fmean(sorted(seconds)[: math.ceil(COUNTED_SHARE * len(seconds))])


def discarded(config: Config, folder: str) -> Config:
    """Return the config of a run in `folder` that is only measured: it publishes nothing."""
    return replace(
        config,
        out_dir=folder,
        train=replace(config.train, profile=0),
        checkpoint=replace(config.checkpoint, resume="never", copy_to=None, async_save=False),
        log=replace(config.log, trackers=(), dashboard=False),
        hub=replace(config.hub, push="never"),
    )


# --------------------------------------------------------------------------- for a budget


def rehearse(
    config: Config,
    plan: Plan,
    accelerator: Accelerator,
    initialize: Initialize,
    seconds: float,
) -> Costs:
    """Measure the parts of a run with a `train.budget` of `seconds`, on this rank; a collective.

    Makes a few steps of each stage, and in the longest an evaluation, the samples and a save.
    Leaves no trace in the run that follows.
    """
    longest = longest_stage(config)
    measured = [
        rehearse_stage(
            *stage_alone(config, plan, number),
            accelerator,
            initialize,
            partial(measure_costs, seconds=seconds, only_steps=number != longest),
        )
        for number in range(len(stage_configs(config)))
    ]
    costs = measured[longest]
    read, of_all = (evaluated_tokens(one) for one in (replace(config, stages=()), config))
    if read and of_all:  # the sources of other stages are evaluated, too
        costs = replace(costs, evaluation=costs.evaluation * of_all / read)
    return replace(
        costs,
        step=measured[0].step,
        start=sum(one.start for one in measured),
        relative=tuple(one.step / measured[0].step for one in measured),
    )


def rehearse_stage(
    config: Config,
    plan: Plan,
    accelerator: Accelerator,
    initialize: Initialize,
    measure: Callable[[Training], Costs],
) -> Costs:
    """Set up a run, `measure` its parts, and discard it; a collective."""
    folder = Path(config.out_dir, REHEARSAL)
    scale = accelerator.scaler.state_dict() if accelerator.scaler else None
    start = time.monotonic()
    on_main(lambda: shutil.rmtree(folder, ignore_errors=True))  # of a launch that was killed
    on_main(lambda: folder.mkdir())
    try:
        run = set_up_unseen(discarded(config, str(folder)), plan, accelerator, initialize)
        run.writer.is_stopping = lambda: True  # a save that fails is not tried again
        set_up_seconds = time.monotonic() - start
        try:
            with run.watched():
                costs = measure(run)
        finally:
            run.corpus.remove_cache()
    finally:
        if accelerator.is_main_process:
            shutil.rmtree(folder, ignore_errors=True)
    del run
    accelerator.free_memory()
    gc.unfreeze()  # `build_model` froze the objects of the rehearsal
    clear_device_cache(garbage_collection=True)
    if accelerator.scaler and scale:
        accelerator.scaler.load_state_dict(scale)
    return replace(costs, set_up=set_up_seconds)


def stage_alone(config: Config, plan: Plan, number: int) -> tuple[Config, Plan]:
    """Return config and plan of a run that is one stage of another run, with its whole model."""
    alone = replace(stage_configs(config)[number], model=config.model)
    return alone, replace(plan.stage(number), stages=())


def measure_costs(run: Training, seconds: float, only_steps: bool = False) -> Costs:
    """Time the parts of a run, or its steps, on this rank; a collective. `seconds`: the budget."""
    device = run.accelerator.device
    aim = min(MEASURED_SHARE * seconds, MOST_SECONDS)

    def number(second: float) -> int:
        return min(max(FEWEST_MEASURED, math.ceil(aim / second)), math.ceil(seconds / second))

    def shorter(measure: Callable[[], float]) -> float:
        """Return the seconds of `measure`; of two times the shorter, if they are few."""
        first = measure()
        run.reporter.heartbeat()
        if on_main(lambda: first > aim / 3):
            return first
        return min(first, measure())

    first, steps = time_steps(run, number)
    step = undisturbed(steps)
    start = max(first - step, 0.0)
    if only_steps:
        return Costs(step=step, start=start)
    evaluation = 0.0
    for one in run.evaluations:
        evaluation += shorter(partial(measure_evaluation, run, one, aim))
    samples = 0.0
    if run.config.sample.every:
        write_samples = partial(train.write_samples, run, lambda: None)
        samples = shorter(lambda: timed(write_samples, device))
    return Costs(
        step=step,
        start=start,
        evaluation=evaluation,
        samples=samples,
        save=timed(lambda: train.save(run, must_succeed=True), device),
    )


class EvaluationIsLong(Exception):
    """Ends an evaluation of which `share` was made, since it takes long."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share


def measure_evaluation(run: Training, evaluation: Evaluation, longest: float) -> float:
    """Return the seconds of an evaluation; if it takes more than `longest`, of a part of it."""
    began = time.monotonic()
    calls = 0
    share = 1.0

    def on_progress(done: int, total: int) -> None:
        nonlocal calls
        run.reporter.heartbeat()
        calls += 1
        if calls & (calls - 1):  # look at powers of 2: that takes time on several ranks
            return
        if on_main(lambda: done > 0 and time.monotonic() - began > longest):
            raise EvaluationIsLong(on_main(lambda: min(done / total, 1.0)))

    def work() -> None:
        nonlocal share
        try:
            with run.evaluated.used(run.state):
                evaluate([evaluation], run.gpt, run.accelerator, on_progress)
        except EvaluationIsLong as error:
            share = error.share

    return timed(work, run.accelerator.device) / share
