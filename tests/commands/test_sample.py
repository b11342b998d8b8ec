"""`accel-gpt sample`: its options choose the text."""

from collections.abc import Callable
from pathlib import Path

import pytest

from accel_gpt.cli import dispatch
from accel_gpt.evals.samples import SEPARATOR
from tests.conftest import QUIET, run_here


def test_each_option_has_its_effect(
    trained: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(trained(*QUIET))

    def sample(*options: str) -> str:
        words = ["sample", run, "--prompt", "the", "--max_new_tokens", "40", *options]
        assert run_here(dispatch, words) == 0
        return capsys.readouterr().out

    assert sample("--seed", "1") == sample("--seed", "1") != sample("--seed", "2")
    greedy = sample("--temperature", "0", "--seed", "1")
    assert greedy == sample("--top_k", "1", "--seed", "3")
    assert sample("--top_k", "null", "--temperature", "3") != sample("--temperature", "3")
    assert len(sample("--num", "3").split(SEPARATOR)) == 3
    short = sample("--temperature", "0", "--max_new_tokens", "4")
    assert greedy.startswith(short.rstrip("\n"))
    assert len(short.encode()) <= 3 + 4 + 1
