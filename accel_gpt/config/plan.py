"""Derive batch and length of a run from the config and the number of processes. No torch.

`Costs` holds what the parts of a run take, `Budget` the length that was found from them.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from accel_gpt.config.experiment import Config, LogConfig, Stage
from accel_gpt.config.stages import (
    Span,
    begins_at_once,
    spans,
    stage_configs,
    steps_of_stages,
    total_tokens,
)
from accel_gpt.errors import UserError, require

LENGTH_KEYS = ("train.max_steps", "train.max_tokens")  # keys that set the length of a run
USEFUL_EPOCHS = 4  # further ones add little: Muennighoff et al. 2023, arXiv 2305.16264
LARGEST_MICRO_BATCH = 4096  # sequences; the largest micro-batch to try; assumption
# Share of all steps; assumption, within the 10 to 20% of Hägele et al. 2024, figure 5
WSD_DECAY_SHARE = 0.2


@dataclass(frozen=True)
class Costs:
    """Seconds that the parts of a run take."""

    step: float
    set_up: float = 0.0  # until the first step
    start: float = 0.0  # that the first step takes longer than others, since it compiles
    evaluation: float = 0.0  # all evaluations of one step
    samples: float = 0.0  # all samples of one step
    save: float = 0.0  # one checkpoint
    relative: tuple[float, ...] = (1.0,)  # time of a step in each stage, over the first stage's

    def total(self, config: Config, steps: int) -> float:
        """Return the seconds of a run of `steps` steps."""
        training = self.training(config, steps)
        return self.set_up + self.start + training + self.pauses(config, steps)

    def training(
        self, config: Config, steps: int, first: int = 0, last: int | None = None
    ) -> float:
        """Return the seconds of the steps of a run of `steps` steps, from `first` to before `last`.

        The first stage takes `self.step` a step.
        """
        counts = steps_of_stages(config, steps, first, last)
        each = zip(counts, self.relative, strict=True)
        return self.step * sum(count * relative for count, relative in each)

    def pauses(self, config: Config, steps: int, after: int = -1) -> float:
        """Return the seconds of the evaluations, samples and saves that are due after a step.

        Step 0, at which trained weights are evaluated, is after step -1.
        """
        evaluated = due_steps(config.eval.every, steps)
        saved = due_steps(config.checkpoint.every, steps)
        if config.checkpoint.every_tokens:
            saved |= token_steps(config, steps, config.checkpoint.every_tokens)
        if config.checkpoint.keep_best:
            saved |= evaluated  # at most: each evaluation is better than those before
        if config.model.init_from != "scratch":
            evaluated.add(0)
        sampled = due_steps(config.sample.every, steps) if config.sample.every else set()
        return (
            count_after(after, evaluated) * self.evaluation
            + count_after(after, sampled) * self.samples
            + count_after(after, saved) * self.save
        )

    def at_speed(self, step_seconds: float) -> "Costs":
        """Return the costs if a step takes `step_seconds`, and the others change as a step does."""
        times = step_seconds / self.step
        return Costs(
            step=step_seconds,
            set_up=self.set_up,
            start=self.start,
            evaluation=times * self.evaluation,
            samples=times * self.samples,
            save=times * self.save,
            relative=self.relative,
        )

    def describe(self) -> str:
        """Format the seconds of each part."""
        parts = {
            "a step": self.step,
            "an evaluation": self.evaluation,
            "samples": self.samples,
            "a save": self.save,
            "the start": self.set_up + self.start,
        }
        return ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in parts.items())


@dataclass(frozen=True)
class Budget:
    """How the length of a run was found from `train.budget`."""

    asked: str  # the value of train.budget
    seconds: float  # that it leaves for the training, after the measurement and the set-up
    costs: Costs  # as measured before the run, and at the second look as measured in it
    first_steps: int  # the length at the start of the run
    steps: int  # the length
    looked_at: int | None = None  # step after which the length was looked at again; None: not yet


def due_steps(every: int, steps: int) -> set[int]:
    """Return the steps at which something is due every `every` steps (0: never), and the last."""
    return {*(range(every, steps + 1, every) if every else ()), steps}


def token_steps(config: Config, steps: int, every: int) -> set[int]:
    """Return the steps at which something is due every `every` tokens, at most once a step."""
    found: set[int] = set()
    first = 0
    tokens = 0
    for count, stage in zip(steps_of_stages(config, steps), stage_configs(config), strict=True):
        size = stage.train.tokens_per_step
        end = tokens + count * size
        if every <= size:
            found |= set(range(first + 1, first + count + 1))
        else:
            for due in range((tokens // every + 1) * every, end + 1, every):
                found.add(first - (tokens - due) // size)  # rounded up
        first += count
        tokens = end
    return found


def count_after(step: int, due: set[int]) -> int:
    """Count the steps in `due` after `step`."""
    return sum(one > step for one in due)


def format_seconds(seconds: float) -> str:
    """Format a short time: `0.17 s`."""
    return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:,.0f} s"


# --------------------------------------------------------------------------- the plan


@dataclass(frozen=True)
class Finish:
    """The end of a run before its last step, as a function of --code has set it."""

    step: int
    why: str
    file: str  # of --code, without the folder
    sha256: str  # of the file: another file decides anew


@dataclass(frozen=True)
class StageBatch:
    """The batch of a stage."""

    first_step: int  # steps that are complete when it begins
    block_size: int
    micro_batch_size: int
    accumulation_steps: int


@dataclass(frozen=True)
class Plan:
    """Hold the batch and length of a run. If it has stages, `at` returns the batch of a step."""

    world_size: int
    micro_batch_size: int  # sequences; see `micro_batch`
    block_size: int  # tokens
    accumulation_steps: int  # micro-steps per step
    max_steps: int
    warmup_steps: int
    decay_steps: int
    stop_at: int | None = None  # step after which this launch stops
    budget: Budget | None = None  # None: the config sets the length
    finish: Finish | None = None
    pieces: int = 1  # sequences of `block_size` in one of the longest stage
    stages: tuple[StageBatch, ...] = ()  # empty if the config has none

    def stage_of(self, step: int) -> int:
        """Return the number of the stage that makes the update after `step` updates, from 0."""
        firsts = [stage.first_step for stage in self.stages]
        return max(bisect_right(firsts, step) - 1, 0)

    def stage(self, number: int) -> "Plan":
        """Return the plan with the batch of a stage."""
        if not self.stages:
            return self
        longest = self.pieces * self.block_size
        stage = self.stages[number]
        return replace(
            self,
            micro_batch_size=stage.micro_batch_size,
            block_size=stage.block_size,
            accumulation_steps=stage.accumulation_steps,
            pieces=longest // stage.block_size,
        )

    def at(self, step: int) -> "Plan":
        """Return the plan with the batch of the update after `step` updates."""
        return self.stage(self.stage_of(step))

    def begins_stage(self, step: int) -> bool:
        """Return whether the update after `step` updates is the first of a later stage."""
        return any(stage.first_step == step > 0 for stage in self.stages)

    @property
    def total_tokens(self) -> int:
        """Return the tokens of the whole run."""
        if not self.stages:
            return self.max_steps * self.tokens_per_step
        edges = [*(stage.first_step for stage in self.stages), self.max_steps]
        counts = [end - first for first, end in pairwise(edges)]
        return sum(n * self.stage(i).tokens_per_step for i, n in enumerate(counts))

    @property
    def total_sequences(self) -> int:
        """Return the position in the data at the end of the run."""
        return self.total_tokens // (self.pieces * self.block_size)

    @property
    def end(self) -> int:
        """Return the last step of the run."""
        return self.finish.step if self.finish else self.max_steps

    @property
    def last_step(self) -> int:
        """Return the last step of this launch."""
        return min(self.stop_at or self.end, self.end)

    @property
    def sequences_per_step(self) -> int:
        """Return the sequences of one optimizer update, over all processes."""
        return self.micro_batch_size * self.accumulation_steps * self.world_size

    @property
    def tokens_per_step(self) -> int:
        """Return the tokens of one optimizer update, over all processes."""
        return self.sequences_per_step * self.block_size

    @property
    def whole_sequences_per_step(self) -> int:
        """Return by how much an update moves the position in the data: see config/stages.py."""
        return self.sequences_per_step // self.pieces

    def micro_step_starts(self, rank: int, position: int) -> range:
        """Return the number of the first sequence in each micro-step of `rank`.

        `position` is the position of the step in the data. Numbers count sequences of `block_size`.
        """
        start = position * self.pieces + rank * self.micro_batch_size
        end = position * self.pieces + self.sequences_per_step
        return range(start, end, self.micro_batch_size * self.world_size)

    def describe(self, asked_warmup_steps: int) -> str:
        """Format the arithmetic of batch and length, for the first lines of the run.

        `asked_warmup_steps`: see `schedule.warmup_steps`; told if the run is too short for them.
        """
        cut = ""
        if self.warmup_steps < asked_warmup_steps:
            cut = f" (schedule.warmup_steps is {asked_warmup_steps:,})"
        return (
            f"{self.describe_batch()}\n{self.total_tokens:,} tokens in total = "
            f"{plural(self.max_steps, 'step')}, {self.warmup_steps:,} of them warm-up{cut}"
            + "".join(
                f"\nstage {number} from step {stage.first_step:,}: "
                f"{self.at(stage.first_step).describe_batch()}"
                for number, stage in enumerate(self.stages[1:], start=2)
            )
        )

    def describe_batch(self) -> str:
        """Format the arithmetic of the batch."""
        return (
            f"{self.tokens_per_step:,} tokens per step = "
            f"{plural(self.micro_batch_size, 'sequence')} x {self.block_size:,} tokens x "
            f"{plural(self.accumulation_steps, 'micro-step')} x "
            f"{plural(self.world_size, 'process', 'processes')}"
        )


def plural(count: int, one: str, many: str | None = None) -> str:
    """Format a count: `1 step`, `2 steps`."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def make_plan(config: Config, world_size: int) -> Plan:
    """Derive the plan; raises `UserError` if options contradict each other.

    The warm-up takes at most the whole run. If the rate decays, it takes one step less.
    """
    train = config.train
    schedule = config.schedule
    max_steps = reference_steps(config)
    longest_warmup = max_steps if schedule.name == "constant" else max_steps - 1
    warmup = min(schedule.warmup_steps, longest_warmup)
    share = schedule.decay_share or (WSD_DECAY_SHARE if schedule.name == "wsd" else 1)
    decay = min(math.ceil(share * max_steps), max(1, max_steps - warmup))
    stages = [stage_batch(span, world_size) for span in spans(config, max_steps)]
    return Plan(
        world_size=world_size,
        micro_batch_size=stages[0].micro_batch_size,
        block_size=stages[0].block_size,
        accumulation_steps=stages[0].accumulation_steps,
        max_steps=max_steps,
        warmup_steps=warmup,
        decay_steps=decay,
        stop_at=train.stop_at,
        pieces=config.model.block_size // stages[0].block_size,
        stages=tuple(stages) if config.stages else (),
    )


