"""Exported folders: transformers opens them, in this process and in new ones."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer
from transformers import AutoTokenizer

from accel_gpt import cli
from accel_gpt.data.tokenizer import load_tokenizer
from accel_gpt.errors import CheckpointError
from accel_gpt.model.gpt import GPT
from accel_gpt.transformers_io import export as exporting
from accel_gpt.transformers_io.export import export
from accel_gpt.transformers_io.load import load_pretrained
from accel_gpt.transformers_io.pretrained import find_pretrained
from tests.conftest import run_here, text_of

Arguments = Callable[..., list[str]]
Trained = Callable[..., Path]
QUICK = ["--train.max_steps", "2", "--eval.every", "0", "--sample.every", "0"]
QUICK += ["--schedule.warmup_steps", "0"]


@pytest.fixture
def run(trained: Trained) -> Path:
    """A run of 4 steps."""
    return trained("--train.max_steps", "4", "--sample.every", "0")


@pytest.mark.usefixtures("in_this_process")
def test_a_run_is_exported_and_read_back(run: Path, tmp_path: Path) -> None:
    to = tmp_path / "out"
    told = export(find_pretrained(str(run)), to)
    ours, tokenizer = load_pretrained(str(run))
    again, same = load_pretrained(str(to))
    assert tokenizer.fingerprint == same.fingerprint
    tokens = torch.randint(257, (2, 32))
    torch.testing.assert_close(again(tokens), ours(tokens), atol=1e-5, rtol=1e-5)
    weights = load_file(to / "model.safetensors")
    count = sum(tensor.numel() for tensor in weights.values())
    assert f" {count:,} parameters in fp32" in told
    assert json.loads((to / "generation_config.json").read_text())["eos_token_id"] == 256


@pytest.mark.usefixtures("in_this_process")
def test_fast_opens_as_qwen3(trained: Trained, tmp_path: Path) -> None:
    fast = ["--model.preset", "fast", "--model.logit_softcap", "null"]
    run = str(trained(*QUICK, *fast))
    assert "Qwen3ForCausalLM" in export(find_pretrained(run), tmp_path / "out", as_qwen3=True)
    tokens = torch.randint(257, (2, 32))
    again, _ = load_pretrained(str(tmp_path / "out"))
    ours, _ = load_pretrained(run)
    torch.testing.assert_close(again(tokens), ours(tokens), atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("in_this_process")
def test_smaller_weights_state_their_difference_from_the_trained_ones(
    run: Path, tmp_path: Path
) -> None:
    said = export(find_pretrained(str(run)), tmp_path / "out", dtype="fp16")
    told = re.search(r"(\S+) from ours with the trained weights", said)
    assert told
    ours, tokenizer = load_pretrained(str(run))
    exported = load_pretrained(str(tmp_path / "out"))[0]
    assert isinstance(ours, GPT)
    tokens = exporting.compared_tokens(ours, tokenizer)
    difference = (exported(tokens) - ours(tokens)).abs().max().item()
    assert float(told[1]) == pytest.approx(difference, rel=0.1)
    assert difference > 1e-5


@pytest.mark.usefixtures("in_this_process")
def test_bf16_is_stored_as_such_and_large_files_are_parted(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporting, "SHARD_SIZE", "30KB")
    to = tmp_path / "out"
    export(find_pretrained(str(run)), to, dtype="bf16")
    assert len(list(to.glob("model-*.safetensors"))) > 1
    assert json.loads((to / "config.json").read_text())["dtype"] == "bfloat16"
    load_pretrained(str(to))


@pytest.mark.usefixtures("in_this_process")
def test_an_export_that_computes_something_else_fails(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = exporting.export_tensors

    def wrong(*arguments: Any) -> Any:
        tensors = real(*arguments)
        tensors["transformer.h.1.mlp.c_fc.weight"] *= 1.5
        return tensors

    def fewer(*arguments: Any) -> Any:
        return {k: v for k, v in real(*arguments).items() if "ln_f" not in k}

    for change, problem in (
        (wrong, "its logits differ"),
        (fewer, "missing keys: transformer.ln_f"),
    ):
        monkeypatch.setattr(exporting, "export_tensors", change)
        with pytest.raises(CheckpointError, match=problem):
            export(find_pretrained(str(run)), tmp_path / "out")
    assert not list(tmp_path.glob("*out*"))  # nothing was kept


def write_llama_tokenizer(folder: Path) -> None:
    """Write a byte-level BPE whose template puts <s> before a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        special_tokens=["<s>", "</s>"],
        vocab_size=300,
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text_of(500)], trainer)
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    "settings",
    [
        {"pad_token": "[PAD]", "mask_token": {"content": "<mask>", "lstrip": True}},
        {"additional_special_tokens": ["<s>", "<tool>"]},
        {"extra_special_tokens": {"image_token": "<image>"}, "cls_token": "<s>"},
        {"added_tokens_decoder": {"300": {"content": "the king", "special": False}}},
        {"pad_token": "n", "mask_token": {"content": "k"}},  # ordinary tokens
    ],
)
def test_settings_of_a_tokenizer_change_no_ids_of_the_exported_one(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    write_llama_tokenizer(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | settings))
    ours = load_tokenizer(tmp_path)
    (tmp_path / "out").mkdir()
    ours.save(tmp_path / "out", 64, ours.vocab_size)
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert len(theirs) == ours.vocab_size
    text = "the king <s> [PAD] <mask> <tool> <image>"
    assert theirs(text).input_ids == ours.encode_prompt(text)


@pytest.mark.usefixtures("in_this_process")
def test_a_target_that_holds_something(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    to = tmp_path / "out"
    to.mkdir()
    command = ["export", str(run), "--to", str(to)]
    assert run_here(cli.dispatch, command) == 0
    before = {path: path.read_bytes() for path in to.iterdir()}
    capsys.readouterr()
    assert run_here(cli.dispatch, command) == 2
    assert f"{to} already exists; give a new" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in to.iterdir()} == before
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "real")
    assert run_here(cli.dispatch, ["export", str(run), "--to", str(link)]) == 0
    assert link.is_symlink()
    assert (tmp_path / "real" / "config.json").exists()
