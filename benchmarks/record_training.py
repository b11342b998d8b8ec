"""Run a training script and record each update: what the model read, its loss, the weights.

    python benchmarks/record_training.py SCRIPT.py [ARGUMENTS ...]
    python benchmarks/record_training.py -m MODULE [ARGUMENTS ...]

The script runs unmodified; hooks of torch see what it does. `RECORD` names the file that gets one
line of JSON for each update of each process:

    rank           of the process
    rows           token ids (B, T) that entered the model's first embedding, in training
    loss           mean of the losses that `backward` got
    before, after  fingerprints of weights and of the optimizer's state, around the update
    finite         whether all weights are finite after the update

`RECORD_PACE` seconds are slept after each update. In update `RECORD_NAN` of this launch, counted
from 1, the loss that `backward` gets is NaN. At the end, `RECORD_WEIGHTS` gets the weights.
"""

import atexit
import json
import os
import runpy
import sys
import time
import zlib
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)


class Recorder:
    """What happened since the last update, and the file that updates are written to."""

    def __init__(self, path: str) -> None:
        self.file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.rows: list[list[int]] = []
        self.losses: list[float] = []
        self.before: tuple[int, int] = (0, 0)
        self.updates = 0
        self.expects_tokens = True  # the first embedding after a backward pass reads the tokens
        self.weights: list[torch.Tensor] = []
        self.backward = torch.autograd.backward

    def install(self) -> None:
        """Install the hooks."""
        register_module_forward_pre_hook(self.on_forward)
        register_optimizer_step_pre_hook(self.on_step)
        register_optimizer_step_post_hook(self.on_stepped)
        torch.autograd.backward = self.on_backward
        if "RECORD_WEIGHTS" in os.environ:
            atexit.register(self.save_weights)

    def on_forward(self, module: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        """Note the token ids that enter the first embedding."""
        trains = module.training and torch.is_grad_enabled() and self.expects_tokens
        if isinstance(module, torch.nn.Embedding) and trains and not inputs[0].is_meta:
            self.rows += inputs[0].tolist()
            self.expects_tokens = False

    def on_backward(self, tensors: Any, *args: Any, **kwargs: Any) -> None:
        """Note the loss; replace it by NaN if this update shall be poisoned."""
        loss = tensors if torch.is_tensor(tensors) else tensors[0]
        if not loss.is_meta:
            if self.updates + 1 == int(os.environ.get("RECORD_NAN", "0")):
                tensors = loss * float("nan")
            self.losses.append(loss.item())
            self.expects_tokens = True
        self.backward(tensors, *args, **kwargs)

    def on_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Note what the update starts from."""
        self.before = fingerprints(optimizer)

    def on_stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Write the line of this update."""
        self.updates += 1
        self.weights = parameters(optimizer)
        record = {
            "rank": int(os.environ.get("RANK", "0")),
            "rows": self.rows,
            "loss": sum(self.losses) / len(self.losses),
            "before": self.before,
            "after": fingerprints(optimizer),
            "finite": all(bool(one.isfinite().all()) for one in self.weights),
        }
        os.write(self.file, json.dumps(record).encode() + b"\n")
        self.rows = []
        self.losses = []
        time.sleep(float(os.environ.get("RECORD_PACE", "0")))

    def save_weights(self) -> None:
        """Save the weights."""
        weights = [one.detach().clone() for one in self.weights]
        torch.save(weights, os.environ["RECORD_WEIGHTS"])


def parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    """Return the parameters that an optimizer updates, in its order."""
    return [one for group in optimizer.param_groups for one in group["params"]]


def fingerprints(optimizer: Optimizer) -> tuple[int, int]:
    """Return checksums of the weights, and of the optimizer's tensors."""
    weights = 0
    state = 0
    for one in parameters(optimizer):
        weights = checksum(one, weights)
        for _, value in sorted(optimizer.state.get(one, {}).items()):
            if torch.is_tensor(value) and value.dim():
                state = checksum(value, state)
    return weights, state


def checksum(tensor: torch.Tensor, start: int) -> int:
    """Return the CRC-32 of a tensor's bytes, continued from `start`."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return zlib.crc32(flat.numpy().data, start)


if __name__ == "__main__":
    del sys.argv[0]
    sys.path[0] = ""  # as `python SCRIPT` and `python -m` find modules of the working directory
    Recorder(os.environ["RECORD"]).install()
    if sys.argv[0] == "-m":
        del sys.argv[0]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
        runpy.run_path(sys.argv[0], run_name="__main__")
