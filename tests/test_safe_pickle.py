"""Plain pickles come out equal, and no pickle can make this code run or import anything."""

import contextlib
import os
import pickle
import pickletools
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accel_gpt.data import safe_pickle
from accel_gpt.data.safe_pickle import parse, read_plain, read_vocabulary
from accel_gpt.errors import DataError

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
PLAIN = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers(-(2**63), 2**63), inner)
    ),
)


@given(PLAIN, st.integers(0, 5))
def test_plain_values_of_all_protocols_are_read(value: object, protocol: int) -> None:
    parsed = parse(pickle.dumps(value, protocol), "x")
    assert parsed == value
    assert repr(parsed) == repr(value)  # tells True from 1, and tuples from lists


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("value", [10**700, -(2**2040), "\ud800", "\x00\n\\u0041'\r\x1a", -0.0])
def test_odd_values_are_read(value: object, protocol: int) -> None:
    assert parse(pickle.dumps(value, protocol), "x") == value


@pytest.mark.parametrize("protocol", range(6))
def test_shared_and_recursive_values_keep_their_shape(protocol: int) -> None:
    shared = ["a"]
    ring: list[Any] = [shared, shared]
    ring.append(ring)
    parsed = parse(pickle.dumps(ring, protocol), "x")
    assert parsed[0] is parsed[1]
    assert parsed[2] is parsed


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
    for value in (
        Runs(canary),
        {"itos": {0: Runs(canary)}, "stoi": [(Runs(canary),)]},
        Builds(),
        {1, 2},
        b"bytes",
        bytearray(b"x"),
        OrderedDict(a=1),
        print,
    ):
        (tmp_path / "meta.pkl").write_bytes(pickle.dumps(value, protocol))
        with pytest.raises(DataError, match=r"makes more than plain values.*nothing is run"):
            read_plain(tmp_path / "meta.pkl")
    assert not canary.exists()
    pickle.loads(pickle.dumps(Runs(canary), protocol))
    assert canary.exists(), "the payload would have worked"


@pytest.mark.parametrize(
    ("content", "opcode"),
    [
        (b"cos\nsystem\n(S'true'\ntR.", "GLOBAL"),
        (b"(S'true'\nios\nsystem\n.", "STRING"),
        (b"(ios\nsystem\n.", "INST"),
        (b"\x8c\x02os\x8c\x06system\x93.", "STACK_GLOBAL"),
        (b"NN\x81.", "NEWOBJ"),
        (b"NNb.", "BUILD"),
        (b"N)R.", "REDUCE"),
        (b"Pid\n.", "PERSID"),
        (b"\x82\x01.", "EXT1"),
        (b"\x8f.", "EMPTY_SET"),
        (b"\x97.", "NEXT_BUFFER"),
    ],
)
def test_the_refused_opcode_is_named(content: bytes, opcode: str) -> None:
    with pytest.raises(DataError, match=f"^x uses the pickle opcode {opcode}, "):
        parse(content, "x")


def test_every_other_opcode_is_refused() -> None:
    known = {
        *safe_pickle.LITERALS,
        *(name for name, _ in (*safe_pickle.CONSTANTS, *safe_pickle.SHORT_TUPLES)),
        *("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE", "GET", "BINGET", "LONG_BINGET"),
        *("PROTO", "FRAME", "STOP", "MARK", "EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE"),
        *("TUPLE", "LIST", "DICT", "APPEND", "APPENDS", "SETITEM", "SETITEMS"),
    }
    others = [opcode.name for opcode in pickletools.opcodes if opcode.name not in known]
    assert {"GLOBAL", "STACK_GLOBAL", "REDUCE", "BUILD", "INST", "OBJ", "NEWOBJ"} <= {*others}
    for name in others:
        with pytest.raises(safe_pickle._Refused, match=f"^{name}$"):
            safe_pickle._Machine().step(name, None)


@settings(max_examples=300)
@given(st.binary(max_size=200) | st.lists(st.sampled_from(b"(.0INKJ]}tl)sueaqrhgp\x94")).map(bytes))
def test_random_bytes_are_refused_or_plain(content: bytes) -> None:
    for attempt in (content, content + b".", b"\x80\x04" + content + b"."):
        with contextlib.suppress(DataError):
            value = parse(attempt, "x")
            assert type(value) in (dict, list, tuple, str, int, float, bool, type(None))


