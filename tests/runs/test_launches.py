"""The clocks of launches in run.json, and the first record of each launch."""

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from accel_gpt.api import Run
from accel_gpt.runs.folder import RunFolder
from accel_gpt.runs.launches import clocks, last_time
from tests.conftest import QUIET, launch

CLOCK = {"started": 900.0, "trained": 1000.0, "time": 50.0}


def of_launch(record: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key.startswith("launch/")}


def test_steps_that_a_killed_launch_lost_stay_in_its_clock(
    small_run: Callable[..., list[str]], tmp_path: Path
) -> None:
    words = small_run(*QUIET, "--train.max_steps", "6", "--checkpoint.every", "2", "--log.every=1")
    assert launch([*words, "--train.stop_at", "4", "--log.price", "0.5"]) == 0
    folder = tmp_path / "run"
    first = [*RunFolder(folder).records()]
    shutil.rmtree(folder / "checkpoints" / "step_00000004")  # as if killed before this save
    assert launch(words) == 0

    run = RunFolder(folder)
    assert run.each_launch("step") == [0, 2]
    assert run.each_launch("price") == [0.5, None]
    earlier, later = clocks(run.launches, last_time(run.records(), launch=2))
    assert earlier
    assert later
    assert earlier.seconds == pytest.approx(first[-1]["time"], abs=1e-3)  # with steps 3 and 4
    assert first[1]["time"] <= later.time < first[2]["time"]
    assert later.started >= earlier.ended
    records = [*run.records()]
    assert later.seconds == pytest.approx(records[-1]["time"] - later.time, abs=1e-3)
    device = f"1 x {run.last_launch('device')}"
    begun = {"launch/number": 1, "launch/device": device, "launch/price": 0.5}
    gap = later.trained - earlier.ended
    resumed = {
        "launch/number": 2,
        "launch/device": device,
        "launch/gap_s": pytest.approx(gap, abs=1e-3),
    }
    assert [of_launch(one) for one in records] == [begun, {}, resumed, {}, {}, {}]
    assert Run(folder).metrics["launch/device"].dropna().tolist() == [device, device]
    assert "launch/" not in (folder / "metrics.csv").read_text()


def test_a_launch_without_records_ends_when_it_began() -> None:
    records: list[dict[str, Any]] = [
        {"step": 1, "time": 10.0, "launch/number": 1},
        {"step": 2, "time": 80.0},
        {"step": 3, "time": 90.0},
    ]
    assert last_time(records, launch=1) == 90
    assert last_time(records, launch=2) == 0
    (clock,) = clocks([{"clock": CLOCK}], last_time(records, launch=1))
    assert clock
    assert (clock.ended, clock.seconds, clock.process_seconds) == (1040.0, 40.0, 140.0)
    (clock,) = clocks([{"clock": CLOCK}], last_time(records, launch=2))
    assert clock
    assert (clock.ended, clock.seconds) == (1000.0, 0.0)


@pytest.mark.parametrize(
    "clock", [None, 7, {}, {**CLOCK, "trained": "noon"}, {**CLOCK, "ended": math.inf}], ids=str
)
def test_a_clock_that_is_missing_or_edited_is_unknown(clock: object) -> None:
    assert clocks([{"clock": clock}], 1.0) == [None]
