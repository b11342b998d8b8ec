"""What the parts of a run take, and the time budget that they were measured for. No torch."""

import math
from dataclasses import dataclass

from accel_gpt.config.experiment import Config


@dataclass(frozen=True)
class Costs:
    """Seconds that the parts of a run take."""

    step: float
    set_up: float = 0.0  # until the first step
    start: float = 0.0  # that the first step takes longer than others, since it compiles
    evaluation: float = 0.0  # all evaluations of one step
    samples: float = 0.0  # all samples of one step
    save: float = 0.0  # one checkpoint

    def total(self, config: Config, steps: int) -> float:
        """Return the seconds of a run of `steps` steps."""
        return self.set_up + self.start + steps * self.step + self.pauses(config, steps)

    def pauses(self, config: Config, steps: int, after: int = 0) -> float:
        """Return the seconds of the evaluations, samples and saves that are due after a step."""
        evaluated = due_steps(config.eval.every, steps)
        saved = due_steps(config.checkpoint.every, steps)
        if config.checkpoint.every_tokens:
            interval = max(config.checkpoint.every_tokens / config.train.tokens_per_step, 1)
            saved |= {math.ceil(i * interval) for i in range(1, int(steps / interval) + 1)}
        if config.checkpoint.keep_best:
            saved |= evaluated  # at most: each evaluation is better than those before
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
    thin: int  # factor on the intervals of evaluations, samples and saves
    first_steps: int  # the length at the start of the run
    steps: int  # the length
    looked_at: int | None = None  # step after which the length was looked at again; None: not yet


def due_steps(every: int, steps: int) -> set[int]:
    """Return the steps at which something is due every `every` steps (0: never), and the last."""
    return {*(range(every, steps + 1, every) if every else ()), steps}


def count_after(step: int, due: set[int]) -> int:
    """Count the steps in `due` after `step`."""
    return sum(one > step for one in due)


def format_seconds(seconds: float) -> str:
    """Format a short time: `0.17 s`."""
    return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:,.0f} s"
