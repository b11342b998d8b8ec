"""Compare losses over seconds, our fast recipe and nanoGPT's GPT-2 124M, for `gpu.py --only curve`.

Both train on the same tokens: the .py files of this machine, by `corpus.py`. A step has 131,072
tokens in micro-batches of 32 sequences. nanoGPT's seed is fixed; ours are `--seeds`.

nanoGPT's train.py runs unmodified, with the settings and the learning rate of its
config/train_gpt2.py. The warm-up is 5 % of the steps (assumption), and the decay ends with them.
Ours is configs/fast_124m.yaml: 12 layers, Muon, and the rates that follow from batch and length.

The number of steps is fixed beforehand, since both schedules depend on it: as many as `--seconds`
hold at the MFU below. A run that takes 15 % longer is ended. The clock starts when everything is
compiled; the steps before are counted at the pace of the others.

`observe.py` evaluates both in their processes, uncompiled, on the same sequences of the validation
files, at 14 steps. The clock stops meanwhile. Prints nanoGPT's last loss, and when each of ours is
as low, by a line between two points. If the first point is as low, its seconds are an upper bound.

`--points FILE` keeps all points as a table, CSV. A training whose points are in the file is not
repeated, so a second command with the same file goes on where the first was ended. `--picture`
draws what is in the table.

Minutes on an H200 with `--seconds 160`: 30 s to read and encode the files, and for each training
2.7, 10 s to start, 20 to 60 s to compile and 14 evaluations of 0.7 s. One of nanoGPT and one seed
take 7.5, each further seed 3.3: three seeds are two commands of ten minutes at most.
"""

import argparse
import csv
import json
import math
import shutil
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import (
    OURS,
    ROOT,
    attempt,
    draw_schemes,
    flags,
    last_json,
    print_rule,
    print_table,
    run_command,
)
from peers import Job
from traces import OBSERVE

from accel_gpt.launch.devices import peak_flops
from accel_gpt.launch.machine import device_name
from accel_gpt.model.sizes import flops_per_token

DATA = "python_source"  # folder of nanoGPT's data
TOKENS_PER_STEP = 131_072
MICRO_BATCH = 32  # sequences
MEGABYTES = 400
VAL_TOKENS = 524_288
POINTS = 14
FIRST = 3  # steps before the clock starts
LONGEST = 1.15  # of the seconds
WARMUP_SHARE = 0.05  # of nanoGPT's steps; assumption
MFU = {"nanoGPT": 0.408, "accel_gpt": 0.39}  # RESULTS.md; the same, less Muon (assumption)
UNKNOWN_PEAK = 989.5e12  # FLOP/s of a GPU that is not in the table of devices: an H100's
TINY_STEPS = 28
Point = tuple[float, int, float]  # seconds, tokens, loss


def curve(args: argparse.Namespace, work: Path, job: Job) -> dict[str, Any]:
    """Train both, print the points and the seconds to nanoGPT's loss, and draw a picture."""
    report: dict[str, Any] = {"corpus": write_corpus(args, work, MEGABYTES)}
    kept = read_points(args.points)
    trainings = [("nanoGPT", 0), *(("accel_gpt", seed) for seed in args.seeds)]
    for name, seed in trainings:
        if (name, seed) not in kept:
            run = replace(plan_run(args, job, name), seed=seed)
            train = train_nanogpt if name == "nanoGPT" else train_fast
            found = attempt(f"{name}, seed {seed}", partial(measure, train, run, work, POINTS))
            if not found:
                continue
            report[f"{name}, seed {seed}"] = found
            kept[name, seed] = found["points"]
            write_points(args.points, kept)
        print_points(f"{name}, seed {seed}", kept[name, seed], report["corpus"]["tokens"]["train"])
    report |= compare(kept)
    if args.picture:
        attempt("picture", partial(draw_schemes, args.picture, partial(draw, kept, report, job)))
    return report


