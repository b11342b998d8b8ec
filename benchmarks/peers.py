"""Compare speed, memory and loss with nanoGPT and transformers' Trainer on this machine's CPU.

    python benchmarks/peers.py NANOGPT TEXT [--only steps whole] [--sizes char4 char6 gpt2]
        [--systems NAME ...] [--rounds 3] [--steps N] [--json FILE]

NANOGPT is a checkout of karpathy/nanoGPT, run unmodified in a copy. TEXT is tinyshakespeare. The
size gpt2 needs GPT-2's vocabulary; without a network, set TIKTOKEN_CACHE_DIR.

steps: all systems train the same model on the same tokens, each in a process of its own. Prints for
each size the milliseconds of a step, tokens/s, peak memory of the process, and our tokens/s over
each peer's. "accel_gpt, auto" is what the CPU configs ship; "nanoGPT" is what its README runs.

whole: the CPU command of nanoGPT's README beside `accelerate launch` of two of our configs. Prints
the seconds of the whole process, imports, evaluation, samples and checkpoints included, and the
loss on the whole val split at its end.

All figures are medians over the rounds. Run it on an idle machine, and compare only figures that
one call printed: a shared machine's speed can double within minutes.
"""

import argparse
import itertools
import json
import re
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from common import (
    OURS,
    ROOT,
    Metrics,
    Subjects,
    flags,
    interleave,
    last_json,
    make_parser,
    median,
    print_table,
    read_records,
    run_command,
    save_report,
    start_report,
    timed,
)

from accel_gpt.config.model import ModelConfig

CHARS = "shakespeare_char"  # folders of nanoGPT's data
GPT2 = "shakespeare"
VOCAB_SIZES = {CHARS: 65, GPT2: 50304}  # as nanoGPT's models have them


