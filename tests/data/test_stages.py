"""Stages read what a plain reference says: each step, at any layout, from any step on.

The tokens of these corpora are numbered, so that a batch says where it was read.
"""

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from accel_gpt.commands.resolve import load_config
from accel_gpt.config.experiment import Config
from accel_gpt.config.plan import make_plan
from accel_gpt.data import loader
from accel_gpt.data.corpus import Corpus, open_corpus
from tests.helpers.reference_order import ReferenceRun, ReferenceSource, ReferenceStage, Window

CPU = torch.device("cpu")
LENGTHS = {"a": (400, 90, 260), "b": (130, 77), "c": (21, 300, 10, 52)}  # tokens of each shard
FIRST = {"a": 300, "b": 2000, "c": 4000}  # the first token; the bytes' own come before
LONGEST = 16
WORLDS = (1, 2, 3)
Read = tuple[str, int, int, int]  # source, shard, first token, length


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Three sources in shards; the loader reads little at a time, so chunks end in all places."""
    path = tmp_path_factory.mktemp("numbered")
    for name, lengths in LENGTHS.items():
        (path / name).mkdir()
        first = FIRST[name]
        for shard, length in enumerate(lengths):
            tokens = np.arange(first, first + length).astype(np.uint16)
            np.save(path / name / f"train_{shard}.npy", tokens)
            first += length
        np.save(
            path / name / "val_0.npy", np.arange(FIRST[name], FIRST[name] + 60, dtype=np.uint16)
        )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader, "CHUNK_BYTES", 700)
        yield path


@dataclass(frozen=True)
class Asked:
    """Stages of a run, with all settings of each, as a config that says only what changes."""

    stages: tuple[ReferenceStage, ...]
    micro: tuple[int, ...]  # train.micro_batch_size of each stage
    steps: int
    seed: int = 7
    shuffle: str = "global"

    def config(self, folder: Path) -> Config:
        """Return the config, read from its file."""
        before = options_of(self.stages[0], self.micro[0], folder)
        nested: dict[str, Any] = {
            "seed": self.seed,
            "out_dir": str(folder / "run"),
            "data": {"train": before["data.train"], "tokenizer": "bytes", "shuffle": self.shuffle},
            "model": {"preset": "llama", "vocab_size": 60_000, "n_embd": 32, "n_head": 2},
            "train": {"max_steps": self.steps},
            "stages": [],
        }
        for key in ("model.block_size", "train.micro_batch_size", "train.tokens_per_step"):
            section, _, name = key.partition(".")
            nested[section][name] = before[key]
        for stage, micro in zip(self.stages[1:], self.micro[1:], strict=True):
            options = options_of(stage, micro, folder)
            changed = {key: value for key, value in options.items() if value != before[key]}
            # a stage sets something
            changed = changed or {"train.micro_batch_size": micro}
            nested["stages"].append({"from": stage.first_step, **changed})
            before = options
        file = folder / "config.yaml"
        file.write_text(json.dumps(nested))
        return load_config([str(file)], "test")

    def expected(self, corpus: Corpus) -> list[list[Window]]:
        """Return what each step must read; only the fingerprints come from `corpus`."""
        prints = {source.name: source.split.fingerprint for source in corpus.sources}
        sources = {name: ReferenceSource(prints[name], LENGTHS[name]) for name in prints}
        longest = max(stage.block_size for stage in self.stages)
        run = ReferenceRun(sources, self.stages, self.steps, longest, self.seed, self.shuffle)
        return list(run.windows())


def options_of(stage: ReferenceStage, micro: int, folder: Path) -> dict[str, Any]:
    """Return all settings of a stage by dotted keys."""
    listed: Any = [
        {"path": str(folder / name), "weight": weight} for name, weight in stage.weights.items()
    ]
    if len(listed) == 1:
        listed = listed[0]["path"]
    return {
        "data.train": listed,
        "model.block_size": stage.block_size,
        "train.micro_batch_size": micro,
        "train.tokens_per_step": stage.tokens_per_step,
    }


def place(row: Sequence[int]) -> Read:
    """Return where a row of T + 1 tokens was read."""
    assert list(row) == list(range(row[0], row[0] + len(row)))
    name = max(name for name in FIRST if FIRST[name] <= row[0])
    first = row[0] - FIRST[name]
    for shard, length in enumerate(LENGTHS[name]):
        if first < length:
            assert first + len(row) <= length
            return name, shard, first, len(row) - 1
        first -= length
    raise AssertionError(row)


def steps_read(corpus: Corpus, config: Config, world: int, step: int = 0) -> list[list[Read]]:
    """Return what the loaders of all ranks yield for each step after `step` steps, to the end."""
    plan = make_plan(config, world)
    position = position_of(config, step)
    loaders = [corpus.loader(plan, rank, CPU, position) for rank in range(world)]
    found = []
    for number in range(step, plan.max_steps):
        rows: list[Read] = []
        for _ in range(plan.at(number).accumulation_steps):
            for one in loaders:
                tokens, targets = next(one)
                whole = torch.cat([tokens, targets[:, -1:]], dim=1)
                assert torch.equal(tokens[:, 1:], targets[:, :-1])
                rows += map(place, whole.tolist())
        found.append(rows)
    for one in loaders:
        one.close()
    return found


def position_of(config: Config, step: int) -> int:
    """Return the whole sequences that are read in `step` steps."""
    plan = make_plan(config, 1)
    return sum(plan.at(before).whole_sequences_per_step for before in range(step))


def as_read(steps: Sequence[Sequence[Window]]) -> list[list[Read]]:
    return [[window[:4] for window in step] for step in steps]


WEIGHTS = st.dictionaries(
    st.sampled_from(sorted(LENGTHS)), st.sampled_from([1.0, 2.0, 0.7, 0.3]), min_size=1, max_size=3
)


@st.composite
def runs(draw: st.DrawFn) -> Asked:
    """Runs of 1 to 4 stages; three processes can share each step."""
    count = draw(st.integers(1, 4))
    steps = draw(st.integers(count, 12))
    firsts = draw(st.permutations(range(1, steps)))[: count - 1]
    stages = []
    micro = []
    for first in [0, *sorted(firsts)]:
        block_size = draw(st.sampled_from([4, 8, LONGEST]))
        sequences = 6 * draw(st.integers(1, 2))  # whole ones
        stages.append(ReferenceStage(first, draw(WEIGHTS), block_size, sequences * LONGEST))
        pieces = sequences * LONGEST // block_size
        micro.append(draw(st.sampled_from([n for n in range(1, pieces + 1) if pieces % n == 0])))
    longest = draw(st.integers(0, count - 1))
    stages[longest] = replace(stages[longest], block_size=LONGEST)
    sequences = stages[longest].tokens_per_step // LONGEST
    micro[longest] = draw(st.sampled_from([n for n in range(1, 7) if sequences % n == 0]))
    shuffle = draw(st.sampled_from(["global", "shards", "none"]))
    return Asked(tuple(stages), tuple(micro), steps, draw(st.integers(0, 99)), shuffle)


@settings(max_examples=25)
@given(asked=runs(), data=st.data())
def test_each_step_reads_what_the_reference_lists(
    folder: Path, asked: Asked, data: st.DataObject
) -> None:
    """From the start, and from a step on with a corpus that only has a checkpoint's state."""
    config = asked.config(folder)
    corpus = open_corpus(config)
    expected = as_read(asked.expected(corpus))
    world = data.draw(st.sampled_from(WORLDS))
    assert steps_read(corpus, config, world) == expected
    step = data.draw(st.integers(0, asked.steps - 1))
    resumed = open_corpus(config)
    resumed.load_state_dict({**corpus.state_dict(), "sequences": position_of(config, step)})
    assert resumed.reads == corpus.reads
    again = data.draw(st.sampled_from(WORLDS))
    assert steps_read(resumed, config, again, step) == expected[step:]


