"""Data that was altered, has tokens outside the vocabulary, or was never written."""

import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from accel_gpt import train
from accel_gpt.data import verify
from tests.conftest import QUIET, launch
from tests.test_train import records
from tests.training.test_guards import train_pair

Arguments = Callable[..., list[str]]
LONGER = ["--train.max_steps", "16", "--checkpoint.allow_change", "train.max_steps"]
RECORD = "data_files.json"


def overwrite(path: Path, start: int, values: bytes) -> None:
    """Change bytes of a file in place, as a faulty disk or another program would."""
    with path.open("r+b") as file:
        file.seek(start)
        file.write(values)


def token_file(path: Path, tokens: int = 60_000) -> None:
    """A token file of nanoGPT, with bytes."""
    np.random.default_rng(0).integers(1, 256, tokens).astype("<u2").tofile(path)


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """A data folder of nanoGPT, far longer than the blocks that are sampled."""
    folder = tmp_path / "foreign"
    folder.mkdir()
    token_file(folder / "train.bin")
    token_file(folder / "val.bin", 3000)
    return folder


@pytest.fixture
def foreign_run(small_run: Arguments, foreign: Path) -> Arguments:
    """Return the arguments of a tiny run on that folder."""
    data = ["--data.train", str(foreign), "--data.tokenizer", "bytes"]
    return lambda *options: small_run(*data, *options)


