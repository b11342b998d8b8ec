"""Measure whether learning rates transfer: the best optim.lr_factor at several sizes.

    python benchmarks/transfer.py --out runs/transfer --jobs 2

Trains the family of model.depth on the standard library, for the same tokens at every size. A run
that has finished is not trained again. Prints a table and writes transfer.png and transfer.json.
"""

import json
import math
import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from common import OURS, make_parser, run_command

from accel_gpt.console import table
from accel_gpt.training.run_folder import RunFolder

# width, depth
SIZES = ((64, 2), (64, 4), (64, 8), (128, 2), (256, 2), (512, 2))
FACTORS = (0.5, 1.0, 2.0)
SEEDS = (1, 2, 3)
VOCABULARY = 1024
TEXT = "source: stdlib\ntokenizer: bpe\nvocab_size: {vocab_size}\nout: {folder}\n"
CONFIG = """
data: {{train: {data}}}
model: {{block_size: 128, rope_theta: 500, logit_softcap: null}}
train: {{tokens_per_step: 2048, micro_batch_size: 16, max_steps: {steps},
  cpu_threads: 1, compile: false}}
eval: {{every: 0, tokens: 131072}}
sample: {{every: 0}}
checkpoint: {{every: 0}}
log: {{every: 50}}
"""


@dataclass(frozen=True)
class Result:
    """The val losses of one size and optimizer, in nats per token."""

    optimizer: str
    width: int
    depth: int
    losses: Sequence[Sequence[float]]  # of each factor, one for each seed

    @property
    def means(self) -> list[float]:
        """The mean of each factor over the seeds."""
        return [statistics.fmean(seeds) for seeds in self.losses]

    @property
    def parabola(self) -> np.ndarray:
        """The parabola through the lowest mean and its neighbors, in log2 of the factor."""
        middle = min(max(int(np.argmin(self.means)), 1), len(FACTORS) - 2)
        near = slice(middle - 1, middle + 2)
        return np.polyfit(np.log2(FACTORS[near]), self.means[near], 2)

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


def main() -> None:
    """Train what is missing, then write the table and the picture."""
    parser = make_parser(__doc__, peer=False)
    parser.add_argument("--out", type=Path, default=Path("runs/transfer"))
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, one thread each")
    parser.add_argument("--optimizers", nargs="+", default=["muon", "adamw"])
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    prepare(options.out)
    (options.out / "config.yaml").write_text(
        CONFIG.format(data=options.out / "data", steps=options.steps)
    )
    runs = []
    for seed in SEEDS:
        for width, depth in SIZES:
            for optimizer in options.optimizers:
                for factor in FACTORS:
                    runs.append((optimizer, width, depth, factor, seed))
    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(lambda run: train(options.out, options.steps, *run), runs))
    results = []
    for optimizer in options.optimizers:
        results.extend(read_results(options.out, optimizer))
    rows = [["optimizer", "width", "depth", *map(str, FACTORS), "best factor", "cost"]]
    summary = []
    for optimizer in options.optimizers:
        own = [one for one in results if one.optimizer == optimizer]
        tuned = own[0].best_factor  # at the smallest size
        for one in own:
            cost = one.loss_at(tuned) / one.loss_at(one.best_factor) - 1
            losses = [f"{loss:.4f}" for loss in one.means]
            sizes = [str(one.width), str(one.depth)]
            rows.append([optimizer, *sizes, *losses, f"{one.best_factor:.2f}", f"{cost:.2%}"])
            summary.append(asdict(one) | {"best_factor": one.best_factor, "cost": cost})
    sys.stdout.write(table(rows, "<", *[">"] * (len(rows[0]) - 1)))
    draw(results, options.out / "transfer.png")
    if options.json:
        options.json.write_text(json.dumps(summary, indent=1))


def prepare(out: Path) -> None:
    """Prepare the text, unless it is there."""
    if (out / "data" / "dataset.json").exists():
        return
    config = out / "text.yaml"
    config.write_text(TEXT.format(folder=out / "data", vocab_size=VOCABULARY))
    run_command([sys.executable, *OURS, "prepare", config])


def folder_of(out: Path, optimizer: str, width: int, depth: int, factor: float, seed: int) -> Path:
    """Return the folder of a run."""
    return out / f"{optimizer}_width_{width}_depth_{depth}_factor_{factor}_seed_{seed}"


def train(
    out: Path, steps: int, optimizer: str, width: int, depth: int, factor: float, seed: int
) -> None:
    """Train one run, unless it has finished."""
    folder = folder_of(out, optimizer, width, depth, factor, seed)
    if steps in RunFolder(folder).checkpoints:
        return
    options = {
        "model.depth": depth,
        "model.n_embd": width,
        "optim.name": optimizer,
        "optim.lr_factor": factor,
        "seed": seed,
        "out_dir": folder,
    }
    words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
    run_command([sys.executable, *OURS, "train", out / "config.yaml", *words])


def read_results(out: Path, optimizer: str) -> list[Result]:
    """Read the losses of all sizes, the smallest first; a run that diverged has ln(vocabulary)."""
    results = []
    for width, depth in SIZES:
        losses = []
        for factor in FACTORS:
            seeds = []
            for seed in SEEDS:
                run = RunFolder(folder_of(out, optimizer, width, depth, factor, seed))
                seeds.append(run.metrics.last("eval/val_loss") or math.log(VOCABULARY))
            losses.append(seeds)
        results.append(Result(optimizer, width, depth, losses))
    return results


def draw(results: Sequence[Result], path: Path) -> None:
    """Draw the loss over the factor: a panel for each optimizer, a curve for each size."""
    optimizers = sorted({one.optimizer for one in results})
    figure, panels = plt.subplots(1, len(optimizers), figsize=(10, 4), squeeze=False)
    for panel, optimizer in zip(panels[0], optimizers, strict=True):
        for one in results:
            if one.optimizer == optimizer:
                label = f"{one.width} channels, {one.depth} layers"
                panel.plot(FACTORS, one.means, marker="o", label=label)
        panel.set_xscale("log", base=2)
        panel.set_title(optimizer)
        panel.set_xlabel("optim.lr_factor")
        panel.set_ylabel("val loss")
        panel.grid(alpha=0.3)
    panels[0][0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
