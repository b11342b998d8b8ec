"""The warning that evaluations take a large share of a run."""

import re
from collections.abc import Callable

import pytest

from accel_gpt.train import main as launch
from accel_gpt.training.metrics import Stopwatch

pytestmark = pytest.mark.usefixtures("settings_kept")
Arguments = Callable[..., list[str]]
# small_run: 256 tokens a step, an evaluation of two splits of 512 tokens each after 4 steps
WARNING = re.compile(r"WARNING: each evaluation takes about (.*)\n")


@pytest.fixture
def warnings(
    small_run: Arguments, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., list[str]]:
    """Return the warnings about evaluations of a run, by the seconds of a step."""

    def of_run(seconds: float, *options: str) -> list[str]:
        plain = Stopwatch.lap

        def lap(self: Stopwatch, step: int) -> float:
            plain(self, step)
            return seconds

        monkeypatch.setattr(Stopwatch, "lap", lap)
        assert launch(small_run("--sample.every", "0", *options)) == 0
        return WARNING.findall(capsys.readouterr().err)

    return of_run


def test_a_long_evaluation_is_announced_once(warnings: Callable[..., list[str]]) -> None:
    expected = (
        "80 s, 33% of the time of the 4 steps between two; lower eval.tokens (512), or raise "
        "eval.every (4)"
    )
    assert warnings(60.0) == [expected]


def test_what_to_set_is_named(warnings: Callable[..., list[str]]) -> None:
    (whole,) = warnings(600.0, "--eval.tokens", "null", "--eval.every", "0")
    # 20,035 tokens of both splits equal 78 steps, forward only
    assert whole == ("4 h 21 min, 217% of the time of all steps; lower eval.tokens (whole splits)")


def test_a_small_share_is_not_worth_a_line(
    warnings: Callable[..., list[str]],
) -> None:
    assert warnings(60.0, "--eval.every", "12") == []  # 11 %


def test_short_evaluations_are_not_worth_a_line(warnings: Callable[..., list[str]]) -> None:
    assert warnings(1.0, "--eval.every", "1") == []


def test_a_first_step_tells_nothing_that_warming_up_could_explain(
    small_run: Arguments, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = Stopwatch.lap

    def lap(self: Stopwatch, step: int) -> float:
        plain(self, step)
        return 9.0 if step == 1 else 0.01

    monkeypatch.setattr(Stopwatch, "lap", lap)
    options = ("--sample.every", "0", "--eval.tokens", "null")
    assert launch(small_run(*options)) == 0
    assert "each evaluation takes" not in capsys.readouterr().err
