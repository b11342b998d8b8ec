"""A long text in pieces has the tokens of the whole text, with any tokenizer.json in use."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Library

from accel_gpt.data.tokenizer import HFTokenizer, Tokenizer
from accel_gpt.prepare.bpe import train_bpe
from accel_gpt.prepare.encoding import encode_parts
from accel_gpt.prepare.pieces import cut_finder, lead_of, pieces

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


def wordpiece() -> Library:
    trainer = trainers.WordPieceTrainer(vocab_size=400, special_tokens=SPECIAL)
    model = models.WordPiece(unk_token="<unk>")
    return trained(model, trainer, pre_tokenizers.BertPreTokenizer(), normalizers.BertNormalizer())


def unigram() -> Library:
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False
    )
    steps = [normalizers.Nmt(), normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")]
    return trained(
        models.Unigram(), trainer, pre_tokenizers.Metaspace(), normalizers.Sequence(steps)
    )


MAKERS: dict[str, Callable[[], Library]] = {
    "gpt2": byte_level,
    "gpt4": lambda: byte_level(GPT_4),
    "added tokens": with_added_tokens,
    "nfc": lambda: bpe(pre_tokenizers.ByteLevel(), normalizers.NFC()),
    "metaspace": lambda: bpe(pre_tokenizers.Metaspace()),
    "llama 2": lambda: one_word(llama_2),
    "newer llama 2": lambda: one_word(newer_llama_2),
    "gemma": lambda: one_word(gemma),
    "bert": wordpiece,
    "t5": unigram,
}


def loaded(tokenizer: Library) -> HFTokenizer:
    return HFTokenizer(
        json.loads(tokenizer.to_str()), Path("tokenizer.json"), {"eos_token": "</s>"}
    )


WITHOUT_SPACES = (
    "\n".join(["cat", "mat", "12345", "don't"] * 600),
    "\n\n".join("很好。".join(["中文的文字"] * 9) for _ in range(130)),
    "\uff0c".join(["中文的文字", "ひらがな"] * 900),
    "\n".join(["1,23,456,7,89", "cat,0.5,,mat"] * 350),
    "\t".join(["cat", "sat", "on"] * 700),
)


@pytest.mark.parametrize("name", MAKERS)
def test_a_long_text_in_pieces_has_the_tokens_of_the_whole(name: str) -> None:
    """The pieces do not depend on the chunks in which the text is read."""
    tokenizer = loaded(MAKERS[name]())
    for text in (text_of(random.Random(2), 2500), *WITHOUT_SPACES):
        found = list(pieces([text], 2000, cut_finder(tokenizer)))
        parts = [(piece, number == 0) for number, piece in enumerate(found)]
        ids = encode_parts(tokenizer, lead_of(tokenizer), parts)
        assert [token for one in ids for token in one.tolist()] == tokenizer.encode(text)
        assert max(map(len, found)) < 3 * 2000
        chunks = [text[i : i + 700] for i in range(0, len(text), 700)]
        assert list(pieces(chunks, 2000, cut_finder(tokenizer))) == found


ANY = "ab1.\n\n\r \t'\u3000" + "中文的。\uff0c\uff01" + "é²한ア😀" + "\u0301\x1c"


@pytest.fixture(scope="module")
def our_bpe() -> Tokenizer:
    return train_bpe(
        [text_of(random.Random(0), 500), "été дом 中文的。\r\n\tif x_1:\n    " * 9], 400
    )


@settings(max_examples=100)
@given(
    text=st.text(st.sampled_from(ANY), max_size=60),
    size=st.integers(1, 10),
    step=st.integers(1, 20),
)
def test_any_text_in_pieces_gives_the_ids_of_the_whole(
    our_bpe: Tokenizer, text: str, size: int, step: int
) -> None:
    parts = [our_bpe.encode(part) for part in pieces([text], size)]
    assert [i for part in parts for i in part] == our_bpe.encode(text)
    chunks = [text[i : i + step] for i in range(0, len(text), step)]
    assert list(pieces(chunks, size)) == list(pieces([text], size))


def test_text_without_spaces_is_cut() -> None:
    for end in ("\r\n", "\n\n", "\n\u3000", "\uff0c", "。\n\u3000"):
        text = ("中文" * 10 + end) * 100
        assert max(map(len, pieces([text], 50))) < 160
