"""Samples of real FSDP2 runs equal the text that one process writes."""

import json
import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from accel_gpt.config.data import PrepareConfig
from accel_gpt.config.experiment import SampleConfig
from accel_gpt.data.order import derive_seed
from accel_gpt.evals.samples import write_text
from accel_gpt.prepare.prepare import prepare
from accel_gpt.transformers_io.load import load_pretrained
from tests.faults import test_fsdp
from tests.faults.test_fsdp import FAULTY, launch
from tests.test_train import assert_same_weights, weights

Arguments = Callable[..., list[str]]
SEED = 1337
WRITING = ["--sample.every", "3", "--sample.num", "2", "--sample.prompts", '["a", "b", ""]']
WRITING += ["--sample.max_new_tokens", "50", "--sample.temperature", "1.5"]
EAGER = """
from torch import nn
compile_module = nn.Module.compile
nn.Module.compile = lambda module: compile_module(module, backend="eager")
"""  # graphs are traced, kernels not compiled


@pytest.fixture
def short_documents(tmp_path: Path) -> Path:
    """Data of short documents, so that a model soon ends its texts early."""
    draw, text = random.Random(0), tmp_path / "short.jsonl"
    lines = [json.dumps({"text": "".join(draw.choices("abc", k=4)) + str(i)}) for i in range(3000)]
    text.write_text("\n".join(lines) + "\n")
    asked = PrepareConfig(source="jsonl", path=str(text), tokenizer="bytes", workers=1)
    prepare(asked, tmp_path / "short")
    return tmp_path / "short"


def texts(run: Path, step: int) -> list[str]:
    """Return the samples of a step."""
    whole = (run / "samples" / f"step_{step:08d}.txt").read_text()
    return re.split(r"(?:\A|\n\n)--- sample \d+\n", whole.removesuffix("\n"))[1:]


def alone(run: Path, step: int, rank: int) -> list[str]:
    """Return the text of process `rank`, with all weights of a step on one process."""
    model, tokenizer = load_pretrained(str(run), str(step), torch.device("cpu"))
    config = SampleConfig(num=2, max_new_tokens=50, temperature=1.5)
    own = []
    for number, prompt in enumerate(("a", "b", "")):
        generator = torch.Generator().manual_seed(derive_seed(SEED, "sample", step, rank, number))
        own += write_text(model, tokenizer, prompt, config, generator)
    return own


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_sharded_processes_write_what_each_would_write_alone(
    small_run: Arguments,
    short_documents: Path,
    tmp_path: Path,
    compiled: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(test_fsdp, "FAULTY", FAULTY + EAGER)
    alike = ["--data.train", str(short_documents), "--train.micro_batch_size", "2"]
    alike += ["--train.max_steps", "6", "--checkpoint.every", "3", "--eval.every", "3"]
    alike += ["--train.compile"] * compiled
    told, silent = tmp_path / "told", tmp_path / "silent"
    launch(2, tmp_path, small_run(*alike, *WRITING, "--out_dir", str(told)))
    launch(2, tmp_path, small_run(*alike, "--sample.every", "0", "--out_dir", str(silent)))
    assert_same_weights(weights(told, 6), weights(silent, 6))
    for step in (3, 6):
        first, second = (alone(told, step, rank) for rank in (0, 1))
        assert texts(told, step) == first + second
        lengths = [max(map(len, own[i : i + 2])) for own in (first, second) for i in (0, 2, 4)]
        assert len(set(lengths)) > 2  # they end at different times, some before the limit
        assert min(lengths) < 50
