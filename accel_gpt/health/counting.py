"""Predict validation text by counting: n-gram models over the train tokens. No network learns here.

An n-gram model mixes the frequency of a token after its last n - 1 tokens with the model of order
n - 1 (Jelinek and Mercer 1980). The weight of a frequency depends on how often the tokens before
were seen, in powers of two. It is fitted by expectation maximization on one half of the validation
sequences, and used on the other half.

Legend: M tokens of all validation sequences, n order of a model.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from accel_gpt.data.corpus import Corpus
from accel_gpt.evals.validation import eval_sequences, read_sequence
from accel_gpt.health.windows import Counts, Hasher, Keys, KeyTable

Floats = npt.NDArray[np.float64]

HIGHEST_ORDER = 5
ROUNDING = 1e-6  # of a weighted count
FITTING_STEPS = 30  # of expectation maximization; the change is then below 1e-4 nats
NAMES = MappingProxyType({1: "unigram", 2: "bigram", HIGHEST_ORDER: "5-gram"})


@dataclass(frozen=True)
class EvaluatedTokens:
    """The sequences on which the run computes its val loss, one after the other."""

    tokens: npt.NDArray[np.int64]  # (M,)
    place: npt.NDArray[np.int64]  # (M,): index of each token in its sequence
    sequence: npt.NDArray[np.int64]  # (M,): number of its sequence
    weight: Floats  # (M,): of each target in the mean loss; they sum to 1
    bytes: Floats  # (M,): UTF-8 bytes of each token; NaN if they are not known

    @property
    def targets(self) -> npt.NDArray[np.int64]:
        """Return the indices of the targets: all tokens but the first of a sequence."""
        return np.flatnonzero(self.place > 0)

    def windows(self, n: int) -> npt.NDArray[np.int64]:
        """Return the starts of the windows of `n` tokens that lie in one sequence."""
        ends = np.arange(n - 1, len(self.tokens))
        return ends[self.place[ends] >= n - 1] - (n - 1)


def evaluated_tokens(corpus: Corpus, block_size: int) -> EvaluatedTokens:
    """Read the sequences whose mean loss is eval/val_loss, not those that are only followed."""
    rows: list[npt.NDArray[np.int64]] = []
    weights: list[Floats] = []
    sizes: list[Floats] = []
    sources = [source for source in corpus.evaluated["val"] if source.share]
    total_share = sum(source.share for source in sources)
    for source in sources:
        positions = eval_sequences(source.split, block_size, source.tokens).tolist()
        read = [read_sequence(source.split, shard, start, block_size) for shard, start in positions]
        found = [row.astype(np.int64) for row in read]
        targets = sum(len(row) - 1 for row in found)
        token_bytes = corpus.tokenizer.bytes_within(source.split)
        for row in found:
            rows.append(row)
            weights.append(np.full(len(row), source.share / total_share / targets))
            known = row < len(token_bytes)
            sizes.append(np.where(known, token_bytes[np.where(known, row, 0)], 0))
    lengths = [len(row) for row in rows]
    return EvaluatedTokens(
        tokens=np.concatenate(rows),
        place=np.concatenate([np.arange(length) for length in lengths]),
        sequence=np.repeat(np.arange(len(rows)), lengths),
        weight=np.concatenate(weights),
        bytes=np.concatenate(sizes),
    )


def ngram_tables(val: EvaluatedTokens, hasher: Hasher) -> tuple[Keys, dict[int, KeyTable]]:
    """Return the sums of prefixes of the validation tokens, and a table for each order."""
    sums = hasher.prefix(val.tokens)
    tables = {}
    for n in range(2, HIGHEST_ORDER + 1):
        tables[n] = KeyTable(hasher.keys(sums, n)[val.windows(n)])
    return sums, tables


def frequencies(
    val: EvaluatedTokens, sums: Keys, hasher: Hasher, tables: dict[int, KeyTable], unigrams: Counts
) -> list[Floats]:
    """Return how often the n tokens that end at each validation token occur, (M,) for each n.

    They occur 0 times if they are not all in the sequence.
    """
    found = [unigrams[val.tokens].astype(np.float64)]
    for n in range(2, HIGHEST_ORDER + 1):
        starts = val.windows(n)
        counts = np.zeros(len(val.tokens))
        counts[starts + n - 1] = tables[n].counts_of(hasher.keys(sums, n)[starts])
        found.append(counts)
    return found


def cross_entropies(
    val: EvaluatedTokens, counts: Sequence[Floats], tokens: float, vocab_size: int
) -> dict[str, float]:
    """Return the mean loss of the n-gram models in `NAMES`, in nats per target.

    `counts`: see `frequencies`. `tokens`: number of the counted tokens.
    """
    targets = val.targets
    weight = val.weight[targets]
    fold = val.sequence[targets] % 2
    if not fold.any() or fold.all():  # one sequence: its halves
        fold = (np.arange(len(targets)) * 2 // len(targets)).astype(np.int64)
    before = [np.full(len(targets), tokens)]  # how often the n - 1 tokens before the target occur
    before += [count[targets - 1] for count in counts[:-1]]
    p = np.full(len(targets), 1 / vocab_size)
    losses = {}
    for n in range(1, HIGHEST_ORDER + 1):
        seen = before[n - 1]
        known = seen > 0  # the counts of a mixture are weighted, so they may lie below 1
        frequency = np.divide(counts[n - 1][targets], seen, out=np.zeros(len(seen)), where=known)
        powers = np.log2(np.maximum(seen, 1)) + ROUNDING
        bucket = np.where(known, powers.astype(np.int64) + 1, 0)
        share = np.zeros(len(targets))
        for half in (0, 1):
            fitted = fit_shares(frequency, p, bucket, fold != half)
            share[fold == half] = fitted[bucket[fold == half]]
        p = share * frequency + (1 - share) * p
        if n in NAMES:
            losses[NAMES[n]] = float(-(weight * np.log(p)).sum() / weight.sum())
    return losses


def fit_shares(
    frequency: Floats, p: Floats, bucket: npt.NDArray[np.int64], chosen: npt.NDArray[np.bool_]
) -> Floats:
    """Return the share of `frequency` in its mix with `p` for each bucket, fitted on `chosen`.

    Bucket 0 was never seen. Two observations, one for each part, are added to each bucket.
    """
    buckets = int(bucket.max(initial=0)) + 1
    f = frequency[chosen]
    q = p[chosen]
    b = bucket[chosen]
    size = np.bincount(b, minlength=buckets) + 2
    shares = np.full(buckets, 0.5)
    shares[0] = 0
    for _ in range(FITTING_STEPS):
        mixed = shares[b] * f
        posterior = mixed / (mixed + (1 - shares[b]) * q)
        shares[1:] = ((np.bincount(b, posterior, minlength=buckets) + 1) / size)[1:]
    return shares
