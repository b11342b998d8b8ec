"""Steps whose loss or gradient cannot be trusted: left out on the device, told when figures are.

All processes see the same loss (their mean) and the same gradient norm, so they leave out the same
steps. Nothing waits for the device until a line is logged.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from accel_gpt.config.experiment import TrainConfig
from accel_gpt.errors import DivergedError
from accel_gpt.optim.sharded import is_sharded
from accel_gpt.training.engine import REPLICATED
from accel_gpt.training.state import TrainState

SPIKE_WINDOW = 128  # steps; OLMo 2 (2025), whose trainer looks at as many
NORM_TOLERANCE = 1e-5  # of norms of the same float32 weights on two kinds of processors: assumption
TOLD = 8  # batches that a sentence names


class TooManySkippedError(Exception):
    """So many updates in a row were left out that the run must go back."""


@dataclass(frozen=True)
class Entry:
    """One step that was read."""

    step: int
    sequence: int  # number of its first one
    loss: float
    grad_norm: float
    skipped: bool
    spike: bool


class Ledger:
    """The loss and gradient norm of each step since the last reading, and the window of losses."""

    def __init__(self, config: TrainConfig, device: torch.device, state: TrainState) -> None:
        self.config = config
        missing = [float("nan")] * (SPIKE_WINDOW - len(state.losses))
        self.window = torch.tensor(missing + state.losses, device=device)
        self.rows: list[tuple[int, int, Tensor]] = []  # step, first sequence, (4,) figures

    def judge(self, state: TrainState, loss: Tensor, grad_norm: Tensor) -> Tensor:
        """1 where the update that follows `state` must not happen, else 0; on the device.

        `loss` and `grad_norm` over all processes, (). A spike lies `spike_sigma` standard
        deviations above the mean of the window; there is none before the window is full: its mean
        is not a number then.
        """
        if is_sharded(grad_norm):  # of FSDP
            grad_norm = grad_norm.full_tensor()
        finite = torch.isfinite(loss) & torch.isfinite(grad_norm)
        if self.config.spike_sigma:
            deviation, mean = torch.std_mean(self.window)
            spike = finite & (loss > mean + self.config.spike_sigma * deviation)
            longer = torch.cat([self.window[1:], loss.to(self.window.dtype)[None]])
            self.window = torch.where(finite, longer, self.window)
        else:
            spike = torch.zeros_like(finite)
        skip = ~finite | spike if self.config.skip_spikes else ~finite
        figures = torch.stack([part.to(loss.dtype) for part in (loss, grad_norm, skip, spike)])
        self.rows.append((state.step + 1, state.sequences, figures))
        return skip.float()

    def read(self, state: TrainState, say: Callable[[str], None]) -> dict[str, float]:
        """The figures of the completed step, all steps since the last reading noted in `state`.

        Waits for the device. Raises `TooManySkippedError` after `train.max_skipped` in a row.
        """
        table = torch.stack([figures for *_, figures in self.rows]).tolist()
        entries = [
            Entry(step, sequence, loss, norm, bool(skipped), bool(spike))
            for (step, sequence, _), (loss, norm, skipped, spike) in zip(
                self.rows, table, strict=True
            )
        ]
        self.rows = []
        window = self.window.tolist()
        state.losses = [loss for loss in window if loss == loss]
        self.tell(entries, say)
        for entry in entries:
            state.spikes += entry.spike
            state.skipped += entry.skipped
            state.skipped_in_row = [*state.skipped_in_row, entry.sequence] if entry.skipped else []
            if len(state.skipped_in_row) >= self.config.max_skipped:
                raise TooManySkippedError
        last = entries[-1]
        state.train_loss = last.loss if math.isfinite(last.loss) else None
        return {
            "train/loss": last.loss,
            "train/grad_norm": last.grad_norm,
            "train/skipped": state.skipped,
            "train/spikes": state.spikes,
        }

    def tell(self, entries: list[Entry], say: Callable[[str], None]) -> None:
        """Warn of what was left out, and of spikes."""
        for entry in [entry for entry in entries if entry.skipped or entry.spike][:TOLD]:
            what = "a spike" if entry.spike else "not finite"
            say(
                f"WARNING: step {entry.step:,}: loss {entry.loss:.4g}, gradient norm "
                f"{entry.grad_norm:.4g}: {what}{'; its update was skipped' * entry.skipped} "
                f"(sequences from {entry.sequence:,})"
            )


def ranges(starts: list[int], length: int) -> list[list[int]]:
    """[first, end) of runs of batches of `length` sequences that begin at `starts`, ascending."""
    found: list[list[int]] = []
    for start in starts:
        if found and found[-1][1] == start:
            found[-1][1] = start + length
        else:
            found.append([start, start + length])
    return found


def spoken(spans: list[list[int]]) -> str:
    """`1,024 to 1,055, 2,048 to 2,079`: sequences, first and last of each span."""
    named = [f"{first:,} to {end - 1:,}" for first, end in spans[:TOLD]]
    return ", ".join(named) + (", ..." if len(spans) > TOLD else "")


def check_weights(model: nn.Module, accelerator: Accelerator, step: int) -> None:
    """Raise `DivergedError` on every process unless all weights are finite, and on all ranks those
    of rank 0 where each holds the whole model; a collective.

    Asked before a save: weights that overflowed in an update of finite norm must not be kept.
    """
    weights = [p.detach() for p in model.parameters()]
    # FSDP leaves some whole after an evaluation, of the others each process has a part
    own = [w.to_local() if is_sharded(w) else w for w in weights]
    norms = accelerator.gather(torch.stack(torch._foreach_norm(own))[None])  # (ranks, weights)
    if not torch.isfinite(norms).all():
        raise DivergedError(
            f"after step {step:,} weights are not finite, and were not saved; lower optim.lr, "
            "lengthen schedule.warmup_steps or use train.mixed_precision bf16; a new launch goes "
            "on from the last checkpoint"
        )
    apart = (norms - norms[0]).abs() > NORM_TOLERANCE * norms[0]
    if accelerator.distributed_type in REPLICATED and apart.any():
        rank, number = apart.nonzero()[0].tolist()
        name = [name for name, _ in model.named_parameters()][number]
        raise DivergedError(
            f"after step {step:,} the weights of rank {rank} are not those of rank 0 ({name} has "
            f"norm {norms[rank, number]:.7g}, not {norms[0, number]:.7g}), and were not saved; the "
            "ranks trained apart: check their machines; a new launch goes on from the last "
            "checkpoint"
        )