def main() -> None:
    """Measure what `--only` names."""
    parser = make_parser(__doc__, peer=True)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=[*PARTS])
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=[*SIZES])
    parser.add_argument("--systems", nargs="+", help="names as in the table; default: all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="in place of each size's own")
    args = parser.parse_args()
    report = start_report()
    with tempfile.TemporaryDirectory() as folder:
        for name in args.only:
            report[name] = PARTS[name](args, Path(folder))
            save_report(args.json, report)


# --------------------------------------------------------------------------- steps


@dataclass(frozen=True)
class Job:
    """A model, its batch, and how long it trains."""

    n_layer: int
    n_head: int
    n_embd: int
    block_size: int
    batch_size: int  # sequences a step
    data: str  # folder of nanoGPT's data
    steps: int
    warmup_steps: int  # not counted; a multiple of window
    window: int  # steps whose mean is one time: our log has one line for as many
    device: str = "cpu"

    @property
    def tokens_per_step(self) -> int:
        """The tokens of a step."""
        return self.batch_size * self.block_size

    @property
    def model(self) -> ModelConfig:
        """The model as ours: nanoGPT's, without biases."""
        return ModelConfig(
            n_layer=self.n_layer,
            n_head=self.n_head,
            n_embd=self.n_embd,
            block_size=self.block_size,
            bias=False,
            mlp="gelu_erf",
        )

    def step_ms(self, times_ms: Sequence[float]) -> float:
        """Return the milliseconds of a step, given the times of all steps in a row."""
        counted = times_ms[self.warmup_steps :]
        starts = range(0, len(counted) - self.window + 1, self.window)
        means = [statistics.fmean(counted[start : start + self.window]) for start in starts]
        return statistics.median(means)


SIZES = {
    "char4": Job(
        n_layer=4, n_head=4, n_embd=128, block_size=64, batch_size=12, data=CHARS,
        steps=220, warmup_steps=20, window=20,
    ),
    "char6": Job(
        n_layer=6, n_head=6, n_embd=384, block_size=256, batch_size=8, data=CHARS,
        steps=16, warmup_steps=4, window=2,
    ),
    "gpt2": Job(
        n_layer=12, n_head=12, n_embd=768, block_size=512, batch_size=2, data=GPT2,
        steps=8, warmup_steps=3, window=1,
    ),
}  # fmt: skip


def compare_steps(args: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Measure the chosen systems at each size and print a table for each."""
    copy_nanogpt(args.nanogpt, args.text, work, {SIZES[size].data for size in args.sizes})
    report = {}
    for size in args.sizes:
        job = replace(SIZES[size], steps=args.steps or SIZES[size].steps)
        subjects = systems(work, job)
        chosen = args.systems or list(subjects)
        found = interleave({name: subjects[name] for name in chosen}, args.rounds)
        report[size] = {"job": asdict(job), "rounds": found}
        print(f"\n{size}: {job.n_layer} layers x {job.n_embd}, {job.block_size} tokens of context")
        print_steps(job, found)
    return report


def systems(work: Path, job: Job) -> Subjects:
    """Return what measures each system, by name. nanoGPT has no bf16 on a CPU."""
    return {
        "nanoGPT": partial(nanogpt, work, job, compiled=False),
        "nanoGPT, compiled": partial(nanogpt, work, job, compiled=True),
        "Trainer": partial(trainer, work, job, compiled=False, bf16=False),
        "Trainer, compiled": partial(trainer, work, job, compiled=True, bf16=False),
        "Trainer, bf16": partial(trainer, work, job, compiled=False, bf16=True),
        "accel_gpt": partial(accel_gpt, work, job, precision="no", compiled="false"),
        "accel_gpt, compiled": partial(accel_gpt, work, job, precision="no", compiled="true"),
        "accel_gpt, bf16": partial(accel_gpt, work, job, precision="bf16", compiled="false"),
        "accel_gpt, auto": partial(accel_gpt, work, job, precision="auto", compiled="auto"),
    }


def print_steps(job: Job, found: Mapping[str, Sequence[Metrics]]) -> None:
    """Print medians, and the tokens/s of each of our forms over those of every system."""
    step_ms = {name: median(rounds, "step_ms") for name, rounds in found.items()}
    ours = [name for name in step_ms if name.startswith("accel_gpt")]
    rows = []
    for name, ms in step_ms.items():
        rate = 1e3 * job.tokens_per_step / ms
        memory = median(found[name], "memory_gb")
        ratios = [f"{ms / step_ms[form]:.2f}" for form in ours]
        rows.append([name, f"{ms:,.1f}", f"{rate:,.0f}", f"{memory:.2f}", *ratios])
    head = [f"{job.batch_size} x {job.block_size} tokens", "ms a step", "tokens/s", "GB"]
    print_table([*head, *(f"{form} over it" for form in ours)], rows)


def copy_nanogpt(nanogpt: Path, text: Path, work: Path, data: Iterable[str]) -> Path:
    """Copy nanoGPT into `work`, prepare data folders by its own scripts; return the copy."""
    copy = work / "nanoGPT"
    ignored = shutil.ignore_patterns(".git", "*.bin", "*.pkl")
    shutil.copytree(nanogpt, copy, ignore=ignored, dirs_exist_ok=True)
    for name in sorted(data):
        shutil.copy(text, copy / "data" / name / "input.txt")
        run_command([sys.executable, "prepare.py"], copy / "data" / name)
    return copy


# Run a script unmodified and print its peak memory at the end.
WITH_MEMORY = """
import atexit, json, resource, runpy, sys
sys.path.insert(0, "")
def report():
    import torch
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if torch.cuda.is_available():
        peak = torch.cuda.max_memory_allocated()
    print(json.dumps({"memory_gb": peak / 1e9}))
atexit.register(report)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def nanogpt(work: Path, job: Job, compiled: bool) -> Metrics:
    """Run nanoGPT's train.py; the times are those that it logs."""
    command = [sys.executable, "-c", WITH_MEMORY, *nanogpt_words(job, compiled)]
    output = run_command(command, work / "nanoGPT")
    times_ms = [float(ms) for ms in re.findall(r"time ([\d.]+)ms", output)]
    del times_ms[0]  # holds the evaluation before the first step
    return {"step_ms": job.step_ms(times_ms), **last_json(output)}


def nanogpt_words(job: Job, compiled: bool) -> list[str]:
    """Return the command line of nanoGPT's train.py for a job, from the script on."""
    options = {
        "device": job.device,
        "dtype": "bfloat16" if job.device == "cuda" else "float32",
        "compile": compiled,
        "dataset": job.data,
        "dropout": 0.0,
        "n_layer": job.n_layer,
        "n_head": job.n_head,
        "n_embd": job.n_embd,
        "block_size": job.block_size,
        "batch_size": job.batch_size,
        "max_iters": job.steps,
        "log_interval": 1,
        "eval_interval": 10**6,
        "eval_iters": 1,
    }
    words = [f"--{key}={value}" for key, value in options.items()]
    return ["train.py", "config/train_shakespeare_char.py", *words]


TRAINER = """
import json, resource, sys, time
import numpy as np, torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

job = json.loads(sys.argv[1])
T, cuda = job["block_size"], job["device"] == "cuda"
tokens = np.memmap(job["train"], dtype=np.uint16, mode="r")

class Sequences(torch.utils.data.Dataset):
    def __len__(self):
        return len(tokens) // T
    def __getitem__(self, i):
        return torch.from_numpy(tokens[i * T : (i + 1) * T].astype(np.int64))

torch.manual_seed(0)
shape = {key: job[key] for key in ("n_layer", "n_head", "n_embd", "vocab_size")}
quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
quiet |= {"bos_token_id": 0, "eos_token_id": 0}
model = GPT2LMHeadModel(GPT2Config(n_positions=T, **shape, **quiet))
ends = []

class Clock(TrainerCallback):
    def on_step_end(self, *_, **__):
        if cuda:
            torch.cuda.synchronize()
        ends.append(time.perf_counter())

args = TrainingArguments(
    sys.argv[2], max_steps=job["steps"] + 1, per_device_train_batch_size=job["batch_size"],
    learning_rate=1e-3, weight_decay=0.1, use_cpu=not cuda, bf16=job["bf16"], save_strategy="no",
    torch_compile=job["compiled"], report_to=[], disable_tqdm=True, logging_steps=10**6,
)
def collate(sequences):
    return {"input_ids": torch.stack(sequences), "labels": torch.stack(sequences)}

Trainer(model, args, collate, Sequences(), callbacks=[Clock()]).train()
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
peak = torch.cuda.max_memory_allocated() if cuda else peak
times_ms = [1e3 * (b - a) for a, b in zip(ends, ends[1:])]
print(json.dumps({"memory_gb": peak / 1e9, "times_ms": times_ms}))
"""


def trainer(work: Path, job: Job, compiled: bool, bf16: bool) -> Metrics:
    """Train transformers' GPT2LMHeadModel, drawn at random, with its Trainer."""
    described = asdict(job) | {
        "train": str(work / "nanoGPT/data" / job.data / "train.bin"),
        "vocab_size": VOCAB_SIZES[job.data],
        "compiled": compiled,
        "bf16": bf16,
    }
    command = [sys.executable, "-c", TRAINER, json.dumps(described), work / "trainer"]
    found = last_json(run_command(command, work))
    return {"step_ms": job.step_ms(found["times_ms"]), "memory_gb": found["memory_gb"]}


def accel_gpt(
    work: Path,
    job: Job,
    precision: str,
    compiled: str,
    own: Mapping[str, object] = MappingProxyType({}),
    start: Sequence[str] = OURS,
) -> Metrics:
    """Run `accel-gpt train`; the times are those in its metrics.jsonl. `own` replaces options."""
    out = work / "ours"
    shutil.rmtree(out, ignore_errors=True)
    options: dict[str, object] = {
        "out_dir": out,
        "data.train": work / "nanoGPT/data" / job.data,
        "data.tokenizer": "gpt2" if job.data == GPT2 else None,
        "model.n_layer": job.n_layer,
        "model.n_head": job.n_head,
        "model.n_embd": job.n_embd,
        "model.block_size": job.block_size,
        "model.bias": False,
        "model.mlp": "gelu_erf",
        "train.tokens_per_step": job.tokens_per_step,
        "train.micro_batch_size": job.batch_size,
        "train.max_steps": job.steps,
        "train.mixed_precision": precision,
        "train.compile": compiled,
        "optim.lr": 1e-3,
        "schedule.warmup_steps": job.steps // 2,
        "log.every": job.window,
        "eval.every": 0,
        "eval.tokens": job.block_size,
        "sample.every": 0,
        "checkpoint.every": 0,
    }
    config = work / "empty.yaml"
    config.write_text("{}\n")
    run_command([sys.executable, *start, "train", config, *flags({**options, **own})], work)
    records = [record for record in read_records(out) if "perf/step_ms" in record]
    counted = records[job.warmup_steps // job.window :]
    return {
        "step_ms": statistics.median(record["perf/step_ms"] for record in counted),
        "memory_gb": max(record["perf/memory_gb"] for record in records),
    }


# --------------------------------------------------------------------------- whole commands

README_COMMAND = (  # nanoGPT's README, "I only have a macbook"
    "train.py config/train_shakespeare_char.py --device=cpu --compile=False --eval_iters=20 "
    "--log_interval=1 --block_size=64 --batch_size=12 --n_layer=4 --n_head=4 --n_embd=128 "
    "--max_iters=2000 --lr_decay_iters=2000 --dropout=0.0"
)
CONFIGS = ("shakespeare_char_cpu", "fast_shakespeare_cpu")
WHOLE_VAL_LOSS = """
import json, numpy, torch
from model import GPT, GPTConfig
saved = torch.load("out-shakespeare-char/ckpt.pt", weights_only=False)
gpt = GPT(GPTConfig(**saved["model_args"])).eval()
gpt.load_state_dict(saved["model"])
data = torch.from_numpy(numpy.fromfile("data/shakespeare_char/val.bin", numpy.uint16).astype(int))
total, T = 0.0, gpt.config.block_size
with torch.no_grad():
    for x, y in zip(data[:-1].split(T), data[1:].split(T)):
        total += gpt(x[None], y[None])[1].item() * len(x)
print(json.dumps({"val_loss": total / (len(data) - 1)}))
"""


def compare_whole_commands(args: argparse.Namespace, work: Path) -> dict[str, list[Metrics]]:
    """Time the commands in turn, on prepared data, and print a table.

    Our runs take another seed each round; nanoGPT's seed is fixed. `--steps` shortens all of them.
    """
    copy = copy_nanogpt(args.nanogpt, args.text, work, {CHARS})
    settings: dict[str, object] = {
        "source": args.text.resolve(),
        "out": work / "data",
        "tokenizer": "chars",
        "val_fraction": 0.1,
    }
    run_command([sys.executable, *OURS, "prepare", *flags(settings)])
    subjects = {"nanoGPT": partial(whole_nanogpt, copy, args.steps)}
    for name in CONFIGS:
        subjects[name] = partial(whole_ours, name, work, args.steps, itertools.count())
    found = interleave(subjects, args.rounds)
    rows = []
    for name, rounds in found.items():
        seconds = median(rounds, "seconds")
        ratio = seconds / median(found["nanoGPT"], "seconds")
        loss = statistics.mean(metrics["val_loss"] for metrics in rounds)
        rows.append([name, f"{seconds:.1f}", f"{ratio:.3f}", f"{loss:.4f}"])
    print_table(["whole command", "seconds", "of nanoGPT's", "val loss, mean"], rows)
    return found


def whole_nanogpt(copy: Path, steps: int | None) -> Metrics:
    """Run the command of nanoGPT's README, and evaluate the checkpoint that it leaves."""
    command = [sys.executable, *README_COMMAND.split()]
    if steps:
        command += [f"--max_iters={steps}", f"--eval_interval={steps}"]
    seconds = timed(lambda: run_command(command, copy))
    evaluated = last_json(run_command([sys.executable, "-c", WHOLE_VAL_LOSS], copy))
    return {"seconds": seconds, **evaluated}


def whole_ours(config: str, work: Path, steps: int | None, seeds: Iterator[int]) -> Metrics:
    """Run `accelerate launch` of a config; then evaluate its last checkpoint, untimed."""
    out = work / "run"
    options: dict[str, object] = {
        "data.train": work / "data",
        "data.prepare.source": None,
        "out_dir": out,
        "seed": next(seeds),
    }
    if steps:
        options |= {"train.max_steps": steps, "schedule.warmup_steps": steps // 2}
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file"]
    command += [ROOT / "accelerate_config.yaml", ROOT / "accel_gpt/train.py"]
    command += [ROOT / f"configs/{config}.yaml", *flags(options)]
    seconds = timed(lambda: run_command(command))
    evaluate = [sys.executable, "-m", "accel_gpt", "evaluate", out, "--tokens", "null", "--json"]
    metrics = json.loads(run_command(evaluate))["metrics"]
    shutil.rmtree(out)
    return {"seconds": seconds, "val_loss": metrics["eval/val_loss"]}


PARTS = {"steps": compare_steps, "whole": compare_whole_commands}


if __name__ == "__main__":
    main()