def stage_batch(span: Span, world_size: int) -> StageBatch:
    """Return the batch of a stage; raises `UserError` if the processes cannot share it."""
    return StageBatch(
        first_step=span.first_step,
        block_size=span.config.model.block_size,
        micro_batch_size=micro_batch(span.config, world_size),
        accumulation_steps=accumulation(span.config, world_size),
    )


def reference_steps(config: Config) -> int:
    """Return the number of steps that the warm-up, the decay and the intervals are meant for.

    Without `train.budget`, this is the length of the run. With it, this is `train.max_steps` or
    `train.max_tokens`, which the config may set in addition. If it sets neither, the length is so
    large that each interval is due at least once.
    """
    train = config.train
    if train.max_steps:
        return train.max_steps
    if train.max_tokens:
        sizes = [stage.train.tokens_per_step for stage in stage_configs(config)]
        possible = range(in_steps(train.max_tokens, min(sizes)) + 1)
        return bisect_left(possible, train.max_tokens, key=lambda n: total_tokens(config, n))
    require(
        train.budget is not None,
        "the length of the run is not set; set train.max_steps, train.max_tokens or train.budget",
    )
    return max(
        10 * config.schedule.warmup_steps,
        config.eval.every,
        config.checkpoint.every,
        config.sample.every,
        config.log.every,
        *(stage.from_ + 1 for stage in config.stages if isinstance(stage.from_, int)),
    )


