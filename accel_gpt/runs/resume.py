"""Resume a run: choose a checkpoint, and restore it on every rank.

What may change between the checkpoint and the run: see `changes.py`.
"""

from collections.abc import Callable, Mapping
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
from torch import Tensor

from accel_gpt.config.compare import UNKNOWN, option_of
from accel_gpt.config.experiment import Config
from accel_gpt.config.plan import make_plan, plural
from accel_gpt.data.corpus import source_changes
from accel_gpt.errors import (
    CheckpointError,
    UserError,
    first_line,
    require,
)
from accel_gpt.files import did_you_mean_folder, write_file
from accel_gpt.launch.ranks import all_ranks, on_main
from accel_gpt.launcher import world_size
from accel_gpt.model.language_model import LanguageModel
from accel_gpt.optim.groups import state_names
from accel_gpt.runs.changes import (
    allowed_changes,
    budget_keys,
    check_same_config,
    check_same_run,
    code_of,
    config_changes,
    length_keys,
)
from accel_gpt.runs.checkpoint import (
    is_checkpoint,
    only_listed,
    read_evaluated,
    set_aside,
    verify_checkpoint,
)
from accel_gpt.runs.folder import RUN_MARKS, RunFolder
from accel_gpt.runs.saving import remove_debris
from accel_gpt.runs.state import TrainState
from accel_gpt.runs.tensor_files import read_optimizer, read_weights

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
                    key == "code" or option_of(key) is not UNKNOWN,
                    f"checkpoint.allow_change has {key}, but it is not an option; repeat "
                    "--checkpoint.allow_change for several options",
                )
            allowed = config.checkpoint.allow_change + length_keys(config, saved)
            allowed += budget_keys(now.budget, saved.step)
            check_same_run(path, saved, now, allowed)
            for line in allowed_changes(config, saved, now):
                log(line)
            if saved.step == make_plan(config, world_size()).max_steps:
                log(f"{out_dir} is finished after {plural(saved.step, 'step')}")
            for key, (was, new) in source_changes(vars(saved), vars(now)).items():
                log(f"from step {saved.step:,} on {key} is {new}; it was {was}")
            reset_best(out_dir, saved)
        else:
            allowed = config.checkpoint.allow_change + budget_keys(now.budget, step=0)
            check_same_config(config, allowed)
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
            advice = "set auto, never or the folder of a checkpoint"
            if checkpoints := list(RunFolder(resume).checkpoints.values()):
                advice = f"give one of the run's checkpoints, such as {checkpoints[-1]}"
            else:
                advice = did_you_mean_folder(resume, RUN_MARKS, advice)
            raise UserError(f"checkpoint.resume {resume} is not a folder of a checkpoint; {advice}")
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
    """Write the best step of `saved` to the file `best` if the file names another step.

    Removes the file if the checkpoint of this step is gone.
    """
    run = RunFolder(out_dir)
    if run.best in ("", str(saved.best_step)):
        return
    if saved.best_step in run.checkpoints:
        write_file(out_dir / "best", [f"{saved.best_step}\n".encode()])
    else:
        (out_dir / "best").unlink()


# --------------------------------------------------------------------------- restore


def restore(
    accelerator: Accelerator,
    path: Path,
    now: TrainState,
    gpt: LanguageModel,
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
    with all_ranks(), only_listed(path) as files:
        load_on_this_rank(accelerator, path, files, saved, now, gpt, optimizer, log)
    state = replace(
        saved,
        config=now.config,
        world_size=now.world_size,
        budget=now.budget,
        versions=now.versions,
        code=now.code,
    )
    if not best_step_is_valid(path, saved, now):
        state.best_step = None
        state.best_val_loss = None
    return state


def load_on_this_rank(
    accelerator: Accelerator,
    path: Path,
    files: Path,
    saved: TrainState,
    now: TrainState,
    gpt: LanguageModel,
    optimizer: AcceleratedOptimizer,
    log: Callable[[str], None],
) -> None:
    """Load a checkpoint on this rank; raise `CheckpointError` if a file does not fit.

    `path`: its folder. `files`: the folder to read, see `only_listed`.
    """
    same_world = saved.world_size == now.world_size
    random_states = files / f"random_states_{accelerator.process_index}.pkl"
    if same_world and not random_states.is_file():
        raise CheckpointError(f"checkpoint {path} lacks its file {random_states.name}")
    scaler = accelerator.scaler
    if scaler is not None and not (files / SCALER_NAME).is_file():
        log(f"{path} was not trained in fp16: the loss scale restarts at its initial value")
        accelerator.scaler = None
    sharded = accelerator.distributed_type == DistributedType.FSDP
    try:
        if sharded or not (files / SAFE_WEIGHTS_NAME).is_file():
            read_weights(files, gpt)
            read_optimizer(files, gpt, optimizer)
            if same_world:  # load the random states; FSDP excludes fp16, so there is no scaler
                load_accelerator_state(
                    input_dir=str(files),
                    models=[],
                    optimizers=[],
                    schedulers=[],
                    dataloaders=[],
                    process_index=accelerator.process_index,
                    scaler=accelerator.scaler,
                )
        else:
            accelerator.load_state(str(files))
    except Exception as error:  # torch, safetensors and Accelerate raise no common class
        hint = ""
        if code_of(saved) != code_of(now):
            used = f"with --code {saved.code}" if saved.code else "without --code"
            hint = f"; it was made {used}: do the same, or set another out_dir"
        raise CheckpointError(
            f"{path} does not fit this run: {describe_load_error(error)}{hint}"
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


def check_optimizer(path: Path, gpt: LanguageModel, optimizer: AcceleratedOptimizer) -> None:
    """Raise `CheckpointError` unless every parameter has all its moments, with its shape."""
    file = path / f"{OPTIMIZER_NAME}.bin"
    names = {id(p): name for name, p in gpt.named_parameters()}
    for group in optimizer.param_groups:
        for p in group["params"]:
            name = names.get(id(p), "a parameter")
            state = optimizer.state.get(p, {})
            expected = state_names(group)
            if expected is not None:
                check_moments(file, name, p, expected=expected, state=state)


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


def describe_load_error(error: Exception) -> str:
    """Return the first telling line of an error, without torch's advice on `weights_only=False`."""
    if "weights_only" in str(error):
        return "it holds objects other than tensors and plain values"
    title, _, differences = str(error).partition("\n")
    if title.startswith("Error(s) in loading state_dict"):  # of a module
        return first_line(ValueError(differences))
    return first_line(error)
