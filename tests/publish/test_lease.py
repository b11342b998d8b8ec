"""One launch at a time owns the copies of a run."""

import json
import re
import secrets
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.local import LocalFileSystem

from accel_gpt.errors import BusyError, UserError
from accel_gpt.publish import lease as module
from accel_gpt.publish.copies import copy_checkpoint
from accel_gpt.publish.copy_store import CopyStore
from accel_gpt.publish.lease import Lease
from accel_gpt.publish.uploader import Uploader
from accel_gpt.runs.folder import RunFolder
from tests.conftest import launch
from tests.faults.launches import TWO, until
from tests.helpers.s3 import S3Server, require_s3
from tests.publish.test_copies import saved
from tests.test_launch import PLAIN

Arguments = Callable[..., list[str]]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sign often, so that a test need not wait."""
    monkeypatch.setattr(module, "SIGN_SECONDS", 0.2)
    monkeypatch.setattr(module, "POLL_SECONDS", 0.02)


@pytest.fixture
def place(tmp_path: Path) -> str:
    """A folder for copies."""
    return str(tmp_path / "place")


def new_lease(place: str, said: list[str] | None = None, lost: list[str] | None = None) -> Lease:
    """Return a lease that is not taken yet. `lost` gets a word when it is lost."""
    log = ([] if said is None else said).append
    return Lease(CopyStore(place), log, on_lost=lambda: (lost or []).append("lost"))


def owners(place: str) -> list[dict[str, Any]]:
    """Return the leases in the store, the newest last."""
    store = CopyStore(place)
    return [json.loads(store.read(f"{one}/lease.json") or b"") for one in store.launches()]


def freeze(one: Lease) -> None:
    """Let a launch sign no more, as if its process were paused."""
    one.ended.set()
    one.thread.join()


def test_a_launch_waits_for_the_end_of_the_one_before(place: str) -> None:
    first, second = new_lease(place), new_lease(place)
    first.take("run", last="")
    with pytest.raises(BusyError, match=f"{place} is in use by process .*; stop it first"):
        second.take("run", last="")
    assert len(owners(place)) == 1
    first.release()
    said: list[str] = []
    third = new_lease(place, said)
    third.take("run", last="")
    assert said == []
    third.check()
    third.release()
    assert [one["released"] for one in owners(place)] == [True, True]


def test_a_silent_launch_has_ended_and_ends_when_it_returns(place: str) -> None:
    """Only the clock of the machine that waits is used."""
    lost: list[str] = []
    first = new_lease(place, lost=lost)
    lost.append("")
    first.take("run", last="")
    freeze(first)
    first.looked -= 3600  # the pause
    said: list[str] = []
    second = new_lease(place, said)
    second.take("run", last="")
    assert len(said) == 1
    assert said[0].endswith(f"used {place} last; waiting up to 1 s for a sign of it")
    with pytest.raises(BusyError, match=f"went on elsewhere: {place}/launch_000002_.* owns"):
        first.check()
    first.ended.clear()
    first.keep()
    assert lost == ["", "lost"]
    first.release()  # writes nothing
    assert [one["released"] for one in owners(place)] == [False, False]
    assert owners(place)[0]["signs"] < 100
    second.check()
    second.release()


@pytest.mark.parametrize("date", ["1970-01-01T00:00:00+00:00", "2100-01-01T00:00:00+00:00"])
def test_a_wrong_clock_changes_nothing(place: str, date: str) -> None:
    first = new_lease(place)
    first.take("run", last="")
    stop = threading.Event()

    def sign_with_wrong_time() -> None:
        while not stop.wait(0.05):
            sign = {**first.sign.__dict__, "time": date, "signs": first.sign.signs + 1}
            first.sign = module.Sign(**sign)
            first.store.write(f"{first.launch}/lease.json", json.dumps(sign).encode())

    freeze(first)
    thread = threading.Thread(target=sign_with_wrong_time)
    thread.start()
    try:
        with pytest.raises(BusyError, match="is in use by"):
            new_lease(place).take("run", last="")
    finally:
        stop.set()
        thread.join()
    second = new_lease(place)
    second.take("run", last="")
    second.release()


def test_the_folder_of_the_last_owner_need_not_wait(place: str) -> None:
    first = new_lease(place)
    first.take("run", last="")
    freeze(first)
    said: list[str] = []
    second = new_lease(place, said)
    second.take("run", last=first.launch)
    assert said == []
    second.release()


def test_two_launches_that_waited_together_leave_one(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both saw no owner, so both have number 1."""
    names = iter(["b" * 8, "a" * 8])
    monkeypatch.setattr(secrets, "token_hex", lambda _: next(names))
    monkeypatch.setattr(CopyStore, "launches", lambda _: [])
    first, second = new_lease(place), new_lease(place)
    first.take("run", last="")
    second.take("run", last="")
    monkeypatch.undo()
    first.look()
    first.check()
    second.look()
    with pytest.raises(BusyError, match="went on elsewhere"):
        second.check()
    first.release()
    freeze(second)