def write_corpus(args: argparse.Namespace, work: Path, megabytes: float) -> dict[str, Any]:
    """Write the Python source of this machine as tokens, if there is less; return counts."""
    folder = work / "nanoGPT/data" / DATA
    counts = folder / "counts.json"
    written = json.loads(counts.read_text())["megabytes"] if counts.exists() else 0.0
    if written < megabytes:
        chosen = ("bytes", 0.3) if args.tiny else ("gpt2", megabytes)
        options = {"tokenizer": chosen[0], "megabytes": chosen[1]}
        command = [sys.executable, ROOT / "benchmarks/corpus.py", folder, *flags(options)]
        made = last_json(run_command(command)) | {"megabytes": megabytes}
        counts.write_text(json.dumps(made))
    found = json.loads(counts.read_text())
    print(f"{found['files']:,} files, {found['bytes']:,} bytes, {found['tokens']} tokens")
    return found


def read_points(file: Path | None) -> dict[tuple[str, int], list[Point]]:
    """Return the points that `file` holds, by system and seed."""
    kept: dict[tuple[str, int], list[Point]] = {}
    if file and file.exists():
        with file.open(newline="") as lines:
            for row in csv.DictReader(lines):
                point = (float(row["seconds"]), int(row["tokens"]), float(row["loss"]))
                kept.setdefault((row["system"], int(row["seed"])), []).append(point)
    return kept


def write_points(file: Path | None, kept: Mapping[tuple[str, int], Sequence[Point]]) -> None:
    """Write all points, a row each, if `file` is given."""
    if file is None:
        return
    with file.open("w", newline="") as lines:
        table = csv.writer(lines)
        table.writerow(["system", "seed", "seconds", "tokens", "loss"])
        for (name, seed), points in kept.items():
            for seconds, tokens, loss in points:
                table.writerow([name, seed, f"{seconds:.2f}", tokens, f"{loss:.6f}"])


# --------------------------------------------------------------------------- train


@dataclass(frozen=True)
class Run:
    """How long a system trains, and in which batches."""

    job: Job
    name: str
    steps: int
    micro_batch: int  # sequences
    accumulation: int  # micro-batches a step
    seconds: float  # of training
    seed: int = 0

    @property
    def tokens_per_step(self) -> int:
        """The tokens of a step."""
        return self.accumulation * self.micro_batch * self.job.block_size


def plan_run(args: argparse.Namespace, job: Job, name: str) -> Run:
    """Choose the steps that take `--seconds`."""
    if args.tiny:
        return Run(job, name, TINY_STEPS, 2, 2, seconds=600.0)
    accumulation = TOKENS_PER_STEP // (MICRO_BATCH * job.block_size)
    run = Run(job, name, 0, MICRO_BATCH, accumulation, args.seconds)
    peak = peak_flops(device_name(torch.device(job.device)), "bf16") or UNKNOWN_PEAK
    tokens_per_second = MFU[name] * peak / flops_per_token(job.model, 50257)
    return replace(run, steps=round(args.seconds * tokens_per_second / run.tokens_per_step))


def measure(train: Any, run: Run, work: Path, points: int) -> dict[str, Any]:
    """Train; return as many points (seconds, tokens, loss) and what was evaluated."""
    out = work / f"curve_{run.name}.json"
    evaluated = [round(run.steps * number / points) for number in range(1, points + 1)]
    settings = {
        "watch": "curve",
        "steps": run.steps,
        "first": FIRST,
        "evaluated": [step for step in evaluated if step > FIRST],
        "most_seconds": LONGEST * run.seconds,
        "val": str(work / "nanoGPT/data" / DATA / "val.bin"),
        "sequences": VAL_TOKENS // run.job.block_size,
        "block_size": run.job.block_size,
        "batch_size": run.micro_batch // 2 or 1,
        "arguments": {},
        "out": str(out),
    }
    train(run, work, settings)
    found = json.loads(out.read_text())
    if found["ended_early"]:
        print(f"{run.name}: ended before its last step, so its rates have not decayed")
    seconds, steps, _ = found["points"][-1]
    before = FIRST * seconds / (steps - FIRST)  # of the steps before the clock started
    found["points"] = [
        (seconds + before, steps * run.tokens_per_step, loss)
        for seconds, steps, loss in found["points"]
    ]
    return found | {"steps": run.steps, "tokens_per_step": run.tokens_per_step}


