"""Resume a run: choose a checkpoint, compare its config, restore it on every rank.

Each option says whether it may change between launches: see `Option.resume`.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.checkpointing import load_accelerator_state
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType
from accelerate.utils.constants import OPTIMIZER_NAME, SAFE_WEIGHTS_NAME, SCALER_NAME
from accelerate.utils.other import load
from safetensors.torch import load_file
from torch import Tensor

from accel_gpt.config.compare import (
    UNKNOWN,
    Differences,
    differences,
    option_of,
    resume_kind,
)
from accel_gpt.config.experiment import Config, ScheduleConfig
from accel_gpt.config.plan import LENGTH_KEYS, Plan, make_plan, plural
from accel_gpt.config.values import build, relocated, to_flat
from accel_gpt.data.corpus import source_changes
from accel_gpt.errors import (
    CheckpointError,
    NewerFormatError,
    UserError,
    first_line,
    require,
)
from accel_gpt.files import write_file
from accel_gpt.json_files import unknown_key_message
from accel_gpt.launcher import world_size
from accel_gpt.model.gpt import GPT
from accel_gpt.model.sharding import load_full
from accel_gpt.optim.groups import fraction_at, state_names
from accel_gpt.training.checkpoint import (
    is_checkpoint,
    read_evaluated,
    set_aside,
    verify_checkpoint,
)
from accel_gpt.training.ranks import all_ranks, on_main
from accel_gpt.training.run_folder import RunFolder
from accel_gpt.training.saving import remove_debris
from accel_gpt.training.state import TrainState
from accel_gpt.training.tensor_files import moments_of, read_tensors, read_weights

# --------------------------------------------------------------------------- choose a checkpoint


def choose_checkpoint(config: Config, now: TrainState, log: Callable[[str], None]) -> Path | None:
    """Choose the checkpoint to resume from; None: start at step 0.

    Rank 0 chooses for all ranks; a collective. Sets damaged checkpoints aside if an intact one is
    left, and removes incomplete folders of a killed launch. Raises `UserError` or `CheckpointError`
    if `out_dir` holds another run than `now`.
    """

    def choose() -> Path | None:
        out_dir = Path(config.out_dir)
        check_resume(out_dir, config.checkpoint.resume, log)
        path = find_resume(out_dir, config.checkpoint.resume, log)
        if path:
            saved = read_evaluated(path)
            for key in config.checkpoint.allow_change:
                require(
                    key in now.config,
                    f"checkpoint.allow_change has {key}, but it is not an option; repeat "
                    "--checkpoint.allow_change for several options",
                )
            allowed = config.checkpoint.allow_change + length_keys(config, saved)
            check_same_run(path, saved, now, allowed)
            for line in allowed_changes(config, saved, now):
                log(line)
            if saved.step == make_plan(config, world_size()).max_steps:
                log(f"{out_dir} is finished after {plural(saved.step, 'step')}")
            for key, (was, new) in source_changes(vars(saved), vars(now)).items():
                log(f"from step {saved.step:,} on {key} is {new}; it was {was}")
            reset_best(out_dir, saved)
        else:
            check_same_config(config)
        remove_debris(out_dir / "checkpoints")
        return path

    chosen: Path | None = on_main(choose)
    return chosen


def check_resume(out_dir: Path, resume: str, log: Callable[[str], None]) -> None:
    """Raise `UserError` if `checkpoint.resume` is an older checkpoint of `out_dir`.

    Resuming from it would overwrite the newer ones. If `checkpoint.resume` is elsewhere but the run
    has its own checkpoints, logs that it is ignored.
    """
    own = RunFolder(out_dir).checkpoints
    if resume in ("auto", "never") or not own:
        return
    requested = Path(resume).resolve()
    newest = max(own)
    if requested == own[newest].resolve():
        return
    older = [step for step, path in own.items() if path.resolve() == requested]
    require(
        not older,
        f"checkpoint.resume is step {max(older, default=0):,} ({resume}) but {out_dir} has newer "
        f"checkpoints, up to step {newest:,}; to resume from step {max(older, default=0):,}, set "
        f"another out_dir; to resume from step {newest:,}, remove checkpoint.resume",
    )
    log(f"{out_dir} has checkpoints, so checkpoint.resume {resume} is ignored")


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
    before = with_length_of(saved, config)
    try:
        plan_before = make_plan(before, world_size())
    except UserError:  # the old length does not fit the schedule of `config`, or is unknown
        return ()
    for step in range(saved.step):
        if fraction_in(step, config, plan) != fraction_in(step, before, plan_before):
            return ()
    return LENGTH_KEYS


def allowed_changes(config: Config, saved: TrainState, now: TrainState) -> Iterator[str]:
    """Yield a line for each allowed change, and one if the learning rate jumps at the resume."""
    for key, (was, new) in config_changes(saved.config, now.config).items():
        yield f"from step {saved.step:,} on {key} is {as_yaml(new)}; it was {as_yaml(was)}"
    plan = make_plan(config, world_size())
    try:
        before = with_schedule_of(saved, config)
        rate_before = rate_at(saved.step - 1, before)
    except UserError:  # the saved length does not fit the new schedule
        return
    if rate_before != rate_at(saved.step - 1, config) and 0 < saved.step < plan.max_steps:
        following = rate_at(saved.step, config)
        verb = "rises" if following > rate_before else "goes"
        yield (
            f"the learning rate {verb} from {rate_before:.2e} in step {saved.step:,} to "
            f"{following:.2e} in step {saved.step + 1:,}"
        )


def rate_at(step: int, config: Config) -> float:
    """Return the learning rate of the update that follows `step` completed updates."""
    return config.optim.lr * fraction_in(step, config, make_plan(config, world_size()))


def fraction_in(step: int, config: Config, plan: Plan) -> float:
    """Return the learning rate after `step` completed updates, as a share of its peak."""
    return fraction_at(step, config.schedule, config.optim.lr, plan)


def with_length_of(saved: TrainState, config: Config) -> Config:
    """Return `config` with the run's length from a checkpoint."""
    steps = saved.config.get("train.max_steps")
    tokens = saved.config.get("train.max_tokens")
    return replace(config, train=replace(config.train, max_steps=steps, max_tokens=tokens))


