"""A text cut where `Cuts` allows it gets the ids of the whole text, with any tokenizer.json."""

import json
import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Library

from accel_gpt.data.cuts import LONGEST_CONTEXT, runs_of_regex
from accel_gpt.data.tokenizer import HFTokenizer
from accel_gpt.data.tokenizer_json import PATTERN
from accel_gpt.prepare.pieces import checked_cuts, pieces

SCRIPTS = (
    "the cat sat on mat and looked don't 12345 3.14 foo_bar() <b>bold</b> <s> THE Quick é naïve "
    "中文的文字 很好。 привет ひらがな 😀 e\u0301 \u3000 \xa0 a--b ... "
    "\"quoted\" {'k': 1} \ufb01 ½ aaaa ab abab ▁ \u200b"
)
WORDS = SCRIPTS.split(" ")
SPACES = [" ", "\n", "  ", "\n\n", "\t", " \n", "\n    ", "", "\r\n"]
SPECIAL = ["<unk>", "</s>"]
GPT_4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def text_of(draw: random.Random, words: int) -> str:
    """Words of many scripts, with all kinds of white space between them."""
    parts = []
    for _ in range(words):
        parts.append(draw.choice(WORDS))
        parts += draw.choices(SPACES, [60, 12, 2, 3, 1, 1, 2, 4, 1])
    return "".join(parts)


def trained(
    model: models.Model,
    trainer: trainers.Trainer,
    split: pre_tokenizers.PreTokenizer | None = None,
    normalizer: normalizers.Normalizer | None = None,
) -> Library:
    """A tokenizer of the library, trained on text of `text_of()`."""
    tokenizer = Library(model)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if split is not None:
        tokenizer.pre_tokenizer = split
    draw = random.Random(0)
    tokenizer.train_from_iterator([text_of(draw, 40) for _ in range(100)], trainer)
    return tokenizer


def bpe(
    split: pre_tokenizers.PreTokenizer | None, normalizer: normalizers.Normalizer | None = None
) -> Library:
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL, show_progress=False)
    return trained(models.BPE(unk_token="<unk>"), trainer, split, normalizer)


def byte_level(*regexes: str) -> Library:
    splits = [pre_tokenizers.Split(Regex(regex), "isolated") for regex in regexes]
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not regexes)
    return bpe(pre_tokenizers.Sequence([*splits, last]))


def with_added_tokens() -> Library:
    tokenizer = byte_level()
    names = ["<b>", "</b>", "cat sat", "\n\n"]
    tokenizer.add_tokens([AddedToken(name, normalized=False) for name in names])
    tokenizer.add_tokens([AddedToken("mat", lstrip=True, rstrip=True)])
    return tokenizer


def one_word(change: Callable[[Library], None]) -> Library:
    """A BPE as of SentencePiece, that does not split into words; no token goes on after a space."""
    replaced = normalizers.Replace(" ", "▁")
    split = pre_tokenizers.Split("▁", "merged_with_next")
    learned = bpe(split, replaced)
    model = json.loads(learned.to_str())["model"]
    vocabulary = model["vocab"] | {f"<0x{i:02X}>": 1000 + i for i in range(256)}
    merges = [tuple(pair) for pair in model["merges"]]
    tokenizer = Library(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.add_special_tokens(SPECIAL)
    change(tokenizer)
    return tokenizer


def llama_2(tokenizer: Library) -> None:
    steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    tokenizer.normalizer = normalizers.Sequence(steps)


def newer_llama_2(tokenizer: Library) -> None:
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)


def gemma(tokenizer: Library) -> None:
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.add_tokens([AddedToken(name, normalized=False) for name in ("\n", "\n\n", "<b>")])


def wordpiece(split: pre_tokenizers.PreTokenizer | None) -> Library:
    trainer = trainers.WordPieceTrainer(vocab_size=400, special_tokens=SPECIAL)
    model = models.WordPiece(unk_token="<unk>")
    return trained(model, trainer, split, normalizers.BertNormalizer())


