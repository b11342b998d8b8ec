"""Compare the config of a run with the config of its checkpoint, and reject what may not change.

Each option says whether it may change between launches: see `Option.resume`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from accel_gpt.config.compare import (
    UNKNOWN,
    Differences,
    differences,
    option_of,
    resume_kind,
)
from accel_gpt.config.experiment import Config
from accel_gpt.config.plan import LENGTH_KEYS, Budget, make_plan
from accel_gpt.config.values import relocated, to_flat
from accel_gpt.data.corpus import source_changes
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
    kinds = {"code": "ask", "tokenizer": "refuse"}
    refused = [
        key
        for key in changes
        if (kinds.get(key) or resume_kind(key, saved.config, now.config)) == "refuse"
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
    if getattr(saved.code, "sha256", "") != getattr(now.code, "sha256", ""):
        changes["code"] = (saved.code, now.code)
    if saved.tokenizer_fingerprint != now.tokenizer_fingerprint:
        changes["tokenizer"] = (saved.tokenizer_fingerprint[:12], now.tokenizer_fingerprint[:12])
    return changes


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
    before = replace(config, train=replace(config.train, max_steps=steps, max_tokens=tokens))
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
    return (*LENGTH_KEYS, "schedule.decay_share")
