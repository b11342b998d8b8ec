"""`targets()` of --code: what is learned and evaluated, on any micro-batches and processes."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator

from accel_gpt.commands.resolve import load_config
from accel_gpt.config.plan import make_plan
from accel_gpt.data.corpus import open_corpus
from accel_gpt.data.shards import open_split
from accel_gpt.errors import UserError
from accel_gpt.evals.own_check import check_own_code
from accel_gpt.model.make import make_model
from accel_gpt.own_code import load_own_code
from accel_gpt.transformers_io.load import load_pretrained
from tests.conftest import QUIET, launch
from tests.test_matrix import work
from tests.test_train import records

Arguments = Callable[..., list[str]]
# the letters after an e; every third sequence has no target at all
TARGETS = """
def targets(tokens, targets, documents):
    kept = targets.masked_fill(tokens != ord("e"), -100)
    return kept.masked_fill(tokens[:, :1] % 3 == 0, -100)
"""
LOSS = "import torch.nn.functional as F\ndef loss(model, tokens, targets, documents):\n"
MASK = (
    "    logits = model(tokens)[..., : model.vocab_size].flatten(0, 1)\n"
    "    kept = (tokens == ord('e')).flatten()\n"
)
MEAN = (
    "    logits = model(tokens)[..., : model.vocab_size]\n"
    "    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)\n"
)
OPTIONS = (*QUIET, "--model.dropout", "0", "--train.max_steps", "3", "--log.every", "1")


def write(folder: Path, source: str) -> str:
    """Write a file of --code; return its path."""
    path = folder / "my.py"
    path.write_text(source)
    return str(path)


def losses(run: Path) -> list[float]:
    """Return train and validation losses of a run."""
    found = [record.get(key) for record in records(run) for key in ("train/loss", "eval/val_loss")]
    return [loss for loss in found if loss is not None]


def test_the_losses_are_means_over_kept_targets_on_any_micro_batch(
    small_run: Arguments, tmp_path: Path
) -> None:
    """The loss of the trained model on the whole val split, and the loss of the first step."""
    code = write(tmp_path, TARGETS)
    for size in ("8", "2", "1"):
        options = (*OPTIONS, "--code", code, "--train.micro_batch_size", size)
        options += ("--eval.tokens", "2048", "--out_dir", str(tmp_path / size))
        assert launch(small_run(*options)) == 0
        assert losses(tmp_path / size) == pytest.approx(losses(tmp_path / "8"), abs=1e-6)
    model, _ = load_pretrained(str(tmp_path / "8"))
    split = open_split(tmp_path / "corpus", "val")
    targets_of = load_own_code(code).targets
    assert targets_of is not None
    total = count = 0.0
    for shard, size in enumerate(split.lengths.tolist()):
        ids = torch.from_numpy(split.read(shard, 0, size).astype("int64"))
        for first in range(0, size - 1, 32):
            text = ids[None, first : first + 33]
            kept = targets_of.function(text[:, :-1], text[:, 1:], None).flatten()
            with torch.no_grad():
                logits = model(text[:, :-1]).flatten(0, 1)
            total += F.cross_entropy(logits, kept, reduction="sum").item()
            count += (kept != -100).sum().item()
    found = records(tmp_path / "8")
    assert found[-1]["eval/val_loss"] == pytest.approx(total / count, rel=1e-5)
    own = f"{TARGETS}\n{LOSS}{MEAN}"  # with one micro-batch a step
    options = (*OPTIONS, "--code", write(tmp_path, own), "--train.micro_batch_size", "8")
    mean = ("--train.stop_at", "1", "--out_dir", str(tmp_path / "mean"))
    assert launch(small_run(*options, *mean)) == 0
    assert records(tmp_path / "mean")[0]["train/loss"] == pytest.approx(
        found[0]["train/loss"], rel=1e-6
    )


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "elastic"])
def test_masked_targets_train_alike_on_two_processes(
    engine: str, small_run: Arguments, tmp_path: Path
) -> None:
    code = write(tmp_path, TARGETS)
    options = (*OPTIONS, "--code", code, "--train.mixed_precision", "no")
    options += ("--train.reproducible", str(engine == "elastic").lower())
    for name, world in (("one", 1), (engine, 2)):
        size = ("--train.micro_batch_size", "2", "--out_dir", str(tmp_path / name))
        work(name, world, [["run", small_run(*options, *size), 0, None]], tmp_path)
    assert losses(tmp_path / engine) == pytest.approx(losses(tmp_path / "one"), abs=1e-6)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return targets + 1", "targets() changed a target; return the targets, with -100"),
        ("return targets[:, 1:]", "targets() returned Tensor of shape (8, 31); return the targets"),
        ("return targets * 0 - 100", "has no token to predict"),
        (
            "return targets.masked_fill(tokens > tokens[:1, :1], -100)",
            "targets() keeps other targets of a sequence alone than in a batch",
        ),
        (
            "import torch\n    return targets.masked_fill(torch.rand(tokens.shape) < 0.5, -100)",
            "targets() keeps other targets of a sequence alone than in a batch",
        ),
    ],
)
def test_a_wrong_result_is_one_sentence(
    body: str, said: str, small_run: Arguments, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code = write(tmp_path, f"def targets(tokens, targets, documents):\n    {body}\n")
    assert launch(small_run(*OPTIONS, "--code", code)) in (2, 3)
    assert said in capfd.readouterr().err


# --------------------------------------------------------------------------- own losses

# each learns from the letters after an e, with another divisor in each micro-batch
DEPENDENT = {
    "a mean of chosen targets": (
        f"{MASK}    return F.cross_entropy(logits[kept], targets.flatten()[kept])\n"
    ),
    "other targets for the model": (
        "    return model(tokens, targets.masked_fill(tokens != ord('e'), -100))\n"
    ),
}
# each weighs sequences as the trainer does, couples them on purpose, or draws random numbers
FREE = {
    "a masked sum over all targets": (
        f"{MASK}    each = F.cross_entropy(logits, targets.flatten(), reduction='none')\n"
        "    return (each * kept).mean()\n"
    ),
    "a term of the whole batch": (
        "    logits = model(tokens)[..., : model.vocab_size]\n"
        "    return model(tokens, targets) + logits.mean((0, 1)).square().sum()\n"
    ),
    "the hardest half of the targets": (
        "    logits = model(tokens)[..., : model.vocab_size].flatten(0, 1)\n"
        "    each = F.cross_entropy(logits, targets.flatten(), reduction='none')\n"
        "    return each.topk(len(each) // 2).values.mean()\n"
    ),
    "targets at random": (
        "    import torch\n    kept = torch.rand(tokens.shape) < 0.5\n"
        "    return model(tokens, targets.masked_fill(kept, -100))\n"
    ),
}


def check(source: str, arguments: list[str], folder: Path) -> None:
    """Check the loss of a file as the start of a run does."""
    config = load_config([*arguments, "--code", write(folder, LOSS + source)], "test")
    corpus = open_corpus(config)
    model = make_model(config, corpus.vocab_size)
    check_own_code(config, make_plan(config, 1), model, corpus, Accelerator(cpu=True))


@pytest.mark.parametrize("name", DEPENDENT)
def test_a_loss_that_masks_by_itself_is_refused(
    name: str, small_run: Arguments, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"loss\(\) learns nothing from .* targets"):
        check(DEPENDENT[name], small_run(*OPTIONS), tmp_path)


@pytest.mark.parametrize("name", FREE)
def test_a_loss_that_weighs_sequences_alike_is_not(
    name: str, small_run: Arguments, tmp_path: Path
) -> None:
    check(FREE[name], small_run(*OPTIONS), tmp_path)


# --------------------------------------------------------------------------- no target at all

# one token in the first evaluated sequence of 1,000
NOTHING = """
import numpy as np
def shards(folder, split):
    tokens = np.zeros(32_001, np.uint8)
    tokens[5] = 1
    return [tokens]
def targets(tokens, targets, documents):
    return targets.masked_fill(tokens != 1, -100)
"""


def test_batches_without_a_target_are_told_change_nothing_and_end_the_run(
    small_run: Arguments,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("accel_gpt.training.guard.MOST_SKIPPED", 3)
    options = (
        *OPTIONS[:-2],
        "--data.tokenizer",
        "bytes",
        "--train.micro_batch_size",
        "8",
    )
    assert launch(small_run(*options, "--code", write(tmp_path, NOTHING))) == 3
    said = capfd.readouterr().err
    assert (
        "step 1: loss 0, gradient norm 0: the batch has no target; its update was skipped" in said
    )
    assert "3 steps in a row, up to step 3, were skipped" in said
    assert "since their batches have no target" in said
    assert not list((tmp_path / "run" / "checkpoints").glob("step_*"))
