"""Copy checkpoints while a run trains, and restore a run that lost its checkpoints."""

import json
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from accel_gpt.config.experiment import CheckpointConfig, HubConfig
from accel_gpt.errors import BusyError, CheckpointError, UserError
from accel_gpt.files import sha256
from accel_gpt.publish.copies import Copies, CopyStore, copy_checkpoint
from accel_gpt.publish.uploader import Uploader
from accel_gpt.runs.checkpoint import read_manifest, verify_checkpoint
from accel_gpt.runs.folder import RunFolder
from accel_gpt.runs.state import FORMAT
from tests.conftest import launch, thorough
from tests.faults.launches import until
from tests.helpers.hub_server import HubServer, no_waiting, point_at
from tests.helpers.s3 import S3Server, require_s3
from tests.test_launch import PLAIN, TORCHRUN
from tests.test_train import assert_same_weights, records, signal_after, weights

Arguments = Callable[..., list[str]]
Trained = Callable[..., Path]
EVERY = ("--checkpoint.every", "4", "--checkpoint.keep_last", "1")
KEPT = ("--checkpoint.keep_last", "3")  # the checkpoints of steps 4, 8 and 12


@pytest.fixture(
    params=["folder", *(pytest.param(place, marks=pytest.mark.slow) for place in ("store", "hub"))]
)
def place(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """A folder, a URL of a store without folders, or a new repository."""
    with HubServer() as hub:
        point_at(monkeypatch, hub, tmp_path / "home")
        no_waiting(monkeypatch)
        yield {
            "folder": str(tmp_path / "other"),
            "store": f"memory://{tmp_path}/other",
            "hub": "hf://tester/backup",
        }[request.param]


def steps(place: str) -> list[str]:
    system, root = fsspec.url_to_fs(place)
    system.invalidate_cache()
    names = sorted(Path(name).name for name in system.ls(root, detail=False))
    return [name for name in names if name.startswith("step_")]


@pytest.mark.usefixtures("uploads_here")
def test_a_lost_run_goes_on_from_the_copy(
    place: str,
    small_run: Arguments,
    trained: Trained,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = trained(*KEPT, to="whole")
    own = small_run(*EVERY, "--sample.every", "2", "--checkpoint.copy_to", place)
    signal_after(monkeypatch, 6, 15)
    assert launch(own) == 75
    assert steps(place) == ["step_00000006"]  # keep_last is 1; the signal saved this one
    before = RunFolder(tmp_path / "run")
    before_name = before.stored_name
    kept, samples = list(before.records()), before.samples
    texts = [before.sample_texts(step) for step in samples]
    shutil.rmtree(tmp_path / "run")
    assert launch(own) == 0
    restored = RunFolder(tmp_path / "run")
    assert list(restored.records())[:6] == kept  # also the times
    assert [record["step"] for record in restored.records()] == list(range(1, 13))
    assert [record["step"] for record in restored.csv_records()] == [str(n) for n in range(1, 13)]
    assert [restored.sample_texts(step) for step in samples] == texts
    assert len(texts) > 0
    assert restored.stored_name == before_name
    assert [start["step"] for start in restored.launches] == [0, 6]
    assert steps(place) == ["step_00000012"]
    assert not (tmp_path / "run" / ".uploading").exists()
    assert_same_weights(weights(tmp_path / "run"), weights(whole))


@pytest.mark.usefixtures("uploads_here")
def test_a_copy_on_the_hub_is_one_commit_to_a_private_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with HubServer() as hub:
        point_at(monkeypatch, hub, tmp_path / "home")
        copies = start_uploads(tmp_path / "run", "hf://tester/backup/runs/a")
        for step in (4, 8, 12):
            checkpoint = saved(copies.run, step)
            copies.on_checkpoint(checkpoint)
            until(lambda: not copies.due())
        copies.finish(lambda: False)
        files = hub.files("tester/backup")
        assert hub.repos["tester/backup"].private
        commits = hub.commits("tester/backup")[::-1]
    steps = [f"step_000000{step}" for step in ("04", "08", "12")]
    assert commits == ["initial commit", RunFolder(tmp_path / "run").stored_name, *steps]
    folders = {"runs/a", *(f"runs/a/{name}" for name in steps[1:])}
    assert {str(Path(name).parent) for name in files} == folders
    for name in read_manifest(checkpoint):
        assert files[f"runs/a/step_00000012/{name}"] == (checkpoint / name).read_bytes()


def test_a_run_whose_copies_cannot_be_listed_does_not_start_anew(
    small_run: Arguments,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError("the network is down")

    monkeypatch.setattr(MemoryFileSystem, "ls", fail)
    monkeypatch.setattr(MemoryFileSystem, "info", fail)
    place = f"memory://{tmp_path}/other"
    assert launch(small_run("--checkpoint.copy_to", place)) == 2
    said = capsys.readouterr().err
    assert f"checkpoint.copy_to {place} cannot be read: the network is down" in said


@pytest.mark.slow
def test_a_copy_that_is_killed_is_no_copy(
    small_run: Arguments,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In a real child of low priority."""
    place = tmp_path / "other"
    monkeypatch.setenv("ACCEL_GPT_FAULT", "copy.file:3=kill")
    own = small_run("--checkpoint.every", "0", "--checkpoint.copy_to", str(place))
    assert launch(own) == 0
    said = capsys.readouterr().err
    assert f"WARNING: upload of step 12 to {place} failed: exit code -9" in said
    assert list(place.glob("step_*"))
    assert not list(place.glob("*/manifest.json"))
    assert not (tmp_path / "run" / ".uploading").exists()


def test_a_copy_that_broke_off_or_is_damaged_is_passed_over(
    trained: Trained, tmp_path: Path
) -> None:
    place = tmp_path / "other"
    run = trained(*KEPT)
    name = Copies(str(place), run, "auto", print).claim()
    for checkpoint in RunFolder(run).checkpoints.values():
        copy_checkpoint(checkpoint, str(place), keep_last=3, run=name)
    assert steps(str(place)) == ["step_00000004", "step_00000008", "step_00000012"]
    (place / "step_00000012" / "manifest.json").unlink()
    file = place / "step_00000008" / "optimizer.bin"
    file.write_bytes(file.read_bytes()[:-9])
    moved = tmp_path / "moved"  # as on another machine
    moved.mkdir()
    said: list[str] = []
    copies = Copies(str(place), moved, "auto", said.append)
    copies.open()
    altered, downloaded = said
    assert altered.startswith(f"WARNING: checkpoint file {file} was altered: it has ")
    assert altered.endswith("; falling back to an earlier copy")
    assert downloaded == f"downloaded step 4 from {place}"
    verify_checkpoint(moved / "checkpoints" / "step_00000004")
    assert not list((moved / "checkpoints").glob("*/run.zip"))
    for name in ("metrics.jsonl", "metrics.csv", "run.json", "run_name"):
        assert (moved / name).read_bytes() == (run / name).read_bytes()
    shutil.rmtree(moved / "checkpoints")
    file = place / "step_00000004" / "optimizer.bin"
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(CheckpointError, match=f"all copies in checkpoint.copy_to {place} are dam"):
        Copies(str(place), moved, "auto", print).open()


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """An S3 server whose bucket may hold copies at s3://bucket/run."""
    require_s3()
    with S3Server() as s3:
        s3.point_at(monkeypatch)
        yield s3


S3_COPIES = ("--checkpoint.keep_last", "3", "--checkpoint.copy_to", "s3://bucket/run")


@pytest.mark.slow
@pytest.mark.usefixtures("uploads_here")
def test_a_copy_on_s3_with_a_flipped_bit_is_passed_over(
    bucket: S3Server,
    small_run: Arguments,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The server sends the hash of what it stores. A bit that flips once is downloaded again."""
    own = small_run(*EVERY[:2], *S3_COPIES)
    assert launch([*own, "--train.stop_at", "8"]) == 0  # the newest copies are of steps 8 and 12
    assert launch(own) == 0
    whole = weights(tmp_path / "run")
    model = "run/step_00000012/model.safetensors"
    for fault, wanted in ((1, 12), (None, 8)):
        bucket.fail("flip", model, "GET", times=fault)
        shutil.rmtree(tmp_path / "run")
        capsys.readouterr()
        assert launch(own) == 0
        bucket.heal()
        said = capsys.readouterr().err
        assert f"downloaded step {wanted} from s3://bucket/run" in said
        told = f"WARNING: checkpoint file s3://bucket/{model} was altered: its SHA-256" in said
        assert told == (wanted == 8)
        assert_same_weights(weights(tmp_path / "run"), whole)


@pytest.mark.slow
@pytest.mark.usefixtures("uploads_here")
def test_a_copy_that_s3_refuses_now_is_not_passed_over(
    bucket: S3Server,
    small_run: Arguments,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It may be intact: an earlier copy would replace it."""
    own = small_run(*EVERY[:2], *S3_COPIES)
    assert launch(own) == 0
    shutil.rmtree(tmp_path / "run")
    bucket.fail("refuse", "run/step_00000012/optimizer.bin", "GET|HEAD", status=403)
    assert launch(own) == 2
    said = capsys.readouterr().err
    where = "s3://bucket/run/step_00000012/optimizer.bin"
    assert f"error: {where} cannot be downloaded: AccessDenied of a test" in said
    assert not RunFolder(tmp_path / "run").checkpoints


@pytest.mark.usefixtures("uploads_here")
def test_a_second_run_with_the_same_copies_is_refused(
    place: str, trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """But the same run goes on from another folder, or restored into an empty one."""
    begun = start_uploads(tmp_path / "begun", place)  # a run without copies makes room
    first, second, third = trained(*KEPT), trained(*KEPT, to="second"), tmp_path / "third"
    third.mkdir()
    assert not start_uploads(first, place).finish(lambda: False)
    name = RunFolder(first).stored_name
    told = f"checkpoint.copy_to {place} belongs to run {name}; set another"
    with pytest.raises(UserError, match=told):
        start_uploads(second, place)
    begun.on_checkpoint(saved(begun.run, 2))
    begun.finish(lambda: False)
    said = capsys.readouterr()
    assert f"WARNING: upload of step 2 to {place} failed, no more follow: " in said.out
    assert told in said.err
    assert not begun.targets
    with pytest.raises(BusyError, match=told):
        CopyStore(place).claim("another")
    assert steps(place) == ["step_00000012"]
    first.rename(tmp_path / "moved")
    start_uploads(tmp_path / "moved", place).close()
    start_uploads(third, place).close()
    assert RunFolder(third).stored_name == name
    assert [record["step"] for record in records(third)] == list(range(1, 13))


@pytest.mark.usefixtures("uploads_here")
def test_a_newer_copy_is_not_replaced(place: str, trained: Trained, tmp_path: Path) -> None:
    """The run went on elsewhere. Then it is launched where it is older."""
    run, elsewhere = trained(*KEPT), trained(*KEPT, to="elsewhere")
    for step in (8, 12):
        shutil.rmtree(run / "checkpoints" / f"step_{step:08d}")
    assert not start_uploads(run, place).finish(lambda: False)
    shutil.copy(run / "run_name", elsewhere)
    assert not start_uploads(elsewhere, place).finish(lambda: False)
    with pytest.raises(UserError, match=r"holds step 12, but .*run has no checkpoint after step 4"):
        start_uploads(run, place)
    assert steps(place) == ["step_00000004", "step_00000012"]


def start_uploads(run: Path, place: str) -> Uploader:
    run.mkdir(exist_ok=True)
    kept = CheckpointConfig(copy_to=place, keep_last=2)
    uploader = Uploader(kept, HubConfig(), run, print)
    uploader.open()
    uploader.start()
    return uploader


def saved(run: Path, step: int) -> Path:
    """Write a folder like the checkpoint of a step."""
    checkpoint = run / "checkpoints" / f"step_{step:08d}"
    checkpoint.mkdir(parents=True, exist_ok=True)
    names = ["model.json", "model.safetensors", "tokenizer.json", "trainer_state.json"]
    files = {}
    for name in names:
        (checkpoint / name).touch()
        files[name] = {"size": 0, "sha256": sha256(checkpoint / name)}
    manifest = json.dumps({"format": FORMAT, "files": files})
    (checkpoint / "manifest.json").write_text(manifest)
    return checkpoint


@pytest.mark.usefixtures("uploads_here")
def test_the_newest_copies_are_kept_and_none_of_later_steps(place: str, tmp_path: Path) -> None:
    """A run that lost its newest checkpoints makes their steps again."""
    copies = start_uploads(tmp_path / "run", place)
    for step, expected in ((1, [1]), (2, [1, 2]), (3, [2, 3]), (2, [2]), (4, [2, 4])):
        copies.on_checkpoint(saved(tmp_path / "run", step))
        until(lambda: not copies.due())
        assert [int(name[5:]) for name in steps(place)] == expected
    copies.finish(lambda: False)


@pytest.mark.usefixtures("uploads_here")
def test_the_newest_checkpoint_wins_while_an_upload_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pruning removes the checkpoint that is being uploaded, and one that waits."""
    started, ready = threading.Event(), threading.Event()
    put_file = LocalFileSystem.put_file
    copied = []

    def slow(system: LocalFileSystem, source: str, target: str) -> None:
        started.set()
        assert ready.wait(60)
        put_file(system, source, target)
        if target.endswith("manifest.json"):
            copied.append(Path(target).parent.name)

    monkeypatch.setattr(LocalFileSystem, "put_file", slow)
    copies = start_uploads(tmp_path / "run", str(tmp_path / "other"))
    for step in (1, 2, 3):
        copies.on_checkpoint(saved(tmp_path / "run", step))
        assert started.wait(60)
    for step in (1, 2):
        shutil.rmtree(saved(tmp_path / "run", step))
    ready.set()
    assert not copies.finish(lambda: False)
    assert copied == ["step_00000001", "step_00000003"]
    assert steps(str(tmp_path / "other")) == copied


SLOW_SAVE = """
import os, signal, sys, time
from accel_gpt import train
from accel_gpt.commands import train as command
from accel_gpt.console import run_main
update, save = train.update, train.save
def stopped(run):
    if run.state.step == 5 and os.environ["RANK"] == "0":
        os.kill(os.getpid(), signal.SIGUSR1)
    return update(run)
def slow_save(*args, **options):  # a later signal is a second one
    time.sleep(3)
    return save(*args, **options)
train.update, train.save = stopped, slow_save
sys.exit(run_main(command.main, sys.argv[1:]))
"""


@thorough
@pytest.mark.slow
def test_a_launcher_does_not_end_the_rank_that_copies(small_run: Arguments, tmp_path: Path) -> None:
    """Another rank has already exited with code 75."""
    script = tmp_path / "script.py"
    script.write_text(SLOW_SAVE)
    own = small_run(*EVERY, "--checkpoint.every", "50", "--checkpoint.copy_to", "other")
    words = [*TORCHRUN, "--nproc_per_node", "2", str(script), *own]
    words += ["--train.micro_batch_size", "2"]
    done = subprocess.run(
        words,
        cwd=tmp_path,
        env={**PLAIN, "ACCEL_GPT_FAULT": "copy.file:1+=sleep"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "SIGUSR1: saved at step 6" in done.stderr
    verify_checkpoint(tmp_path / "other" / "step_00000006")
