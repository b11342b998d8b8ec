"""Measure what the parts of a run take, for `train.budget`: a few steps of a run that is discarded.

Writes to a hidden folder of the run, and removes it.
"""

import gc
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils.memory import clear_device_cache

from accel_gpt import train
from accel_gpt.config.costs import Costs
from accel_gpt.config.experiment import Config
from accel_gpt.config.plan import Plan
from accel_gpt.evals.evaluation import Evaluation, evaluate
from accel_gpt.launch.budget import REHEARSAL, rehearsal_config
from accel_gpt.launch.clock import timed, undisturbed
from accel_gpt.launch.ranks import on_main
from accel_gpt.model.language_model import LanguageModel
from accel_gpt.train import Training

FEWEST_MEASURED = 5  # measured steps, unless they take the whole budget
MEASURED_SHARE = 0.03  # of the budget: for the steps, and the most for an evaluation; assumption
MOST_SECONDS = 30.0  # for each of these, if the budget is long


def rehearse(
    config: Config,
    plan: Plan,
    accelerator: Accelerator,
    initialize: Callable[[LanguageModel], None],
    seconds: float,
) -> Costs:
    """Measure the parts of a run with a `train.budget` of `seconds`, on this rank; a collective.

    Makes a few steps, an evaluation, the samples and a save. Leaves no trace in the run that
    follows.
    """
    folder = Path(config.out_dir, REHEARSAL)
    scale = accelerator.scaler.state_dict() if accelerator.scaler else None
    start = time.monotonic()
    on_main(lambda: shutil.rmtree(folder, ignore_errors=True))  # of a launch that was killed
    on_main(lambda: folder.mkdir())
    try:
        measured = rehearsal_config(config, str(folder))
        run = train.set_up_unseen(measured, plan, accelerator, initialize)
        set_up_seconds = time.monotonic() - start
        try:
            with run.watched():
                costs = measure_costs(run, seconds)
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


def measure_costs(run: Training, seconds: float) -> Costs:
    """Time the parts of a run on this rank; a collective. `seconds`: of the budget."""
    device = run.accelerator.device
    aim = min(MEASURED_SHARE * seconds, MOST_SECONDS)

    def first_update() -> None:
        run.state.step = 0  # own rates and schedules need not be defined after the run's last step
        train.update(run)
        run.reporter.heartbeat()

    def shorter(measure: Callable[[], float]) -> float:
        """Return the seconds of `measure`; of two times the shorter, if they are few."""
        first = measure()
        run.reporter.heartbeat()
        if on_main(lambda: first > aim / 3):
            return first
        return min(first, measure())

    first = timed(first_update, device)
    steps: list[float] = []

    def is_enough() -> bool:
        spent = sum(steps)
        return spent >= seconds or (len(steps) >= FEWEST_MEASURED and spent >= aim)

    while not on_main(is_enough):
        steps.append(timed(first_update, device))
    step = undisturbed(steps)
    evaluation = 0.0
    last_evaluation = 0.0
    for one in run.evaluations:
        spent = shorter(partial(measure_evaluation, run, one, aim))
        if one.last_step_only:
            last_evaluation += spent
        else:
            evaluation += spent
    samples = 0.0
    if run.config.sample.every:
        write_samples = partial(train.write_samples, run, lambda: None)
        samples = shorter(lambda: timed(write_samples, device))
    return Costs(
        step=step,
        start=max(first - step, 0.0),
        evaluation=evaluation,
        last_evaluation=last_evaluation,
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
            evaluate([evaluation], run.gpt, run.accelerator, on_progress)
        except EvaluationIsLong as error:
            share = error.share

    return timed(work, run.accelerator.device) / share
