"""The loader: ranks simulated in one process, the same windows at any layout, errors are raised."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from accel_gpt.config.plan import Plan
from accel_gpt.data.foreign import DataFolder
from accel_gpt.data.loader import Loader, read_sequences
from accel_gpt.data.mixture import Mixture
from accel_gpt.data.shards import open_split
from accel_gpt.data.sources import Source
from accel_gpt.data.tokenizer import load_tokenizer
from accel_gpt.errors import DataError

CPU = torch.device("cpu")
Start = Callable[..., Loader]


@pytest.fixture
def start(corpus: Path) -> Start:
    split = open_split(corpus, "train")

    def loader(
        rank: int = 0, world: int = 1, micro: int = 12, position: int = 0, vocab: int = 257
    ) -> Loader:
        folder = DataFolder(corpus)
        source = Source("corpus", str(corpus), 1.0, split, load_tokenizer(corpus), folder)
        mixture = Mixture((source,), 32, "global", 1, 1)
        plan = Plan(world, micro, 32, 1, 9, 0, 9)
        return Loader(read_sequences(mixture, plan, vocab, rank, position), CPU)

    return loader


def take(loader: Loader, count: int) -> list[Tensor]:
    """Return whole windows (T + 1 tokens) of the first `count` micro-batches, row by row."""
    rows: list[Tensor] = []
    for _ in range(count):
        tokens, targets = next(loader)
        assert tokens.dtype == targets.dtype == torch.int64
        assert torch.equal(tokens[:, 1:], targets[:, :-1])
        rows.extend(torch.cat([tokens, targets[:, -1:]], dim=1))
    loader.close()
    assert not loader.thread.is_alive()
    return rows


@pytest.mark.parametrize(("world", "micro"), [(1, 4), (2, 6), (3, 4), (4, 3)])
def test_global_batch_is_the_same_at_any_layout(start: Start, world: int, micro: int) -> None:
    steps = 72 // (world * micro)
    rows = [take(start(rank, world, micro), steps) for rank in range(world)]
    woven = [
        rows[r][step * micro + i]
        for step in range(steps)
        for r in range(world)
        for i in range(micro)
    ]
    assert torch.equal(torch.stack(woven), torch.stack(take(start(), 6)))


@pytest.mark.parametrize("position", [12, 552, 2400])  # also across epochs: 549 windows each
def test_starting_anywhere_equals_reading_up_to_there(start: Start, position: int) -> None:
    through = take(start(), position // 12 + 2)[position:]
    assert torch.equal(torch.stack(take(start(position=position), 2)), torch.stack(through))


def test_the_first_token_beyond_the_vocabulary_is_refused(start: Start) -> None:
    """On a GPU a kernel assertion would fail without naming the data."""
    with pytest.raises(
        DataError, match="holds token 121 at index 48, beyond the vocabulary of 121"
    ):
        next(start(vocab=121))
    next(start(vocab=122))


def test_a_chunk_is_read_before_it_is_asked_for() -> None:
    ahead = threading.Event()

    def chunks() -> Iterator[np.ndarray[Any, Any]]:
        yield np.zeros((1, 1, 3), np.uint16)
        ahead.set()
        yield np.zeros((1, 1, 3), np.uint16)

    loader = Loader(chunks(), CPU)
    assert ahead.wait(60)
    loader.close()


def test_the_wait_for_a_batch_is_counted() -> None:
    may_read = threading.Event()

    def chunks() -> Iterator[Any]:
        may_read.wait(5)
        while True:
            yield np.zeros((1, 4, 9), np.uint16)

    loader = Loader(chunks(), CPU)
    threading.Timer(0.02, may_read.set).start()
    next(loader)
    assert loader.waited > 0
    waited = loader.waited
    assert loader.fetch(0)  # takes nothing, and waits for nothing
    assert loader.waited == waited
    assert loader.take_wait() == waited
    assert loader.take_wait() == 0
    loader.close()


@pytest.mark.gpu
def test_batches_reach_a_gpu_from_pinned_memory_without_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pinned, waits = [], []
    plain = Tensor.to

    def copy(rows: Tensor, *to: Any, **how: Any) -> Tensor:
        pinned.append(rows.is_pinned())
        waits.append(not how.get("non_blocking"))
        return plain(rows, *to, **how)

    loader = Loader(iter([np.arange(6, dtype=np.uint16).reshape(2, 1, 3)]), torch.device("cuda"))
    monkeypatch.setattr(Tensor, "to", copy)
    for first in (0, 3):
        tokens, targets = next(loader)
        assert (tokens.tolist(), targets.tolist()) == (
            [[first, first + 1]],
            [[first + 1, first + 2]],
        )
    assert (pinned, waits) == ([True] * 2, [False] * 2)
    assert tokens.is_cuda
