"""The weights that `evaluated()` of --code returns: who uses them, and what stays as it was."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from accel_gpt.errors import CheckpointError
from accel_gpt.own_code import Weights
from accel_gpt.runs.checkpoint import verify_checkpoint
from accel_gpt.transformers_io.load import load_pretrained
from tests.conftest import launch
from tests.test_train import assert_same_weights, records

Arguments = Callable[..., list[str]]
ZEROS = "import torch\ndef evaluated(model):\n    return {\n" + (
    "        name: torch.zeros_like(p) for name, p in model.named_parameters()\n    }\n"
)
RATE = "def lr():\n    return 1.0\n"
SEES = """
def evaluate(run):
    return {"eval/largest": max(p.abs().max().item() for p in run.gpt.parameters())}
def after_evaluation(run, record):
    assert all((p == 0).all() for p in run.gpt.parameters())
"""
FOUR = ("--train.max_steps", "4", "--eval.every", "2", "--checkpoint.every", "2")


def run_with(source: str, name: str, small_run: Arguments, *options: str) -> Path:
    """Train four steps with a file of this source; return the run."""
    arguments = small_run(*FOUR, *options)
    folder = Path(arguments[0]).parent
    file = folder / f"{name}.py"
    file.write_text(source)
    run = folder / name
    assert launch([*arguments, "--code", str(file), "--out_dir", str(run)]) == 0
    return run


@pytest.mark.parametrize("async_save", ["false", "true"])
def test_evaluations_samples_and_readers_use_them_and_training_does_not(
    async_save: str, small_run: Arguments
) -> None:
    """Zeros stand for an average: each token is then equally likely."""
    options = ("--checkpoint.async_save", async_save)
    plain = run_with(RATE, "plain", small_run, *options)
    zeros = run_with(RATE + ZEROS + SEES, "zeros", small_run, *options)
    trained = [record["train/loss"] for record in records(plain)]
    assert [record["train/loss"] for record in records(zeros)] == trained
    assert records(zeros)[1]["eval/val_loss"] == pytest.approx(math.log(257))
    assert records(zeros)[1]["eval/largest"] == 0
    for step in (2, 4):
        assert not any(weight.any() for weight in weights_of(zeros, step).values())
        assert_same_weights(weights_of(zeros, step, "trained"), weights_of(plain, step))
    samples = [(run / "samples" / "step_00000004.txt").read_bytes() for run in (plain, zeros)]
    assert samples[0] != samples[1]


def weights_of(run: Path, step: int, kind: Weights = "evaluated") -> dict[str, torch.Tensor]:
    model, _ = load_pretrained(str(run), str(step), weights=kind)
    return dict(model.state_dict())


def test_names_that_are_left_out_stay_as_trained(small_run: Arguments) -> None:
    source = "def evaluated(model):\n    return {'norm_f.weight': model.norm_f.weight * 2}\n"
    run = run_with(source, "one", small_run)
    trained, evaluated = (weights_of(run, 4, kind) for kind in ("trained", "evaluated"))
    assert evaluated.pop("norm_f.weight").equal(2 * trained.pop("norm_f.weight"))
    for name, weight in trained.items():
        assert evaluated[name].equal(weight), name


def test_weights_may_be_exchanged_and_one_tensor_may_have_two_names(
    small_run: Arguments,
) -> None:
    source = (
        "def evaluated(model):\n    a, b = (block.norm_1.weight for block in model.blocks)\n"
        "    mean = (model.norm_f.weight + 1) / 2\n"
        "    return {'blocks.0.norm_1.weight': b, 'blocks.1.norm_1.weight': a,\n"
        "        'norm_f.weight': mean, 'blocks.0.norm_2.weight': mean}\n"
    )
    run = run_with(source, "exchanged", small_run)
    trained, evaluated = (weights_of(run, 4, kind) for kind in ("trained", "evaluated"))
    first, second = "blocks.0.norm_1.weight", "blocks.1.norm_1.weight"
    assert evaluated[first].equal(trained[second])
    assert evaluated[second].equal(trained[first])
    assert evaluated["blocks.0.norm_2.weight"].equal(evaluated["norm_f.weight"])


def test_damage_of_them_is_found(small_run: Arguments) -> None:
    run = run_with(ZEROS, "zeros", small_run)
    checkpoint = run / "checkpoints" / "step_00000004"
    file = checkpoint / "evaluated.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"evaluated\.safetensors"):
        verify_checkpoint(checkpoint, model_only=True)
