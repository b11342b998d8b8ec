"""Token files of other projects are read correctly, and other files are rejected."""

import os
import pickle
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accel_gpt.data import foreign
from accel_gpt.data.foreign import DataFolder, files_of_split, open_foreign
from accel_gpt.data.remote import FileInfo
from accel_gpt.data.shards import Split
from accel_gpt.data.tokenizer import (
    BytesTokenizer,
    CharsTokenizer,
    Tokenizer,
    load_gpt2,
)
from accel_gpt.errors import DataError, UserError

pytestmark = pytest.mark.usefixtures("gpt2_stand_in")
Ids = Sequence[int] | np.ndarray[Any, Any]
GPT2_IDS = [15496, 11, 995, 50256]


def open_folder(
    folder: Path, split: str = "train", tokenizer: str | None = None
) -> tuple[Split, Tokenizer]:
    return open_foreign(DataFolder(folder), split, tokenizer)


def tokens(split: Split) -> list[int]:
    parts = [split.read(i, 0, int(n)) for i, n in enumerate(split.lengths)]
    return [int(token) for part in parts for token in part]


def raw(path: Path, ids: Ids, dtype: str = "<u2") -> None:
    """nanoGPT, data/shakespeare/prepare.py."""
    np.array(ids, dtype).tofile(path)


def meta(path: Path, chars: str) -> None:
    """nanoGPT, data/shakespeare_char/prepare.py."""
    stoi = {char: i for i, char in enumerate(chars)}
    itos = dict(reversed(list(enumerate(chars))))
    content = {"vocab_size": len(chars), "itos": itos, "stoi": stoi}
    path.write_bytes(pickle.dumps(content))


def llmc(
    path: Path, ids: Ids, dtype: str = "<u2", magic: int = 0, version: int = 0, count: int = -1
) -> None:
    """llm.c, dev/data/data_common.py."""
    header = np.zeros(256, "<i4")
    header[0] = magic or (20240520 if dtype == "<u2" else 20240801)
    header[1] = version or (1 if dtype == "<u2" else 7)
    header.view("<u4")[2] = len(ids) if count < 0 else count
    path.write_bytes(header.tobytes() + np.array(ids, dtype).tobytes())


def npy(path: Path, ids: Ids, dtype: str = "<u2") -> None:
    """build-nanogpt, fineweb.py."""
    np.save(path, np.array(ids, dtype))


def datatrove(
    path: Path, documents: Sequence[Ids], dtype: str = "<u2", metadata: str | None = "gpt2"
) -> None:
    """datatrove, TokenizedFile; `metadata`: the tokenizer's name; None writes no such file."""
    ids = [token for document in documents for token in document]
    np.array(ids, dtype).tofile(path)
    ends = np.cumsum([len(document) for document in documents])
    ends.astype("<u8").tofile(path.with_name(path.name + ".index"))
    if metadata is not None:
        text = f"{metadata}|{np.dtype(dtype).itemsize}\n{len(ids)}\n{len(ids)} T"
        path.with_name(path.name + ".metadata").write_text(text)


# --------------------------------------------------------------------------- what is read

Write = Callable[[Path, Ids], None]
FORMATS: list[tuple[str, int, Write]] = [
    ("train.bin", 2, raw),
    ("x_train_000001.bin", 2, llmc),
    ("x_train_000001.bin", 4, lambda path, ids: llmc(path, ids, "<u4")),
    ("x_train_000001.npy", 2, npy),
    ("x_train_000001.npy", 4, lambda path, ids: npy(path, ids, "<u4")),
    ("x_train_000001.npy", 4, lambda path, ids: npy(path, ids, "<i4")),
    ("00000_00000_doc_shuffled.ds", 2, lambda path, ids: datatrove(path, [ids])),
    ("00000_00000_doc_shuffled.ds", 4, lambda path, ids: datatrove(path, [ids], "<u4", "x")),
]


