"""Killed at any moment, launched again: bit for bit the undisturbed run."""

import random
import re
import time
from pathlib import Path

import pytest

from tests.conftest import THOROUGH
from tests.faults.harness import KILLED, STEPS, Server, Tiny, assert_same, finish

pytestmark = pytest.mark.slow
# a peer may never arrive, or a survivor waits for a new group
ELASTIC = ("--train.reproducible", "true", "--train.step_timeout", "10s")
TIMED_OUT = re.compile("time ?out|timed out|completed nothing|has not met", re.IGNORECASE)


def kill_launches(
    server: Server, tiny: Tiny, folder: Path, kills: int, steps: int = STEPS, most: int = 1
) -> tuple[int, int, int]:
    """Launch runs, and kill one process of each launch, until `kills` were hit.

    A launch has up to `most` processes. The other processes end by themselves, and every run must
    end like the undisturbed one. Return the numbers of launches, of kills before the first step of
    a launch, and of launches that ended because a slow machine let a process wait too long.
    """
    seed = random.randrange(2**32)
    draw = random.Random(seed)
    options = ["--train.max_steps", str(steps), *(ELASTIC if most > 1 else ())]
    whole = folder / "whole"
    began = time.monotonic()
    finish(server, tiny.arguments(whole, *options), most)
    seconds = time.monotonic() - began
    hits = launches = starting = late = runs = 0
    while hits < kills:
        run, done = folder / f"run{runs}", False
        runs += 1
        while not done:
            world = draw.randint(1, most)
            victim = draw.randrange(world)
            began = time.monotonic()
            answer = server.launch(
                tiny.arguments(
                    run, *options, "--checkpoint.async_save", draw.choice(("true", "false"))
                ),
                world,
                kill_after=draw.uniform(0, seconds) if hits < kills else None,
                kill=victim,
            )
            launches += 1
            shown = "\n".join(answer.outputs)
            if answer.codes[victim] == KILLED:
                hits += 1
                starting += "\nstep " not in shown
                continue
            done = set(answer.codes) == {0}
            assert done or (world > 1 and TIMED_OUT.search(shown)), f"seed {seed}: {shown}"
            late += not done
            if done and "resuming" not in shown:
                seconds = time.monotonic() - began  # as fast as the machine is now
        try:
            assert_same(run, whole, steps, same_world=most == 1)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, after {hits} kills") from error
    return launches, starting, late


def test_kill9_at_random_times(server: Server, tiny: Tiny, tmp_path: Path) -> None:
    kills = 100 * THOROUGH or 6
    steps = 2 * STEPS if THOROUGH else STEPS
    _, starting, _ = kill_launches(server, tiny, tmp_path, kills, steps)
    assert starting <= 0.9 * kills, f"seldom a kill hit training: {starting} of {kills} hit a start"


def test_kill9_of_one_of_two(server: Server, tiny: Tiny, tmp_path: Path) -> None:
    launches, _, late = kill_launches(server, tiny, tmp_path, 40 * THOROUGH or 5, most=2)
    assert late <= 0.1 * launches, f"too many launches ended unasked: {late} of {launches}"
