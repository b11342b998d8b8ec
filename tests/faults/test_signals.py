"""Signals, dead launchers, hangs and the wall clock, with real processes at random moments."""

import json
import random
import signal
import socket
import sys
import time
from pathlib import Path

import pytest

from accel_gpt.launcher import SIGNALS
from accel_gpt.runs.checkpoint import read_state
from tests.conftest import THOROUGH
from tests.faults.launches import (
    TWO,
    Direct,
    Launched,
    Server,
    config,
    steps_told,
    until,
)
from tests.helpers.ports import free_port
from tests.test_launch import ACCELERATE
from tests.test_train import assert_same_weights, records, weights

pytestmark = pytest.mark.slow
STEPS = 40
# without a launcher, a rank that waits for a new group learns from a timeout that the other is gone
PATIENCE = ["--train.step_timeout", "30s"]
DIRECT = 100 * THOROUGH or 4  # signals of all kinds to two processes


@pytest.fixture(scope="module")
def whole(server: Server, prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed run; the file `seconds` holds its duration."""
    folder = tmp_path_factory.mktemp("whole")
    began = time.monotonic()
    assert Direct(server, folder, [str(config(folder, prepared / "corpus"))]).wait(120) == [0, 0]
    (folder / "run" / "seconds").write_text(str(time.monotonic() - began))
    return folder / "run"


@pytest.fixture
def argv(tmp_path: Path, prepared: Path) -> list[str]:
    return [str(config(tmp_path, prepared / "corpus"))]


def finished(run: Path) -> bool:
    return steps_told(run) == STEPS and (run / "checkpoints" / f"step_{STEPS:08d}").exists()


def assert_same_run(run: Path, whole: Path) -> None:
    lines = records(run)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert lines == records(whole)
    assert_same_weights(weights(run, STEPS), weights(whole, STEPS))
    texts = [{p.name: p.read_text() for p in (r / "samples").iterdir()} for r in (run, whole)]
    assert texts[0] == texts[1]


def seconds_of_training(run: Path) -> float:
    """Return the seconds from the first step to the last."""
    first, *_, last = (run / "metrics.jsonl").read_text().splitlines()
    return float(json.loads(last)["time"] - json.loads(first)["time"])


def tell(*parts: object) -> None:
    """Where a signal hit, for who runs this with -s."""
    sys.stdout.write(" ".join(map(str, parts)) + "\n")


def until_steps_change(run: Path) -> None:
    before = steps_told(run)
    until(lambda: steps_told(run) != before, 120)


def test_signals_at_random_moments(
    server: Server, whole: Path, argv: list[str], tmp_path: Path
) -> None:
    draw = random.Random(7)
    seconds, training = float((whole / "seconds").read_text()), seconds_of_training(whole)
    run = tmp_path / "run0"
    for sent in range(DIRECT):
        number = SIGNALS[sent % len(SIGNALS)]
        if finished(run):
            # a signal after the last step leaves its samples to the next launch
            assert Direct(server, tmp_path, [*argv, "--out_dir", str(run)]).wait() == [0, 0]
            assert_same_run(run, whole)
            run = tmp_path / f"run{sent}"
        launch = Direct(server, tmp_path, [*argv, *PATIENCE, "--out_dir", str(run)])
        if draw.random() < 0.7:  # else while it starts
            until_steps_change(run)
            time.sleep(draw.uniform(0, training))
        else:
            time.sleep(draw.uniform(0, seconds - training))
        before = steps_told(run)
        to = draw.choice([(0,), (1,), (0, 1)])
        launch.send(number, *to)
        codes = launch.wait()
        tell(number, to, f"step {before} to {steps_told(run)}", codes)
        # before the first step a signal ends a process; then the other one notices it
        died = {-number, 128 + number, 75}
        assert set(codes) <= {0, 70} | died, launch.shown(0) + launch.shown(1)
        assert 70 not in codes or died & set(codes)
        name = signal.Signals(number).name
        ends = (f"{name}: saved", f"{name}: stopped before the first step")
        assert codes != [75, 75] or any(end in launch.shown() for end in ends)
    assert Direct(server, tmp_path, [*argv, "--out_dir", str(run)]).wait() == [0, 0]
    assert_same_run(run, whole)


def test_signal_in_the_middle_of_a_save(
    server: Server, whole: Path, argv: list[str], tmp_path: Path
) -> None:
    point = "save.begun"
    log = tmp_path / "points.txt"
    slow = {0: {"ACCEL_GPT_FAULT": f"{point}=sleep", "ACCEL_GPT_FAULT_LOG": str(log)}}
    launch = Direct(server, tmp_path, argv, environment=slow)
    until(lambda: log.exists() and point in log.read_text().splitlines())
    launch.send(signal.SIGUSR2, 1)
    assert launch.wait() == [75, 75]
    assert "SIGUSR2: saved at step" in launch.shown()  # by the process that got no signal
    assert Direct(server, tmp_path, argv).wait() == [0, 0]
    assert_same_run(tmp_path / "run", whole)


@pytest.mark.parametrize(
    ("launcher", "number", "code"),
    [
        (TWO, signal.SIGKILL, -signal.SIGKILL),
        ([*ACCELERATE, "--cpu", "--num_processes", "1"], signal.SIGTERM, -signal.SIGTERM),
    ],
)
def test_dead_launcher_leaves_a_checkpoint_and_no_process(
    launcher: list[str], number: int, code: int, argv: list[str], tmp_path: Path
) -> None:
    endless = [*argv, "--train.max_steps", "100000", "--checkpoint.every", "0"]
    launch = Launched(launcher, tmp_path, endless)
    until(lambda: steps_told(tmp_path / "run") > 3, 120)
    launch.process.send_signal(number)
    assert launch.wait() == code
    assert "SIGTERM: saved at step" in launch.shown()
    (saved,) = (tmp_path / "run" / "checkpoints").iterdir()
    # the next launch writes the record of a step whose evaluation was stopped
    assert read_state(saved).reported_step == steps_told(tmp_path / "run")


def test_second_signal_ends_at_once_though_a_checkpoint_is_being_written(
    server: Server, argv: list[str], tmp_path: Path
) -> None:
    number = signal.SIGTERM
    log = tmp_path / "points.txt"
    stuck = {0: {"ACCEL_GPT_FAULT": "manifest.due=hang", "ACCEL_GPT_FAULT_LOG": str(log)}}
    launch = Direct(server, tmp_path, argv, environment=stuck)
    until(lambda: log.exists() and "manifest.due" in log.read_text().splitlines())
    launch.send(number, 0)
    time.sleep(0.3)
    launch.send(number, 0)  # the same key press
    time.sleep(2.5)
    assert not launch.poll()
    launch.send(number, 0)
    until(lambda: launch.poll() or launch.codes[0] is not None)
    assert launch.wait() == [128 + number, 70]
    assert "another process of the run has ended" in launch.shown(1)


def test_second_signal_ends_a_process_that_waits_for_another(
    server: Server, argv: list[str], tmp_path: Path
) -> None:
    """Python's own handler would run when the collective returns."""
    stuck = {1: {"ACCEL_GPT_FAULT": "step:5=hang"}}
    launch = Direct(server, tmp_path, argv, environment=stuck)
    until(lambda: steps_told(tmp_path / "run") == 4)
    time.sleep(0.5)
    launch.send(signal.SIGTERM, 0)
    time.sleep(2.5)
    launch.send(signal.SIGTERM, 0)
    until(lambda: launch.poll() or launch.codes[0] is not None)
    launch.send(signal.SIGKILL, 1)
    assert launch.wait() == [128 + signal.SIGTERM, -signal.SIGKILL]


def first_of_two(server: Server, folder: Path, argv: list[str]) -> Direct:
    """Start a command without its second process; return when it waits for that one."""
    port = free_port()
    group = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    group |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    launch = Direct(server, folder, argv, processes=1, environment={0: group}, command=True)
    with socket.socket() as probe:
        until(lambda: probe.connect_ex(("127.0.0.1", port)) == 0)
    return launch


def test_a_signal_ends_a_command_that_waits_for_another_process(
    server: Server, whole: Path, tmp_path: Path
) -> None:
    launch = first_of_two(server, tmp_path, ["evaluate", str(whole)])
    launch.send(signal.SIGTERM, 0)
    assert launch.wait() == [128 + signal.SIGTERM]
    assert launch.shown().splitlines()[-1] == "SIGTERM: stopped"


@pytest.mark.parametrize(
    ("where", "rank"),
    [("evaluation:3=sleep", 1), ("sample:3=sleep", 0)],
)
def test_a_signal_to_one_process_during_an_evaluation_stops_all(
    where: str, rank: int, server: Server, whole: Path, argv: list[str], tmp_path: Path
) -> None:
    """One process sleeps two seconds before a batch or a token; then all stop."""
    slow = {one: {"ACCEL_GPT_FAULT": where} for one in (0, 1)}
    launch = Direct(server, tmp_path, argv, environment=slow)
    until(lambda: steps_told(tmp_path / "run") == 5 - (not where.startswith("sample")))
    time.sleep(1)
    launch.send(signal.SIGTERM, rank)
    assert launch.wait() == [75, 75], launch.shown(0) + launch.shown(1)
    assert launch.shown().count("SIGTERM: saving after this step") == 1
    assert "saving" not in launch.shown(1)
    assert Direct(server, tmp_path, argv).wait() == [0, 0]
    assert_same_run(tmp_path / "run", whole)


def test_a_hang_ends_all_and_names_the_place(
    server: Server, argv: list[str], tmp_path: Path
) -> None:
    rank = 1
    stuck = {rank: {"ACCEL_GPT_FAULT": "step:5=hang"}}
    launch = Direct(server, tmp_path, [*argv, "--train.step_timeout", "4s"], environment=stuck)
    until(lambda: steps_told(tmp_path / "run") == 4)
    assert launch.wait() == [70, 70]
    shown = launch.shown(rank)
    assert f"process {rank} completed nothing within 4s (train.step_timeout)" in shown
    assert 'accel_gpt/files.py", line' in shown
    assert "in fail" in shown
    assert 'data/loader.py", line' in shown  # stack of another thread


@pytest.mark.parametrize(
    ("fault", "code", "rank"),
    [("step:5=eio", 4, 0), ("file.synced=kill", -9, 0)],
)
def test_a_process_that_fails_takes_the_other_along(
    fault: str, code: int, rank: int, server: Server, argv: list[str], tmp_path: Path
) -> None:
    """In a step, or on the thread that writes the checkpoint of the last one."""
    last = ["--checkpoint.every", "0", "--train.max_steps", "9"]
    launch = Direct(
        server, tmp_path, [*argv, *last], environment={rank: {"ACCEL_GPT_FAULT": fault}}
    )
    until(lambda: launch.poll() or launch.codes[rank] is not None)
    codes = launch.wait()
    assert (codes[rank], codes[1 - rank]) == (code, 70)
    assert ("Input/output error" in launch.shown(rank)) == (code == 4)
    survivor = launch.shown(1 - rank)
    assert survivor.count("error: another process of the run has ended") == 1
    assert "Traceback" not in survivor


def test_nothing_is_renamed_before_every_process_has_its_files_on_disk(
    server: Server, argv: list[str], tmp_path: Path
) -> None:
    """Process 1 sleeps two seconds before it syncs its file."""
    log = tmp_path / "points.txt"
    slow = {
        0: {"ACCEL_GPT_FAULT_LOG": str(log)},
        1: {"ACCEL_GPT_FAULT": "file.written=sleep", "ACCEL_GPT_FAULT_LOG": str(log)},
    }
    short = ["--train.max_steps", "4", "--checkpoint.every", "0"]
    assert Direct(server, tmp_path, [*argv, *short], environment=slow).wait() == [0, 0]
    points = log.read_text().splitlines()
    saving = [name for name in points if name != "step"]
    last_synced = max(i for i, name in enumerate(saving) if name == "file.synced")
    assert saving.index("manifest.due") > last_synced
    checkpoint = tmp_path / "run" / "checkpoints" / "step_00000004"
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    assert manifest["files"].keys() >= {"random_states_0.pkl", "random_states_1.pkl"}
    assert saving.count("file.synced") == len(manifest["files"])
