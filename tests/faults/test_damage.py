"""A damaged checkpoint is found, set aside and replaced by the one before it."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from accel_gpt.errors import AccelGPTError
from accel_gpt.training.checkpoint import verify
from tests.faults.harness import Server, Tiny, assert_same, finish, flip, newest, rewound

FLIPS = 150
CUTS: dict[str, Callable[[int], int]] = {
    "to nothing": lambda size: 0,
    "to half": lambda size: size // 2,
    "by one": lambda size: size - 1,
}


def test_single_bit_flips(whole: Path, tmp_path: Path) -> None:
    """Half of the flips hit any byte of the checkpoint, half any file."""
    seed = random.randrange(2**32)
    draw = random.Random(seed)
    path = Path(shutil.copytree(newest(whole), tmp_path / newest(whole).name))
    files = sorted(file for file in path.rglob("*") if file.is_file())
    sizes = [file.stat().st_size for file in files]
    for number in range(FLIPS):
        file = draw.choice(files) if number % 2 else draw.choices(files, sizes)[0]
        intact = file.read_bytes()
        where = flip(file, draw)
        try:
            verify(path)
        except AccelGPTError:
            pass
        else:
            assert file.name == "manifest.json", f"{where} was not found, seed {seed}"
            same = json.loads(file.read_bytes()) == json.loads(intact)
            assert same, f"{where} was not found, seed {seed}"
        file.write_bytes(intact)
    verify(path)


def damaged_and_resumed(
    server: Server, tiny: Tiny, whole: Path, run: Path, name: str, cut: str
) -> None:
    rewound(whole, run, 8)
    file = newest(run) / name
    file.write_bytes(file.read_bytes()[: CUTS[cut](file.stat().st_size)])
    shown = finish(server, tiny.arguments(run)).outputs[0]
    assert "WARNING: " in shown
    assert "step_00000008" in shown.partition("from step 7 ")[0]
    aside = list((run / "checkpoints").glob(".corrupt_step_00000008*"))
    assert [folder.is_dir() for folder in aside] == [True]
    assert_same(run, whole)


def files(whole: Path) -> list[str]:
    return sorted(path.relative_to(newest(whole)).as_posix() for path in newest(whole).iterdir())


def test_truncations(server: Server, tiny: Tiny, whole: Path, tmp_path: Path) -> None:
    """Truncate every third file in one of several ways."""
    for number, name in list(enumerate(files(whole)))[::3]:
        cut = list(CUTS)[number % len(CUTS)]
        damaged_and_resumed(server, tiny, whole, tmp_path / f"run{number}", name, cut)


@pytest.mark.slow
@pytest.mark.parametrize("cut", CUTS)
def test_all_truncations(cut: str, server: Server, tiny: Tiny, whole: Path, tmp_path: Path) -> None:
    for number, name in enumerate(files(whole)):
        damaged_and_resumed(server, tiny, whole, tmp_path / f"run{number}", name, cut)
