"""Any text in pieces gets the ids of the whole text."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accel_gpt.data.tokenizer import Tokenizer
from accel_gpt.prepare.bpe import train_bpe
from accel_gpt.prepare.pieces import pieces
from tests.conftest import text_of

ANY = "ab1.\n\n\r \t'\u3000" + "中文的。\uff0c\uff01" + "é²한ア😀" + "\u0301\x1c"


@pytest.fixture(scope="module")
def trained() -> Tokenizer:
    return train_bpe([text_of(500), "été дом 中文的。\r\n\tif x_1:\n    " * 9], 400)


@settings(max_examples=200)
@given(
    text=st.text(st.sampled_from(ANY), max_size=60),
    size=st.integers(1, 10),
    step=st.integers(1, 20),
)
def test_any_text_in_pieces_gives_the_ids_of_the_whole(
    trained: Tokenizer, text: str, size: int, step: int
) -> None:
    parts = [trained.encode(part) for part in pieces([text], size)]
    assert [i for part in parts for i in part] == trained.encode(text)
    chunks = [text[i : i + step] for i in range(0, len(text), step)]
    assert "".join(pieces(chunks, size)) == text


@pytest.mark.parametrize("end", ["\r\n", "\n\n", "\n\u3000", "\uff0c", "。\n\u3000"])
def test_text_without_spaces_is_cut(end: str) -> None:
    text = ("中文" * 10 + end) * 100
    assert max(map(len, pieces([text], 50))) < 160
