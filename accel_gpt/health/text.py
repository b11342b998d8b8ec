"""Measure the text of a run without its model: what counting predicts, copies, ends, lost letters.

Writes `statistics.json` to the data folder, or to the run's folder if it has several sources or its
folder cannot be written. A second run with the same data and evaluation reads it.
"""

import contextlib
import hashlib
import json
import math
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from accel_gpt.config.experiment import Config
from accel_gpt.data.corpus import Corpus, open_corpus
from accel_gpt.data.shards import Ints, Split
from accel_gpt.data.tokenizer import Tokenizer
from accel_gpt.files import strict_json, write_file
from accel_gpt.health.counting import (
    NAMES,
    EvaluatedTokens,
    Floats,
    cross_entropies,
    evaluated_tokens,
    frequencies,
    ngram_tables,
)
from accel_gpt.health.windows import Hasher, Keys, KeyTable, Scan, chunks, scan
from accel_gpt.json_files import load_json_or_none
from accel_gpt.runs.folder import is_number

STATISTICS = "statistics.json"
VERSION = 2  # of what is computed
MOST_TOKENS = 100_000_000  # of the train split that are counted
WINDOW_TOKENS = 50  # Lee et al. 2022, arXiv 2107.06499: copies of 50 tokens
WINDOW_BYTES = 200  # about 50 tokens of GPT-2, for tokenizers with shorter tokens
MOST_WINDOWS = 2**14  # windows that are looked for in the train split; assumption
READ_AGAIN = 64  # train sequences that are decoded and encoded again; assumption
READ_AGAIN_TOKENS = 512  # of each


@dataclass(frozen=True)
class TextStatistics:
    """What the tokens of a run hold. A share is a number from 0 to 1."""

    train_tokens: int
    counted_tokens: int  # of the train split
    bytes_per_token: float | None  # of the validation text
    losses: dict[str, float]  # nats per target of models that count, see `NAMES`
    window: int  # tokens of a window
    val_in_train: float  # share of validation windows that stand in the train split
    repeated: float  # share of train windows that stand there once more
    used_tokens: int  # different tokens of the vocabulary
    most_frequent: str  # token
    most_frequent_share: float
    documents: int | None  # that an end-of-text token ends; None: the tokenizer has no such token
    median_document: int  # tokens
    copied_share: float  # share of tokens in exact copies of an earlier document
    unreadable: float  # share of characters that are U+FFFD, control characters or unknown tokens
    read_back: float  # share of tokens that the tokenizer gives again for their text

    @property
    def is_complete(self) -> bool:
        """Return whether all numbers are finite, and no loss is missing: a file may be edited."""
        numbers = [value for value in vars(self).values() if isinstance(value, int | float)]
        numbers += self.losses.values()
        return set(NAMES.values()) <= self.losses.keys() and all(map(is_number, numbers))

    @property
    def has_windows(self) -> bool:
        """Return whether a window is long enough to tell a copy from chance."""
        return self.window >= WINDOW_TOKENS

    @property
    def read(self) -> str:
        """Name the train text that was read."""
        if self.counted_tokens >= self.train_tokens:
            return "the train text"
        return f"the {self.counted_tokens:,} train tokens that were read"

    def leaked(self, sigma: float) -> float:
        """Estimate the share of the validation text that leaked into the train text.

        Text that repeats itself is no leak, so the share of repeated train windows is subtracted.
        If only a part of the train text was read, the difference is scaled up to the whole. It is 0
        if it is less than `sigma` standard errors.
        """
        difference = self.val_in_train - self.repeated
        variance = sum(share * (1 - share) for share in (self.val_in_train, self.repeated))
        if difference < sigma * math.sqrt(variance / MOST_WINDOWS):
            return 0.0
        return min(1.0, difference * self.train_tokens / self.counted_tokens)


