"""Fixtures: small corpora, a clean Accelerate; `hermetic.py` keeps tests apart.

This file does not import torch: the process that distributes the tests does not need it.
"""

import contextlib
import functools
import getpass
import importlib
import io
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.configuration
import pytest

from accel_gpt.config.data import PrepareConfig
from accel_gpt.config.model import PRESETS, ModelConfig
from accel_gpt.console import run_main
from accel_gpt.data.tokenizer import Tokenizer, load_gpt2
from accel_gpt.data.tokenizer_json import BYTE_CHARS, EOT
from accel_gpt.errors import AccelGPTError
from accel_gpt.files import sha256
from accel_gpt.launcher import shared_cores
from accel_gpt.prepare.prepare import prepare

THREADS = int(os.environ.get("ACCEL_GPT_TEST_THREADS", "1"))
# 0: as many cases as `.ci/run` has time for; 1 and more: as many as `.ci/release` runs
THOROUGH = int(os.environ.get("ACCEL_GPT_THOROUGH", "0"))
# of a slow test that shows on processes, networks or a compiler what faster tests show without
thorough = pytest.mark.skipif(not THOROUGH, reason="ACCEL_GPT_THOROUGH is not set")
RECORDS = ("config.yaml", "run.json", "data_files.json")  # files of a run with paths
QUIET = ("--eval.every", "0", "--sample.every", "0", "--log.trackers", "[]")
# compiled code goes where torch puts it, not into the user's cache
PLACE = f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}"
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", PLACE)
os.environ["TOKENIZERS_PARALLELISM"] = "false"  # tests run side by side
os.environ.setdefault("OMP_NUM_THREADS", str(THREADS))  # for child processes
MOST_WORKERS = 8  # each imports torch; more gain little
NO_VOCABULARY = "GPT-2's published vocabulary is not available: TIKTOKEN_CACHE_DIR holds none"
WORDS = (
    *("the", "king", "of", "a", "land", "far", "by", "sea", "went", "to"),
    *("war", "with", "his", "men", "and", "lost", "all", "that", "he", "had"),
)


def text_of(words: int, seed: int = 0) -> str:
    """Return learnable text, the same on every machine."""
    draw = random.Random(seed)
    return " ".join(draw.choice(WORDS) for _ in range(words)) + "\n"


def run_here(main: Callable[[Sequence[str]], int], words: Sequence[str]) -> int:
    """Run a command in this process and restore global settings; return the exit code."""
    from tests.helpers.hermetic import kept_settings

    with kept_settings():
        return run_main(main, words)


