"""GGUF files: llama.cpp opens models and tokenizers of every kind."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_gpt.cli import dispatch
from accel_gpt.config.model import PRESETS, ModelConfig
from accel_gpt.data import tokenizer_json
from accel_gpt.data.tokenizer import BytesTokenizer, HFTokenizer, Tokenizer
from accel_gpt.errors import CheckpointError, UserError
from accel_gpt.model.gpt import GPT
from accel_gpt.prepare.bpe import make_tokenizer
from accel_gpt.transformers_io.as_qwen3 import convert_to_qwen3
from tests.conftest import run_here, text_of

pytest.importorskip("gguf")
pytest.importorskip("xllamacpp")

from gguf import GGUFReader

from accel_gpt.publish import gguf as exporting
from accel_gpt.publish import gguf_proof, gguf_tokenizer

Trained = Callable[..., Path]
QUICK = ["--train.max_steps", "2", "--eval.every", "0", "--sample.every", "0"]
QUICK += ["--schedule.warmup_steps", "0"]
SHAPE: dict[str, Any] = {"n_layer": 2, "n_head": 4, "n_embd": 64, "block_size": 64}
SHAPES = {
    "gpt2": {},
    "gpt2_without_biases": {"preset": "gpt2", "bias": False},
    "llama": {},
    "llama_tied": {"preset": "llama", "tie_embeddings": True},
    "llama_gqa_biases": {"preset": "llama", "n_kv_head": 2, "bias": True, "head_dim": 8},
    "llama_llama3": {"preset": "llama", "rope_factor": 8.0},
    "qwen3": {},
    "qwen3_gqa_tied": {"preset": "qwen3", "n_kv_head": 1, "tie_embeddings": True, "head_dim": 24},
    "fast": {"logit_softcap": None},
    "fast_gqa": {"preset": "fast", "logit_softcap": None, "n_kv_head": 2},
}
PROSE = "It's the king's; WE'LL see. I'd've gone, they're 1,024 miles off!\n\n    def f(x):\n\t  x"
TEXT = "\n".join((PROSE, *gguf_proof.CHARACTERS, text_of(4000, seed=0)))


@pytest.fixture(autouse=True)
def short_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scale positions from a context of 32 tokens, so that the few of a test show it."""
    for module in ("model.layers", "transformers_io.hf_config"):
        monkeypatch.setattr(f"accel_gpt.{module}.LLAMA3_CONTEXT", 32)


def model_of(name: str, vocab_size: int, std: float = 0.2) -> GPT:
    """Return a model whose random weights are large, so that its predictions differ."""
    options = {"preset": name} | SHAPES[name]
    preset = PRESETS[str(options["preset"])]
    torch.manual_seed(0)
    model = GPT(ModelConfig(**(dict(preset) | SHAPE | options)), vocab_size).eval()
    for weight in model.parameters():
        if weight.dim() >= 2:
            torch.nn.init.normal_(weight[:vocab_size], std=std)
    return model


def tokenizer_of(kind: str) -> Tokenizer:
    """Return a tokenizer of a kind that can be exported."""
    if kind == "bytes":
        return BytesTokenizer()
    trained = make_tokenizer("bpe", 600, lambda: iter([TEXT * 3]))
    if kind == "bpe":
        return trained
    vocabulary = tokenizer_json.tokens_by_id(json.loads(trained.file_text)["model"]["vocab"])
    merges = json.loads(trained.file_text)["model"]["merges"]
    content = tokenizer_json.byte_level_content(vocabulary, merges)
    content["model"]["ignore_merges"] = False
    byte_level = tokenizer_json.byte_level()
    if kind in ("hub_gpt2", "roberta"):
        content["pre_tokenizer"] = byte_level | {"use_regex": True}
        content["pre_tokenizer"]["add_prefix_space"] = kind == "roberta"
    else:
        pattern = tokenizer_json.PATTERN.replace("{1,3}", "" if kind == "hub_qwen" else "{1,2}")
        split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
        steps = [split | {"invert": False}, byte_level]
        content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}
    return HFTokenizer(content, Path("tokenizer.json"), {})


