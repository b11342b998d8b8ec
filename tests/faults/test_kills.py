"""Killed at any moment, launched again: bit for bit the undisturbed run."""

import logging
import os
import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.faults.harness import (
    KILLED,
    STEPS,
    Answer,
    Server,
    Tiny,
    assert_same,
    finish,
)

log = logging.getLogger(__name__)

LONG = int(os.environ.get("ACCEL_GPT_KILLS", "1"))  # times 100 kills of one, 40 of one of two
ALONE = "2s"  # after which a process whose peer does not come gives up
SURVIVOR_SECONDS = 30.0
TIMED_OUT = re.compile("time ?out|timed out|completed nothing", re.IGNORECASE)


@dataclass
class Tally:
    """What the kills of a test hit."""

    seed: int
    kills: int = 0
    runs: int = 0
    launches: int = 0
    writing: int = 0  # kills while a checkpoint was being written
    starting: int = 0  # kills before the first step of the launch
    late: int = 0  # launches that ended since a slow machine let a process wait too long
    slowest: float = 0.0  # seconds from a kill to the end of the last survivor
    worlds: Counter[int] = field(default_factory=Counter)

    def note(self, run: Path, shown: str) -> None:
        """Count one kill by what it left."""
        self.kills += 1
        self.writing += bool(list(run.glob("checkpoints/.tmp_step_*")))
        self.starting += "\nstep " not in shown


def reference(server: Server, arguments: Sequence[str], processes: int = 1) -> float:
    """The undisturbed run; its seconds, the shorter of two."""
    whole = arguments[2]
    first = finish(server, [*arguments[:2], f"{whole}_again", *arguments[3:]], processes)
    again = finish(server, arguments, processes)
    return min(max(answer.seconds) for answer in (first, again))


def adapted(seconds: float, answer: Answer) -> float:
    """The seconds of an undisturbed run, as the machine is now: half by what was, half by this."""
    whole = set(answer.codes) == {0} and "resuming" not in answer.outputs[0]
    return (seconds + max(answer.seconds)) / 2 if whole else seconds


def kill_at_random(server: Server, tiny: Tiny, folder: Path, kills: int, steps: int) -> Tally:
    """Kill launches of one process until `kills` were hit; every run must end as undisturbed."""
    tally = Tally(random.randrange(2**32))
    draw = random.Random(tally.seed)
    whole, options = folder / "whole", ("--train.max_steps", str(steps))
    seconds = reference(server, tiny.arguments(whole, *options))
    while tally.kills < kills:
        run, code = folder / f"run{tally.runs}", KILLED
        while code == KILLED:
            after = draw.uniform(0, seconds) if tally.kills < kills else None
            more = (*options, "--checkpoint.async_save", draw.choice(("true", "false")))
            answer = server.launch(tiny.arguments(run, *more), kill_after=after)
            code, tally.launches = answer.codes[0], tally.launches + 1
            if code == KILLED:
                tally.note(run, answer.outputs[0])
            seconds = adapted(seconds, answer)
        assert code == 0, f"{tally}: {answer.outputs[0]}"
        tally.runs += 1
        try:
            assert_same(run, whole, steps)
        except AssertionError as error:
            raise AssertionError(f"after {tally}") from error
    log.info("%s, undisturbed %.0f ms", tally, 1000 * seconds)
    return tally


def test_kill9_at_random_times(server: Server, tiny: Tiny, tmp_path: Path) -> None:
    assert kill_at_random(server, tiny, tmp_path, 6, STEPS).kills == 6


@pytest.mark.slow
@pytest.mark.long
def test_kill9_at_many_random_times(server: Server, tiny: Tiny, tmp_path: Path) -> None:
    tally = kill_at_random(server, tiny, tmp_path, 100 * LONG, 2 * STEPS)
    assert tally.writing >= 2 * LONG, f"too few kills hit a checkpoint: {tally}"
    assert tally.starting <= 90 * LONG, f"too few kills hit training: {tally}"


# --------------------------------------------------------------------------- one of two


def kill_one_of_two(server: Server, tiny: Tiny, folder: Path, kills: int) -> Tally:
    """Kill one process of two until `kills` were hit; the other one ends by itself."""
    tally = Tally(random.randrange(2**32))
    draw = random.Random(tally.seed)
    options = ("--train.reproducible", "true", "--train.step_timeout", ALONE)
    whole = folder / "whole"
    seconds = reference(server, tiny.arguments(whole, *options), 2)
    while tally.kills < kills:
        run, done = folder / f"run{tally.runs}", False
        while not done:
            size = draw.choice((1, 2))
            after = draw.uniform(0, seconds) if tally.kills < kills else None
            victim = draw.randrange(size)
            more = (*options, "--checkpoint.async_save", draw.choice(("true", "false")))
            answer = server.launch(
                *(tiny.arguments(run, *more), size), kill_after=after, kill=victim,
                timeout=SURVIVOR_SECONDS,
            )  # fmt: skip
            done = note_survivors(tally, answer, victim, run)
            seconds = adapted(seconds, answer)
        tally.runs += 1
        try:
            assert_same(run, whole, same_world=False)
        except AssertionError as error:
            raise AssertionError(f"after {tally}") from error
    log.info("%s, undisturbed %.0f ms", tally, 1000 * seconds)
    return tally


def note_survivors(tally: Tally, answer: Answer, victim: int, run: Path) -> bool:
    """Count a launch; whether no process was killed, and the run is done."""
    shown = "\n".join(answer.outputs)
    assert not answer.hung, (
        f"a survivor was still there after {SURVIVOR_SECONDS} s, {tally}: {shown}"
    )
    tally.launches += 1
    tally.worlds[len(answer.codes)] += 1
    if answer.codes[victim] != KILLED:
        late = set(answer.codes) != {0}
        assert not late or TIMED_OUT.search(shown), f"{tally}: {shown}"
        tally.late += late
        return not late
    tally.note(run, shown)
    tally.slowest = max(tally.slowest, max(answer.seconds) - answer.seconds[victim])
    return False


@pytest.mark.slow
@pytest.mark.long
def test_kill9_of_one_of_two(server: Server, tiny: Tiny, tmp_path: Path) -> None:
    tally = kill_one_of_two(server, tiny, tmp_path, 40 * LONG)
    assert tally.writing >= LONG, f"too few kills hit a checkpoint: {tally}"
    assert tally.late <= 0.1 * tally.launches, f"too many launches ended unasked: {tally}"
