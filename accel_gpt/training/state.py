"""What a run remembers besides tensors and random states: `trainer_state.json` of a checkpoint.

Each owner of state returns its fields from `state_dict()`, by the names below, and gets them back
in its `load_state_dict()`: the corpus its sources, the step guard its counts.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from accel_gpt.config.experiment import CheckpointConfig
from accel_gpt.config.options import option
from accel_gpt.data.sources import TrainedSource

FORMAT = 1  # of the JSON files of a checkpoint


@dataclass
class TrainState:
    """The state of a run after `step` optimizer updates, on every rank alike."""

    FORMER_KEYS: ClassVar = ("text_places",)
    """An earlier version could train on streamed text."""

    step: int = 0  # completed steps, skipped updates included
    sequences: int = 0  # consumed: the position in the data
    tokens: int = 0
    # an `option`, so that a damaged file with a negative number is rejected
    seconds: float = option(0.0, "Seconds of training in all launches.", at_least=0)
    val_loss: float | None = None  # of the last evaluation, nats per token
    best_val_loss: float | None = None
    best_step: int | None = None
    world_size: int = 1
    # of the corpus
    data_fingerprint: str = ""
    data_origin: int = 0  # sequence at which this mixture of sources began
    data_given: dict[str, int] = field(default_factory=dict)  # sequences before it, by fingerprint
    data_sources: list[TrainedSource] = field(default_factory=list)
    data_commits: dict[str, str] = field(default_factory=dict)  # of repositories, by URL
    # of the step guard
    skipped: int = 0  # updates left out, because they were not finite or a spike
    skipped_in_row: list[int] = field(default_factory=list)  # first sequences of the last of them
    spikes: int = 0
    losses: list[float] = field(default_factory=list)  # the window in which a spike stands out
    excluded: list[list[int]] = field(default_factory=list)  # sequences left out: [first, end)
    # of the run
    tokenizer_fingerprint: str = ""
    config: dict[str, Any] = field(default_factory=dict)  # dotted keys
    train_loss: float | None = None  # of this step
    # metrics of this step, which wait for its evaluation; None: no evaluation is due
    awaits_evaluation: dict[str, float | None] | None = None
    versions: dict[str, str] = field(default_factory=dict)  # of the code that made this step
    format: int = FORMAT  # of trainer_state.json

    def collect(self, fields: Mapping[str, Any]) -> None:
        """Copy the fields that an owner of state returned, before a save."""
        assert fields.keys() <= vars(self).keys()
        for name, value in fields.items():
            setattr(self, name, value)

    @property
    def reported_step(self) -> int:
        """Return the last step whose record is complete; this one may wait for its evaluation."""
        return self.step if self.awaits_evaluation is None else self.step - 1

    def note_evaluation(self, val_loss: float) -> bool:
        """Keep the val loss of this step; returns whether it is the lowest so far."""
        self.awaits_evaluation = None
        self.val_loss = val_loss
        best = math.inf if self.best_val_loss is None else self.best_val_loss
        is_best = val_loss < best  # false also for a loss that is not a number
        if is_best:
            self.best_val_loss = val_loss
            self.best_step = self.step
        return is_best

    def save_is_due(self, config: CheckpointConfig, tokens_per_step: int) -> bool:
        """Return whether a checkpoint of the completed step is due, by steps or by tokens."""
        if config.every and self.step % config.every == 0:
            return True
        every = config.every_tokens
        if not every:
            return False
        tokens_before = self.tokens - tokens_per_step
        return self.tokens // every > tokens_before // every
