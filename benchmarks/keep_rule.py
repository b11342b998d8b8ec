"""Count which changes two rules keep: "one run, keep it if its loss is lower", and a sweep.

    python benchmarks/keep_rule.py [--out runs/keep_rule] [--text TEXT] [--seeds 20] [--steps 100]
        [--of_each 10] [--json FILE]

The first rule is that of karpathy/autoresearch (program.md, "The experiment loop", steps 8 and 9).
The second is the verdict of `accel-gpt sweep`: paired by seed, one seed after another until the
answer is clear. Both judge the same losses.

Thirty changes of a baseline are files of --code, which this script writes:

redrawn           10  do nothing: the initial weights are other random numbers
rounded rate       5  do nothing: lr() is 1 + k/1,000,000 of the schedule
rolled batch       5  do nothing: loss() sees the sequences of a batch in another order
rate               5  help: lr() is 1.02 to 1.5 times the schedule, which is half of a good rate
rate, redrawn      5  help by as much, with other initial weights, as a change of a shape has them

The last table has the effect of each change that helps: the mean over all seeds. bf16 makes the
rounding large enough to count, as on a GPU.

31 runs for each seed, 2 to 4 s each on one core. Their losses are in a file in --out, so a repeated
command trains only what is missing.
"""

import argparse
import contextlib
import hashlib
import io
import itertools
import json
import math
import random
import shutil
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import make_parser, print_table, save_report, start_report

import accel_gpt
from accel_gpt.commands.paired_comparison import compare
from accel_gpt.files import write_file
from accel_gpt.report.curves import read_metrics
from accel_gpt.runs.folder import RunFolder

# --------------------------------------------------------------------------- the changes

GAINS = (1.02, 1.05, 1.1, 1.2, 1.5)
SKIPPED = 1_000_000  # random numbers; a model draws 100,000, so two changes share none
BASELINE = "baseline"
# the fast recipe of configs/quickstart.yaml, smaller, at half of its learning rates
CONFIG = """\
data:
  train: {data}
  prepare: {{source: {source}, tokenizer: bytes}}
model:
  preset: fast
  n_layer: 1
  n_head: 2
  n_embd: 64
  block_size: 64
  rope_theta: 500
  logit_softcap: null
train:
  tokens_per_step: 512
  micro_batch_size: 8
  max_steps: {steps}
  mixed_precision: bf16
  compile: false
optim: {{name: muon, lr: 5e-3, embedding_lr: 0.05, muon_momentum: 0.9, beta1: 0.8,
  weight_decay: 0, grad_clip: 0}}
schedule: {{name: wsd, warmup_steps: 10, decay_share: 0.7}}
eval: {{every: 0, tokens: 16384}}
sample: {{every: 0}}
checkpoint: {{every: 0}}
log: {{every: 100, trackers: []}}
"""
REDRAWN = """\
import torch

from accel_gpt.model.gpt import GPT


class Redrawn(GPT):
    def init_weights(self):
        torch.randn({skipped})
        super().init_weights()


def model(config, vocab_size):
    return Redrawn(config.model, vocab_size, init=False)
"""
RATE = """\
from accel_gpt.optim.schedule import lr_fraction


def lr(step, config, plan):
    return {factor!r} * lr_fraction(step, config.schedule.name, plan, floor=0.0)
"""
ROLLED = """\
from torch.nn import functional as F


def loss(model, tokens, targets, documents):
    logits = model(tokens.roll({rows}, 0))
    return F.cross_entropy(logits.flatten(0, 1), targets.roll({rows}, 0).flatten())
"""


@dataclass(frozen=True)
class Change:
    """A change of the baseline: a file of --code."""

    kind: str
    name: str
    code: str
    helps: bool


