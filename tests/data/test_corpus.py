"""The data of a run: mixtures, exact resume, rejected changes, documents."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers.models import WordLevel

from accel_gpt.commands.resolve import load_config
from accel_gpt.config.data import DataConfig, PrepareConfig
from accel_gpt.config.experiment import Config
from accel_gpt.data.corpus import open_corpus
from accel_gpt.data.mixture import sequences_given
from accel_gpt.data.sources import DataRead, TrainedSource
from accel_gpt.errors import UserError
from accel_gpt.prepare.prepare import prepare
from tests.conftest import launch, text_of
from tests.test_train import assert_same_weights, records, signal_after, weights

Arguments = Callable[..., list[str]]


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, Path]:
    """Two data folders of bytes, of different text."""
    made = []
    for number in (1, 2):
        text = tmp_path / f"text{number}.txt"
        text.write_text(text_of(3000, seed=number))
        made.append(tmp_path / f"data{number}")
        asked = PrepareConfig(source=str(text), tokenizer="bytes")
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
    assert len(re.findall(r"this run reads \d+\.\d\d epochs", shown)) == 2
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


def test_fewer_tokens_are_evaluated_of_train_than_of_val(
    small_run: Arguments, two: tuple[Path, Path]
) -> None:
    """The sources divide the tokens of a split by their weights."""
    mixed = mixture((two[0], 0.75), (two[1], 0.25))

    def budgets(tokens: str) -> dict[str, list[int | None]]:
        corpus = open_corpus(load_config(small_run(*mixed, "--eval.tokens", tokens), "test"))
        return {
            name: sorted((part.tokens for part in parts), key=lambda count: count or 0)
            for name, parts in corpus.evaluated.items()
        }

    assert budgets("4000") == {"train": [1000, 3000], "val": [1000, 3000]}
    assert budgets("1000000") == {"train": [131_072, 393_216], "val": [250_000, 750_000]}
    assert budgets("null") == {"train": [131_072, 393_216], "val": [None, None]}


def test_another_mixture_is_refused_with_what_differs_or_accepted_and_logged(
    small_run: Arguments,
    two: tuple[Path, Path],
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    six = ["--train.max_steps", "6"]
    with monkeypatch.context() as patch:
        signal_after(patch, 3, 15)
        assert launch(small_run(*mixture((two[0], 1), (two[1], 1)), *six)) == 75
    other = [*mixture((two[0], 3), (two[1], 1), (corpus, 4)), *six]
    assert launch(small_run(*other)) == 2
    shown = capsys.readouterr().err
    assert re.search(r"data\.train was data., weight 1 \(.*\), is .*corpus, weight 4 \(", shown)
    assert shown.rstrip().endswith("or accept it with --checkpoint.allow_change data.train")
    assert launch(small_run(*other, "--checkpoint.allow_change", "data.train")) == 0
    assert re.search(r"from step 3 on data\.train is .*corpus, weight 4", capsys.readouterr().err)
    # 24 sequences of 12 each, then 24 by 3 : 1 : 4
    state = json.loads((tmp_path / "run/checkpoints/step_00000006/trainer_state.json").read_text())
    assert ([read["first"] for read in state["data_read"]], state["sequences"]) == ([0, 24], 48)
    assert [len(read["sources"]) for read in state["data_read"]] == [2, 3]
    # the change stays in effect, without being allowed again
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
    """From sequence 48 on there is one source; it continues with its next sequence."""
    both = opened(small_run(*mixture((two[0], 1), (two[1], 1))))
    alone = opened(small_run("--data.train", str(two[0])))
    alone.load_state_dict(both.state_dict() | {"sequences": 48})
    number = [source.path for source in both.sources].index(str(two[0]))
    expected = both.mixtures[0].orders[number].locate(np.arange(24, 40))
    assert np.array_equal(alone.mixtures[0].locate(np.arange(48, 64))[1:], expected)
    scaled = opened(small_run(*mixture((two[1], 10), (two[0], 10))))  # also in another order
    assert np.array_equal(
        scaled.mixtures[0].locate(np.arange(64)), both.mixtures[0].locate(np.arange(64))
    )


def test_sources_come_and_go_and_each_goes_on_where_it_was() -> None:
    """A + B for 100 windows, A alone for 50, then both again."""
    reads: list[DataRead] = []
    steps: list[tuple[dict[str, float], int, dict[str, int]]] = [
        ({"a": 1, "b": 1}, 100, {"a": 50, "b": 50}),
        ({"a": 1}, 150, {"a": 100, "b": 50}),
        ({"a": 3, "b": 1}, 154, {"a": 103, "b": 51}),
    ]
    first = 0
    for weights_, end, expected in steps:
        sources = [TrainedSource(name, weight, name) for name, weight in weights_.items()]
        reads.append(DataRead(first, sources))
        assert sequences_given(reads, end) == expected
        first = end
    assert sequences_given(reads, 120) == {"a": 70, "b": 50}  # what comes later does not count


# --------------------------------------------------------------------------- documents


@pytest.mark.slow
def test_document_mask_trains_and_does_not_depend_on_the_micro_batch(
    small_run: Arguments, tmp_path: Path
) -> None:
    lines = [json.dumps({"text": text_of(30, seed=i)}) for i in range(60)]
    (tmp_path / "text.jsonl").write_text("\n".join(lines))
    corpus = tmp_path / "documents"
    prepare(PrepareConfig(source=str(tmp_path / "text.jsonl"), tokenizer="bytes"), corpus)
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


def test_document_mask_needs_end_of_text_in_shards_without_an_index(tmp_path: Path) -> None:
    words = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, 30)}
    tokenizer = tokenizers.Tokenizer(WordLevel(words, unk_token="<unk>"))
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    tokens = np.tile(np.array([*range(4, 28), 1], np.uint16), 41)
    tokens[-1] = 2  # separates nothing
    for split in ("train", "val"):
        np.save(tmp_path / f"x_{split}_0.npy", tokens)
    config = Config(data=DataConfig(train=str(tmp_path), document_mask=True))
    with pytest.raises(UserError, match=r"no end-of-text token \('</s>'\) between documents"):
        open_corpus(config)
    np.save(tmp_path / "a_train_0.npy", tokens[:1])  # the first shard
    with pytest.raises(UserError, match="the first 0 tokens"):
        open_corpus(config)
    (tmp_path / "a_train_0.npy").unlink()
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<s>"}')
    assert open_corpus(config).target_mask.document_end == 1