# a is read in each stage; b is left and comes back, and its epochs of 10 sequences end within
# stages; length and batch grow
GROWING = Asked(
    stages=(
        ReferenceStage(0, {"a": 0.7, "b": 0.3}, 4, 6 * LONGEST),
        ReferenceStage(4, {"c": 1, "a": 2}, 8, 12 * LONGEST),
        ReferenceStage(5, {"a": 0.7, "b": 0.3}, 8, 12 * LONGEST),
        ReferenceStage(8, {"a": 0.1, "b": 0.9}, LONGEST, 18 * LONGEST),
    ),
    micro=(8, 4, 24, 3),
    steps=11,
)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("shuffle", ["global", "shards", "none"])
def test_sources_that_stages_share_go_on_through_their_epochs(
    folder: Path, world: int, shuffle: str
) -> None:
    asked = replace(GROWING, shuffle=shuffle)
    config = asked.config(folder)
    corpus = open_corpus(config)
    windows = asked.expected(corpus)
    assert steps_read(corpus, config, world) == as_read(windows)
    of_b = [(one.stage, one.epoch) for step in windows for one in step if one.source == "b"]
    assert {(2, 0), (2, 1), (3, 1), (3, 2)} <= {*of_b}
    epochs = [window.epoch for step in windows for window in step if window.source == "a"]
    assert (epochs, max(epochs)) == (sorted(epochs), 1)
    for step in range(asked.steps):
        assert steps_read(corpus, config, world, step) == as_read(windows[step:])