def text_statistics(config: Config, run: Path) -> TextStatistics:
    """Read the statistics of the data of a run, or measure and store them.

    Raises the errors of `open_corpus`, and `DataError` if a shard cannot be read.
    """
    corpus = open_corpus(config)
    block_size = config.model.block_size
    key = statistics_key(corpus, block_size)
    places = [run / STATISTICS]
    sources = corpus.weighted_sources
    if len(sources) == 1 and sources[0].split.arrays is None:
        places.insert(0, sources[0].split.folder / STATISTICS)
    stored: dict[Path, dict[str, TextStatistics]] = {}
    for place in places:
        stored[place] = load_json_or_none(dict[str, TextStatistics], place) or {}
        if key in stored[place] and stored[place][key].is_complete:
            return stored[place][key]
    measured = measure(corpus, block_size)
    for place in places:
        content = {name: asdict(one) for name, one in {**stored[place], key: measured}.items()}
        with contextlib.suppress(OSError):  # a folder that cannot be written
            write_file(place, [strict_json(content, indent=1).encode()])
            break
    return measured


def statistics_key(corpus: Corpus, block_size: int) -> str:
    """Return a name for the train tokens and the evaluated tokens of a run."""
    val = [(p.split.fingerprint, p.share, p.tokens) for p in corpus.evaluated["val"]]
    train = [(source.split.fingerprint, source.weight) for source in corpus.weighted_sources]
    content = json.dumps([VERSION, train, val, block_size])
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def measure(corpus: Corpus, block_size: int) -> TextStatistics:
    """Measure the text of a run: one pass over at most `MOST_TOKENS` train tokens."""
    tokenizer = corpus.tokenizer
    val = evaluated_tokens(corpus, block_size)
    hasher = Hasher(corpus.vocab_size)
    n = window_length(val, block_size)
    looked_for = Windows(val, n, hasher, corpus)
    losses, unigrams, scans = count_tokens(corpus, val, hasher, looked_for)
    targets = val.targets
    mean_bytes = float((val.weight * val.bytes)[targets].sum() / val.weight[targets].sum())
    top = int(np.argmax(unigrams))
    documents, median, copied = count_documents(scans)
    unreadable, read_back = read_again(
        [source.split for source in corpus.weighted_sources], tokenizer
    )
    return TextStatistics(
        train_tokens=sum(source.split.tokens for source in corpus.weighted_sources),
        counted_tokens=sum(one.tokens for one in scans),
        bytes_per_token=mean_bytes if mean_bytes > 0 else None,
        losses=losses,
        window=n,
        val_in_train=looked_for.val_in_train(),
        repeated=looked_for.repeated(),
        used_tokens=int(np.count_nonzero(unigrams)),
        most_frequent=tokenizer.decode([top]),
        most_frequent_share=float(unigrams[top]),
        documents=documents,
        median_document=median,
        copied_share=copied,
        unreadable=unreadable,
        read_back=read_back,
    )


def count_tokens(
    corpus: Corpus, val: EvaluatedTokens, hasher: Hasher, looked_for: "Windows"
) -> tuple[dict[str, float], Floats, list[Scan]]:
    """Count the train tokens of each source, and weight the counts as the run weights its sources.

    Returns the losses of models that count, the share of each token, and the pass over each source.
    """
    sums, tables = ngram_tables(val, hasher)
    sources = corpus.weighted_sources
    total = sum(source.weight for source in sources)
    counts: list[Floats] = [np.zeros(len(val.tokens))] * (len(tables) + 1)
    unigrams: Floats = np.zeros(corpus.vocab_size)
    scans = []
    for source in sources:
        share = source.weight / total
        fresh = {order: KeyTable(table.keys) for order, table in tables.items()}
        most = int(MOST_TOKENS * share)
        found = scan(source.split, hasher, {**fresh, looked_for.n: looked_for.table}, most)
        scans.append(found)
        of_source = frequencies(val, sums, hasher, fresh, found.unigrams)
        scale = share / found.tokens
        counts = [one + scale * more for one, more in zip(counts, of_source, strict=True)]
        unigrams += scale * found.unigrams
    tokens = sum(found.tokens for found in scans)
    scaled = [tokens * count for count in counts]
    return cross_entropies(val, scaled, tokens, corpus.vocab_size), unigrams, scans


# --------------------------------------------------------------------------- windows


