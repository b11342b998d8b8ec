"""Run what must work on a card, for `gpu.py`: nothing here is a speed to compare.

    checks      `pytest -m gpu`; files of --code; budgets of 45 s with CUDA graphs and in fp16
    small       GPT-2 124M as on a card with 8 GB and without bf16: fp16 with its scaler,
                `micro_batch_size` auto, compiled and not
    kills       the fast recipe with a budget of `--minutes`, killed every `--kill_every` seconds

`small` limits the memory that PyTorch may allocate, and the size that the device reports. The
speed is that of the real card.

Minutes on an H200: `pytest` 2 with four processes and the files of --code beside it, then the
budgets in turn, so 4; `small` 1.5; `kills` as many as `--minutes`, and about 20 s for each kill.
"""

import argparse
import re
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from common import OURS, ROOT, attempt, flags, print_rule, print_table, read_records, run_command
from curve import DATA, write_corpus
from hours import RUN as KILLED_RUN
from hours import launch, launch_cells
from peers import CHARS, Job, accel_gpt, copy_nanogpt

GPU_TEST = "@pytest.mark.gpu"
OWN_CODE = ("own_model", "ema", "multi_token")  # files of examples/
BUDGET = "45s"
BUDGETS = {
    "budget, CUDA graphs": {"train.compile": "graphs", "train.mixed_precision": "bf16"},
    "budget, fp16": {"train.compile": True, "train.mixed_precision": "fp16"},
}
START_SECONDS = 20.0  # imports and the end of the process, beyond the budget; assumption
STEPS = 100
SMALL_GB = 8.0
SMALL_STEPS = 40
# Run accel-gpt on a device that has no more memory than the first argument says, in bytes.
LIMITED = """
import runpy, sys, torch

limit = float(sys.argv[1])
properties_of = torch.cuda.get_device_properties
set_fraction = torch.cuda.set_per_process_memory_fraction

class Properties:
    def __init__(self, device):
        self.whole = properties_of(device)
        self.total_memory = int(limit)
    def __getattr__(self, name):
        return getattr(self.whole, name)

def set_share(fraction, device=None):
    set_fraction(fraction * limit / properties_of(device).total_memory, device)

if torch.cuda.is_available():
    torch.cuda.get_device_properties = lambda device=None: Properties(device)
    torch.cuda.set_per_process_memory_fraction = set_share
    set_share(1.0)
sys.argv = sys.argv[1:]
runpy.run_module("accel_gpt", run_name="__main__", alter_sys=True)
"""


# --------------------------------------------------------------------------- checks


def checks(args: argparse.Namespace, work: Path, job: Job) -> dict[str, Any]:
    """Run everything; print what each took and found, and how many failed."""
    copy_nanogpt(args.nanogpt, args.text, work, {CHARS})
    at_once: dict[str, Callable[[], str]] = {"pytest -m gpu": partial(run_pytest, args)}
    for name in OWN_CODE:
        at_once[f"--code {name}.py"] = partial(run_own_code, args, work, name)
    in_turn = {}
    for name, options in BUDGETS.items():
        in_turn[name] = partial(run_budget, args, work, options)
    report: dict[str, Any] = {}
    with ThreadPoolExecutor() as pool:
        started = {name: pool.submit(timed_check, name, run) for name, run in at_once.items()}
        report |= {name: future.result() for name, future in started.items()}
    report |= {name: timed_check(name, run) for name, run in in_turn.items()}
    rows = [[name, str(found), f"{seconds:.0f}"] for name, (found, seconds) in report.items()]
    print_table(["check", "result", "seconds"], rows)
    failed = sum(found is None for found, _ in report.values())
    print_rule(f"{failed} of {len(report)} failed", "any failed", failed > 0, "fix it first")
    if failed:
        sys.exit(f"{failed} checks failed")
    return report