def make_changes(of_each: int) -> list[Change]:
    """Return the changes: the thirty, or at most `of_each` of each kind."""
    found = []
    for k in range(1, 11):
        code = REDRAWN.format(skipped=k * SKIPPED)
        found.append(Change("redrawn", f"redrawn {k}", code, helps=False))
    for k in range(1, 6):
        code = RATE.format(factor=1 + k * 1e-6)
        found.append(Change("rounded rate", f"rounded rate {k}", code, helps=False))
    for k in range(1, 6):
        code = ROLLED.format(rows=k)
        found.append(Change("rolled batch", f"rolled batch {k}", code, helps=False))
    for gain in GAINS:
        rate = RATE.format(factor=gain)
        found.append(Change("rate", f"rate x {gain:g}", rate, helps=True))
    for k, gain in enumerate(GAINS, start=11):
        code = REDRAWN.format(skipped=k * SKIPPED) + "\n\n" + RATE.format(factor=gain)
        found.append(Change("rate, redrawn", f"rate x {gain:g}, redrawn", code, helps=True))
    by_kind = itertools.groupby(found, key=lambda change: change.kind)
    return [change for _, group in by_kind for change in [*group][:of_each]]


# --------------------------------------------------------------------------- the runs

Losses = dict[str, dict[int, float]]  # name of a change -> seed -> val loss


def train_all(args: argparse.Namespace, changes: Sequence[Change]) -> Losses:
    """Train the baseline and all changes with each seed, except what is in the file of losses."""
    prepare = {"source": args.text or "stdlib"}
    config = CONFIG.format(data=args.out / "data", steps=args.steps, **prepare)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "config.yaml").write_text(config, encoding="utf-8")
    digest = hashlib.sha256("".join([config, *(one.code for one in changes)]).encode())
    path = args.out / f"losses_{digest.hexdigest()[:8]}.json"
    losses: Losses = {name: {} for name in (BASELINE, *(one.name for one in changes))}
    if path.exists():
        for name, by_seed in json.loads(path.read_text(encoding="utf-8")).items():
            losses[name] = {int(seed): loss for seed, loss in by_seed.items()}
    for seed in range(1, args.seeds + 1):
        start = time.perf_counter()
        missing = [name for name, by_seed in losses.items() if seed not in by_seed]
        codes = {one.name: one.code for one in changes}
        for name in missing:
            losses[name][seed] = train(args.out, seed, codes.get(name))
            write_file(path, [json.dumps(losses, indent=1).encode()])
        seconds = time.perf_counter() - start
        print(f"seed {seed}: {len(missing)} runs, {seconds:.0f} s", flush=True)
    wanted = range(1, args.seeds + 1)
    return {name: {seed: by_seed[seed] for seed in wanted} for name, by_seed in losses.items()}


def train(out: Path, seed: int, code: str | None) -> float:
    """Train a run in this process and remove its folder; return its val loss."""
    options: dict[str, Any] = {"seed": seed, "out_dir": str(out / "run")}
    if code is not None:
        file = out / "change.py"
        file.write_text(code, encoding="utf-8")
        options["code"] = str(file)
    shutil.rmtree(out / "run", ignore_errors=True)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        run = accel_gpt.run(out / "config.yaml", options)
    loss: float | None = read_metrics(RunFolder(run.path).records()).last("eval/val_loss")
    shutil.rmtree(run.path)
    if loss is None:
        sys.exit("the run was interrupted; the same command goes on")
    return loss


# --------------------------------------------------------------------------- the rules

DIGITS = 6  # of the loss that autoresearch's train.py prints
KEPT = "kept"
REJECTED = "rejected"
UNDECIDED = "undecided"
MOST_SEEDS = (5, 10)  # of a sweep
ORDERS = 1_000  # in which the changes of a chain are tried


@dataclass(frozen=True)
class Judged:
    """What a rule says of a change, and how many of its runs it took."""

    verdict: str
    runs: int


def is_lower(loss: float, baseline: float) -> bool:
    """Return whether a loss is lower, as printed."""
    return round(loss, DIGITS) < round(baseline, DIGITS)


def one_run(losses: Mapping[int, float], baseline: Mapping[int, float]) -> Iterator[Judged]:
    """Judge by one run with the seed of the baseline, for each seed."""
    for seed, loss in losses.items():
        yield Judged(KEPT if is_lower(loss, baseline[seed]) else REJECTED, runs=1)


