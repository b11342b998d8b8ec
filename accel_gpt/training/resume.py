"""Whether a run continues: from which checkpoint, and what may differ from its config.

Keys of the config are of three classes: those in `IDENTITY` make it another run, those in `FREE`
may change, all others need `--checkpoint.allow_change`.
"""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from accel_gpt.config.experiment import Config
from accel_gpt.config.parse import to_flat, to_plain
from accel_gpt.config.plan import Plan
from accel_gpt.data.corpus import source_changes
from accel_gpt.errors import CheckpointError, DivergedError, UserError
from accel_gpt.files import write_file
from accel_gpt.training.anomalies import ranges, spoken
from accel_gpt.training.checkpoint import (
    before_skips,
    is_checkpoint,
    quarantine,
    read_state,
    states_of,
    verify,
)
from accel_gpt.training.ranks import on_main
from accel_gpt.training.run_folder import RunFolder, checkpoint_steps, step_name
from accel_gpt.training.saving import clean, discard
from accel_gpt.training.state import TrainState

FREE = (
    "out_dir",
    "data.train",  # the fingerprint of its content decides
    "data.tokenizer",
    "data.cache_",
    "data.allow_change",
    "data.prepare.",
    "model.init_from",
    "model.allow_pickle",
    "model.zero_init",
    "model.depth",  # what it set is compared itself
    "train.micro_batch_size",
    "train.mixed_precision",
    "train.matmul_precision",
    "train.compile",
    "train.activation_checkpointing",
    "train.cpu_threads",
    "train.time_limit",
    "train.step_timeout",
    "train.profile",
    "eval.every",
    "eval.only",
    "eval.hellaswag",
    "sample.",
    "checkpoint.",
    "log.",
    "hub.",
)
NOT_TOLD = "not told"  # a place in the config of a checkpoint that was pushed
IDENTITY = (
    "model.",  # tensors would not fit
    "optim.name",
    "tokenizer",
    "seed",
    "data.shuffle",
    "train.tokens_per_step",  # it maps steps to data
)
# Set or not set, these part the parameters into other groups.
PARTS = ("optim.embedding_lr", "optim.head_lr")
# What of it decides the bits that train.reproducible promises.
BITS = (
    "train.micro_batch_size",
    "train.mixed_precision",
    "train.matmul_precision",
    "train.cpu_threads",
)


def find_resume(
    out_dir: Path, resume: str, say: Callable[[str], None], most: float = math.inf
) -> Path | None:
    """The verified checkpoint to continue from, of step `most` or before; None: start from scratch.

    `auto` takes the newest intact one and sets damaged ones aside, loudly; so does a path once the
    run has checkpoints of its own. Raises `CheckpointError` when all are damaged, `UserError` when
    a run is in the way of `never` or a path holds none.
    """
    root = out_dir / "checkpoints"
    if resume == "never":
        if checkpoint_steps(root):
            raise UserError(
                f"checkpoint.resume is never but {out_dir} holds a run with checkpoints; "
                "set another out_dir or remove it"
            )
        return None
    if resume != "auto" and not checkpoint_steps(root):
        if not is_checkpoint(Path(resume)):
            raise UserError(f"checkpoint.resume is {resume}, which is not a checkpoint folder")
        verify(Path(resume))
        return Path(resume)
    damaged = []
    for step in reversed([step for step in checkpoint_steps(root) if step <= most]):
        path = root / step_name(step)
        try:
            verify(path)
        except CheckpointError as error:
            say(f"WARNING: {error}; set aside, falling back to the checkpoint before it")
            damaged.append(path)
            continue
        for bad in damaged:
            quarantine(bad)
        return path
    if damaged:
        raise CheckpointError(
            f"all checkpoints of {out_dir} are damaged ({', '.join(p.name for p in damaged)}); "
            "set another out_dir to start from scratch"
        )
    return None


def take_up(config: Config, now: TrainState, say: Callable[[str], None]) -> Path | None:
    """The checkpoint to continue from, chosen and verified by the main process for all of them."""
    path = on_main(lambda: choose(config, now, say))
    return Path(path) if path else None


def choose(config: Config, now: TrainState, say: Callable[[str], None]) -> str | None:
    """The checkpoint to continue from, if any; debris of a killed launch is removed."""
    out_dir = Path(config.out_dir)
    path = find_resume(out_dir, config.checkpoint.resume, say)
    if path:
        saved = read_state(path)
        allowed = config.checkpoint.allow_change
        if config.data.allow_change:
            allowed += ("data.train",)
        check_same_run(path, saved, now, allowed)
        for key, (was, new) in source_changes(vars(saved), vars(now)).items():
            say(f"from step {saved.step:,} on {key} is {new}; it was {was}")
        name_best(out_dir, saved)
    else:
        check_same_folder(config)
    clean(out_dir / "checkpoints")
    return str(path) if path else None