def unigram(split: pre_tokenizers.PreTokenizer | None) -> Library:
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False
    )
    steps = [normalizers.Nmt(), normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")]
    return trained(models.Unigram(), trainer, split, normalizers.Sequence(steps))


def wordlevel(split: pre_tokenizers.PreTokenizer) -> Library:
    vocabulary = {"<unk>": 0, "</s>": 1, "the": 2, "cat": 3}
    tokenizer = Library(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = split
    return tokenizer


MAKERS: dict[str, tuple[Callable[[], Library], bool]] = {
    "gpt2": (byte_level, True),
    "gpt4": (lambda: byte_level(GPT_4), True),
    "added tokens": (with_added_tokens, True),
    "nfc": (lambda: bpe(pre_tokenizers.ByteLevel(), normalizers.NFC()), True),
    "metaspace": (lambda: bpe(pre_tokenizers.Metaspace()), True),
    "stripped": (lambda: bpe(pre_tokenizers.Metaspace(), normalizers.Strip()), True),
    "llama 2": (lambda: one_word(llama_2), True),
    "newer llama 2": (lambda: one_word(newer_llama_2), True),
    "gemma": (lambda: one_word(gemma), True),
    "bert": (lambda: wordpiece(pre_tokenizers.BertPreTokenizer()), True),
    "t5": (lambda: unigram(pre_tokenizers.Metaspace()), True),
    "words": (lambda: wordlevel(pre_tokenizers.Whitespace()), True),
    # tokens that reach over white space, models whose words are the text, steps that look far
    "no words": (lambda: bpe(None), False),
    "wordpiece of a text": (lambda: wordpiece(None), False),
    "unigram of a text": (lambda: unigram(None), False),
    "pairs of words": (lambda: byte_level(r"\S+\s+\S+"), False),
    "quotes": (lambda: byte_level('"[^"]*"'), False),
    "lines": (lambda: byte_level("[^\n]*\n"), False),
    "look behind": (lambda: byte_level("(?<= a) b"), False),
    "chunks": (lambda: bpe(pre_tokenizers.FixedLength(5)), False),
    "strip": (lambda: bpe(None, normalizers.Strip()), False),
}


def loaded(tokenizer: Library) -> HFTokenizer:
    return HFTokenizer(
        json.loads(tokenizer.to_str()), Path("tokenizer.json"), {"eos_token": "</s>"}
    )


@pytest.mark.parametrize("name", MAKERS)
def test_a_text_cut_at_every_allowed_place_keeps_its_ids(name: str) -> None:
    make, allows_cuts = MAKERS[name]
    tokenizer = loaded(make())
    draw = random.Random(1)
    count = 0
    for _ in range(2):
        text = text_of(draw, 150)
        cuts = [0]
        for found in re.finditer(r"\S(?=[\n ]\S)", text):
            left = text[cuts[-1] : found.end()]
            if tokenizer.cuts and tokenizer.cuts.keeps_ids(left, text[found.end() :]):
                cuts.append(found.end())
        ends = [*cuts[1:], len(text)]
        parts = [text[start:end] for start, end in zip(cuts, ends, strict=True)]
        cut = [(part, i == 0, False) for i, part in enumerate(parts)]
        ids = [token for one in tokenizer.encode_pieces(cut) for token in one.tolist()]
        assert ids == tokenizer.encode(text)
        count += len(parts) - 1
    assert (count > 0) == allows_cuts


@pytest.mark.parametrize("name", [name for name, (_, allowed) in MAKERS.items() if allowed])
def test_a_long_text_is_cut_into_pieces_that_do_not_depend_on_its_chunks(name: str) -> None:
    tokenizer = loaded(MAKERS[name][0]())
    assert tokenizer.cuts is not None
    find_cut = checked_cuts(tokenizer.cuts.keeps_ids)
    text = text_of(random.Random(2), 2500)
    found = list(pieces([text], 3000, find_cut=find_cut))
    assert max(map(len, found)) < 3 * 3000
    chunks = [text[i : i + 700] for i in range(0, len(text), 700)]
    assert list(pieces(chunks, 3000, find_cut=find_cut)) == found
    ids = tokenizer.encode_pieces([(part, i == 0, False) for i, part in enumerate(found)])
    assert [token for one in ids for token in one.tolist()] == tokenizer.encode(text)
    assert all(len(piece) > LONGEST_CONTEXT for piece in found[:-1])


@pytest.mark.parametrize(
    ("regex", "runs"),
    [
        (PATTERN, 5),
        (GPT_4, 5),
        (r" ?[^(\s|[.,!?…。\uff0c])]+", 3),
        (r"[\s\S]{7}", 15),
        (r"[\s\S]{1,40}", None),
        (r"(?:\w+ )+", None),
        (r"a.*?b", None),
        (r"\[[^\]]*\]", None),
        (r"\bfoo", None),
        (r"^foo", None),
        (r"(?s).", None),
        (r"(a)\1", None),
    ],
)
def test_how_many_runs_a_match_of_a_regex_may_touch(regex: str, runs: int | None) -> None:
    if runs is None:
        with pytest.raises(ValueError):  # noqa: PT011
            runs_of_regex(regex)
    else:
        assert runs_of_regex(regex) == runs
