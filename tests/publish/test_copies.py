"""Copy checkpoints while a run trains, and restore a run that lost its checkpoints."""

import json
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from accel_gpt.config.experiment import CheckpointConfig, HubConfig
from accel_gpt.errors import CheckpointError, UserError
from accel_gpt.files import sha256
from accel_gpt.publish.copies import Copies, copy_checkpoint
from accel_gpt.publish.copy_store import CopyStore
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
    """Return the names of all copies, the newest last."""
    return [Path(copy.path).name for copy in CopyStore(place).all_copies()]


def folder_of(place: Path, step: int) -> Path:
    """Return the folder of a copy."""
    (found,) = place.glob(f"launch_*/step_{step:08d}")
    return found


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
    launch = (tmp_path / "run" / ".launch").read_text().split()[0]
    assert commits == ["initial commit", launch, *steps, launch]  # the lease first and last
    folders = {f"runs/a/{launch}", *(f"runs/a/{launch}/{name}" for name in steps[1:])}
    assert {str(Path(name).parent) for name in files} == folders
    for name in read_manifest(checkpoint):
        stored = files[f"runs/a/{launch}/step_00000012/{name}"]
        assert stored == (checkpoint / name).read_bytes()


def test_a_run_whose_copies_cannot_be_listed_does_not_start_anew(
    small_run: Arguments,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError("the network is down")

    monkeypatch.setattr("accel_gpt.files.PAUSES", ())
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
    assert list(place.glob("*/step_*"))
    assert not list(place.glob("*/*/manifest.json"))
    assert not (tmp_path / "run" / ".uploading").exists()


def test_a_copy_that_broke_off_or_is_damaged_is_passed_over(
    trained: Trained, tmp_path: Path
) -> None:
    place = tmp_path / "other"
    run = trained(*KEPT)
    copies = Copies(str(place), run, "auto", print)
    copies.open()
    for checkpoint in RunFolder(run).checkpoints.values():
        copy_checkpoint(checkpoint, str(place), keep_last=3, launch=copies.lease.launch)
    copies.lease.release()
    assert steps(str(place)) == ["step_00000004", "step_00000008", "step_00000012"]
    (folder_of(place, 12) / "manifest.json").unlink()
    file = folder_of(place, 8) / "optimizer.bin"
    file.write_bytes(file.read_bytes()[:-9])
    moved = tmp_path / "moved"  # as on another machine
    moved.mkdir()
    said: list[str] = []
    copies = Copies(str(place), moved, "auto", said.append)
    copies.open()
    copies.lease.release()
    altered, downloaded = said
    assert altered.startswith(f"WARNING: checkpoint file {file} was altered: it has ")
    assert altered.endswith("; falling back to an earlier copy")
    assert downloaded == f"downloaded step 4 from {place}"
    verify_checkpoint(moved / "checkpoints" / "step_00000004")
    assert not list((moved / "checkpoints").glob("*/run.zip"))
    for name in ("metrics.jsonl", "metrics.csv", "run.json", "run_name"):
        assert (moved / name).read_bytes() == (run / name).read_bytes()
    shutil.rmtree(moved / "checkpoints")
    file = folder_of(place, 4) / "optimizer.bin"
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
    for fault, wanted in ((1, 12), (None, 8)):
        (model,) = [name for name in bucket.names() if name.endswith("00012/model.safetensors")]
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
    (name,) = [name for name in bucket.names() if name.endswith("00012/optimizer.bin")]
    bucket.fail("refuse", name, "GET|HEAD", status=403)
    assert launch(own) == 2
    said = capsys.readouterr().err
    assert f"error: s3://bucket/{name} cannot be downloaded: AccessDenied of a test" in said
    assert not RunFolder(tmp_path / "run").checkpoints


@pytest.mark.usefixtures("uploads_here")
def test_a_second_run_with_the_same_copies_is_refused(
    place: str, trained: Trained, tmp_path: Path
) -> None:
    """But the same run goes on from another folder, or restored into an empty one."""
    start_uploads(tmp_path / "begun", place).close()  # a run without copies makes room
    first, second, third = trained(*KEPT), trained(*KEPT, to="second"), tmp_path / "third"
    third.mkdir()
    assert not start_uploads(first, place).finish(lambda: False)
    name = RunFolder(first).stored_name
    with pytest.raises(UserError, match=f"copy_to {place} belongs to run {name}; set another"):
        start_uploads(second, place)
    assert steps(place) == ["step_00000012"]
    first.rename(tmp_path / "moved")
    start_uploads(tmp_path / "moved", place).close()
    start_uploads(third, place).close()
    assert RunFolder(third).stored_name == name
    assert [record["step"] for record in records(third)] == list(range(1, 13))


def test_a_run_that_went_on_elsewhere_follows(place: str, trained: Trained, tmp_path: Path) -> None:
    """The folder's own later checkpoints are kept, but not used."""
    run, elsewhere = trained(*KEPT), tmp_path / "elsewhere"
    elsewhere.mkdir()
    said: list[str] = []

    def go_on(folder: Path, step: int | None = None) -> None:
        copies = Copies(place, folder, "auto", said.append)
        copies.open()
        if step:
            checkpoint = RunFolder(folder).checkpoints[step]
            copy_checkpoint(checkpoint, place, keep_last=2, launch=copies.lease.launch)
        copies.lease.release()

    go_on(run, step=4)  # the later ones are not copied
    go_on(elsewhere)  # no copy: the first folder is ahead
    go_on(run)
    assert sorted(RunFolder(run).checkpoints) == [4, 8, 12]
    shutil.copytree(run / "checkpoints" / "step_00000008", elsewhere / "checkpoints/step_00000008")
    go_on(elsewhere, step=8)
    go_on(run)
    assert sorted(RunFolder(run).checkpoints) == [4, 8]
    assert RunFolder(run).stored_name == RunFolder(elsewhere).stored_name
    aside = [run / "checkpoints" / f".superseded_step_000000{step}_0" for step in ("08", "12")]
    for folder in aside:
        verify_checkpoint(folder)
        assert f"WARNING: the run went on elsewhere, so {folder} is set aside" in said
    assert said[-1].startswith("downloaded step 8 from ")


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
    verify_checkpoint(folder_of(tmp_path / "other", 6))
