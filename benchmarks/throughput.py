"""Measure what moves data: loading batches, preparing text, checkpoints, and their upload.

    python benchmarks/throughput.py [--only load prepare checkpoint upload] [--rounds 3]
        [--text TEXT.jsonl] [--workers 2] [--target FOLDER_OR_URL] [--json FILE] [--tiny]

load: tokens/s of batches of 12 x 1,024 tokens as training gets them, from one shard and from 1,000,
    beside nanoGPT's get_batch on the same tokens.
prepare: MB/s of text and memory of the largest process of `accel-gpt prepare` with GPT-2's
    tokenizer, beside tiktoken's own encoding on one thread. TEXT.jsonl has one document a line,
    under "text"; 100 MB or more give steady figures. Default: the sources of Python's standard
    library. It needs GPT-2's vocabulary; without a network, set TIKTOKEN_CACHE_DIR.
checkpoint: seconds in which training stands still for a checkpoint of GPT-2 124M with AdamW, with
    and without checkpoint.async_save, beside torch.save and fsync of the same tensors; and seconds
    to verify the checkpoint's hashes.
upload: the median step of a small run and the seconds of its whole command, with and without
    checkpoint.copy_to. Default target: a folder on this disk. Give s3://bucket/folder for yours.

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
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil
import torch
from accelerate import Accelerator
from common import (
    Metrics,
    flags,
    headline,
    interleave,
    machine_facts,
    median,
    run_command,
    save_report,
    table,
    timed,
)

from accel_gpt.config.experiment import CheckpointConfig, Config
from accel_gpt.config.model import ModelConfig
from accel_gpt.config.optim import OptimConfig
from accel_gpt.config.parse import load_config
from accel_gpt.config.plan import make_plan
from accel_gpt.data.corpus import open_corpus
from accel_gpt.data.loader import Loader
from accel_gpt.data.tokenizer import BytesTokenizer
from accel_gpt.model.gpt import GPT
from accel_gpt.optim.groups import make_optimizer
from accel_gpt.training.accelerator import keep_freed_memory
from accel_gpt.training.checkpoint import verify
from accel_gpt.training.run_folder import checkpoint_steps, step_name
from accel_gpt.training.saving import CheckpointWriter
from accel_gpt.training.state import TrainState

BATCH_SIZE = 12
BLOCK_SIZE = 1024
OURS = (sys.executable, "-m", "accel_gpt.cli")
Tokens = npt.NDArray[np.uint16]


def main() -> None:
    """Measure what `--only` names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=[*PARTS])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--text", type=Path, help="JSON lines")
    parser.add_argument("--workers", type=int, default=2, help="of accel-gpt prepare")
    parser.add_argument("--target", help="folder or URL of the copies")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", type=Path, help="file for the report")
    args = parser.parse_args()
    report: dict[str, Any] = {"facts": machine_facts()}
    print(headline(report["facts"]))
    for name in args.only:
        print(f"\n{name}\n", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            report[name] = PARTS[name](args, Path(folder))
        save_report(args.json, report)


# --------------------------------------------------------------------------- loading batches


def load(args: argparse.Namespace, work: Path) -> dict[str, list[Metrics]]:
    """Compare tokens/s of our loader and of nanoGPT's get_batch."""
    tokens = random_tokens(200_000 if args.tiny else 100_000_000)
    calls = 5 if args.tiny else 2000
    tokens.tofile(work / "train.bin")
    one = open_loader(tokens, 1, work / "one")
    many = open_loader(tokens, 10 if args.tiny else 1000, work / "many")
    subjects = {
        "nanoGPT's get_batch": partial(load_rate, lambda: nanogpt_get_batch(work), calls),
        "accel_gpt, 1 shard": partial(load_rate, lambda: next(one), calls),
        "accel_gpt, 1,000 shards": partial(load_rate, lambda: next(many), calls),
    }
    found = interleave(subjects, args.rounds)
    one.close()
    many.close()
    rows = []
    peer = median(found["nanoGPT's get_batch"], "tokens_per_second")
    for name, rounds in found.items():
        rate = median(rounds, "tokens_per_second")
        rows.append([name, f"{rate:,.0f}", f"{rate / peer:.2f}"])
    print("\n" + table(["batches of 12 x 1,024 tokens", "tokens/s", "of nanoGPT's"], rows))
    return found


def random_tokens(count: int) -> Tokens:
    """Draw tokens, the same each time."""
    return np.random.default_rng(0).integers(0, 256, count).astype(np.uint16)


def write_shards(tokens: Tokens, shards: int, folder: Path) -> None:
    """Write `tokens` in plain .npy shards, and a val shard beside them."""
    folder.mkdir()
    for number, part in enumerate(np.array_split(tokens, shards)):
        np.save(folder / f"tokens_train_{number:06d}.npy", part)
    np.save(folder / "tokens_val_000000.npy", tokens[: 10 * BLOCK_SIZE])


def open_loader(tokens: Tokens, shards: int, folder: Path) -> Loader:
    """Write `tokens` in shards and open them as a training run does."""
    write_shards(tokens, shards, folder)
    options: dict[str, object] = {
        "data.train": folder,
        "data.tokenizer": "bytes",
        "model.block_size": BLOCK_SIZE,
        "train.micro_batch_size": BATCH_SIZE,
        "train.tokens_per_step": BATCH_SIZE * BLOCK_SIZE,
        "train.max_steps": 10**6,
    }
    config = empty_config(folder.parent)
    config = load_config([str(config), *flags(options)], "benchmarks/throughput.py")
    return open_corpus(config).loader(make_plan(config, 1), 0, torch.device("cpu"), 0)


def empty_config(folder: Path) -> Path:
    """Write a config that changes no default."""
    path = folder / "empty.yaml"
    path.write_text("{}\n")
    return path


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
        "source": "jsonl",
        "path": text.resolve(),
        "tokenizer": "gpt2",
        "out": work / "prepared",
        "val_fraction": 0.0005,
        "workers": args.workers,
    }

    def ours() -> Metrics:
        shutil.rmtree(work / "prepared", ignore_errors=True)
        return watch([*OURS, "prepare", *flags(options)], megabytes)

    subjects = {
        "tiktoken, one thread": lambda: watch([sys.executable, "-c", TIKTOKEN, text], megabytes),
        f"accel-gpt prepare, {args.workers} workers": ours,
    }
    found = interleave(subjects, args.rounds)
    rows = []
    thread = median(found["tiktoken, one thread"], "mb_per_second")
    for name, rounds in found.items():
        rate = median(rounds, "mb_per_second")
        memory = median(rounds, "largest_process_mb")
        rows.append([name, f"{rate:.2f}", f"{rate / thread:.2f}", f"{memory:.0f}"])
    head = [f"{megabytes:.0f} MB of text", "MB/s", "of one thread's", "MB of the largest process"]
    print("\n" + table(head, rows))
    return found


