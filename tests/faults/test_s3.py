"""A run that reads its data from S3 stands still for no fault of the server."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from accel_gpt.runs.folder import checkpoint_steps
from tests.conftest import launch, prepare_words
from tests.helpers.s3 import S3Server, require_s3
from tests.test_train import records

pytestmark = pytest.mark.slow
LATER = r"train_00000[1-9]"  # all train shards but the first, which the evaluation reads


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three train shards. Each rank reads 131,000 tokens at once: two ranks, most of a shard."""
    folder = tmp_path_factory.mktemp("s3")
    prepare_words(folder, 250_000, shard_tokens=400_000)
    return folder / "corpus"


@pytest.fixture(scope="module")
def whole(corpus: Path) -> Path:
    """A run that never stopped, on local shards."""
    words = arguments(corpus.parent, "whole", "--data.train", str(corpus))
    assert launch(words) == 0
    return corpus.parent / "whole"


@pytest.fixture
def s3(corpus: Path) -> Iterator[S3Server]:
    """A server that holds the corpus at s3://bucket/corpus."""
    require_s3()
    with S3Server() as server:
        for file in corpus.iterdir():
            server.put(f"corpus/{file.name}", file.read_bytes())
        yield server


def arguments(folder: Path, name: str, *options: str) -> list[str]:
    """Return the arguments of a run of 100 steps through all shards in order."""
    config = folder / "s3.yaml"
    config.write_text(
        f"""
out_dir: {folder / name}
data: {{train: "s3://bucket/corpus", shuffle: none}}
model: {{n_layer: 1, n_head: 2, n_embd: 16, block_size: 256}}
train: {{tokens_per_step: 8192, micro_batch_size: 16, max_steps: 100}}
eval: {{every: 0, tokens: 512}}
sample: {{every: 0}}
checkpoint: {{every: 0}}
log: {{every: 1, trackers: []}}
"""
    )
    return [str(config), *options]


def start(s3: S3Server, words: list[str], ranks: int = 1) -> subprocess.Popen[str]:
    """Start a run as a command."""
    command = [sys.executable, "-m", "accel_gpt", "train"]
    if ranks > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        command = [sys.executable, *launcher, "-m", "accel_gpt", "train"]
    environment = {**os.environ, **s3.environment, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(
        [*command, *words],
        env=environment,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def wait_for(condition: Callable[[], object], process: subprocess.Popen[str]) -> None:
    """Wait until a condition holds while a process runs."""
    while not condition():
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)


def trained(run: Path) -> list[dict[str, object]]:
    """Return the records without evaluations, which read other tokens of remote data."""
    return [{k: v for k, v in one.items() if "eval/" not in k} for one in records(run)]


def test_a_shard_that_does_not_come_ends_the_run_saved(
    s3: S3Server, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3.fail("hang", LATER, method="GET")
    words = arguments(tmp_path, "run", "--train.step_timeout", "15s")
    process = start(s3, words)
    _, said = process.communicate(timeout=300)
    assert process.returncode == 3, said
    assert "s3://bucket/corpus/train_00000" in said
    assert "could not be fetched within 15 s (train.step_timeout)" in said
    steps = [record["step"] for record in records(tmp_path / "run")]
    assert checkpoint_steps(tmp_path / "run" / "checkpoints") == [steps[-1]]
    s3.heal()
    s3.point_at(monkeypatch)
    assert launch(arguments(tmp_path, "run")) == 0
    assert trained(tmp_path / "run") == trained(whole)


def test_a_signal_ends_the_wait_and_saves(s3: S3Server, tmp_path: Path) -> None:
    s3.fail("hang", LATER, method="GET")
    process = start(s3, arguments(tmp_path, "run"), ranks=2)
    metrics = tmp_path / "run" / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and '"step": 3' in metrics.read_text(), process)
    time.sleep(2.0)  # so that the run waits, or is about to
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=100)
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    assert checkpoint_steps(tmp_path / "run" / "checkpoints") == [steps[-1]]


def test_a_hanging_shard_that_is_not_needed_yet_stops_nothing(s3: S3Server, tmp_path: Path) -> None:
    """Prefetching the last shard hangs; the run trains on those before it."""
    last = sorted(name for name in s3.names() if "/train_" in name)[-1]
    s3.fail("hang", last, method="GET")
    process = start(s3, arguments(tmp_path, "run", "--train.step_timeout", "15s"))
    _, said = process.communicate(timeout=300)
    assert process.returncode == 3, said
    assert last.rpartition("/")[2] in said.splitlines()[-1]
