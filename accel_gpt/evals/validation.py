"""Loss over fixed tokens of a split: the same ones every time, at any number of processes.

Shapes: B batch, T block_size, S sequences evaluated.
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

from accel_gpt.data.corpus import Corpus, EvalSplit
from accel_gpt.data.loader import check_tokens
from accel_gpt.data.shards import Split
from accel_gpt.data.tokenizer import Tokenizer
from accel_gpt.errors import DataError
from accel_gpt.model.documents import separate
from accel_gpt.model.gpt import GPT, evaluating
from accel_gpt.model.loss import IGNORE


@dataclass(frozen=True)
class Score:
    """Sums over the evaluated targets."""

    loss_sum: float  # nats
    tokens: int
    bytes: float
    loss_se: float = math.nan  # standard error of `loss`; NaN for a single sequence
    bits_per_byte_se: float = math.nan

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
        """Total bits over the UTF-8 bytes of the targets: comparable over tokenizers.

        NaN where the bytes are not known.
        """
        return self.loss_sum / math.log(2) / (self.bytes or math.nan)


def evaluate_splits(
    model: GPT,
    corpus: Corpus,
    accelerator: Accelerator,
    batch_size: int,
    beat: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """The eval/ metrics of a record, for both splits; a collective.

    With several sources the means are weighted by their shares; `eval/val_loss/NAME` is the loss of
    one. `batch_size`: sequences per rank and forward pass. `beat` is called with each batch.
    """
    settings = (accelerator, batch_size, corpus.tokenizer, corpus.document_end, beat)
    scores = {
        name: [evaluate_part(model, part, *settings) for part in parts]
        for name, parts in corpus.evaluated.items()
    }
    metrics: dict[str, float] = {}
    for name, parts in corpus.evaluated.items():
        shares = [part.share for part in parts]
        metrics |= split_metrics(name, weighted(scores[name], shares))
    for part, score in zip(corpus.evaluated.get("val", ()), scores.get("val", ()), strict=True):
        if part.name:
            metrics |= named_metrics(score, part.name)
    return metrics


def evaluate_part(
    model: GPT,
    part: EvalSplit,
    accelerator: Accelerator,
    batch_size: int,
    tokenizer: Tokenizer,
    document_end: int | None,
    beat: Callable[[], None] = lambda: None,
) -> Score:
    """Score a model on one source, in sequences of its block_size; a collective."""
    token_bytes = np.zeros(model.vocab_size)
    sizes = tokenizer.bytes_within(part.split)[: model.vocab_size]
    token_bytes[: len(sizes)] = sizes
    return evaluate(
        model,
        part.split,
        accelerator,
        batch_size=batch_size,
        block_size=model.config.block_size,
        tokens=part.tokens,
        token_bytes=token_bytes,
        document_end=document_end,
        beat=beat,
    )


def split_metrics(name: str, score: Score) -> dict[str, float]:
    """Metrics of a split."""
    return known(
        {
            f"eval/{name}_loss": score.loss,
            f"eval/{name}_loss_se": score.loss_se,
            f"eval/{name}_perplexity": score.perplexity,
            f"eval/{name}_bits_per_byte": score.bits_per_byte,
            f"eval/{name}_bits_per_byte_se": score.bits_per_byte_se,
        }
    )


def named_metrics(score: Score, name: str) -> dict[str, float]:
    """Metrics of one of several val sets."""
    return known(
        {
            f"eval/val_loss/{name}": score.loss,
            f"eval/val_loss_se/{name}": score.loss_se,
            f"eval/val_bits_per_byte/{name}": score.bits_per_byte,
        }
    )


def known(metrics: dict[str, float]) -> dict[str, float]:
    """Drop the standard errors of a single sequence, and bits per byte of unknown bytes."""
    return {
        k: v
        for k, v in metrics.items()
        if not math.isnan(v) or ("_se" not in k and "_bits_per_byte" not in k)
    }


def weighted(scores: list[Score], shares: list[float]) -> Score:
    """The score of an average token, the sources weighted by `shares`."""
    if len(scores) == 1:
        return scores[0]
    each = list(zip(scores, shares, strict=True))
    bytes_per_token = sum(share * score.bytes / score.tokens for score, share in each)
    loss = sum(share * score.loss for score, share in each)
    # bytes per token vary little within a source: only the errors of the losses count
    error = math.sqrt(sum((share * score.loss_se) ** 2 for score, share in each))
    bits_error = error / math.log(2) / (bytes_per_token or math.nan)
    return Score(loss, 1, bytes_per_token, error, bits_error)


def eval_sequences(split: Split, block_size: int, tokens: int | None) -> npt.NDArray[np.int64]:
    """Shard and offset (S, 2) of the evaluated sequences, in order, without overlap.

    All sequences of the split, the shorter last one of each shard included, or as many as fit in
    `tokens`, spread evenly over the split.
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
    positions: npt.NDArray[np.int64],
    batch_size: int,
    block_size: int,
    vocab_size: int,
    rounds: int | None = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield `(tokens, targets)`, each (B, T) int64, of the sequences at `positions`.

    `rounds`: number of batches, of which the last are empty; None: as many as are needed. Padding
    has ignored targets.
    """
    if rounds is None:
        rounds = -(-len(positions) // batch_size)
    for first in range(0, rounds * batch_size, batch_size):
        tokens = np.zeros((batch_size, block_size), dtype=np.int64)
        targets = np.full((batch_size, block_size), IGNORE, dtype=np.int64)
        for row, (shard, start) in enumerate(positions[first : first + batch_size].tolist()):
            size = min(block_size, int(split.lengths[shard]) - 1 - start)
            sequence = split.read(shard, start, size + 1)
            check_tokens(sequence, vocab_size, split.folder)
            tokens[row, :size], targets[row, :size] = sequence[:-1], sequence[1:]
        yield torch.from_numpy(tokens), torch.from_numpy(targets)


def evaluate(
    model: nn.Module,
    split: Split,
    accelerator: Accelerator,
    *,
    batch_size: int,
    block_size: int,
    tokens: int | None,
    token_bytes: npt.NDArray[np.float64],
    document_end: int | None = None,
    beat: Callable[[], None] = lambda: None,
) -> Score:
    """Score `model` on `split`, spread over all ranks; a collective without random numbers.

    `token_bytes`: (V,) UTF-8 bytes of each token. `document_end`: the token at which attention and
    loss end, None: nowhere. `beat` is called with each batch.
    """
    rank, world, device = accelerator.process_index, accelerator.num_processes, accelerator.device
    positions = eval_sequences(split, block_size, tokens)
    # whole batches for each rank: a sequence is computed beside the same ones at any world size
    mine = np.arange(len(positions)) // batch_size % world == rank
    sharded = accelerator.distributed_type == DistributedType.FSDP  # all ranks in each forward
    rounds = -(-len(positions) // (batch_size * world)) if sharded else None
    losses, counts = [], []
    read = batches(split, positions[mine], batch_size, block_size, len(token_bytes), rounds)
    with evaluating(model):
        for inputs, targets in read:
            beat()
            documents = None
            if document_end is not None:
                targets, documents = separate(inputs, targets, document_end)
                documents = documents.to(device)
            valid = (targets != IGNORE).numpy()
            size = np.where(valid, token_bytes[np.where(valid, targets.numpy(), 0)], 0).sum(-1)
            losses.append(
                model(inputs.to(device), targets.to(device), documents=documents, per_sequence=True)
            )
            counts.append(np.stack([valid.sum(-1), size], axis=-1))
    table = np.zeros((len(positions), 3))
    if losses:
        count = int(mine.sum())
        table[mine, 0] = torch.cat(losses).float().cpu().double().numpy()[:count]
        table[mine, 1:] = np.concatenate(counts)[:count]
    score = score_of(all_reduce_rows(table, accelerator))
    if score is None:
        raise DataError(
            f"the {split.name} split of {split.folder} has no token to predict: it holds nothing "
            "but end-of-text"
        )
    return score


def all_reduce_rows(
    table: npt.NDArray[np.float64], accelerator: Accelerator
) -> npt.NDArray[np.float64]:
    """All-reduce tables in which each rank fills rows of its own.

    A number plus zeros is that number: all ranks have the same bits, at any world size.
    """
    if accelerator.num_processes == 1:  # on the CPU: MPS has no float64
        return table
    summed: Tensor = accelerator.reduce(torch.from_numpy(table).to(accelerator.device), "sum")
    return summed.cpu().numpy()


def score_of(table: npt.NDArray[np.float64]) -> Score | None:
    """The score of sequences (S, 3): nats, targets and bytes of each; None without any target."""
    nats, count, size = table.sum(axis=0).tolist()
    if not count:
        return None
    return Score(
        nats,
        int(count),
        size,
        loss_se=ratio_error(table[:, 0], table[:, 1]),
        bits_per_byte_se=ratio_error(table[:, 0], table[:, 2]) / math.log(2),
    )


def ratio_error(above: npt.NDArray[np.float64], below: npt.NDArray[np.float64]) -> float:
    """Standard error of sum(above) / sum(below), both (S,), of S sequences drawn from many.

    Cochran, Sampling Techniques, 3rd ed. 1977, section 2.11, without the correction for a finite
    population; for sequences of equal size the standard deviation over the root of S.
    """
    total, S = below.sum(), len(below)
    if S < 2 or not total:
        return math.nan
    residuals = above - above.sum() / total * below
    return float(np.sqrt(S / (S - 1) * (residuals**2).sum()) / total)
