"""Data files that were altered between two launches of a run."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import launch
from tests.test_train import records

Arguments = Callable[..., list[str]]
LONGER = ["--train.max_steps", "16", "--checkpoint.allow_change", "train.max_steps"]


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
    assert f"error: {shard} was altered: its SHA-256 begins" in shown
    assert saved(tmp_path / "run") == before


def test_a_val_file_of_another_size_is_found_and_can_be_accepted(
    foreign_run: Arguments, foreign: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch(foreign_run()) == 0
    token_file(foreign / "val.bin", 4000)
    for _ in range(2):  # the second launch finds it too
        assert launch(foreign_run(*LONGER)) == 3
        shown = capsys.readouterr().err
        assert f"{foreign / 'val.bin'} was altered: it has 8,000 bytes, expected 6,000" in shown
    both = ["--checkpoint.allow_change", "[train.max_steps, data.train]"]
    assert launch(foreign_run("--train.max_steps", "16", *both)) == 0
    assert launch(foreign_run("--train.max_steps", "20", *LONGER[2:])) == 0  # accepted once
    assert records(tmp_path / "run")[-1]["step"] == 20

    shutil.rmtree(tmp_path / "run" / "checkpoints")
    token_file(foreign / "val.bin", 5000)
    again = foreign_run("--train.max_steps", "20", *LONGER[2:])
    assert launch(again) == 0  # a run without checkpoints has trained on no file
    token_file(foreign / "val.bin", 6000)
    assert launch(again) == 3
    assert "it has 12,000 bytes, expected 10,000" in capsys.readouterr().err


def test_a_shard_that_was_only_touched_is_hashed_once(
    small_run: Arguments, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch(small_run()) == 0
    os.utime(corpus / "train_000001.npy")
    capsys.readouterr()
    assert launch(small_run(*LONGER)) == 0
    assert "comparing 1 data files" in capsys.readouterr().err
    assert launch(small_run("--train.max_steps", "20", *LONGER[2:])) == 0
    assert "comparing" not in capsys.readouterr().err


# a --code file that alters a data file when step 6 of 12 begins; checkpoints are due at 4 and 8
WHILE_TRAINING = """
import os, shutil
from pathlib import Path
def lr(step, config, plan):
    path = {path!r}
    if step == 6 and not os.path.exists(path + "done"):
        before = os.stat(path)
        Path(path + "done").touch()
        {change}
    return 1e-2
"""
OVERWRITE = """content = bytearray(Path(path).read_bytes())
        content[5000:5200] = bytes(200)
        Path({to}).write_bytes(content)
        """
ALTERED = {
    "in place, with the old time": OVERWRITE.format(to="path")
    + "os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))",
    "replaced": OVERWRITE.format(to="path + 'new'") + "os.replace(path + 'new', path)",
    "cut": "os.truncate(path, before.st_size - 2000)",
}
TOUCHED = {
    "touched": "os.utime(path)",
    "replaced by a copy": "shutil.copy2(path, path + 'new'); os.replace(path + 'new', path)",
}


def altering(folder: Path, path: Path, change: str) -> list[str]:
    """Return the options of a run during which a data file is altered."""
    code = folder / "altering.py"
    code.write_text(WHILE_TRAINING.format(path=str(path), change=change))
    return ["--code", str(code), "--eval.every", "0", "--sample.every", "0"]


@pytest.mark.parametrize("change", ALTERED.values(), ids=list(ALTERED))
def test_a_shard_that_is_altered_while_the_run_trains_ends_it_and_is_not_saved(
    small_run: Arguments,
    corpus: Path,
    tmp_path: Path,
    change: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shard = corpus / "train_000001.npy"
    assert launch(small_run(*altering(tmp_path, shard, change))) == 3
    shown = capsys.readouterr().err
    assert f"{shard} was altered" in shown or "became shorter during the run" in shown
    assert saved(tmp_path / "run") == ["step_00000004"]


@pytest.mark.parametrize("change", TOUCHED.values(), ids=list(TOUCHED))
def test_a_shard_with_another_time_and_the_same_content_does_not_end_the_run(
    small_run: Arguments, corpus: Path, tmp_path: Path, change: str
) -> None:
    assert launch(small_run(*altering(tmp_path, corpus / "train_000001.npy", change))) == 0
    assert records(tmp_path / "run")[-1]["step"] == 12


def test_a_file_of_another_project_is_compared_by_a_sample_while_the_run_trains(
    foreign_run: Arguments, foreign: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.bin"
    np.random.default_rng(1).integers(1, 256, 60_000).astype("<u2").tofile(other)
    path = foreign / "train.bin"
    copy = f"shutil.copyfile({str(other)!r}, path)"
    assert launch(foreign_run(*altering(tmp_path, path, "os.utime(path)"))) == 0
    said = f"WARNING: of {path}, only the size and a sample"
    assert capsys.readouterr().err.count(said) == 1
    (foreign / "train.bindone").unlink()
    again = ["--out_dir", str(tmp_path / "again")]
    assert launch(foreign_run(*altering(tmp_path, path, copy), *again)) == 3
    assert f"{path} was altered" in capsys.readouterr().err
    assert saved(tmp_path / "again") == ["step_00000004"]
