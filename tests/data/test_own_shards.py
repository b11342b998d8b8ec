"""Token ids that `shards()` in a file of --code returns: trained on as our own, and recognized."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from accel_gpt.config.data import DataConfig
from accel_gpt.data.sources import open_data
from accel_gpt.own_code import OwnFunction
from tests.conftest import QUIET, launch
from tests.test_train import assert_same_weights, weights

Arguments = Callable[..., list[str]]
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


def test_equal_tokens_train_alike_in_any_type_on_disk_or_in_memory(corpus: Path) -> None:
    """They have one fingerprint, from which the order of a run follows."""

    def shards(change: Callable[[Any], Any], folder: Path, split: str) -> list[Any]:
        files = sorted(folder.glob(f"{split}_*.npy"))
        return [change(np.load(file, mmap_mode="r")) for file in files]

    ours, _ = open_data(str(corpus), "train", DataConfig())
    prints = set()
    for change in (np.asanyarray, lambda ids: ids.astype(np.int64), np.ndarray.tolist):
        data = DataConfig(own_shards=OwnFunction("shards", partial(shards, change), "my.py"))
        own, _ = open_data(str(corpus), "train", data)
        prints.add(own.fingerprint)
        for number, length in enumerate(ours.lengths.tolist()):
            assert (own.read(number, 0, length) == ours.read(number, 0, length)).all()
    assert len(prints) == 1


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