def with_schedule_of(saved: TrainState, config: Config) -> Config:
    """Return `config` with the run's length and learning rates from a checkpoint."""
    known = to_flat(Config()) | saved.config
    schedule = {}
    for key, value in known.items():
        if key.startswith("schedule."):
            schedule[key.removeprefix("schedule.")] = value
    return replace(
        with_length_of(saved, config),
        optim=replace(config.optim, lr=known["optim.lr"]),
        schedule=build(ScheduleConfig, schedule),
    )


def find_resume(out_dir: Path, resume: str, log: Callable[[str], None]) -> Path | None:
    """Find and verify the checkpoint to resume from; None if there is none.

    `resume` is the value of `checkpoint.resume`. A path is used only if the run has no checkpoints.
    Otherwise, the newest intact checkpoint is used, and damaged ones are set aside with a warning.

    Raises `CheckpointError` if all checkpoints are damaged. Raises `UserError` if `resume` is never
    but the run has checkpoints, or if `resume` is not a checkpoint.
    """
    own = RunFolder(out_dir).checkpoints
    if resume == "never":
        if own:
            raise UserError(
                f"checkpoint.resume is never but {out_dir} holds a run with checkpoints; "
                "set another out_dir, or remove the folder"
            )
        return None
    if resume != "auto" and not own:
        if not is_checkpoint(Path(resume)):
            raise UserError(
                f"checkpoint.resume {resume} is not a folder of a checkpoint; set auto, never or "
                "the folder of a checkpoint"
            )
        verify_checkpoint(Path(resume))
        return Path(resume)
    damaged = []
    for path in reversed(own.values()):
        try:
            verify_checkpoint(path)
        except CheckpointError as error:
            log(f"WARNING: {error}; falling back to the checkpoint before it")
            damaged.append(path)
            continue
        for bad in damaged:
            set_aside(bad)
        return path
    if damaged:
        names = ", ".join(path.name for path in damaged)
        raise CheckpointError(
            f"all checkpoints of {out_dir} are damaged ({names}); restore one from a copy, or set "
            "another out_dir to start from scratch"
        )
    return None


