"""Measure what moves data: loading batches, preparing text, saving checkpoints.

    python benchmarks/disk_io.py [--only load prepare checkpoint] [--rounds 3]
        [--text TEXT.jsonl] [--json FILE] [--tiny]

load: tokens/s of batches of 12 x 1,024 tokens as training gets them, from one shard and from 1,000,
    beside nanoGPT's get_batch on the same tokens.
prepare: MB/s of `accel-gpt prepare` with GPT-2's tokenizer, beside tiktoken's own encoding on one
    thread. TEXT.jsonl has one document a line, under "text"; 100 MB or more give steady figures.
    Default: the sources of Python's standard library. It needs GPT-2's vocabulary; without a
    network, set TIKTOKEN_CACHE_DIR.
checkpoint: seconds in which training stands still for a checkpoint of GPT-2 124M with AdamW, with
    and without checkpoint.async_save, beside torch.save and fsync of the same tensors; and seconds
    to verify the checkpoint's hashes.

All figures are medians over the rounds. `--tiny` measures nothing: it tests this file.
"""

import argparse
import itertools
import json
import os
import shutil
import statistics
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from accelerate import Accelerator
from common import (
    OURS,
    Metrics,
    Subjects,
    flags,
    interleave,
    make_parser,
    median,
    print_table,
    run_command,
    save_report,
    start_report,
    timed,
)

from accel_gpt.commands.resolve import load_config
from accel_gpt.config.experiment import CheckpointConfig, Config
from accel_gpt.config.model import ModelConfig
from accel_gpt.config.optim import OptimConfig
from accel_gpt.config.plan import make_plan
from accel_gpt.data.corpus import open_corpus
from accel_gpt.data.loader import Loader
from accel_gpt.data.tokenizer import BytesTokenizer
from accel_gpt.launch.process import keep_freed_memory
from accel_gpt.model.gpt import GPT
from accel_gpt.optim.groups import make_optimizer
from accel_gpt.runs.checkpoint import verify_checkpoint
from accel_gpt.runs.folder import checkpoint_steps, step_name
from accel_gpt.runs.saving import CheckpointWriter
from accel_gpt.runs.state import TrainState

BATCH_SIZE = 12
BLOCK_SIZE = 1024
Tokens = npt.NDArray[np.uint16]