def train_nanogpt(run: Run, work: Path, settings: Mapping[str, Any]) -> None:
    """Run nanoGPT's train.py with the settings of its config/train_gpt2.py."""
    job = run.job
    cuda = job.device == "cuda"
    options = {
        "wandb_log": False,
        "dataset": DATA,
        "device": job.device,
        "dtype": "bfloat16" if cuda else "float32",
        "compile": cuda,
        "n_layer": job.n_layer,
        "n_head": job.n_head,
        "n_embd": job.n_embd,
        "block_size": job.block_size,
        "batch_size": run.micro_batch,
        "gradient_accumulation_steps": run.accumulation,
        "max_iters": run.steps,
        "lr_decay_iters": run.steps,
        "warmup_iters": round(WARMUP_SHARE * run.steps),
        "eval_interval": 10**6,
        "eval_iters": 1,
        "always_save_checkpoint": False,
    }
    watched = {"model": "model:GPT.configure_optimizers", "step": "torch.optim:AdamW.step"}
    command = [sys.executable, OBSERVE, json.dumps({**settings, **watched})]
    command += ["train.py", "config/train_gpt2.py"]
    command += [f"--{key}={value}" for key, value in options.items()]
    run_command(command, work / "nanoGPT")


def train_fast(run: Run, work: Path, settings: Mapping[str, Any]) -> None:
    """Train the fast recipe."""
    depth = {"model.depth": run.job.n_layer}
    step = "accel_gpt.optim.muon:MuonAdamW.step"
    precision = "no" if run.job.device == "cpu" else "bf16"
    train_config(run, work, settings, "fast_124m", precision, step, depth)


def train_config(
    run: Run,
    work: Path,
    settings: Mapping[str, Any],
    config: str,
    precision: str,
    step: str,
    own: Mapping[str, object],
) -> None:
    """Run `accel-gpt train` with one of our configs and the options `own`, watched at `step`."""
    tiny = run.job.device == "cpu"
    out = work / "ours"
    shutil.rmtree(out, ignore_errors=True)
    options: dict[str, object] = {
        "out_dir": out,
        "seed": run.seed,
        "data.train": work / "nanoGPT/data" / DATA,
        "data.tokenizer": None if tiny else "gpt2",
        "data.prepare.source": None,
        "model.block_size": run.job.block_size,
        "model.vocab_size": 256 if tiny else None,
        "train.tokens_per_step": run.tokens_per_step,
        "train.micro_batch_size": run.micro_batch,
        "train.max_tokens": run.steps * run.tokens_per_step,
        "train.mixed_precision": precision,
        "train.compile": not tiny,
        "eval.every": 0,
        "eval.tokens": run.job.block_size,
        "sample.every": 0,
        "checkpoint.every": 0,
    }
    watched = {
        "model": "accel_gpt.model.gpt:GPT.init_weights",
        "step": step,
        "arguments": {"per_sequence": True},
    }
    command = [sys.executable, OBSERVE, json.dumps({**settings, **watched}), *OURS, "train"]
    command += [ROOT / f"configs/{config}.yaml", *flags({**options, **own})]
    run_command(command, work)


# --------------------------------------------------------------------------- compare


