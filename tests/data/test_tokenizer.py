"""Round trips, equality with Hugging Face's encoding, files and messages of every tokenizer."""

import contextlib
import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accel_gpt.data import tokenizer_json
from accel_gpt.data.tokenizer import (
    CharsTokenizer,
    Tokenizer,
    load_tokenizer,
)
from accel_gpt.errors import AccelGPTError, DataError, UserError
from accel_gpt.prepare.bpe import make_tokenizer, train_bpe
from accel_gpt.prepare.pieces import pieces

VOCAB_SIZE = 600
KINDS = ("bytes", "chars", "bpe", "gpt2", "hf")
HOSTILE = {
    "emoji": "a 👩‍👩‍👧‍👦 family, a flag 🇨🇭, a skin tone 👍🏽" * 3,
    "scripts": "naïve ДОМ 東京タワー مرحبا שלום हिन्दी ไทย \u200bzero\u00a0width",
    "nulls": "\x00\x00a\x00 b\x01\x7f\x85\u2028",
    "code": "def f(x):\n\tif x_1 >= 10_000:\n        return self.__dict__[x]  # ok\n\n\n",
    "crlf": "one\r\ntwo\r\n\r\n  three\r\rfour \n \n",
    "no space": "abcdefghij" * 10_000,
    "one letter": "a" * 10_001,
    "spaces": " " * 5000 + "x" + "\t" * 99 + "\n" * 1000 + " \n" * 500,
    "combining": "\u0301\u0301e\u0301 \u0300",
    "digits": "3.14159 12345678 1,000,000 ١٢٣٤ ²³ Ⅻ",
    "private": "\ufffd\ufffe\U0010ffff\ue000",
    "special": "<|endoftext|> </s> <|endoftext|><|endoftext|>",
    "empty": "",
}


def corpus() -> Iterator[str]:
    """Text with enough repetition for a few hundred merges."""
    words = "the they then there return self print import _name .join 'll  == (): # 2024 été дом"
    for a, b in itertools.product(words.split(" "), repeat=2):
        yield f"{a} {b}\n    {b}{a}\r\n\tif {a}_{b}:\n" * 3
    yield from HOSTILE.values()


@pytest.fixture(scope="module")
def trained() -> Tokenizer:
    return train_bpe(corpus(), VOCAB_SIZE)


@pytest.fixture(scope="module")
def tokenizers(
    trained: Tokenizer, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Tokenizer]:
    """One of each kind, gpt2 if it is available; hf is the trained one with another pattern."""
    content = json.loads(trained.file_text)
    content["pre_tokenizer"] = {**tokenizer_json.byte_level(), "use_regex": True}
    path = tmp_path_factory.mktemp("hf") / "tokenizer.json"
    path.write_text(json.dumps(content))
    made = {
        "bytes": make_tokenizer("bytes", 0, corpus),
        "chars": make_tokenizer("chars", 0, corpus),
        "bpe": trained,
        "hf": make_tokenizer(str(path), 0, corpus),
    }
    with contextlib.suppress(AccelGPTError):
        made["gpt2"] = make_tokenizer("gpt2", 0, corpus)
    return made


@pytest.fixture(params=KINDS)
def tokenizer(request: pytest.FixtureRequest, tokenizers: dict[str, Tokenizer]) -> Tokenizer:
    if request.param == "gpt2":
        request.getfixturevalue("gpt2_vocabulary")
    return tokenizers[request.param]


def test_hostile_text_survives_a_round_trip(tokenizer: Tokenizer) -> None:
    for name, text in HOSTILE.items():
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text, name
        assert tokenizer.token_bytes[ids].sum() == len(text.encode()), name
        assert tokenizer.eot_id is None or tokenizer.eot_id not in ids, name
    assert tokenizer.bytes_add_up


def test_trained_ids_are_bytes_then_merges_then_end_of_text(trained: Tokenizer) -> None:
    assert trained.vocab_size == VOCAB_SIZE
    assert trained.eot_id == VOCAB_SIZE - 1
    assert [trained.encode(chr(b)) for b in range(128)] == [[b] for b in range(128)]
    assert trained.decode([0xC3, 0xA9]) == "é"
    assert trained.token_bytes[256:-1].min() >= 2
    assert trained.decode([VOCAB_SIZE - 1]) == "<|endoftext|>"


def test_batches_give_the_same_ids_in_the_smallest_type(tokenizer: Tokenizer) -> None:
    batch = tokenizer.encode_batch(list(HOSTILE.values()))
    assert [ids.tolist() for ids in batch] == [tokenizer.encode(t) for t in HOSTILE.values()]
    assert {ids.dtype for ids in batch} == {np.dtype("uint16")}


