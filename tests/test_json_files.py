"""JSON records: valid content is read, and an error is one sentence with file and key."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
import pytest

from accel_gpt.errors import CheckpointError, DataError, NewerFormatError
from accel_gpt.json_files import Count, Size, convert_json, load_json_as
from accel_gpt.runs.folder import RunFolder


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
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "whole.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError) as raised:
        load_json_as(Whole, path, CheckpointError)
    assert str(raised.value).startswith(f"{path} ")
    assert problem in str(raised.value)


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
        convert_json(Whole, content, Path("x.json"), CheckpointError, NewerFormatError)
    assert str(raised.value) == (
        f"another version of accel_gpt wrote x.json: {key} is an unknown key; update accel_gpt"
    )


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "gone.json", tmp_path):
        with pytest.raises(DataError, match=rf"{path} is missing"):
            load_json_as(Whole, path, DataError)


def test_run_json_may_hold_more(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"launches": [{"step": 1}], "note": "mine"}')
    assert RunFolder(tmp_path).launches == ({"step": 1},)
