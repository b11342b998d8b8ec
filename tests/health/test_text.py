"""The statistics of a text find copies, leaks, lost letters and a wrong tokenizer."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from accel_gpt.config.data import DataConfig, PrepareConfig, Weighted
from accel_gpt.config.experiment import Config, EvalConfig, Stage, TrainConfig
from accel_gpt.config.model import ModelConfig
from accel_gpt.data.corpus import open_corpus
from accel_gpt.health import text, windows
from accel_gpt.health.text import STATISTICS, TextStatistics, text_statistics
from accel_gpt.prepare.prepare import prepare


def data_folder(
    folder: Path, train: list[str], val: list[str], vocab_size: int | None = None
) -> str:
    """Prepare documents as the data folder `data`: as bytes, or by a tokenizer of this size."""
    for name, documents in (("train", train), ("val", val)):
        (folder / name).mkdir(parents=True)
        for number, document in enumerate(documents):
            (folder / name / f"{number:04d}.txt").write_text(document, encoding="utf-8")
    asked = PrepareConfig(
        source=str(folder / "train"),
        val=str(folder / "val"),
        tokenizer="bpe" if vocab_size else "bytes",
        **({"vocab_size": vocab_size} if vocab_size else {}),
    )
    prepare(asked, folder / "data")
    return str(folder / "data")


def config_of(data: DataConfig) -> Config:
    model = ModelConfig(n_layer=1, n_head=1, n_embd=8, block_size=64)
    return replace(Config(), data=data, model=model, eval=EvalConfig(tokens=4096))


def statistics(folder: Path, train: list[str], val: list[str]) -> TextStatistics:
    data = data_folder(folder, train, val)
    return text_statistics(config_of(DataConfig(train=data)), folder)


def documents(count: int, first: int = 0) -> list[str]:
    """Return documents that have no window in common."""
    draw = np.random.default_rng(first)
    letters = np.array([*"abcdefghijklmnopqrstuvwxyz "])
    return ["".join(draw.choice(letters, 600)) for _ in range(count)]


def test_sound_text(tmp_path: Path) -> None:
    found = statistics(tmp_path, documents(40), documents(8, first=1))
    assert (found.documents, found.median_document) == (40, 600)
    assert found.counted_tokens == found.train_tokens == 40 * 601
    assert found.bytes_per_token == pytest.approx(600 / 601, abs=0.01)
    nothing = ("val_in_train", "repeated", "copied_share", "unreadable")
    assert {getattr(found, name) for name in nothing} == {0}
    assert found.read_back == 1
    assert found.most_frequent_share == pytest.approx(1 / 27, abs=0.01)
    # 27 letters without any order: counting finds their entropy, and nothing more
    for loss in found.losses.values():
        assert loss == pytest.approx(math.log(27), abs=0.1)


def test_copies_in_train(tmp_path: Path) -> None:
    long = documents(10)
    short = [document[:300] for document in documents(10, first=2)]
    found = statistics(tmp_path, long * 4 + short * 2, documents(8, first=1))
    copied = 3 * sum(map(len, long)) + sum(map(len, short))
    assert found.copied_share == pytest.approx(copied / (copied + sum(map(len, long + short))))
    assert found.repeated > 0.95  # all windows in one document
    assert found.val_in_train == 0


def test_validation_text_in_train(tmp_path: Path) -> None:
    val = documents(8, first=1)
    found = statistics(tmp_path, [*documents(40), *val[:4]], val)
    assert found.val_in_train == pytest.approx(1 / 2, abs=0.1)
    assert found.repeated == 0


def test_lost_letters(tmp_path: Path) -> None:
    broken = [document.replace("e", "\ufffd").replace("q", "\x03") for document in documents(40)]
    found = statistics(tmp_path, broken, documents(8, first=1))
    assert found.unreadable == pytest.approx(2 / 27, abs=0.01)


def test_the_tokenizer_of_other_data_gives_other_tokens_back(tmp_path: Path) -> None:
    sources = [path.read_text() for path in sorted(Path(text.__file__).parent.glob("*.py"))]
    page = (Path(text.__file__).parents[1] / "report" / "page.js").read_text()
    own = data_folder(tmp_path / "own", sources, sources[:2], vocab_size=700)
    other = data_folder(tmp_path / "other", [page], [page], vocab_size=700)
    shards = tmp_path / "shards"
    shards.mkdir()
    for split in ("train", "val"):
        content = np.load(Path(own) / f"{split}_000000.npy")
        content.astype("<u2").tofile(shards / f"{split}.bin")
    for folder, least, most in ((own, 0.98, 1.0), (other, 0.0, 0.95)):
        tokenizer = str(Path(folder, "tokenizer.json"))
        config = config_of(DataConfig(train=str(shards), tokenizer=tokenizer))
        found = text_statistics(config, tmp_path / Path(folder).parent.name)
        assert least <= found.read_back <= most


# --------------------------------------------------------------------------- sources


def test_a_mixture_counts_as_it_is_read(tmp_path: Path) -> None:
    """A source with weight 3 of 4 gives three quarters of all frequencies, whatever its size."""
    much = data_folder(tmp_path / "much", ["ab" * 3000], ["ab" * 500])
    little = data_folder(tmp_path / "little", ["cd" * 500], ["cd" * 500])
    sources = (Weighted(much, 1.0), Weighted(little, 3.0))
    run = tmp_path / "run"
    run.mkdir()
    found = text_statistics(config_of(DataConfig(train=sources)), run)
    assert found.most_frequent in "cd"
    assert found.most_frequent_share == pytest.approx(3 / 8, abs=0.01)
    mixed = -(math.log(1 / 8) + 3 * math.log(3 / 8)) / 4
    assert found.losses["unigram"] == pytest.approx(mixed, abs=0.05)
    assert (run / STATISTICS).is_file()  # it belongs to no folder of its own


def test_only_part_of_much_text_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "MOST_TOKENS", 12_000)
    monkeypatch.setattr(windows, "CHUNK", 1000)
    found = statistics(tmp_path, documents(40) * 2, documents(8, first=1))
    assert found.counted_tokens == pytest.approx(12_000, abs=1000)
    assert found.train_tokens == 80 * 601
    assert found.copied_share < 0.5  # a document that is cut is none


# --------------------------------------------------------------------------- the file


def test_statistics_are_computed_once_for_each_evaluation(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(DataConfig(train=str(corpus)))
    first = text_statistics(config, tmp_path)
    assert [*json.loads((corpus / STATISTICS).read_text()).values()] == [vars(first)]
    other = replace(config, eval=EvalConfig(tokens=1024))
    second = text_statistics(other, tmp_path)
    assert len(json.loads((corpus / STATISTICS).read_text())) == 2

    def fail(*_: object) -> TextStatistics:
        raise AssertionError("measured again")

    monkeypatch.setattr(text, "measure", fail)
    assert text_statistics(config, tmp_path) == first
    assert text_statistics(other, tmp_path) == second


def test_a_folder_that_cannot_be_written_leaves_them_with_the_run(
    corpus: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (corpus / STATISTICS).mkdir()  # nothing can be written there
    config = config_of(DataConfig(train=str(corpus)))
    first = text_statistics(config, run)
    assert [*json.loads((run / STATISTICS).read_text()).values()] == [vars(first)]
    assert text_statistics(config, run) == first


def test_statistics_that_lack_a_loss_are_measured_again(corpus: Path, tmp_path: Path) -> None:
    config = config_of(DataConfig(train=str(corpus)))
    first = text_statistics(config, tmp_path)
    for changed in ({"losses": {}}, {"window": 10**400}, {"repeated": 1e999}):
        stored = {name: one | changed for name, one in read(corpus / STATISTICS).items()}
        (corpus / STATISTICS).write_text(json.dumps(stored))
        assert text_statistics(config, tmp_path) == first
    (corpus / STATISTICS).write_text("[" * 200_000)
    assert text_statistics(config, tmp_path) == first


def read(path: Path) -> dict[str, dict[str, object]]:
    found: dict[str, dict[str, object]] = json.loads(path.read_text())
    return found


def test_damaged_statistics_are_measured_again(corpus: Path, tmp_path: Path) -> None:
    config = config_of(DataConfig(train=str(corpus)))
    first = text_statistics(config, tmp_path)
    (corpus / STATISTICS).write_text('{"x": {"train_tokens": "many"}}')
    assert text_statistics(config, tmp_path) == first


def test_shapes_of_windows_follow_the_bytes_of_a_token(corpus: Path) -> None:
    opened = open_corpus(config_of(DataConfig(train=str(corpus))))
    val = text.evaluated_tokens(opened, 64)
    assert text.window_length(val, 64) == 64  # 200 bytes, but no more than a sequence
    assert text.window_length(val, 1024) == pytest.approx(200, abs=3)
    assert text.window_length(replace(val, bytes=4 * val.bytes), 1024) == 50
    assert text.window_length(replace(val, bytes=np.full(len(val.bytes), np.nan)), 1024) == 50


def test_the_text_of_the_val_loss_is_counted_not_what_is_followed(
    corpus: Path, tmp_path: Path
) -> None:
    """All stages count in the train text; eval/val_loss is that of the config's own data.train."""
    added = data_folder(tmp_path, documents(40), documents(8, first=1))
    own = config_of(DataConfig(train=str(corpus)))
    train = TrainConfig(max_steps=40, tokens_per_step=1024, micro_batch_size=1)
    stages = (Stage(0.75, {"data.train": added}),)
    both = replace(own, train=train, stages=stages)
    alone, followed = (text.evaluated_tokens(open_corpus(one), 64) for one in (own, both))
    assert (followed.tokens == alone.tokens).all()
    assert followed.weight[followed.targets].sum() == pytest.approx(1)
    # counted by what the run reads of each: three quarters and one
    found = [text_statistics(one, tmp_path) for one in (own, both)]
    sources = open_corpus(both).weighted_sources
    assert found[1].train_tokens == sum(source.split.tokens for source in sources)
    assert [source.weight for source in sources] == [30 * 16, 10 * 16]
    assert found[1].most_frequent_share != found[0].most_frequent_share
