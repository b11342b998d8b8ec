"""nanoGPT's meta.pkl is read, and no pickle can make this code run or import anything."""

import contextlib
import io
import os
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accel_gpt.data import safe_pickle
from accel_gpt.data.safe_pickle import PlainUnpickler, read_plain, read_vocabulary
from accel_gpt.errors import DataError


def read(folder: Path, content: bytes) -> Any:
    (folder / "meta.pkl").write_bytes(content)
    return read_plain(folder / "meta.pkl")


def meta(chars: str) -> dict[str, Any]:
    """As data/shakespeare_char/prepare.py makes it."""
    return {
        "vocab_size": len(chars),
        "itos": dict(enumerate(chars)),
        "stoi": {char: i for i, char in enumerate(chars)},
    }


@settings(max_examples=15)
@given(st.lists(st.characters(codec="utf-8"), unique=True, min_size=1), st.integers(0, 5))
def test_a_vocabulary_in_any_order_is_read(
    tmp_path_factory: pytest.TempPathFactory, chars: list[str], protocol: int
) -> None:
    path = tmp_path_factory.mktemp("v") / "meta.pkl"
    content = meta("".join(chars))
    content["itos"] = dict(reversed(content["itos"].items()))
    path.write_bytes(pickle.dumps(content, protocol))
    assert read_vocabulary(path) == "".join(chars)
    cut = len(path.read_bytes()) // 2
    os.truncate(path, cut)
    with pytest.raises(DataError, match="damaged pickle"):
        read_vocabulary(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"vocab_size": 50304}, "is no vocabulary of characters.*set data.tokenizer"),
        ({"itos": {}}, "is no vocabulary"),
        ({"itos": {0: "a", 2: "b"}}, "is no vocabulary"),
        ({"itos": {0: "a", 1: "a"}}, "is no vocabulary"),
        ({"itos": {0: "a", 1: "bc"}}, "is no vocabulary"),
        ({"itos": {0: "\ud800"}}, "is no vocabulary"),
    ],
)
def test_another_content_is_refused(tmp_path: Path, content: object, message: str) -> None:
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(content))
    with pytest.raises(DataError, match=rf"meta\.pkl .*{message}"):
        read_vocabulary(tmp_path / "meta.pkl")


# --------------------------------------------------------------------------- attacks


class Runs:
    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.canary}",)


class Builds:
    def __reduce__(self) -> Any:
        return (OrderedDict, (), {"x": 1})


@pytest.mark.parametrize("protocol", range(6))
def test_a_pickle_that_calls_something_is_refused_and_runs_nothing(
    tmp_path: Path, protocol: int
) -> None:
    canary = tmp_path / "canary"
    for value in (Runs(canary), {"itos": {0: Runs(canary)}}, Builds(), {1, 2}, b"bytes", print):
        with pytest.raises(DataError, match=r"makes more than plain values.*nothing is run"):
            read(tmp_path, pickle.dumps(value, protocol))
    assert not canary.exists()
    pickle.loads(pickle.dumps(Runs(canary), protocol))
    assert canary.exists(), "the payload would have worked"


def test_the_unpickler_alone_finds_nothing(tmp_path: Path) -> None:
    """The second lock holds without the first."""
    for protocol in range(6):
        with pytest.raises(pickle.UnpicklingError, match="it names "):
            PlainUnpickler(io.BytesIO(pickle.dumps(Runs(tmp_path / "x"), protocol))).load()


@settings(max_examples=100)
@given(st.binary(max_size=200) | st.lists(st.sampled_from(b"(.0INKJ]}tl)sueaqrhgp\x94")).map(bytes))
def test_random_bytes_are_refused_or_plain(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    folder = tmp_path_factory.mktemp("v")
    for attempt in (content, content + b".", b"\x80\x04" + content + b"."):
        with contextlib.suppress(DataError):
            value = read(folder, attempt)
            assert type(value) in (dict, str, int, float, bool, type(None))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "damaged pickle"),
        (b"NN", "damaged pickle"),
        (b"\x80\x06N.", "damaged pickle: unsupported pickle protocol: 6"),
        (b"h\x07.", "damaged pickle"),
        (b"NNs.", "damaged pickle"),
        (b"I" + b"9" * 5000 + b"\n.", "damaged pickle"),
        (b"Nr\xff\xff\xff\x7f.", "damaged pickle: value 2147483647 of"),  # room for a huge memo
        (b"})q\x00h\x00\x86Ns.", "EMPTY_TUPLE"),  # of tuples within tuples, a hash takes for ever
    ],
)
def test_damage_and_bombs_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read(tmp_path, content)


def test_a_large_or_missing_file_is_not_read(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read: No such file"):
        read_plain(tmp_path / "meta.pkl")
    (tmp_path / "meta.pkl").touch()
    os.truncate(tmp_path / "meta.pkl", safe_pickle.LARGEST + 1)
    with pytest.raises(DataError, match="has more than 16,777,216 bytes"):
        read_plain(tmp_path / "meta.pkl")
