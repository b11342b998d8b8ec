"""Every kind of tokenizer: round trips, ids of transformers, files, messages."""

import contextlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers as library
import transformers
from hypothesis import example, given, settings
from hypothesis import strategies as st

from accel_gpt.config.data import PrepareConfig
from accel_gpt.data import tokenizer_json
from accel_gpt.data.tokenizer import (
    BytesTokenizer,
    CharsTokenizer,
    Tokenizer,
    load_gpt2,
    load_tokenizer,
    named_tokenizer,
)
from accel_gpt.errors import AccelGPTError, UserError
from accel_gpt.prepare.bpe import make_tokenizer, train_bpe
from accel_gpt.prepare.prepare import prepare
from tests.helpers.hub_server import HubServer, no_waiting, point_at

BLOCK_SIZE = 100_000
KINDS = ("bytes", "chars", "bpe", "gpt2", "hf")
NASTY = {
    "emoji": "a 👩‍👩‍👧‍👦 family, a flag 🇨🇭, a skin tone 👍🏽" * 3,
    "scripts": "naïve ДОМ 東京タワー مرحبا שלום हिन्दी ไทย \u200bzero\u00a0width \ufeff",
    "controls": "\x00\x00a\x00 b\x01\x7f\x85\u2028\u2029\x1c\u3000 ",
    "code": "def f(x):\n\tif x_1 >= 10_000:\n        return self.__dict__[x]  # ok\n\n\n",
    "contractions": "I'll they're don't I'd we've it's I'm ''S 'LL can\u2019t . , ! n't",
    "line ends": "one\r\ntwo\r\n\r\n  three\r\rfour \n \n",
    "white space": " " * 500 + "x" + "\t" * 99 + "\n" * 100 + " \n" * 50 + "y   ",
    "no space": "abcdefghij" * 1000,
    "combining": "\u0301\u0301e\u0301 \u0300",
    "digits": "3.14159 12345678 1,000,000 ١٢٣٤ ²³ Ⅻ",
    "byte spelling": "ĠtheĊ âĢĻ ##ing ▁the <0x0A> [UNK]",
    "planes": "\ufffd\ufffe\U0010ffff\ue000\U0001f600\U00020000",
    "empty": "",
}
ANY = st.text(max_size=40) | st.text("the rn\n\r\t_.12é дa👍\u0301\x00'sSl|\u3000", max_size=80)
TEMPLATE = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}{% endfor %}"


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
    """One of each kind, gpt2 if it is available."""
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
        tokenizer.save(written[kind], BLOCK_SIZE)
    return written


@pytest.fixture(scope="module")
def opened(folders: dict[str, Path]) -> dict[str, Any]:
    return {
        kind: transformers.AutoTokenizer.from_pretrained(path) for kind, path in folders.items()
    }


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    if request.param == "gpt2":
        request.getfixturevalue("gpt2_vocabulary")
    return str(request.param)


def equal(a: Tokenizer, b: Tokenizer) -> bool:
    return all(
        (
            (a.kind, a.fingerprint) == (b.kind, b.fingerprint),
            (a.vocab_size, a.eot_id) == (b.vocab_size, b.eot_id),
            a.encode(NASTY["code"]) == b.encode(NASTY["code"]),
        )
    )


# --------------------------------------------------------------------------- ids


def test_hostile_text_survives_with_the_ids_of_transformers(
    kind: str, tokenizers: dict[str, Tokenizer], opened: dict[str, Any]
) -> None:
    tokenizer, theirs = tokenizers[kind], opened[kind]
    batch = tokenizer.encode_batch(list(NASTY.values()))
    assert {ids.dtype for ids in batch} == {np.dtype("uint16")}
    for (name, text), found in zip(NASTY.items(), batch, strict=True):
        ids = tokenizer.encode(text)
        assert found.tolist() == ids, name
        assert tokenizer.decode(ids) == text, name
        assert tokenizer.token_bytes[ids].sum() == len(text.encode()), name
        assert tokenizer.eot_id is None or tokenizer.eot_id not in ids, name
        if text or kind != "chars":
            assert theirs.encode(text) == ids, name
            assert theirs.decode(ids) == text, name
    assert tokenizer.bytes_add_up
    assert len(theirs) == tokenizer.vocab_size
    assert theirs.eos_token_id == theirs.bos_token_id == tokenizer.eot_id
    assert theirs.model_max_length == BLOCK_SIZE


