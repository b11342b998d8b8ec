"""Measure whether learning rates transfer between the sizes of the family of model.depth.

    python benchmarks/transfer.py [--only coordinates rates lengths] [--out runs/transfer]
        [--steps 250] [--seeds 1 2 3] [--jobs 1] [--json FILE]
    python benchmarks/transfer.py --only redraw --out docs/images

coordinates: the sizes of activations through ten steps, over widths and depths; draws
coordinates.png. tests/optim/test_transfer.py asserts them.

rates: trains each size with optim.lr_factor 0.5, 1 and 2 on the standard library, with Muon and
AdamW, on the same tokens. Draws rates.png and prints the factor with the lowest loss, and what the
best factor of the smallest size costs at the others.

lengths: the same for one size and Muon, over lengths of 1, 4 and 16 times `--steps`.

redraw: measures nothing; draws both pictures from notes/transfer.md and notes/coordinates.csv.

Each picture is drawn twice, for light and for dark pages, as rates.png and rates_dark.png.
A finished run is not trained again. `--jobs` runs have one thread each.
"""

import argparse
import csv
import math
import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, astuple, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import torch
from common import (
    OURS,
    ROOT,
    draw_schemes,
    flags,
    make_parser,
    print_table,
    run_command,
    save_report,
    start_report,
)
from matplotlib.figure import Figure
from torch import Tensor, nn

from accel_gpt.commands.resolve import complete
from accel_gpt.config.experiment import Config
from accel_gpt.config.plan import make_plan
from accel_gpt.errors import DivergedError
from accel_gpt.model.gpt import GPT
from accel_gpt.optim.groups import fraction_at, make_optimizer, set_rates
from accel_gpt.report.curves import read_metrics
from accel_gpt.runs.folder import RunFolder

Size = tuple[int, int]  # width, depth
OPTIMIZERS = ("muon", "adamw")
# coordinates
BYTES = 257  # vocabulary
STEPS = 10
SHOWN_STEPS = (1, 3, 10)
WIDTHS: Sequence[Size] = ((64, 2), (128, 2), (256, 2), (512, 2))
DEPTHS: Sequence[Size] = ((64, 2), (64, 4), (64, 8), (64, 16))
# rates
SIZES: Sequence[Size] = ((64, 2), (64, 4), (64, 8), (128, 2), (256, 2), (512, 2))
FACTORS = (0.5, 1.0, 2.0)
LONGER = (1, 4, 16)  # times --steps, of one size
LENGTH_SIZE: Size = (128, 2)
HEAD = [
    "optimizer",
    "width",
    "depth",
    "steps",
    *(f"x {factor:g}" for factor in FACTORS),
    "best factor",
    "cost of the first row's",
]
VOCABULARY = 1024
NOTES = ROOT / "benchmarks/notes"
TEXT = "source: stdlib\ntokenizer: bpe\nvocab_size: {vocab_size}\nout: {folder}\n"
CONFIG = """
data: {{train: {data}}}
model: {{block_size: 128, rope_theta: 500, logit_softcap: null}}
train:
  tokens_per_step: 2048
  micro_batch_size: 16
  max_steps: {steps}
  compile: false
eval: {{every: 0, tokens: 131072}}
sample: {{every: 0}}
checkpoint: {{every: 0}}
log: {{every: 50}}
"""


def main() -> None:
    """Measure the parts and save the report."""
    parser = make_parser(__doc__, peer=False)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=MEASURED)
    parser.add_argument("--out", type=Path, default=Path("runs/transfer"))
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--jobs", type=int, default=1)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    report = start_report()
    for name in args.only:
        report[name] = PARTS[name](args)
    save_report(args.json, report)


# --------------------------------------------------------------------------- coordinates


