"""Tokenizers as files of transformers: same ids and text there, and a round trip."""

import contextlib
import copy
import json
import logging
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library

from accel_gpt.data import tokenizer_json
from accel_gpt.data.tokenizer import (
    BytesTokenizer,
    CharsTokenizer,
    Tokenizer,
    load_gpt2,
    load_tokenizer,
)
from accel_gpt.errors import AccelGPTError, DataError, UserError
from accel_gpt.prepare.bpe import train_bpe
from accel_gpt.transformers_io.export import export_tokenizer

BLOCK_SIZE = 100_000
KINDS = ("bytes", "chars", "bpe", "gpt2", "hf")
NASTY = {
    "emoji": "a 👩‍👩‍👧‍👦 family, a flag 🇨🇭, a skin tone 👍🏽" * 3,
    "scripts": "naïve ДОМ 東京タワー مرحبا שלום हिन्दी ไทย \u200bzero\u00a0width \ufeff",
    "controls": "\x00\x00a\x00 b\x01\x7f\x85\u2028\u2029\x1c\u3000 ",
    "code": "def f(x):\n\tif x_1 >= 10_000:\n        return self.__dict__[x]  # ok\n\n\n",
    "contractions": "I'll they're don't I'd we've it's I'm ''S 'LL can\u2019t . , ! n't",
    "line ends": "one\r\ntwo\r\n\r\n  three\r\rfour \n \n",
    "white space": " " * 50 + "x" + "\t" * 99 + "\n" * 100 + " \n" * 50 + "y   ",
    "combining": "\u0301\u0301e\u0301 \u0300",
    "digits": "3.14159 12345678 1,000,000 ١٢٣٤ ²³ Ⅻ",
    "byte spelling": "ĠtheĊ âĢĻ ##ing ▁the <0x0A> [UNK]",
    "planes": "\ufffd\ufffe\U0010ffff\ue000\U0001f600\U00020000",
    "empty": "",
}
ANY = st.text(max_size=40) | st.text("the rn\n\r\t_.12é дa👍\u0301\x00'sSl|\u3000", max_size=80)
TEMPLATE = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}{% endfor %}"


@pytest.fixture(autouse=True, scope="module")
def no_network() -> Iterator[None]:
    """Fail the test on any attempt to reach another machine."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a tokenizer was looked for in the network")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", refuse)
        patch.setattr(socket, "getaddrinfo", refuse)
        yield


def foreign(folder: Path, **config: object) -> Tokenizer:
    """A tokenizer of kind hf, from a folder with the given tokenizer_config.json."""
    content = json.loads(train_bpe(["the there then " * 9], 262).file_text)
    content["pre_tokenizer"] = {**tokenizer_json.byte_level(), "use_regex": True}
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(content))
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    made = {
        "bytes": BytesTokenizer(),
        "chars": CharsTokenizer("".join(sorted(set("".join(NASTY.values()))))),
        "bpe": train_bpe([*NASTY.values(), *NASTY.values()], 300),
        "hf": foreign(tmp_path_factory.mktemp("hf") / "source"),
    }
    with contextlib.suppress(AccelGPTError):
        made["gpt2"] = load_gpt2()
    return made


@pytest.fixture(scope="module")
def folders(
    tokenizers: dict[str, Tokenizer], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    written = {}
    for kind, tokenizer in tokenizers.items():
        written[kind] = tmp_path_factory.mktemp(kind)
        export_tokenizer(tokenizer, written[kind], BLOCK_SIZE)
    return written


@pytest.fixture(scope="module")
def opened(folders: dict[str, Path]) -> dict[str, Any]:
    """Open each folder with AutoTokenizer; warnings fail."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("transformers").addHandler(handler)
    made = {k: transformers.AutoTokenizer.from_pretrained(path) for k, path in folders.items()}
    logging.getLogger("transformers").removeHandler(handler)
    assert not said
    return made


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    if request.param == "gpt2":
        request.getfixturevalue("gpt2_vocabulary")
    return str(request.param)


