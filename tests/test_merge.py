"""Parts made by several machines join into what one would have made, or are refused."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from accel_gpt.config.data import PrepareConfig
from accel_gpt.data.shards import open_split, read_index
from accel_gpt.data.tokenizer import load_tokenizer
from accel_gpt.errors import UserError
from accel_gpt.prepare import merge as room
from accel_gpt.prepare.merge import merge
from accel_gpt.prepare.prepare import prepare

WORLD = 3


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> PrepareConfig:
    """Seven files of JSON lines, a few documents each."""
    folder = tmp_path_factory.mktemp("text")
    for i in range(7):
        lines = [json.dumps({"text": f"File {i}, line {j}{'!' * j}"}) for j in range(9)]
        (folder / f"{i}.jsonl").write_text("\n".join(lines) + "\n")
    return PrepareConfig(
        source="jsonl",
        path=str(folder),
        tokenizer="bpe",
        vocab_size=270,
        val_fraction=0.3,
        shard_tokens=100,
        workers=1,
    )


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "data" / "x"


@pytest.fixture(scope="module")
def made(config: PrepareConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    for rank in range(WORLD):
        prepare(config, folder / "x", rank, WORLD)
    return folder


@pytest.fixture
def parts(made: Path, out: Path) -> list[Path]:
    shutil.copytree(made, out.parent)
    return [out.with_name(f"x.part{rank:05d}-of-{WORLD:05d}") for rank in range(WORLD)]


def texts(out: Path, name: str) -> list[str]:
    split = open_split(out, name)
    ids = [int(t) for i, n in enumerate(split.lengths) for t in split.read(i, 0, int(n))]
    return load_tokenizer(out).decode(ids).split("<|endoftext|>")[:-1]


def inodes(folder: Path) -> set[int]:
    return {path.stat().st_ino for path in folder.glob("*.npy")}


def test_the_parts_make_what_one_machine_makes(
    config: PrepareConfig,
    out: Path,
    parts: list[Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = {path: path.read_bytes() for part in parts for path in part.iterdir()}
    merge(out)
    said = capsys.readouterr().out
    assert "3 parts" in said
    assert "the parts may be deleted" in said
    prepare(config, tmp_path / "whole")
    for name in ("train", "val"):
        assert texts(out, name) == texts(tmp_path / "whole", name)
        names = [shard.name for shard in open_split(out, name).shards]
        assert names == [f"{name}_{i:06d}.npy" for i in range(len(names))]
    index, whole = read_index(out), read_index(tmp_path / "whole")
    assert index["prepared"] == whole["prepared"]
    assert index["tokenizer"] == whole["tokenizer"]
    assert {path: path.read_bytes() for part in parts for path in part.iterdir()} == before
    assert inodes(out) == set.union(*map(inodes, parts))
    prepare(config, out)  # counts as made with these settings
    written = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    merge(out)
    assert {path: path.stat().st_mtime_ns for path in out.iterdir()} == written
    for part in parts:
        assert read_index(part)["prepared"]["world"] == WORLD


def test_a_part_may_have_no_val(tmp_path: Path, out: Path) -> None:
    for i in range(2):
        (tmp_path / f"{i}.jsonl").write_text('{"text": "some text"}\n' * 3)
    config = PrepareConfig(
        source="jsonl", path=f"{tmp_path}/*.jsonl", tokenizer="bytes", val_fraction=1e-9, workers=1
    )
    for rank in range(2):
        prepare(config, out, rank, 2)
    index = read_index(out.with_name("x.part00000-of-00002"))
    assert index["splits"]["val"] == []
    with pytest.raises(UserError, match=r"too little text.* and 0 for val"):
        merge(out)
    assert not out.exists()


def no_links(*_: object) -> None:
    raise OSError(1, "Operation not permitted")


@pytest.mark.parametrize("links", [True, False])
def test_a_merge_that_was_stopped_can_be_run_again(
    out: Path, parts: list[Path], monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    names, left = {path.name for path in out.parent.iterdir()}, 7

    def stop(path: Path, expected: int) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt

    if not links:
        monkeypatch.setattr(os, "link", no_links)
    with monkeypatch.context() as patch:
        patch.setattr(room, "check_size", stop)
        with pytest.raises(KeyboardInterrupt):
            merge(out)
    assert not out.exists()
    merge(out)
    assert len(inodes(out) & set.union(*map(inodes, parts))) == links * len(inodes(out))
    assert len(texts(out, "train")) + len(texts(out, "val")) == 63
    assert {path.name for path in out.parent.iterdir()} == names | {"x"}


def test_what_an_earlier_merge_left_is_replaced(out: Path, parts: list[Path]) -> None:
    folder = out.with_name("x.merging")
    folder.mkdir()
    size = (parts[0] / "train_000000.npy").stat().st_size
    (folder / "train_000000.npy").write_bytes(bytes(size))
    (folder / "train_000099.npy").write_bytes(b"more")
    merge(out)
    first = parts[0] / "train_000000.npy"
    assert (out / "train_000000.npy").read_bytes() == first.read_bytes()
    assert not (out / "train_000099.npy").exists()


def edit(part: Path, key: str, value: Any) -> None:
    content = json.loads((part / "dataset.json").read_text())
    content["prepared"][key] = value
    (part / "dataset.json").write_text(json.dumps(content))


def test_parts_that_are_missing_are_named(
    config: PrepareConfig, out: Path, parts: list[Path], tmp_path: Path
) -> None:
    for number in (1, 2):
        parts[number].rename(tmp_path / str(number))
    with pytest.raises(UserError, match=r"lacks part 1, 2 of 3; .*--rank 1 --world 3"):
        merge(out)
    prepare(config, out, 0, 2)
    with pytest.raises(UserError, match="different numbers of machines: 2 and 3"):
        merge(out)
    with pytest.raises(UserError, match=r"y has no parts beside it \(y\.part00000"):
        merge(out.with_name("y"))
    assert not out.exists()


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("val_fraction", 0.5, r"part00001.* not belong to x\.part00000.*val_fraction: 0.5"),
        ("source_fingerprint", "x", "source_fingerprint: x, requested"),
        ("rank", 0, r"rank: 0, requested 1"),
        ("world", 4, r"world: 4, requested 3"),
    ],
)
def test_parts_that_do_not_belong_together_are_refused(
    out: Path, parts: list[Path], key: str, value: Any, message: str
) -> None:
    edit(parts[1], key, value)
    with pytest.raises(UserError, match=message):
        merge(out)
    assert not out.exists()


def test_another_tokenizer_and_a_cut_shard_are_refused(out: Path, parts: list[Path]) -> None:
    content = json.loads((parts[2] / "dataset.json").read_text())
    content["tokenizer"]["fingerprint"] = "0" * 64
    whole = (parts[2] / "dataset.json").read_text()
    (parts[2] / "dataset.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="fingerprint of the tokenizer: 0000"):
        merge(out)
    (parts[2] / "dataset.json").write_text(whole)
    os.truncate(parts[2] / "train_000000.npy", 200)
    with pytest.raises(UserError, match="has 200 bytes, expected 328"):
        merge(out)
    assert not out.exists()


def test_parts_need_not_all_have_skipped(out: Path, parts: list[Path]) -> None:
    edit(parts[1], "skipped", 3)
    merge(out)
    assert read_index(out)["prepared"]["skipped"] == 3


def test_parts_of_a_copy_belong_together(config: PrepareConfig, out: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(str(config.path), tmp_path / "text")
    config = replace(config, path=str(folder))
    for rank in range(2):
        prepare(config, out, rank, 2)
        for path in folder.iterdir():
            os.utime(path, (1, 1))
    merge(out)


def test_a_folder_that_is_something_else_is_left_alone(
    config: PrepareConfig, out: Path, parts: list[Path]
) -> None:
    prepare(replace(config, val_fraction=0.5), out)
    with pytest.raises(UserError, match="exists and is not what its parts make"):
        merge(out)


def test_changed_files_are_noticed_between_the_parts(
    config: PrepareConfig, out: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(str(config.path), tmp_path / "text")
    config = replace(config, path=str(folder))
    prepare(config, out, 0, 2)
    (folder / "9.jsonl").write_text('{"text": "late"}\n')
    prepare(config, out, 1, 2)
    with pytest.raises(UserError, match="source_fingerprint"):
        merge(out)


@pytest.mark.parametrize(
    ("change", "rank", "world", "message"),
    [
        ({"dedupe": True}, 0, 2, "find the duplicates within a part only"),
        ({"source": "shards"}, 0, 2, "shards are read by one machine"),
        ({"path": "-"}, 0, 2, "--world is 2, but standard input"),
        ({"source": "shards", "dedupe": True}, 0, 1, "dedupe is true but .*source is shards"),
        ({}, 2, 2, "--rank is 2 and --world 2; ranks are 0 to world - 1"),
        ({}, -1, 2, "--rank is -1"),
        ({}, 0, 0, "--world 0"),
    ],
)
def test_what_cannot_be_parted_is_refused(
    config: PrepareConfig, out: Path, change: dict[str, Any], rank: int, world: int, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        prepare(replace(config, **change), out, rank, world)
    assert not out.parent.exists()