def measure_coordinates(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure the activations at all sizes and draw them."""
    found = []
    for optimizer in OPTIMIZERS:
        for axis, sizes in (("width", WIDTHS), ("depth", DEPTHS)):
            for width, depth in sizes:
                config = family_config(width, depth, optimizer)
                activations = activation_sizes(config, STEPS)
                for step, values in enumerate(activations):
                    row = {"optimizer": optimizer, "axis": axis, "width": width, "depth": depth}
                    found.append(row | {"step": step} | values)
    draw_schemes(args.out / "coordinates.png", partial(draw_coordinates, found))
    return found


def family_config(width: int, depth: int, optimizer: str) -> Config:
    """Return the config of a size of the family, at one batch and length."""
    return complete(
        {
            "model.depth": depth,
            "model.n_embd": width,
            "model.block_size": 32,
            "model.vocab_size": BYTES,
            "optim.name": optimizer,
            "train.tokens_per_step": 4096,
            "train.max_steps": 400,
        }
    )


def activation_sizes(config: Config, steps: int) -> list[dict[str, float]]:
    """Train on this file as bytes; return the sizes of activations after 0 to `steps` steps.

    They are the root mean square of the residual stream after the last block and of the part that
    the blocks have added, and the standard deviation of the logits.
    """
    torch.manual_seed(1)
    model = GPT(config.model, BYTES)
    optimizer = make_optimizer(model, config.optim)
    text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()
    length = config.model.block_size + 1
    rows = text[: len(text) // length * length].view(-1, length)
    plan = make_plan(config, 1)
    outputs: dict[str, Tensor] = {}

    def keep(name: str, _module: nn.Module, _inputs: object, output: Tensor) -> None:
        outputs[name] = output

    model.norm_e.register_forward_hook(partial(keep, "embedding"))
    model.blocks[-1].register_forward_hook(partial(keep, "stream"))
    found = []
    for step in range(steps + 1):
        with torch.no_grad():
            logits = model(rows[:8, :-1])
        blocks = outputs["stream"] - outputs["embedding"]
        found.append(
            {
                "residual stream": outputs["stream"].square().mean().sqrt().item(),
                "added by the blocks": blocks.square().mean().sqrt().item(),
                "logits": logits.std(-1).mean().item(),
            }
        )
        batch = rows[torch.arange(8) + 8 * step]
        fraction = fraction_at(step, config, plan)
        set_rates(optimizer, config.optim, fraction, step)
        model(batch[:, :-1], batch[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return found


def largest_ratio(
    sizes: Sequence[Size], optimizer: str, steps: int, same: Mapping[str, float]
) -> dict[str, float]:
    """Return for each activation its largest value over its smallest, after `steps` steps.

    `same`: options of the optimizer that have one value at all sizes, instead of the rule's.
    """
    found = []
    for width, depth in sizes:
        config = family_config(width, depth, optimizer)
        config = replace(config, optim=replace(config.optim, **same))
        found.append(activation_sizes(config, steps)[-1])
    ratios = {}
    for name in found[0]:
        values = [one[name] for one in found]
        ratios[name] = max(values) / min(values) if max(values) > 0 else 1.0
    return ratios


def draw_coordinates(found: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw a panel for each optimizer and axis, a line for each activation and step."""
    figure, panels = plt.subplots(2, 2, figsize=(9, 7.5), sharey=True, layout="constrained")
    places = [(optimizer, axis) for optimizer in OPTIMIZERS for axis in ("width", "depth")]
    for panel, (optimizer, axis) in zip(panels.flat, places, strict=True):
        for name, style in (("added by the blocks", "-"), ("logits", "--")):
            for step in SHOWN_STEPS:
                rows = [
                    row
                    for row in found
                    if row["optimizer"] == optimizer and row["axis"] == axis and row["step"] == step
                ]
                panel.plot(
                    [row[axis] for row in rows],
                    [row[name] for row in rows],
                    style,
                    color=f"C{SHOWN_STEPS.index(step)}",
                    marker="o",
                    label=f"{name}, step {step}",
                )
        panel.set_xscale("log", base=2)
        panel.set_xticks([row[axis] for row in rows], [str(row[axis]) for row in rows])
        panel.set_yscale("log")
        panel.set_title(f"{optimizer}, over the {axis}")
        panel.set_xlabel("channels" if axis == "width" else "layers")
        panel.grid(alpha=0.3)
    figure.supylabel("size of the activation")
    lines, labels = panels[0, 0].get_legend_handles_labels()
    legend = figure.legend(lines, labels, loc="outside lower center", ncols=2, handlelength=6)
    for line in legend.get_lines():
        line.set_marker("")  # it would hide the dashes
    return figure


# --------------------------------------------------------------------------- rates


@dataclass(frozen=True)
class Kind:
    """The optimizer, size and length of runs on the standard library."""

    optimizer: str
    width: int
    depth: int
    steps: int

    @property
    def work(self) -> int:
        """A number that grows with the time of a run."""
        return self.width**2 * self.depth * self.steps


@dataclass(frozen=True)
class Run:
    """One run of a kind."""

    kind: Kind
    factor: float  # optim.lr_factor
    seed: int

    @property
    def name(self) -> str:
        """Name of the folder."""
        kind = self.kind
        size = f"{kind.optimizer}_width_{kind.width}_depth_{kind.depth}_steps_{kind.steps}"
        return f"{size}_factor_{self.factor}_seed_{self.seed}"


@dataclass(frozen=True)
class Result:
    """The val losses of a kind of runs, in nats per token."""

    kind: Kind
    losses: Sequence[Sequence[float]]  # of each factor, one for each seed

    @property
    def means(self) -> list[float]:
        """The mean of each factor over the seeds."""
        return [statistics.fmean(seeds) for seeds in self.losses]

    @property
    def parabola(self) -> "np.ndarray[Any, Any]":
        """The parabola through the means, in log2 of the factor."""
        return np.polyfit(np.log2(FACTORS), self.means, 2)

    @property
    def best_factor(self) -> float:
        """The factor with the lowest loss."""
        a, b, _ = self.parabola
        if a <= 0:  # the lowest loss is at an end
            return FACTORS[int(np.argmin(self.means))]
        return float(np.clip(2 ** (-b / (2 * a)), FACTORS[0], FACTORS[-1]))

    def loss_at(self, factor: float) -> float:
        """Compute the loss at a factor between those that were trained."""
        return float(np.polyval(self.parabola, np.log2(factor)))


def measure_rates(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Train what is missing of all sizes; print and draw the losses."""
    kinds = [Kind(optimizer, *size, args.steps) for optimizer in OPTIMIZERS for size in SIZES]
    results = measure(args, kinds)
    draw_schemes(args.out / "rates.png", partial(draw_rates, results))
    return report_rows(results)


def measure_lengths(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Train what is missing of all lengths; print the losses."""
    kinds = [Kind(OPTIMIZERS[0], *LENGTH_SIZE, times * args.steps) for times in LONGER]
    return report_rows(measure(args, kinds))


def measure(args: argparse.Namespace, kinds: Sequence[Kind]) -> list[Result]:
    """Train the runs of each kind, unless they have finished, and read their losses."""
    runs = []
    for kind in kinds:
        for factor in FACTORS:
            for seed in args.seeds:
                runs.append(Run(kind, factor, seed))
    configs = {steps: write_config(args.out, steps) for steps in {kind.steps for kind in kinds}}
    # the longest first, so that the last ones end together
    longest_first = sorted(runs, key=lambda run: -run.kind.work)
    with ThreadPoolExecutor(args.jobs) as pool:
        losses = pool.map(lambda run: train(args.out, configs, run), longest_first)
        found = dict(zip(longest_first, losses, strict=True))
    results = []
    for kind in kinds:
        by_factor = [[found[Run(kind, factor, seed)] for seed in args.seeds] for factor in FACTORS]
        results.append(Result(kind, by_factor))
    return results


def report_rows(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Print a row for each result and return the rows for the report.

    `cost`: of the best factor of the optimizer's first row, relative to the lowest loss.
    """
    table = []
    report = []
    first: dict[str, float] = {}
    for one in results:
        tuned = first.setdefault(one.kind.optimizer, one.best_factor)
        cost = one.loss_at(tuned) / one.loss_at(one.best_factor) - 1
        losses = [f"{loss:.4f}" for loss in one.means]
        table.append(
            [*map(str, astuple(one.kind)), *losses, f"{one.best_factor:.2f}", f"{cost:.2%}"]
        )
        row = asdict(one.kind) | {"losses": one.losses}
        report.append(row | {"best_factor": one.best_factor, "cost": cost})
    print_table(HEAD, table)
    return report


def write_config(out: Path, steps: int) -> Path:
    """Prepare the text, unless it is prepared, and write the config of the runs."""
    data = out / "data"
    if not (data / "dataset.json").exists():
        text = out / "text.yaml"
        text.write_text(TEXT.format(folder=data, vocab_size=VOCABULARY))
        run_command([sys.executable, *OURS, "prepare", text])
    config = out / f"config_{steps}.yaml"
    config.write_text(CONFIG.format(data=data, steps=steps))
    return config


def train(out: Path, configs: Mapping[int, Path], run: Run) -> float:
    """Train a run, unless it has finished; return its val loss, ln(vocabulary) if it diverged.

    `configs`: by the number of steps.
    """
    kind = run.kind
    folder = out / run.name
    options = {
        "model.depth": kind.depth,
        "model.n_embd": kind.width,
        "optim.name": kind.optimizer,
        "optim.lr_factor": run.factor,
        "seed": run.seed,
        "out_dir": folder,
    }
    if kind.steps not in RunFolder(folder).checkpoints:
        command = [sys.executable, *OURS, "train", configs[kind.steps], *flags(options)]
        run_command(command, accepted=(0, DivergedError.exit_code))
    loss: float | None = read_metrics(RunFolder(folder).records()).last("eval/val_loss")
    return math.log(VOCABULARY) if loss is None else loss


def draw_rates(results: Sequence[Result]) -> Figure:
    """Draw the loss over the factor: a panel for each optimizer, a curve for each size."""
    figure, panels = plt.subplots(
        1, len(OPTIMIZERS), figsize=(8.5, 4.8), sharey=True, layout="constrained"
    )
    for panel, optimizer in zip(panels, OPTIMIZERS, strict=True):
        own = [one for one in results if one.kind.optimizer == optimizer]
        for number, one in enumerate(own):
            fine = np.linspace(FACTORS[0], FACTORS[-1], 100)
            panel.plot(fine, [one.loss_at(factor) for factor in fine], color=f"C{number}")
            label = f"{one.kind.width} channels, {one.kind.depth} layers"
            panel.plot(FACTORS, one.means, "o", color=f"C{number}", label=label)
            lowest = one.loss_at(one.best_factor)
            panel.plot(one.best_factor, lowest, "x", color=plt.rcParams["text.color"])
        panel.set_xscale("log", base=2)
        panel.set_xticks(FACTORS, [f"{factor:g}" for factor in FACTORS])
        panel.set_title(optimizer)
        panel.set_xlabel("optim.lr_factor; x: the lowest loss")
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("val loss")
    lines, labels = panels[-1].get_legend_handles_labels()
    figure.legend(lines, labels, loc="outside lower center", ncols=3)
    return figure


# --------------------------------------------------------------------------- redraw


def redraw(args: argparse.Namespace) -> None:
    """Draw the pictures from what was measured before."""
    draw_schemes(args.out / "coordinates.png", partial(draw_coordinates, read_coordinates()))
    draw_schemes(args.out / "rates.png", partial(draw_rates, read_rates()))


def read_coordinates() -> list[dict[str, Any]]:
    """Read the activations of the last measurement."""
    with (NOTES / "coordinates.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    found = []
    for row in rows:
        optimizer, axis = row.pop("optimizer"), row.pop("axis")
        numbers = {name: float(value) for name, value in row.items()}
        whole = {name: int(numbers[name]) for name in ("width", "depth", "step")}
        found.append({"optimizer": optimizer, "axis": axis} | numbers | whole)
    return found


def read_rates() -> list[Result]:
    """Read the losses from the table in the notes that has three seeds in each cell."""
    text = (NOTES / "transfer.md").read_text(encoding="utf-8")
    number = r"\d\.\d{4}"
    cell = rf"\| ({number}, {number}, {number}) "
    found = []
    for row in re.finditer(
        rf"^\| (\w+) \| (\d+) \| (\d+) {cell}{cell}{cell}\|", text, re.MULTILINE
    ):
        optimizer, width, depth, *cells = row.groups()
        losses = [[float(loss) for loss in cell.split(", ")] for cell in cells]
        found.append(Result(Kind(optimizer, int(width), int(depth), steps=250), losses))
    return found


MEASURED = ("coordinates", "rates", "lengths")
PARTS = {
    "coordinates": measure_coordinates,
    "rates": measure_rates,
    "lengths": measure_lengths,
    "redraw": redraw,
}


if __name__ == "__main__":
    main()