@pytest.fixture(scope="module")
def gpt2_content(gpt2_vocabulary: Tokenizer, folders: dict[str, Path]) -> Any:
    return json.loads((folders["gpt2"] / "tokenizer.json").read_text())


@pytest.fixture
def no_tiktoken_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise AssertionError(f"tiktoken was asked for its {name}")

    empty = tmp_path / "tiktoken"
    empty.mkdir()
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(empty))
    monkeypatch.setattr("tiktoken.get_encoding", refuse)


def equal(a: Tokenizer, b: Tokenizer) -> bool:
    return all(
        (
            (a.kind, a.fingerprint) == (b.kind, b.fingerprint),
            (a.vocab_size, a.eot_id) == (b.vocab_size, b.eot_id),
            a.encode(NASTY["code"]) == b.encode(NASTY["code"]),
        )
    )


# --------------------------------------------------------------------------- transformers


def test_transformers_gives_the_same_ids_and_text(
    kind: str, tokenizers: dict[str, Tokenizer], opened: dict[str, Any]
) -> None:
    tokenizer, theirs = tokenizers[kind], opened[kind]
    for name, text in NASTY.items():
        ids = tokenizer.encode(text)
        assert theirs.encode(text) == ids, name
        if kind == "chars" and not text:
            assert ids == []
            continue
        assert theirs.encode(text, add_special_tokens=False) == ids, name
        assert theirs.decode(ids) == tokenizer.decode(ids) == text, name
        assert theirs(text)["input_ids"] == ids, name


@settings(max_examples=300)
@given(text=ANY)
@example(text="a <|endoftext|> b")
def test_transformers_gives_the_same_ids_for_any_text(
    tokenizers: dict[str, Tokenizer], opened: dict[str, Any], text: str
) -> None:
    # Hypothesis also draws strings from our source, including the end-of-text token.
    for kind in tokenizers.keys() - {"chars"}:
        ids = tokenizers[kind].encode(text)
        theirs = opened[kind].encode(text, add_special_tokens=False, split_special_tokens=True)
        assert theirs == ids
        assert opened[kind].decode(ids) == tokenizers[kind].decode(ids)


def test_transformers_knows_size_and_special_tokens(
    kind: str, tokenizers: dict[str, Tokenizer], opened: dict[str, Any]
) -> None:
    tokenizer, theirs = tokenizers[kind], opened[kind]
    assert len(theirs) == tokenizer.vocab_size
    if kind in ("bytes", "chars", "gpt2"):
        assert theirs.vocab_size == tokenizer.vocab_size
    assert max(theirs.get_vocab().values()) == tokenizer.vocab_size - 1
    assert theirs.eos_token_id == tokenizer.eot_id
    assert theirs.bos_token_id == tokenizer.eot_id
    assert theirs.model_max_length == BLOCK_SIZE


def test_a_special_token_spelled_in_a_text_is_plain_text_only_in_training(
    tokenizers: dict[str, Tokenizer], folders: dict[str, Path], opened: dict[str, Any]
) -> None:
    for kind in tokenizers.keys() - {"chars"}:
        tokenizer = tokenizers[kind]
        plain = transformers.AutoTokenizer.from_pretrained(folders[kind], split_special_tokens=True)
        for text in ("a <|endoftext|> b", "<|endoftext|>"):
            assert tokenizer.eot_id not in tokenizer.encode(text)
            assert opened[kind].encode(text) == tokenizer.encode_prompt(text)
            assert tokenizer.eot_id in tokenizer.encode_prompt(text)
            assert plain.encode(text) == tokenizer.encode(text)


def test_an_unknown_character_is_an_error_there_too(
    tokenizers: dict[str, Tokenizer], opened: dict[str, Any]
) -> None:
    with pytest.raises(UserError, match="has no token for character"):
        tokenizers["chars"].encode("thę")
    with pytest.raises(Exception, match=r"Missing \[UNK\] token"):
        opened["chars"].encode("thę")


# --------------------------------------------------------------------------- read back