@settings(max_examples=25)
@given(asked=runs())
def test_no_token_of_a_source_is_read_twice_before_its_epoch_ends(
    folder: Path, asked: Asked
) -> None:
    config = asked.config(folder)
    reads = list(itertools.chain(*steps_read(open_corpus(config), config, 1)))
    longest = config.model.block_size
    for name, lengths in LENGTHS.items():
        tokens: list[tuple[int, int]] = []
        for source, shard, first, length in reads:
            if source == name:
                tokens += [(shard, first + n) for n in range(length)]
        fits = [max(n // longest - 1, 1) for n in lengths if n > longest]
        epoch = sum(fits) * longest
        for begin in range(0, len(tokens), epoch):
            part = tokens[begin : begin + epoch]
            assert len(part) == len({*part})


def tokens_of(steps: Sequence[Sequence[Read]]) -> list[list[tuple[str, int, int]]]:
    """Return the tokens of each step in the order in which they are read."""
    return [
        [(source, shard, first + n) for source, shard, first, length in step for n in range(length)]
        for step in steps
    ]


@settings(max_examples=15)
@given(asked=runs())
def test_a_step_reads_the_same_tokens_at_any_length(folder: Path, asked: Asked) -> None:
    config = asked.config(folder)
    cut = steps_read(open_corpus(config), config, 1)
    longest = tuple(replace(stage, block_size=LONGEST) for stage in asked.stages)
    whole = replace(asked, stages=longest, micro=(1,) * len(longest)).config(folder)
    assert tokens_of(cut) == tokens_of(steps_read(open_corpus(whole), whole, 1))


@settings(max_examples=15)
@given(asked=runs(), data=st.data())
def test_an_edge_that_moves_leaves_what_lies_before_it(
    folder: Path, asked: Asked, data: st.DataObject
) -> None:
    """Also while the run trains, as after a second look at its budget."""
    last = len(asked.stages) - 1
    earliest = asked.stages[last - 1].first_step + 1 if last else 0
    moved = data.draw(st.integers(earliest, asked.steps - 1)) if last else 0
    stage = replace(asked.stages[last], first_step=moved)
    other = replace(asked, stages=(*asked.stages[:last], stage))
    config = asked.config(folder)
    corpus = open_corpus(config)
    before = steps_read(corpus, config, 1)
    edge = min(moved, asked.stages[last].first_step)
    config = other.config(folder)
    after = steps_read(open_corpus(config), config, 1)
    assert after[:edge] == before[:edge]
    assert after == as_read(other.expected(corpus))
    step = data.draw(st.integers(0, edge))
    corpus.set_length(config, position_of(config, step))
    assert steps_read(corpus, config, 1, step) == after[step:]