def reset_best(out_dir: Path, saved: TrainState) -> None:
    """Write the best step of `saved` to the file `best`; remove the file if that step is gone."""
    run = RunFolder(out_dir)
    if run.best in ("", str(saved.best_step)):
        return
    if saved.best_step in run.checkpoints:
        write_file(out_dir / "best", [f"{saved.best_step}\n".encode()])
    else:
        (out_dir / "best").unlink()


# --------------------------------------------------------------------------- what may change


def check_same_run(
    path: Path, saved: TrainState, now: TrainState, allowed: tuple[str, ...]
) -> None:
    """Raise an error that lists rejected changes between a checkpoint and the run that resumes it.

    Raises `UserError` if `checkpoint.allow_change` could allow all of them, else `CheckpointError`.
    Raises `NewerFormatError` if the checkpoint has an option that this version does not know.
    """
    check_known_options(path / "trainer_state.json", saved.config, "config.")
    changes = config_changes(saved.config, now.config) | source_changes(vars(saved), vars(now))
    kinds = {key: resume_kind(key, saved.config, now.config) for key in changes}
    rejected = {}
    for key, change in changes.items():
        if kinds[key] == "refuse" or key.partition("[")[0] not in allowed:
            rejected[key] = change
    if saved.tokenizer_fingerprint != now.tokenizer_fingerprint:
        rejected["tokenizer"] = (saved.tokenizer_fingerprint[:12], now.tokenizer_fingerprint[:12])
        kinds["tokenizer"] = "refuse"
    if not rejected:
        return
    old_values = "the old value" if len(rejected) == 1 else "the old values"
    problem = f"{path} was made with another config: {format_changes(rejected)}"
    if any(kinds[key] == "refuse" for key in rejected):
        raise CheckpointError(f"{problem}; restore {old_values}, or set another out_dir")
    hint = allow_hint([key.partition("[")[0] for key in rejected])
    raise UserError(f"{problem}; restore {old_values}, set another out_dir{hint}")


def check_same_config(config: Config) -> None:
    """Raise `UserError` if `out_dir` holds a run with another config, but no checkpoint."""
    run = RunFolder(config.out_dir)
    before = run.read_config()
    check_known_options(run.path / "config.yaml", before)
    now = to_flat(config)
    changes = config_changes(before, now) if before else {}
    rejected = {}
    for key, change in changes.items():
        if key not in config.checkpoint.allow_change:
            rejected[key] = change
    if not rejected:
        return
    another_run = any(resume_kind(key, before, now) == "refuse" for key in rejected)
    hint = "" if another_run else allow_hint(list(rejected))
    raise UserError(
        f"out_dir {config.out_dir} holds a run with another config: {format_changes(rejected)}; "
        f"set another out_dir{hint}"
    )


def check_known_options(file: Path, saved: Mapping[str, Any], prefix: str = "") -> None:
    """Raise `NewerFormatError` if a saved config has an option that this version does not know.

    `prefix`: where `file` has the options.
    """
    unknown = [key for key in saved if option_of(key) is UNKNOWN]
    if unknown:
        problem = f"{prefix}{min(unknown)} is an unknown key"
        raise NewerFormatError(unknown_key_message(file, problem))


def config_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> Differences:
    """Return the options that differ and may not change freely.

    If a run moved and `data.val` moved with it, `data.val` does not differ.
    """
    out_dirs = (str(before.get("out_dir")), str(now.get("out_dir")))
    changes = {}
    for key, (was, new) in differences(before, now).items():
        if resume_kind(key, before, now) in ("free", "start"):
            continue
        if key.startswith("data.val") and relocated(was, *out_dirs) == new:
            continue
        changes[key] = (was, new)
    return changes