@pytest.fixture
def uploads_here(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Upload in this process, since a child takes seconds to start. Return the exit codes."""
    from accel_gpt.publish import uploader

    codes: list[int] = []

    class Child:
        def __init__(self, argv: Sequence[str], module: str, **_: Any) -> None:
            codes.append(run_here(importlib.import_module(module).main, argv))

        def wait(self) -> int:
            return codes[-1]

        def kill(self) -> None:
            """Do nothing: the upload is complete."""

    monkeypatch.setattr(uploader, "launch_child", Child)
    return codes


@pytest.fixture
def uploads_in_turn(uploads_here: list[int], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let the training wait for the uploads of each checkpoint. Return the exit codes."""
    from accel_gpt.publish.uploader import Uploader

    on_checkpoint = Uploader.on_checkpoint

    def wait(uploads: Uploader, checkpoint: Path) -> None:
        on_checkpoint(uploads, checkpoint)
        uploads.thread.submit(lambda: None).result()  # of the only thread

    monkeypatch.setattr(Uploader, "on_checkpoint", wait)
    return uploads_here


def launch(arguments: Sequence[str]) -> int:
    """Train in this process; return the exit code."""
    from accel_gpt.commands import train as command

    return run_here(command.main, arguments)


def tiny(preset: str = "gpt2", **changes: Any) -> ModelConfig:
    """Two layers, 32 channels, 16 tokens; blocks that do something before any training."""
    shape = {"n_layer": 2, "n_head": 4, "n_embd": 32, "block_size": 16}
    defaults = PRESETS[preset] | {"preset": preset, "zero_init": False}
    return ModelConfig(**{**shape, **defaults, **changes})


def pytest_configure(config: pytest.Config) -> None:
    """Where tests run: no network, no setting left changed, and one thread, or as many as
    `.ci/processors` asks for. Tensors this small are slower with two.
    """
    if config.getoption("numprocesses", None):
        return  # workers run the tests
    from tests.helpers import hermetic

    config.pluginmanager.register(hermetic)
    hermetic.start(THREADS)
    # a checkout may be read-only, a machine slow
    cache = Path(tempfile.gettempdir()) / f"hypothesis_{getpass.getuser()}"
    hypothesis.configuration.set_hypothesis_home_dir(cache)
    slow = [hypothesis.HealthCheck.too_slow]
    hypothesis.settings.register_profile(
        "suite",
        max_examples=200 if THOROUGH else 30,
        deadline=None,
        database=None,
        print_blob=True,
        suppress_health_check=slow,
    )
    hypothesis.settings.load_profile("suite")


def pytest_xdist_auto_num_workers() -> int:
    """Return the number of cores for this process."""
    return min(shared_cores(), MOST_WORKERS)


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with text.txt and its data folder `corpus`, prepared once."""
    folder = tmp_path_factory.mktemp("prepared")
    prepare_words(folder, 5000, shard_tokens=7000)
    return folder


def prepare_words(folder: Path, words: int, shard_tokens: int) -> None:
    """Write text.txt to a folder, and its data folder `corpus` of bytes."""
    text = folder / "text.txt"
    text.write_text(text_of(words))
    asked = PrepareConfig(source=str(text), tokenizer="bytes", shard_tokens=shard_tokens)
    prepare(asked, folder / "corpus")


@pytest.fixture
def shakespeare(tmp_path: Path) -> Path:
    """Tiny Shakespeare if the environment names its file, else a text of the same length."""
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


def small_config(folder: Path) -> str:
    """Write the config of a tiny run in `folder`, on the data in its `corpus`; return the path."""
    path = folder / "small.yaml"
    path.write_text(
        f"""
out_dir: {folder / "run"}
data: {{train: {folder / "corpus"}}}
model: {{n_layer: 2, n_head: 2, n_embd: 32, block_size: 32, dropout: 0.1}}
train: {{tokens_per_step: 256, micro_batch_size: 8, max_steps: 12}}
optim: {{lr: 1e-2}}
schedule: {{warmup_steps: 2}}
eval: {{every: 4, tokens: 512}}
sample: {{every: 6, max_new_tokens: 8}}
checkpoint: {{every: 4, keep_best: false}}
log: {{every: 1, trackers: []}}
"""
    )
    return str(path)


@pytest.fixture
def small_run(corpus: Path, tmp_path: Path) -> Callable[..., list[str]]:
    """Arguments of a tiny training run, two layers of 32 channels; more options may follow."""
    path = small_config(corpus.parent)

    def arguments(*options: str) -> list[str]:
        return [path, *options]

    return arguments


def reseal(path: Path) -> None:
    """Rewrite the manifest of a checkpoint so that it fits the files there are."""
    files = {
        p.name: {"size": p.stat().st_size, "sha256": sha256(p)}
        for p in path.iterdir()
        if p.name != "manifest.json"
    }
    (path / "manifest.json").write_text(json.dumps({"format": 1, "files": files}))
    from accel_gpt.runs.checkpoint import verify_checkpoint

    verify_checkpoint(path)


@pytest.fixture(scope="session")
def train_once(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The folder of a finished run of `small_run(*options)`, trained when first asked for."""

    @functools.cache
    def trained(*options: str) -> Path:
        folder = tmp_path_factory.mktemp("trained")
        shutil.copytree(prepared, folder, dirs_exist_ok=True)
        assert launch([small_config(folder), *options]) == 0
        return folder

    return trained


@pytest.fixture
def trained(train_once: Callable[..., Path], corpus: Path) -> Callable[..., Path]:
    """Copy the run of `launch(small_run(*options))`; equal options are trained only once."""

    def copied(*options: str, to: str = "run") -> Path:
        source, run = train_once(*options), corpus.parent / to
        shutil.copytree(source / "run", run)
        checkpoints = sorted(run.glob("checkpoints/step_*"))
        states = [path / "trainer_state.json" for path in checkpoints]
        for path in (*(run / name for name in RECORDS), *states):
            text = path.read_text().replace(str(source / "run"), str(run))
            path.write_text(text.replace(str(source), str(corpus.parent)))
        for path in checkpoints:
            reseal(path)
        return run

    return copied


@pytest.fixture(autouse=True)
def plain_signals() -> Iterator[None]:
    """Use Python's default signal handlers in each test, and restore them afterwards."""
    from accel_gpt.launcher import SIGNALS

    before = {number: signal.getsignal(number) for number in SIGNALS}
    # a training in a fixture or a background job may ignore signals; children would inherit it
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.set_wakeup_fd(-1)
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def settings_kept() -> Iterator[None]:
    """Restore global settings after a test that changes them, as the end of a process would."""
    from tests.helpers.hermetic import kept_settings

    with kept_settings():
        yield


@pytest.fixture(scope="session")
def gpt2_vocabulary() -> Tokenizer:
    """GPT-2's tokenizer with its published 50,257 tokens; skip if it is not available."""
    try:
        return load_gpt2()
    except AccelGPTError:
        pytest.skip(NO_VOCABULARY)


@pytest.fixture
def gpt2_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace GPT-2's vocabulary by one of the same size: bytes, then pairs from a space on."""
    pairs = itertools.product(BYTE_CHARS[ord(" ") :], BYTE_CHARS)
    merges = [*itertools.islice(pairs, 50_256 - 256)]
    tokens = [*BYTE_CHARS, *map("".join, merges), EOT]
    files = {
        "encoder.json": json.dumps({token: i for i, token in enumerate(tokens)}),
        "vocab.bpe": "".join(f"{first} {second}\n" for first, second in merges),
    }

    def read(url: str, sha256: str) -> bytes:
        return files[url.rpartition("/")[2]].encode()

    monkeypatch.setattr("tiktoken.load.read_file_cached", read)


@pytest.fixture
def gpt2_shapes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Let the Hub have the shapes of the larger GPT-2s: Radford et al. 2019, table 2."""
    shapes = {"gpt2-medium": (24, 16), "gpt2-large": (36, 20), "gpt2-xl": (48, 25)}

    def download(name: str, *_: str) -> Path:
        layers, heads = shapes[name]
        shape = {"n_layer": layers, "n_head": heads, "n_embd": 64 * heads, "n_positions": 1024}
        config = tmp_path / name / "config.json"
        config.parent.mkdir(exist_ok=True)
        config.write_text(json.dumps({"model_type": "gpt2", **shape}))
        return config.parent

    monkeypatch.setattr("accel_gpt.transformers_io.pretrained.download_repo", download)


@pytest.fixture(autouse=True)
def clean_accelerate() -> Iterator[None]:
    """Reset the state that Accelerate keeps in classes."""
    yield
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare exports in this process, since a new one takes seconds to start."""

    def run(argv: list[str], module: str, **_: Any) -> subprocess.CompletedProcess[str]:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = importlib.import_module(module).main(argv)
        return subprocess.CompletedProcess(argv, code, out.getvalue(), err.getvalue())

    monkeypatch.setattr("accel_gpt.transformers_io.export.run_child", run)