def test_a_launch_that_lost_the_copies_publishes_none(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not at the start of a copy, and not when the files of one are there already."""
    first = new_lease(place)
    first.take("run", last="")
    checkpoint = saved(tmp_path / "run", 4)
    (tmp_path / "run" / "run_name").write_text("run")
    put_file = LocalFileSystem.put_file
    second = new_lease(place)

    def taken_over_now(system: LocalFileSystem, source: str, target: str) -> None:
        put_file(system, source, target)
        if not second.launch:
            freeze(first)
            second.take("run", last="")

    monkeypatch.setattr(LocalFileSystem, "put_file", taken_over_now)
    with pytest.raises(BusyError, match="went on elsewhere"):
        copy_checkpoint(checkpoint, place, keep_last=1, launch=first.launch)
    store = CopyStore(place)
    assert store.copies() == []
    shutil.rmtree(Path(place, first.launch))
    with pytest.raises(BusyError, match="went on elsewhere"):
        copy_checkpoint(checkpoint, place, keep_last=1, launch=first.launch)
    assert store.launches() == [second.launch]  # not a file is uploaded
    copy_checkpoint(checkpoint, place, keep_last=1, launch=second.launch)
    assert [copy.launch for copy in store.all_copies()] == [second.launch]
    assert store.launches() == [second.launch]  # the folder of the first one is removed
    second.release()


def test_a_launch_that_lost_the_copies_removes_none(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launch that takes over may be restoring the one before."""
    first, second = new_lease(place), new_lease(place)
    first.take("run", last="")
    put_file = LocalFileSystem.put_file

    def taken_over_after(system: LocalFileSystem, source: str, target: str) -> None:
        put_file(system, source, target)
        if target.endswith("step_00000006/manifest.json"):
            freeze(first)
            second.take("run", last="")

    monkeypatch.setattr(LocalFileSystem, "put_file", taken_over_after)
    copy_checkpoint(saved(tmp_path / "run", 4), place, keep_last=1, launch=first.launch)
    with pytest.raises(BusyError, match="went on elsewhere"):
        copy_checkpoint(saved(tmp_path / "run", 6), place, keep_last=1, launch=first.launch)
    assert [copy.step for copy in CopyStore(place).copies()] == [4, 6]
    second.release()


def test_a_launch_removes_nothing_of_a_newer_one(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that takes over after the last look."""
    leases = [new_lease(place), new_lease(place)]
    for one in leases:
        one.take("run", last="")
        one.release()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run_name").write_text("run")
    monkeypatch.setattr("accel_gpt.publish.copies.require_owner", lambda *_: None)
    for one, step in zip(reversed(leases), (4, 6), strict=True):
        checkpoint = saved(tmp_path / "run", step)
        copy_checkpoint(checkpoint, place, keep_last=1, launch=one.launch)
    found = CopyStore(place).all_copies()
    assert [(copy.launch, copy.step) for copy in found] == [
        (leases[0].launch, 6),
        (leases[1].launch, 4),
    ]


def test_a_store_that_cannot_be_reached_ends_no_lease(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError("the network is down")

    monkeypatch.setattr("accel_gpt.files.PAUSES", ())
    first = new_lease(place)
    first.take("run", last="")
    with monkeypatch.context() as down:
        for name in ("ls", "pipe_file", "cat_file"):
            down.setattr(LocalFileSystem, name, fail)
        first.look(sign=True)
        first.looked -= 3600
        first.check()
        with pytest.raises(UserError, match=f"copy_to {place} cannot be read: the network is do"):
            new_lease(place).take("run", last="")
    first.check()
    first.release()


def test_a_store_that_hangs_holds_up_neither_training_nor_the_end(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = new_lease(place)
    first.take("run", last="")
    freeze(first)
    first.ended.clear()
    network_is_back = threading.Event()
    looks: list[str] = []
    answers: list[bool] = []

    def hang(*_: Any, **__: Any) -> None:
        looks.append("")
        answers.append(network_is_back.wait(10))
        raise OSError("the network is down")

    monkeypatch.setattr(LocalFileSystem, "ls", hang)
    monkeypatch.setattr(module, "ANSWER_SECONDS", 0.1)
    first.looked -= 3600
    first.check()
    first.check()
    assert len(looks) == 1
    first.release()
    assert answers == []
    network_is_back.set()
    until(lambda: len(answers) == 2)  # of the check and the release


def test_a_connection_that_breaks_is_made_again(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But not if the store refuses the call."""
    monkeypatch.setattr("accel_gpt.files.PAUSES", (0.0, 0.0))
    listing = LocalFileSystem.ls
    failures: list[OSError] = [OSError(22, "Invalid argument"), OSError("reset by peer")]

    def fail(system: LocalFileSystem, path: str, **options: Any) -> Any:
        if failures:
            raise failures.pop()
        return listing(system, path, **options)

    monkeypatch.setattr(LocalFileSystem, "ls", fail)
    first = new_lease(place)
    first.take("run", last="")
    assert not failures
    failures += [PermissionError("denied"), PermissionError("denied")]
    with pytest.raises(UserError, match="cannot be read: denied"):
        new_lease(place).take("run", last="")
    assert len(failures) == 1
    failures.clear()
    first.release()


def test_a_place_that_takes_no_file_is_told_before_the_run_starts(
    place: str,
    small_run: Arguments,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError("Access Denied")

    monkeypatch.setattr(LocalFileSystem, "pipe_file", refuse)
    assert launch(small_run("--checkpoint.copy_to", place)) == 2
    said = capsys.readouterr().err
    assert f"error: checkpoint.copy_to {place} cannot be written: Access Denied" in said
    assert not RunFolder(tmp_path / "run").launches


@pytest.mark.usefixtures("uploads_here")
def test_a_run_that_lost_its_copies_stops_before_it_saves(
    place: str,
    small_run: Arguments,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from accel_gpt import train

    update = train.update
    taken: list[str] = []
    steps: list[int] = []

    def taken_over(run: train.Training) -> None:
        update(run)
        if run.state.step == 6 and not taken:
            (path,) = Path(place).glob("launch_*")
            newer = Path(place, "launch_000002_00000000")
            newer.mkdir()
            taken.append(path.name)
            until(lambda: not leases[0].thread.is_alive())
        steps.append(run.state.step)

    leases: list[Lease] = []
    take = Lease.take

    def noted(lease: Lease, run: str, last: str) -> None:
        leases.append(lease)
        take(lease, run, last)

    monkeypatch.setattr(Lease, "take", noted)
    monkeypatch.setattr(train, "update", taken_over)
    own = small_run("--checkpoint.every", "4", "--checkpoint.copy_to", place, "--log.every", "99")
    assert launch(own) == 6
    assert max(steps) == 6  # not the next one to save
    said = capsys.readouterr().err
    assert f"went on elsewhere: {place}/launch_000002_00000000 owns checkpoint.copy_to" in said
    assert list(RunFolder(tmp_path / "run").checkpoints) == [4]
    assert not list(Path(place, "launch_000002_00000000").iterdir())


@pytest.mark.usefixtures("uploads_here")
def test_copies_of_an_earlier_place_do_not_set_the_run_back(
    place: str, small_run: Arguments, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its launches have greater numbers than the only one of the place between."""
    for copy_to, step in ((place, 2), (place, 4), (f"{place}2", 8), (place, 10)):
        own = small_run("--checkpoint.copy_to", copy_to, "--train.stop_at", str(step))
        assert launch(own) == 0
    assert "went on elsewhere" not in capsys.readouterr().err
    run = RunFolder(tmp_path / "run")
    assert [one["step"] for one in run.launches] == [0, 2, 4, 8]


@pytest.mark.usefixtures("uploads_here")
@pytest.mark.parametrize("kept", ["", "another-1f2e3d4c"])
def test_a_run_stays_the_owner_of_its_copies_without_a_lease_to_read(
    place: str, small_run: Arguments, tmp_path: Path, kept: str
) -> None:
    """A disk that was full leaves an empty lease. `kept`: a name that an earlier launch left."""
    names = []
    for step in (4, 6, 8):
        own = small_run("--checkpoint.copy_to", place, "--train.stop_at", str(step))
        assert launch(own) == 0
        names.append(RunFolder(tmp_path / "run").stored_name)
        if step == 4:
            for path in Path(place).glob("launch_*/lease.json"):
                path.write_bytes(b"")
            shutil.rmtree(tmp_path / "run")
            (tmp_path / "run").mkdir()
            (tmp_path / "run" / "run_name").write_text(kept)
    assert names == names[:1] * 3


def test_a_launch_that_may_not_take_the_copies_leaves_the_folder_as_it_was(
    place: str, small_run: Arguments, tmp_path: Path
) -> None:
    first = new_lease(place)
    first.take("another", last="")
    assert launch(small_run("--checkpoint.copy_to", place)) == 6
    assert not RunFolder(tmp_path / "run").stored_name
    first.release()


LOSES = """
import sys
import time
from pathlib import Path

from accel_gpt import train
from accel_gpt.commands import train as command
from accel_gpt.console import run_main
from accel_gpt.launcher import is_main
from accel_gpt.publish import lease

update = train.update
lease.SIGN_SECONDS = 0.2

def taken_over(run):
    if is_main() and run.state.step == 6:
        Path("other/launch_000002_00000000").mkdir()
    time.sleep(0.1)
    update(run)

train.update = taken_over
sys.exit(run_main(command.main, sys.argv[1:]))
"""


STOPPED = """
import os
import signal
import sys
import time

from accel_gpt import train
from accel_gpt.commands import train as command
from accel_gpt.console import run_main

def stopped(*_):
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)

train.set_up = stopped
sys.exit(run_main(command.main, sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_launch_that_is_stopped_before_its_first_step_lets_go(
    place: str, small_run: Arguments, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(STOPPED)
    own = small_run("--checkpoint.copy_to", place)
    done = subprocess.run(
        [sys.executable, "script.py", *own], cwd=tmp_path, env=PLAIN, timeout=120, check=False
    )
    assert done.returncode == 75
    assert [one["released"] for one in owners(place)] == [True]


@pytest.mark.slow
@pytest.mark.parametrize("every", ["4", "99"], ids=["saves", "logs alone"])
def test_all_ranks_of_a_launch_that_lost_its_copies_end_alike(
    small_run: Arguments, tmp_path: Path, every: str
) -> None:
    (tmp_path / "script.py").write_text(LOSES)
    own = small_run("--checkpoint.copy_to", "other", "--checkpoint.every", every)
    own += ["--train.max_steps", "999", "--train.micro_batch_size", "2", "--log.every", "1"]
    done = subprocess.run(
        [*TWO, "script.py", *own],
        cwd=tmp_path,
        env=PLAIN,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert re.findall(r"exitcode +: (-?\d+)", done.stderr) == ["6", "6"]
    assert "another process of the run" not in done.stderr


@pytest.mark.usefixtures("uploads_here")
@pytest.mark.parametrize("stop_at", ["8", "12"])
def test_a_launch_that_loses_its_copies_at_the_end_says_so(
    place: str,
    small_run: Arguments,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    stop_at: str,
) -> None:
    """The run is saved, but goes on elsewhere."""
    finish = Uploader.finish

    def taken_over(uploader: Uploader, interrupted: Callable[[], bool]) -> bool:
        Path(place, "launch_000002_00000000").mkdir()
        return finish(uploader, interrupted)

    monkeypatch.setattr(Uploader, "finish", taken_over)
    assert launch(small_run("--checkpoint.copy_to", place, "--train.stop_at", stop_at)) == 6
    assert "error: the run went on elsewhere" in capsys.readouterr().err


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """An S3 server with an empty bucket."""
    require_s3()
    with S3Server() as s3:
        s3.point_at(monkeypatch)
        yield s3


def test_a_misspelled_bucket_is_told_and_not_created(bucket: S3Server) -> None:
    with pytest.raises(UserError, match=r"copy_to s3://misspelled/run cannot be written: .* exist"):
        new_lease("s3://misspelled/run").take("run", last="")
    assert list(bucket.contents.buckets) == ["bucket"]


@pytest.mark.slow
@pytest.mark.usefixtures("uploads_here")
def test_a_config_in_a_bucket_is_all_that_a_machine_needs(
    bucket: S3Server,
    small_run: Arguments,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config, *_ = small_run()
    text = Path(config).read_text().replace("out_dir", "# out_dir")
    bucket.put("runs/mine/config.yaml", text.encode())
    url = "s3://bucket/runs/mine/config.yaml"
    for name, steps in (("a", 6), ("b", 12)):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        assert launch([url, "--train.stop_at", str(steps)]) == 0
        run = RunFolder(tmp_path / name / "runs" / "mine")
        assert [record["step"] for record in run.records()] == list(range(1, steps + 1))
    assert "downloaded step 6 from s3://bucket/runs/mine" in capsys.readouterr().err
    bucket.fail("refuse", "config.yaml", "GET", status=403)
    assert launch([url]) == 2
    said = capsys.readouterr().err
    assert f"error: config file {url} cannot be read: AccessDenied of a test" in said
