"""`data.text`: the options that it sets, its minimum size, and its line ends."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from accel_gpt.children import launch_child
from accel_gpt.cli import dispatch
from accel_gpt.commands.resolve import load_config
from accel_gpt.config.data import PrepareConfig
from accel_gpt.config.experiment import Config
from accel_gpt.console import run_main
from accel_gpt.data.index import read_index
from accel_gpt.data.shards import open_split
from accel_gpt.data.tokenizer import load_tokenizer
from accel_gpt.data.tokenizer_json import EOT
from accel_gpt.prepare import missing_data
from accel_gpt.prepare.prepare import prepare
from accel_gpt.runs.folder import RunFolder
from tests.conftest import QUIET, launch, run_here, text_of


def load(folder: Path, *words: str, text: str = "") -> Config:
    path = folder / "x.yaml"
    path.write_text(f"out_dir: runs/x\ndata: {{train: data/y, prepare: {{source: stdlib}}{text}}}")
    return load_config([str(path), *words], "test")


def test_a_text_takes_the_place_of_the_data_of_the_config(tmp_path: Path) -> None:
    data = load(tmp_path, "--data.text", "a b/*.txt", "--data.prepare.tokenizer", "bytes").data
    assert (data.train, data.text) == ("runs/x/data", None)
    assert (data.prepare.source, data.prepare.tokenizer) == ("a b/*.txt", "bytes")


def test_another_path_is_read_as_the_file_says(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    prepare = "{source: a.jsonl, subset: x, text_field: body}"
    path.write_text(f"data: {{train: data/y, prepare: {prepare}}}")
    found = load_config([str(path), "--data.prepare.source", "b.jsonl"], "test").data.prepare
    assert (found.source, found.subset) == ("b.jsonl", None)
    assert found.text_field == "body"


@pytest.mark.parametrize("train", ["mine", "[{path: a}, {path: b}]"])
def test_an_option_for_the_data_drops_the_preparation_of_the_file(
    tmp_path: Path, train: str
) -> None:
    words = ("--data.train", train)
    assert load_config(["shakespeare_char", *words], "test").data.prepare == PrepareConfig()
    assert load(tmp_path, *words).data.prepare == PrepareConfig()
    assert load(tmp_path, *words, text=", text: a.txt").data.prepare == PrepareConfig()
    assert load_config(["shakespeare_char", *words], "test").sample.prompts == ("",)


TINY = {
    "train.max_steps": 2,
    "train.tokens_per_step": 256,
    "train.micro_batch_size": 4,
    "schedule.warmup_steps": 0,
    "eval.tokens": 64,
    "model.block_size": 64,
    "model.n_layer": 1,
    "sample.max_new_tokens": 2,
}


@pytest.mark.slow
def test_a_run_prepares_in_a_child_and_gives_it_no_setting_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    children = []

    def started(*arguments: Any, **options: Any) -> Any:
        children.append(launch_child(*arguments, **options))
        return children[-1]

    monkeypatch.setattr(missing_data, "launch_child", started)
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text('{"body": "text"}\n')
    words = ["--data.text", "rows.jsonl", "--data.prepare.tokenizer", "bytes"]
    with pytest.raises(SystemExit) as ended:
        missing_data.ensure_data(load(tmp_path, *words))
    assert ended.value.code == 2
    assert "error: data.prepare.text_field is text, but rows.jsonl has" in capfd.readouterr().err
    field = ("--data.prepare.text_field", "body", "--data.prepare.val_fraction", "0.5")
    missing_data.ensure_data(load(tmp_path, *words, *field))
    assert read_index(Path("runs/x/data")).prepared["source"] == "rows.jsonl"
    assert all("rows" not in str(child.args) for child in children)


@pytest.mark.slow
def test_a_run_on_a_text_resumes_when_the_text_is_gone(
    small_run: Callable[..., list[str]], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "rows.jsonl"
    text.write_text("".join(json.dumps({"text": text_of(40, i)}) + "\n" for i in range(3)))
    words = small_run("--data.text", str(text), "--data.prepare.tokenizer", "bpe", *QUIET)
    assert launch([*words, "--train.max_steps", "4"]) == 0
    assert capfd.readouterr().err.count("the bpe has") == 1
    text.unlink()
    more = ("--train.max_steps", "6", "--checkpoint.allow_change", "train.max_steps")
    assert launch([*words, *more]) == 0
    assert RunFolder(tmp_path / "run").step == 6
    seen = capfd.readouterr()
    assert "prepared" not in seen.out
    assert launch([str(tmp_path / "run" / "config.yaml")]) == 0  # as recorded in the run


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_few_documents_have_both_splits(tmp_path: Path, rows: int) -> None:
    text = tmp_path / "a.jsonl"
    texts = [f"row {i} " * 8 + "é" * 3 for i in range(rows)]
    text.write_text("".join(json.dumps({"text": row}) + "\n" for row in texts))
    config = PrepareConfig(source=str(text), tokenizer="bytes", val_fraction=0.2)
    prepare(config, tmp_path / "out")
    train, val = (open_split(tmp_path / "out", name) for name in ("train", "val"))
    assert val.tokens >= 2 <= train.tokens
    tokenizer = load_tokenizer(tmp_path / "out")
    both = ""
    for split in (train, val):
        held = tokenizer.decode(split.read(0, 0, split.tokens).tolist()).replace(EOT, "")
        assert [shard.bytes for shard in split.shards] == [len(held.encode())]
        both += held
    assert sorted(both) == sorted("".join(texts))


def test_a_document_longer_than_a_shard_has_both_splits(tmp_path: Path) -> None:
    """No document begins in the last shard, whose end becomes val."""
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "x" * 120}))
    config = PrepareConfig(source=str(tmp_path / "a.jsonl"), tokenizer="bytes", shard_tokens=50)
    prepare(config, tmp_path / "out")
    train, val = (open_split(tmp_path / "out", name).shards for name in ("train", "val"))
    assert [shard.documents for shard in train] == [1, 0, 0]
    assert [shard.documents for shard in val] == [1]


def test_line_ends_of_windows_become_those_of_unix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At any cut of a file: between chunks, pieces and splits."""
    monkeypatch.setattr("accel_gpt.prepare.documents.BATCH_CHARACTERS", 20)
    monkeypatch.setattr("accel_gpt.prepare.text_files.CHUNK_BYTES", 7)
    text = "ab cd\n\nefg. h\n  \n" * 4
    config = PrepareConfig(source=str(tmp_path / "a.txt"), tokenizer="chars")
    for lines in ("\n", "\r\n"):
        (tmp_path / "a.txt").write_bytes(text.replace("\n", lines).encode())
        for i in range(1, 20, 6):
            out = tmp_path / f"out{i}"
            prepare(replace(config, val_fraction=i / 20), out)
            tokenizer, both = load_tokenizer(out), ""
            for name in ("train", "val"):
                split = open_split(out, name)
                both += tokenizer.decode(split.read(0, 0, split.tokens).tolist())
            assert both == text
            shutil.rmtree(out)