def test_fingerprints_tell_tokenizers_apart(tokenizers: dict[str, Tokenizer]) -> None:
    others = [CharsTokenizer("ab"), CharsTokenizer("abc"), train_bpe(corpus(), VOCAB_SIZE - 1)]
    prints = [t.fingerprint for t in (*tokenizers.values(), *others)]
    assert len(set(prints)) == len(prints)
    assert all(len(p) == 64 for p in prints)


def test_a_merge_taken_out_leaves_the_fast_path(trained: Tokenizer, tmp_path: Path) -> None:
    content = json.loads(trained.file_text)
    content["model"]["merges"].pop()
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert load_tokenizer(tmp_path).kind == "hf"
    trained.save(tmp_path)
    assert load_tokenizer(tmp_path).kind == "bpe"


def test_text_in_pieces_gives_the_ids_of_the_whole(tokenizers: dict[str, Tokenizer]) -> None:
    text = "".join(corpus())
    cut = list(pieces([text], 100))
    assert len(cut) > 100
    assert "".join(cut) == text
    for kind, tokenizer in tokenizers.items():
        assert tokenizer.cuts_at_lines == (kind != "hf")
        if tokenizer.cuts_at_lines:
            ids = [i for part in cut for i in tokenizer.encode(part)]
            assert ids == tokenizer.encode(text), kind


ANY = "ab1.\n\n\r \t'\u3000" + "中文的。\uff0c\uff01" + "é²한ア😀" + "\u0301\x1c"


@settings(max_examples=200)
@given(
    text=st.text(st.sampled_from(ANY), max_size=60),
    size=st.integers(1, 10),
    step=st.integers(1, 20),
)
def test_any_text_in_pieces_gives_the_ids_of_the_whole(
    tokenizers: dict[str, Tokenizer], text: str, size: int, step: int
) -> None:
    cut = list(pieces([text], size))
    for kind in {"bpe", "gpt2"} & set(tokenizers):
        tokenizer = tokenizers[kind]
        parts = [tokenizer.encode(part) for part in cut]
        assert [i for part in parts for i in part] == tokenizer.encode(text)
    chunks = [text[i : i + step] for i in range(0, len(text), step)]
    assert "".join(pieces(chunks, size)) == text


@pytest.mark.parametrize("end", ["\r\n", "\n\n", "\n\u3000", "\uff0c", "。\n\u3000"])
def test_text_without_spaces_is_cut(end: str) -> None:
    text = ("中文" * 10 + end) * 100
    assert max(map(len, pieces([text], 50))) < 160


def test_a_million_spaces_are_encoded(trained: Tokenizer) -> None:
    text = "a" + " " * 1_100_000 + "b"
    assert trained.decode(trained.encode(text)) == text


def test_lone_surrogates_become_the_replacement_character(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a\ufffdb"


def test_chars_are_sorted_and_an_unknown_one_is_named() -> None:
    tokenizer = make_tokenizer("chars", 0, lambda: iter(["hello", "wörld 👍"]))
    assert tokenizer.encode("".join(sorted("helowörd 👍"))) == list(range(tokenizer.vocab_size))
    assert tokenizer.eot_id is None
    for unknown in ("x", "\U0010ffff", "\x00"):
        with pytest.raises(UserError, match="chars tokenizer has no token for character") as error:
            tokenizer.encode(f"hello {unknown}")
        assert repr(unknown) in str(error.value)


def test_a_blob_in_the_text_does_not_stop_the_training() -> None:
    blob = "".join(chr(97 + i * i % 23) for i in range(300_000))
    assert train_bpe([*corpus(), blob], VOCAB_SIZE).vocab_size == VOCAB_SIZE


def test_too_little_text_for_a_vocabulary_gives_the_tokens_that_it_reaches(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert train_bpe(["abc abc"], 5000).vocab_size == 259
    assert "too small for data.prepare.vocab_size 5,000; the bpe has 259" in capsys.readouterr().err
    assert train_bpe(["abc abc"], 259).vocab_size == 259
    with pytest.raises(UserError, match="text is empty"):
        make_tokenizer("chars", 0, lambda: iter([""]))


def test_gpt2_without_its_files_names_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(name: str) -> None:
        raise ConnectionError(name)

    monkeypatch.setattr("accel_gpt.data.tokenizer.tiktoken_has_gpt2", lambda: True)
    monkeypatch.setattr("tiktoken.get_encoding", offline)
    with pytest.raises(UserError, match="TIKTOKEN_CACHE_DIR"):
        make_tokenizer("gpt2", 0, corpus)


def test_unreadable_files_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no tokenizer at .*tokenizer\.json"):
        load_tokenizer(tmp_path)
    with pytest.raises(UserError, match="'gpt3', but there is no such file; set it to bytes"):
        make_tokenizer("gpt3", 0, corpus)
    for content, message in {
        "{": "not valid JSON",
        "[]": "tokenizer.json is damaged: it holds a list",
        "{}": "tokenizer.json failed: ",
    }.items():
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(DataError, match=message):
            load_tokenizer(tmp_path)
