"""Detect divergence: losses or gradients that are not finite, loss spikes, broken weights.

A batch without any target has a loss and a gradient of exactly 0. Its update is skipped too, since
momentum and weight decay would still change the weights.

Every rank reads the same all-reduced loss and gradient norm, so all ranks skip the same updates.
The device decides. Except on MPS, the host waits for the decision only if the step is logged,
evaluated, sampled or saved.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from accel_gpt.config.plan import plural
from accel_gpt.errors import DataError, DivergedError
from accel_gpt.launch.unsupported import REPLICATED
from accel_gpt.model.sharding import local_shard

SPIKE_WINDOW = 128  # steps; as in the trainer of OLMo 2 (2025)
SPIKE_SIGMA = 6.0  # standard deviations of a loss above the mean of the window; assumption
# Relative difference of the norms of equal float32 weights on two kinds of processors; assumption
NORM_TOLERANCE = 1e-5
MOST_WARNINGS = 8  # most warnings of one flush
# Skipped updates in a row that end a run. fp16 skips a few until its loss scale fits: halved each
# time, 16 take the first scale of 2^16 down to 1; a longer row does not end by itself
MOST_SKIPPED = 20


class StepGuard:
    """Skips updates that are not finite or have no target, detects loss spikes, and counts both.

    `check` runs on the device at every step. `flush` copies the results since the last flush to
    the host.
    """

    def __init__(self, device: torch.device) -> None:
        self.window = torch.full((SPIKE_WINDOW,), math.nan, device=device)  # of finite losses
        self.pending: list[tuple[int, int, Tensor]] = []  # step, first sequence, results (4,)
        self.step = 0  # the last step that `flush` read
        self.without_targets = False  # of that step
        self.skipped = 0
        self.spikes = 0
        self.skipped_in_row: list[int] = []  # first sequence of each update in the row
        self.train_loss: float | None = None

    def check(self, step: int, sequence: int, loss: Tensor, grad_norm: Tensor) -> Tensor:
        """Return a scalar tensor: 1 if the update of `step` must be skipped, else 0.

        It is skipped if it is not finite or if the batch has no target. A spike is only counted.

        `sequence` is the number of the first sequence in the batch. `loss` and `grad_norm` are
        all-reduced scalars. A spike is a loss more than `SPIKE_SIGMA` standard deviations above the
        mean of the window. Until the window is full, its mean is NaN and no loss is a spike.
        """
        finite = torch.isfinite(loss) & torch.isfinite(grad_norm)
        without_targets = (loss == 0) & (grad_norm == 0)
        usable = finite & ~without_targets
        deviation, mean = torch.std_mean(self.window)
        spike = usable & (loss > mean + SPIKE_SIGMA * deviation)
        longer = torch.cat([self.window[1:], loss.to(self.window.dtype)[None]])
        self.window = torch.where(usable, longer, self.window)
        skip = ~usable
        results = torch.stack([value.to(loss.dtype) for value in (loss, grad_norm, skip, spike)])
        self.pending.append((step, sequence, results))
        return skip.float()

    def flush(self, log: Callable[[str], None]) -> dict[str, float]:
        """Count and log skipped updates and spikes since the last flush; return the metrics.

        Waits for the device. After `MOST_SKIPPED` skipped updates in a row, ignores later steps:
        the run ends.
        """
        rows = torch.stack([results for _, _, results in self.pending]).tolist()
        steps = [(step, sequence) for step, sequence, _ in self.pending]
        self.pending = []
        warnings = 0
        for (step, sequence), (loss, grad_norm, skip, spike) in zip(steps, rows, strict=True):
            warnings += int(skip or spike)
            if (skip or spike) and warnings <= MOST_WARNINGS:
                reason = "a spike" if spike else "not finite"
                if loss == grad_norm == 0:
                    reason = "the batch has no target"
                skipped = "; its update was skipped" if skip else ""
                log(
                    f"WARNING: step {step:,}: loss {loss:.4g}, gradient norm {grad_norm:.4g}: "
                    f"{reason}{skipped} (sequences from {sequence:,})"
                )
            self.spikes += int(spike)
            self.skipped += int(skip)
            self.skipped_in_row = [*self.skipped_in_row, sequence] if skip else []
            self.without_targets = loss == grad_norm == 0
            self.step = step
            if self.too_many_skipped:
                break
        self.train_loss = loss if math.isfinite(loss) else None
        return {
            "train/loss": loss,
            "train/grad_norm": grad_norm,
            "train/skipped": self.skipped,
            "train/spikes": self.spikes,
        }

    def forget_losses(self) -> None:
        """Empty the window, since other data or another length change the loss."""
        self.window.fill_(math.nan)

    @property
    def too_many_skipped(self) -> bool:
        """Return whether `MOST_SKIPPED` updates in a row were skipped."""
        return len(self.skipped_in_row) >= MOST_SKIPPED

    def error(self, sequences_per_step: int, newest: str) -> DataError | DivergedError:
        """Return the error that ends a run after too many skipped updates in a row.

        It is a `DataError` if the last of them had no target. `newest` names the checkpoint.
        """
        row = self.skipped_in_row
        end = row[-1] + sequences_per_step
        skipped = (
            f"the updates of {plural(len(row), 'step')} in a row, up to step {self.step:,}, were "
            f"skipped (sequences {row[0]:,} to {end - 1:,})"
        )
        if self.without_targets:
            return DataError(f"{skipped}, since their batches have no target, and {newest}")
        return DivergedError(
            f"{skipped}, and {newest}; launch again with a lower optim.lr, a higher "
            "schedule.warmup_steps or train.mixed_precision bf16, or resume from an earlier "
            "checkpoint with checkpoint.resume in another out_dir"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON, by the field names of `TrainState`."""
        return {
            "losses": [loss for loss in self.window.tolist() if not math.isnan(loss)],
            "skipped": self.skipped,
            "skipped_in_row": self.skipped_in_row,
            "spikes": self.spikes,
            "train_loss": self.train_loss,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the values of `state_dict()`; ignore other keys."""
        losses = [math.nan] * (SPIKE_WINDOW - len(state["losses"])) + state["losses"]
        self.window = torch.tensor(losses, device=self.window.device)
        self.skipped = state["skipped"]
        self.spikes = state["spikes"]
        self.skipped_in_row = state["skipped_in_row"]
        self.train_loss = state["train_loss"]


def check_weights(model: nn.Module, accelerator: Accelerator, step: int) -> None:
    """Raise `DivergedError` on all ranks unless all weights are finite; a collective.

    If each rank holds the whole model, the weights must also be the same on all ranks. Called
    before a save, since an update with a finite norm can make weights overflow.
    """
    weights = list(model.parameters())
    # after an evaluation, FSDP leaves some parameters whole and the others sharded
    local = [local_shard(weight) for weight in weights]
    norms = accelerator.gather(torch.stack(torch._foreach_norm(local))[None])  # (ranks, weights)
    if not torch.isfinite(norms).all():
        raise DivergedError(
            f"after step {step:,} weights are not finite, and were not saved; lower optim.lr, "
            "raise schedule.warmup_steps or set train.mixed_precision to bf16; a new launch "
            "resumes from the last checkpoint, if there is one"
        )
    differs = (norms - norms[0]).abs() > NORM_TOLERANCE * norms[0]
    if accelerator.distributed_type in REPLICATED and differs.any():
        rank, number = differs.nonzero()[0].tolist()
        name = [name for name, _ in model.named_parameters()][number]
        raise DivergedError(
            f"after step {step:,} the weights of rank {rank} differ from rank 0 ({name} has norm "
            f"{norms[rank, number]:.7g}, not {norms[0, number]:.7g}), and were not saved; check "
            "the memory and network of the machines, and that --code computes the same on each; a "
            "new launch resumes from the last checkpoint"
        )