def write_library(path: Path, files: int | None) -> Path:
    """Write the sources of Python's standard library, or the first `files`, as JSON lines."""
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py"))
    with path.open("w", encoding="utf-8") as file:
        for source in itertools.islice(sources, files):
            if "site-packages" not in source.parts:
                text = source.read_text(encoding="utf-8", errors="replace")
                file.write(json.dumps({"text": text}) + "\n")
    return path


def watch(command: Sequence[str | Path], megabytes: float) -> Metrics:
    """Run a command; measure its MB/s and the memory of its largest process.

    Memory is the proportional set size, which counts shared pages once.
    """
    start = time.perf_counter()
    largest = 0.0
    with tempfile.TemporaryFile() as output:
        process = psutil.Popen([str(word) for word in command], stdout=output, stderr=output)
        while process.poll() is None:
            try:
                for one in (process, *process.children(recursive=True)):
                    largest = max(largest, one.memory_full_info().pss / 1e6)
            except psutil.Error:
                pass  # a process ended meanwhile
            time.sleep(0.1)
        seconds = time.perf_counter() - start
        if process.returncode:
            output.seek(0)
            sys.exit(f"{command[:3]} failed:\n{output.read().decode()[-3000:]}")
    return {"mb_per_second": megabytes / seconds, "largest_process_mb": largest}


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
    writers = {}
    for name, asynchronous in (("accel_gpt", False), ("accel_gpt, async_save", True)):
        settings = CheckpointConfig(async_save=asynchronous, keep_last=1)
        config = Config(out_dir=str(work / name), checkpoint=settings)
        Path(config.out_dir).mkdir()
        writers[name] = CheckpointWriter(accelerator, config, BytesTokenizer(), print)
        subjects[name] = partial(save_with, writers[name], state, gpt, optimizer)
    found = interleave(subjects, args.rounds + 1)
    rows = []
    plain = median(found["torch.save and fsync"][1:], "stands_still_s")
    for name, metrics in found.items():
        stall = median(metrics[1:], "stands_still_s")
        done = median(metrics[1:], "on_disk_s")
        rows.append([name, f"{stall:.2f}", f"{stall / plain:.3f}", f"{done:.2f}"])
    head = ["save", "training stands still, s", "of torch.save's", "on disk after, s"]
    print("\n" + table(head, rows))
    saved = Path(writers["accel_gpt"].out_dir) / "checkpoints"
    verification = measure_verification(saved / step_name(checkpoint_steps(saved)[-1]), args.rounds)
    return {"saves": found, "verification": verification}


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
    """Time the verification of a checkpoint's hashes, its files read from the disk."""
    files = [file for file in path.iterdir() if file.is_file()]
    seconds = []
    for _ in range(rounds):
        drop_from_page_cache(files)
        seconds.append(timed(lambda: verify(path)))
    gigabytes = sum(file.stat().st_size for file in files) / 1e9
    print(f"\nverification of {gigabytes:.2f} GB: {statistics.median(seconds):.2f} s")
    return seconds


