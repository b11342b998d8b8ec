"""Hold the state of a run except tensors and random states: `trainer_state.json` of a checkpoint.

The corpus and the step guard return their fields from `state_dict()` under the names below, and
load them in `load_state_dict()`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec

from accel_gpt.config.experiment import CheckpointConfig
from accel_gpt.config.plan import Budget
from accel_gpt.config.yardstick import Yardstick
from accel_gpt.data.sources import DataRead
from accel_gpt.json_files import Count, Size
from accel_gpt.own_code import OwnCode

FORMAT = 1  # of the JSON files of a checkpoint


@dataclass(frozen=True)
class RecordedCode:
    """The file of --code that made a step, as a checkpoint stores it."""

    file: str  # its name without the folder
    sha256: str
    functions: list[str]  # that the file defines

    def __str__(self) -> str:
        return f"{self.file} ({self.sha256[:12]})"


def record_code(own: OwnCode) -> RecordedCode | None:
    """Return what a checkpoint stores about the file of --code; None without a file."""
    return RecordedCode(own.name, own.sha256, own.functions) if own.file else None


@dataclass(frozen=True)
class InitialWeights:
    """The trained weights that a run began with, from `model.init_from`."""

    name: str  # as the user wrote it
    step: Count | None  # of a checkpoint of accel_gpt; None: a model of transformers
    sha256: str  # of the file; of several files, of their digests in hex, one after the other

    def __str__(self) -> str:
        step = "" if self.step is None else f"step {self.step:,}, "
        return f"{self.name}, {step}sha256 {self.sha256[:12]}"


@dataclass
class TrainState:
    """The state of a run after `step` optimizer updates, the same on every rank."""

    step: Count = 0  # completed steps, skipped updates included
    sequences: Count = 0  # whole sequences read so far: the position in the data
    tokens: Count = 0
    seconds: Annotated[float, msgspec.Meta(ge=0)] = 0.0  # of training in all launches
    val_loss: float | None = None  # of the last evaluation, in nats per token
    best_value: float | None = None  # of eval.best
    best_step: Count | None = None
    world_size: Size = 1
    # of the corpus
    # what is read from which position on; what lies before `sequences` was read
    data_read: list[DataRead] = field(default_factory=list)
    data_commits: dict[str, str] = field(default_factory=dict)  # of repositories, by URL
    # of the step guard
    skipped: Count = 0  # skipped updates: not finite, or a spike
    # first sequence of each skipped update in the current row
    skipped_in_row: list[Count] = field(default_factory=list)
    spikes: Count = 0
    losses: list[float] = field(default_factory=list)  # the window for detecting spikes
    # of the run
    tokenizer_fingerprint: str = ""
    config: dict[str, Any] = field(default_factory=dict)  # dotted keys
    budget: Budget | None = None  # that set the length of the run; None: the config sets it
    train_loss: float | None = None  # of this step
    # metrics of this step, to be published with its evaluation; None: no evaluation is due
    pending_record: dict[str, int | float | None] | None = None
    versions: dict[str, str] = field(default_factory=dict)  # of the code that made this step
    code: RecordedCode | None = None
    initial_weights: InitialWeights | None = None  # None: they were drawn
    format: Count = FORMAT  # of trainer_state.json

    def set_fields(self, fields: Mapping[str, Any]) -> None:
        """Set fields from a `state_dict()`, before a save."""
        assert fields.keys() <= vars(self).keys()
        for name, value in fields.items():
            setattr(self, name, value)

    @property
    def reported_step(self) -> int:
        """Return the last step with a complete record: `step - 1` if an evaluation is due.

        It is -1 if the evaluation before the first step is due.
        """
        return self.step if self.pending_record is None else self.step - 1

    def note_evaluation(
        self, record: Mapping[str, float], yardstick: Yardstick, since: int = 0
    ) -> bool:
        """Set the val loss of this step; return whether the step is the best after step `since`.

        The first evaluation of a stage is its best one: another length or data change the loss.
        Step 0 does not count: it has no checkpoint.
        """
        value = yardstick.value(record)
        self.pending_record = None
        self.val_loss = record["eval/val_loss"]
        before = self.best_value if (self.best_step or 0) > since else None
        is_best = self.step > 0 and yardstick.is_better(value, before)
        if is_best:
            self.best_value = value
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
