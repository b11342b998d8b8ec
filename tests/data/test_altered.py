"""Data files that were altered between two launches of a run, or while it trains."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from accel_gpt.config.data import DataConfig
from accel_gpt.data.altered import DataFiles
from accel_gpt.data.sources import open_data
from accel_gpt.errors import DataError
from tests.conftest import launch


def overwrite(path: Path) -> None:
    """Change bytes of a file in place, and set the old time."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(5000)
        file.write(bytes(200))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def replace_by_other(path: Path) -> None:
    other = path.with_name("other")
    content = bytearray(path.read_bytes())
    content[5000:5200] = bytes(200)
    other.write_bytes(content)
    other.replace(path)


def replace_by_copy(path: Path) -> None:
    shutil.copy2(path, path.with_name("other")).replace(path)


def foreign_folder(folder: Path) -> Path:
    """A data folder of nanoGPT, with bytes, far longer than the blocks that are sampled."""
    folder.mkdir()
    for name, tokens in (("train.bin", 60_000), ("val.bin", 3000)):
        np.random.default_rng(0).integers(1, 256, tokens).astype("<u2").tofile(folder / name)
    return folder


def opened(folder: Path, log: list[str]) -> DataFiles:
    """The files of a folder, as a launch opens them."""
    data = DataConfig(tokenizer="bytes")
    splits = [open_data(str(folder), name, data)[0] for name in ("train", "val")]
    return DataFiles(splits, log.append)


# a --code file that alters a data file when step 6 of 12 begins; checkpoints are due at 4 and 8
WHILE_TRAINING = """
from pathlib import Path
from tests.data.test_altered import overwrite
def lr(step, config, plan):
    path = Path({path!r})
    done = path.with_name("done")
    if step == 6 and not done.exists():
        done.touch()
        overwrite(path)
    return 1e-2
"""


def test_a_shard_that_is_altered_while_the_run_trains_ends_it_and_is_not_saved(
    small_run: Callable[..., list[str]],
    corpus: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """And it ends the next launch."""
    shard = corpus / "train_000001.npy"
    code = tmp_path / "altering.py"
    code.write_text(WHILE_TRAINING.format(path=str(shard)))
    run = small_run("--code", str(code), "--eval.every", "0", "--sample.every", "0")
    for _ in range(2):
        assert launch(run) == 3
        assert f"error: {shard} was altered: its SHA-256 begins" in capsys.readouterr().err
        saved = [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()]
        assert saved == ["step_00000004"]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("train_000001.npy", overwrite),
        ("train_000001.npy", replace_by_other),
        ("train_000001.npy", lambda path: os.truncate(path, 400)),
        ("train.bin", lambda path: path.write_bytes(path.read_bytes()[::-1])),
    ],
)
def test_another_content_is_found(
    corpus: Path, tmp_path: Path, name: str, change: Callable[[Path], object]
) -> None:
    """In a file of another project, by five blocks."""
    folder = corpus if name.endswith(".npy") else foreign_folder(tmp_path / "foreign")
    files = opened(folder, [])
    change(folder / name)
    with pytest.raises(DataError, match=f"{name} was altered: .*not saved; restore it"):
        files.check_now()


@pytest.mark.parametrize("change", [os.utime, replace_by_copy])
def test_a_shard_with_another_time_and_the_same_content_does_not_end_the_run(
    corpus: Path, change: Callable[[Path], None]
) -> None:
    log: list[str] = []
    files = opened(corpus, log)
    change(corpus / "train_000001.npy")
    for _ in range(2):  # hashed once; the copy has another inode, but the time and the size
        files.check_now()
        assert len(log) == (change is os.utime)


def test_between_two_launches_a_touched_file_is_compared_once(tmp_path: Path) -> None:
    folder, log = foreign_folder(tmp_path / "foreign"), list[str]()
    opened(folder, log).check_since_last_launch(tmp_path, resuming=False, accept_changes=False)
    os.utime(folder / "train.bin")
    for _ in range(2):
        opened(folder, log).check_since_last_launch(tmp_path, resuming=True, accept_changes=False)
        assert [line.partition(" ")[0] for line in log] == ["comparing", "WARNING:"]
    assert f"of {folder / 'train.bin'}, only the size and a sample of tokens" in log[1]


def test_another_file_between_two_launches_ends_each_until_it_is_accepted(tmp_path: Path) -> None:
    folder = foreign_folder(tmp_path / "foreign")

    def check(resuming: bool = True, accept: bool = False) -> None:
        opened(folder, []).check_since_last_launch(tmp_path, resuming, accept)

    check(resuming=False)
    os.truncate(folder / "val.bin", 5000)
    for _ in range(2):
        with pytest.raises(DataError, match=r"val.bin was altered: it has 5,000 .*expected 6,000"):
            check()
    check(accept=True)
    check()
    os.truncate(folder / "val.bin", 4000)
    check(resuming=False)  # it has trained on no file
    check()