def test_the_files_give_the_equal_tokenizer_back(
    kind: str, tokenizers: dict[str, Tokenizer], folders: dict[str, Path], tmp_path: Path
) -> None:
    loaded = load_tokenizer(folders[kind])
    assert type(loaded) is type(tokenizers[kind])
    assert equal(loaded, tokenizers[kind])
    export_tokenizer(loaded, tmp_path, BLOCK_SIZE)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_text() == (folders[kind] / name).read_text()


@pytest.mark.parametrize("kind", ["bytes", "chars", "gpt2"], indirect=True)
def test_files_that_transformers_saved_again_give_it_too(
    kind: str, tokenizers: dict[str, Tokenizer], opened: dict[str, Any], tmp_path: Path
) -> None:
    opened[kind].save_pretrained(tmp_path)
    assert equal(load_tokenizer(tmp_path), tokenizers[kind])


@pytest.mark.usefixtures("no_tiktoken_files")
def test_gpt2_is_known_in_the_form_of_its_first_publication(
    gpt2_vocabulary: Tokenizer, gpt2_content: Any, tmp_path: Path
) -> None:
    """openai-community/gpt2: no type, merges as strings, no use_regex, a normalized special."""
    content = copy.deepcopy(gpt2_content)
    content["model"] |= {"continuing_subword_prefix": "", "end_of_word_suffix": ""}
    content["model"]["merges"] = [" ".join(pair) for pair in content["model"]["merges"]]
    for name in ("type", "byte_fallback", "ignore_merges"):
        del content["model"][name]
    for name in ("pre_tokenizer", "decoder", "post_processor"):
        content[name].pop("use_regex")
    content["added_tokens"][0]["normalized"] = True
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "tokenizer_config.json").write_text('{"model_max_length": 1024}')
    assert equal(load_tokenizer(tmp_path), gpt2_vocabulary)


@pytest.mark.usefixtures("no_tiktoken_files")
def test_gpt2_is_read_from_vocab_json_and_merges_txt(
    gpt2_vocabulary: Tokenizer, gpt2_content: Any, tmp_path: Path
) -> None:
    model = gpt2_content["model"]
    merges = "".join(f"{a} {b}\n" for a, b in model["merges"])
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    (tmp_path / "merges.txt").write_text(f"#version: 0.2\n{merges}", encoding="utf-8")
    loaded = load_tokenizer(tmp_path)
    assert equal(loaded, gpt2_vocabulary)
    assert json.loads(loaded.file_text) == gpt2_content