def saved(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def test_an_altered_shard_ends_the_run_and_nothing_is_saved(
    small_run: Arguments, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch(small_run()) == 0
    before = saved(tmp_path / "run")
    shard = corpus / "train_000001.npy"
    overwrite(shard, 5000, bytes(200))
    assert launch(small_run(*LONGER)) == 3
    shown = capsys.readouterr().err
    assert f"error: {shard} was altered" in shown
    assert "dataset.json" in shown
    assert saved(tmp_path / "run") == before


def test_an_altered_val_shard_is_found_too(
    small_run: Arguments, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shard = corpus / "val_000000.npy"
    overwrite(shard, 500, bytes(20))
    assert launch(small_run()) == 3
    assert f"error: {shard} was altered" in capsys.readouterr().err


def test_an_altered_file_of_another_project_is_found_at_the_next_launch(
    foreign_run: Arguments, foreign: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch(foreign_run()) == 0
    before = saved(tmp_path / "run")
    overwrite(foreign / "train.bin", 10_000, b"\1\0" * 1000)
    for _ in range(2):
        assert launch(foreign_run(*LONGER)) == 3
        shown = capsys.readouterr().err
        assert f"error: {foreign / 'train.bin'} was altered" in shown
        assert "--checkpoint.allow_change data.train" in shown
        assert saved(tmp_path / "run") == before
    both = ["--checkpoint.allow_change", "[train.max_steps, data.train]"]
    assert launch(foreign_run("--train.max_steps", "16", *both)) == 0
    later = ["--train.max_steps", "20", *LONGER[2:]]
    assert launch(foreign_run(*later)) == 0  # once accepted, the file counts as correct
    assert records(tmp_path / "run")[-1]["step"] == 20


def test_a_file_that_did_not_change_is_read_once(
    small_run: Arguments, corpus: Path, tmp_path: Path
) -> None:
    assert launch(small_run()) == 0
    known = json.loads((tmp_path / "run" / RECORD).read_text())
    assert len(known) == len(list(corpus.glob("*.npy")))
    shard = corpus / "train_000001.npy"
    before = shard.stat()
    overwrite(shard, 5000, bytes(200))
    os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert launch(small_run(*LONGER)) == 0  # size, time and inode are those of a verified file
    os.utime(shard)
    more = ["--train.max_steps", "20", *LONGER[2:]]
    assert launch(small_run(*more)) == 3


def test_a_copied_or_touched_folder_is_verified_again_and_trains(
    foreign_run: Arguments, foreign: Path, tmp_path: Path
) -> None:
    assert launch(foreign_run()) == 0
    shutil.move(foreign, tmp_path / "old")
    shutil.copytree(tmp_path / "old", foreign, copy_function=shutil.copy)
    assert launch(foreign_run(*LONGER)) == 0


def test_a_damaged_record_is_a_warning(
    small_run: Arguments, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch(small_run()) == 0
    (tmp_path / "run" / RECORD).write_text('{"a": [')
    assert launch(small_run(*LONGER)) == 0
    assert f"WARNING: {tmp_path / 'run' / RECORD}" in capsys.readouterr().err


def test_a_token_beyond_the_vocabulary_is_found_at_the_start_with_file_and_place(
    foreign_run: Arguments, foreign: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overwrite(foreign / "train.bin", 2 * 11_111, (3000).to_bytes(2, "little"))
    assert launch(foreign_run()) == 3
    shown = capsys.readouterr().err
    assert f"{foreign / 'train.bin'} holds token 3000 at index 11,111" in shown
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_file_of_zeros_is_refused(
    foreign_run: Arguments, foreign: Path, split: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = foreign / f"{split}.bin"
    size = file.stat().st_size
    file.unlink()
    with file.open("wb") as sparse:
        sparse.truncate(size)
    assert launch(foreign_run()) == 3
    shown = capsys.readouterr().err
    assert f"{file} holds only token 0" in shown


def test_sources_of_a_mixture_are_verified(
    small_run: Arguments, foreign: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shard = corpus / "train_000000.npy"
    overwrite(shard, 5000, bytes(200))
    listed = f"[{{path: {foreign}, weight: 1}}, {{path: {corpus}, weight: 3}}]"
    assert launch(small_run("--data.train", listed, "--data.tokenizer", "bytes")) == 3
    assert f"error: {shard} was altered" in capsys.readouterr().err


def test_an_alteration_found_while_training_ends_the_run_before_a_save(
    small_run: Arguments,
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shard = corpus / "train_000001.npy"
    overwrite(shard, 5000, bytes(200))
    trained = threading.Event()
    update = train.update

    def update_and_tell(run: train.Training) -> None:
        update(run)
        trained.set()

    monkeypatch.setattr(train, "VERIFY_FIRST_SECONDS", 0.0)
    monkeypatch.setattr(train, "update", update_and_tell)
    monkeypatch.setattr(verify, "lower_priority", trained.wait)  # make reading slow
    long = ["--train.max_steps", "100000", "--checkpoint.every", "50000"]
    assert launch(small_run(*long, *QUIET)) == 3
    assert f"error: {shard} was altered" in capsys.readouterr().err
    assert 0 < records(tmp_path / "run")[-1]["step"] < 50_000
    assert not list((tmp_path / "run").glob("checkpoints/step_*"))


# the second process is on another machine; its copy of the data is read after step 5
OTHER_MACHINE = """
import threading
from accel_gpt import train
from accel_gpt.data import verify
trained = threading.Event()
def update_and_tell(run):
    plain_update(run)
    if run.state.step == 5:
        trained.set()
train.VERIFY_FIRST_SECONDS = 0.0
train.update = update_and_tell
verify.lower_priority = trained.wait
os.environ["LOCAL_RANK"] = "0"
os.chdir("second")
"""


@pytest.mark.slow
def test_an_altered_copy_on_one_machine_ends_all_processes(
    small_run: Arguments, corpus: Path, tmp_path: Path
) -> None:
    shutil.copytree(corpus, tmp_path / "second" / "corpus")
    overwrite(tmp_path / "second" / "corpus" / "train_000001.npy", 5000, bytes(200))
    relative = ["--data.train", "corpus", "--train.max_steps", "6"]
    codes, told = train_pair(OTHER_MACHINE, small_run(*relative), tmp_path)
    assert codes == [3, 3], told
    assert "error: corpus/train_000001.npy was altered" in told[1]
    assert "Traceback" not in told[0] + told[1]
    saved_steps = [path.name for path in (tmp_path / "run").glob("checkpoints/step_*")]
    assert saved_steps == ["step_00000004"]