def compare(kept: Mapping[tuple[str, int], Sequence[Point]]) -> dict[str, Any]:
    """Print and return nanoGPT's last loss, and the seconds of each of our seeds to it."""
    ours = {seed: points for (name, seed), points in kept.items() if name == "accel_gpt"}
    if ("nanoGPT", 0) not in kept or not ours:
        return {}
    end, _, loss = kept["nanoGPT", 0][-1]
    print(f"nanoGPT's last loss is {loss:.4f}, after {end:.1f} s")
    reached = {seed: seconds_to(points, loss) for seed, points in ours.items()}
    for seed, seconds in reached.items():
        last = f"its last loss is {ours[seed][-1][2]:.4f}, after {ours[seed][-1][0]:.1f} s"
        when = "does not reach it" if seconds is None else f"reaches it after {seconds:.1f} s"
        print(f"accel_gpt, seed {seed}, {when}; {last}")
    # a seed that does not reach it counts as the last of all
    seconds = statistics.median(math.inf if one is None else one for one in reached.values())
    print_rule(
        f"median of {len(reached)} seeds: {seconds:.1f} s, {end / seconds:.2f} times as fast",
        "there are three seeds, and all reach the loss",
        len(reached) >= 3 and None not in reached.values(),
        "README and the picture show the median",
    )
    if math.isinf(seconds):
        return {"final_loss": loss, "seconds": None, "ratio": None}
    return {"final_loss": loss, "seconds": seconds, "ratio": end / seconds}


def seconds_to(points: Sequence[Point], loss: float) -> float | None:
    """Return when the loss is first as low, by a line between two points; None if never."""
    before: tuple[float, float] | None = None
    for seconds, _, reached in points:
        if reached <= loss:
            if before is None or reached == before[1]:
                return seconds
            share = (before[1] - loss) / (before[1] - reached)
            return before[0] + share * (seconds - before[0])
        before = (seconds, reached)
    return None


def print_points(name: str, points: Sequence[Point], train_tokens: int) -> None:
    """Print the points of one training."""
    rows = []
    for seconds, tokens, loss in points:
        epochs = tokens / train_tokens
        rows.append([f"{seconds:.1f}", f"{tokens:,}", f"{epochs:.2f}", f"{loss:.4f}"])
    print_table([f"{name}, seconds", "tokens", "epochs", "val loss"], rows)


# --------------------------------------------------------------------------- picture


def draw(
    kept: Mapping[tuple[str, int], Sequence[Point]], report: Mapping[str, Any], job: Job
) -> Any:
    """Draw the losses over the seconds, a line for each training."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5), layout="constrained")
    looks = {
        "nanoGPT": {"label": "nanoGPT: GPT-2 124M, AdamW", "color": "#7f7f7f"},
        "accel_gpt": {"label": "accel_gpt: fast recipe, Muon", "color": "C0"},
    }
    shown: list[float] = []  # losses
    labelled = set()
    for (name, _), points in kept.items():
        look = dict(looks[name])
        if name in labelled:
            del look["label"]
        labelled.add(name)
        seconds, _, losses = zip(*points, strict=True)
        axes.plot(seconds, losses, marker="o", markersize=4, linewidth=1.5, **look)
        shown += losses[1:]  # the first is much higher than the others
    if report.get("seconds") is not None:
        mark_time_to_loss(axes, report, kept["nanoGPT", 0][-1][0])
    margin = 0.08 * (max(shown) - min(shown))
    axes.set_ylim(min(shown) - margin, max(shown) + margin)
    axes.set_xlim(left=0)
    axes.set_xlabel("training time, s (without compilation and evaluation)")
    axes.set_ylabel("validation loss, nats per token")
    axes.set_title(title_of(job), fontsize=11)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return figure


def mark_time_to_loss(axes: Any, report: Mapping[str, Any], end: float) -> None:
    """Mark nanoGPT's last loss, and when the median of ours reaches it."""
    from matplotlib import rcParams

    loss, seconds, ratio = report["final_loss"], report["seconds"], report["ratio"]
    label = f"loss {loss:.2f}: after {seconds:.0f} s, not {end:.0f} s ({ratio:.1f} x)"
    ink = rcParams["text.color"]
    axes.plot([seconds, end], [loss, loss], color=ink, linestyle=":", label=label)
    axes.plot([seconds], [loss], marker="o", markersize=9, color=ink, fillstyle="none")


def title_of(job: Job) -> str:
    """Return card, model, context and date."""
    card = device_name(torch.device(job.device))
    model = f"{job.n_layer} layers of {job.n_embd} channels, {job.block_size:,} tokens of context"
    return f"{model}, on Python source\n{card}, {datetime.now(UTC):%Y-%m-%d}"
