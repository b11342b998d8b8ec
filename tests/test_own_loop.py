"""examples/own_loop.py has the losses of accel-gpt train bit for bit, resumed and on two ranks."""

import ast
import importlib.util
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from accel_gpt import pieces
from accel_gpt.config.data import PrepareConfig
from accel_gpt.prepare.prepare import prepare
from accel_gpt.runs.checkpoint import read_evaluated
from tests.conftest import launch, run_here, text_of, thorough
from tests.test_docs import check
from tests.test_launch import TORCHRUN, finish
from tests.test_train import assert_same_weights, records, weights

ROOT = Path(__file__).resolve().parents[1]
LOOP = ROOT / "examples" / "own_loop.py"
PAGE = "docs/how-to/own-loop.md"
OWN = """
import torch
from torch.nn.functional import cross_entropy

def optimizer(model, config):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

def lr(step, config, plan):
    return 0.9**step

def loss(model, tokens, targets, documents):
    return cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), label_smoothing=0.1)

def evaluate(run):
    return {"eval/weights": next(run.gpt.parameters()).norm()}
"""

Arguments = Callable[..., list[str]]


def loop(arguments: list[str]) -> int:
    """Run the loop in this process; return the exit code."""
    spec = importlib.util.spec_from_file_location("own_loop", LOOP)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return run_here(module.main, arguments)


def assert_same_run(mine: Path, theirs: Path) -> None:
    """Assert the same metrics, weights, optimizer and state, bit for bit.

    The loop logs fewer metrics. A run that stopped has one more evaluation.
    """
    folders = [run / "checkpoints" / "step_00000012" for run in (mine, theirs)]
    mine_records = records(mine)
    theirs_records = records(theirs)
    assert len(mine_records) == len(theirs_records) == 12
    for own, ours in zip(mine_records, theirs_records, strict=True):
        common = own.keys() & ours.keys()
        assert {"train/loss", "train/grad_norm", "tokens"} <= common
        assert {name: own[name] for name in common} == {name: ours[name] for name in common}
        assert "eval/val_loss" in own or "eval/val_loss" not in ours
    assert_same_weights(weights(mine), weights(theirs))
    one, two = (torch.load(path / "optimizer.bin", weights_only=True)["state"] for path in folders)
    assert one.keys() == two.keys()
    for number, state in one.items():
        assert state.keys() == two[number].keys()
        assert all(torch.equal(state[name], two[number][name]) for name in state)
    first, second = (vars(read_evaluated(path)) for path in folders)
    for name in first.keys() - {"config", "world_size", "seconds"}:
        assert first[name] == second[name], name


def documents(folder: Path) -> str:
    """Prepare many short documents; return the data folder."""
    rows = [json.dumps({"text": text_of(5 + seed % 40, seed)}) for seed in range(300)]
    file = folder / "rows.jsonl"
    file.write_text("\n".join(rows))
    prepare(PrepareConfig(source=str(file), tokenizer="bytes"), folder / "documents")
    return str(folder / "documents")


@pytest.mark.parametrize(
    "kind",
    [
        "plain",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("documents", "code", "muon")),
    ],
)
def test_the_loop_equals_accel_gpt_train_and_resumes(
    kind: str, small_run: Arguments, tmp_path: Path
) -> None:
    options = ["--train.micro_batch_size", "4"]
    if kind == "documents":
        options += ["--data.train", documents(tmp_path), "--data.document_mask", "true"]
    elif kind == "muon":
        options += ["--optim.name", "muon", "--schedule.name", "wsd"]
    elif kind == "code":
        (tmp_path / "my.py").write_text(OWN)
        options += ["--code", str(tmp_path / "my.py")]
    ours = tmp_path / "ours"
    whole = tmp_path / "whole"
    stopped = tmp_path / "stopped"
    assert launch(small_run(*options, "--out_dir", str(ours))) == 0
    assert loop(small_run(*options, "--out_dir", str(whole))) == 0
    assert_same_run(whole, ours)
    resumed = small_run(*options, "--out_dir", str(stopped))
    assert loop([*resumed, "--train.stop_at", "6"]) == 0
    assert [path.name for path in (stopped / "checkpoints").iterdir()].count("step_00000006") == 1
    assert loop(resumed) == 0
    assert_same_run(stopped, ours)


@thorough
@pytest.mark.slow
def test_two_processes_equal_one(small_run: Arguments, tmp_path: Path) -> None:
    options = ("--train.reproducible", "true", "--train.micro_batch_size", "2")
    one = tmp_path / "one"
    two = tmp_path / "two"
    finish([sys.executable, str(LOOP), *small_run(*options, "--out_dir", str(one))], tmp_path)
    pair = small_run(*options, "--out_dir", str(two))
    finish([*TORCHRUN, "--nproc_per_node", "2", str(LOOP), *pair, "--train.stop_at", "6"], tmp_path)
    finish([*TORCHRUN, "--nproc_per_node", "2", str(LOOP), *pair], tmp_path)
    assert_same_run(two, one)


def test_the_page_shows_the_file() -> None:
    source = LOOP.read_text(encoding="utf-8")
    check(PAGE, source, r"<!-- own_loop -->\n```python\n(.*?)```\n")


def test_the_page_names_each_piece_and_its_file() -> None:
    """They are the names in accel_gpt/pieces.py, and the loop uses all of them."""
    used = set(re.findall(r"\bpieces\.(\w+)", LOOP.read_text(encoding="utf-8")))
    assert used == set(pieces.__all__)
    page = (ROOT / PAGE).read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("|")]
    source = Path(pieces.__file__).read_text(encoding="utf-8")
    for node in ast.parse(source).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("accel_gpt."):
            file = (node.module or "").removeprefix("accel_gpt.").replace(".", "/") + ".py"
            for alias in node.names:
                named = [row for row in rows if f"`{alias.name}" in row and f"`{file}`" in row]
                assert named, f"{alias.name} of {file}"
