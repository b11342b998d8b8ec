"""Validation: the whole split exactly once, the same figure at any batch or number of processes."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import DistributedType

from accel_gpt.data.shards import Split, open_split
from accel_gpt.errors import DataError
from accel_gpt.evals.validation import Score, evaluate, windows
from accel_gpt.model.gpt import GPT
from accel_gpt.model_config import ModelConfig

MODEL = ModelConfig(n_layer=2, n_head=2, n_embd=32, block_size=32, dropout=0.5)
BYTES = np.ones(257, dtype=np.int64)


class Part:
    """One process of several: reduces to its own sums."""

    def __init__(self, rank: int, world: int) -> None:
        self.process_index, self.num_processes, self.device = rank, world, torch.device("cpu")
        self.distributed_type = DistributedType.NO

    def reduce(self, value: torch.Tensor, how: str) -> torch.Tensor:
        assert how == "sum"
        return value


def score(model: GPT, split: Split, part: object, batch: int = 8, **options: Any) -> Score:
    return evaluate(
        model,
        split,
        part,  # type: ignore[arg-type]
        batch_size=batch,
        block_size=32,
        tokens=options.get("tokens"),
        token_bytes=BYTES,
    )


@pytest.fixture
def model() -> GPT:
    torch.manual_seed(0)
    return GPT(MODEL, 257)


def test_every_target_of_the_split_counts_once(corpus: Path, model: GPT) -> None:
    split = open_split(corpus, "val")
    found = score(model, split, Accelerator(cpu=True))
    assert found.tokens == sum(length - 1 for length in split.lengths)
    expected = 0.0
    model.eval()
    for shard, length in enumerate(split.lengths.tolist()):
        tokens = torch.from_numpy(split.read(shard, 0, length).astype(np.int64))
        for start in range(0, length - 1, 32):
            row = tokens[start : start + 33]
            logits = model(row[None, :-1])[0]
            expected += F.cross_entropy(logits.double(), row[1:], reduction="sum").item()
    assert found.loss_sum == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("batch", [5, 8])
def test_processes_and_batches_do_not_change_the_sums(
    corpus: Path, model: GPT, world: int, batch: int
) -> None:
    split = open_split(corpus, "val")
    alone = score(model, split, Part(0, 1))
    parts = [score(model, split, Part(rank, world), batch) for rank in range(world)]
    assert sum(p.tokens for p in parts) == alone.tokens
    assert sum(p.bytes for p in parts) == alone.bytes
    assert sum(p.loss_sum for p in parts) == pytest.approx(alone.loss_sum, rel=1e-6)


def test_under_fsdp_every_process_does_as_many_batches(corpus: Path, model: GPT) -> None:
    """Each takes part in the forward of all others: one batch more on one of them is a hang."""
    split = open_split(corpus, "val")
    alone, parts, counts = score(model, split, Part(0, 1)), [], []
    for rank in range(3):
        part, beats = Part(rank, 3), list[int]()
        part.distributed_type = DistributedType.FSDP
        parts.append(score(model, split, part, beat=lambda beats=beats: beats.append(1)))
        counts.append(len(beats))
    assert len(set(counts)) == 1
    assert (sum(p.loss_sum for p in parts), sum(p.tokens for p in parts)) == (
        alone.loss_sum,
        alone.tokens,
    )


@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_another_number_of_processes_gives_the_same_bits(
    corpus: Path, model: GPT, world: int
) -> None:
    split = open_split(corpus, "val")
    alone = score(model, split, Part(0, 1))
    parts = [score(model, split, Part(rank, world)) for rank in range(world)]
    assert sum(p.loss_sum for p in parts) == alone.loss_sum


def test_budget_takes_windows_spread_over_the_split(corpus: Path) -> None:
    split = open_split(corpus, "train")
    some = windows(split, 32, 320)
    assert len(some) == 10
    assert {0, len(split.lengths) - 1} <= set(some[:, 0].tolist())
    every = {tuple(w) for w in windows(split, 32, None).tolist()}
    assert {tuple(w) for w in some.tolist()} <= every


def test_evaluation_leaves_no_trace(corpus: Path, model: GPT) -> None:
    model.train()
    before = torch.random.get_rng_state()
    first = score(model, open_split(corpus, "val"), Part(0, 1))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert model.training
    assert score(model, open_split(corpus, "val"), Part(0, 1)) == first  # dropout is off


def test_bits_per_byte_counts_the_bytes_of_the_targets() -> None:
    found = Score(loss_sum=8 * math.log(2), tokens=2, bytes=4)
    assert found.bits_per_byte == pytest.approx(2)
    assert found.loss == pytest.approx(4 * math.log(2))
    assert found.perplexity == pytest.approx(16)


def test_overflowing_perplexity_is_infinite() -> None:
    assert Score(1e6, 1, 1).perplexity == math.inf


def test_token_beyond_the_vocabulary_is_refused(corpus: Path, model: GPT) -> None:
    with pytest.raises(DataError, match="beyond the vocabulary of 90"):
        evaluate(
            model,
            open_split(corpus, "val"),
            Part(0, 1),  # type: ignore[arg-type]
            batch_size=4,
            block_size=32,
            tokens=None,
            token_bytes=BYTES[:90],
        )