def main() -> None:
    """Measure what `--only` names."""
    parser = make_parser(__doc__, peer=False)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=[*PARTS])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--text", type=Path, help="JSON lines")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    report = start_report()
    for name in args.only:
        print(f"\n{name}\n", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            report[name] = PARTS[name](args, Path(folder))
        save_report(args.json, report)


def compare(
    subjects: Subjects, rounds: int, key: str, head: Sequence[str], left_out: int = 0
) -> dict[str, list[Metrics]]:
    """Measure the subjects in turn; print all metrics, and `key` over that of the first subject.

    The first `left_out` rounds do not count.
    """
    found = interleave(subjects, rounds + left_out)
    counted = {name: metrics[left_out:] for name, metrics in found.items()}
    first = median(next(iter(counted.values())), key)
    rows = []
    for name, metrics in counted.items():
        figures = [f"{median(metrics, one):,.4g}" for one in metrics[0]]
        rows.append([name, *figures, f"{median(metrics, key) / first:.3f}"])
    print_table(head, rows)
    return found


# --------------------------------------------------------------------------- loading batches


def load(args: argparse.Namespace, work: Path) -> dict[str, list[Metrics]]:
    """Compare tokens/s of our loader and of nanoGPT's get_batch."""
    count = 200_000 if args.tiny else 100_000_000
    calls = 5 if args.tiny else 2000
    tokens = np.random.default_rng(0).integers(0, 256, count).astype(np.uint16)
    tokens.tofile(work / "train.bin")
    one = open_loader(tokens, 1, work / "one")
    many = open_loader(tokens, 10 if args.tiny else 1000, work / "many")
    subjects = {
        "nanoGPT's get_batch": partial(load_rate, partial(nanogpt_get_batch, work), calls),
        "accel_gpt, 1 shard": partial(load_rate, partial(next, one), calls),
        "accel_gpt, 1,000 shards": partial(load_rate, partial(next, many), calls),
    }
    head = ["batches of 12 x 1,024 tokens", "tokens/s", "of nanoGPT's"]
    found = compare(subjects, args.rounds, "tokens_per_second", head)
    one.close()
    many.close()
    return found


def open_loader(tokens: Tokens, shards: int, folder: Path) -> Loader:
    """Write `tokens` in plain .npy shards, and open them as a training run does."""
    folder.mkdir()
    for number, part in enumerate(np.array_split(tokens, shards)):
        np.save(folder / f"tokens_train_{number:06d}.npy", part)
    np.save(folder / "tokens_val_000000.npy", tokens[: 10 * BLOCK_SIZE])
    options: dict[str, object] = {
        "data.train": folder,
        "data.tokenizer": "bytes",
        "model.block_size": BLOCK_SIZE,
        "train.micro_batch_size": BATCH_SIZE,
        "train.tokens_per_step": BATCH_SIZE * BLOCK_SIZE,
        "train.max_steps": 10**6,
    }
    empty = folder.parent / "empty.yaml"
    empty.write_text("{}\n")
    config = load_config([str(empty), *flags(options)], "benchmarks/disk_io.py")
    return open_corpus(config).loader(make_plan(config, 1), 0, torch.device("cpu"), 0)


def nanogpt_get_batch(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a batch as get_batch in nanoGPT's train.py at 3adf61e does on a CPU."""
    data = np.memmap(folder / "train.bin", dtype=np.uint16, mode="r")
    ix = torch.randint(len(data) - BLOCK_SIZE, (BATCH_SIZE,)).tolist()
    x = torch.stack([torch.from_numpy(data[i : i + BLOCK_SIZE].astype(np.int64)) for i in ix])
    y = torch.stack(
        [torch.from_numpy(data[i + 1 : i + 1 + BLOCK_SIZE].astype(np.int64)) for i in ix]
    )
    return x, y


def load_rate(get_batch: Callable[[], object], calls: int) -> Metrics:
    """Measure the tokens/s of `calls` batches."""
    seconds = timed(lambda: [get_batch() for _ in range(calls)])
    return {"tokens_per_second": calls * BATCH_SIZE * BLOCK_SIZE / seconds}


# --------------------------------------------------------------------------- preparing text

TIKTOKEN = """
import json, sys, tiktoken
encoding = tiktoken.get_encoding("gpt2")
for line in open(sys.argv[1], encoding="utf-8"):
    encoding.encode_ordinary(json.loads(line)["text"])
"""


def prepare(args: argparse.Namespace, work: Path) -> dict[str, list[Metrics]]:
    """Compare MB/s of `accel-gpt prepare` and of tiktoken, whole processes in turn."""
    text = args.text or write_library(work / "library.jsonl", 20 if args.tiny else None)
    with text.open(encoding="utf-8") as lines:
        megabytes = sum(len(json.loads(line)["text"].encode()) for line in lines) / 1e6
    options: dict[str, object] = {
        "source": text.resolve(),
        "tokenizer": "gpt2",
        "out": work / "prepared",
        "val_fraction": 0.0005,
    }

    def encode() -> Metrics:
        command = [sys.executable, "-c", TIKTOKEN, text]
        return {"mb_per_second": megabytes / timed(lambda: run_command(command))}

    def ours() -> Metrics:
        shutil.rmtree(work / "prepared", ignore_errors=True)
        command = [sys.executable, *OURS, "prepare", *flags(options)]
        return {"mb_per_second": megabytes / timed(lambda: run_command(command))}

    subjects = {
        "tiktoken, one thread": encode,
        "accel-gpt prepare": ours,
    }
    head = [f"{megabytes:.0f} MB of text", "MB/s", "of one thread's"]
    return compare(subjects, args.rounds, "mb_per_second", head)


def write_library(path: Path, files: int | None) -> Path:
    """Write the sources of Python's standard library, or the first `files`, as JSON lines."""
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py"))
    with path.open("w", encoding="utf-8") as file:
        for source in itertools.islice(sources, files):
            if "site-packages" not in source.parts:
                text = source.read_text(encoding="utf-8", errors="replace")
                file.write(json.dumps({"text": text}) + "\n")
    return path


# --------------------------------------------------------------------------- checkpoints

VOCAB_SIZE = 50304
GPT2_124M = ModelConfig(n_layer=12, n_head=12, n_embd=768)
TINY_MODEL = ModelConfig(n_layer=2, n_head=2, n_embd=32)


def checkpoint(args: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Compare our saves of GPT-2 124M with torch.save, and time the verification.

    One more round is made first and left out, as it allocates buffers.
    """
    keep_freed_memory()
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    gpt = GPT(TINY_MODEL if args.tiny else GPT2_124M, VOCAB_SIZE)
    model, optimizer = accelerator.prepare(gpt, make_optimizer(gpt, OptimConfig()))
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer.step()  # makes the moments
    optimizer.zero_grad()
    state = TrainState()
    subjects: dict[str, Callable[[], Metrics]] = {
        "torch.save and fsync": partial(save_plainly, gpt, optimizer, work / "plain.bin")
    }
    for name, asynchronous in (("accel_gpt", False), ("accel_gpt, async_save", True)):
        settings = CheckpointConfig(async_save=asynchronous, keep_last=1)
        config = Config(out_dir=str(work / name), checkpoint=settings)
        Path(config.out_dir).mkdir()
        writer = CheckpointWriter(
            accelerator, settings, Path(config.out_dir), None, BytesTokenizer(), print
        )
        subjects[name] = partial(save_with, writer, state, gpt, optimizer)
    head = ["save", "training stands still, s", "on disk after, s", "of torch.save's stand"]
    found = compare(subjects, args.rounds, "stands_still_s", head, left_out=1)
    saved = work / "accel_gpt" / "checkpoints"
    path = saved / step_name(checkpoint_steps(saved)[-1])
    return {"saves": found, "verification": measure_verification(path, args.rounds)}


def save_plainly(gpt: GPT, optimizer: torch.optim.Optimizer, path: Path) -> Metrics:
    """Save weights and optimizer with torch.save and fsync."""

    def save() -> None:
        torch.save({"model": gpt.state_dict(), "optimizer": optimizer.state_dict()}, path)
        with path.open("rb+") as file:
            os.fsync(file.fileno())

    seconds = timed(save)
    return {"stands_still_s": seconds, "on_disk_s": seconds}


def save_with(writer: CheckpointWriter, state: TrainState, gpt: GPT, optimizer: Any) -> Metrics:
    """Save the next step as training does, then wait until the checkpoint is valid."""
    state.step += 1
    stall = timed(lambda: writer.save(state, gpt, optimizer))
    rest = timed(writer.wait)
    return {"stands_still_s": stall, "on_disk_s": stall + rest}


def measure_verification(path: Path, rounds: int) -> list[float]:
    """Time the verification of a checkpoint's hashes, its files read from the disk (on Linux)."""
    files = [file for file in path.iterdir() if file.is_file()]
    seconds = []
    for _ in range(rounds):
        for one in files:
            with one.open("rb") as file:  # drop it from the page cache
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        seconds.append(timed(lambda: verify_checkpoint(path)))
    gigabytes = sum(file.stat().st_size for file in files) / 1e9
    print(f"verification of {gigabytes:.2f} GB: {statistics.median(seconds):.2f} s")
    return seconds


PARTS: dict[str, Callable[[argparse.Namespace, Path], Any]] = {
    "load": load,
    "prepare": prepare,
    "checkpoint": checkpoint,
}


if __name__ == "__main__":
    main()
