"""Measure the size of an update, as a share of the weights, for each part of a model.

    train/update_ratio/PART        ||change|| / ||weights|| of the matrices and embeddings of a part
    train/update_ratio/least       the smallest ratio of a single matrix

A part is the path of a weight without numbers: `blocks.3.attn.qkv.weight` is of `blocks.attn`. Only
some numbers of each weight are copied and compared. Vectors are left out: many of them begin at
zero. `least` is of matrices alone: an embedding stands still where its tokens are rare.
"""

import math

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn

from accel_gpt.model.language_model import LanguageModel
from accel_gpt.model.sharding import is_sharded, local_shard

SAMPLED = 128  # rows of a weight that are compared, and columns of them; assumption
MOST_PARTS = 8  # a model of --code with more is measured as one part; assumption
PATH_LENGTH = 2  # names of a path that make a part
WHOLE = "model"
RATIO = "train/update_ratio"


class UpdateSizes:
    """Compare the weights before and after an update of an optimizer."""

    def __init__(
        self, gpt: LanguageModel, optimizer: AcceleratedOptimizer, accelerator: Accelerator
    ) -> None:
        names = {id(p): name for name, p in gpt.named_parameters()}
        self.accelerator = accelerator
        # from the optimizer: during a step, FSDP swaps the parameters of the model for others
        self.weights: list[Tensor] = []
        self.embeddings: list[bool] = []  # whether each of them is one
        looked_up = {id(m.weight) for m in gpt.modules() if isinstance(m, nn.Embedding)}
        parts = []
        for group in optimizer.param_groups:
            for weight in group["params"]:
                if weight.dim() > 1:
                    self.weights.append(weight)
                    self.embeddings.append(id(weight) in looked_up)
                    parts.append(part_of(names.get(id(weight), WHOLE)))
        if len(set(parts)) > MOST_PARTS:
            parts = [WHOLE] * len(parts)
        self.parts = parts
        self.sharded = any(is_sharded(weight) for weight in self.weights)
        self.before: list[Tensor] = []
        self.shares: Tensor | None = None  # (weights, 1): all numbers over those that are compared
        self.squares: Tensor | None = None  # (weights, 2): of changes and of weights

    def samples(self) -> list[Tensor]:
        """Return evenly spaced numbers of each weight, as views; under FSDP of this rank's rows."""
        views = []
        for weight in self.weights:
            local = local_shard(weight.detach())
            every = [max(1, size // SAMPLED) for size in local.shape[:2]]
            views.append(local[:: every[0], :: every[1]])
        return views

    @torch.no_grad()
    def begin(self) -> None:
        """Copy a sample of the weights before an update."""
        self.before = [sample.clone() for sample in self.samples()]

    @torch.no_grad()
    def end(self) -> None:
        """Compare the sample with the one after the update; nothing waits for the device."""
        if not self.before:
            return
        samples = self.samples()
        changes = [after - before for after, before in zip(samples, self.before, strict=True)]
        norms = [
            torch._foreach_norm(changes),
            torch._foreach_norm(self.before),
        ]
        each = torch.stack([torch.stack(list(part)).float() for part in norms], dim=1)
        if self.shares is None:
            shares = []
            for weight, sample in zip(self.weights, samples, strict=True):
                shares.append([local_shard(weight).numel() / max(1, sample.numel())])
            self.shares = torch.tensor(shares, device=each.device)
        self.squares = each**2 * self.shares
        self.before = []

    def metrics(self) -> dict[str, float]:
        """Return the ratios of the last update that was measured; {} if there is none.

        A collective under FSDP.
        """
        if self.squares is None:
            return {}
        if self.sharded:
            self.squares = self.accelerator.reduce(self.squares, "sum")
        rows: list[tuple[float, float]] = self.squares.tolist()
        self.squares = None
        sums: dict[str, tuple[float, float]] = {}
        for part, (change, size) in zip(self.parts, rows, strict=True):
            before = sums.get(part, (0.0, 0.0))
            sums[part] = (before[0] + change, before[1] + size)
        ratios = {
            f"{RATIO}/{part}": ratio_of(change, size) for part, (change, size) in sums.items()
        }
        of_matrices = [
            ratio_of(change, size)
            for (change, size), is_embedding in zip(rows, self.embeddings, strict=True)
            if not is_embedding
        ]
        known = [ratio for ratio in of_matrices if math.isfinite(ratio)]
        if known:
            ratios[f"{RATIO}/least"] = min(known)
        return {key: ratio for key, ratio in ratios.items() if math.isfinite(ratio)}


def ratio_of(change: float, size: float) -> float:
    """Return the ratio of two norms from their squares; `nan` if the weights are zero."""
    return math.sqrt(change / size) if size > 0 else math.nan


def part_of(name: str) -> str:
    """Return the part of a weight: its path without numbers and without its own name."""
    *path, _ = [word for word in name.split(".") if not word.isdigit()] or [WHOLE]
    return ".".join(path[:PATH_LENGTH]) or WHOLE
