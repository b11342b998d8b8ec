"""Windows of tokens are counted exactly, across chunks and shards."""

import math
from collections import Counter
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel_gpt.data.shards import Shard, Split
from accel_gpt.errors import DataError
from accel_gpt.health import windows
from accel_gpt.health.counting import EvaluatedTokens, cross_entropies, frequencies, ngram_tables
from accel_gpt.health.windows import Hasher, KeyTable, chunks, scan

END = 0
VOCABULARY = 6
Tokens = npt.NDArray[np.int64]


def split_of(*shards: list[int]) -> Split:
    return Split(
        folder=Path(),
        name="train",
        shards=tuple(Shard(str(i), len(tokens)) for i, tokens in enumerate(shards)),
        dtype=np.dtype("<u2"),
        vocab_size=VOCABULARY,
        eot_id=END,
        tokenizer_kind="bytes",
        tokenizer_fingerprint="",
        fingerprint="",
        arrays=tuple(np.array(tokens, "<u2") for tokens in shards),
    )


def windows_of(tokens: list[int], n: int) -> list[tuple[int, ...]]:
    return [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]


tokens = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=40)


@given(st.lists(tokens, min_size=1, max_size=3), tokens, st.integers(3, 9))
def test_windows_are_counted_in_every_chunk_and_shard(
    shards: list[list[int]], wanted: list[int], chunk: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(windows, "CHUNK", chunk)
        hasher = Hasher(VOCABULARY)
        sums = hasher.prefix(np.array(wanted))
        tables = {n: KeyTable(hasher.keys(sums, n)) for n in (2, 3)}
        found = scan(split_of(*shards), hasher, tables, most=10**9)
    for n, table in tables.items():
        counts = Counter(window for shard in shards for window in windows_of(shard, n))
        expected = [counts[window] for window in windows_of(wanted, n)]
        assert table.counts_of(hasher.keys(sums, n)).tolist() == expected
    everything = [token for shard in shards for token in shard]
    assert found.unigrams.tolist() == [everything.count(i) for i in range(VOCABULARY)]
    assert found.tokens == len(everything)


@given(st.lists(tokens, min_size=1, max_size=3), st.integers(3, 9))
def test_documents_are_those_between_the_ends(shards: list[list[int]], chunk: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(windows, "CHUNK", chunk)
        hasher = Hasher(VOCABULARY)
        table = KeyTable(np.zeros(1, np.uint64))
        found = scan(split_of(*shards), hasher, {2: table}, most=10**9)
        assert found.documents is not None
        hashes, lengths = found.documents.close()
    words = "".join(str(token) for shard in shards for token in shard).split(str(END))
    documents = [word for word in words if word]
    assert lengths.tolist() == [len(document) for document in documents]
    assert found.documents.ends == len(words) - 1
    assert len(np.unique(hashes)) == len(set(documents))


def test_keys_that_share_a_slot_are_all_counted() -> None:
    close = np.arange(7, 12, dtype=np.uint64)  # one slot: it is chosen by the highest bits
    table = KeyTable(np.append(close, np.uint64(1 << 63)))
    table.count(np.array([7, 8, 8, 11, 12, 1 << 63, (1 << 63) + 1], np.uint64))
    assert table.counts.tolist() == [1, 2, 0, 0, 1, 1]


def test_documents_are_not_joined_across_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "CHUNK", 4)
    split = split_of([1, 2, END, 3, 4, 4, 4, 4, 5, END, 1, 2, 3, 3, 3, 3])
    hasher = Hasher(VOCABULARY)
    found = scan(split, hasher, {2: KeyTable(np.zeros(1, np.uint64))}, most=8)
    assert found.documents is not None
    assert [len(hashes) for hashes in found.documents.hashes] == [1, 1]
    assert found.documents.close()[1].tolist() == [2, 1, 2]  # not 3 5


def test_a_token_beyond_the_vocabulary_is_named() -> None:
    split = split_of([1, 2, VOCABULARY + 3])
    with pytest.raises(DataError, match=f"token {VOCABULARY + 3} at index 2"):
        scan(split, Hasher(VOCABULARY), {2: KeyTable(np.zeros(1, np.uint64))}, most=10)


def test_chunks_are_spread_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "CHUNK", 10)
    split = split_of([1] * 55, [2] * 45)
    assert sum(length for _, _, length in chunks(split, 10**9)) == 100
    found = list(chunks(split, 40))
    assert [(shard, start) for shard, start, _ in found] == [(0, 0), (0, 20), (0, 50), (1, 20)]
    many = split_of(*[[1] * 2] * 50)  # shards far smaller than a chunk
    assert sum(length for _, _, length in chunks(many, 50)) == 50


