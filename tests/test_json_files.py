"""JSON records: valid content is read, and an error is one sentence with file and key."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accel_gpt.errors import CheckpointError, DataError, NewerFormatError
from accel_gpt.json_files import Count, Size, convert_json, load_json_as
from accel_gpt.training.run_folder import RunFolder


@dataclass(frozen=True)
class Part:
    name: str
    size: Size
    share: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0


@dataclass(frozen=True)
class Whole:
    count: Count
    loss: float | None = None
    ready: bool = False
    parts: list[Part] = field(default_factory=list)
    by_name: dict[str, Part] = field(default_factory=dict)
    anything: dict[str, Any] = field(default_factory=dict)


PARTS = st.builds(Part, name=st.text(), size=st.integers(1, 2**53), share=st.floats(0.01, 1))
WHOLES = st.builds(
    Whole,
    count=st.integers(0, 2**53),
    loss=st.none() | st.floats(allow_nan=False),
    ready=st.booleans(),
    parts=st.lists(PARTS, max_size=3),
    by_name=st.dictionaries(st.text(), PARTS, max_size=3),
    anything=st.dictionaries(st.text(), st.none() | st.integers() | st.text()),
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=30)
@given(whole=WHOLES, key=st.sampled_from([*Whole.__dataclass_fields__, "other"]), value=JSON)
def test_any_value_fits_or_is_one_sentence_with_its_key(
    tmp_path_factory: pytest.TempPathFactory, whole: Whole, key: str, value: Any
) -> None:
    path = tmp_path_factory.mktemp("records") / "whole.json"
    path.write_text(json.dumps(asdict(whole)))
    assert load_json_as(Whole, path, DataError) == whole
    path.write_text(json.dumps(asdict(whole) | {key: value}))
    try:
        load_json_as(Whole, path, CheckpointError)
    except CheckpointError as error:
        sentence = str(error)
        assert str(path) in sentence
        assert key in sentence
        assert sentence.isprintable()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{}", "is damaged: Object missing required field `count`"),
        ('{"count": "1"}', "Expected `int`, got `str` - at `$.count`"),
        ('{"count": 1.5}', "Expected `int`, got `float` - at `$.count`"),
        ('{"count": -1}', "Expected `int` >= 0 - at `$.count`"),
        ('{"count": 9007199254740993}', "Expected `int` <= 9007199254740992 - at `$.count`"),
        ('{"count": 1, "parts": [{"name": 1, "size": 1}]}', "at `$.parts[0].name`"),
        ('{"count": 1, "parts": [{"name": "a", "size": 0}]}', "at `$.parts[0].size`"),
        ("[]", "it holds no object"),
        ("\xff", "is not valid JSON"),
        ("[" * 100_000, "is not valid JSON"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "whole.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError) as raised:
        load_json_as(Whole, path, CheckpointError, "make it again")
    assert str(raised.value).startswith(f"{path} ")
    assert problem in str(raised.value)
    assert str(raised.value).endswith("; make it again")


@pytest.mark.parametrize(
    ("content", "key"),
    [
        ({"count": 1, "countt": 2}, "countt"),
        ({"count": 1, "parts": [{"name": "a", "size": 1, "of": None}]}, "parts.0.of"),
        ({"count": 1, "by_name": {"a\n": {"name": "a", "size": 1, "of": 1}}}, "by_name.a\\n.of"),
    ],
)
def test_an_unknown_key_is_of_another_version(content: dict[str, Any], key: str) -> None:
    with pytest.raises(NewerFormatError) as raised:
        convert_json(
            Whole, content, Path("x.json"), CheckpointError, "make it again", NewerFormatError
        )
    assert str(raised.value) == (
        f"another version of accel_gpt wrote x.json: {key} is an unknown key; update accel_gpt, "
        "or make it again"
    )


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "gone.json", tmp_path):
        with pytest.raises(DataError, match=rf"{path} cannot be read"):
            load_json_as(Whole, path, DataError)


def test_run_json_may_hold_more(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"launches": [{"step": 1}], "note": "mine"}')
    assert RunFolder(tmp_path).launches == ({"step": 1},)