def test_a_text_is_prepared_by_its_name_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "b").mkdir()
    for name in ("input.txt", "b/1.jsonl"):
        (tmp_path / name).write_text(json.dumps({"text": "some text\r\n" * 9}) + "\n")
    options = ("--tokenizer", "bytes")
    for word, out in (("input.txt", "input_bytes"), ("b", "b_bytes"), ("b/*", "b_bytes")):
        shutil.rmtree(tmp_path / "data", ignore_errors=True)
        assert run_main(dispatch, ["prepare", word, *options]) == 0
        tokenizer, split = load_tokenizer(f"data/{out}"), open_split(f"data/{out}", "train")
        assert tokenizer.decode(split.read(0, 0, split.tokens).tolist()).partition(EOT)[0]


@pytest.mark.usefixtures("settings_kept")
def test_a_config_that_prepares_another_text_deletes_no_data(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A copy of a shipped config whose data.train was edited, but not its data.prepare."""
    before = {path: path.read_bytes() for path in corpus.iterdir()}
    words = [f"--{key}={value}" for key, value in TINY.items()]
    config = tmp_path / "mine.yaml"
    config.write_text(f"data: {{train: {corpus}, prepare: {{source: stdlib}}}}\n")
    assert run_here(dispatch, ["train", str(config), *words, "--out_dir", str(tmp_path / "x")]) == 2
    assert f"{corpus} was prepared with other settings (source: " in capsys.readouterr().err
    assert {path: path.read_bytes() for path in corpus.iterdir()} == before
