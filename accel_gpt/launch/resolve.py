"""Resolve a config once, before the run is set up: turn what is asked into what is done.

Resolved are the precision, the commits of repositories of data, the micro-batch, the compilation
and the length of a run with a `train.budget`. The ranks have joined, and the device is known.

The first launch of a run chooses. It writes both to the run's folder: `config.yaml` and the plan in
`run.json` say what is done, `asked` in `run.json` what was asked for. Checkpoints hold what is
done, too. Each later launch reads it, see `Done`, and chooses only what this machine cannot do.
"""

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
from accelerate import Accelerator

from accel_gpt.config.budget import PLANNED_SHARE, fit, with_budget
from accel_gpt.config.compare import differences
from accel_gpt.config.experiment import Config
from accel_gpt.config.options import duration
from accel_gpt.config.plan import Budget, Costs, Finish, Plan, make_plan, plural, with_sizes
from accel_gpt.config.stages import stage_configs
from accel_gpt.config.values import to_flat
from accel_gpt.console import print_line
from accel_gpt.data.remote import is_repository
from accel_gpt.data.sources import all_train_paths, val_paths
from accel_gpt.errors import AccelGPTError, UserError
from accel_gpt.hub import newest_commit
from accel_gpt.launch.accelerator import make_accelerator
from accel_gpt.launch.auto_batch import choose_micro_batch_size
from accel_gpt.launch.compile import (
    check_compile,
    choose_compile,
    compiler_error_on_any_machine,
)
from accel_gpt.launch.context import Context, Initialize
from accel_gpt.launch.precision import choose_precision
from accel_gpt.launch.process import join_ranks
from accel_gpt.launch.ranks import all_gather, on_main
from accel_gpt.launch.stopping import Watchdog
from accel_gpt.launcher import PRECISIONS, world_size
from accel_gpt.model.language_model import draw_weights
from accel_gpt.runs.checkpoint import read_state
from accel_gpt.runs.folder import RunFolder

# measures what the parts of a run with a `train.budget` of so many seconds take, on this rank
Rehearse = Callable[[Config, Plan, Accelerator, Initialize, float], Costs]


@dataclass(frozen=True)
class Done:
    """What a run did, which a launch continues; without `file`, there is no such run."""

    file: str = ""
    """The config.yaml of the run, or the checkpoint, that records it."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Dotted keys."""
    budget: Budget | None = None
    finish: Finish | None = None
    commits: Mapping[str, str] = field(default_factory=dict)
    """URL of a repository of data -> the commit that the run reads."""
    precision: str | None = None


def read_done(out_dir: str, resume: str) -> Done:
    """Read what the run in `out_dir` did, or the one that the checkpoint `resume` belongs to.

    Skips what is damaged: `choose_checkpoint` raises its error.
    """
    run = RunFolder(out_dir)
    done = Done()
    for path in [*reversed(run.checkpoints.values())] or [Path(resume)]:
        with contextlib.suppress(AccelGPTError):
            state = read_state(path)
            done = Done(str(path), state.config, state.budget, commits=state.data_commits)
            break
    if run.config:  # a run restored from a copy has none
        budget = None
        with contextlib.suppress(msgspec.ValidationError):  # a file that was edited by hand
            budget = msgspec.convert(run.last_launch("plan", "budget"), Budget | None)
        file = str(run.path / "config.yaml")
        done = Done(file, run.config, budget, commits=done.commits)
    done = replace(done, finish=run.finish)
    # if the config has no precision, the launcher has set it
    for precision in (
        done.config.get("train.mixed_precision"),
        run.last_launch("mixed_precision"),
    ):
        if precision in PRECISIONS:
            return replace(done, precision=precision)
    return done


# --------------------------------------------------------------------------- resolve


def resolve(
    asked: Config,
    rehearse: Rehearse | None = None,
    initialize: Initialize = draw_weights,
    log: Callable[[str], None] = print_line,
    check_folder: Callable[[], None] = lambda: None,
) -> Context:
    """Join the ranks, start the device, and resolve `asked`; a collective.

    `rehearse` measures what the parts of a run take, for `train.budget`, with the weights that
    `initialize` sets. `log` prints a line on rank 0; `check_folder`: see `Context`. Raises
    `UserError` if this machine cannot do what is asked for.
    """
    started = time.monotonic()
    with Watchdog(asked.train.step_timeout, "has not started the device"):
        join_ranks(asked.train)
        done: Done = on_main(lambda: read_done(asked.out_dir, asked.checkpoint.resume))
        config = with_precision(asked, done, log)
        accelerator = make_accelerator(config, make_plan(config, world_size()))
    config = with_commits(config, done)
    config = with_micro_batch_size(config, accelerator, done, log)
    plan = make_plan(config, accelerator.num_processes)
    accelerator.gradient_accumulation_steps = plan.accumulation_steps
    config = with_compile(config, plan, done, log)
    budget = on_main(lambda: earlier_budget(config, done))
    text = config.train.budget
    if text is not None:
        reason = f"as in {done.file}"
        if budget is None:
            if rehearse is None:
                raise UserError(f"train.budget is {text}, but only accel-gpt train can measure it")
            log(f"budget   measuring what fits into {text}")
            seconds = duration("train.budget", text) or 0.0
            costs = rehearse(config, plan, accelerator, initialize, seconds)
            budget = fit_slowest(config, costs, seconds, started)
            reason = budget.costs.describe()
        config = with_budget(config, budget)
        plan = make_plan(config, accelerator.num_processes)
        log(f"budget   {plural(budget.steps, 'step')} in {text}: {reason}")
    if budget is not None and budget.steps == plan.max_steps:
        plan = replace(plan, budget=budget)
    changes = differences(to_flat(asked), to_flat(config))
    return Context(
        config=config,
        plan=replace(plan, finish=earlier_finish(config, done)),
        accelerator=accelerator,
        log=log,
        check_folder=check_folder,
        asked={key: was for key, (was, _) in changes.items()},
    )