def format_changes(changes: Mapping[str, tuple[Any, Any]]) -> str:
    """Format changes as `optim.lr was 0.001, is 0.002, ...`."""
    return ", ".join(
        f"{key} was {as_yaml(was)}, is {as_yaml(now)}" for key, (was, now) in changes.items()
    )


def as_yaml(value: Any) -> Any:
    """Return `value`, or "null" for None."""
    return "null" if value is None else value


def allow_hint(keys: list[str]) -> str:
    """Return the end of an error message: how to accept changes of these options."""
    options = [f"--checkpoint.allow_change {key}" for key in dict.fromkeys(keys)]
    return f", or accept it with {' '.join(options)}" if options else ""


# --------------------------------------------------------------------------- restore


def restore(
    accelerator: Accelerator,
    path: Path,
    now: TrainState,
    gpt: GPT,
    optimizer: AcceleratedOptimizer,
    log: Callable[[str], None],
) -> TrainState:
    """Load weights, optimizer, scaler and random states of a verified checkpoint, on every rank.

    If the number of ranks is the same, checks the random states. Otherwise, an unsharded run
    restores them on the ranks that have a file. No step depends on random states.

    Returns the checkpoint's state with the config, versions and world size of `now`. Raises
    `CheckpointError` if a value is missing or does not fit; `load_state` skips some silently.
    """
    saved: TrainState = on_main(lambda: read_evaluated(path))
    with all_ranks():
        load_on_this_rank(accelerator, path, saved, now, gpt, optimizer, log)
    state = replace(saved, config=now.config, world_size=now.world_size, versions=now.versions)
    if not best_step_is_valid(path, saved, now):
        state.best_step = None
        state.best_val_loss = None
    return state


def load_on_this_rank(
    accelerator: Accelerator,
    path: Path,
    saved: TrainState,
    now: TrainState,
    gpt: GPT,
    optimizer: AcceleratedOptimizer,
    log: Callable[[str], None],
) -> None:
    """Load the files of a checkpoint on this rank; raise `CheckpointError` if one does not fit."""
    same_world = saved.world_size == now.world_size
    random_states = path / f"random_states_{accelerator.process_index}.pkl"
    if same_world and not random_states.is_file():
        raise CheckpointError(f"checkpoint {path} lacks its file {random_states.name}")
    scaler = accelerator.scaler
    if scaler is not None and not (path / SCALER_NAME).is_file():
        log(f"{path} was not trained in fp16: the loss scale restarts at its initial value")
        accelerator.scaler = None
    sharded = accelerator.distributed_type == DistributedType.FSDP
    try:
        if sharded or not (path / SAFE_WEIGHTS_NAME).is_file():
            load_shards(path, gpt, optimizer)
            if same_world:  # load the random states; FSDP excludes fp16, so there is no scaler
                load_accelerator_state(
                    input_dir=str(path),
                    models=[],
                    optimizers=[],
                    schedulers=[],
                    dataloaders=[],
                    process_index=accelerator.process_index,
                    scaler=accelerator.scaler,
                )
        else:
            accelerator.load_state(str(path))
    except Exception as error:  # torch, safetensors and Accelerate raise no common class
        raise CheckpointError(
            f"{first_unreadable_file(path)} does not fit this run: {describe_load_error(error)}"
        ) from None
    finally:
        accelerator.scaler = scaler
    accelerator.step = 0  # a checkpoint is saved between steps: no micro-step is pending
    check_optimizer(path, gpt, optimizer)
    if same_world:
        check_random_states(random_states)
    else:
        count = plural(saved.world_size, "process", "processes")
        log(f"{path} was trained by {count}; this run has {now.world_size}")


