"""A damaged checkpoint is found, set aside and replaced by the one before it."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from accel_gpt.errors import AccelGPTError
from accel_gpt.runs.checkpoint import verify_checkpoint
from tests.faults.harness import Server, Tiny, assert_same, finish, flip, newest, rewound

FLIPS = 60


def test_flipped_bits_and_cut_files_are_found(
    train_once: Callable[..., Path], tmp_path: Path
) -> None:
    """Half of the flips hit any byte of the checkpoint, half any file."""
    seed = random.randrange(2**32)
    draw = random.Random(seed)
    saved = newest(train_once() / "run")
    path = Path(shutil.copytree(saved, tmp_path / saved.name))
    files = sorted(file for file in path.rglob("*") if file.is_file())
    sizes = [file.stat().st_size for file in files]
    for number in range(FLIPS):
        file = draw.choice(files) if number % 2 else draw.choices(files, sizes)[0]
        intact = file.read_bytes()
        where = flip(file, draw)
        try:
            verify_checkpoint(path)
        except AccelGPTError:
            pass
        else:
            assert file.name == "manifest.json", f"{where} was not found, seed {seed}"
            same = json.loads(file.read_bytes()) == json.loads(intact)
            assert same, f"{where} was not found, seed {seed}"
        file.write_bytes(intact)
    for file in files:
        intact = file.read_bytes()
        for size in {0, len(intact) // 2, len(intact) - 1}:
            file.write_bytes(intact[:size])
            with pytest.raises(AccelGPTError):
                verify_checkpoint(path)
        file.write_bytes(intact)
    verify_checkpoint(path)


@pytest.mark.slow
def test_a_cut_file_costs_its_checkpoint_only(
    server: Server, tiny: Tiny, whole: Path, tmp_path: Path
) -> None:
    run = rewound(whole, tmp_path / "run", 8)
    file = newest(run) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    shown = finish(server, tiny.arguments(run)).outputs[0]
    assert "WARNING: " in shown
    assert "step_00000008" in shown.partition("from step 7 ")[0]
    aside = list((run / "checkpoints").glob(".corrupt_step_00000008*"))
    assert [folder.is_dir() for folder in aside] == [True]
    assert_same(run, whole)