def with_edges(config: Config, steps: int) -> tuple[Stage, ...]:
    """Return the stages of `config` for a run of `steps` steps: steps become as much later."""
    reference = reference_steps(config)
    return tuple(
        stage
        if isinstance(stage.from_, float) or not stage.from_
        else replace(stage, from_=max(1, round(stage.from_ * steps / reference)))
        for stage in config.stages
    )


def shorten(config: Config, steps: int) -> Config:
    """Return a copy of `config` for a run of `steps` steps that logs every step and saves often.

    The run generates no samples, and neither uploads nor copies its checkpoints.
    """
    return replace(
        config,
        stages=with_edges(config, steps),
        train=replace(config.train, max_steps=steps, max_tokens=None, budget=None, stop_at=None),
        sample=replace(config.sample, every=0),
        log=LogConfig(every=1, trackers=()),
        hub=replace(config.hub, push="never"),
        checkpoint=replace(
            config.checkpoint,
            every=max(1, steps // 10),
            every_tokens=None,
            keep_last=2,
            resume="auto",
            copy_to=None,
        ),
    )


def in_steps(tokens: int | None, tokens_per_step: int) -> int:
    """Convert tokens to steps, rounded up; 0 for None."""
    return math.ceil((tokens or 0) / tokens_per_step)


def micro_batch(config: Config, world_size: int) -> int:
    """Return the number of sequences in a micro-batch, for `world_size` processes.

    With train.reproducible, this is always `train.micro_batch_size`, since the bits of the run
    depend on it.
    """
    if config.train.reproducible:
        return config.train.micro_batch_sequences
    return shared_micro_batch(config, world_size)


def shared_micro_batch(config: Config, world_size: int) -> int:
    """Return the largest divisor of `train.micro_batch_size` that divides a process's sequences.

    Returns `train.micro_batch_size` unchanged if it does not divide the sequences of a step, or if
    the processes cannot share these sequences equally.
    """
    asked = config.train.micro_batch_sequences
    sequences, rest = divmod(config.train.tokens_per_step, config.model.block_size)
    if rest or sequences % asked or sequences % world_size:
        return asked
    return math.gcd(asked, sequences // world_size)


def accumulation(config: Config, world_size: int) -> int:
    """Compute the number of micro-steps per step.

    Raises `UserError` with sizes that fit if the number is not whole.
    """
    total = config.train.tokens_per_step
    micro = micro_batch(config, world_size)
    block = config.model.block_size
    unit = micro * block * world_size
    if total % unit == 0:
        return total // unit
    below = total // unit * unit
    nearest = f"{below:,} or {below + unit:,}" if below else f"{below + unit:,}"
    raise UserError(
        f"train.tokens_per_step ({total:,}) must be a multiple of {plural(micro, 'sequence')} x "
        f"{plural(block, 'token')} x {plural(world_size, 'process', 'processes')} = {unit:,}; "
        f"try {nearest}"
    )


def fitting_sizes(config: Config, devices: int) -> list[int]:
    """List the values of train.micro_batch_size that divide the step, largest first."""
    sequences, rest = divmod(config.train.tokens_per_step, config.model.block_size * devices)
    if rest:
        return []
    largest = min(sequences, LARGEST_MICRO_BATCH)
    return [size for size in range(largest, 0, -1) if sequences % size == 0]


def with_size(config: Config, size: int | Literal["auto"]) -> Config:
    """Return `config` with another train.micro_batch_size."""
    return replace(config, train=replace(config.train, micro_batch_size=size))


def with_sizes(config: Config, sizes: Sequence[int]) -> Config:
    """Return `config` with the train.micro_batch_size of each stage."""
    later = sizes if begins_at_once(config) else sizes[1:]
    stages = []
    for stage, size in zip(config.stages, later, strict=True):
        options = {**stage.options, "train.micro_batch_size": size}
        stages.append(replace(stage, options=options))
    return replace(with_size(config, sizes[0]), stages=tuple(stages))
