"""Shards are read as written, and a damaged folder gives an error of one sentence."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accel_gpt.data import shards
from accel_gpt.data.shards import Shard, open_split, resident, token_dtype
from accel_gpt.errors import DataError
from accel_gpt.prepare.shards import ShardWriter, write_index


def index(folder: Path, written: list[Shard], vocab_size: int = 1000) -> None:
    made_by: Any = SimpleNamespace(
        kind="bytes", fingerprint="f" * 64, vocab_size=vocab_size, eot_id=256
    )
    write_index(folder, made_by, {"train": written}, {})


def write(folder: Path, documents: list[list[int]], shard_tokens: int, vocab: int = 1000) -> None:
    writer = ShardWriter(folder, "train", token_dtype(vocab), shard_tokens)
    for document in documents:
        writer.add(np.array(document, token_dtype(vocab)), 1, 2 * len(document))
    index(folder, writer.finish(), vocab)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two shards: 1 2 3 4 and 5 6 7."""
    write(tmp_path, [[1, 2], [3, 4, 5], [6, 7]], 4)
    return tmp_path


@settings(max_examples=30)
@given(
    documents=st.lists(st.lists(st.integers(0, 99_999), min_size=1, max_size=20), min_size=1),
    shard_tokens=st.integers(1, 30),
    vocab_size=st.sampled_from([65_536, 65_537, 100_000]),
)
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory,
    documents: list[list[int]],
    shard_tokens: int,
    vocab_size: int,
) -> None:
    folder = tmp_path_factory.mktemp("data")
    documents = [[token % vocab_size for token in document] for document in documents]
    write(folder, documents, shard_tokens, vocab_size)
    split = open_split(folder, "train")
    whole = np.concatenate([split.read(i, 0, int(n)) for i, n in enumerate(split.lengths)])
    assert whole.tolist() == [token for document in documents for token in document]
    assert whole.dtype == (np.uint16 if vocab_size <= 65_536 else np.uint32)
    assert split.tokens == len(whole)
    assert split.lengths.tolist()[:-1] == [shard_tokens] * (len(split.shards) - 1)
    assert sum(shard.documents for shard in split.shards) == len(documents)
    assert sum(shard.bytes for shard in split.shards) == 2 * len(whole)
    assert max(shard.max_token for shard in split.shards) == whole.max()


def test_a_shard_cut_while_it_is_read_is_an_error_not_a_crash(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    split = open_split(folder, "train")
    assert split.read(0, 0, 4).tolist() == [1, 2, 3, 4]
    whole = os.preadv  # which reads at most 2 GiB on Linux
    monkeypatch.setattr(shards.os, "preadv", lambda file, rows, at: whole(file, [rows[0][:3]], at))
    assert split.read(0, 0, 4).tolist() == [1, 2, 3, 4]
    os.truncate(folder / "train_000000.npy", 130)
    with pytest.raises(DataError, match=r"000000\.npy became shorter during the run"):
        split.read(0, 0, 4)


@settings(max_examples=30)
@given(
    lengths=st.lists(st.integers(3, 5000), min_size=1, max_size=6),
    wide=st.booleans(),
    wanted=st.integers(1, 12_000),
)
def test_sequences_of_many_shards_are_their_tokens(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], wide: bool, wanted: int
) -> None:
    folder = tmp_path_factory.mktemp("data")
    dtype = token_dtype(70_000 if wide else 60_000)
    arrays = [np.arange(n, dtype=dtype) + 7 * i for i, n in enumerate(lengths)]
    entries = []
    for i, tokens in enumerate(arrays):
        np.save(folder / f"train_{i:06d}.npy", tokens)
        entries.append(Shard(f"train_{i:06d}.npy", len(tokens), 1, 1, "0" * 64, int(tokens.max())))
    index(folder, entries, 70_000 if wide else 60_000)
    split = open_split(folder, "train")
    shard = np.repeat(np.arange(len(lengths)), 3)[::-1]
    start = np.array([[n - 3, 0, n // 2 - 1] for n in lengths]).reshape(-1)[::-1]
    found = split.read_many(shard, start, 3)
    assert found.tolist() == [
        arrays[i][j : j + 3].tolist() for i, j in zip(shard, start, strict=True)
    ]
    kept = resident(split, wanted)
    whole = np.concatenate(arrays)
    assert kept.tokens == min(wanted + 1, len(whole))
    read = [kept.read(i, 0, int(n)) for i, n in enumerate(kept.lengths)]
    assert (np.concatenate(read) == whole[: kept.tokens]).all()


# --------------------------------------------------------------------------- damage

Edit = Callable[[dict[str, Any]], object]


def edit(folder: Path, change: Edit) -> None:
    content = json.loads((folder / "dataset.json").read_text())
    change(content)
    (folder / "dataset.json").write_text(json.dumps(content))


def first(content: dict[str, Any]) -> dict[str, Any]:
    shard: dict[str, Any] = content["splits"]["train"][0]
    return shard


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(version=2), r"damaged: Invalid enum value 2 - at `\$\.version`"),
        (lambda c: c.update(byte_order=">"), "another version.*: byte_order is an unknown key"),
        (lambda c: c.pop("vocab_size"), "damaged.*vocab_size"),
        (lambda c: first(c).update(tokens="4"), "damaged: Expected `int`, got `str` - at .*tokens"),
        (lambda c: first(c).update(documents=-1), "damaged: .*`int` >= 0 - at .*documents"),
        (lambda c: first(c).update(name="../x.npy"), "damaged: .*regex.* - at .*name"),
        (lambda c: first(c).update(tokens=5), "has 136 bytes, expected 138"),
        (lambda c: first(c).update(max_token=1000), "holds token 1000, .* vocab_size 1000"),
        (lambda c: first(c).update(name="gone.npy"), r"gone\.npy is missing"),
        (lambda c: c["splits"].update(train=[]), "no train shards; its splits: train"),
    ],
)
def test_a_wrong_index_is_refused(folder: Path, change: Edit, message: str) -> None:
    edit(folder, change)
    with pytest.raises(DataError, match=message) as error:
        open_split(folder, "train")
    assert str(folder) in str(error.value)


def test_a_shard_of_another_type_is_refused_when_it_is_read(folder: Path) -> None:
    np.save(folder / "train_000000.npy", np.array([1, 2], np.uint32))
    split = open_split(folder, "train")
    with pytest.raises(DataError, match=r"holds 2 tokens of uint32.*4 of uint16"):
        split.read(0, 0, 2)
