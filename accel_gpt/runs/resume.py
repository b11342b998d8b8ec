"""Resume a run: choose a checkpoint, and restore it on every rank.

What may change between the checkpoint and the run: see `changes.py`.
"""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.checkpointing import load_accelerator_state
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType
from accelerate.utils.constants import OPTIMIZER_NAME, SCALER_NAME
from accelerate.utils.other import load

from accel_gpt.config.compare import option_of
from accel_gpt.config.experiment import Config
from accel_gpt.config.plan import plural
from accel_gpt.data.corpus import source_changes
from accel_gpt.errors import CheckpointError, UserError, require
from accel_gpt.files import write_file
from accel_gpt.launch.ranks import all_ranks, on_main
from accel_gpt.model.language_model import LanguageModel
from accel_gpt.optim.groups import state_names
from accel_gpt.runs.changes import (
    budget_keys,
    check_same_config,
    check_same_run,
    config_changes,
    length_keys,
    or_null,
    run_changes,
)
from accel_gpt.runs.checkpoint import (
    is_checkpoint,
    read_evaluated,
    read_manifest,
    set_aside,
    verify_checkpoint,
)
from accel_gpt.runs.folder import RunFolder
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
        path = find_resume(out_dir, config.checkpoint.resume, log)
        if path:
            saved = read_evaluated(path)
            allowed = config.checkpoint.allow_change + length_keys(config, saved)
            check_same_run(path, saved, now, allowed + budget_keys(now.budget, saved.step))
            for key, (was, new) in run_changes(saved, now).items():
                log(f"from step {saved.step:,} on {key} is {or_null(new)}; it was {or_null(was)}")
            reset_best(out_dir, saved)
        else:
            allowed = config.checkpoint.allow_change + budget_keys(now.budget, step=0)
            check_same_config(config, allowed)
        for pattern in (".tmp_step_*", ".trash_step_*"):  # of a launch that was killed
            for folder in (out_dir / "checkpoints").glob(pattern):
                shutil.rmtree(folder, ignore_errors=True)
        return path

    chosen: Path | None = on_main(choose)
    return chosen


def find_resume(out_dir: Path, resume: str, log: Callable[[str], None]) -> Path | None:
    """Find and verify the checkpoint to resume from; None if there is none.

    `resume` is the value of `checkpoint.resume`. A path is used only if the run has no checkpoints;
    so a launch that is repeated resumes its own run. Raises `UserError` if `resume` is never but
    the run has checkpoints, or if `resume` is no checkpoint, or an older one of the run.
    """
    own = RunFolder(out_dir).checkpoints
    if not own:
        if resume in ("auto", "never"):
            return None
        path = Path(resume)
        require(
            is_checkpoint(path),
            f"checkpoint.resume is {resume}; expected auto, never or the folder of a checkpoint",
        )
        verify_checkpoint(path)
        return path
    if resume == "never":
        raise UserError(f"checkpoint.resume is never, but {out_dir} holds a run with checkpoints")
    if resume != "auto" and Path(resume).resolve() != own[max(own)].resolve():
        older = Path(resume).resolve().parent == (out_dir / "checkpoints").resolve()
        require(
            not older,
            f"checkpoint.resume is {resume}, but {out_dir} has newer checkpoints, up to step "
            f"{max(own):,}; set another out_dir",
        )
        log(f"{out_dir} has checkpoints, so checkpoint.resume {resume} is ignored")
    return newest_intact(out_dir, own, log)


def newest_intact(out_dir: Path, own: dict[int, Path], log: Callable[[str], None]) -> Path:
    """Return the newest intact checkpoint of a run, and set the damaged ones after it aside.

    Raises `CheckpointError` if all are damaged.
    """
    damaged = []
    for step in reversed(own):
        try:
            verify_checkpoint(own[step])
        except CheckpointError as error:
            log(f"WARNING: {error}; falling back to the checkpoint before it")
            damaged.append(own[step])
            continue
        for path in damaged:
            set_aside(path)
        return own[step]
    names = ", ".join(path.name for path in damaged)
    raise CheckpointError(
        f"all checkpoints of {out_dir} are damaged ({names}); restore one from a copy, or set "
        "another out_dir to start from scratch"
    )


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

    If the number of ranks is another one, their random states may differ: no step depends on them.

    Returns the checkpoint's state with the config, versions and world size of `now`. Raises
    `CheckpointError` if a value is missing or does not fit.
    """
    saved: TrainState = on_main(lambda: read_evaluated(path))
    same_world = saved.world_size == now.world_size
    if not same_world:
        count = plural(saved.world_size, "process", "processes")
        log(f"{path} was trained by {count}; this run has {now.world_size}")
    with all_ranks():
        listed = read_manifest(path)
        random_states = path / f"random_states_{accelerator.process_index}.pkl"
        if same_world and random_states.name not in listed:
            raise CheckpointError(f"checkpoint {path} lacks its file {random_states.name}")
        sharded = accelerator.distributed_type == DistributedType.FSDP
        plain = not sharded and f"{OPTIMIZER_NAME}.bin" in listed
        try:
            read_weights(path, gpt, "trained")
            if not plain:
                read_optimizer(path, gpt, optimizer)
            load_accelerator_state(
                input_dir=str(path),
                models=[],
                optimizers=[optimizer] if plain else [],
                schedulers=[],
                dataloaders=[],
                process_index=accelerator.process_index,
                scaler=accelerator.scaler if SCALER_NAME in listed else None,
            )
        except Exception as error:  # torch, safetensors and Accelerate raise no common class
            problem = describe_load_error(error)
            raise CheckpointError(f"{path} does not fit this run: {problem}") from None
        check_optimizer(path, gpt, optimizer)
        if same_world:
            check_random_states(random_states)
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
        state.best_value = None
    return state


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
    if saved.config.get("eval.best") != now.config["eval.best"]:
        return False
    changed = source_changes(vars(saved), vars(now)) | config_changes(saved.config, now.config)
    return not any(option_of(key).validation for key in changed)


def check_optimizer(path: Path, gpt: LanguageModel, optimizer: AcceleratedOptimizer) -> None:
    """Raise `CheckpointError` unless every parameter has all its moments, with its shape."""
    names = {id(p): name for name, p in gpt.named_parameters()}
    for group in optimizer.param_groups:
        expected = state_names(group)
        if expected is None:
            continue
        for p in group["params"]:
            state = optimizer.state.get(p, {})
            name = names.get(id(p), "a parameter")
            if state.keys() != expected:
                raise CheckpointError(
                    f"the optimizer in {path} has {', '.join(sorted(state)) or 'nothing'} of "
                    f"{name}; expected {', '.join(sorted(expected))}"
                )
            for key, value in state.items():
                if torch.is_tensor(value) and value.dim() and value.shape != p.shape:
                    raise CheckpointError(
                        f"the optimizer in {path} has {key} of {name} with shape "
                        f"{tuple(value.shape)}; expected {tuple(p.shape)}"
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
    """Return an error in one line, without torch's advice to set `weights_only=False`."""
    if "weights_only" in str(error):
        return "it holds objects other than tensors and plain values"
    return " ".join(str(error).split())[:300] or type(error).__name__
