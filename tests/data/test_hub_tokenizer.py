"""Tokenizers of the Hub by their id, and GPT-2's from the Hub's cache."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
import tokenizers
import transformers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from accel_gpt.cli import dispatch
from accel_gpt.config.vocabulary import file_vocab_size
from accel_gpt.data import tokenizer_json
from accel_gpt.data.shards import open_split
from accel_gpt.data.tokenizer import load_gpt2, load_tokenizer, named_tokenizer
from accel_gpt.errors import UserError
from tests.conftest import run_here, text_of
from tests.helpers.hub_server import HubServer, no_waiting, point_at

REPO = "tester/words"
TEXT = text_of(500) + "naïve ДОМ 東京 42\n\tif x_1 >= 10:\r\n  👍🏽" + text_of(99)
Capture = pytest.CaptureFixture[str]


def byte_level_bpe() -> dict[str, bytes]:
    """The files of a common tokenizer: NFC, a byte-level BPE, eos in the config."""
    made = tokenizers.Tokenizer(models.BPE())
    made.normalizer = normalizers.NFC()
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|stop|>"],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    made.train_from_iterator([TEXT], trainer)
    config = {"eos_token": "<|stop|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    return {
        "tokenizer.json": made.to_str().encode(),
        "tokenizer_config.json": json.dumps(config).encode(),
        "model.safetensors": b"weights",
    }


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with HubServer() as server:
        point_at(monkeypatch, server, tmp_path / "home")
        no_waiting(monkeypatch)
        server.add(REPO, byte_level_bpe())
        (tmp_path / "a.txt").write_text(TEXT, newline="")
        yield server


def run_prepare(folder: Path, tokenizer: str) -> int:
    words = ["--path", str(folder / "a.txt"), "--tokenizer", tokenizer, "--keep_crlf"]
    return run_here(dispatch, ["prepare", *words, "--workers", "1", "--out", str(folder / "made")])


def test_a_tokenizer_of_the_hub_gives_the_ids_of_transformers(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """Also after a preparation is stopped, and resumed while the Hub is unreachable."""
    theirs = transformers.AutoTokenizer.from_pretrained(REPO)
    assert theirs.eos_token == "<|stop|>"
    assert file_vocab_size(f"hf://{REPO}@main") == len(theirs)
    full = OSError(28, "No space left on device")
    with monkeypatch.context() as patch:
        patch.setattr("accel_gpt.prepare.prepare.write_index", Mock(side_effect=full))
        assert run_prepare(tmp_path, REPO) == 2
    assert not any("safetensors" in path for _, path in hub.requests)
    hub.stop()
    assert run_prepare(tmp_path, REPO) == 0
    assert "resuming from" in capsys.readouterr().err
    split, out = open_split(tmp_path / "made", "train"), tmp_path / "made"
    *ids, end = split.read(0, 0, int(split.lengths[0])).tolist()
    ours = load_tokenizer(out)
    text = ours.decode(ids)
    assert TEXT.startswith(text)
    assert "👍🏽" in text
    assert ids == theirs.encode(text, add_special_tokens=False)
    assert (ours.kind, ours.eot_id, ours.vocab_size) == ("hf", end, len(theirs))


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("tester/none", "tester/none is neither a local folder nor a repository on the Hub"),
        (f"{REPO}@v9", f"{REPO} on the Hub has no revision v9"),
        ("tester/weights", "tester/weights has no tokenizer.json on the Hub"),
        ("a b/c", "no such file; set it to bytes, chars, bpe, gpt2, the path of a"),
    ],
)
def test_a_wrong_id_is_one_sentence(
    name: str, sentence: str, hub: HubServer, tmp_path: Path, capsys: Capture
) -> None:
    hub.add("tester/weights", {"model.safetensors": b"weights"})
    assert run_prepare(tmp_path, name) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert len(errors) == 1
    assert sentence in errors[0]
    assert not (tmp_path / "made").exists()
    assert file_vocab_size(name) is None


@pytest.mark.parametrize("repo", ["openai-community/gpt2", "gpt2"])
@pytest.mark.parametrize("files", [["tokenizer.json"], ["vocab.json", "merges.txt"]])
def test_gpt2_comes_from_the_hubs_cache_before_a_download(
    repo: str, files: list[str], hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small vocabulary stands in for GPT-2's."""
    tokens = [*tokenizer_json.BYTE_CHARS, "th", "the", "Ġthe"]
    merges = tokenizer_json.learned_merges(tokens)
    pairs = json.dumps([tokens, merges]).encode()
    monkeypatch.setattr(tokenizer_json, "GPT2_TOKENS", len(tokens))
    monkeypatch.setattr(tokenizer_json, "GPT2_SUM", hashlib.sha256(pairs).hexdigest())
    content = tokenizer_json.gpt2_content(tokens, merges)
    made = {
        "tokenizer.json": json.dumps(content),
        "vocab.json": json.dumps(content["model"]["vocab"]),
        "merges.txt": "#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in merges),
    }

    def offline(name: str) -> None:
        raise ConnectionError(name)

    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "none"))
    monkeypatch.setattr("tiktoken.get_encoding", offline)
    with pytest.raises(UserError, match=r"TIKTOKEN_CACHE_DIR.*hf download openai-community/gpt2"):
        load_gpt2()
    snapshot = tmp_path / "home" / "hub" / f"models--{repo.replace('/', '--')}"
    for path, text in {f"snapshots/{'0' * 40}/{name}": made[name] for name in files}.items():
        (snapshot / path).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / path).write_text(text)
    (snapshot / "refs").mkdir()
    (snapshot / "refs" / "main").write_text("0" * 40)
    requests = len(hub.requests)
    found = named_tokenizer("gpt2")
    assert (found.kind, found.encode("the the")) == ("gpt2", [257, 258])
    assert len(hub.requests) == requests
