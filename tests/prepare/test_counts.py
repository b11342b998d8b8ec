"""What was read, and what the tokens do not hold, is told once at the end."""

import gzip
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from accel_gpt.cli import dispatch
from accel_gpt.config.data import PrepareConfig
from accel_gpt.data.shards import open_split
from accel_gpt.data.tokenizer import load_tokenizer
from accel_gpt.errors import UserError
from accel_gpt.prepare.prepare import prepare
from tests.conftest import run_here, text_of

EOT = "<|endoftext|>"


def write_tokenizer(kind: str, folder: Path) -> Path:
    """Write a tokenizer.json that was trained on a few words of English."""
    unknown = None if kind in ("dropping", "bytes") else "[UNK]"
    made = tokenizers.Tokenizer(models.BPE(unk_token=unknown))
    alphabet = []
    if kind == "bytes":
        made.pre_tokenizer = pre_tokenizers.ByteLevel()
        made.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    elif kind == "words":
        made.pre_tokenizer = pre_tokenizers.Whitespace()
    else:
        made.pre_tokenizer = pre_tokenizers.Metaspace()
        made.decoder = decoders.Metaspace()
    if kind == "accents":
        made.normalizer = normalizers.Sequence(
            [normalizers.Lowercase(), normalizers.NFD(), normalizers.StripAccents()]
        )
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["</s>", *filter(None, [unknown])],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    made.train_from_iterator([text_of(500) + "\n  x"], trainer)
    folder.mkdir(exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


LACKING = r"[2-4] of \d+ characters are not in the tokens, such as ('.'(, )?)+"
SPACES = r"\d of \d+ characters are not in the tokens, such as '( |\\n)'.*"


@pytest.mark.parametrize(
    ("kind", "text", "told"),
    [
        ("bytes", "the king: 中文 é\n  x", []),
        ("unknown", "中 the ж", [LACKING]),
        ("accents", "Thé king", []),
        ("dropping", "the 中文\n  x", [LACKING]),
        ("words", "the kinga", []),
        ("words", "the 中文\n  went", [SPACES]),
    ],
)
def test_what_the_tokens_do_not_hold_is_told(
    kind: str, text: str, told: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": text}) + "\n" + '{"text": "the war"}\n')
    tokenizer = write_tokenizer(kind, tmp_path / "tokenizer")
    words = ["--tokenizer", str(tokenizer), "--out", str(tmp_path / "out")]
    assert run_here(dispatch, ["prepare", str(tmp_path / "a.jsonl"), *words]) == 0
    warnings = [line for line in capsys.readouterr().err.splitlines() if "WARNING" in line]
    assert len(warnings) == len(told)
    for line, expected in zip(warnings, told, strict=True):
        assert re.search(f"{expected}$", line)


def open_text(folder: Path, name: str) -> str:
    """Return the text of a split."""
    split = open_split(folder, name)
    return load_tokenizer(folder).decode(split.read(0, 0, split.tokens).tolist())


def documents_of(folder: Path) -> list[str]:
    """Return the documents of both splits."""
    found = []
    for name in ("train", "val"):
        split = open_split(folder, name)
        text = open_text(folder, name)
        found += text.split(EOT)[:-1]
        assert sum(shard.documents or 0 for shard in split.shards) == text.count(EOT)
    return found


def test_an_end_of_text_that_the_text_spells_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text(f"one\n{EOT}\ntwo\n{EOT}\n" + "three\n" * 9)
    prepare(PrepareConfig(source=str(tmp_path / "a.txt"), tokenizer="bytes"), tmp_path / "out")
    told = capsys.readouterr().err
    assert f"the text spells {EOT} 2 times as letters, which ends no document" in told


# --------------------------------------------------------------------------- rows and duplicates


def run_prepare(source: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Prepare with bytes; return what is told."""
    prepare(PrepareConfig(source=str(source), tokenizer="bytes"), out)
    return capsys.readouterr().err


def test_rows_without_text_and_duplicates_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nine of ten are copies, beside a null and an empty text."""
    rows = [{"text": f"text {i // 10}"} for i in range(100)] + [{"text": None}, {"text": ""}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    told = run_prepare(tmp_path / "a.jsonl", tmp_path / "out", capsys)
    assert "100 documents; 2 without text; 90 exact duplicates (90.0%)" in told


def test_pages_of_html_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = "<!-- saved -->\n<!DOCTYPE html>\n<html><body><p>text</p></body></html>"
    for name, text in (("page.txt", page), ("notes.md", "a < b\n" * 9), ("x.html", page)):
        (tmp_path / name).write_text(text)
    told = run_prepare(tmp_path, tmp_path / "data" / "out", capsys)
    assert "WARNING: the markup of HTML is in 2 documents" in told


# --------------------------------------------------------------------------- encodings

FRENCH = "L'été dernier, nous sommes allés à la plage avec nos frères.\n" * 3
ENCODED = {
    "fr.txt": (FRENCH, "latin-1"),
    "de.txt": ("Die Straße führt über die große Brücke.\n" * 3, "cp1252"),
    "ru.txt": ("Привет, как дела? Это обычный русский текст.\n" * 3, "koi8-r"),
    "ja.txt": ("これは日本語のテキストです。漢字も含まれています。\n" * 3, "shift_jis"),
    "pl.txt": ("Zażółć gęślą jaźń, proszę bardzo, to jest tekst.\n" * 3, "cp1250"),
}


def test_files_that_are_not_utf8_are_read_as_detected_and_told_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "text"
    source.mkdir()
    for name, (text, encoding) in ENCODED.items():
        (source / name).write_bytes(text.encode(encoding))
    (source / "packed.txt.gz").write_bytes(gzip.compress(FRENCH.encode("latin-1")))
    (source / "plain.txt").write_text("naïve")
    (source / "cut.txt").write_bytes("cut".encode("utf-16")[:-1])
    texts = [text for text, _ in ENCODED.values()]
    told = run_prepare(source, tmp_path / "out", capsys)
    assert sorted(documents_of(tmp_path / "out")) == sorted([*texts, FRENCH, "naïve"])
    line, left_out = [line for line in told.splitlines() if "UTF-8" in line]
    assert left_out == "WARNING: 1 file not in UTF-8, left out: cut.txt"
    assert line.startswith("WARNING: 6 files not in UTF-8, read as detected: ")
    assert all(name in line for name in [*ENCODED, "packed.txt.gz"])


def test_a_few_invalid_bytes_leave_a_text_utf8(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "un été à la plage très agréable\n" * 20
    (tmp_path / "a.txt").write_bytes(text.encode() + b"\xff\n" + text.encode())
    (tmp_path / "b.txt").write_text(text)
    told = run_prepare(tmp_path, tmp_path / "data" / "out", capsys)
    assert "1 file not in UTF-8, read as detected: utf-8 with invalid bytes: a.txt" in told
    assert f"{text}\ufffd\n{text}" in documents_of(tmp_path / "data" / "out")


# --------------------------------------------------------------------------- chats

TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}"


@pytest.mark.slow  # imports transformers
def test_chats_are_written_with_the_template_of_the_tokenizer(tmp_path: Path) -> None:
    """The special tokens of the template are tokens; in a text they would be letters."""
    path = write_tokenizer("bytes", tmp_path / "tokenizer")
    made = tokenizers.Tokenizer.from_file(str(path))
    made.add_special_tokens(["<|user|>", "<|assistant|>"])
    made.save(str(path))
    settings = {"eos_token": "</s>", "chat_template": TEMPLATE}
    path.with_name("tokenizer_config.json").write_text(json.dumps(settings))
    turns = [{"role": "user", "content": "the king"}, {"role": "assistant", "content": "went"}]
    lines = [json.dumps({"chat": {"turns": turns}}), json.dumps({"chat": {"turns": turns[:1]}})]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    config = PrepareConfig(
        source=str(tmp_path / "a.jsonl"), text_field="chat.turns", tokenizer=str(path)
    )
    prepare(config, tmp_path / "out")
    both = open_text(tmp_path / "out", "train") + open_text(tmp_path / "out", "val")
    assert "<|user|>the king</s><|assistant|>went</s></s>" in both.replace("|> ", "|>")
    special = [made.token_to_id(name) for name in ("<|user|>", "<|assistant|>", "</s>")]
    ids = open_split(tmp_path / "out", "train").read(0, 0, 4).tolist()
    assert ids[0] == special[0]
    assert run_here(dispatch, ["inspect", str(tmp_path / "out")]) == 0
    with pytest.raises(UserError, match="the tokenizer bytes has no chat template"):
        prepare(replace(config, tokenizer="bytes"), tmp_path / "bytes")