def step_back(
    config: Config,
    plan: Plan,
    state: TrainState,
    say: Callable[[str], None],
) -> tuple[Path, list[list[int]]]:
    """The checkpoint to return to after too many skipped updates, and the sequences to leave out.

    It is the last one that lies in no row of skipped updates: where a signal had one saved in the
    middle of the row, the run goes on as if never stopped. Those after it are removed, as they
    counted the batches that are left out. Raises `DivergedError` where there is none, or where the
    run returned to it before: then the fault is not in the batches.
    """

    def decide() -> tuple[str, list[list[int]]]:
        spans = ranges(state.skipped_in_row, plan.sequences_per_step)
        what = (
            f"the updates of {len(state.skipped_in_row)} steps in a row were skipped, of sequences "
            f"{spoken(spans)}"
        )
        advice = "lower optim.lr, lengthen schedule.warmup_steps or use train.mixed_precision bf16"
        root = Path(config.out_dir) / "checkpoints"
        states = states_of(root)
        before = before_skips(states)
        path = find_resume(root.parent, "auto", say, before[-1] if before else math.inf)
        if path is None:
            raise DivergedError(f"{what}, and there is no checkpoint to return to; {advice}")
        saved = read_state(path)
        name_best(root.parent, saved)
        if saved.excluded != state.excluded:
            raise DivergedError(
                f"{what}, after the run had returned to {path} without the sequences "
                f"{spoken(state.excluded)}; look at them, or {advice}"
            )
        for step in states:
            if saved.step < step <= state.step:
                discard(root, step)
        say(f"WARNING: {what}; returning to {path} and going on without them")
        return str(path), saved.excluded + spans

    path, excluded = on_main(decide)
    return Path(path), excluded


def name_best(out_dir: Path, saved: TrainState) -> None:
    """Let `best` name the best step that `saved` knows, if it names a later one."""
    best = out_dir / "best"
    named = best.read_text(encoding="utf-8", errors="replace") if best.is_file() else ""
    if not named or named.strip() == str(saved.best_step):
        return
    if saved.best_step in checkpoint_steps(out_dir / "checkpoints"):
        write_file(best, [f"{saved.best_step}\n".encode()])
    else:
        best.unlink()


def check_same_run(
    path: Path, state: TrainState, now: TrainState, allowed: tuple[str, ...]
) -> None:
    """Raise an error that lists what differs between a checkpoint and the run that continues it.

    `CheckpointError` where it is another run, `UserError` where the changes could be allowed.
    """
    changes = differences(state.config, now.config)
    changes |= source_changes(vars(state), vars(now))
    regrouped = parted(state.config) != parted(now.config)
    identity = (*IDENTITY, *PARTS) if regrouped else IDENTITY
    refused = {
        key: change
        for key, change in changes.items()
        if key.partition("[")[0] not in allowed or key.startswith(identity)
    }
    if state.tokenizer_fingerprint != now.tokenizer_fingerprint:
        refused["tokenizer"] = (state.tokenizer_fingerprint[:12], now.tokenizer_fingerprint[:12])
    if not refused:
        return
    kind = CheckpointError if any(key.startswith(identity) for key in refused) else UserError
    raise kind(
        f"{path} was made with another config: {listed(refused)}; restore "
        f"{'it' if len(refused) == 1 else 'them'}, set another out_dir"
        + allow_hint([key.partition("[")[0] for key in refused if not key.startswith(identity)])
    )


def parted(config: Mapping[str, Any]) -> bool:
    """Whether embeddings and head are groups of the optimizer of their own."""
    return any(config.get(key) is not None for key in PARTS)


def check_same_folder(config: Config) -> None:
    """Raise `UserError` if `out_dir` belongs to a run of another config, without a checkpoint."""
    before = RunFolder(config.out_dir).read_config()
    if not before:
        return
    changes = differences(before, to_flat(to_plain(config)))
    refused = {k: v for k, v in changes.items() if k not in config.checkpoint.allow_change}
    if refused:
        raise UserError(
            f"out_dir {config.out_dir} holds a run of another config: {listed(refused)}; "
            "set another out_dir" + allow_hint([k for k in refused if not k.startswith(IDENTITY)])
        )


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Keys whose values differ and may not: key -> (before, now); a key that `before` lacks, as an
    earlier version wrote it, had its default.
    """
    before = to_flat(to_plain(Config())) | dict(before)
    held = BITS if now.get("train.reproducible") else ()
    return {
        key: (before.get(key), now.get(key))
        for key in sorted(before.keys() | now.keys())
        if before.get(key) not in (now.get(key), NOT_TOLD)
        and (key in held or not key.startswith(FREE))
    }


def listed(changes: Mapping[str, tuple[Any, Any]]) -> str:
    """`optim.lr was 0.001, is 0.002; ...`."""
    return ", ".join(f"{key} was {was}, is {now}" for key, (was, now) in changes.items())


def allow_hint(keys: list[str]) -> str:
    """How to accept a change that can be accepted."""
    keys = list(dict.fromkeys(keys))
    if keys == ["data.train"]:
        return ", or accept it with --data.allow_change"
    return f", or accept it with --checkpoint.allow_change {','.join(keys)}" if keys else ""
