"""The data order: exact cover, independence of layout, seeking at any position."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accel_gpt.data.order import Order, Shuffle, permute

EPOCH_MODES: list[Shuffle] = ["global", "groups", "shards", "none"]


def order(lengths: list[int], block_size: int, shuffle: Shuffle = "global", seed: int = 1) -> Order:
    return Order(np.array(lengths, dtype=np.int64), block_size, shuffle, 3, seed, "fingerprint")


def sequences(o: Order, first: int, last: int) -> list[tuple[int, int]]:
    shard, start = o.locate(np.arange(first, last, dtype=np.int64))
    return list(zip(shard.tolist(), start.tolist(), strict=True))


@given(size=st.integers(1, 3000), key=st.integers(0, 2**64 - 1))
def test_permutation_is_a_bijection(size: int, key: int) -> None:
    assert sorted(permute(np.arange(size), size, key).tolist()) == list(range(size))


def test_permutation_of_a_trillion_stays_in_range() -> None:
    size = 10**12
    image = permute(np.arange(size - 1000, size), size, 7)
    assert len(np.unique(image)) == 1000
    assert (image >= 0).all()
    assert (image < size).all()
    assert image.std() > size / 10  # spread, not clustered


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(0, 400), min_size=1, max_size=6),
    block_size=st.integers(1, 40),
    shuffle=st.sampled_from(EPOCH_MODES),
    epoch=st.integers(0, 3),
)
def test_epoch_covers_each_shard_once_without_overlap(
    lengths: list[int], block_size: int, shuffle: Shuffle, epoch: int
) -> None:
    if max(lengths) <= block_size:
        return
    o = order(lengths, block_size, shuffle)
    n = o.sequences_per_epoch
    found = sequences(o, epoch * n, (epoch + 1) * n)
    assert len(set(found)) == n
    for shard, length in enumerate(lengths):
        starts = sorted(start for s, start in found if s == shard)
        assert len(starts) == o.counts[shard]
        if starts:
            assert starts[0] >= 0
            assert starts[-1] + block_size + 1 <= length  # never across the end of a shard
            assert all(b - a == block_size for a, b in pairwise(starts))
            assert length - len(starts) * block_size < 2 * block_size  # little is left out


@given(
    shuffle=st.sampled_from([*EPOCH_MODES, "replacement"]),
    first=st.integers(0, 500),
    cut=st.integers(0, 60),
)
def test_seeking_anywhere_equals_reading_through(shuffle: Shuffle, first: int, cut: int) -> None:
    o = order([300, 90, 151], 16, shuffle)
    whole = sequences(o, first, first + 60)
    assert sequences(o, first, first + cut) + sequences(o, first + cut, first + 60) == whole


@pytest.mark.parametrize("shuffle", EPOCH_MODES)
def test_later_epochs_cut_the_text_elsewhere(shuffle: Shuffle) -> None:
    o = order([10_000], 64, shuffle)
    n = o.sequences_per_epoch
    epochs = [set(sequences(o, e * n, (e + 1) * n)) for e in range(3)]
    assert not epochs[0] & epochs[1]
    assert not epochs[1] & epochs[2]
    assert {start % 64 for _, start in epochs[0]} == {0}


@pytest.mark.parametrize(
    ("shuffle", "lengths"), [("global", [1000]), ("groups", [1000]), ("shards", [50] * 20)]
)
def test_each_epoch_has_another_order(shuffle: Shuffle, lengths: list[int]) -> None:
    """Its sequences are the same, apart from the offset at which they are cut."""
    o = order(lengths, 10, shuffle)
    n = o.sequences_per_epoch
    epochs = []
    for epoch in range(3):
        found = sequences(o, epoch * n, (epoch + 1) * n)
        epochs.append([(shard, start // 10) for shard, start in found])
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


def test_none_reads_straight_on_global_jumps_and_shards_reads_one_after_the_other() -> None:
    straight = sequences(order([1000, 1000], 10, "none"), 0, 50)
    assert straight == sorted(straight)
    shuffled = sequences(order([1000, 1000], 10, "global"), 0, 50)
    assert shuffled != sorted(shuffled)
    assert {shard for shard, _ in shuffled} == {0, 1}
    o = order([200] * 8, 10, "shards")
    found = sequences(o, 0, o.sequences_per_epoch)
    changes = [b for a, b in pairwise(found) if a[0] != b[0]]
    assert len(changes) == 7
    assert [s for s, _ in found] != sorted(s for s, _ in found)


def test_a_group_of_shards_is_mixed_and_read_before_the_next() -> None:
    """11 shards of 19 sequences in groups of at most 3, and `upcoming` names two groups."""
    o = order([200] * 11, 10, "groups")
    n = o.sequences_per_epoch
    found = sequences(o, 0, 2 * n)
    groups = []
    for first, size in ((0, 2), (2, 3), (5, 3), (8, 3), (11, 2)):  # the last is in the next epoch
        part = found[first * 19 : (first + size) * 19]
        groups.append({shard for shard, _ in part})
        assert len(groups[-1]) == size
        numbers = np.array([start for _, start in part])
        assert abs(np.corrcoef(numbers[1:], numbers[:-1])[0, 1]) < 0.4  # 1 if in order
        assert len({shard for shard, _ in part[:12]}) == size
    for k in range(0, n, 7):
        now = next(i for i, end in enumerate((2, 5, 8, 11)) if k < end * 19)
        upcoming = o.upcoming(k, 1)
        assert set(upcoming[: len(groups[now])]) == groups[now]
        assert set(upcoming[len(groups[now]) :][: len(groups[now + 1])]) == groups[now + 1]
        assert len(upcoming) <= 2 * 3


def test_replacement_draws_every_start() -> None:
    found = sequences(order([40, 33], 8, "replacement"), 0, 4000)
    assert {start for shard, start in found if shard == 0} == set(range(32))
    assert {start for shard, start in found if shard == 1} == set(range(25))


def test_order_depends_on_seed_and_data() -> None:
    orders = [
        Order(np.array([1000]), 8, "global", 1, *key) for key in ((1, "a"), (2, "a"), (1, "b"))
    ]
    assert len({tuple(sequences(one, 0, 100)) for one in orders}) == 3