@settings(max_examples=200)
@given(text=ANY)
@example(text="a <|endoftext|> b")
def test_transformers_gives_the_same_ids_for_any_text(
    tokenizers: dict[str, Tokenizer], opened: dict[str, Any], text: str
) -> None:
    """A special token that a text spells is plain text in training, and special in a prompt."""
    for kind in tokenizers.keys() - {"chars"}:
        ids = tokenizers[kind].encode(text)
        theirs = opened[kind].encode(text, add_special_tokens=False, split_special_tokens=True)
        assert theirs == ids
        assert opened[kind].decode(ids) == tokenizers[kind].decode(ids)
        assert opened[kind].encode(text) == tokenizers[kind].encode_prompt(text)


def test_lone_surrogates_become_the_replacement_character(
    kind: str, tokenizers: dict[str, Tokenizer]
) -> None:
    assert tokenizers[kind].decode(tokenizers[kind].encode("a\ud800b")) == "a\ufffdb"


def test_fingerprints_tell_tokenizers_apart(tokenizers: dict[str, Tokenizer]) -> None:
    others = [CharsTokenizer("ab"), CharsTokenizer("abc"), train_bpe(NASTY.values(), 299)]
    prints = [one.fingerprint for one in (*tokenizers.values(), *others)]
    assert len(set(prints)) == len(prints)


def test_chars_are_sorted_and_an_unknown_one_is_named() -> None:
    tokenizer = make_tokenizer("chars", 0, lambda: iter(["hello", "wörld 👍"]))
    assert tokenizer.encode("".join(sorted("helowörd 👍"))) == list(range(tokenizer.vocab_size))
    assert tokenizer.eot_id is None
    for unknown in ("x", "\U0010ffff", "\x00"):
        with pytest.raises(UserError, match="chars tokenizer has no token for character") as error:
            tokenizer.encode(f"hello {unknown}")
        assert repr(unknown) in str(error.value)


def test_threads_share_no_regex_of_a_bpe() -> None:
    bpe = train_bpe(NASTY.values(), 300)
    with ThreadPoolExecutor(1) as pool:
        other, ids = pool.submit(lambda: (bpe.encoding, bpe.encode(NASTY["code"]))).result()
    assert bpe.encoding is bpe.encoding
    assert other is not bpe.encoding
    assert ids == bpe.encode(NASTY["code"])


# --------------------------------------------------------------------------- files


def test_the_files_give_the_equal_tokenizer_back(
    kind: str,
    tokenizers: dict[str, Tokenizer],
    folders: dict[str, Path],
    opened: dict[str, Any],
    tmp_path: Path,
) -> None:
    """Also the files that transformers saves again, except of bpe, which becomes kind hf."""
    loaded = load_tokenizer(folders[kind])
    assert type(loaded) is type(tokenizers[kind])
    assert equal(loaded, tokenizers[kind])
    loaded.save(tmp_path, BLOCK_SIZE)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_text() == (folders[kind] / name).read_text()
    if kind in ("bytes", "chars", "gpt2"):
        opened[kind].save_pretrained(tmp_path / "again")
        assert equal(load_tokenizer(tmp_path / "again"), tokenizers[kind])


