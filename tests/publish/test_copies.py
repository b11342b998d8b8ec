"""Copy checkpoints while a run trains, and restore a run that lost its checkpoints."""

import json
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict
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
from accel_gpt.runs.folder import RunFolder, locked
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
    assert [title.partition(":")[0] for title in commits] == ["initial commit", "launch 1", *steps]
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
    owner = asdict(Copies(str(place), run, "auto", print).claim())
    for checkpoint in RunFolder(run).checkpoints.values():
        copy_checkpoint(checkpoint, str(place), keep_last=3, owner=owner)
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
    copies.discard_restored()
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
    place: str, trained: Trained, tmp_path: Path
) -> None:
    """But the same run goes on from another folder, or restored into an empty one."""
    first, second, third = trained(*KEPT), trained(*KEPT, to="second"), tmp_path / "third"
    third.mkdir()
    assert not start_uploads(first, place).finish(lambda: False)
    name = RunFolder(first).stored_name
    told = f"checkpoint.copy_to {place} belongs to run {name} of out_dir {first} on "
    with pytest.raises(UserError, match=re.escape(told)):
        start_uploads(second, place)
    with locked(first), pytest.raises(UserError, match=re.escape(told)):  # a launch trains there
        start_uploads(third, place)
    assert not RunFolder(third).checkpoints
    first.rename(tmp_path / "moved")
    first.symlink_to(tmp_path / "moved")
    start_uploads(tmp_path / "moved", place).close()
    start_uploads(third, place).close()
    assert RunFolder(third).stored_name == name
    assert [record["step"] for record in records(third)] == list(range(1, 13))


