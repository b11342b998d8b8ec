"""nanoGPT's meta.pkl is read, and no pickle can run code or import anything."""

import os
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest

from accel_gpt.data.foreign import read_vocabulary
from accel_gpt.errors import DataError


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"vocab_size": 50304}, "holds no vocabulary of characters.*set data.tokenizer"),
        ({"itos": {}}, "holds no vocabulary"),
        ({"itos": {0: "a", 2: "b"}}, "holds no vocabulary"),
        ({"itos": {0: "a", 1: "a"}}, "holds no vocabulary"),
        ({"itos": {0: "a", 1: "bc"}}, "holds no vocabulary"),
        ({"itos": {0: "\ud800"}}, "holds no vocabulary"),
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
    for value in (Runs(canary), {"itos": {0: Runs(canary)}}, Builds(), print):
        (tmp_path / "meta.pkl").write_bytes(pickle.dumps(value, protocol))
        with pytest.raises(DataError, match=r"it names .*calling that executes code"):
            read_vocabulary(tmp_path / "meta.pkl")
    assert not canary.exists()
    pickle.loads(pickle.dumps(Runs(canary), protocol))
    assert canary.exists(), "the payload would have worked"
