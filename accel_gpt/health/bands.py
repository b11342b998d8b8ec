"""Compare a run with five runs of the same shipped config, if it trains one on its own data.

benchmarks/bands.py made `bands.json`: the val losses of five seeds of each config.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from accel_gpt.config.compare import differences
from accel_gpt.health.case import Case, Line
from accel_gpt.json_files import load_json_or_none

BANDS = Path(__file__).parent / "bands.json"
SEEDS = 5
STUDENT = 4.604  # 99% of Student's t with SEEDS - 1 degrees of freedom, both sides
# keys and sections that must be the same; the precision changes a loss less than a seed does
SAME = (
    "model.",
    "optim.",
    "schedule.",
    "data.shuffle",
    "data.document_mask",
    "data.val",
    "eval.tokens",
    "train.tokens_per_step",
    "train.max_steps",
    "train.max_tokens",
    "train.budget",
    "stages",
)


@dataclass(frozen=True)
class Band:
    """Val losses of runs of one config that differ only in their seed."""

    config: dict[str, Any]  # dotted keys, as config.yaml has them
    fingerprint: str  # of the training data
    losses: dict[str, list[float]]  # step -> val loss of each run


def compare_with_band(case: Case, line: Line) -> None:
    """Add to a line whether the last val loss lies in the band of the run's config."""
    found = load_json_or_none(dict[str, Band], BANDS) or {}
    for name, band in found.items():
        if not is_same(case, band):
            continue
        steps, losses = case.after_start("eval/val_loss")
        known = [i for i, step in enumerate(steps) if str(int(step)) in band.losses]
        if not known:
            return
        step = int(steps[known[-1]])
        loss = float(losses[known[-1]])
        others = np.array(band.losses[str(step)])
        assert len(others) == SEEDS
        mean = float(others.mean())
        # a prediction interval for one more run
        half = STUDENT * float(others.std(ddof=1)) * math.sqrt(1 + 1 / len(others))
        line.compared += (
            f"; val {loss:.4f} at step {step:,}, {len(others)} runs of {name}: "
            f"{mean:.4f} ± {half:.4f}"
        )
        if abs(loss - mean) > half:
            line.find("look", f"the val loss is outside of the band of {name}: compare the setups")
        return


def is_same(case: Case, band: Band) -> bool:
    """Return whether a run has the config and the data of a band."""
    run = case.run
    if run.last_launch("data", "fingerprint") != band.fingerprint or run.last_launch("code"):
        return False
    changed = differences(band.config, run.config)
    return not any(key.startswith(SAME) for key in changed)
