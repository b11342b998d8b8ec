"""One fork server for all fault tests of a worker, and the undisturbed run to compare with."""

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.register_assert_rewrite("tests.faults.harness")

from tests.faults.harness import Server, Tiny, assert_whole, finish  # noqa: E402


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server, stopped after the tests."""
    with Server(tmp_path_factory.mktemp("server") / "stderr.txt") as running:
        yield running


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """Config and corpus of the tiny run."""
    return Tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def whole(server: Server, tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The undisturbed run, with a checkpoint of every step; do not write to it."""
    run = tmp_path_factory.mktemp("whole") / "run"
    finish(server, tiny.arguments(run, "--checkpoint.every", "1", "--checkpoint.keep_last", "99"))
    assert_whole(run)
    return run