@settings(max_examples=60)
@given(st.sampled_from(FORMATS), st.lists(st.integers(1, 256), min_size=1, max_size=5000))
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, form: tuple[str, int, Write], ids: list[int]
) -> None:
    folder = tmp_path_factory.mktemp("data")
    name, itemsize, write = form
    write(folder / name, ids)
    split, tokenizer = open_folder(folder, tokenizer="bytes")
    assert tokens(split) == ids
    assert split.dtype == np.dtype(f"<u{itemsize}")
    assert split.read(0, 0, 1).dtype == split.dtype
    assert (split.name, split.vocab_size, split.eot_id) == ("train", 257, 256)
    assert (split.tokenizer_kind, split.tokenizer_fingerprint) == ("bytes", tokenizer.fingerprint)


def test_characters_of_nanogpt_in_any_order(tmp_path: Path) -> None:
    chars = "zé a\n☃b𝄞"
    meta(tmp_path / "meta.pkl", chars)
    text = "a bébé ☃\n𝄞" * 3
    raw(tmp_path / "train.bin", [chars.index(char) for char in text])
    raw(tmp_path / "val.bin", [chars.index(char) for char in "baé"])
    split, tokenizer = open_folder(tmp_path)
    assert tokenizer.decode(tokens(split)) == text
    assert tokenizer.encode(text) == tokens(split)
    assert tokenizer.fingerprint == CharsTokenizer(chars).fingerprint
    split, tokenizer = open_folder(tmp_path, "val")
    assert tokenizer.decode(tokens(split)) == "baé"


def test_what_a_format_tells_of_its_tokenizer_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpt2 = load_gpt2()
    monkeypatch.setattr(foreign, "load_gpt2", lambda: gpt2)  # it takes half a second
    ids = [*gpt2.encode("Hello, world"), 50256]
    llmc(tmp_path / "a_train_0.bin", ids)
    datatrove(tmp_path / "a_val.ds", [ids])
    for name in ("train", "val"):
        split, tokenizer = open_folder(tmp_path, name)
        assert tokenizer.decode(tokens(split)) == "Hello, world<|endoftext|>"
        assert (split.tokenizer_kind, split.eot_id) == ("gpt2", 50256)


def test_ids_too_small_for_the_tokenizer_are_refused(tmp_path: Path) -> None:
    vocabulary = "".join(map(chr, range(0x100, 0x100 + 70_000)))
    meta(tmp_path / "meta.pkl", "".join(c for c in vocabulary if not "\ud800" <= c <= "\udfff"))
    raw(tmp_path / "train.bin", [0, 65_537], "<u4")
    with pytest.raises(UserError, match=r"uint16, which does not hold all 67,952 tokens"):
        open_folder(tmp_path)


def test_shards_are_ordered_by_their_numbers(tmp_path: Path) -> None:
    for i in (10, 9, 100, 1):
        npy(tmp_path / f"e_train_{i}.npy", [i])
    npy(tmp_path / "e_val_0.npy", [200])
    assert tokens(open_folder(tmp_path, "train", "bytes")[0]) == [1, 9, 10, 100]
    assert tokens(open_folder(tmp_path, "val", "bytes")[0]) == [200]


@pytest.mark.parametrize(
    ("names", "train", "val"),
    [
        ("train.bin val.bin", "train.bin", "val.bin"),
        ("fineweb_train_000001.bin fineweb_val_000000.bin", "fineweb_train_000001.bin", "f val"),
        ("a-Validation-1.npy a.valid2.npy b_train.npy", "b_train.npy", "a-V a.v"),
        ("interval.npy constrain.npy", "interval.npy constrain.npy", ""),
        ("x_train_0.npy other.npy", "x_train_0.npy", ""),
        ("x_val_0.npy other.npy", "other.npy", "x_val_0.npy"),
        ("0_doc.ds 1_doc.ds 2_val.ds 3_test.ds", "0_doc.ds 1_doc.ds", "2_val"),
        ("0_doc.ds 1_train.ds", "1_train.ds", ""),
    ],
)
def test_a_word_of_the_name_tells_the_split(names: str, train: str, val: str) -> None:
    assert files_of_split(names.split(), "train") == train.split()
    found = files_of_split(names.split(), "val")
    assert len(found) == len(val.split()) - (" val" in val)
    assert not set(found) & set(train.split())