@pytest.mark.parametrize("vocabulary", ['{"a": 0, "b": 1, "ab": 2}', "[]", "{", '{"a": null}'])
def test_two_files_of_another_tokenizer_are_refused(vocabulary: str, tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text(vocabulary)
    with pytest.raises(UserError, match="no tokenizer at"):
        load_tokenizer(tmp_path)
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    with pytest.raises(UserError, match=r"vocab\.json and merges\.txt are not GPT-2's"):
        load_tokenizer(tmp_path)
    with pytest.raises(UserError, match=r"no tokenizer at .*other\.json"):
        load_tokenizer(tmp_path / "other.json")


@pytest.mark.parametrize("given", ["tokenizer.model", ""])
def test_a_model_of_sentencepiece_is_refused_with_the_way_to_convert_it(
    given: str, tmp_path: Path
) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>\x15\0\0\0\0\x18\x02" * 50)
    with pytest.raises(UserError, match=r"tokenizer\.model is not a .*save_pretrained") as error:
        load_tokenizer(tmp_path / given)
    assert error.value.exit_code == 2


def test_what_differs_from_gpt2_is_not_gpt2(gpt2_content: Any) -> None:
    model, end = gpt2_content["model"], gpt2_content["added_tokens"][0]
    vocabulary, split = model["vocab"], gpt2_content["pre_tokenizer"]
    for changes in (
        *({"model": {**model, "vocab": {**vocabulary, "!": i, '"': 0}}} for i in (1, 60000)),
        {"model": {**model, "merges": [["a", "b"]]}},
        {"model": {**model, "dropout": 0.1}},
        {"model": {**model, "end_of_word_suffix": "</w>"}},
        {"model": {**model, "type": "WordPiece"}},
        {"pre_tokenizer": {**split, "add_prefix_space": True}},
        {"pre_tokenizer": {**split, "use_regex": False}},
        {"pre_tokenizer": {**split, "type": "Metaspace"}},
        {"decoder": {**gpt2_content["decoder"], "type": "WordPiece"}},
        {"added_tokens": [end, {**end, "id": 50257, "content": "<|pad|>"}]},
        {"added_tokens": [{**end, "special": False}]},
        {"added_tokens": []},
        {"normalizer": {"type": "NFC"}},
        {"post_processor": {"type": "TemplateProcessing", "special_tokens": {"<s>": {}}}},
    ):
        assert tokenizer_json.recognize({**gpt2_content, **changes}) is None, list(changes)


@pytest.mark.parametrize("kind", ["bytes", "chars"])
def test_what_differs_from_bytes_and_chars_is_neither(kind: str, folders: dict[str, Path]) -> None:
    content = json.loads((folders[kind] / "tokenizer.json").read_text())

    known = tokenizer_json.recognize({**content, "truncation": {"max_length": 5}})
    assert known is not None
    assert known[0] == kind
    vocabulary = content["model"]["vocab"]
    last = max(vocabulary, key=vocabulary.get)
    for changes in (
        {"normalizer": {"type": "NFC"}},
        {"pre_tokenizer": None},
        {"decoder": None},
        {"added_tokens": [{"content": "<s>"}]},
        {"model": {**content["model"], "vocab": {**vocabulary, last: 9999}}},
        {"model": {**content["model"], "vocab": {**vocabulary, "two": len(vocabulary)}}},
        {"post_processor": {"type": "TemplateProcessing", "special_tokens": {"<s>": {}}}},
        {"post_processor": {"type": "BertProcessing"}},
    ):
        assert not tokenizer_json.recognize({**content, **changes}), changes
    for nothing in (None, [], {}, {"model": 1}, {"model": {"type": "WordLevel", "vocab": [1]}}):
        assert tokenizer_json.recognize(nothing) is None


# --------------------------------------------------------------------------- what came along


def test_the_settings_of_an_imported_tokenizer_are_taken_along(tmp_path: Path) -> None:
    source = foreign(
        tmp_path / "source",
        auto_map={"AutoTokenizer": ["evil.Evil", None]},
        name_or_path="/home/somebody/model",
        tokenizer_class="EvilTokenizer",
        bos_token="t",
        eos_token="h",
        pad_token={"content": "e", "special": True},
        clean_up_tokenization_spaces=True,
        model_max_length=5,
    )
    (tmp_path / "source" / "chat_template.jinja").write_text(TEMPLATE)
    for name in ("data", "checkpoint", "export"):
        (tmp_path / name).mkdir()
    load_tokenizer(tmp_path / "source").save(tmp_path / "data")
    load_tokenizer(tmp_path / "data").save(tmp_path / "checkpoint")
    export_tokenizer(load_tokenizer(tmp_path / "checkpoint"), tmp_path / "export", 64)
    assert equal(load_tokenizer(tmp_path / "export"), source)

    for name in ("data", "checkpoint", "export"):
        written = json.loads((tmp_path / name / "tokenizer_config.json").read_text())
        assert not written.keys() & {"auto_map", "name_or_path"}
    assert written["tokenizer_class"] == "PreTrainedTokenizerFast"
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "export")
    assert (theirs.bos_token, theirs.eos_token, theirs.pad_token) == ("h", "h", "e")
    # the token that ends documents in the training data
    assert theirs.eos_token_id == source.eot_id
    assert theirs.model_max_length == 64
    messages = [{"role": "user", "content": "hi"}]
    assert theirs.apply_chat_template(messages, tokenize=False) == "[user] hi"
    assert theirs.clean_up_tokenization_spaces is False


