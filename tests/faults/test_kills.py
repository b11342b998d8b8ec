"""Killed at any moment, launched again: bit for bit the undisturbed run."""

import logging
import random
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.conftest import THOROUGH
from tests.faults.harness import KILLED, STEPS, Answer, Server, Tiny, assert_same, finish

log = logging.getLogger(__name__)

# a peer may never arrive, or a survivor waits for a new group
ELASTIC = ("--train.reproducible", "true", "--train.step_timeout", "10s")
SURVIVOR_SECONDS = 60.0
TIMED_OUT = re.compile("time ?out|timed out|completed nothing|has not met", re.IGNORECASE)


@dataclass
class Tally:
    """Counts of what the kills of a test hit."""

    seed: int
    kills: int = 0
    runs: int = 0
    launches: int = 0
    starting: int = 0  # kills before the first step of the launch
    late: int = 0  # launches that ended because a slow machine let a process wait too long
    slowest: float = 0.0  # seconds from a kill to the end of the last survivor
    worlds: Counter[int] = field(default_factory=Counter)

    def note(self, answer: Answer, victim: int) -> bool:
        """Count a launch; return whether the run completed without a kill."""
        shown = "\n".join(answer.outputs)
        assert not answer.hung, f"a survivor did not end, {self}: {shown}"
        self.launches += 1
        self.worlds[len(answer.codes)] += 1
        if answer.codes[victim] != KILLED:
            late = set(answer.codes) != {0}
            excused = len(answer.codes) > 1 and TIMED_OUT.search(shown)
            assert not late or excused, f"{self}: {shown}"
            self.late += late
            return not late
        self.kills += 1
        self.starting += "\nstep " not in shown
        self.slowest = max(self.slowest, max(answer.seconds) - answer.seconds[victim])
        return False


def kill_launches(
    server: Server,
    tiny: Tiny,
    folder: Path,
    kills: int,
    steps: int = STEPS,
    most: int = 1,
) -> Tally:
    """Launch runs, and kill one process of each, until `kills` were hit.

    A launch has up to `most` processes. The other processes end by themselves, and every run must
    end like the undisturbed one.
    """
    tally = Tally(random.randrange(2**32))
    draw = random.Random(tally.seed)
    elastic = ELASTIC if most > 1 else ()
    options: tuple[str, ...] = ("--train.max_steps", str(steps), *elastic)
    whole = folder / "whole"
    answers = [
        finish(server, tiny.arguments(run, *options), most) for run in (folder / "first", whole)
    ]
    seconds = min(max(answer.seconds) for answer in answers)
    while tally.kills < kills:
        run, done = folder / f"run{tally.runs}", False
        while not done:
            size = draw.randint(1, most)
            after = draw.uniform(0, seconds) if tally.kills < kills else None
            victim = draw.randrange(size)
            more = (*options, "--checkpoint.async_save", draw.choice(("true", "false")))
            answer = server.launch(
                *(tiny.arguments(run, *more), size), kill_after=after, kill=victim,
                timeout=SURVIVOR_SECONDS,
            )  # fmt: skip
            done = tally.note(answer, victim)
            if set(answer.codes) == {0} and "resuming" not in answer.outputs[0]:
                seconds = (seconds + max(answer.seconds)) / 2  # as fast as the machine is now
        tally.runs += 1
        try:
            assert_same(run, whole, steps, same_world=most == 1)
        except AssertionError as error:
            raise AssertionError(f"after {tally}") from error
    log.info("%s, undisturbed %.0f ms", tally, 1000 * seconds)
    return tally


def test_kill9_at_random_times(server: Server, tiny: Tiny, tmp_path: Path) -> None:
    kills = 100 * THOROUGH or 3
    tally = kill_launches(server, tiny, tmp_path, kills, 2 * STEPS if THOROUGH else STEPS)
    assert tally.starting <= max(3, 0.9 * kills), f"too few kills hit training: {tally}"


@pytest.mark.slow
def test_kill9_of_one_of_two(server: Server, tiny: Tiny, tmp_path: Path) -> None:
    kills = 40 * THOROUGH or 5
    tally = kill_launches(server, tiny, tmp_path, kills, most=2)
    assert tally.late <= 0.1 * tally.launches, f"too many launches ended unasked: {tally}"
