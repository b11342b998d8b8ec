"""The way back into a run: everything that a checkpoint holds, on every process, or an error."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType
from accelerate.utils.constants import (
    FSDP_MODEL_NAME,
    OPTIMIZER_NAME,
    SAFE_WEIGHTS_NAME,
    SCALER_NAME,
)
from accelerate.utils.other import load
from safetensors.torch import load_file
from torch import Tensor

from accel_gpt.errors import CheckpointError, first_line
from accel_gpt.model.gpt import GPT
from accel_gpt.optim.groups import state_names
from accel_gpt.optim.sharded import is_sharded
from accel_gpt.training.checkpoint import read_state
from accel_gpt.training.state import TrainState


def restore(
    accelerator: Accelerator,
    path: Path,
    now: TrainState,
    gpt: GPT,
    optimizer: AcceleratedOptimizer,
    say: Callable[[str], None],
) -> TrainState:
    """Weights, optimizer, scaler and random states of a verified checkpoint, on every process.

    Returns its state, carried over to the config and processes of `now`. Raises `CheckpointError`
    naming what is missing or does not fit: `load_state` alone would pass over some of it.
    """
    saved = read_state(path)
    same_world = saved.world_size == now.world_size
    own = path / f"random_states_{accelerator.process_index}.pkl"
    if same_world and not own.is_file():
        raise CheckpointError(f"checkpoint {path} lacks its file {own.name}")
    scaler = accelerator.scaler
    if scaler is not None and not (path / SCALER_NAME).is_file():
        say(f"{path} was not trained in fp16: the scale of the loss starts anew")
        accelerator.scaler = None
    sharded = accelerator.distributed_type == DistributedType.FSDP
    unsharded = sharded and not (path / f"{FSDP_MODEL_NAME}.bin").is_file()
    try:
        if unsharded:
            load_unsharded(path, gpt, optimizer)
        else:
            accelerator.load_state(str(path))
    except Exception as error:  # what torch, safetensors and Accelerate raise has no common class
        raise CheckpointError(f"{culprit(path)} does not fit this run: {said(error)}") from None
    finally:
        accelerator.scaler = scaler
    accelerator.step = 0  # a checkpoint is taken between steps: no micro-step is pending
    check_optimizer(path, gpt, optimizer)
    if unsharded:
        say(f"{path} was trained without FSDP, this is with it")
    elif same_world:
        check_random(own)
    else:
        say(f"{path} was trained by {saved.world_size} processes, this is {now.world_size}")
    state = replace(saved, config=now.config, world_size=now.world_size, versions=now.versions)
    if path.parent.parent.resolve() != Path(now.config["out_dir"]).resolve():
        state.best_step = state.best_val_loss = None  # the best so far is not in this folder
    return state


def load_unsharded(path: Path, gpt: GPT, optimizer: AcceleratedOptimizer) -> None:
    """Give each process of FSDP2 its part of a checkpoint that was saved without; a collective."""
    from torch.distributed.tensor import distribute_tensor

    def own(whole: Tensor, like: Tensor) -> Tensor:
        if not is_sharded(like) or whole.shape != like.shape:  # a count of steps
            return whole
        return distribute_tensor(whole.to(like.device), like.device_mesh, like.placements)

    weights = load_file(path / SAFE_WEIGHTS_NAME)
    with torch.no_grad():
        for name, parameter in gpt.named_parameters():
            parameter.copy_(own(weights[name], parameter))
    moments = load(path / f"{OPTIMIZER_NAME}.bin", map_location="cpu")
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    moments["state"] = {
        number: {key: own(value, parameters[number]) for key, value in kept.items()}
        for number, kept in moments["state"].items()
    }
    optimizer.optimizer.load_state_dict(moments)


def culprit(path: Path) -> Path:
    """The file of a checkpoint that cannot be read, where it is a single one, else the folder."""
    for file in sorted(path.iterdir()):
        try:
            if file.suffix == ".safetensors":
                load_file(file)
            elif file.suffix in (".bin", ".pkl", ".pt"):
                load(file, map_location="cpu")
        except Exception:  # as in `restore`
            return file
    return path


def said(error: Exception) -> str:
    """What torch, safetensors or Accelerate say first; of what torch would not unpickle none of it,
    as that is advice to read it unsafely.
    """
    if "weights_only" in str(error):
        return "it holds objects other than tensors and plain values, which are not loaded"
    return first_line(error)


def check_optimizer(path: Path, gpt: GPT, optimizer: AcceleratedOptimizer) -> None:
    """Raise `CheckpointError` unless every parameter has its moments, of its shape."""
    names = {id(parameter): name for name, parameter in gpt.named_parameters()}
    file = path / "optimizer.bin"
    kept = [(p, state_names(group)) for group in optimizer.param_groups for p in group["params"]]
    for p, wanted in kept:
        name, found = names.get(id(p), "a parameter"), optimizer.state.get(p, {})
        if lacking := sorted(wanted - found.keys()):
            raise CheckpointError(f"{file} lacks {', '.join(lacking)} of {name}")
        if foreign := sorted(found.keys() - wanted):
            raise CheckpointError(
                f"{file} has {', '.join(foreign)} of {name}, which another optimizer keeps"
            )
        for key, value in found.items():
            if torch.is_tensor(value) and value.dim() and value.shape != p.shape:
                raise CheckpointError(
                    f"{file} has {key} of {name} in the shape "
                    f"{tuple(value.shape)}; the parameter has {tuple(p.shape)}"
                )


def check_random(path: Path) -> None:
    """Raise `CheckpointError` unless the random states of this process are those of the file."""
    try:
        restored = torch.equal(torch.get_rng_state(), load(path)["torch_manual_seed"])
    except Exception as error:  # as above
        raise CheckpointError(f"{path} could not be restored: {said(error)}") from None
    if not restored:
        raise CheckpointError(f"{path} could not be restored")