def with_precision(config: Config, done: Done, log: Callable[[str], None]) -> Config:
    """Return `config` with the precision for `train.mixed_precision: auto`; a collective."""
    if config.train.mixed_precision != "auto":
        return config
    precision: Any = done.precision
    reason = f"as in {done.file}"
    if precision is None:
        precision, reason = on_main(lambda: choose_precision(config.train.reproducible))
    log(f"auto     precision {'fp32' if precision == 'no' else precision}: {reason}")
    return replace(config, train=replace(config.train, mixed_precision=precision))


def with_commits(config: Config, done: Done) -> Config:
    """Return `config` with the commit at which each repository of data is read; a collective.

    A URL that the run has not read yet gets the newest commit.
    """
    urls = [source.path for source in [*all_train_paths(config), *val_paths(config.data)]]
    urls = [url for url in urls if is_repository(url)]
    if not urls:
        return config

    def find() -> dict[str, str]:
        return {url: done.commits.get(url) or newest_commit(url) for url in urls}

    return replace(config, data=replace(config.data, commits=on_main(find)))


def with_micro_batch_size(
    config: Config, accelerator: Accelerator, done: Done, log: Callable[[str], None]
) -> Config:
    """Return `config` with the number for `train.micro_batch_size: auto`; a collective.

    A run keeps its number if it still divides the step and fits in memory.
    """
    if all(stage.train.micro_batch_size != "auto" for stage in stage_configs(config)):
        return config
    earlier = sizes_of(done.config)
    sizes: list[int] = []
    for number, stage in enumerate(stage_configs(config)):
        if stage.train.micro_batch_size != "auto":
            sizes.append(stage.train.micro_batch_size)
            continue
        before = earlier[number] if number < len(earlier) else None
        size = choose_micro_batch_size(stage, accelerator, before)
        reason = f"as in {done.file}" if size == before else "the largest size that fits"
        of = f", stage {number + 1}" if config.stages else ""
        log(f"auto     {plural(size, 'sequence')} per process and micro-step{of}: {reason}")
        sizes.append(size)
    return with_sizes(config, sizes)


def sizes_of(done: Mapping[str, Any]) -> list[Any]:
    """Return the train.micro_batch_size of each stage in the dotted keys of a run."""
    sizes = [done.get("train.micro_batch_size")]
    for stage in done.get("stages") or ():
        size = stage.get("train.micro_batch_size", sizes[-1])
        sizes = [*sizes, size] if stage["from"] else [size]
    return sizes


def with_compile(config: Config, plan: Plan, done: Done, log: Callable[[str], None]) -> Config:
    """Return `config` with true or false for `train.compile: auto`; a collective.

    Raises `UserError` if the config asks for torch.compile but it does not work here.
    """
    if config.train.compile != "auto":
        check_compile(config.train, plan)
        return config
    compiled: Any = done.config.get("train.compile")
    reason = f"as in {done.file}"
    if config.train.reproducible:
        compiled = False
        reason = "train.reproducible is set"
    elif compiled is None:
        compiled, reason = on_main(lambda: choose_compile(config))
    error = compiler_error_on_any_machine() if compiled else None
    if error:
        compiled = False
        reason = f"torch.compile does not work here ({error})"
    log(f"auto     {'compiled' if compiled else 'not compiled'}: {reason}")
    return replace(config, train=replace(config.train, compile=bool(compiled)))


def fit_slowest(config: Config, costs: Costs, seconds: float, started: float) -> Budget:
    """Return the longest run that fits into `seconds` on the slowest ranks; a collective.

    `costs`: as measured on this rank. `started`: the time at which the budget began, by
    `time.monotonic`. Raises `UserError` if the budget is too short.
    """
    of_ranks = zip(*map(astuple, all_gather(costs)), strict=True)
    costs = Costs(*map(max, of_ranks))  # of the slowest ranks, which the others wait for
    end = started + PLANNED_SHARE * seconds
    budget: Budget = on_main(lambda: fit(config, costs, end - time.monotonic()))
    return budget


def earlier_finish(config: Config, done: Done) -> Finish | None:
    """Return the end that the file of --code has given the run; None if this is another file."""
    if done.finish is None or done.finish.sha256 != config.own.sha256:
        return None
    return done.finish


def earlier_budget(config: Config, done: Done) -> Budget | None:
    """Return the budget that set the length of the run that a launch continues, if one did.

    If the config has a `train.budget`, raises `UserError` unless it is the budget of the run.
    """
    asked = config.train.budget
    steps = done.config.get("train.max_steps")
    if steps and done.budget and asked in (None, done.budget.asked):
        return done.budget
    if asked is None or not done.file:
        return None
    length = f"{steps:,} steps" if steps else "another length"
    if done.budget:
        length += f", from train.budget {done.budget.asked}"
    raise UserError(
        f"train.budget is {asked}, but the run of {done.file} has {length}, and no budget changes "
        "the length of a run; set another out_dir for another run"
    )