def test_an_end_of_text_that_only_the_settings_name_keeps_its_form(tmp_path: Path) -> None:
    source = tmp_path / "source"
    foreign(source)
    text = (source / "tokenizer.json").read_text().replace("<|endoftext|>", "<stop>")
    (source / "tokenizer.json").write_text(text)
    end = {"__type": "AddedToken", "content": "<stop>", "special": True, "lstrip": False}
    (source / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
    tokenizer = load_tokenizer(source)
    export_tokenizer(tokenizer, tmp_path, 64)
    assert equal(load_tokenizer(tmp_path), tokenizer)
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["eos_token"] == end
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert theirs.eos_token_id == tokenizer.eot_id == 261


def test_truncation_and_padding_of_a_file_stop_nobody(tmp_path: Path) -> None:
    source = tmp_path / "source"
    foreign(source)
    content = json.loads((source / "tokenizer.json").read_text())
    content["truncation"] = {
        "direction": "Right",
        "max_length": 5,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    (source / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = load_tokenizer(source)
    assert tokenizer.kind == "hf"
    export_tokenizer(tokenizer, tmp_path, 64)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = "the return of the self"
    assert theirs.encode(text) == tokenizer.encode(text)
    assert (tmp_path / "tokenizer.json").read_text() == tokenizer.file_text


END = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}
TEXT = {"Sequence": {"id": "A", "type_id": 0}}
PAIR = [TEXT, {"Sequence": {"id": "B", "type_id": 1}}]
SPECIAL = {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [261], "tokens": ["<|endoftext|>"]}}
BEGINNING = {
    "type": "TemplateProcessing",
    "single": [END, TEXT],
    "pair": PAIR,
    "special_tokens": SPECIAL,
}
ENDS = {"sep": ["<|endoftext|>", 261], "cls": ["<|endoftext|>", 261]}
TEMPLATES = {
    "beginning": BEGINNING,
    "end": BEGINNING | {"single": [TEXT, END]},
    "twice": BEGINNING | {"single": [TEXT, TEXT], "special_tokens": {}},
    "sequence": {
        "type": "Sequence",
        "processors": [
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True},
            BEGINNING,
        ],
    },
    "bert": {"type": "BertProcessing", **ENDS},
    "roberta": {
        "type": "RobertaProcessing",
        **ENDS,
        "trim_offsets": True,
        "add_prefix_space": False,
    },
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_is_in_no_file_that_is_written(name: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    text = "then there"
    adds = {"add_bos_token": True, "add_eos_token": True}
    without = foreign(source, bos_token="<|endoftext|>", eos_token="<|endoftext|>", **adds)
    path = source / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"post_processor": TEMPLATES[name]}))
    assert Library.from_file(str(path)).encode(text).ids != without.encode(text)
    for folder in ("data", "export"):
        (tmp_path / folder).mkdir()
    load_tokenizer(source).save(tmp_path / "data")
    tokenizer = load_tokenizer(tmp_path / "data")
    export_tokenizer(tokenizer, tmp_path / "export", BLOCK_SIZE)
    assert equal(tokenizer, without)
    for folder in ("data", "export"):
        plain = Library.from_file(str(tmp_path / folder / "tokenizer.json"))
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / folder)
        assert plain.encode(text).ids == theirs(text).input_ids == without.encode(text)
        assert theirs.bos_token_id == theirs.eos_token_id == without.eot_id
        config = json.loads((tmp_path / folder / "tokenizer_config.json").read_text())
        assert not any(config.get(key) for key in adds)