# --------------------------------------------------------------------------- models that count


def evaluated(rows: list[list[int]]) -> EvaluatedTokens:
    lengths = [len(row) for row in rows]
    tokens = np.concatenate([np.array(row) for row in rows])
    return EvaluatedTokens(
        tokens=tokens,
        place=np.concatenate([np.arange(length) for length in lengths]),
        sequence=np.repeat(np.arange(len(rows)), lengths),
        weight=np.full(len(tokens), 1.0),
        bytes=np.ones(len(tokens)),
    )


def losses_of(train: list[int], rows: list[list[int]]) -> dict[str, float]:
    val = evaluated(rows)
    hasher = Hasher(VOCABULARY)
    sums, tables = ngram_tables(val, hasher)
    found = scan(split_of(train), hasher, tables, most=10**9)
    counts = frequencies(val, sums, hasher, tables, found.unigrams)
    return cross_entropies(val, counts, len(train), VOCABULARY)


@given(tokens, tokens.filter(lambda row: len(row) > 1))
def test_frequencies_are_those_of_windows_in_one_sequence(train: list[int], row: list[int]) -> None:
    val = evaluated([row, row])
    hasher = Hasher(VOCABULARY)
    sums, tables = ngram_tables(val, hasher)
    found = scan(split_of(train), hasher, tables, most=10**9)
    counts = frequencies(val, sums, hasher, tables, found.unigrams)
    for n, of_order in enumerate(counts, start=1):
        known = Counter(windows_of(train, n))
        ends = [known[tuple(row[i - n + 1 : i + 1])] if i >= n - 1 else 0 for i in range(len(row))]
        assert of_order.tolist() == ends * 2


def test_a_model_of_order_n_knows_what_n_tokens_tell() -> None:
    """In 1 1 2 2 repeated, one token tells nothing, two tell the next."""
    text = [1, 1, 2, 2] * 2000
    losses = losses_of(text, [text[i : i + 40] for i in range(0, 400, 40)])
    assert losses["unigram"] == pytest.approx(math.log(2), abs=0.01)
    assert losses["bigram"] == pytest.approx(math.log(2), abs=0.01)
    assert losses["5-gram"] < 0.06  # the first targets of a sequence have a short context


def test_random_text_has_its_entropy() -> None:
    draw = np.random.default_rng(1).integers(1, VOCABULARY, 40_000).tolist()
    losses = losses_of(draw[:30_000], [draw[i : i + 100] for i in range(30_000, 40_000, 100)])
    for loss in losses.values():
        assert loss == pytest.approx(math.log(VOCABULARY - 1), abs=0.02)


@pytest.mark.parametrize("count", [4008, 4009])
def test_a_context_that_was_seen_once_is_known(count: int) -> None:
    """A weighted count may be rounded below 1, and a source of a mixture may count less."""
    text = np.arange(1, count + 1) % (count + 1)
    val = evaluated([text[i : i + 50].tolist() for i in range(0, 1000, 50)])
    seen = [np.ones(len(val.tokens)) for _ in range(5)]
    for scale in (1.0, 1 - 1e-12, 0.3):
        counts = [scale * ones for ones in seen]
        losses = cross_entropies(val, counts, scale * count, count + 1)
        assert losses["bigram"] < 0.1
        assert losses["unigram"] == pytest.approx(math.log(count), abs=0.1)


def test_a_token_that_train_lacks_has_a_finite_loss() -> None:
    losses = losses_of([1, 2] * 500, [[1, 2, 5, 1, 2], [5, 5, 1, 2, 1]])
    assert all(math.isfinite(loss) for loss in losses.values())
