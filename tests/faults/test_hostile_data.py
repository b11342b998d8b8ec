"""Data folders of an attacker: nothing in them is unpickled, and names stay inside the folder."""

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from accel_gpt import cli
from accel_gpt.config.data import DataConfig
from accel_gpt.data.sources import open_data
from accel_gpt.errors import DataError
from tests.conftest import launch, run_here
from tests.faults.attack import Payload, pickled

Arguments = Callable[..., list[str]]
SHORT = ["--train.max_steps", "1", "--eval.every", "0", "--sample.every", "0"]
SHORT += ["--schedule.warmup_steps", "0", "--log.trackers", "[]"]


def refused(folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]) -> str:
    """Train on a folder; assert exit code 2 or 3, and return the output."""
    capsys.readouterr()
    assert launch(arguments) in (2, 3)
    told = capsys.readouterr().err
    assert run_here(cli.dispatch, ["inspect", str(folder)]) in (0, 2, 3)
    return told


@pytest.mark.parametrize("name", ["train_000000.npy", "dataset.json", "tokenizer.json"])
def test_pickles_in_a_folder_of_ours_are_never_executed(
    name: str,
    corpus: Path,
    small_run: Arguments,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    canary, size = tmp_path / "executed", (corpus / name).stat().st_size
    (corpus / name).write_bytes(pickled(canary))
    assert name in refused(corpus, capsys, small_run(*SHORT))
    if name.endswith(".npy"):
        for content in (pickled(canary), object_array(corpus / "x.npy", canary)):
            (corpus / name).write_bytes(content.ljust(size, b"\0"))  # of the size in the index
            with pytest.raises(DataError, match=r"not a valid \.npy file|holds object"):
                open_data(str(corpus), "train", DataConfig())[0].read(0, 0, 1)
        assert name in refused(corpus, capsys, small_run(*SHORT))
    assert not canary.exists()


def object_array(path: Path, canary: Path) -> bytes:
    """Return a .npy file whose content is a pickle."""
    np.save(path, np.array([Payload(canary)], object), allow_pickle=True)
    content = path.read_bytes()
    path.unlink()
    return content


@pytest.mark.parametrize(
    "name",
    ["train.bin", "meta.pkl", "train.ds.metadata", "tokenizer.json", "train.npy"],
)
def test_pickles_in_a_folder_of_others_are_never_executed(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, canary = tmp_path / "theirs", tmp_path / "executed"
    folder.mkdir()
    if name not in ("train.bin", "train.npy"):
        kind = "train.ds" if ".ds" in name else "train.bin"
        (folder / kind).write_bytes(np.arange(200, dtype="<u2").tobytes())
    npy = name.endswith("npy")
    (folder / name).write_bytes(object_array(folder / name, canary) if npy else pickled(canary))
    code = run_here(cli.dispatch, ["inspect", str(folder), "--data.tokenizer", "bytes"])
    told = capsys.readouterr().err
    if name == "train.ds.metadata":  # its first line should be the name of a tokenizer
        assert code in (0, 2, 3)
    else:
        assert code in (2, 3)
        assert "error: " in told
    assert not canary.exists()
    pickle.loads(pickled(canary))
    assert canary.exists(), "the payload would have worked"


@pytest.mark.parametrize("name", ["../train.npy", "/etc/passwd", "", 3])
def test_names_of_shards_stay_in_their_folder(name: object, corpus: Path) -> None:
    index = json.loads((corpus / "dataset.json").read_text())
    index["splits"]["train"][0]["name"] = name
    (corpus / "dataset.json").write_text(json.dumps(index))
    with pytest.raises(DataError, match=r"names a shard|is damaged"):
        open_data(str(corpus), "train", DataConfig())


def test_a_linked_shard_is_read_as_numbers_and_must_be_what_the_index_says(
    corpus: Path, tmp_path: Path
) -> None:
    """Shards may lie on other disks; the target of a link is read only as token ids."""
    file, outside = corpus / "train_000000.npy", tmp_path / "outside.npy"
    expected = open_data(str(corpus), "train", DataConfig())[0].read(0, 0, 10).tolist()
    shutil.move(file, outside)
    file.symlink_to(outside)
    assert open_data(str(corpus), "train", DataConfig())[0].read(0, 0, 10).tolist() == expected
    file.unlink()
    file.symlink_to("/etc/hostname")
    with pytest.raises(DataError, match=r"train_000000\.npy was altered: it has"):
        open_data(str(corpus), "train", DataConfig())