def test_settings_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    foreign(tmp_path / "source")
    for content in ("{", "[]"):
        (tmp_path / "source" / "tokenizer_config.json").write_text(content)
        with pytest.raises(DataError, match=r"tokenizer_config\.json is "):
            load_tokenizer(tmp_path / "source")
    (tmp_path / "source" / "tokenizer_config.json").unlink()
    (tmp_path / "source" / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(DataError, match=r"chat_template\.jinja is not UTF-8"):
        load_tokenizer(tmp_path / "source")


def other(folder: Path, **changes: Any) -> Path:
    """A tokenizer.json of kind hf: a BPE of letters with merges and other changes."""
    vocab = {c: i for i, c in enumerate(["<|endoftext|>", *map(chr, range(32, 127))])}
    vocab |= {pair: len(vocab) + i for i, pair in enumerate(("ab", "bc", "abc"))}
    eot = {"id": 0, "content": "<|endoftext|>", "special": True, "single_word": False}
    eot |= {"lstrip": False, "rstrip": False, "normalized": False}
    model = {"type": "BPE", "vocab": vocab, "merges": ["a b", "b c", "ab c"]}
    content = {"version": "1.0", "added_tokens": [eot], "model": model | changes.pop("model", {})}
    folder.mkdir(exist_ok=True)
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(content | changes))
    return path


def split(pattern: str, behavior: str = "Isolated", invert: bool = False) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "Split", "pattern": {"Regex": pattern}}
    return found | {"behavior": behavior, "invert": invert}


@pytest.mark.parametrize(
    ("tokens", "config", "end"),
    [
        ({"</s>": False, "<eos>": True}, "<eos>", "<eos>"),  # an HTML tag
        ({"</s>": True, "<|im_end|>": True}, "<|im_end|>", "<|im_end|>"),
        ({"</s>": False, "<eos>": True}, None, "<eos>"),
        ({"<|end_of_text|>": False, "</s>": True}, None, "</s>"),
        ({"<|stop|>": False, "</s>": True}, {"content": "<|stop|>"}, "<|stop|>"),
    ],
)
def test_which_token_ends_a_document(
    tokens: dict[str, bool], config: object, end: str, tmp_path: Path
) -> None:
    path = other(tmp_path)
    content = json.loads(path.read_text())
    (eot,) = content["added_tokens"]
    vocab = {c: i for c, i in content["model"]["vocab"].items() if c != "<|endoftext|>"}
    added = [
        eot | {"id": 98 + i, "content": token, "special": special}
        for i, (token, special) in enumerate(tokens.items())
    ]
    model = content["model"] | {"vocab": vocab}
    path.write_text(json.dumps(content | {"added_tokens": added, "model": model}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": config}))
    tokenizer = load_tokenizer(path)
    assert tokenizer.eot == end
    ids = tokenizer.encode_pieces([("a", True, True)])[0].tolist()
    assert (len(ids), tokenizer.decode(ids[1:])) == (2, end)


def test_the_settings_name_another_end_of_a_known_tokenizer(tmp_path: Path) -> None:
    trained = train_bpe(["the there then " * 9], 262)
    trained.save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "\\u010a"}')  # a line end
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.eot_id == 10
    assert tokenizer.encode("the then") == trained.encode("the then")


@pytest.mark.parametrize(
    ("config", "end"),
    [
        (None, "<stop>"),
        ({}, "<stop>"),
        ({"eos_token": ""}, "<stop>"),
        ({"eos_token": "</s>"}, "</s>"),
    ],
)
def test_an_older_folder_names_the_end_in_special_tokens_map(
    tmp_path: Path, config: dict[str, str] | None, end: str
) -> None:
    content = json.loads(other(tmp_path).read_text())
    (eot,) = content["added_tokens"]
    for token in ("<stop>", "</s>"):
        content["added_tokens"].append(eot | {"id": 99, "content": token})
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "special_tokens_map.json").write_text(
        json.dumps({"eos_token": {"content": "<stop>"}})
    )
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert load_tokenizer(tmp_path).eot == end


