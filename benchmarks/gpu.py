"""The questions of this folder on a CUDA card: GPT-2 124M, 1,024 tokens, bf16, compiled.

    python benchmarks/gpu.py NANOGPT_FOLDER TEXT [--only speed ablations first checkpoint optimizer]
        [--micro_batches 16 32 64] [--rounds 3] [--json FILE] [--allow_busy]
        [--device cpu --tiny]

NANOGPT_FOLDER is a checkout of karpathy/nanoGPT, TEXT is tinyshakespeare; `datasets` is not needed,
without a network the vocabulary of GPT-2 is (TIKTOKEN_CACHE_DIR).

speed: tokens/s, MFU and peak memory beside nanoGPT and transformers' Trainer, whole processes in
turn, at several micro-batches. ablations: ours at the smallest micro-batch without compilation,
without chunks of the loss, in float32, with Muon. first: seconds to the first step, cold and warm.
checkpoint: how long training stands still. optimizer: a step of AdamW and of Muon.
`--device cpu --tiny` goes through all of it in a minute, for a test of this file.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from common import (
    ROOT,
    Metrics,
    OtherLoad,
    add_report_options,
    call,
    facts,
    headline,
    interleave,
    median,
    save,
    table,
)
from systems import CHARS, GPT2, WHOLE_LOGITS, Job, gather, nanogpt, ours, trainer

from accel_gpt.config.model import ModelConfig
from accel_gpt.cost.devices import peak_flops
from accel_gpt.cost.flops import flops_per_token, mfu

JOB = Job(12, 12, 768, 1024, 16, GPT2, steps=60, warmup=20, window=10, device="cuda")
TINY = Job(2, 2, 32, 32, 4, CHARS, steps=6, warmup=2, window=2)
GOALS = "goals on one H100: 1.2 x nanoGPT, 1.25 x Trainer, 540,000 tokens/s, 0.65 of the memory"
BENCHMARKS = ROOT / "benchmarks"
Part = Callable[[argparse.Namespace, Path, Job], Any]


def main() -> None:
    """Answer what `--only` names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("nanogpt", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=[*PARTS])
    parser.add_argument("--micro_batches", nargs="+", type=int, default=[16, 32, 64])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true")
    add_report_options(parser)
    args = parser.parse_args()
    job = TINY if args.tiny else JOB
    machine, load = facts(), OtherLoad(args)
    report: dict[str, Any] = {"facts": machine, "load": {}}
    print(headline(machine) + "\n" + GOALS)
    with tempfile.TemporaryDirectory() as folder:
        gather(args.nanogpt, args.text, Path(folder), [job.data])
        for name in args.only:
            print(f"\n{name}\n", flush=True)
            report[name] = PARTS[name](args, Path(folder), job)
            report["load"][name] = load.lap(name)
            save(args.json, report, load)


def speed(args: argparse.Namespace, work: Path, job: Job) -> Any:
    """All systems at each micro-batch."""
    found, on = {}, not args.tiny  # to compile takes longer than a test may
    for batch in args.micro_batches:
        at = replace(job, batch=batch)
        subjects = {
            "nanoGPT": partial(nanogpt, work, at, on),
            "Trainer": partial(trainer, work, at, on),
            "accel_gpt": partial(ours, work, at, *compiled(on)),
        }
        rounds = interleave({name: fitting(run) for name, run in subjects.items()}, args.rounds)
        print(show(at, rounds) + "\n", flush=True)
        found[batch] = rounds
    return found


def ablations(args: argparse.Namespace, work: Path, job: Job) -> Any:
    """Ours, and ours without one thing."""
    at = replace(job, batch=min(args.micro_batches))
    on = compiled(not args.tiny)
    subjects = {
        "accel_gpt": lambda: ours(work, at, *on),
        "not compiled": lambda: ours(work, at, *compiled(False)),
        "all logits at once": lambda: ours(work, at, *on, start=WHOLE_LOGITS),
        "float32": lambda: ours(work, at, *on, "--train.mixed_precision", "no"),
        "Muon": lambda: ours(work, at, *on, "--optim.name", "muon"),
    }
    if args.tiny:  # which is not compiled, and on a CPU in float32
        del subjects["not compiled"], subjects["float32"]
    rounds = interleave({name: fitting(run) for name, run in subjects.items()}, args.rounds)
    print(show(at, rounds), flush=True)
    return rounds


