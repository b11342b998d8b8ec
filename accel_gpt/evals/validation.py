"""Compute the loss over fixed tokens of a split, the same tokens on any number of ranks.

Shapes: B batch, T tokens, S evaluated sequences, V vocabulary.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor

from accel_gpt.data.corpus import Corpus, EvalSplit
from accel_gpt.data.loader import check_tokens
from accel_gpt.data.shards import Split, Tokens
from accel_gpt.data.tokenizer import Tokenizer
from accel_gpt.errors import AccelGPTError, DataError, require
from accel_gpt.launch.ranks import all_ranks
from accel_gpt.model.gpt import evaluating
from accel_gpt.model.language_model import LanguageModel
from accel_gpt.model.loss import IGNORE
from accel_gpt.model.targets import TargetMask

ValidationBatch = tuple[Sequence[int], int, int]  # numbers of the sequences, B, T
# Called before each batch with the numbers of completed batches and of all batches, equally often
# on all ranks. If it raises an error, it must do so on all ranks together.
OnProgress = Callable[[int, int], object]
EVERY_TARGET = TargetMask()
CHECKED_SEQUENCES = 8  # most sequences that a check of --code compares; assumption
TOLD_SEQUENCES = 64  # whose kept targets are told at the start; assumption


def ignore_progress(done: int, total: int) -> None:
    """Do nothing."""


@dataclass(frozen=True)
class Score:
    """Sums over the evaluated targets."""

    loss_sum: float  # nats
    tokens: int
    bytes: float
    loss_se: float = math.nan  # standard error of `loss`; NaN for only one sequence
    bits_per_byte_se: float = math.nan

    @property
    def loss(self) -> float:
        """Return the mean loss over targets, in nats per token."""
        return self.loss_sum / self.tokens

    @property
    def bits_per_byte(self) -> float:
        """Return the loss in bits per UTF-8 byte of the targets; NaN if the bytes are unknown.

        The value is comparable between tokenizers.
        """
        return self.loss_sum / math.log(2) / (self.bytes or math.nan)

    def metrics(self, split: str, source: str | None = None) -> dict[str, float]:
        """Return the known eval/ metrics of a split, or of a named source in it."""
        values = {"loss": self.loss}
        if not math.isnan(self.loss_se):
            values["loss_se"] = self.loss_se
        if source is None:
            values["perplexity"] = math.exp(self.loss) if self.loss < 700 else math.inf
        if not math.isnan(self.bits_per_byte):
            values["bits_per_byte"] = self.bits_per_byte
        if source is None and not math.isnan(self.bits_per_byte_se):
            values["bits_per_byte_se"] = self.bits_per_byte_se
        suffix = f"/{source}" if source else ""
        return {f"eval/{split}_{name}{suffix}": value for name, value in values.items()}


def score_splits(
    model: LanguageModel,
    corpus: Corpus,
    accelerator: Accelerator,
    batch_size: int,
    block_size: int,
    on_progress: OnProgress = ignore_progress,
) -> dict[str, float]:
    """Compute the eval/ metrics of all splits in `corpus.evaluated`; a collective.

    If a split has several sources, its metrics are means weighted by the shares of the sources.
    `eval/val_loss/NAME` is the loss of one source. `batch_size`: sequences per rank and forward
    pass. `block_size`: their length.
    """
    metrics: dict[str, float] = {}
    named: dict[str, float] = {}
    for split, sources in corpus.evaluated.items():
        scores = []
        for source in sources:
            score = score_source(
                model=model,
                source=source,
                accelerator=accelerator,
                batch_size=batch_size,
                block_size=block_size,
                tokenizer=corpus.tokenizer,
                target_mask=corpus.target_mask,
                on_progress=on_progress,
            )
            scores.append(score)
            if split == "val" and source.name:
                named |= score.metrics(split, source.name)
        mean = weighted_mean(scores, [source.share for source in sources])
        metrics |= mean.metrics(split)
    return metrics | named


def weighted_mean(scores: Sequence[Score], shares: Sequence[float]) -> Score:
    """Return the score of an average token, with sources weighted by `shares`; 0: left out."""
    each = [(score, share) for score, share in zip(scores, shares, strict=True) if share]
    if len(each) == 1:
        return each[0][0]
    bytes_per_token = sum(share * score.bytes / score.tokens for score, share in each)
    loss = sum(share * score.loss for score, share in each)
    # ignore the error of bytes per token, which vary little within a source
    error = math.sqrt(sum((share * score.loss_se) ** 2 for score, share in each))
    return Score(
        loss_sum=loss,
        tokens=1,
        bytes=bytes_per_token,
        loss_se=error,
        bits_per_byte_se=error / math.log(2) / (bytes_per_token or math.nan),
    )


def score_source(
    model: LanguageModel,
    source: EvalSplit,
    accelerator: Accelerator,
    batch_size: int,
    block_size: int,
    tokenizer: Tokenizer,
    target_mask: TargetMask,
    on_progress: OnProgress = ignore_progress,
) -> Score:
    """Score a model on one source, in sequences of `block_size`; a collective."""
    split = source.split
    token_bytes = np.zeros(model.vocab_size)
    sizes = tokenizer.bytes_within(split)[: model.vocab_size]
    token_bytes[: len(sizes)] = sizes
    positions = eval_sequences(split, block_size, source.tokens)
    S = len(positions)

    def read(number: int) -> tuple[npt.NDArray[np.integer], int]:
        shard, start = positions[number].tolist()
        tokens = read_sequence(split, shard, start, block_size)
        file = split.path(shard)
        check_tokens(tokens[None], model.vocab_size, lambda _: (file, start))
        return tokens, len(tokens) - 1

    batches: list[ValidationBatch] = []
    for first in range(0, S, batch_size):
        numbers = range(first, min(first + batch_size, S))
        batches.append((numbers, batch_size, block_size))
    table = score_sequences(
        model=model,
        batches=batches,
        read=read,
        accelerator=accelerator,
        token_bytes=token_bytes,
        target_mask=target_mask,
        on_progress=on_progress,
    )
    nats, targets, target_bytes = table.sum(axis=0).tolist()
    if not targets:
        raise DataError(
            f"the {split.name} split of {split.folder} has no token to predict: data.document_mask "
            "or targets() of --code ignores all its evaluated tokens; prepare more text, or ignore "
            "fewer"
        )
    return Score(
        loss_sum=nats,
        tokens=int(targets),
        bytes=target_bytes,
        loss_se=ratio_error(table[:, 0], table[:, 1]),
        bits_per_byte_se=ratio_error(table[:, 0], table[:, 2]) / math.log(2),
    )


def check_evaluated(corpus: Corpus, block_size: int) -> None:
    """Raise `DataError` if a source has no sequence. Called before a model is built.

    Raises `UserError` if `targets()` of --code keeps other targets of a sequence alone than in a
    batch.
    """
    for sources in corpus.evaluated.values():
        for source in sources:
            eval_sequences(source.split, block_size, source.tokens)
    own = corpus.target_mask.config.own
    if own.targets is None:
        return
    batch = first_sequences(corpus.evaluated["val"][0], block_size, CHECKED_SEQUENCES)
    together, _ = corpus.target_mask.apply(*batch)
    for row, kept in enumerate(together):
        alone, _ = corpus.target_mask.apply(*(part[row : row + 1] for part in batch))
        require(
            torch.equal(alone[0], kept),
            f"{own.place('targets')} keeps other targets of a sequence alone than in a batch, so "
            "the loss depends on the micro-batch; compute each sequence's mask from its tokens "
            "alone, without random numbers",
        )


def describe_targets(corpus: Corpus, block_size: int) -> str:
    """Return the line that says how many targets `targets()` of --code keeps."""
    batch = first_sequences(corpus.evaluated["train"][0], block_size, TOLD_SEQUENCES)
    plain = TargetMask(corpus.target_mask.document_end)
    all_targets = int((plain.apply(*batch)[0] != IGNORE).sum())
    kept = int((corpus.target_mask.apply(*batch)[0] != IGNORE).sum())
    return (
        f"targets  {corpus.target_mask.config.own.place('targets')} keeps {kept:,} of "
        f"{all_targets:,} targets ({kept / max(all_targets, 1):.1%}) in {len(batch[0])} train "
        "sequences"
    )


def first_sequences(source: EvalSplit, block_size: int, count: int) -> tuple[Tensor, Tensor]:
    """Return tokens and targets (B, T) of the first evaluated sequences, at most `count`."""
    positions = eval_sequences(source.split, block_size, source.tokens)[:count].tolist()
    read = [read_sequence(source.split, shard, start, block_size) for shard, start in positions]
    return collate([(tokens, len(tokens) - 1) for tokens in read], len(read), block_size)


def read_sequence(split: Split, shard: int, start: int, block_size: int) -> Tokens:
    """Read one evaluated sequence: its inputs and one more token, at most block_size + 1."""
    size = min(block_size, int(split.lengths[shard]) - 1 - start)
    return split.read(shard, start, size + 1)


def eval_sequences(split: Split, block_size: int, tokens: int | None) -> npt.NDArray[np.int64]:
    """Return shard and offset (S, 2) of the evaluated sequences, in order, without overlap.

    Returns as many sequences as fit in `tokens` (at least one), spread evenly over the split. If
    `tokens` is None, returns all, including the shorter last sequence of each shard.
    """
    counts = -(-np.maximum(split.lengths - 1, 0) // block_size)
    total = int(counts.sum())
    if not total:
        raise DataError(
            f"the {split.name} split of {split.folder} cannot be evaluated: no shard has two "
            "tokens; prepare more text"
        )
    wanted = total if tokens is None else min(total, max(1, tokens // block_size))
    index = np.arange(wanted, dtype=np.int64) * total // wanted
    ends = np.cumsum(counts)
    shard = np.searchsorted(ends, index, side="right")
    return np.stack([shard, (index - (ends - counts)[shard]) * block_size], axis=1)


def score_sequences(
    model: LanguageModel,
    batches: Sequence[ValidationBatch],
    read: Callable[[int], tuple[Sequence[int] | npt.NDArray[np.integer], int]],
    accelerator: Accelerator,
    token_bytes: npt.NDArray[np.float64],
    target_mask: TargetMask = EVERY_TARGET,
    on_progress: OnProgress = ignore_progress,
) -> npt.NDArray[np.float64]:
    """Return nats, number of targets and bytes of targets (S, 3) for each sequence in `batches`.

    A collective. Uses no random numbers, and returns the same bits on any number of ranks. If
    `read` raises an error on one rank, all ranks raise an error.

    `read` returns the tokens of a sequence, and how many at its end are targets. `token_bytes` (V,)
    holds the UTF-8 bytes of each token.

    On CUDA, nothing waits for the device before the last batch: the host prepares the next batches
    meanwhile.
    """
    # each rank takes whole batches, so that a batch is the same at any world size
    world_size = accelerator.num_processes
    device = accelerator.device
    mine = list(batches[accelerator.process_index :: world_size])
    rounds = math.ceil(len(batches) / world_size)
    if accelerator.distributed_type == DistributedType.FSDP:  # a forward pass needs all ranks
        _, B, T = batches[0]
        empty: ValidationBatch = ([], B, T)
        mine += [empty] * (rounds - len(mine))
    table = np.zeros((sum(len(numbers) for numbers, _, _ in batches), 3))
    # One tensor for all batches. Keeping a small tensor of each batch would fragment the memory
    # that the batch frees: the process then grows by 33 MB per batch of configs/quickstart.yaml.
    losses = torch.zeros(len(table), device=device)
    done = 0  # sequences
    failure: AccelGPTError | None = None
    with evaluating(model):
        for turn in range(rounds):
            on_progress(turn, rounds)
            if turn == len(mine):  # other ranks have one more batch
                break
            numbers, B, T = mine[turn]
            sequences = []
            try:
                sequences = [read(number) for number in numbers]
            except AccelGPTError as error:  # raised below, after the last batch of all ranks
                failure = failure or error
            inputs, targets = collate(sequences, B, T)
            targets, documents = target_mask.apply(inputs, targets)
            if documents is not None:
                documents = to_device(documents, device)
            loss = model(
                to_device(inputs, device),
                to_device(targets, device),
                documents=documents,
                per_sequence=True,
            )  # (B,) nats of each sequence
            losses[done : done + len(numbers)] = loss[: len(numbers)]
            done += len(numbers)
            valid = (targets != IGNORE).numpy()
            sizes = np.where(valid, token_bytes[np.where(valid, targets.numpy(), 0)], 0)
            counts = np.stack([valid.sum(-1), sizes.sum(-1)], axis=-1)
            table[list(numbers), 1:] = counts[: len(numbers)]
    with all_ranks():
        if failure:
            raise failure
    own = [number for numbers, _, _ in mine for number in numbers]
    table[own, 0] = losses[:done].cpu().double().numpy()
    if world_size == 1:  # on the CPU: MPS has no float64
        return table
    # each row is zero on all ranks except one, so the sum is exact
    summed: Tensor = accelerator.reduce(torch.from_numpy(table).to(device), "sum")
    return summed.cpu().numpy()


def collate(
    sequences: Sequence[tuple[Sequence[int] | npt.NDArray[np.integer], int]], B: int, T: int
) -> tuple[Tensor, Tensor]:
    """Return `(tokens, targets)`, each (B, T) int64, padded with ignored targets."""
    tokens = np.zeros((B, T), dtype=np.int64)
    targets = np.full((B, T), IGNORE, dtype=np.int64)
    for row, (sequence, count) in enumerate(sequences):
        size = len(sequence) - 1
        tokens[row, :size] = sequence[:-1]
        targets[row, size - count : size] = sequence[-count:]
    return torch.from_numpy(tokens), torch.from_numpy(targets)


def to_device(batch: Tensor, device: torch.device) -> Tensor:
    """Copy a batch from the host to `device`; on CUDA, without waiting for the device.

    The copy reads pinned memory after this function has returned. PyTorch reuses that memory only
    when the copy is done (ATen/native/cuda/Copy.cu, `record_event`).
    """
    if device.type != "cuda":
        return batch.to(device)
    return batch.pin_memory().to(device, non_blocking=True)


def ratio_error(above: npt.NDArray[np.float64], below: npt.NDArray[np.float64]) -> float:
    """Return the standard error of sum(above) / sum(below) over S sequences, both (S,).

    Source: Cochran, Sampling Techniques, 3rd ed. 1977, section 2.11, without the correction for a
    finite population. For sequences of equal size, this is the standard deviation divided by
    sqrt(S).
    """
    total = below.sum()
    S = len(below)
    if S < 2 or not total:
        return math.nan
    residuals = above - above.sum() / total * below
    return float(np.sqrt(S / (S - 1) * (residuals**2).sum()) / total)
