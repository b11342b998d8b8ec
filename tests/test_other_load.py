"""Benchmarks: what others take of the machine is measured, and a busy machine's report refused."""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture
def common(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import common

    monkeypatch.setattr(common, "IDLE_SECONDS", 0.0)
    return common


def options(path: Path | None, allow_busy: bool = False) -> argparse.Namespace:
    return argparse.Namespace(json=path, allow_busy=allow_busy)


def stat(user: int = 0, system: int = 0, idle: int = 0, steal: int = 0, guest: int = 0) -> str:
    return f"cpu  {user} 0 {system} {idle} 0 0 0 {steal} {guest} 0\ncpu0 1 1 1 1 1 1 1 1 1 1\n"


def sampled(common: Any, monkeypatch: pytest.MonkeyPatch, *samples: Any) -> None:
    """Let the machine be what the samples say, in turn."""
    each: Iterator[Any] = iter(samples)
    monkeypatch.setattr(common.CpuTimes, "sample", classmethod(lambda cls: next(each)))


def test_shares_leave_out_our_own_processes(common: Any) -> None:
    before = common.CpuTimes.parse(stat(100, 0, 900, 0), own=1.0)
    after = common.CpuTimes.parse(stat(900, 200, 1700, 200, guest=500), own=7.0)
    # of 20 s of the cores 10 were busy, 6 of them ours, and 2 stolen; guest time is user time
    assert after.shares_since(before) == pytest.approx({"steal": 0.1, "others": 0.2})


def test_a_busy_round_is_marked_and_its_report_refused(
    common: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    path = tmp_path / "report.json"
    path.write_text("before")
    before = common.CpuTimes.parse(stat(), 0.0)
    busy = common.CpuTimes.parse(stat(200, idle=1600, steal=200), 0.0)
    for allow_busy in (False, True):
        sampled(common, monkeypatch, before, before, busy)
        load = common.OtherLoad(options(path, allow_busy))
        found = common.interleave({"ours": lambda: {"step_ms": 1.0}}, 1, load)
        assert found == {"ours": [{"step_ms": 1.0, "steal": 0.1, "others": 0.1}]}
        warning = capsys.readouterr().out.splitlines()[-1]
        assert "WARNING" in warning
        assert "round 0: steal 10.0%, other processes 10.0%" in warning
        if allow_busy:
            common.save(path, {"rounds": found}, load)
            assert json.loads(path.read_text()) == {"rounds": found}
        else:
            with pytest.raises(SystemExit, match="2"):
                common.save(path, {"rounds": found}, load)
            assert path.read_text() == "before"
            assert "--allow_busy" in capsys.readouterr().err


def test_a_machine_busy_before_the_start_is_not_measured_for_a_report(
    common: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    idle, busy = (common.CpuTimes.parse(stat(n, idle=100), 0.0) for n in (0, 100))
    sampled(common, monkeypatch, idle, busy)
    with pytest.raises(SystemExit, match="2"):
        common.OtherLoad(options(tmp_path / "report.json"))
    sampled(common, monkeypatch, idle, busy)
    assert not common.OtherLoad(options(None)).busy  # a table may be printed


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="needs Linux's /proc/stat")
def test_a_busy_loop_beside_is_seen(common: Any) -> None:
    loop = subprocess.Popen(
        [sys.executable, "-c", "print(flush=True)\nwhile True: pass"], stdout=subprocess.PIPE
    )
    with loop:
        assert loop.stdout
        loop.stdout.readline()
        before = common.CpuTimes.sample()  # until it is waited for the loop counts as another's
        common.time.sleep(0.4)
        shares = common.CpuTimes.sample().shares_since(before)
        loop.kill()
    assert sum(shares.values()) > common.BUSY_SHARE


def test_goals_are_compared_with_the_fastest_trainer(common: Any) -> None:
    import peers

    step_ms = {"nanoGPT": 60.0, "accel_gpt": 50.0, "accel_gpt, auto": 20.0}
    step_ms |= {"Trainer": 80.0, "Trainer, compiled": 30.0, "Trainer, bf16": 90.0}
    lines = peers.format_goals(step_ms, peers.GOALS["char4"]).splitlines()[2:]
    assert lines == [
        "| accel_gpt, auto over nanoGPT | 2.0 x | 3.00 x | reached |",
        "| accel_gpt over nanoGPT | 1.1 x | 1.20 x | reached |",
        "| accel_gpt, auto over Trainer, compiled (fastest of 3 of 4 forms) "
        "| 1.8 x | 1.50 x | missed |",
    ]
