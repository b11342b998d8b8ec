"""Start this package as a child process."""

import json
import os
import signal
import threading
from pathlib import Path

import psutil
import pytest

from accel_gpt.children import run_child
from tests.faults.launches import until

PROBE = """
import json, os, sys
report = {
    "argv": sys.argv[1:],
    "stdin": sys.stdin.read(),
    "environment": dict(os.environ),
    "group": os.getpgrp() == os.getpid(),
}
print(json.dumps(report))
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module that reports how it was started."""
    (tmp_path / "probe.py").write_text(PROBE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "probe"


def test_a_child_is_not_part_of_the_group_of_its_launcher(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = {"RANK": "1", "MASTER_PORT": "7", "ACCELERATE_MIXED_PRECISION": "bf16"}
    for name, value in {**launcher, "ACCELERATE_USE_CPU": "true"}.items():
        monkeypatch.setenv(name, value)
    done = run_child(["a", "b c"], module=module, environment={"ADDED": "1"}, capture=True)
    report = json.loads(done.stdout)
    assert report["argv"] == ["a", "b c"]
    assert not launcher.keys() & report["environment"].keys()
    assert report["environment"]["ACCELERATE_USE_CPU"] == "true"  # the user's choice
    assert report["environment"]["ADDED"] == "1"
    assert (report["stdin"], report["group"]) == ("", False)


def test_an_interrupted_wait_ends_the_child(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = tmp_path / "started"
    code = f"import os, time\nopen({str(started)!r}, 'w').write(str(os.getpid()))\ntime.sleep(60)"
    (tmp_path / "sleeper.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def interrupt() -> None:
        until(lambda: started.exists() and started.read_text())
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        run_child([], module="sleeper")
    thread.join()
    assert not psutil.pid_exists(int(started.read_text()))
