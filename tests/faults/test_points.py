"""A run killed at every fault point of the writer equals the undisturbed run, bit for bit."""

import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.conftest import THOROUGH
from tests.faults.harness import FSDP, KILLED, Server, Tiny, assert_same, finish

pytestmark = pytest.mark.slow
STEPS = 6  # three checkpoints; two and the best are kept
OPTIONS = ["--train.max_steps", str(STEPS)]
# how the launch may end: done, one sentence of error, no checkpoint, killed
ENDS = {
    "kill": {KILLED},
    "half": {KILLED, 0, 2, 4},  # a folder cannot be cut in half: an error
    "enospc": {0, 2, 4},
    "eio": {0, 2, 4},
}


@pytest.fixture(scope="module", params=["copied_0"])
def short(
    request: pytest.FixtureRequest,
    server: Server,
    tiny: Tiny,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """The undisturbed run: one process or two with FSDP, with or without `checkpoint.async_save`.

    A file beside it has the names of the points that the process to fail passed.
    """
    run = tmp_path_factory.mktemp("short") / request.param
    log = {"ACCEL_GPT_FAULT_LOG": str(run.with_name("points.txt"))}
    environment = processes(run, log)
    finish(server, arguments(tiny, run, run), len(environment), environment=environment)
    assert_same(run, run, STEPS)
    passed = set(points(run))
    assert passed >= {"file.written", "file.synced", "save.filled"}
    assert (passed >= {"best.named", "trash.renamed", "trash.gone"}) == run.name.endswith("0")
    assert ("save.copied" in passed) == ("copied" in run.name)
    return run


def processes(short: Path, one: dict[str, str]) -> list[dict[str, str]]:
    """Return the environment of each process of a run like `short`; `one`: of the one to fail."""
    kind, _, rank = short.name.rpartition("_")
    every = [dict(FSDP), dict(FSDP)] if kind.startswith("sharded") else [{}]
    every[int(rank)] |= one
    return every


def arguments(tiny: Tiny, run: Path, short: Path) -> list[str]:
    """Return the arguments of a run in `run` that must end like `short`."""
    copied = str("copied" in short.name).lower()
    return tiny.arguments(run, *OPTIONS, "--checkpoint.async_save", copied)


def points(short: Path) -> list[str]:
    """Return the names of the points of the undisturbed run, in order."""
    names = short.with_name("points.txt").read_text().splitlines()
    assert len(names) >= 3 * 4, f"the writer names few points: {names}"
    return names


def fail_at(
    numbers: Iterable[int], action: str, server: Server, tiny: Tiny, short: Path, folder: Path
) -> None:
    """Let a run fail at each point with these numbers, and launch it again."""
    names = points(short)
    for number in numbers:
        run, where = folder / f"{action}_{number}", f"{action} at {number}: {names[number - 1]}"
        environment = processes(short, {"ACCEL_GPT_FAULT": f"*:{number}={action}"})
        asked = arguments(tiny, run, short), len(environment)
        answer = server.launch(*asked, environment=environment)
        rank = int(short.name[-1])
        assert answer.codes[rank] in ENDS[action], f"{where}: {answer.outputs}"
        answer = server.launch(*asked, environment=processes(short, {}))
        assert answer.codes == [0] * len(environment), f"{where}: {answer.outputs}"
        try:
            assert_same(run, short, STEPS)
        except AssertionError as error:
            raise AssertionError(f"after {where}") from error
        shutil.rmtree(run)


def each_name(short: Path) -> list[int]:
    """Return the number of the last point of each name; of all points if thorough."""
    names = points(short)
    last = {name: number for number, name in enumerate(names, 1)}
    return sorted(last.values()) if not THOROUGH else list(range(1, len(names) + 1))


def test_kill_between_a_save_and_the_end_of_its_evaluation(
    server: Server, tiny: Tiny, short: Path, tmp_path: Path
) -> None:
    """Steps 3 and 6 are evaluated in two batches each; step 6 is saved before its evaluation."""
    for batch in (2, 4):
        run = tmp_path / f"batch_{batch}"
        environment = processes(short, {"ACCEL_GPT_FAULT": f"evaluation:{batch}=kill"})
        answer = server.launch(arguments(tiny, run, short), environment=environment)
        assert answer.codes == [KILLED]
        assert (run / "checkpoints" / "step_00000006").exists() == (batch == 4)
        finish(server, arguments(tiny, run, short))
        assert_same(run, short, STEPS)


@pytest.mark.parametrize("short", ["saved_0", "copied_0"], indirect=True)
def test_kill_at_every_point(server: Server, tiny: Tiny, short: Path, tmp_path: Path) -> None:
    fail_at(each_name(short), "kill", server, tiny, short, tmp_path)
    fail_at(each_name(short)[::2], "half", server, tiny, short, tmp_path)


@pytest.mark.parametrize("action", ["enospc", "eio"])
def test_error_of_the_disk_at_some_points(
    action: str, server: Server, tiny: Tiny, short: Path, tmp_path: Path
) -> None:
    fail_at(each_name(short)[:: 2 if THOROUGH else 4], action, server, tiny, short, tmp_path)


@pytest.mark.parametrize("short", ["sharded_copied_1"], indirect=True)
def test_failure_of_one_of_two_that_fsdp_shards(
    server: Server, tiny: Tiny, short: Path, tmp_path: Path
) -> None:
    chosen = each_name(short)
    fail_at(chosen if THOROUGH else chosen[::3], "kill", server, tiny, short, tmp_path)
    fail_at(chosen[1:2], "enospc", server, tiny, short, tmp_path)
