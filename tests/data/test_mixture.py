"""Mixtures: exact proportions at every prefix, an order per source, exact resume."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accel_gpt.config.data import DataConfig
from accel_gpt.data.foreign import DataFolder
from accel_gpt.data.mixture import Mixture, Pattern
from accel_gpt.data.order import Shuffle
from accel_gpt.data.sources import Source, open_data
from accel_gpt.errors import UserError

WEIGHTS = st.lists(
    st.one_of(st.integers(1, 60).map(float), st.integers(1, 99).map(lambda n: n / 100)),
    min_size=1,
    max_size=6,
)


@pytest.mark.slow
@settings(max_examples=60)
@given(weights=WEIGHTS)
def test_each_source_is_never_one_sequence_off_its_share(weights: list[float]) -> None:
    pattern = Pattern(tuple(weights))
    length = sum(pattern.shares)
    assert [s / length for s in pattern.shares] == pytest.approx(
        [w / math.fsum(weights) for w in weights]
    )
    k = np.arange(2 * length + 7)
    source, index = pattern.locate(k)
    for number, share in enumerate(pattern.shares):
        given_so_far = np.cumsum(source == number)
        assert (np.abs(given_so_far * length - (k + 1) * share) < length).all()
        assert (index[source == number] == np.arange((source == number).sum())).all()


def test_weights_that_never_repeat_are_refused() -> None:
    with pytest.raises(UserError, match=r"0\.3333333, 0\.71.* repeat only after .* sequences"):
        Pattern((0.3333333, 0.71)).shares  # noqa: B018
    with pytest.raises(UserError, match=r"after 100,001 sequences; the limit is 100,000"):
        Pattern((1.0, 100_000.0)).shares  # noqa: B018
    assert Pattern((1.0, 99_999.0)).shares == (1, 99_999)


def test_sources_alternate_as_evenly_as_their_weights_allow() -> None:
    source, index = Pattern((3.0, 1.0)).locate(np.arange(8))
    assert source.tolist() == [0, 0, 1, 0] * 2
    assert index.tolist() == [0, 1, 0, 2, 3, 4, 1, 5]
    shares = np.array([7, 5, 3, 1])
    source, _ = Pattern(tuple(map(float, shares))).locate(np.arange(16))
    given = np.cumsum(source[:, None] == np.arange(4), axis=0)
    due = np.arange(1, 17)[:, None] * shares / 16
    assert (np.abs(given - due) < 1).all()


def mixture(corpus: Path, shuffle: Shuffle, weights: tuple[float, ...]) -> Mixture:
    """Use the split of one folder as several sources with different fingerprints."""
    split, tokenizer = open_data(str(corpus), "train", DataConfig())
    sources = [
        Source(
            name=f"source{i}",
            path=str(corpus),
            weight=weight,
            split=replace(split, fingerprint=f"{i}"),
            tokenizer=tokenizer,
            folder=DataFolder(corpus),
        )
        for i, weight in enumerate(weights)
    ]
    return Mixture(tuple(sources), 32, shuffle, group=2, seed=1)


def test_a_changed_mixture_counts_what_earlier_ones_gave(corpus: Path) -> None:
    """So epochs go on, and the shards that are fetched ahead are those that are read next."""
    earlier = {"0": 300, "1": 200, "of a source that left": 70}
    mixed = replace(mixture(corpus, "global", (3, 1)), origin=570, given=earlier)
    assert mixed.counts(570) == [300, 200]
    assert mixed.counts(570 + 400) == [600, 300]
    epoch = mixed.orders[0].sequences_per_epoch
    assert mixed.epochs(970) == [600 / epoch, 300 / epoch]
    k = np.arange(970, 1370)
    source, shard, first = mixed.locate(k)
    for number, order in enumerate(mixed.orders):
        here = source == number
        begin = mixed.counts(970)[number]
        expected = order.locate(np.arange(begin, begin + here.sum()))
        assert (shard[here] == expected[0]).all()
        assert (first[here] == expected[1]).all()


def test_fingerprint_depends_on_sources_and_proportions_only(corpus: Path) -> None:
    prints = [mixture(corpus, "none", weights).fingerprint for weights in ((2, 1), (4, 2), (1, 2))]
    assert prints[0] == prints[1] != prints[2]