def test_other_files_are_left_out(tmp_path: Path) -> None:
    llmc(tmp_path / "tiny_shakespeare_val.bin", GPT2_IDS)
    llmc(tmp_path / "gpt2_124M.bin", [1, 2], magic=20240326, version=3)
    for name in ("notes.txt", "a_val.bin.gz", ".val.bin", "my val.bin", "val_.idx"):
        (tmp_path / name).write_text("something")
    llmc(tmp_path / "empty_val.bin", [])
    split, _ = open_folder(tmp_path, "val", "bytes")
    assert [shard.name for shard in split.shards] == ["tiny_shakespeare_val.bin"]


# --------------------------------------------------------------------------- remote


class Remote:
    """A remote folder that records what is fetched; `tags` by name."""

    def __init__(self, source: Path) -> None:
        self.source, self.fetched, self.tags = source, list[str](), dict[str, str]()
        self.here = source.with_name("here")
        self.here.mkdir(exist_ok=True)

    def list(self) -> dict[str, FileInfo]:
        return {
            file.name: FileInfo(
                file.stat().st_size, None, self.tags.get(file.name, ""), str(time.time())
            )
            for file in os.scandir(self.source)
        }

    def path(self, name: str) -> Path:
        return self.here / name

    def fetch(self, name: str) -> Path:
        self.fetched.append(name)
        self.path(name).write_bytes((self.source / name).read_bytes())
        return self.path(name)

    def open(self, split: str, tokenizer: str | None = None) -> Split:
        return open_foreign(DataFolder(self.here, self), split, tokenizer)[0]  # type: ignore[arg-type]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "source").mkdir()
    return tmp_path / "source"


def test_of_a_remote_folder_only_the_first_shard_of_a_series_is_fetched(source: Path) -> None:
    for i in range(3):
        llmc(source / f"fineweb_train_{i:06d}.bin", [i, 10, 20 + i])
        datatrove(source / f"0000{i}_val.ds", [[i, 4], [5]], "<u4")
    remote = Remote(source)
    split = remote.open("train", "bytes")
    assert remote.fetched == ["fineweb_train_000000.bin"]
    assert tokens(split) == [0, 10, 20, 1, 10, 21, 2, 10, 22]
    remote.fetched.clear()
    split = remote.open("val", "bytes")
    assert remote.fetched == ["00000_val.ds.metadata"]
    assert tokens(split) == [0, 4, 5, 1, 4, 5, 2, 4, 5]


def test_the_fingerprint_of_a_remote_folder_changes_with_its_tags(source: Path) -> None:
    prints = []
    for tag, more in (("a", 0), ("b", 0), ("b", 1), ("b", 1)):
        npy(source / "train_0.npy", [2, 5])
        npy(source / "train_1.npy", [3, 4, 5][: 2 + more])
        remote = Remote(source)
        remote.tags["train_1.npy"] = tag
        prints.append(remote.open("train", "bytes").fingerprint)
    assert len(set(prints)) == 3
    assert prints[2] == prints[3]  # at another time


def test_a_fingerprint_changes_with_content_and_tokenizer_alone(tmp_path: Path) -> None:
    ids = np.arange(50_000) % 200
    CharsTokenizer("".join(map(chr, range(32, 289)))).save(tmp_path)
    chars = str(tmp_path / "tokenizer.json")
    cases = [(ids, "bytes"), (ids[:-200], "bytes"), (ids, chars)]
    for place in (0, 12_500, 25_000, 37_500, -1):  # in each of the five blocks that are read
        other = ids.copy()
        other[place] = 201
        cases.append((other, "bytes"))
    prints = []
    for i, (content, tokenizer) in enumerate([*cases, cases[0]]):
        (tmp_path / f"{i}").mkdir()
        raw(tmp_path / f"{i}" / "train.bin", content)
        prints.append(open_folder(tmp_path / f"{i}", tokenizer=tokenizer)[0].fingerprint)
    assert len(set(prints)) == 8
    assert prints[0] == prints[-1]


