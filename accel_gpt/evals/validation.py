"""Loss over fixed tokens of a split: the same ones every time, at any number of processes.

Legend: B micro-batch, T block_size, W windows evaluated.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn

from accel_gpt.data.loader import check_tokens
from accel_gpt.data.shards import Split
from accel_gpt.errors import DataError
from accel_gpt.model.documents import separate
from accel_gpt.model.loss import IGNORE
from accel_gpt.plan import Plan
from accel_gpt.run.corpus import Corpus


@dataclass(frozen=True)
class Score:
    """Sums over the evaluated targets."""

    loss_sum: float  # nats
    tokens: int
    bytes: float

    @property
    def loss(self) -> float:
        """Mean over targets, in nats per token."""
        return self.loss_sum / self.tokens

    @property
    def perplexity(self) -> float:
        """exp(loss), infinite where that overflows."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def bits_per_byte(self) -> float:
        """Total bits over the UTF-8 bytes of the targets: comparable over tokenizers."""
        return self.loss_sum / math.log(2) / (self.bytes or 1)


def evaluate_splits(
    model: nn.Module,
    corpus: Corpus,
    accelerator: Accelerator,
    plan: Plan,
    tokens: int | None,
    beat: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """The eval/ figures of a record: both splits by the same method; a collective.

    Of several sources each has its share of `tokens` and of the means; `eval/val_loss/NAME` is the
    loss of each. `beat` is called with each batch.
    """
    scores = {
        name: [
            evaluate(
                model,
                part.split,
                accelerator,
                batch_size=plan.micro_batch_size,
                block_size=plan.block_size,
                tokens=None if tokens is None else max(1, round(tokens * part.share)),
                token_bytes=corpus.token_bytes,
                document_end=corpus.document_end,
                beat=beat,
            )
            for part in parts
        ]
        for name, parts in corpus.evaluated.items()
    }
    shares = {name: [part.share for part in parts] for name, parts in corpus.evaluated.items()}
    train, val = (weighted(scores[name], shares[name]) for name in ("train", "val"))
    figures = {
        "eval/train_loss": train.loss,
        "eval/val_loss": val.loss,
        "eval/val_perplexity": val.perplexity,
        "eval/val_bits_per_byte": val.bits_per_byte,
    }
    parts = corpus.evaluated["val"]
    if len(parts) > 1:
        each = zip(parts, scores["val"], strict=True)
        figures |= {f"eval/val_loss/{part.name}": score.loss for part, score in each}
    return figures


def weighted(scores: list[Score], shares: list[float]) -> Score:
    """The score of one token in the mean, each source having its share of it."""
    if len(scores) == 1:
        return scores[0]
    each = list(zip(scores, shares, strict=True))
    return Score(
        loss_sum=sum(share * score.loss for score, share in each),
        tokens=1,
        bytes=sum(share * score.bytes / score.tokens for score, share in each),
    )


def windows(split: Split, block_size: int, tokens: int | None) -> npt.NDArray[np.int64]:
    """(W, 2) shard and first token of the evaluated windows: in order, without overlap.

    All windows of the split, the shorter last one of each shard included, or as many as `tokens`
    hold, spread evenly over the split.
    """
    counts = -(-np.maximum(split.lengths - 1, 0) // block_size)
    total = int(counts.sum())
    if not total:
        raise DataError(f"the {split.name} split of {split.folder} has no two tokens in a row")
    wanted = total if tokens is None else min(total, max(1, tokens // block_size))
    index = np.arange(wanted, dtype=np.int64) * total // wanted
    ends = np.cumsum(counts)
    shard = np.searchsorted(ends, index, side="right")
    return np.stack([shard, (index - (ends - counts)[shard]) * block_size], axis=1)


def batches(
    split: Split,
    places: npt.NDArray[np.int64],
    batch_size: int,
    block_size: int,
    vocab_size: int,
    rounds: int | None = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """`(tokens, targets)`, each (B, T) int64, as many as `places` fill or `rounds` of them; what is
    missing is filled with ignored targets.
    """
    if rounds is None:
        rounds = -(-len(places) // batch_size)
    for first in range(0, rounds * batch_size, batch_size):
        tokens = np.zeros((batch_size, block_size), dtype=np.int64)
        targets = np.full((batch_size, block_size), IGNORE, dtype=np.int64)
        for row, (shard, start) in enumerate(places[first : first + batch_size].tolist()):
            size = min(block_size, int(split.lengths[shard]) - 1 - start)
            window = split.read(shard, start, size + 1)
            check_tokens(window, vocab_size, split.folder)
            tokens[row, :size], targets[row, :size] = window[:-1], window[1:]
        yield torch.from_numpy(tokens), torch.from_numpy(targets)


@torch.no_grad()
def evaluate(
    model: nn.Module,
    split: Split,
    accelerator: Accelerator,
    *,
    batch_size: int,
    block_size: int,
    tokens: int | None,
    token_bytes: npt.NDArray[np.int64],
    document_end: int | None = None,
    beat: Callable[[], None] = lambda: None,
) -> Score:
    """Score `model` on `split`, spread over all processes; a collective, with no random draw.

    `token_bytes`: (V,) UTF-8 bytes that each token stands for. `document_end`: the token at which
    attention and loss end, None: nowhere. `beat` is called with each batch.
    """
    training = model.training
    model.eval()
    rank, world, device = accelerator.process_index, accelerator.num_processes, accelerator.device
    places = windows(split, block_size, tokens)
    mine = places[np.arange(len(places)) // batch_size % world == rank]  # whole batches: one sum
    sharded = accelerator.distributed_type == DistributedType.FSDP  # all take part in each forward
    rounds = -(-len(places) // (batch_size * world)) if sharded else None
    losses, counts, size = [], [], 0
    for inputs, targets in batches(split, mine, batch_size, block_size, len(token_bytes), rounds):
        beat()
        documents = None
        if document_end is not None:
            targets, documents = separate(inputs, targets, document_end)
            documents = documents.to(device)
        real = targets[targets != IGNORE]
        loss = model(inputs.to(device), targets.to(device), documents=documents)
        losses.append(loss.float())
        counts.append(len(real))
        size += int(token_bytes[real.numpy()].sum())
    model.train(training)
    weights = torch.tensor(counts, dtype=torch.float64)
    nats = (torch.stack(losses).cpu().double() @ weights).item() if losses else 0.0
    sums = torch.tensor([nats, sum(counts), size], dtype=torch.float64)  # on the CPU: MPS has none
    if world > 1:
        sums = accelerator.reduce(sums.to(device), "sum").cpu()
    nats, count, size = sums.tolist()
    if not count:
        raise DataError(
            f"the {split.name} split of {split.folder} has no token to predict: it holds nothing "
            "but end-of-text"
        )
    return Score(nats, int(count), int(size))