def first(args: argparse.Namespace, work: Path, job: Job) -> Any:
    """Seconds to the first step."""
    words = [ROOT / "configs/gpt2_124m.yaml", "--data.prepare.source", "null", "--rounds", "1"]
    words += ["--data.train", work / "nanoGPT/data" / job.data]
    words += ["--compiled", "0"] if args.tiny else []
    if job.data == GPT2:
        words += ["--data.tokenizer", "gpt2"]
    if job.device == "cuda":
        words += ["--train.mixed_precision", "bf16"]
    for key in ("n_layer", "n_head", "n_embd", "block_size"):
        words += [f"--model.{key}", getattr(job, key)]
    words += ["--train.micro_batch_size", job.batch, "--train.tokens_per_step", job.tokens]
    words += ["--eval.tokens", job.tokens, "--train.max_tokens", 800 * job.tokens]
    return shown([BENCHMARKS / "startup.py", *words])


def checkpoint(args: argparse.Namespace, work: Path, job: Job) -> Any:
    """How long a save holds training up."""
    small = ["--layers", "1", "--width", "48", "--rounds", "1"] if args.tiny else []
    return shown([BENCHMARKS / "checkpoint.py", work / "checkpoints", *small])


def optimizer(args: argparse.Namespace, work: Path, job: Job) -> Any:
    """AdamW and Muon."""
    words = ["--shapes", "gpt2_124m", "--compile"]
    if args.tiny:
        words = ["--shapes", "quickstart", "--rounds", "1", "--seconds", "0.05"]
    return shown([BENCHMARKS / "optimizer.py", *words])


PARTS: dict[str, Part] = {
    "speed": speed,
    "ablations": ablations,
    "first": first,
    "checkpoint": checkpoint,
    "optimizer": optimizer,
}


def compiled(yes: bool) -> tuple[str, str]:
    """The option."""
    return "--train.compile", str(yes).lower()


def fitting(run: Callable[[], Metrics]) -> Callable[[], Metrics]:
    """The same, infinite where the memory of the card does not suffice."""

    def tried() -> Metrics:
        try:
            return run()
        except SystemExit as stopped:
            if "out of memory" not in str(stopped):
                raise
            return {"step_ms": float("inf"), "memory_gb": float("inf")}

    return tried


def show(job: Job, found: dict[str, list[Metrics]]) -> str:
    """Medians, and their ratios to the first's."""
    import torch

    from accel_gpt.training.machine import device_name

    shape = ModelConfig(
        n_layer=job.n_layer, n_head=job.n_head, n_embd=job.n_embd, block_size=job.block_size
    )
    flops, peak = (
        flops_per_token(shape, 50257),
        peak_flops(device_name(torch.device(job.device)), "bf16"),
    )
    rows, base = [], next(iter(found.values()))
    for name, rounds in found.items():
        ms, memory = median(rounds, "step_ms"), median(rounds, "memory_gb")
        rate = 1e3 * job.tokens / ms
        share = f"{mfu(rate, flops, peak):.3f}" if peak else "-"
        row = [name, f"{ms:.1f}", f"{rate:,.0f}", share, f"{median(base, 'step_ms') / ms:.2f}"]
        rows.append([*row, f"{memory:.2f}", f"{memory / median(base, 'memory_gb'):.2f}"])
    head = [f"{job.batch} x {job.block_size}", "ms a step", "tokens/s", "MFU", "to the first"]
    return table([*head, "GB", "of the first's"], rows)


def shown(words: list[Any]) -> list[str]:
    """The lines that another script of this folder prints."""
    lines = call([sys.executable, *map(str, words)]).splitlines()
    print("\n".join(lines), flush=True)
    return lines


if __name__ == "__main__":
    main()
