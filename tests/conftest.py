"""Fixtures: small corpora in `tmp_path`, and a clean Accelerate for every test."""

import getpass
import os
import random
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_gpt import train
from accel_gpt.data.prepare import prepare
from accel_gpt.data_config import PrepareConfig
from accel_gpt.errors import run_main
from accel_gpt.model import passes
from accel_gpt.model_config import PRESETS, ModelConfig
from accel_gpt.run.signals import SIGNALS

THREADS = int(os.environ.get("ACCEL_GPT_TEST_THREADS", "1"))
QUIET = ("--eval.every", "0", "--sample.every", "0", "--log.trackers", "[]")
# what is compiled goes where torch puts it, not into the user's cache
PLACE = f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}"
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", PLACE)
WORDS = [
    "the",
    "king",
    "of",
    "a",
    "land",
    "far",
    "by",
    "sea",
    "went",
    "to",
    "war",
    "with",
    "his",
    "men",
    "and",
    "lost",
    "all",
    "that",
    "he",
    "had",
]


def text_of(words: int, seed: int = 0) -> str:
    """Text that a model can learn something from, the same on every machine."""
    draw = random.Random(seed)
    return " ".join(draw.choice(WORDS) for _ in range(words)) + "\n"


def launch(arguments: Sequence[str]) -> int:
    """Train in this process; the exit code."""
    return run_main(train.main, arguments)


def tiny(preset: str = "gpt2", **changes: Any) -> ModelConfig:
    """Two layers, 32 channels, 16 tokens; blocks that do something before any training."""
    shape = {"n_layer": 2, "n_head": 4, "n_embd": 32, "block_size": 16}
    defaults = PRESETS[preset] | {"preset": preset, "zero_init": False}
    return ModelConfig(**{**shape, **defaults, **changes})


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tensors this small are slower with two; `.ci/processors` asks for more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def avx512(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention in bf16 as where the processor has wide products."""
    monkeypatch.setattr(passes, "HAS_AVX512", True)


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with text.txt and its data folder `corpus`, made once."""
    folder = tmp_path_factory.mktemp("prepared")
    text = folder / "text.txt"
    text.write_text(text_of(5000))
    asked = PrepareConfig(
        source="text", path=str(text), tokenizer="bytes", shard_tokens=7000, workers=1
    )
    prepare(asked, folder / "corpus")
    return folder


@pytest.fixture
def shakespeare(tmp_path: Path) -> Path:
    """Tiny Shakespeare, where the environment says that it is at hand, else text as long."""
    if given := os.environ.get("ACCEL_GPT_TINYSHAKESPEARE"):
        return Path(given)
    text = tmp_path / "shakespeare.txt"
    text.write_text(text_of(250_000))
    return text


@pytest.fixture
def corpus(prepared: Path, tmp_path: Path) -> Path:
    """A data folder of bytes: about 18,000 train and 2,000 val tokens in several shards."""
    shutil.copytree(prepared, tmp_path, dirs_exist_ok=True)
    return tmp_path / "corpus"


@pytest.fixture
def small_run(corpus: Path, tmp_path: Path) -> Callable[..., list[str]]:
    """Arguments of a tiny training run, two layers of 32 channels; more options may follow."""
    path = tmp_path / "small.yaml"
    path.write_text(
        f"""
out_dir: {tmp_path / "run"}
data: {{train: {corpus}}}
model: {{n_layer: 2, n_head: 2, n_embd: 32, block_size: 32, dropout: 0.1}}
train: {{tokens_per_step: 256, micro_batch_size: 4, max_steps: 12, cpu_threads: {THREADS}}}
optim: {{lr: 1e-2}}
schedule: {{warmup_steps: 2}}
eval: {{every: 4, tokens: 512}}
sample: {{every: 6, max_new_tokens: 8}}
checkpoint: {{every: 4, keep_best: false}}
log: {{every: 1}}
"""
    )

    def arguments(*options: str) -> list[str]:
        return [str(path), *options]

    return arguments


@pytest.fixture(autouse=True)
def plain_signals() -> Iterator[None]:
    """Training listens to signals for good; no test hears with the ears of another."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a background job
    yield
    signal.set_wakeup_fd(-1)
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def clean_accelerate() -> Iterator[None]:
    """Accelerate keeps its state in classes; no test sees another's."""
    yield
    torch.set_flush_denormal(False)  # training sets it, and hypothesis refuses to work with it
    torch.use_deterministic_algorithms(False)
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def same(a: Sequence[float], b: Sequence[float]) -> bool:
    """Equal bit for bit."""
    return [x.hex() for x in a] == [x.hex() for x in b]
