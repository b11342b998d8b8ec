"""A long text in pieces has the tokens of the whole text."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accel_gpt.data.tokenizer import Tokenizer
from accel_gpt.prepare.bpe import train_bpe
from accel_gpt.prepare.pieces import pieces

SCRIPTS = (
    "the cat sat on mat and looked don't 12345 3.14 foo_bar() <b>bold</b> <s> THE Quick é naïve "
    "中文的文字 很好。 привет ひらがな 😀 e\u0301 \u3000 \xa0 a--b ... "
    "\"quoted\" {'k': 1} \ufb01 ½ aaaa ab abab ▁ \u200b"
)
WORDS = SCRIPTS.split(" ")
SPACES = [" ", "\n", "  ", "\n\n", "\t", " \n", "\n    ", "", "\r\n"]


def text_of(draw: random.Random, words: int) -> str:
    """Words of many scripts, with all kinds of white space between them."""
    parts = []
    for _ in range(words):
        parts.append(draw.choice(WORDS))
        parts += draw.choices(SPACES, [60, 12, 2, 3, 1, 1, 2, 4, 1])
    return "".join(parts)


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