@settings(max_examples=50)
@given(PLAIN, st.integers(0, 5), st.data())
def test_a_cut_or_changed_pickle_is_refused_or_plain(
    value: object, protocol: int, data: st.DataObject
) -> None:
    content = bytearray(pickle.dumps(value, protocol))
    cut = data.draw(st.integers(0, len(content) - 1))
    with pytest.raises(DataError, match="damaged pickle"):
        parse(bytes(content[:cut]), "x")
    content[cut] = data.draw(st.integers(0, 255))
    with contextlib.suppress(DataError):
        parse(bytes(content), "x")


BOMB = b")q\x00" + b"".join(b"h%ch%c\x86q%c" % (i, i, i + 1) for i in range(100))  # 2**100 tuples


def test_a_bomb_of_shared_values_is_neither_hashed_nor_spelled(tmp_path: Path) -> None:
    assert type(parse(b"(" + BOMB + b"t.", "x")) is tuple
    with pytest.raises(DataError, match="a tuple is a key; expected a string or a number"):
        parse(b"}(" + BOMB + b"tNs.", "x")
    with pytest.raises(DataError, match="a key is a number of 2001 bits"):
        parse(pickle.dumps({2**2000: 1}), "x")
    path = tmp_path / "meta.pkl"
    for before, after in (
        (b"}X\x04\x00\x00\x00itos(", b"ts."),
        (b"}X\x04\x00\x00\x00itos}K\x00(", b"tss."),
        (b"}(X\x04\x00\x00\x00itos}K\x00X\x01\x00\x00\x00asX\x04\x00\x00\x00stoi(", b"tu."),
    ):
        path.write_bytes(before + BOMB + after)
        with pytest.raises(DataError, match=r"no vocabulary of characters|its stoi differ"):
            read_vocabulary(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "damaged pickle"),
        (b".", "damaged pickle"),
        (b"NN.", "damaged pickle"),
        (b"\x80\x06N.", "protocol 6, expected at most 5"),
        (b"h\x07.", "refers to the value 7, which it does not hold"),
        (b"t.", "a mark is missing"),
        (b"\x86.", "its stack is empty"),
        (b"NNa.", "a list is missing"),
        (b"]NNs.", "a dict is missing"),
        (b"(Nd.", "damaged pickle"),
        (b"I" + b"9" * 5000 + b"\n.", "damaged pickle"),
    ],
)
def test_damage_is_told(content: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        parse(content, "x")


def test_a_large_or_missing_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "meta.pkl"
    with pytest.raises(DataError, match="cannot be read: No such file"):
        read_plain(path)
    path.write_bytes(b"")
    os.truncate(path, safe_pickle.LIMIT + 1)
    with pytest.raises(DataError, match="has 16777217 bytes; a pickle is read up to 16777216"):
        read_plain(path)


# --------------------------------------------------------------------------- nanoGPT's vocabulary


def meta(chars: str) -> dict[str, Any]:
    """As data/shakespeare_char/prepare.py makes it."""
    return {
        "vocab_size": len(chars),
        "itos": dict(enumerate(chars)),
        "stoi": {char: i for i, char in enumerate(chars)},
    }


@settings(max_examples=30)
@given(st.lists(st.characters(codec="utf-8"), unique=True, min_size=1), st.integers(0, 5))
def test_a_vocabulary_in_any_order_is_read(
    tmp_path_factory: pytest.TempPathFactory, chars: list[str], protocol: int
) -> None:
    path = tmp_path_factory.mktemp("v") / "meta.pkl"
    content = meta("".join(chars))
    content["itos"] = dict(reversed(content["itos"].items()))
    path.write_bytes(pickle.dumps(content, protocol))
    assert read_vocabulary(path) == "".join(chars)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"vocab_size": 50304}, "is no vocabulary of characters.*set data.tokenizer"),
        ([1, 2], "is no vocabulary"),
        ({"itos": {}}, "is no vocabulary"),
        ({"itos": ["a", "b"]}, "is no vocabulary"),
        ({"itos": {0: "a", 2: "b"}}, "is no vocabulary"),
        ({"itos": {0: "a", 1: "a"}}, "is no vocabulary"),
        ({"itos": {0: "a", 1: "bc"}}, "is no vocabulary"),
        ({"itos": {0: "\ud800"}}, "is no vocabulary"),
        ({"itos": {False: "a"}}, "is no vocabulary"),
        ({"itos": {0: "a"}, "vocab_size": 2}, "its itos and its vocab_size differ"),
        ({"itos": {0: "a"}, "stoi": {"b": 0}}, "its itos and its stoi differ"),
    ],
)
def test_another_content_is_told(tmp_path: Path, content: object, message: str) -> None:
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(content))
    with pytest.raises(DataError, match=rf"meta\.pkl .*{message}"):
        read_vocabulary(tmp_path / "meta.pkl")