@pytest.mark.usefixtures("uploads_here")
def test_a_refused_launch_takes_no_copies_from_the_run_that_makes_them(
    place: str,
    small_run: Arguments,
    trained: Trained,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """On a machine that cannot see the run. What it restored does not stay in its folder."""
    run = trained(*KEPT)
    assert not start_uploads(run, place).finish(lambda: False)
    run.rename(tmp_path / "unseen")
    owner = CopyStore(place).read_owner()
    capsys.readouterr()
    other = small_run("--out_dir", str(tmp_path / "second"))
    second = RunFolder(tmp_path / "second")
    for wrong, code in ((("--seed", "7"), 4), (("--train.max_steps", "3"), 2)):
        assert launch([*other, "--checkpoint.copy_to", place, *wrong]) == code
        said = capsys.readouterr().err
        assert "downloaded step 12 from" in said
        assert "the config ends at step 3" in said or "seed was " in said
        assert CopyStore(place).read_owner() == owner
        assert steps(place) == ["step_00000012"]
        assert not second.checkpoints
        assert not second.launches
    assert launch([*other, "--train.stop_at", "1"]) == 0  # it may begin a run of its own
    assert records(tmp_path / "second")[0]["step"] == 1


@pytest.mark.usefixtures("uploads_here")
def test_a_launch_whose_run_went_on_elsewhere_copies_no_more(
    place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its machine may have looked lost. It must not replace the copies of the later launch."""
    old = start_uploads(tmp_path / "run", place)
    new = start_uploads(tmp_path / "new", place)
    for copies, step in ((new, 4), (old, 2)):
        copies.on_checkpoint(saved(copies.run, step))
        copies.finish(lambda: False)
    assert steps(place) == ["step_00000004"]
    said = capsys.readouterr()
    assert f"WARNING: upload of step 2 to {place} failed, no more follow: " in said.out
    assert not old.targets
    assert f"error: checkpoint.copy_to {place} belongs to run new-" in said.err


@pytest.mark.parametrize("copied", [False, True])
def test_of_two_launches_that_claim_at_once_one_owns_the_copies(
    copied: bool, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each looks before the other one writes. Then a file that a full disk left empty is no end."""
    if copied:
        start_uploads(tmp_path / "run", place).close()
    runs = [tmp_path / name for name in ("run", "a", "b")]
    launches = [Copies(place, run, "auto", print) for run in runs]
    for run, one in zip(runs, launches, strict=True):
        run.mkdir(exist_ok=True)
        one.open()
    write_owner = CopyStore.write_owner

    def late(store: CopyStore, *owner: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(CopyStore, "write_owner", write_owner)
            owners.append(launches[1].claim())
        write_owner(store, *owner)

    owners: list[Any] = []
    with monkeypatch.context() as patch:
        patch.setattr(CopyStore, "write_owner", late)
        with pytest.raises(BusyError, match="belongs to run a-"):
            launches[0].claim()
    with pytest.raises(BusyError, match="belongs to run a-"):
        launches[2].claim()
    (owner,) = owners
    assert CopyStore(place).read_owner() == owner
    if not place.startswith("hf://"):
        system, root = fsspec.url_to_fs(place)
        system.pipe_file(f"{root}/owner_0000000{owner.launch + 1}.json", b"")
        last = Copies(place, tmp_path / "b", "auto", print)
        last.open()
        assert last.claim().launch == owner.launch + 2


@pytest.mark.usefixtures("uploads_here")
def test_a_newer_copy_is_not_replaced(
    place: str, small_run: Arguments, trained: Trained, tmp_path: Path
) -> None:
    """The run went on elsewhere. Then it is launched where it is older, or was being launched."""
    run, elsewhere = trained(*KEPT), trained(*KEPT, to="elsewhere")
    for step in (8, 12):
        shutil.rmtree(run / "checkpoints" / f"step_{step:08d}")
    assert not start_uploads(run, place).finish(lambda: False)
    shutil.copy(run / "run_name", elsewhere)
    requeued = Copies(place, tmp_path / "requeued", "auto", print)
    requeued.out_dir.mkdir()
    requeued.open()
    assert not start_uploads(elsewhere, place).finish(lambda: False)
    assert steps(place) == ["step_00000004", "step_00000012"]
    with pytest.raises(UserError, match=r"holds step 12, but .*requeued has no checkpoint after s"):
        requeued.claim()
    requeued.discard_restored()
    assert not RunFolder(requeued.out_dir).checkpoints
    with pytest.raises(UserError, match=r"holds step 12, but .*run has no checkpoint after step 4"):
        start_uploads(run, place)
    shutil.rmtree(elsewhere / "checkpoints" / "step_00000012")
    start_uploads(elsewhere, place).close()  # it lost a checkpoint where it is: it may go on
    shutil.rmtree(run / "checkpoints")
    kept = (run / "metrics.jsonl").read_bytes()
    (run / "metrics.jsonl").write_bytes(kept[:-50])
    own = small_run("--checkpoint.copy_to", place)
    assert launch([*own, "--seed", "7"]) == 4
    assert (run / "metrics.jsonl").read_bytes() == kept[:-50]
    assert launch(own) == 0
    assert (run / "metrics.jsonl").read_bytes() == kept


@pytest.mark.slow
def test_of_two_runs_that_start_at_once_one_trains(
    bucket: S3Server, small_run: Arguments, tmp_path: Path
) -> None:
    """On S3, in real processes. The other one makes no step."""
    asked = small_run(*EVERY, *S3_COPIES)
    runs = [tmp_path / "a", tmp_path / "b"]
    children = [
        subprocess.Popen(
            [sys.executable, "-m", "accel_gpt", "train", *asked, "--out_dir", str(run)],
            env={**PLAIN, **bucket.environment},
            stderr=subprocess.PIPE,
            text=True,
        )
        for run in runs
    ]
    said = [child.communicate(timeout=120)[1] for child in children]
    codes = [child.returncode for child in children]
    assert sorted(codes) in ([0, 2], [0, 6])  # 2: it looked after the other one had claimed
    loser = codes.index(max(codes))
    assert "error: checkpoint.copy_to s3://bucket/run belongs to run " in said[loser]
    assert not RunFolder(runs[loser]).launches
    assert "uploaded step 12" in said[1 - loser]


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