def drop_from_page_cache(files: Sequence[Path]) -> None:
    """Make the next read of these files come from the disk; Linux only."""
    for path in files:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


# --------------------------------------------------------------------------- uploads


def upload(args: argparse.Namespace, work: Path) -> dict[str, list[Metrics]]:
    """Compare a run that copies its checkpoints elsewhere with one that does not."""
    write_shards(random_tokens(200_000), 1, work / "data")
    target = args.target or str(work / "copies")
    rounds = itertools.count()
    subjects = {
        "without copies": lambda: train(args, work, None),
        "with copies": lambda: train(args, work, f"{target}/{next(rounds)}"),
    }
    found = interleave(subjects, args.rounds)
    rows = []
    for name, metrics in found.items():
        step_ms, seconds = median(metrics, "step_ms"), median(metrics, "seconds")
        rows.append([name, f"{step_ms:.2f}", f"{seconds:.1f}"])
    print("\n" + table(["checkpoints", "ms a step, median", "s of the whole command"], rows))
    return found


def train(args: argparse.Namespace, work: Path, copy_to: str | None) -> Metrics:
    """Train a small model with a checkpoint every 50 steps."""
    out = work / "run"
    shutil.rmtree(out, ignore_errors=True)
    steps = 4 if args.tiny else 400
    options: dict[str, object] = {
        "out_dir": out,
        "data.train": work / "data",
        "data.tokenizer": "bytes",
        "model.n_layer": 4,
        "model.n_head": 4,
        "model.n_embd": 32 if args.tiny else 256,
        "model.block_size": 64,
        "train.tokens_per_step": 768,
        "train.micro_batch_size": 12,
        "train.max_steps": steps,
        "schedule.warmup_steps": steps // 2,
        "checkpoint.every": steps // 8 or 1,
        "checkpoint.keep_best": False,
        "eval.every": 0,
        "eval.tokens": 64,
        "sample.every": 0,
        "log.every": 1,
    }
    if copy_to:
        options["checkpoint.copy_to"] = copy_to
    command = [*OURS, "train", empty_config(work), *flags(options)]
    seconds = timed(lambda: run_command(command))
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    step_ms = statistics.median(record["perf/step_ms"] for record in records[steps // 4 :])
    return {"step_ms": step_ms, "seconds": seconds}


PARTS: dict[str, Callable[[argparse.Namespace, Path], Any]] = {
    "load": load,
    "prepare": prepare,
    "checkpoint": checkpoint,
    "upload": upload,
}


if __name__ == "__main__":
    main()