# --------------------------------------------------------------------------- what is refused


def two_formats(folder: Path) -> None:
    npy(folder / "train_1.npy", [1])
    npy(folder / "train_2.npy", [1], "<u4")


def wrong_metadata(text: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        datatrove(folder / "a.ds", [[1, 2, 3]])
        (folder / "a.ds.metadata").write_text(text)

    return write


# with data.tokenizer
DAMAGED: list[tuple[Callable[[Path], object], str]] = [
    (lambda f: None, r"no dataset\.json, and no train shards: expected .*: none"),
    (lambda f: llmc(f / "train_0.bin", [1, 2], count=3), r"has 1028 bytes, expected 1030 for 3"),
    (lambda f: llmc(f / "train_0.bin", [1], version=2), r"has header version 2, expected 1"),
    (lambda f: npy(f / "train_0.npy", [1], "<i8"), r"holds int64 .<i8., expected little-endian"),
    (lambda f: np.save(f / "train_0.npy", np.ones((2, 2), "<u2")), r"int16 of shape \(2, 2\)"),
    (lambda f: np.save(f / "train_0.npy", np.array([{}])), "holds object of shape"),
    (lambda f: (f / "train_0.npy").write_bytes(b"\x93NUMPY\1"), "is not a valid .npy file"),
    (two_formats, r"several formats: train_1\.npy in uint16, train_2\.npy in uint32"),
    (wrong_metadata("gpt2|2\n5"), r"a\.ds has 6 bytes, expected 10 for 5 tokens of uint16"),
    (wrong_metadata("gpt2|8\n5"), r"metadata begins with 'gpt2\|8'; expected tokenizer\|2 or"),
    (lambda f: (f / "train.bin").write_bytes(b"123"), r"train\.bin has 3 bytes, expected 2"),
    (lambda f: raw(f / "train.bin", []), "the train shards of .* are all empty"),
]
UNKNOWN: list[tuple[Callable[[Path], object], str]] = [
    (lambda f: raw(f / "x_train_0.bin", [1]), r"x_train_0\.bin does not .*shards\(\)"),
    (lambda f: datatrove(f / "a.ds", [[1]], metadata=None), r"a\.ds\.metadata does not exist"),
    (lambda f: raw(f / "train.bin", [1]), "do not name their tokenizer; set data.tokenizer"),
    (lambda f: llmc(f / "x_train_1.bin", [1], "<u4"), "do not name their tokenizer"),
    (lambda f: datatrove(f / "x.ds", [[1]], metadata="a/b"), "name the tokenizer 'a/b'; set"),
]


@pytest.mark.parametrize(
    ("tokenizer", "write", "message"),
    [*(("bytes", *row) for row in DAMAGED), *((None, *row) for row in UNKNOWN)],
)
def test_what_cannot_be_read_is_told(
    tmp_path: Path, tokenizer: str | None, write: Callable[[Path], object], message: str
) -> None:
    write(tmp_path)
    with pytest.raises(UserError, match=message) as error:
        open_folder(tmp_path, tokenizer=tokenizer)
    assert str(tmp_path) in str(error.value)
    assert error.value.exit_code == (3 if tokenizer else 2)


def test_the_folders_tokenizer_and_data_tokenizer_must_agree(tmp_path: Path) -> None:
    npy(tmp_path / "train_0.npy", [1])
    BytesTokenizer().save(tmp_path)
    assert open_folder(tmp_path)[1].kind == "bytes"
    assert open_folder(tmp_path, tokenizer="bytes")[1].kind == "bytes"
    assert open_folder(tmp_path, tokenizer=str(tmp_path / "tokenizer.json"))[1].kind == "bytes"
    with pytest.raises(
        DataError, match=r"data\.tokenizer gpt2 has a different tokenizer .* than the folder"
    ):
        open_folder(tmp_path, tokenizer="gpt2")
