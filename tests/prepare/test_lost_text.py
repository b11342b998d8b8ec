"""Text that tokens do not hold is told: unknown and dropped characters, white space, separators."""

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
    if kind == "lower":
        made.normalizer = normalizers.Lowercase()
    if kind == "accents":
        made.normalizer = normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])
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


UNKNOWN = r"\d+ of \d+ tokens \(\d\d\.\d%\) are \[UNK\]"
LACKING = r"2 of \d+ visible characters are missing, such as ('.'(, )?)+"
SPACES = r"\d of \d spaces, line ends and tabs are missing"
CHANGED = r"case, accents or white space differ in 1 of 2 pieces of text"


@pytest.mark.parametrize(
    ("kind", "text", "told"),
    [
        ("bytes", "the king: 中文 é\n  x", []),
        ("unknown", "the king", []),
        ("unknown", "the king \n  x", []),
        ("unknown", "中 the ж", [UNKNOWN, LACKING]),
        ("lower", "THE KING", [CHANGED]),
        ("accents", "thé king", [CHANGED]),
        ("dropping", "the king", []),
        ("dropping", "the 中文\n  x", [LACKING]),
        ("words", "the king", []),
        ("words", "the kinga", [CHANGED]),
        ("words", "the king\n  went", [SPACES]),
        ("words", "the 中文\n  went", [UNKNOWN, LACKING, SPACES]),
    ],
)
def test_what_the_tokens_do_not_hold_is_told(
    kind: str, text: str, told: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": text}) + "\n" + '{"text": "the war"}\n')
    tokenizer = write_tokenizer(kind, tmp_path / "tokenizer")
    words = ["--tokenizer", str(tokenizer), "--out", str(tmp_path / "out"), "--workers", "1"]
    assert run_here(dispatch, ["prepare", str(tmp_path / "a.jsonl"), *words]) == 0
    warnings = [line for line in capsys.readouterr().err.splitlines() if "WARNING" in line]
    sentence = f"the tokens do not hold all of the text: {'; '.join(told)}"
    assert len(warnings) == bool(told)
    assert all(re.search(f"{sentence}$", line) for line in warnings)


@pytest.mark.parametrize("kind", ["unknown", "dropping"])
def test_a_text_of_which_no_character_has_a_token_is_refused(kind: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("中文 日本\n" * 50)
    tokenizer = str(write_tokenizer(kind, tmp_path / "tokenizer"))
    config = PrepareConfig("text", str(tmp_path / "a.txt"), tokenizer=tokenizer, workers=1)
    with pytest.raises(UserError, match=r"no token for any visible character .*, such as '.', '"):
        prepare(config, tmp_path / "out")
    assert not list(tmp_path.glob("out*/"))


# --------------------------------------------------------------------------- separators

STORIES = [f"Story {i}.\n\nIt ends " + "so " * (i % 9) for i in range(60)]


def config_of(tmp_path: Path, kind: str, line_end: str) -> PrepareConfig:
    """Return the config of a text file, or of rows of ten stories each."""
    between = f"{line_end}{EOT}{line_end}"
    stories = [story.replace("\n", line_end) for story in STORIES]
    path = tmp_path / f"stories.{kind}"
    if kind == "txt":
        path.write_bytes((between.join(stories) + between).encode())
    else:
        rows = [between.join(stories[i : i + 10]) for i in range(0, 60, 10)]
        path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    source = "text" if kind == "txt" else "jsonl"
    return PrepareConfig(source, str(path), tokenizer="bytes", workers=1)  # type: ignore[arg-type]


def documents_of(folder: Path) -> list[str]:
    """Return the documents of both splits."""
    found = []
    tokenizer = load_tokenizer(folder)
    for name in ("train", "val"):
        split = open_split(folder, name)
        text = tokenizer.decode(split.read(0, 0, split.tokens).tolist())
        found += text.split(EOT)[:-1]
        assert sum(shard.documents or 0 for shard in split.shards) == text.count(EOT)
    return found


@pytest.mark.parametrize("kind", ["txt", "jsonl"])
@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_a_separator_that_the_text_spells_is_told_and_can_end_documents(
    kind: str,
    line_end: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("accel_gpt.prepare.readers.CHUNK_BYTES", 7)
    config = config_of(tmp_path, kind, line_end)
    prepare(config, tmp_path / "letters")
    told = capsys.readouterr().err
    count = 60 if kind == "txt" else 54
    assert f"the text spells {EOT} {count} times, which became letters and ends no" in told
    assert f"--separator '{EOT}' (data.prepare.separator in a config)" in told
    prepare(replace(config, separator=EOT), tmp_path / "split")
    assert "WARNING" not in capsys.readouterr().err
    assert sorted(documents_of(tmp_path / "split")) == sorted(STORIES)
    with pytest.raises(UserError, match="chars tokenizer has no end-of-text token to put there"):
        replace(config, separator=EOT, tokenizer="chars")
    assert open_split(tmp_path / "split", "val").shards[0].documents in range(1, 20)
