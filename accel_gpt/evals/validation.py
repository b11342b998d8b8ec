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
    loss_se: float = math.nan  # standard error of `loss`; not known of a single window
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
    """The eval/ metrics of a record: both splits by the same method; a collective.

    Of several sources each has its share of the means; `eval/val_loss/NAME` is the loss of each.
    `batch_size`: windows per process and forward. `beat` is called with each batch.
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
    """The score of one source, on windows of as many tokens as the model reads; a collective."""
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
    """Without the standard errors of a single window, which has none, and bits of unknown bytes."""
    return {
        k: v
        for k, v in metrics.items()
        if not math.isnan(v) or ("_se" not in k and "_bits_per_byte" not in k)
    }


def weighted(scores: list[Score], shares: list[float]) -> Score:
    """The score of one token in the mean, each source having its share of it."""
    if len(scores) == 1:
        return scores[0]
    each = list(zip(scores, shares, strict=True))
    size = sum(share * score.bytes / score.tokens for score, share in each)
    loss = sum(share * score.loss for score, share in each)
    # bytes of a token differ little within a source: only the losses' errors are carried on
    error = math.sqrt(sum((share * score.loss_se) ** 2 for score, share in each))
    return Score(loss, 1, size, error, error / math.log(2) / (size or math.nan))


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
    """Score `model` on `split`, spread over all processes; a collective, with no random draw.

    `token_bytes`: (V,) UTF-8 bytes that each token stands for. `document_end`: the token at which
    attention and loss end, None: nowhere. `beat` is called with each batch.
    """
    rank, world, device = accelerator.process_index, accelerator.num_processes, accelerator.device
    places = windows(split, block_size, tokens)
    mine = np.arange(len(places)) // batch_size % world == rank  # whole batches: the same rows
    sharded = accelerator.distributed_type == DistributedType.FSDP  # all take part in each forward
    rounds = -(-len(places) // (batch_size * world)) if sharded else None
    losses, sizes = [], []
    read = batches(split, places[mine], batch_size, block_size, len(token_bytes), rounds)
    with evaluating(model):
        for inputs, targets in read:
            beat()
            documents = None
            if document_end is not None:
                targets, documents = separate(inputs, targets, document_end)
                documents = documents.to(device)
            real = (targets != IGNORE).numpy()
            size = np.where(real, token_bytes[np.where(real, targets.numpy(), 0)], 0).sum(-1)
            losses.append(
                model(inputs.to(device), targets.to(device), documents=documents, per_sequence=True)
            )
            sizes.append(np.stack([real.sum(-1), size], axis=-1))
    table = np.zeros((len(places), 3))
    if losses:
        count = int(mine.sum())
        table[mine, 0] = torch.cat(losses).float().cpu().double().numpy()[:count]
        table[mine, 1:] = np.concatenate(sizes)[:count]
    score = score_of(of_all(table, accelerator))
    if score is None:
        raise DataError(
            f"the {split.name} split of {split.folder} has no token to predict: it holds nothing "
            "but end-of-text"
        )
    return score


def of_all(table: npt.NDArray[np.float64], accelerator: Accelerator) -> npt.NDArray[np.float64]:
    """The sum of the tables of all processes, each of which fills rows of its own; a collective.

    A number and zeros give that number: every process has the same bits, however many they are.
    """
    if accelerator.num_processes == 1:  # on the CPU: MPS has no float64
        return table
    summed: Tensor = accelerator.reduce(torch.from_numpy(table).to(accelerator.device), "sum")
    return summed.cpu().numpy()


def score_of(table: npt.NDArray[np.float64]) -> Score | None:
    """The score of windows (W, 3): nats, targets and bytes of each; None where nothing counts."""
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
    """Standard error of sum(above) / sum(below), both (W,), of W windows drawn from many.

    Cochran, Sampling Techniques, 3rd ed. 1977, section 2.11, without the correction for a finite
    population; for windows of equal size the standard deviation over the root of W.
    """
    whole, windows = below.sum(), len(below)
    if windows < 2 or not whole:
        return math.nan
    rest = above - above.sum() / whole * below
    return float(np.sqrt(windows / (windows - 1) * (rest**2).sum()) / whole)
