"""Compare the config of a run with the config of its checkpoint, and reject what may not change.

Each option says whether it may change between launches: see `Option.resume`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from accel_gpt.config.compare import (
    UNKNOWN,
    Differences,
    differences,
    option_of,
    resume_kind,
)
from accel_gpt.config.experiment import Config, Stage
from accel_gpt.config.plan import LENGTH_KEYS, Budget, make_plan, reference_steps
from accel_gpt.config.stages import spans
from accel_gpt.config.values import build, relocated, stage_from, to_flat
from accel_gpt.data.corpus import describe_sources, read_before, source_changes
from accel_gpt.data.mixture import same_data
from accel_gpt.data.sources import DataRead
from accel_gpt.errors import CheckpointError, NewerFormatError, UserError, require
from accel_gpt.json_files import unknown_key_message
from accel_gpt.launcher import world_size
from accel_gpt.optim.groups import fraction_at
from accel_gpt.runs.folder import RunFolder
from accel_gpt.runs.state import TrainState

WAY_OUT = "set another out_dir, or accept it with"


def check_same_run(
    path: Path, saved: TrainState, now: TrainState, allowed: tuple[str, ...]
) -> None:
    """Raise an error that lists rejected changes between a checkpoint and the run that resumes it.

    Raises `UserError` if `checkpoint.allow_change` could allow all of them, else `CheckpointError`.
    Raises `NewerFormatError` if the checkpoint has an option that this version does not know.
    """
    check_known_options(path / "trainer_state.json", saved.config, "config.")
    changes = run_changes(saved, now)
    asked = ("code", "stages")
    refused = [
        key
        for key in changes
        if key == "tokenizer"
        or key.startswith("stages ")
        or (key not in asked and resume_kind(key, saved.config, now.config) == "refuse")
    ]
    rejected = {
        key: change
        for key, change in changes.items()
        if key in refused or not is_allowed(key, allowed)
    }
    if not rejected:
        return
    problem = f"{path} was made with another config: {format_changes(rejected)}"
    if refused:
        raise CheckpointError(f"{problem}; set another out_dir")
    raise UserError(f"{problem}; {WAY_OUT} {allowing(rejected)}")


def run_changes(saved: TrainState, now: TrainState) -> Differences:
    """Return what differs between a checkpoint and a run: options, data, code and tokenizer."""
    changes = config_changes(saved.config, now.config) | source_changes(vars(saved), vars(now))
    changes |= stage_changes(saved, now)
    if getattr(saved.code, "sha256", "") != getattr(now.code, "sha256", ""):
        changes["code"] = (saved.code, now.code)
    if saved.tokenizer_fingerprint != now.tokenizer_fingerprint:
        changes["tokenizer"] = (saved.tokenizer_fingerprint[:12], now.tokenizer_fingerprint[:12])
    return changes


def stage_changes(saved: TrainState, now: TrainState) -> Differences:
    """Return how stages differ: those that have made steps, or else `stages`, those ahead.

    A stage is its first step, batch, length and data. The data of the present stage may change with
    permission, see `source_changes`, and its micro-batch at any time.
    """
    if not (saved.config.get("stages") or now.config.get("stages")):
        return {}
    before, after = (run_stages(state.config) for state in (saved, now))
    was, new = ([one for one in each if one.first_step < saved.step] for each in (before, after))
    past = f"stages before step {saved.step:,}"
    done = [[one._replace(from_=None, data_from=0) for one in each] for each in (was, new)]
    if done[0] != done[1]:
        return {past: first_difference(*done)}
    # at each edge of the data, what was read before it; the data of the present stage may change
    edges = [*(one.data_from for one in was), *(read.first for read in now.data_read)]
    for edge in [edge for edge in edges if 0 < edge <= saved.sequences]:
        sources = [read_before(state.data_read, edge) for state in (saved, now)]
        if not same_data(*sources):
            return {past: (describe_sources(sources[0]), describe_sources(sources[1]))}
    ahead = [[one.asked for one in each[len(was) :]] for each in (before, after)]
    if ahead[0] != ahead[1]:
        return {"stages": first_difference(before[len(was) :], after[len(was) :])}
    later = [[read for read in s.data_read if read.first >= saved.sequences] for s in (saved, now)]
    for one, other in zip_longest(*later, fillvalue=DataRead(0, [])):
        if not same_data(one.sources, other.sources):
            return {"stages": (describe_sources(one.sources), describe_sources(other.sources))}
    return {}


class TrainedStage(NamedTuple):
    """A stage as the config of a checkpoint tells it."""

    first_step: int
    tokens_per_step: int
    block_size: int
    longest: int  # block_size of all stages
    from_: float | None  # None: the start of the run
    data_from: int  # position from which its data.train is read; 0: it sets none

    @property
    def asked(self) -> tuple[float | None, ...]:
        """Return what the config says; the first step also depends on the length of the run."""
        return (self.from_, self.tokens_per_step, self.block_size)

    def __str__(self) -> str:
        return (
            f"from step {self.first_step:,} train.tokens_per_step {self.tokens_per_step:,} and "
            f"model.block_size {self.block_size:,} of {self.longest:,}"
        )


def run_stages(values: Mapping[str, Any]) -> list[TrainedStage]:
    """Return the stages of a run from its dotted keys."""
    keys = (*LENGTH_KEYS, "train.tokens_per_step", "model.block_size")
    stages = tuple(stage_from(stage, "in stages") for stage in values.get("stages") or ())
    config = build(Config, {**{key: values[key] for key in keys}, "stages": stages})
    laid = spans(config, reference_steps(config))
    declared: list[Stage | None] = [None] * (len(laid) - len(stages)) + list(stages)
    found = []
    for span, stage in zip(laid, declared, strict=True):
        reads = stage is not None and "data.train" in stage.options
        found.append(
            TrainedStage(
                first_step=span.first_step,
                tokens_per_step=span.config.train.tokens_per_step,
                block_size=span.config.model.block_size,
                longest=config.model.block_size,
                from_=None if stage is None else stage.from_,
                data_from=span.sequences if reads else 0,
            )
        )
    return found


def declared_stages(values: Mapping[str, Any]) -> tuple[Stage, ...]:
    """Return the option `stages` of a run from its dotted keys."""
    return tuple(stage_from(stage, "in stages") for stage in values.get("stages") or ())


def first_difference(was: Sequence[TrainedStage], new: Sequence[TrainedStage]) -> tuple[str, str]:
    """Describe the first stage that differs between two runs."""
    for one, other in zip_longest(was, new):
        if one != other:
            return str(one or "none"), str(other or "none")
    raise AssertionError


def is_allowed(key: str, allowed: tuple[str, ...]) -> bool:
    """Return whether `allowed` lists a key, or the option that the key belongs to."""
    name = key.partition("[")[0]
    return any(name == one or name.startswith(f"{one}.") for one in allowed)


def check_same_config(config: Config, allowed: tuple[str, ...]) -> None:
    """Raise `UserError` if `out_dir` holds a run with another config, but no checkpoint.

    Also if its config.yaml cannot be read: the run would replace it.
    """
    run = RunFolder(config.out_dir)
    file = run.path / "config.yaml"
    require(bool(run.config) or not file.exists(), f"{file} cannot be read as the config of a run")
    check_known_options(file, run.config)
    changes = config_changes(run.config, to_flat(config)) if run.config else {}
    rejected = {key: change for key, change in changes.items() if not is_allowed(key, allowed)}
    if rejected:
        raise UserError(
            f"out_dir {config.out_dir} holds a run with another config: "
            f"{format_changes(rejected)}; {WAY_OUT} {allowing(rejected)}"
        )


def check_known_options(file: Path, saved: Mapping[str, Any], prefix: str = "") -> None:
    """Raise `NewerFormatError` if a saved config has an option that this version does not know.

    `prefix`: where `file` has the options.
    """
    unknown = [key for key in saved if option_of(key) is UNKNOWN]
    if unknown:
        raise NewerFormatError(unknown_key_message(file, f"{prefix}{min(unknown)}"))


def config_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> Differences:
    """Return the options that differ and may not change freely.

    If a run moved and `data.val` moved with it, `data.val` does not differ.
    """
    out_dirs = (str(before.get("out_dir")), str(now.get("out_dir")))
    changes = {}
    for key, (was, new) in differences(before, now).items():
        if resume_kind(key, before, now) in ("free", "start"):
            continue
        if option_of(key).command_line_only:  # a file that names it has no effect
            continue
        if key.startswith("data.val") and relocated(was, *out_dirs) == new:
            continue
        changes[key] = (was, new)
    return changes


def format_changes(changes: Mapping[str, tuple[Any, Any]]) -> str:
    """Format changes as `optim.lr was 0.001, is 0.002, ...`."""
    return ", ".join(
        f"{key} was {or_null(was)}, is {or_null(now)}" for key, (was, now) in changes.items()
    )


def or_null(value: Any) -> Any:
    """Return `value`, or "null" for None, as the user writes it."""
    return "null" if value is None else value


def allowing(keys: Iterable[str]) -> str:
    """Return the options that allow changes of these keys."""
    names = dict.fromkeys(key.partition("[")[0] for key in keys)
    return " ".join(f"--checkpoint.allow_change {name}" for name in names)


# --------------------------------------------------------------------------- length and rates


def length_keys(config: Config, saved: TrainState) -> tuple[str, ...]:
    """Return the options for the run's length if they may change without permission, else ().

    They may change if every completed step keeps its learning rate. Raises `UserError` if the run
    is already longer than the config.
    """
    plan = make_plan(config, world_size())
    require(
        saved.step <= plan.max_steps,
        f"{config.out_dir} is at step {saved.step:,} but the config ends at step "
        f"{plan.max_steps:,}; raise train.max_steps or train.max_tokens, or set another out_dir",
    )
    steps = saved.config.get("train.max_steps")
    tokens = saved.config.get("train.max_tokens")
    train = replace(config.train, max_steps=steps, max_tokens=tokens)
    before = replace(config, train=train, stages=declared_stages(saved.config))
    try:
        plan_before = make_plan(before, world_size())
    except UserError:  # the old length is unknown
        return ()
    for step in range(saved.step):
        if fraction_at(step, config, plan) != fraction_at(step, before, plan_before):
            return ()
    return LENGTH_KEYS


def budget_keys(budget: Budget | None, step: int) -> tuple[str, ...]:
    """Return the options that a second look at the budget may have changed after `step`."""
    if budget is None or (budget.looked_at or 0) < step:
        return ()
    return (*LENGTH_KEYS, "schedule.decay_share", "stages")
