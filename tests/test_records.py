"""JSON records: valid content is read, and an error is one sentence with file and key."""

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel_gpt.config.options import REQUIRED, option
from accel_gpt.errors import AccelGPTError, CheckpointError, DataError
from accel_gpt.records import load_record, load_record_or_none
from accel_gpt.training.run_folder import RunFolder

OTHER = "another version of accel_gpt wrote {}"


@dataclass(frozen=True)
class Part:
    name: str
    size: int = option(REQUIRED, "Bytes.", at_least=1)
    share: float = option(1.0, "Share.", above=0, at_most=1)


@dataclass(frozen=True)
class Whole:
    FORMER_KEYS: ClassVar = ("former",)
    count: int
    loss: float | None = None
    ready: bool = False
    parts: list[Part] = field(default_factory=list)
    by_name: dict[str, Part] = field(default_factory=dict)
    spans: list[list[int]] = field(default_factory=list)
    anything: dict[str, Any] = field(default_factory=dict)


PARTS = st.builds(
    Part,
    name=st.text(),
    size=st.integers(1, 2**53),
    share=st.floats(0.01, 1),
)
WHOLES = st.builds(
    Whole,
    count=st.integers(0, 2**53),
    loss=st.none() | st.floats(allow_nan=False),
    ready=st.booleans(),
    parts=st.lists(PARTS, max_size=3),
    by_name=st.dictionaries(st.text(), PARTS, max_size=3),
    spans=st.lists(st.lists(st.integers(0, 9)), max_size=3),
    anything=st.dictionaries(st.text(), st.none() | st.integers() | st.text()),
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(whole=WHOLES)
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, whole: Whole) -> None:
    path = tmp_path_factory.mktemp("records") / "whole.json"
    path.write_text(json.dumps(asdict(whole)))
    assert load_record(Whole, path, DataError) == whole


@given(whole=WHOLES, key=st.sampled_from([*Whole.__dataclass_fields__, "other"]), value=JSON)
def test_any_value_fits_or_is_one_sentence_with_its_key(
    tmp_path_factory: pytest.TempPathFactory, whole: Whole, key: str, value: Any
) -> None:
    path = tmp_path_factory.mktemp("records") / "whole.json"
    path.write_text(json.dumps(asdict(whole) | {key: value}))
    try:
        found = load_record(Whole, path, CheckpointError)
    except CheckpointError as error:
        sentence = str(error)
        known = key in asdict(whole)
        assert sentence.startswith(f"{path} is damaged: {key}" if known else OTHER.format(path))
        assert sentence.isprintable()
    else:
        assert asdict(found).keys() == asdict(whole).keys()


def load(tmp_path: Path, text: str, error: type[AccelGPTError] = DataError) -> Whole:
    path = tmp_path / "whole.json"
    path.write_text(text)
    return load_record(Whole, path, error, "make it again")


def test_what_earlier_versions_wrote_is_read(tmp_path: Path) -> None:
    found = load(
        tmp_path,
        '{"count": 1, "former": [], "loss": NaN, "parts": [{"name": "a", "size": 1, "share": 1}]}',
    )
    assert found.loss is not None
    assert math.isnan(found.loss)
    assert found.parts[0].share == 1


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ('{"count": 1, "countt": 2}', "countt"),
        ('{"count": 1, "parts": [{"name": "a", "size": 1, "of": null}]}', "parts[0].of"),
    ],
)
def test_an_unknown_key_is_of_another_version(tmp_path: Path, text: str, key: str) -> None:
    with pytest.raises(DataError) as raised:
        load(tmp_path, text)
    sentence = f"{OTHER.format(tmp_path / 'whole.json')}: {key} is an unknown key; update accel_gpt"
    assert str(raised.value) == f"{sentence}, or make it again"


def test_an_open_record_ignores_unknown_keys(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"launches": [{"step": 1}], "note": "mine"}')
    assert RunFolder(tmp_path).launches == ({"step": 1},)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{}", "count is missing"),
        ('{"count": "1"}', 'count is "1", expected a whole number'),
        ('{"count": true}', "count is true, expected a whole number"),
        ('{"count": 1.5}', "count is 1.5, expected a whole number"),
        ('{"count": 1e999}', "count is Infinity, expected a whole number"),
        ('{"count": null}', "count is null, expected a whole number"),
        ('{"count": -1}', "count is -1; it must be at least 0"),
        ('{"count": 9007199254740993}', "count is 9007199254740993; it must be at least 0 and at"),
        ('{"count": 1, "loss": 1%s}' % ("0" * 400), "loss is 10000"),
        ('{"count": 1, "loss": "nan"}', 'loss is "nan", expected a number'),
        ('{"count": 1, "ready": 0}', "ready is 0, expected true or false"),
        ('{"count": 1, "parts": {}}', "parts is an object, expected a list"),
        ('{"count": 1, "parts": [[]]}', "parts[0] is a list, expected an object"),
        ('{"count": 1, "parts": [{"name": 1, "size": 1}]}', "parts[0].name is 1, expected text"),
        ('{"count": 1, "parts": [{"name": "a"}]}', "parts[0].size is missing"),
        ('{"count": 1, "by_name": {"a\\n": 3}}', "by_name.a\\n is 3, expected an object"),
        (
            '{"count": 1, "by_name": {"a": {"name": "a", "size": 1, "share": NaN}}}',
            "by_name.a.share is NaN; it must be above 0 and at most 1",
        ),
        ('{"count": 1, "spans": [[0, -1]]}', "spans[0][1] is -1; it must be at least 0"),
        ("[]", "it holds a list, expected an object"),
        ("3", "it holds 3, expected an object"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(CheckpointError) as raised:
        load(tmp_path, text, CheckpointError)
    sentence = str(raised.value)
    assert sentence.startswith(f"{tmp_path / 'whole.json'} is damaged: {problem}")
    assert sentence.endswith("; make it again")
    assert load_record_or_none(Whole, tmp_path / "whole.json") is None


@pytest.mark.parametrize("text", ["", "{", "\xff", '{"count": 1' + "0" * 5000 + "}", "[" * 100_000])
def test_what_is_no_json_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "whole.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(DataError, match=r"whole\.json is not valid JSON"):
        load_record(Whole, path, DataError)
    assert load_record_or_none(Whole, path) is None


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "gone.json", tmp_path):
        with pytest.raises(DataError, match=rf"{path} cannot be read"):
            load_record(Whole, path, DataError)
        assert load_record_or_none(Whole, path) is None