def write(model: GPT, tokenizer: Tokenizer, file: Path, dtype: str = "fp32") -> None:
    """Write a file of a model that needs no conversion."""
    exporting.write_gguf(
        model=model,
        architecture=exporting.llama_cpp_architecture(model.config),
        tokenizer=tokenizer,
        vocabulary=gguf_tokenizer.llama_cpp_vocabulary(tokenizer),
        file=file,
        dtype=dtype,
    )


def prove(model: GPT, tokenizer: Tokenizer, folder: Path) -> gguf_proof.Reference:
    """Write and compare a file in float32; return what it was compared with."""
    file = folder / "model.gguf"
    tokens = torch.tensor([tokenizer.encode(TEXT)[: model.config.block_size]])
    converted = convert_to_qwen3(model, tokens) if model.config.mlp == "relu2" else model
    write(converted, tokenizer, file)
    vocabulary = gguf_tokenizer.llama_cpp_vocabulary(tokenizer)
    reference = gguf_proof.compute_reference(model, tokenizer, vocabulary, tokens)
    gguf_proof.compare_gguf(file, reference)
    return reference


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name not in PRESETS)) for name in SHAPES],
)
def test_llama_cpp_computes_every_shape(name: str, tmp_path: Path) -> None:
    prove(model_of(name, 257), BytesTokenizer(), tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize("kind", ["bpe", "hub_gpt2", "hub_qwen"])
def test_every_tokenizer(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """llama.cpp gives 10,000 texts the same ids; the vocabulary of the model is larger."""
    monkeypatch.setattr(gguf_proof, "COMPARED_TEXTS", 10_000)
    tokenizer = tokenizer_of(kind)
    prove(model_of("llama", tokenizer.vocab_size + 7), tokenizer, tmp_path)


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize(
    "dtype", ["q8_0", *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in ("fp16", "bf16"))]
)
def test_the_difference_of_a_smaller_type_is_measured(dtype: str, tmp_path: Path) -> None:
    model = model_of("qwen3", 257)
    file = tmp_path / "model.gguf"
    reference = prove(model, BytesTokenizer(), tmp_path)
    whole = file.stat().st_size
    write(model, BytesTokenizer(), file, dtype)
    assert file.stat().st_size < 0.6 * whole
    report = gguf_proof.compare_gguf(file, reference, exact=False)
    assert 1e-4 < report["difference"] < 1.0


@pytest.mark.usefixtures("in_this_process")
def test_a_file_that_computes_something_else_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights are so small that the predictions hardly differ."""
    monkeypatch.setattr(exporting, "interleave", lambda rows, _: rows)
    with pytest.raises(CheckpointError, match="logits differ from ours by up to"):
        prove(model_of("llama", 257, std=0.02), BytesTokenizer(), tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures("in_this_process")
def test_an_added_token_is_recognized_in_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known = tokenizer_of("hub_qwen")
    content = json.loads(known.file_text)
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    own = known.vocab_size
    content["added_tokens"].append({"id": own, "content": "<think>", **flags})
    start = {"id": own + 1, "content": "<|im_start|>", **flags, "special": True}
    content["added_tokens"].append(start)
    content["normalizer"] = {"type": "NFC"}
    tokenizer = HFTokenizer(content, Path("tokenizer.json"), {})
    assert own in tokenizer.encode("a <think> b")
    model = model_of("qwen3", tokenizer.vocab_size)
    prove(model, tokenizer, tmp_path)
    assert "normalizes text to NFC, which llama.cpp leaves out" in capsys.readouterr().err
    with monkeypatch.context() as patch:
        patch.setattr(gguf_tokenizer, "USER_DEFINED", gguf_tokenizer.NORMAL)
        with pytest.raises(CheckpointError, match="different ids for 'a <think> b<think>'"):
            prove(model, tokenizer, tmp_path)
    monkeypatch.setattr(gguf_tokenizer, "CONTROL", gguf_tokenizer.USER_DEFINED)
    with pytest.raises(CheckpointError, match=r"different ids for 'a <\|im_start\|> b"):
        prove(model, tokenizer, tmp_path)


def test_weights_that_overflow_float16(tmp_path: Path) -> None:
    model = model_of("llama", 257)
    with torch.no_grad():
        model.blocks[0].mlp.up.weight[0, 0] = 1e5
    write(model, BytesTokenizer(), tmp_path / "model.gguf", "bf16")
    with pytest.raises(UserError, match=r"ffn_gate.weight has .*, too large for float16"):
        write(model, BytesTokenizer(), tmp_path / "model.gguf", "fp16")


def test_a_constant_of_a_token_is_no_difference() -> None:
    ours = torch.log_softmax(torch.randn(3, 50_000), dim=-1)
    theirs = ours + torch.tensor([[1e-2], [0.0], [-1e-2]])
    assert gguf_proof.largest_logit_difference(ours, theirs) < 1e-5
    theirs[1, 7] += 0.01
    assert gguf_proof.largest_logit_difference(ours, theirs) == pytest.approx(0.01, rel=1e-2)
    theirs[1, 7] = float("nan")
    assert gguf_proof.largest_logit_difference(ours, theirs) == float("inf")


def test_a_tokenizer_that_splits_otherwise_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_this_process: None
) -> None:
    tokenizer = tokenizer_of("hub_qwen")
    monkeypatch.setattr(gguf_tokenizer, "pre_tokenizer_name", lambda *_: "gpt-2")
    with pytest.raises(CheckpointError, match="its tokenizer returns different ids for"):
        prove(model_of("qwen3", tokenizer.vocab_size), tokenizer, tmp_path)


def test_a_text_begins_and_ends_with_end_of_text(tmp_path: Path) -> None:
    tokenizer = tokenizer_of("hub_qwen")
    write(model_of("qwen3", tokenizer.vocab_size), tokenizer, tmp_path / "model.gguf")
    fields = GGUFReader(tmp_path / "model.gguf").fields
    for key in ("bos", "eos"):
        assert fields[f"tokenizer.ggml.{key}_token_id"].contents() == tokenizer.eot_id


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("gpt2", {"mlp": "gelu_erf"}, "model.mlp is gelu_erf"),
        ("fast", {"logit_softcap": 15.0}, "model.logit_softcap is 15.0"),
        ("qwen3", {"rope_factor": 2.0}, "model.rope_factor is 2.0"),
    ],
)
def test_a_shape_that_llama_cpp_lacks(name: str, changes: dict[str, Any], named: str) -> None:
    config = ModelConfig(**(dict(PRESETS[name]) | SHAPE | {"preset": name} | changes))
    with pytest.raises(UserError, match=named):
        exporting.llama_cpp_architecture(config)


@pytest.mark.parametrize(
    ("kind", "named"), [("unknown", r".*\{1,2\}"), ("roberta", "ByteLevel with a space before a")]
)
def test_a_tokenizer_that_llama_cpp_lacks(kind: str, named: str) -> None:
    with pytest.raises(UserError, match=f"splits text with the pre-tokenizer {named}"):
        gguf_tokenizer.llama_cpp_vocabulary(tokenizer_of(kind))


@pytest.mark.slow
def test_the_command(trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In a new process; then errors, which leave nothing behind."""
    run = str(trained(*QUICK, "--model.preset", "llama"))
    to = tmp_path / "out" / "model.gguf"
    assert run_here(dispatch, ["export", run, "--gguf", str(to)]) == 0
    shown = capsys.readouterr().out
    assert "opened by llama.cpp" in shown
    assert f"ollama create model -f {to.with_suffix('.Modelfile')}" in shown
    assert "FROM ./model.gguf" in to.with_suffix(".Modelfile").read_text()
    assert sorted(path.name for path in to.parent.iterdir()) == ["model.Modelfile", "model.gguf"]
    assert run_here(dispatch, ["export", run, "--gguf", str(to)]) == 2
    assert f"{to} already exists" in capsys.readouterr().err
    to = tmp_path / "smaller.gguf"
    assert run_here(dispatch, ["export", run, "--gguf", str(to), "--dtype", "q8_0"]) == 0
    assert "in q8_0 its logits differ by at most" in capsys.readouterr().out
