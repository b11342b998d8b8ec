"""What a run is trained on: mixtures and streamed text, exact over stops, and refused changes."""

import json
import os
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from accel_gpt.config.data import PrepareConfig
from accel_gpt.config.parse import load_config
from accel_gpt.config.plan import Plan
from accel_gpt.data.corpus import sequences_given, source_changes
from accel_gpt.prepare.prepare import prepare
from accel_gpt.text.files import files
from accel_gpt.text.streaming import TextCorpus, TextPosition, rank_sequences
from accel_gpt.training.setup import open_corpus
from accel_gpt.training.state import TrainState
from tests.conftest import launch, text_of
from tests.test_train import assert_same_weights, records, signal_after, weights

Arguments = Callable[..., list[str]]
Steps = list[tuple[Counter[bytes], dict[int, TextPosition]]]  # sequences, positions after them


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, Path]:
    """Two data folders of bytes, of different text."""
    made = []
    for number in (1, 2):
        text = tmp_path / f"text{number}.txt"
        text.write_text(text_of(3000, seed=number))
        made.append(tmp_path / f"data{number}")
        asked = PrepareConfig(source="text", path=str(text), tokenizer="bytes", workers=1)
        prepare(asked, made[-1])
    return made[0], made[1]


def mixture(*sources: tuple[Path, float]) -> list[str]:
    listed = ", ".join(f"{{path: {path}, weight: {weight}}}" for path, weight in sources)
    return ["--data.train", f"[{listed}]"]


