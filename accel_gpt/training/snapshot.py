"""A copy of weights and optimizer in memory, from which files are written while training goes on.

The files are those of `accelerator.save_state`, by the same two functions.
"""

from pathlib import Path
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils.constants import OPTIMIZER_NAME, SAFE_WEIGHTS_NAME
from safetensors.torch import save_file
from torch import Tensor

from accel_gpt.model.gpt import GPT


class Snapshot:
    """Buffers on the host as large as the state, made once, pinned where the device is a GPU."""

    def __init__(self) -> None:
        self.buffers: dict[str, Tensor] = {}
        self.weights: dict[str, Tensor] = {}
        self.optimizer: Any = None

    def take(self, gpt: GPT, optimizer: AcceleratedOptimizer) -> None:
        """Copy the state of now; returns when the copy is complete."""
        weights = gpt.state_dict()
        if gpt.config.tie_embeddings:
            del weights["head.weight"]
        self.weights = {name: self.copy(f"w.{name}", t) for name, t in weights.items()}
        self.optimizer = self.copied("o", optimizer.state_dict())
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def copied(self, key: str, value: Any) -> Any:
        """A state dict with every tensor copied."""
        if isinstance(value, Tensor):
            return self.copy(key, value)
        if isinstance(value, dict):
            return {name: self.copied(f"{key}.{name}", inner) for name, inner in value.items()}
        if isinstance(value, list):
            return [self.copied(f"{key}.{i}", inner) for i, inner in enumerate(value)]
        return value

    def copy(self, key: str, tensor: Tensor) -> Tensor:
        """`tensor` in the buffer of that key."""
        buffer = self.buffers.get(key)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            pinned = tensor.device.type == "cuda"
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
            self.buffers[key] = buffer
        return buffer.copy_(tensor.detach(), non_blocking=True)

    def write(self, folder: Path) -> None:
        """Write the files of what was copied."""
        save_file(self.weights, folder / SAFE_WEIGHTS_NAME, metadata={"format": "pt"})
        torch.save(self.optimizer, folder / f"{OPTIMIZER_NAME}.bin")
