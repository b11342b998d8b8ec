"""Killed at every point that the writer of checkpoints names: bit for bit the undisturbed run."""

import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.faults.harness import KILLED, Server, Tiny, assert_same, finish

STEPS = 6  # three checkpoints and those of the best; two are kept and the best
TRIALS = 8
OPTIONS = ["--train.max_steps", str(STEPS)]
# how the launch may end: done, one sentence of error, no checkpoint, killed
ENDS = {
    "kill": {KILLED},
    "half": {KILLED, 0, 2, 4},  # there is no half of a folder: an error
    "enospc": {0, 2, 4},
    "eio": {0, 2, 4},
}


@pytest.fixture(scope="module", params=[pytest.param("saved", marks=pytest.mark.slow), "copied"])
def short(
    request: pytest.FixtureRequest,
    server: Server,
    tiny: Tiny,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """The undisturbed run, without or with `checkpoint.async_save`; beside it the names of all
    points that it passed.
    """
    run = tmp_path_factory.mktemp("short") / request.param
    log = {"ACCEL_GPT_FAULT_LOG": str(run.with_name("points.txt"))}
    finish(server, arguments(tiny, run, run), environment=[log])
    assert_same(run, run, STEPS)
    passed = set(points(run))
    assert passed >= {"best.named", "trash.renamed", "trash.gone"}
    assert ("save.copied" in passed) == (run.name == "copied")
    return run


def arguments(tiny: Tiny, run: Path, short: Path) -> list[str]:
    """Those of the run in `run` that shall end as `short` did."""
    copied = str(short.name == "copied").lower()
    return tiny.arguments(run, *OPTIONS, "--checkpoint.async_save", copied)


def points(short: Path) -> list[str]:
    """Names of the points of the undisturbed run, in the order in which it passed them."""
    names = short.with_name("points.txt").read_text().splitlines()
    assert len(names) >= 3 * 5, f"the writer names few points: {names}"
    return names


def fail_at(
    numbers: Iterable[int], action: str, server: Server, tiny: Tiny, short: Path, folder: Path
) -> None:
    """Let a run fail at each of the points with these numbers, and launch it again."""
    names = points(short)
    for number in numbers:
        run, where = folder / f"{action}_{number}", f"{action} at {number}: {names[number - 1]}"
        fault = {"ACCEL_GPT_FAULT": f"*:{number}={action}"}
        answer = server.launch(arguments(tiny, run, short), environment=[fault])
        assert answer.codes[0] in ENDS[action], f"{where}: {answer.outputs[0]}"
        answer = server.launch(arguments(tiny, run, short))
        assert answer.codes == [0], f"{where}: {answer.outputs[0]}"
        try:
            assert_same(run, short, STEPS)
        except AssertionError as error:
            raise AssertionError(f"after {where}") from error
        shutil.rmtree(run)


def spread(short: Path) -> range:
    """Numbers of about as many points as a test has time for."""
    numbers = range(1, len(points(short)) + 1)
    return numbers[:: max(1, len(numbers) // TRIALS)]


def test_kill_at_some_points(server: Server, tiny: Tiny, short: Path, tmp_path: Path) -> None:
    """Turn about with the file at hand as it is, and cut to half."""
    chosen = spread(short)[::2]
    fail_at(chosen[::2], "kill", server, tiny, short, tmp_path)
    fail_at(chosen[1::2], "half", server, tiny, short, tmp_path)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("action", ["kill", "half"])
def test_kill_at_every_point(
    action: str, server: Server, tiny: Tiny, short: Path, tmp_path: Path
) -> None:
    fail_at(range(1, len(points(short)) + 1), action, server, tiny, short, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("action", ["enospc", "eio"])
def test_error_of_the_disk_at_some_points(
    action: str, server: Server, tiny: Tiny, short: Path, tmp_path: Path
) -> None:
    fail_at(spread(short), action, server, tiny, short, tmp_path)