def test_a_mixture_trains_stops_and_goes_on_exactly(
    small_run: Arguments,
    two: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    mixed = [*mixture((two[0], 0.7), (two[1], 0.3)), "--train.max_steps", "8"]
    assert launch(small_run(*mixed, "--out_dir", str(tmp_path / "whole"))) == 0
    shown = capsys.readouterr().err
    assert f"{two[0]}: " in shown
    assert "weight 0.3" in shown
    assert len(re.findall(r"this run reads \d+\.\d\d epochs of ", shown)) == 2
    with monkeypatch.context() as patch:
        signal_after(patch, 5, 15)
        assert launch(small_run(*mixed)) == 75
    assert launch(small_run(*mixed)) == 0
    assert records(tmp_path / "whole") == records(tmp_path / "run")
    assert_same_weights(weights(tmp_path / "whole", 8), weights(tmp_path / "run", 8))
    last = records(tmp_path / "run")[-1]
    assert last["data/epochs/data1"] == pytest.approx(7 / 3 * last["data/epochs/data2"], rel=0.05)
    mean = 0.7 * last["eval/val_loss/data1"] + 0.3 * last["eval/val_loss/data2"]
    assert last["eval/val_loss"] == pytest.approx(mean)


def stopped(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, step: int, expected: int = 75
) -> None:
    with monkeypatch.context() as patch:
        signal_after(patch, step, 15)
        assert launch(arguments) == expected


def test_another_mixture_is_refused_with_what_differs_or_accepted_and_logged(
    small_run: Arguments,
    two: tuple[Path, Path],
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    six = ["--train.max_steps", "6"]
    stopped(small_run(*mixture((two[0], 1), (two[1], 1)), *six), monkeypatch, 3)
    other = [*mixture((two[0], 3), (two[1], 1), (corpus, 4)), *six]
    assert launch(small_run(*other)) == 2
    shown = capsys.readouterr().err
    assert "data.train[data1] was weight 1, is weight 3" in shown
    assert "data.train[corpus] was absent, is weight 4" in shown
    assert "data.train[data2]" not in shown
    assert shown.rstrip().endswith("or accept it with --checkpoint.allow_change data.train")
    assert launch(small_run(*other, "--checkpoint.allow_change", "data.train")) == 0
    assert "from step 3 on data.train[corpus] is weight 4; it was absent" in capsys.readouterr().err
    # 24 sequences of 12 each, then 24 by 3 : 1 : 4
    state = json.loads((tmp_path / "run/checkpoints/step_00000006/trainer_state.json").read_text())
    assert (state["data_origin"], state["sequences"]) == (24, 48)
    assert sorted(state["data_given"].values()) == [12, 12]
    # the change holds for what follows, without being allowed again
    assert launch(small_run(*other, "--train.max_steps", "7")) == 2
    longer = ["--train.max_steps", "7", "--checkpoint.allow_change", "train.max_steps"]
    capsys.readouterr()
    assert launch(small_run(*other, *longer)) == 0
    assert "on data.train" not in capsys.readouterr().err


def opened(arguments: list[str]) -> Any:
    return open_corpus(load_config(arguments, "train.py"))


def test_a_changed_mixture_goes_on_where_each_source_was(
    small_run: Arguments, two: tuple[Path, Path]
) -> None:
    """A source that is alone from sequence 48 on gives those that it would have given next."""
    both = opened(small_run(*mixture((two[0], 1), (two[1], 1))))
    alone = opened(small_run("--data.train", str(two[0])))
    alone.load_state_dict(both.state_dict() | {"sequences": 48})
    number = [source.path for source in both.train.sources].index(str(two[0]))
    expected = both.train.orders[number].locate(np.arange(24, 40))
    assert np.array_equal(alone.train.locate(np.arange(48, 64))[1:], expected)


def test_sources_come_and_go_and_each_goes_on_where_it_was() -> None:
    """A + B for 100 windows, A alone for 50, then both again."""
    state: dict[str, Any] = {"data_fingerprint": "x", "data_origin": 0, "data_given": {}}
    steps: list[tuple[dict[str, float], int, dict[str, int]]] = [
        ({"a": 1, "b": 1}, 100, {"a": 50, "b": 50}),
        ({"a": 1}, 150, {"a": 100, "b": 50}),
        ({"a": 3, "b": 1}, 154, {"a": 103, "b": 51}),
    ]
    for weights_, end, expected in steps:
        state |= {"data_sources": sources(**weights_), "sequences": end}
        state["data_given"] = sequences_given(state)
        assert state["data_given"] == expected
        state["data_origin"] = end


def test_a_state_from_before_mixtures_has_one_source() -> None:
    old = vars(TrainState(data_fingerprint="a", sequences=7))
    now = vars(TrainState(data_fingerprint="ab", data_sources=sources(a=1, b=1)))
    assert source_changes(old, now) == {"data.train[b]": ("absent", "weight 1")}
    assert sequences_given(old) == {"a": 7}


def test_a_source_of_other_content_is_told_apart_by_its_fingerprint() -> None:
    old = vars(TrainState(data_fingerprint="ab", data_sources=sources(a=1, b=1)))
    new = sources(a=1, b=1)
    new[1]["fingerprint"] = "c"
    now = vars(TrainState(data_fingerprint="ac", data_sources=new))
    assert source_changes(old, now) == {"data.train[b]": ("weight 1 (b)", "weight 1 (c)")}


def sources(**weights: float) -> list[dict[str, Any]]:
    return [{"name": n, "weight": w, "fingerprint": n} for n, w in weights.items()]


@pytest.mark.slow
def test_neither_the_scale_of_weights_nor_the_order_of_sources_matters(
    small_run: Arguments, two: tuple[Path, Path], tmp_path: Path
) -> None:
    pairs = [(two[0], 2.0), (two[1], 1.0)]
    scaled = [(two[1], 10.0), (two[0], 20.0)]
    for out, listed in (("a", pairs), ("b", scaled)):
        assert launch(small_run(*mixture(*listed), "--out_dir", str(tmp_path / out))) == 0
    assert records(tmp_path / "a") == records(tmp_path / "b")


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ("[{path: DATA1}, {path: DATA1}]", "has the tokens of .* twice"),
        ("[{path: DATA1, weight: 0}]", "data.train.weight is 0.0; it must be above 0"),
        ("[{weight: 1}]", "has no path"),
        ("[{path: DATA1}, {path: none}]", "none does not exist"),
        ("[{path: DATA1, weight: 0.1234567}, {path: DATA2}]", "repeat only after"),
        ("[DATA1, DATA2]", "expected a list of {path, weight}"),
        ("{dataset: a/b}", "without streaming: true"),
        ("{streaming: true}", "give one of the two"),
        ("{streaming: true, path: '-'}", "cannot be read twice"),
        ("[{path: DATA1, weight: .inf}]", "weight is inf; expected a finite number"),
        ("{streaming: true, path: DATA1}", "data.tokenizer is not set"),
        ("[{path: DATA1", "not valid YAML"),
    ],
)
def test_bad_sources_are_one_sentence(
    small_run: Arguments,
    two: tuple[Path, Path],
    train: str,
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    train = train.replace("DATA1", str(two[0])).replace("DATA2", str(two[1]))
    assert launch(small_run("--data.train", train)) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("error: ")
    assert shown.count("\n") == 1
    assert re.search(message, shown)


# --------------------------------------------------------------------------- text


@pytest.fixture
def streamed(tmp_path: Path) -> list[str]:
    """Options that stream 60 documents of JSON lines."""
    lines = [json.dumps({"text": text_of(30, seed=i)}) for i in range(60)]
    (tmp_path / "text.jsonl").write_text("\n".join(lines))
    train = f"{{path: {tmp_path / 'text.jsonl'}, streaming: true, val_fraction: 0.1}}"
    return ["--data.train", train, "--data.tokenizer", "bytes"]


@pytest.mark.parametrize("step", [3, pytest.param(7, marks=pytest.mark.slow)])
def test_streamed_text_trains_stops_and_goes_on_exactly(
    small_run: Arguments,
    streamed: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    step: int,
) -> None:
    # 8,192 tokens: over the end of the text, which has 7,000
    longer = [*streamed, "--train.tokens_per_step", "1024", "--train.max_steps", "8"]
    assert launch(small_run(*longer, "--out_dir", str(tmp_path / "whole"))) == 0
    stopped(small_run(*longer), monkeypatch, step)
    assert launch(small_run(*longer)) == 0
    assert records(tmp_path / "whole") == records(tmp_path / "run")
    assert_same_weights(weights(tmp_path / "whole", 8), weights(tmp_path / "run", 8))
    lines = records(tmp_path / "run")
    assert lines[-1]["train/loss"] < lines[0]["train/loss"] - 1


def test_other_streamed_text_begins_at_its_beginning(
    small_run: Arguments, streamed: list[str]
) -> None:
    first = opened(small_run(*streamed))
    state = first.state_dict() | {"sequences": 16, "text_places": [[0, [0, 1, 2], 3]]}
    first.load_state_dict(state)
    assert first.positions == (TextPosition(0, (0, 1, 2), 3),)
    marked = first.state_dict() | {"text_places": [[0, [0, 9, 0], 3, [[8, {"epoch": 0}]]]]}
    first.load_state_dict(marked)
    assert first.bookmarks == {0: {8: {"epoch": 0}}}
    changed = [option.replace("val_fraction: 0.1", "val_fraction: 0.2") for option in streamed]
    other = opened(small_run(*changed))
    other.load_state_dict(state)
    assert other.positions == ()
    assert source_changes(state, other.state_dict())  # refused without checkpoint.allow_change


def test_streamed_text_with_another_time_is_refused_and_does_not_start_over(
    small_run: Arguments,
    streamed: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    stopped(small_run(*streamed), monkeypatch, 6)
    text = tmp_path / "text.jsonl"
    before = text.stat()
    os.utime(text, ns=(before.st_atime_ns, before.st_mtime_ns + 10**9))
    assert launch(small_run(*streamed, "--checkpoint.allow_change", "data.train")) == 2
    assert "only its modification time differs" in capsys.readouterr().err
    assert len(records(tmp_path / "run")) == 6
    os.utime(text, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert launch(small_run(*streamed)) == 0


@pytest.mark.parametrize("first", [1, 2, 4])
def test_streamed_text_goes_on_with_the_same_steps_on_any_number_of_processes(
    small_run: Arguments, streamed: list[str], first: int
) -> None:
    """24 sequences a step of 32 tokens, the whole text in 10 of them."""

    def steps(world: int, starts: tuple[TextPosition, ...], position: int) -> Steps:
        """The sequences of five steps, and the positions of the shares after each."""
        plan, ranks = Plan(world, 1, 32, 1, 1, 0, 1), range(world)
        parts = [rank_sequences(text, starts, {}, plan, rank, position) for rank in ranks]
        found: Steps = []
        for _ in range(5):
            one = [next(parts[rank]) for _ in range(24 // world) for rank in ranks]
            places = {share: at for _, places in one[-world:] for share, at in places.items()}
            found.append((Counter(tokens.tobytes() for tokens, _ in one), places))
        return found

    text = opened(small_run(*streamed)).text
    begun = steps(first, (TextPosition(),) * first, 0)
    places = begun[1][1]
    assert sorted(places) == list(range(first))
    for world in (1, 2, 3, 4, 6, 8):
        assert steps(world, tuple(places[i] for i in range(first)), 48)[:3] == begun[2:]


@pytest.mark.slow
@pytest.mark.usefixtures("settings_kept")
def test_a_streamed_data_set_goes_on_exactly(small_run: Arguments, tmp_path: Path) -> None:
    """From its state at a row before, also in the second epoch."""
    (tmp_path / "set").mkdir()
    for number in range(2):
        lines = [json.dumps({"text": f"{number} {i} {'word ' * (i % 9)}"}) for i in range(700)]
        (tmp_path / "set" / f"{number}.jsonl").write_text("\n".join(lines))
    train = f"{{dataset: {tmp_path / 'set'}, streaming: true, val_fraction: 0.1}}"
    options = small_run("--data.train", train, "--data.tokenizer", "bytes")
    plan, device = Plan(1, 8, 32, 1, 1, 0, 1), torch.device("cpu")
    for batches in (100, 230):
        first, again = opened(options), opened(options)
        loader = first.loader(plan, 0, device, 0)
        for _ in range(batches):
            next(loader)
        state = json.loads(json.dumps(first.state_dict(loader)))
        assert len(state["text_places"][0][3]) == 1
        again.load_state_dict({"sequences": 8 * batches, **state})
        other = again.loader(plan, 0, device, 8 * batches)
        for _ in range(60):
            assert torch.equal(next(loader)[1], next(other)[1])
        loader.close()
        other.close()
    assert state["text_places"][0][0] == 1


@pytest.mark.slow
def test_a_text_of_whole_windows_is_read_again_and_again(
    small_run: Arguments, tmp_path: Path
) -> None:
    (tmp_path / "text.txt").write_text("abcdefg " * 128)  # half of it, and end-of-text: 16 windows
    train = f"{{path: {tmp_path / 'text.txt'}, streaming: true, val_fraction: 0.501}}"
    options = ["--data.train", train, "--data.tokenizer", "bytes"]
    assert launch(small_run(*options)) == 0


def test_copies_of_a_streamed_text_are_the_same_on_all_machines(
    small_run: Arguments, streamed: list[str], tmp_path: Path
) -> None:
    """The time of a file's change differs between machines."""
    first = opened(small_run(*streamed))
    assert isinstance(first, TextCorpus)
    before = first.identity(), first.fingerprint
    (text,) = {Path(path) for path in files(first.text.config)}
    os.utime(text, (1, 1))
    assert first.identity() == before[0]
    assert first.fingerprint != before[1]
    text.write_text(text.read_text() + "more")
    assert first.identity() != before[0]


# --------------------------------------------------------------------------- documents


@pytest.mark.slow
def test_document_mask_trains_and_does_not_depend_on_the_micro_batch(
    small_run: Arguments, streamed: list[str], tmp_path: Path
) -> None:
    corpus = tmp_path / "documents"
    prepare(
        PrepareConfig(source="jsonl", path=str(tmp_path / "text.jsonl"), tokenizer="bytes"), corpus
    )
    options = ["--data.train", str(corpus), "--model.dropout", "0"]
    masked = [*options, "--data.document_mask"]
    for out, more in (
        ("plain", options),
        ("a", masked),
        ("b", [*masked, "--train.micro_batch_size", "2"]),
    ):
        assert launch(small_run(*more, "--out_dir", str(tmp_path / out))) == 0
    losses = {
        out: [line["train/loss"] for line in records(tmp_path / out)] for out in ("plain", "a", "b")
    }
    assert losses["a"] == pytest.approx(losses["b"], rel=1e-5)
    assert losses["a"] != pytest.approx(losses["plain"], rel=1e-3)


def test_document_mask_needs_an_end_of_text(
    small_run: Arguments, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text(text_of(3000))
    prepare(PrepareConfig(source="text", path=str(text), tokenizer="chars"), tmp_path / "chars")
    assert launch(small_run("--data.train", str(tmp_path / "chars"), "--data.document_mask")) == 2
    assert "chars tokenizer has no end-of-text" in capsys.readouterr().err


def test_micro_batches_of_end_of_text_alone_count_nothing(
    small_run: Arguments, tmp_path: Path
) -> None:
    tokens = np.full(2000, 256, np.uint16)
    tokens[1000:] = np.arange(1000) % 256
    for split in ("train", "val"):
        np.save(tmp_path / f"x_{split}_000000.npy", tokens)
    options = ["--data.train", str(tmp_path), "--data.tokenizer", "bytes", "--data.document_mask"]
    options += ["--train.micro_batch_size", "1", "--train.tokens_per_step", "64"]
    assert launch(small_run(*options, "--data.shuffle", "none")) == 0
    losses = [line["train/loss"] for line in records(tmp_path / "run")]
    assert losses[0] == 0
    assert all(loss < 10 for loss in losses)
