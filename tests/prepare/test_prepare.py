"""Text is prepared once, atomically, with the same result for any number of workers."""

import hashlib
import json
import multiprocessing
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from accel_gpt.config.data import PrepareConfig
from accel_gpt.data.shards import open_split
from accel_gpt.data.tokenizer import load_tokenizer
from accel_gpt.data.tokenizer_json import EOT
from accel_gpt.errors import UserError
from accel_gpt.prepare import prepare as room
from accel_gpt.prepare.prepare import prepare


@pytest.fixture
def config(tmp_path: Path) -> PrepareConfig:
    """130 documents, enough to hold out whole documents; shards of 500 tokens."""
    folder = tmp_path / "text"
    folder.mkdir()
    for i in range(130):
        (folder / f"{i:03d}.txt").write_text(f"Document {i} says é{'!' * (i % 7)}\n" * (i % 5 + 1))
    return PrepareConfig(source=str(folder), tokenizer="bytes", shard_tokens=500)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "data" / "made"


def tokens(out: Path, name: str) -> list[int]:
    split = open_split(out, name)
    return [int(t) for i, n in enumerate(split.lengths) for t in split.read(i, 0, int(n))]


def content(out: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in out.iterdir()}


def test_every_document_is_in_one_split_and_ends_with_end_of_text(
    config: PrepareConfig, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare(config, out)
    tokenizer = load_tokenizer(out)
    found = []
    for name in ("train", "val"):
        ids = tokens(out, name)
        assert ids[-1] == tokenizer.eot_id
        texts = tokenizer.decode(ids).split(EOT)[:-1]
        shards = open_split(out, name).shards
        assert sum(shard.documents for shard in shards) == len(texts) > 3
        assert sum(shard.bytes for shard in shards) == sum(len(t.encode()) for t in texts)
        found += texts
    assert sorted(found) == sorted(p.read_text() for p in Path(str(config.source)).iterdir())
    assert os.listdir(out.parent) == ["made"]
    said = capsys.readouterr().out
    assert said.startswith(f"prepared {out}: ")
    assert said.count("\n") == 1
    assert "bytes per token" in said


def test_one_text_is_parted_where_nanogpt_parts_it(tmp_path: Path, out: Path) -> None:
    letters = np.random.default_rng(0).integers(97, 123, 1_115_394)  # the length of shakespeare
    text = "".join(map(chr, letters))
    (tmp_path / "input.txt").write_text(text)
    config = PrepareConfig(source=str(tmp_path / "input.txt"), tokenizer="chars", val_fraction=0.1)
    prepare(config, out)
    train, val = (open_split(out, name) for name in ("train", "val"))
    assert (train.tokens, val.tokens) == (1_003_854, 111_540)
    ids = np.concatenate([train.read(0, 0, train.tokens), val.read(0, 0, val.tokens)])
    assert np.array_equal(ids, letters - 97)


def test_any_number_of_cores_and_pieces_writes_the_same_bytes(
    config: PrepareConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(config, tokenizer="bpe", vocab_size=280)
    prepare(config, tmp_path / "1")
    monkeypatch.setattr("accel_gpt.prepare.encoding.BATCH_CHARACTERS", 300)
    monkeypatch.setattr("accel_gpt.prepare.documents.BATCH_CHARACTERS", 40)
    monkeypatch.setattr("accel_gpt.prepare.prepare.available_cores", lambda: 3)
    prepare(config, tmp_path / "3")
    one, three = content(tmp_path / "1"), content(tmp_path / "3")
    del one["dataset.json"], three["dataset.json"]  # a shard counts the bytes of its pieces
    assert one == three
    assert len(one) > 5


def test_a_bpe_is_trained_on_the_beginning(
    tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("accel_gpt.prepare.prepare.BPE_BYTES", 900)
    for name, word in (("1", "begin "), ("2", "after ")):
        (tmp_path / f"{name}.txt").write_text(word * 200)
    prepare(PrepareConfig(source=f"{tmp_path}/*.txt", tokenizer="bpe", vocab_size=280), out)
    tokenizer = load_tokenizer(out)
    assert len(tokenizer.encode("begin")) < 3
    assert len(tokenizer.encode("after")) > 3


def test_a_ready_folder_is_left_alone(config: PrepareConfig, out: Path) -> None:
    """Also with other settings, and settings of another version, which are rejected."""
    prepare(config, out)
    before = content(out)
    for same in (config, PrepareConfig()):
        assert not prepare(same, out)
    with pytest.raises(UserError, match=r"\(tokenizer: bytes, requested bpe; vocab_size: 4096, re"):
        prepare(replace(config, tokenizer="bpe", vocab_size=300), out)
    assert content(out) == before
    index = json.loads((out / "dataset.json").read_text())
    index["prepared"]["lowercase"] = True
    (out / "dataset.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"\(lowercase: True, requested None\)"):
        prepare(config, out)


@pytest.mark.parametrize("tokenizer", ["bytes", "chars"])
def test_a_source_without_text_is_refused(tmp_path: Path, tokenizer: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": null, "body": "a b"}\n' * 4)
    config = PrepareConfig(source=str(path), tokenizer=tokenizer)
    with pytest.raises(UserError, match=r"0 tokens for train .*; 4 rows or files without text"):
        prepare(config, tmp_path / "out")
    assert not list(tmp_path.glob("out*/"))


def test_a_ready_folder_whose_text_has_changed_is_left_with_a_warning(
    config: PrepareConfig, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare(config, out)
    before = content(out)
    path = Path(str(config.source))
    os.utime(path / "000.txt", (1, 1))  # as in a copy
    capsys.readouterr()
    assert not prepare(config, out)
    assert capsys.readouterr().err == ""
    (path / "000.txt").write_text("something longer than what was there before, not prepared")
    with pytest.raises(UserError, match=r"have changed since"):
        prepare(config, out)
    assert not prepare(config, out, keep_changed=True)
    assert f"WARNING: the files of {path} have changed since" in capsys.readouterr().err
    shutil.rmtree(path)
    assert not prepare(config, out)
    assert capsys.readouterr().err == ""
    assert content(out) == before


# --------------------------------------------------------------------------- several processes

fork = multiprocessing.get_context("fork")


def prepare_and_count(config: PrepareConfig, out: Path, built: Any) -> None:
    real = room.write_folder

    def counted(*arguments: Any) -> None:
        with built.get_lock():
            built.value += 1
        time.sleep(0.2)
        real(*arguments)

    room.write_folder = counted
    prepare(config, out)


def test_of_several_processes_one_builds(config: PrepareConfig, out: Path) -> None:
    built = fork.Value("i", 0)
    processes = [fork.Process(target=prepare_and_count, args=(config, out, built)) for _ in "abc"]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert built.value == 1
    assert os.listdir(out.parent) == ["made"]
