"""What a save of GPT-2 124M and its optimizer costs training, against a plain synchronous save.

    python benchmarks/checkpoint.py FOLDER [--rounds 5] [--layers 12] [--width 768]

In turn, in one process: `torch.save` of the same weights and optimizer state and fsync; our save,
with `checkpoint.async_save` off and on. Prints for each the time for which training stands still,
the time until the checkpoint is valid, and steps of a fixed computation (matrix products) while it
gets there against as many alone; then verification against reading the files once. Medians.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from accelerate import Accelerator

from accel_gpt.config.experiment import CheckpointConfig, Config, OptimConfig
from accel_gpt.config.model import ModelConfig
from accel_gpt.data.tokenizer import BytesTokenizer
from accel_gpt.model.gpt import GPT
from accel_gpt.optim.groups import make_optimizer
from accel_gpt.training.accelerator import keep_freed_memory
from accel_gpt.training.checkpoint import verify
from accel_gpt.training.run_folder import checkpoint_steps, step_name
from accel_gpt.training.saving import CheckpointWriter
from accel_gpt.training.state import TrainState

VOCABULARY = 50_304
SIDE = 1024  # of the matrices that are multiplied meanwhile


def main() -> None:
    """Time the three ways in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    keep_freed_memory()
    shape = ModelConfig(n_layer=asked.layers, n_embd=asked.width, n_head=12)
    gpt = GPT(shape, VOCABULARY)
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    model, optimizer = accelerator.prepare(gpt, make_optimizer(gpt, OptimConfig()))
    for p in model.parameters():
        p.grad = torch.full_like(p, 1e-3)
    optimizer.step()
    optimizer.zero_grad()
    writers = {}
    for name, copied in (("ours", False), ("ours, async_save", True)):
        config = Config(
            out_dir=str(asked.folder / name.replace(", ", "_")),
            checkpoint=CheckpointConfig(async_save=copied, keep_last=1),
        )
        Path(config.out_dir).mkdir(exist_ok=True)
        writers[name] = CheckpointWriter(accelerator, config, BytesTokenizer(), print)
    state, times, slow = TrainState(), dict[str, list[list[float]]](), dict[str, list[float]]()
    for _ in range(asked.rounds + 1):  # the first makes buffers and files
        state.step += 1
        alone = products(lambda: False, 20)
        plain = timed(lambda: save_plainly(gpt, optimizer, asked.folder / "plain.bin"))
        times.setdefault("torch.save and fsync", []).append([plain, plain])
        for name, writer in writers.items():
            stall = timed(lambda writer=writer: writer.save(state, gpt, optimizer))  # type: ignore[misc]
            start = time.perf_counter()
            beside = products(lambda writer=writer: writer.thread.is_alive())  # type: ignore[misc]
            writer.wait()
            times.setdefault(name, []).append([stall, stall + time.perf_counter() - start])
            slow.setdefault(name, []).append(beside / alone)
    report(times, slow)
    check_reading(Path(writers["ours"].out_dir) / "checkpoints")


def report(times: dict[str, list[list[float]]], slow: dict[str, list[float]]) -> None:
    """A line for each way."""
    base = statistics.median(pair[0] for pair in times["torch.save and fsync"][1:])
    for name, pairs in times.items():
        stall, done = (statistics.median(pair[i] for pair in pairs[1:]) for i in (0, 1))
        beside = (
            f", work beside it takes {statistics.median(slow[name][1:]):.2f} x"
            if name in slow
            else ""
        )
        print(
            f"{name:22} training stands still {stall:6.2f} s ({100 * stall / base:5.1f} %), "
            f"on disk after {done:6.2f} s{beside}; first time {pairs[0][0]:.2f} s"
        )


def check_reading(root: Path) -> None:
    """Verification against reading, both from the disk: the system forgets the files before."""
    path = root / step_name(checkpoint_steps(root)[-1])
    files = [file for file in path.iterdir() if file.is_file()]
    reading, verifying = [], []
    for _ in range(5):
        forget(files)
        reading.append(timed(lambda: [read(file) for file in files]))
        forget(files)
        verifying.append(timed(lambda: verify(path)))
    size = sum(file.stat().st_size for file in files)
    a, b = statistics.median(reading), statistics.median(verifying)
    print(f"{size / 1e9:.2f} GB: reading once {a:.2f} s, verification {b:.2f} s, {b / a:.2f} x")


def save_plainly(gpt: GPT, optimizer: torch.optim.Optimizer, path: Path) -> None:
    """What a trainer without a protocol does, and the fsync that it should do."""
    torch.save({"model": gpt.state_dict(), "optimizer": optimizer.state_dict()}, path)
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def products(going: Callable[[], bool], least: int = 1) -> float:
    """Seconds of a matrix product, over `least` and as long as `going`."""
    a, count, start = torch.ones(SIDE, SIDE), 0, time.perf_counter()
    while count < least or going():
        a @ a
        count += 1
    return (time.perf_counter() - start) / count


def read(path: Path) -> None:
    """Read a file once, in pieces as hashing does."""
    buffer = bytearray(1 << 18)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def forget(files: list[Path]) -> None:
    """Drop files from the page cache."""
    for file in files:
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def timed(call: Callable[[], object]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
