"""The micro-batches of one step, each with its weight in the step's loss."""

from collections.abc import Iterator

import torch
from accelerate import Accelerator
from torch import Tensor

from accel_gpt.config.plan import Plan
from accel_gpt.data.loader import HASH_BITS, Loader, batch_hash
from accel_gpt.model.documents import separate
from accel_gpt.model.loss import IGNORE
from accel_gpt.training.state import TrainState

Batch = tuple[Tensor, Tensor, Tensor | None, Tensor | float]


def pass_over(loader: Loader, plan: Plan, state: TrainState) -> None:
    """Read past the batches that the run leaves out: see `TrainState.excluded`."""
    length = plan.sequences_per_step
    while any(
        first < state.sequences + length and state.sequences < end for first, end in state.excluded
    ):
        for _ in range(plan.accumulation_steps):
            next(loader)
        state.sequences += length


def micro_batches(
    loader: Loader, accelerator: Accelerator, plan: Plan, document_end: int | None
) -> Iterator[Batch]:
    """(tokens, targets, documents, weight) of each micro-step; the first three (B, T).

    Without `document_end` every window has as many targets, and the mean over micro-batches and
    processes is the mean over all target tokens of the global batch. With it the targets across
    document boundaries are left out, and the weights make it so again: targets here over the mean
    number of targets in a micro-batch. That takes one reduction a step; nothing waits for it.
    """
    loader.kept.clear()
    if document_end is None:
        for _ in range(plan.accumulation_steps):
            yield *next(loader), None, 1.0
        return
    step = []
    for _ in range(plan.accumulation_steps):
        tokens, targets = next(loader)
        targets, documents = separate(tokens, targets, document_end)
        step.append((tokens, targets, documents, (targets != IGNORE).sum()))
    total = accelerator.reduce(torch.stack([count for *_, count in step]).sum(), "sum")
    mean = total / (plan.accumulation_steps * plan.world_size)  # of whole numbers: at any layout
    for tokens, targets, documents, count in step:
        yield tokens, targets, documents, count / (mean + (mean == 0))


def batch_figures(loader: Loader, accelerator: Accelerator) -> dict[str, float]:
    """data/batch_hash of the step just made, where the loader keeps its rows; a collective."""
    if not loader.keep_sequences:
        return {}
    own = torch.tensor(batch_hash(loader.kept), device=accelerator.device)
    return {"data/batch_hash": int(accelerator.reduce(own, "sum").item()) % (1 << HASH_BITS)}