def other_seed(losses: Mapping[int, float], baseline: Mapping[int, float]) -> Iterator[Judged]:
    """Judge by one run with another seed than the baseline's, for each pair of seeds."""
    for seed, before in itertools.permutations(losses, 2):
        yield Judged(KEPT if is_lower(losses[seed], baseline[before]) else REJECTED, runs=1)


def lower_mean(
    losses: Mapping[int, float], baseline: Mapping[int, float], most: int
) -> Iterator[Judged]:
    """Judge by the mean of `most` seeds, beginning with each seed in turn."""
    for seeds in consecutive([*losses], most):
        mean = statistics.fmean(losses[seed] for seed in seeds)
        before = statistics.fmean(baseline[seed] for seed in seeds)
        yield Judged(KEPT if is_lower(mean, before) else REJECTED, runs=most)


def sweep(
    losses: Mapping[int, float], baseline: Mapping[int, float], most: int
) -> Iterator[Judged]:
    """Judge as `accel-gpt sweep` does with `most` seeds, beginning with each seed in turn."""
    for seeds in consecutive([*losses], most):
        trained: dict[int, float] = {}
        for seed in seeds:
            trained[seed] = losses[seed]
            found = compare(trained, baseline, settings=1)
            if found.settled:
                break
        verdict = {"better": KEPT, "worse": REJECTED}.get(found.verdict, UNDECIDED)
        yield Judged(verdict, runs=len(trained))