def test_without_a_token_that_ends_a_document(tmp_path: Path) -> None:
    path = other(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<stop>"}')
    with pytest.raises(
        UserError, match=r"eos_token to '<stop>', which is not a token of tokenizer"
    ):
        load_tokenizer(path)
    (tmp_path / "tokenizer_config.json").unlink()
    text = path.read_text()
    path.write_text(text.replace('"special": true', '"special": false'))
    with pytest.raises(UserError, match=r"has no end-of-text token: no special token is <\|endof"):
        load_tokenizer(path)


def replace(kind: str, pattern: str, by: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": by}


def steps(*normalizers: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": normalizers}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"normalizer": replace("Regex", "[0-9]", "")}, "drops '0', so its tokens would not"),
        ({"pre_tokenizer": {"type": "Punctuation", "behavior": "Removed"}}, "drops '!'"),
        ({"model": {"merges": ["a b", "q q q"]}}, "tokenizer.json failed"),
    ],
)
def test_a_tokenizer_that_drops_text_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=re.escape(message)) as refusal:
        load_tokenizer(other(tmp_path, **changes))
    assert len(str(refusal.value)) < 600
    assert "\n" not in str(refusal.value)


def test_what_changes_or_splits_text_is_fine(tmp_path: Path) -> None:
    spaces = (("\n", "<0x0A>"), ("\t", "<0x09>"), ("  ", "<2sp>"))
    for changes in (
        {"normalizer": replace("Regex", r"\s{2,}", "")},
        {"normalizer": replace("Regex", r"\p{Cc}", "")},
        {"normalizer": replace("String", "cat", "dog")},
        {"normalizer": steps(*(replace("String", one, two) for one, two in spaces))},
        # spaces are removed
        {"pre_tokenizer": split("[A-Za-z]+|[^A-Za-z ]+", "Removed", invert=True)},
    ):
        load_tokenizer(other(tmp_path, **changes))


def test_a_panic_of_the_library_is_an_error(tmp_path: Path) -> None:
    """A panic is a BaseException."""
    tokenizer = load_tokenizer(other(tmp_path, pre_tokenizer=split("(a+)+$")))
    for encode in (tokenizer.encode, lambda text: tokenizer.encode_batch([text])):
        with pytest.raises(DataError, match=r"tokenizer\.json failed"):
            encode("a" * 100 + "!")


@pytest.mark.parametrize("kind", ["bytes", "bpe", "hf"])
def test_a_key_that_the_library_does_not_know_is_an_error(
    kind: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    content = json.loads((folders[kind] / "tokenizer.json").read_text()) | {"lowercase": True}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"tokenizer\.json: lowercase is an unknown key; save"):
        load_tokenizer(tmp_path)


def test_dropout_is_switched_off(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Otherwise a text gets other tokens each time, under the same fingerprint."""
    without = load_tokenizer(other(tmp_path / "a"))
    assert "dropout" not in capsys.readouterr().err
    tokenizer = load_tokenizer(other(tmp_path / "b", model={"dropout": 0.5}))
    assert "dropout 0.5" in capsys.readouterr().err
    assert len({tuple(tokenizer.encode("abc" * 20)) for _ in range(20)}) == 1
    assert tokenizer.encode("abc" * 20) == without.encode("abc" * 20)
    tokenizer.save(tmp_path)  # the file of the data and the exported model
    again = load_tokenizer(tmp_path)
    assert capsys.readouterr().err == ""
    assert again.fingerprint == tokenizer.fingerprint
    assert json.loads(tokenizer.file_text)["model"]["dropout"] is None


@pytest.mark.parametrize("parts", [[], ["A", "A"]])
def test_a_template_neither_drops_nor_repeats_the_text(parts: list[str], tmp_path: Path) -> None:
    eot = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}
    single = [eot, *({"Sequence": {"id": part, "type_id": 0}} for part in parts)]
    pair = [{"Sequence": {"id": part, "type_id": 0}} for part in "AB"]
    special = {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}}
    template = {"type": "TemplateProcessing", "single": single, "pair": pair}
    file = other(tmp_path, post_processor=template | {"special_tokens": special})
    tokenizer = load_tokenizer(file)
    assert tokenizer.encode("king") == [ord(c) - 31 for c in "king"]
    assert tokenizer.encode_batch(["king"])[0].tolist() == tokenizer.encode("king")
