"""Token ids that `shards()` in a file of --code returns: trained on as our own, and recognized."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import QUIET, launch
from tests.test_train import assert_same_weights, records, weights

Arguments = Callable[..., list[str]]
# the shards of a prepared folder, as the file finds them
OURS = """
import numpy as np


def shards(folder, split):
    files = sorted(folder.glob(f"{split}_*.npy"))
    return [np.load(file, mmap_mode="r").KIND for file in files]
"""
RANDOM = """
import numpy as np


def shards(folder, split):
    draw = np.random.default_rng(SEED)
    return [draw.integers(0, 257, 4000), draw.integers(0, 257, 300)]
"""


def write(folder: Path, source: str) -> str:
    path = folder / "my.py"
    path.write_text(source)
    return str(path)


def test_equal_tokens_train_alike_in_any_type_on_disk_or_in_memory(
    small_run: Arguments, tmp_path: Path
) -> None:
    tokenizer = ("--data.tokenizer", str(tmp_path / "corpus" / "tokenizer.json"))
    for number, kind in enumerate(("", ".astype(np.int64)", ".tolist()")):
        code = write(tmp_path, OURS.replace(".KIND", kind))
        out = ("--out_dir", str(tmp_path / str(number)), "--code", code)
        assert launch(small_run(*QUIET, *tokenizer, "--train.max_steps", "4", *out)) == 0
    first, *others = [tmp_path / str(number) for number in range(3)]
    for other in others:
        assert records(other) == records(first)
        assert_same_weights(weights(other, 4), weights(first, 4))


def test_other_tokens_are_recognized_at_a_resume(
    small_run: Arguments, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code = write(tmp_path, RANDOM.replace("SEED", "1"))
    options = (*QUIET, "--data.tokenizer", "bytes", "--train.max_steps", "4", "--code", code)
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    assert launch(small_run(*options, "--out_dir", str(whole))) == 0
    own = small_run(*options, "--out_dir", str(parted), "--eval.every", "2")
    assert launch([*own, "--train.stop_at", "2"]) == 0
    write(tmp_path, RANDOM.replace("SEED", "2"))
    capfd.readouterr()
    assert launch([*own, "--checkpoint.allow_change", "code"]) == 2
    assert "was made with another config: data.train was " in capfd.readouterr().err
    write(tmp_path, RANDOM.replace("SEED", "1"))
    assert launch(own) == 0
    assert_same_weights(weights(whole, 4), weights(parted, 4))