def timed_check(name: str, run: Callable[[], str]) -> tuple[str | None, float]:
    """Return what a check found, None if it failed, and its seconds."""
    began = time.monotonic()
    return attempt(name, run), time.monotonic() - began


def run_pytest(args: argparse.Namespace) -> str:
    """Run the tests of GPUs; return pytest's last line. Exits if one fails."""
    # these files alone: others may import a package that is not there, such as datasets
    files = [file for file in (ROOT / "tests").rglob("test_*.py") if GPU_TEST in file.read_text()]
    words = ["-m", "gpu", "-n", "4", "-rs", *map(str, files)]
    nothing = (0, 5) if args.tiny else (0,)  # 5: without a GPU, no test was left
    output = run_command([sys.executable, "-m", "pytest", *words], ROOT, accepted=nothing)
    print(output[-2000:], flush=True)  # with the reasons of skipped tests
    return output.strip().splitlines()[-1]


def train_chars(work: Path, name: str, options: Mapping[str, object]) -> list[dict[str, Any]]:
    """Train characters with the config of one GPU; return its records."""
    out = work / "checks" / re.sub(r"\W+", "_", name)
    own = {"out_dir": out, "data.train": work / "nanoGPT/data" / CHARS, "sample.every": 0}
    command = [sys.executable, *OURS, "train", ROOT / "configs/shakespeare_char.yaml"]
    run_command([*command, *flags({**own, **options})], work)
    return read_records(out)


def small_model(tiny: bool) -> dict[str, object]:
    """Return the options that make a run one for a CPU, if `tiny`."""
    if not tiny:
        return {}
    shape: dict[str, object] = {"model.n_layer": 1, "model.n_head": 2, "model.n_embd": 32}
    shape |= {"model.block_size": 32, "train.tokens_per_step": 256, "train.micro_batch_size": 8}
    return shape | {"eval.tokens": 1024, "train.mixed_precision": "no"}


def run_own_code(args: argparse.Namespace, work: Path, name: str) -> str:
    """Train with a file of --code; return the losses."""
    steps = 10 if args.tiny else STEPS
    options: dict[str, object] = {"train.max_steps": steps, "schedule.warmup_steps": 5}
    options |= {"code": ROOT / f"examples/{name}.py", **small_model(args.tiny)}
    return describe_losses(train_chars(work, name, options))


def run_budget(args: argparse.Namespace, work: Path, options: Mapping[str, object]) -> str:
    """Train with a budget; return its steps and seconds. Exits if it takes longer."""
    budget = "8s" if args.tiny else BUDGET
    own = {**options, "train.max_steps": None, "train.budget": budget, **small_model(args.tiny)}
    if args.tiny:
        own["train.compile"] = False
    name = "_".join(map(str, options.values()))
    began = time.monotonic()
    records = train_chars(work, name, own)
    seconds = time.monotonic() - began
    longest = 1.1 * float(budget.removesuffix("s")) + START_SECONDS
    if seconds > longest:
        sys.exit(f"a budget of {budget} took {seconds:.0f} s")
    return f"{records[-1]['step']:,} steps in {seconds:.0f} s; {describe_losses(records)}"


def describe_losses(records: list[dict[str, Any]]) -> str:
    """Return the first and the last loss of a run; exits if the loss has not fallen."""
    losses = [one["train/loss"] for one in records if "train/loss" in one]
    if not losses[-1] < losses[0]:
        sys.exit(f"the loss went from {losses[0]} to {losses[-1]}")
    return f"loss {losses[0]:.3f} to {losses[-1]:.3f}"


# --------------------------------------------------------------------------- a small card