def changed(content: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return content | {"model": content["model"] | changes.pop("model", {})} | changes


@pytest.mark.parametrize("kind", ["bytes", "chars", "bpe", "gpt2"], indirect=True)
def test_what_differs_from_a_known_kind_is_of_kind_hf(kind: str, folders: dict[str, Path]) -> None:
    content = json.loads((folders[kind] / "tokenizer.json").read_text())
    assert tokenizer_json.kind_of(changed(content, truncation={"max_length": 5})) == kind
    vocabulary = content["model"]["vocab"]
    last = max(vocabulary, key=vocabulary.get)
    begin = {"type": "TemplateProcessing", "special_tokens": {"<s>": {}}}
    added = content["added_tokens"]
    for changes in (
        {"normalizer": {"type": "NFC"}},
        {"pre_tokenizer": None},
        {"added_tokens": [*added, {"content": "<s>", "special": True}]},
        {"model": {"vocab": {**vocabulary, last: 9999, "two": 5}}},
        {"model": {"merges": [["a", "b"]]}},
        {"post_processor": begin},
        {"post_processor": {"type": "BertProcessing"}},
    ):
        assert tokenizer_json.kind_of(changed(content, **changes)) == "hf", changes


def test_gpt2_is_recognized_in_its_first_form(gpt2_vocabulary: Tokenizer, tmp_path: Path) -> None:
    """openai-community/gpt2: no type, merges as strings, no use_regex, a normalized special."""
    content = json.loads(gpt2_vocabulary.file_text)
    model = content["model"]
    merges = [" ".join(pair) for pair in model["merges"]]
    for name in ("pre_tokenizer", "decoder"):
        content[name].pop("use_regex")
    content["post_processor"] = content["decoder"]
    content["added_tokens"][0]["normalized"] = True
    content["model"] = {"vocab": model["vocab"], "merges": merges, "end_of_word_suffix": ""}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert equal(load_tokenizer(tmp_path), gpt2_vocabulary)


# --------------------------------------------------------------------------- what came along


def test_the_settings_of_an_imported_tokenizer_are_taken_along(tmp_path: Path) -> None:
    source = foreign(
        tmp_path / "source",
        auto_map={"AutoTokenizer": ["evil.Evil", None]},
        name_or_path="/home/somebody/model",
        tokenizer_class="EvilTokenizer",
        bos_token="t",
        eos_token="h",
        pad_token={"content": "<|endoftext|>", "special": True},
        model_max_length=5,
    )
    (tmp_path / "source" / "chat_template.jinja").write_text(TEMPLATE)
    for name in ("data", "export"):
        (tmp_path / name).mkdir()
    load_tokenizer(tmp_path / "source").save(tmp_path / "data")
    load_tokenizer(tmp_path / "data").save(tmp_path / "export", 64)
    assert equal(load_tokenizer(tmp_path / "export"), source)
    for name in ("data", "export"):
        written = "".join(path.read_text() for path in (tmp_path / name).iterdir())
        assert "evil" not in written.lower()
        assert "somebody" not in written
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "export")
    assert (theirs.bos_token, theirs.eos_token) == ("h", "h")
    assert theirs.pad_token == "<|endoftext|>"
    assert theirs.eos_token_id == source.eot_id
    assert theirs.model_max_length == 64
    messages = [{"role": "user", "content": "hi"}]
    assert theirs.apply_chat_template(messages, tokenize=False) == "[user] hi"


@pytest.mark.parametrize("name", ["bytes", "chars", "bpe", "hf"])
def test_a_data_folder_has_the_special_tokens_of_an_export(name: str, tmp_path: Path) -> None:
    foreign(tmp_path / "source", eos_token="h", pad_token="<|endoftext|>", mask_token="ordinary")
    (tmp_path / "text.txt").write_text("the king of a land far by the sea\n" * 50)
    prepare(
        PrepareConfig(
            source=str(tmp_path / "text.txt"),
            tokenizer=str(tmp_path / "source") if name == "hf" else name,
            vocab_size=270 if name == "bpe" else PrepareConfig.vocab_size,
        ),
        tmp_path / "data",
    )
    tokenizer = load_tokenizer(tmp_path / "data")
    (tmp_path / "export").mkdir()
    tokenizer.save(tmp_path / "export", BLOCK_SIZE, tokenizer.vocab_size)
    data, export = (
        transformers.AutoTokenizer.from_pretrained(tmp_path / folder)
        for folder in ("data", "export")
    )
    assert data.special_tokens_map == export.special_tokens_map
    assert data.eos_token_id == data.bos_token_id == tokenizer.eot_id
    assert len(data) == len(export) == tokenizer.vocab_size


def other(folder: Path, **changes: Any) -> Path:
    """A tokenizer.json of kind hf: a BPE of letters with merges and other changes."""
    vocab = {c: i for i, c in enumerate(["<|endoftext|>", *map(chr, range(32, 127))])}
    vocab |= {pair: len(vocab) + i for i, pair in enumerate(("ab", "bc", "abc"))}
    eot = {"id": 0, "content": "<|endoftext|>", "special": True, "single_word": False}
    eot |= {"lstrip": False, "rstrip": False, "normalized": False}
    model = {"type": "BPE", "vocab": vocab, "merges": ["a b", "b c", "ab c"]}
    content = {"version": "1.0", "added_tokens": [eot], "model": model}
    folder.mkdir(exist_ok=True)
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(changed(content, **changes)))
    return path


END = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}
TEXT = {"Sequence": {"id": "A", "type_id": 0}}
BEGINNING = {
    "type": "TemplateProcessing",
    "single": [END, TEXT],
    "pair": [TEXT, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["a"]}},
}
TRUNCATION = {"direction": "Right", "max_length": 5, "strategy": "LongestFirst", "stride": 0}


@pytest.mark.parametrize(
    "changes",
    [
        {"post_processor": BEGINNING},
        {"truncation": TRUNCATION},
        {"model": {"dropout": 0.5}},
    ],
    ids=["begin", "truncation", "dropout"],
)
def test_what_changes_the_ids_of_a_text_is_in_no_file_that_is_written(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    without = load_tokenizer(other(tmp_path / "without"))
    ids = without.encode("abc" * 20)
    source = other(tmp_path / "source", **changes)
    settings = {"add_bos_token": True, "tokenizer_class": "BertTokenizer"}  # it adds [CLS]
    (tmp_path / "source" / "tokenizer_config.json").write_text(json.dumps(settings))
    for folder in ("data", "export"):
        (tmp_path / folder).mkdir()
    load_tokenizer(source).save(tmp_path / "data")
    tokenizer = load_tokenizer(tmp_path / "data")
    tokenizer.save(tmp_path / "export", BLOCK_SIZE)
    assert equal(tokenizer, without)
    for folder in ("data", "export"):
        plain = library.Tokenizer.from_file(str(tmp_path / folder / "tokenizer.json"))
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / folder)
        for _ in range(5):
            assert plain.encode("abc" * 20).ids == theirs("abc" * 20).input_ids == ids


def test_the_settings_say_of_a_space_what_tokenizer_json_says(tmp_path: Path) -> None:
    """transformers 4 follows the settings; version 5 and training follow tokenizer.json."""
    split = tokenizer_json.byte_level() | {"add_prefix_space": True}
    source = other(tmp_path / "source", pre_tokenizer=split)
    (tmp_path / "source" / CONFIG).write_text(json.dumps({"add_prefix_space": False}))
    (tmp_path / "export").mkdir()
    load_tokenizer(source).save(tmp_path / "export", BLOCK_SIZE)
    settings = json.loads((tmp_path / "export" / CONFIG).read_text())
    assert settings["add_prefix_space"]


# --------------------------------------------------------------------------- end of text


@pytest.mark.parametrize(
    ("tokens", "config", "end"),
    [
        ({"</s>": False, "<eos>": True}, "<eos>", "<eos>"),  # an HTML tag
        ({"</s>": False, "<eos>": True}, None, "<eos>"),
        ({"</s>": False, "<eos>": True}, {"id": 98}, "<eos>"),  # it has no text
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
    path.write_text(json.dumps(changed(content, added_tokens=added, model={"vocab": vocab})))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": config}))
    assert load_tokenizer(path).eot == end


def test_the_settings_name_another_end_of_a_known_tokenizer(tmp_path: Path) -> None:
    trained = train_bpe(["the there then " * 9], 262)
    trained.save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "\\u010a"}')  # a line end
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.eot_id == 10
    assert tokenizer.encode("the then") == trained.encode("the then")


FILE, CONFIG = "tokenizer.json", "tokenizer_config.json"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"eos_token": "<stop>"}, "has no end-of-text token <stop>"),
        ({}, "no end-of-text token of a known name"),
    ],
)
def test_a_tokenizer_without_an_end_of_text_is_refused(
    settings: dict[str, str], message: str, tmp_path: Path
) -> None:
    path = other(tmp_path)
    if not settings:
        path.write_text(path.read_text().replace('"special": true', '"special": false'))
    (tmp_path / CONFIG).write_text(json.dumps(settings))
    with pytest.raises(UserError, match=message):
        load_tokenizer(tmp_path)


# --------------------------------------------------------------------------- the Hub

REPO = "tester/words"


def test_a_tokenizer_of_the_hub_also_comes_from_its_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    foreign(tmp_path / "source", eos_token="h")
    files = {name: (tmp_path / "source" / name).read_bytes() for name in (FILE, CONFIG)}
    with HubServer() as hub:
        point_at(monkeypatch, hub, tmp_path / "home")
        no_waiting(monkeypatch)
        hub.add(REPO, files | {"model.safetensors": b"weights"})
        found = [named_tokenizer(REPO)]
        assert not any("safetensors" in path for _, path in hub.requests)
    found.append(named_tokenizer(f"hf://{REPO}@main"))
    assert all(equal(one, load_tokenizer(tmp_path / "source")) for one in found)
