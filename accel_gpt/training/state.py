"""Hold the state of a run except tensors and random states: `trainer_state.json` of a checkpoint.

The corpus and the step guard return their fields from `state_dict()` under the names below, and
load them in `load_state_dict()`.
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
    """The state of a run after `step` optimizer updates, the same on every rank."""

    FORMER_KEYS: ClassVar = ("text_places",)
    """Keys that earlier versions wrote for training on streamed text."""

    step: int = 0  # completed steps, skipped updates included
    sequences: int = 0  # sequences read so far: the position in the data
    tokens: int = 0
    # an `option`, so that a damaged file with a negative number is rejected
    seconds: float = option(0.0, "Seconds of training in all launches.", at_least=0)
    val_loss: float | None = None  # of the last evaluation, in nats per token
    best_val_loss: float | None = None
    best_step: int | None = None
    world_size: int = 1
    # of the corpus
    data_fingerprint: str = ""
    data_origin: int = 0  # sequence at which the present mixture of sources began
    # sequences read before `data_origin`, by fingerprint of the source
    data_given: dict[str, int] = field(default_factory=dict)
    data_sources: list[TrainedSource] = field(default_factory=list)
    data_commits: dict[str, str] = field(default_factory=dict)  # of repositories, by URL
    # of the step guard
    skipped: int = 0  # skipped updates: not finite, or a spike
    # first sequence of each skipped update in the current row
    skipped_in_row: list[int] = field(default_factory=list)
    spikes: int = 0
    losses: list[float] = field(default_factory=list)  # the window for detecting spikes
    # of the run
    tokenizer_fingerprint: str = ""
    config: dict[str, Any] = field(default_factory=dict)  # dotted keys
    train_loss: float | None = None  # of this step
    # metrics of this step, to be published with its evaluation; None: no evaluation is due
    awaits_evaluation: dict[str, float | None] | None = None
    versions: dict[str, str] = field(default_factory=dict)  # of the code that made this step
    format: int = FORMAT  # of trainer_state.json

    def collect(self, fields: Mapping[str, Any]) -> None:
        """Set fields from a `state_dict()`, before a save."""
        assert fields.keys() <= vars(self).keys()
        for name, value in fields.items():
            setattr(self, name, value)

    @property
    def reported_step(self) -> int:
        """Return the last step with a complete record: `step - 1` if an evaluation is due."""
        return self.step if self.awaits_evaluation is None else self.step - 1

    def note_evaluation(self, val_loss: float) -> bool:
        """Set the val loss of this step; return whether it is the lowest so far."""
        self.awaits_evaluation = None
        self.val_loss = val_loss
        best = math.inf if self.best_val_loss is None else self.best_val_loss
        is_best = val_loss < best  # False for NaN
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