def best_step_is_valid(path: Path, saved: TrainState, now: TrainState) -> bool:
    """Return whether the best step in a checkpoint is the best step of the run that resumes.

    It is not if the checkpoint is from another folder, or if an option of the evaluation changed.
    With `checkpoint.keep_best`, it is not if both the file `best` and the best checkpoint are gone.
    """
    run = RunFolder(now.config["out_dir"])
    if path.parent.parent.resolve() != run.path.resolve():
        return False
    unnamed = now.config["checkpoint.keep_best"] and not run.best
    if unnamed and saved.best_step not in run.checkpoints:
        return False
    changed = source_changes(vars(saved), vars(now)) | config_changes(saved.config, now.config)
    return not any(option_of(key).validation for key in changed)


def load_shards(path: Path, gpt: GPT, optimizer: AcceleratedOptimizer) -> None:
    """Load weights and optimizer. The checkpoint and this run may each be sharded or not."""
    read_weights(path, gpt)
    files = sorted(path.glob("optimizer_*.safetensors"))
    if files:
        moments = moments_of(gpt, optimizer)
        unknown = read_tensors(files, moments) - moments.keys()
        if unknown:
            raise CheckpointError(f"it has {min(unknown)}, unknown to this optimizer")
        return
    file = path / f"{OPTIMIZER_NAME}.bin"
    saved = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    # the file numbers parameters in the order of the groups
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number, p in zip(numbers, parameters, strict=True):
        for name, full in saved["state"][number].items():
            if full.dim():
                moment = torch.zeros_like(p)
                load_full(moment, full)
            else:
                moment = full.to(p.device)
            optimizer.state[p][name] = moment


def check_optimizer(path: Path, gpt: GPT, optimizer: AcceleratedOptimizer) -> None:
    """Raise `CheckpointError` unless every parameter has all its moments, with its shape."""
    file = path / f"{OPTIMIZER_NAME}.bin"
    names = {id(p): name for name, p in gpt.named_parameters()}
    for group in optimizer.param_groups:
        for p in group["params"]:
            name = names.get(id(p), "a parameter")
            state = optimizer.state.get(p, {})
            check_moments(file, name, p, expected=state_names(group), state=state)


def check_moments(
    file: Path, name: str, parameter: Tensor, expected: set[str], state: Mapping[str, Any]
) -> None:
    """Raise `CheckpointError` unless the state of one parameter has the `expected` tensors."""
    missing = sorted(expected - state.keys())
    if missing:
        raise CheckpointError(f"{file} lacks {', '.join(missing)} of {name}")
    unknown = sorted(state.keys() - expected)
    if unknown:
        raise CheckpointError(
            f"{file} has {', '.join(unknown)} of {name}, unknown to this optimizer"
        )
    for key, value in state.items():
        if torch.is_tensor(value) and value.dim() and value.shape != parameter.shape:
            raise CheckpointError(
                f"{file} has {key} of {name} with shape {tuple(value.shape)}, but the parameter "
                f"has shape {tuple(parameter.shape)}"
            )


def check_random_states(path: Path) -> None:
    """Raise `CheckpointError` unless this rank has the random states of the file."""
    try:
        restored = torch.equal(torch.get_rng_state(), load(path)["torch_manual_seed"])
    except Exception as error:  # as in `restore`
        raise CheckpointError(
            f"{path} could not be restored: {describe_load_error(error)}"
        ) from None
    if not restored:
        raise CheckpointError(f"the random states in {path} could not be restored")


def first_unreadable_file(path: Path) -> Path:
    """Return the first file of a checkpoint that cannot be loaded, or the folder if all can."""
    for file in sorted(path.iterdir()):
        try:
            if file.suffix == ".safetensors":
                load_file(file)
            elif file.suffix in (".bin", ".pkl", ".pt"):
                load(file, map_location="cpu")
        except Exception:  # as in `restore`
            return file
    return path


def describe_load_error(error: Exception) -> str:
    """Return the first line of an error, without torch's advice to set `weights_only=False`."""
    if "weights_only" in str(error):
        return "it holds objects other than tensors and plain values"
    return first_line(error)
