"""`accel-gpt prepare` accepts every recipe in configs/data."""

from pathlib import Path
from typing import Any

import pytest

from accel_gpt.cli import dispatch
from accel_gpt.commands.options import PrepareCommand
from accel_gpt.console import run_main
from accel_gpt.data.index import read_index
from accel_gpt.data.shards import open_split

RECIPES = sorted((Path(__file__).parents[2] / "configs/data").glob("*.yaml"))


def load(path: Path, *words: str) -> PrepareCommand:
    return PrepareCommand.parse([str(path), *words])


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_says_what_and_where(path: Path) -> None:
    recipe = load(path)
    assert recipe.source is not None
    assert recipe.out == f"data/{path.stem}"


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    for i in range(4):
        (tmp_path / f"{i}.txt").write_text(f"Text {i}.\n" * 50)
    path = tmp_path / "mine.yaml"
    path.write_text(f"source: {tmp_path}/*.txt\ntokenizer: bytes\nshard_tokens: 100\n")
    return path


def call(*words: Any) -> int:
    return run_main(dispatch, ["prepare", *map(str, words)])


def test_the_command_line_goes_before_the_recipe(recipe: Path, tmp_path: Path) -> None:
    assert load(recipe, "--shard_tokens", "70").shard_tokens == 70
    assert call(recipe, "--shard_tokens", "70", "--out", tmp_path / "out") == 0
    prepared = read_index(tmp_path / "out").prepared
    assert (prepared["source"], prepared["tokenizer"]) == (f"{tmp_path}/*.txt", "bytes")
    assert open_split(tmp_path / "out", "train").lengths[0] == 70