class Windows:
    """Windows of the validation text and of the train text, to look for in the train text."""

    def __init__(self, val: EvaluatedTokens, n: int, hasher: Hasher, corpus: Corpus) -> None:
        self.n = n
        starts = evenly(val.windows(n), MOST_WINDOWS)
        rows = val.tokens[starts[:, None] + np.arange(n)]
        self.val_keys = hasher.rows(rows)
        self.train_keys: list[Keys] = []
        self.shares = []
        total = sum(source.weight for source in corpus.weighted_sources)
        for source in corpus.weighted_sources:
            share = source.weight / total
            most = int(MOST_TOKENS * share)
            self.train_keys.append(hasher.rows(sample(source.split, n, MOST_WINDOWS, most)))
            self.shares.append(share)
        self.table = KeyTable(np.concatenate([self.val_keys, *self.train_keys]))

    def val_in_train(self) -> float:
        """Return the share of validation windows that stand in the train text."""
        times = self.table.counts_of(self.val_keys)
        return float((times > 0).mean()) if len(times) else 0.0

    def repeated(self) -> float:
        """Return the share of train windows that stand in the train text more than once."""
        shares = 0.0
        for share, keys in zip(self.shares, self.train_keys, strict=True):
            if len(keys):
                shares += share * float((self.table.counts_of(keys) > 1).mean())
        return shares


def window_length(val: EvaluatedTokens, block_size: int) -> int:
    """Return the number of tokens in a window.

    A window has `WINDOW_TOKENS`, and more if they hold fewer than `WINDOW_BYTES`.
    """
    mean = float(val.bytes.mean())
    by_bytes = round(WINDOW_BYTES / mean) if mean > 0 else 0  # NaN: the bytes are not known
    return min(max(WINDOW_TOKENS, by_bytes), block_size)


def evenly(values: Ints, most: int) -> Ints:
    """Return at most `most` of `values`, evenly spaced."""
    wanted = min(len(values), most)
    return values[np.arange(wanted) * len(values) // max(1, wanted)]


def sample(split: Split, n: int, count: int, most: int = MOST_TOKENS) -> Ints:
    """Read about `count` evenly spaced windows of `n` tokens from the chunks that `scan` reads."""
    shards = []
    starts = []
    read = list(chunks(split, most))
    tokens = sum(length for _, _, length in read)
    for shard, start, length in read:
        end = min(start + length, int(split.lengths[shard]) - n + 1)
        wanted = max(1, round(count * length / tokens))
        found = evenly(np.arange(start, max(start, end)), wanted)
        shards.append(np.full(len(found), shard))
        starts.append(found)
    return split.read_many(np.concatenate(shards), np.concatenate(starts), n).astype(np.int64)


# --------------------------------------------------------------------------- documents and letters


def count_documents(scans: Sequence[Scan]) -> tuple[int | None, int, float]:
    """Return the number of documents, their median length, and the share of tokens in copies."""
    found = [one.documents.close() for one in scans if one.documents is not None]
    if not found:
        return None, 0, 0.0
    hashes = np.concatenate([hashes for hashes, _ in found])
    lengths = np.concatenate([lengths for _, lengths in found])
    if not len(hashes):
        return 0, 0, 0.0
    _, first = np.unique(hashes, return_index=True)
    copied = 1 - lengths[first].sum() / lengths.sum()
    ends = sum(one.documents.ends for one in scans if one.documents is not None)
    return ends, int(np.sort(lengths)[len(lengths) // 2]), float(copied)


def read_again(splits: Sequence[Split], tokenizer: Tokenizer) -> tuple[float, float]:
    """Decode and encode train sequences; return the unreadable and the read-back share.

    The first is a share of characters, the second the share of tokens that come back in any order:
    a sequence may begin inside a word.
    """
    characters = 0
    unreadable = 0
    tokens = 0
    back = 0
    for split in splits:
        length = min(READ_AGAIN_TOKENS, int(split.lengths.max()))
        for row in sample(split, length, max(1, READ_AGAIN // len(splits))).tolist():
            ids = [one for one in row if one not in (tokenizer.eot_id, tokenizer.unk_id)]
            text = tokenizer.decode(ids).strip("\ufffd")
            unreadable += row.count(tokenizer.unk_id) if tokenizer.unk_id is not None else 0
            unreadable += sum(is_unreadable(character) for character in text)
            characters += len(text)
            tokens += len(ids)
            back += (Counter(ids) & Counter(tokenizer.encode(text))).total()
    return unreadable / max(1, characters), back / max(1, tokens)


def is_unreadable(character: str) -> bool:
    """Return whether a character stands for lost text, or controls a device."""
    is_control = unicodedata.category(character) == "Cc" and not character.isspace()
    return is_control or character == "\ufffd"