def consecutive(seeds: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    """Yield `size` seeds that follow each other, from each seed on; the first follows the last."""
    for start in range(len(seeds)):
        yield [*seeds[start:], *seeds[:start]][:size]


def chain(losses: Losses, names: Sequence[str], seed: int) -> tuple[float, float]:
    """Keep each change whose run is lower than the last one kept, in random orders.

    Return the mean number of kept changes, and how far the loss seems to have fallen.
    """
    orders = random.Random(seed)
    kept = []
    for _ in range(ORDERS):
        best = losses[BASELINE][seed]
        count = 0
        for name in orders.sample(names, len(names)):
            if is_lower(losses[name][seed], best):
                best = losses[name][seed]
                count += 1
        kept.append(count)
    lowest = min(losses[name][seed] for name in (BASELINE, *names))
    return statistics.fmean(kept), losses[BASELINE][seed] - lowest


# --------------------------------------------------------------------------- the tables

Verdicts = dict[str, dict[str, list[Judged]]]  # rule -> name of a change -> each repetition


def main() -> None:
    """Train what is missing, judge by each rule and print the tables."""
    parser = make_parser(__doc__, peer=False)
    parser.add_argument("--out", type=Path, default=Path("runs/keep_rule"))
    parser.add_argument("--text", type=Path, help="default: the standard library")
    parser.add_argument("--seeds", type=int, default=20, help="5 or more")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--of_each", type=int, default=10, help="changes; 1 tries the script")
    args = parser.parse_args()
    report = start_report()
    changes = make_changes(args.of_each)
    losses = train_all(args, changes)
    judged = judge_all(losses, args.seeds)
    report["losses"] = losses
    report["rules"] = print_rules(judged, changes)
    report["changes"] = print_changes(judged, changes, losses)
    report["chain"] = print_chain(losses, changes)
    save_report(args.json, report)


def judge_all(losses: Losses, seeds: int) -> Verdicts:
    """Judge every change by every rule that has enough seeds."""
    baseline = losses[BASELINE]
    found: Verdicts = {}

    def judge(rule: str, function: Any, *arguments: int) -> None:
        found[rule] = {}
        for name, by_seed in losses.items():
            if name != BASELINE:
                found[rule][name] = [*function(by_seed, baseline, *arguments)]

    judge("one run, the same seed", one_run)
    judge("one run, another seed", other_seed)
    judge("mean of 5 seeds", lower_mean, 5)
    for most in MOST_SEEDS:
        if most <= seeds:
            judge(f"sweep, up to {most} seeds", sweep, most)
    return found


def print_rules(judged: Verdicts, changes: Sequence[Change]) -> list[dict[str, Any]]:
    """Print a row for each rule: how many changes it keeps, and how many runs it takes.

    The numbers are means over the repetitions, such as the seeds; then the lowest and the highest.
    """
    found = []
    rows = []
    for rule, by_name in judged.items():
        repetitions = [*zip(*by_name.values(), strict=True)]
        row: dict[str, Any] = {"rule": rule, "repetitions": len(repetitions)}
        cells = [rule]
        for helps, which in ((False, "nothing"), (True, "help")):
            names = [one.name for one in changes if one.helps is helps]
            for verdict in (KEPT, REJECTED, UNDECIDED):
                counts = []
                for number in range(len(repetitions)):
                    counts.append(sum(by_name[name][number].verdict == verdict for name in names))
                mean = statistics.fmean(counts)
                row[f"{which}, {verdict}"] = mean
                cells.append(f"{mean:.1f} ({min(counts)} to {max(counts)})")
        # the runs of the baseline serve all changes
        runs = [
            sum(one.runs for one in each) + max(one.runs for one in each) for each in repetitions
        ]
        row["runs"] = statistics.fmean(runs)
        rows.append([*cells, f"{row['runs']:.0f}", str(len(repetitions))])
        found.append(row)
    head = [
        "rule",
        "do nothing: kept",
        "rejected",
        "undecided",
        "help: kept",
        "rejected",
        "undecided",
        "runs",
        "repetitions",
    ]
    print_table(head, rows)
    return found


def print_changes(
    judged: Verdicts, changes: Sequence[Change], losses: Losses
) -> list[dict[str, Any]]:
    """Print how often each rule keeps the changes of each kind, and each change that helps.

    The difference from the baseline is a mean over all seeds, with its standard error.
    """
    of_kind: dict[str, list[str]] = {}
    for change in changes:
        of_kind.setdefault(change.kind, []).append(change.name)
    helping = {change.name: [change.name] for change in changes if change.helps}
    found = []
    rows = []
    for title, names in (of_kind | helping).items():
        means = []
        deviations = []
        for name in names:
            differences = [loss - losses[BASELINE][seed] for seed, loss in losses[name].items()]
            means.append(statistics.fmean(differences))
            deviations.append(statistics.stdev(differences))
        error = deviations[0] / math.sqrt(len(losses[BASELINE]))
        row: dict[str, Any] = {"changes": title, "number": len(names)}
        effect = ""
        if len(names) == 1:
            row |= {"mean": means[0], "standard_error": error}
            effect = f"{means[0]:+.4f} ± {error:.4f}"
        row["deviation"] = statistics.fmean(deviations)
        for rule, by_name in judged.items():
            row[rule] = share_kept([one for name in names for one in by_name[name]])
        shares = [f"{row[rule]:.0%}" for rule in judged]
        rows.append([title, str(len(names)), effect, f"{row['deviation']:.4f}", *shares])
        found.append(row)
    head = ["changes", "number", "difference", "deviation of the differences", *judged]
    print_table(head, rows)
    return found


def share_kept(judged: Sequence[Judged]) -> float:
    """Return the share that is kept."""
    return statistics.fmean(one.verdict == KEPT for one in judged)


def print_chain(losses: Losses, changes: Sequence[Change]) -> dict[str, float]:
    """Print what a chain of the changes `redrawn` keeps if each kept one is the next baseline."""
    names = [one.name for one in changes if one.kind == "redrawn"]
    chains = [chain(losses, names, seed) for seed in losses[BASELINE]]
    kept = statistics.fmean(one for one, _ in chains)
    fall = statistics.fmean(one for _, one in chains)
    print(f"a chain of the {len(names)} changes `redrawn`, one run each: {kept:.1f} are kept, and")
    print(f"the loss seems to fall by {fall:.4f}, means over {len(chains)} seeds", flush=True)
    return {"kept": kept, "seeming_fall": fall}


if __name__ == "__main__":
    main()