def small(args: argparse.Namespace, work: Path, job: Job) -> dict[str, Any]:
    """Train GPT-2 124M in little memory, compiled and not; print a table and the rule."""
    report = {}
    rows = []
    for name, compiled in {"compiled": "true", "not compiled": "false"}.items():
        found = attempt(name, partial(train_small, args, work, job, compiled))
        report[name] = found
        print(f"{name}: {found}", flush=True)
        if found:
            cells = [
                f"{found['micro_batch']}",
                f"{found['memory_gb']:.2f}",
                f"{found['step_ms']:.1f}",
            ]
            cells += [f"{found['skipped']:.0f}", f"{found['first']:.3f}", f"{found['last']:.3f}"]
            rows.append([name, *cells])
    head = [f"{SMALL_GB:g} GB, fp16", "sequences", "GB", "ms a step", "skipped", "first loss"]
    print_table([*head, "last loss"], rows)
    fits = all(
        one and one["memory_gb"] <= SMALL_GB and one["last"] < one["first"]
        for one in report.values()
    )
    print_rule("both run within the limit and learn", "they do", fits, "README names 8 GB")
    return report


def train_small(args: argparse.Namespace, work: Path, job: Job, compiled: str) -> dict[str, Any]:
    """Train with the largest micro-batch that fits; return what it chose and reached."""
    if not args.tiny:
        job = replace(job, batch_size=64, steps=SMALL_STEPS, window=2)
    figures = accel_gpt(
        work,
        job,
        precision="no" if args.tiny else "fp16",
        compiled="false" if args.tiny else compiled,
        own={"train.micro_batch_size": "auto"},
        start=("-c", LIMITED, f"{SMALL_GB * 1e9:.0f}"),
    )
    out = work / "ours"
    chosen = yaml.safe_load((out / "config.yaml").read_text())["train"]["micro_batch_size"]
    records = [one for one in read_records(out) if "train/loss" in one]
    return figures | {
        "micro_batch": chosen,
        "skipped": records[-1].get("train/skipped", 0.0),
        "first": records[0]["train/loss"],
        "last": records[-1]["train/loss"],
    }


# --------------------------------------------------------------------------- kills


def kills(args: argparse.Namespace, work: Path, job: Job) -> dict[str, Any]:
    """Train the fast recipe on a budget under kills; check that each step was made once."""
    write_corpus(args, work, 400)
    folder = work / "kills"
    folder.mkdir(exist_ok=True)
    options: dict[str, object] = {
        "data.train": work / "nanoGPT/data" / DATA,
        "data.tokenizer": None if args.tiny else "gpt2",
        "data.prepare.source": None,
        "model.depth": job.n_layer,
        "model.block_size": job.block_size,
        "model.vocab_size": 256 if args.tiny else None,
        "train.max_tokens": None,
        "train.budget": f"{60 * args.minutes:.0f}s",
        "train.compile": not args.tiny,
        "checkpoint.every": 100,
        "eval.every": 100,
        "eval.tokens": 8 * job.block_size if args.tiny else 524_288,
        "sample.every": 0,
        "log.every": 10,
    }
    if args.tiny:
        options |= {"train.tokens_per_step": 256, "train.micro_batch_size": 8}
    words = ["train", str(ROOT / "configs/fast_124m.yaml"), *flags(options)]
    launches: list[dict[str, Any]] = []
    while not launches or launches[-1]["exit_code"]:
        launches.append(launch(folder, words, args.kill_every))
        print(launches[-1], flush=True)
    records = read_records(folder / KILLED_RUN)
    steps = [one["step"] for one in records if "train/loss" in one]
    losses = [one["eval/val_loss"] for one in records if "eval/val_loss" in one]
    once = steps == sorted(set(steps))
    head = ["launch", "folder", "minutes", "steps", "newest checkpoint", "exit code"]
    print_table(head, [[*launch_cells(number, one)] for number, one in enumerate(launches, 1)])
    print_rule(
        f"{len(launches) - 1} kills, {steps[-1]:,} steps, val loss {losses[-1]:.4f}",
        "each step is recorded once",
        once,
        "RESULTS.md has the table",
    )
    return {"launches": launches, "val_loss": losses[-1], "once": once}
