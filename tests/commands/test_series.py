"""A series of runs: devices, failures, signals, kills."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_gpt.commands import series
from accel_gpt.commands.resolve import load_config
from accel_gpt.commands.series import Series, SeriesRun, visible_devices
from accel_gpt.errors import DivergedError
from accel_gpt.launcher import PREEMPTED
from accel_gpt.runs.folder import RunFolder
from tests.conftest import thorough

PROGRAM = (
    "import sys; from pathlib import Path; from accel_gpt.commands.series import *\n"
    "from accel_gpt.commands.resolve import load_config\n"
    "config = load_config(sys.argv[2:], '')\n"
    "Series([SeriesRun('a', Path(sys.argv[1]), config)]).train()\n"
)


@pytest.mark.parametrize(
    ("count", "given", "devices"),
    [
        (0, "", [None]),
        (2, None, ["0", "1"]),
        (2, "3,5", ["3", "5"]),
    ],
)
def test_each_visible_gpu_takes_a_run(
    count: int, given: str | None, devices: list[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if given is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    assert visible_devices() == devices


def test_a_diverged_run_is_not_launched_again_and_keeps_its_error(
    small_run: Callable[..., list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    diverges = f"import sys; print('error: not finite'); sys.exit({DivergedError.exit_code})"
    launched: list[str] = []

    def launch(words: list[str], own_group: bool, **options: Any) -> Any:
        launched.extend(words[:1])
        assert own_group
        options.pop("environment")
        return subprocess.Popen([sys.executable, "-c", diverges], text=True, **options)

    monkeypatch.setattr(series, "launch_child", launch)
    for _ in range(2):
        runs = [SeriesRun("a", tmp_path, load_config(small_run(), ""))]
        assert Series(runs).train() == {"a": "not finite"}
        assert (runs[0].diverged, runs[0].finished) == (True, True)
    assert len(launched) == 1


def test_a_run_executes_a_copy_of_the_file_that_only_this_user_can_change(
    small_run: Callable[..., list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others may be able to write to the folder of the sweep, or you may edit the file."""
    own = tmp_path / "own.py"
    source = "def lr(step, config, plan):\n    return 1.0\n"
    own.write_text(source)
    config = load_config([*small_run(), "--code", str(own)], "")
    own.write_text("edited")
    seen: list[tuple[str, int, bool]] = []

    def launch(words: list[str], environment: Mapping[str, str], **options: Any) -> Any:
        (code,) = [Path(word.removeprefix("--code=")) for word in words if word[:7] == "--code="]
        mode = code.parent.parent.stat().st_mode & 0o777
        seen.append((code.read_text(), mode, code.is_relative_to(tmp_path / "out")))
        options.pop("own_group")
        return subprocess.Popen([sys.executable, "-c", "pass"], text=True, **options)

    monkeypatch.setattr(series, "launch_child", launch)
    Series([SeriesRun("a", tmp_path / "out", config)]).train()
    assert seen == [(source, 0o700, False)]


@pytest.mark.slow
def test_finished_runs_are_skipped_and_a_failure_leaves_the_others_alone(
    small_run: Callable[..., list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(series, "visible_devices", lambda: ["0", "1"])
    config = load_config(small_run(), "")
    wrong = replace(config, model=replace(config.model, init_from="none"))
    runs = [SeriesRun(name, tmp_path, wrong if name == "b" else config) for name in "abc"]
    failures = Series(runs).train()
    assert "none" in failures.pop("b")
    assert failures == {}
    assert "b: run 2 of 3, to step 12 on GPU 1" in capsys.readouterr().err
    again = [SeriesRun(name, tmp_path, config) for name in "abc"]
    assert Series(again).train() == {}
    assert [len(RunFolder(run.folder).launches) for run in again] == [1, 1, 1]


@pytest.mark.slow
@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=thorough), signal.SIGKILL])
def test_a_stopped_series_goes_on(
    number: signal.Signals, small_run: Callable[..., list[str]], tmp_path: Path
) -> None:
    """A run saves if it gets a signal, and also if its series is killed."""
    folder = RunFolder(tmp_path / "a")
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), *small_run()]
    slow_steps = {**os.environ, "ACCEL_GPT_FAULT": "step:6+=sleep"}
    first = subprocess.Popen(command, env=slow_steps, stderr=subprocess.PIPE, text=True)
    while not any(record["step"] >= 5 for record in folder.records()):
        time.sleep(0.05)
    first.send_signal(number)
    printed = first.communicate()[1]
    if number != signal.SIGKILL:
        assert first.returncode == PREEMPTED
        assert printed.splitlines()[-1].startswith(f"{number.name}: 0 of 1 run finished")
    second = subprocess.run(command, capture_output=True, text=True, check=False)
    assert second.returncode == 0, second.stderr
    assert [record["step"] for record in folder.records()] == [*range(1, 13)]
    assert 4 < folder.last_launch("step") < 12  # after the last checkpoint that was due
