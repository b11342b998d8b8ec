"""Train five seeds of the configs that a CPU can train, for the bands of `accel-gpt doctor`.

    python benchmarks/bands.py tinyshakespeare.txt --out bands

Writes the val losses of each evaluation to accel_gpt/health/bands.json. A run that is finished is
kept. The losses depend on the precision by less than on the seed.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from accel_gpt.config.compare import differences
from accel_gpt.health.bands import BANDS
from accel_gpt.runs.folder import RunFolder

CONFIGS = ("shakespeare_char_cpu", "fast_shakespeare_cpu")
SEEDS = (1, 2, 3, 4, 5)


def main() -> None:
    """Train what is missing, and write the bands."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", help="the Shakespeare text of the configs")
    parser.add_argument("--out", default="bands", help="folder of the runs")
    options = parser.parse_args()
    bands = {}
    for config in CONFIGS:
        runs = []
        for seed in SEEDS:
            out = Path(options.out, f"{config}_{seed}")
            train(config, seed, str(Path(options.text).resolve()), out)
            runs.append(RunFolder(out))
        bands[config] = band_of(runs)
    BANDS.write_text(json.dumps(bands, indent=1) + "\n", encoding="utf-8")


def train(config: str, seed: int, text: str, out: Path) -> None:
    """Train one seed of a config."""
    words = [sys.executable, "-m", "accel_gpt", "train", config, "--out_dir", out.name]
    words += ["--data.prepare.source", text, "--seed", str(seed), "--log.trackers", "[]"]
    out.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(words, check=True, cwd=out.parent)


def band_of(runs: list[RunFolder]) -> dict[str, Any]:
    """Return the band of a config; see `Band` in accel_gpt/health/bands.py."""
    losses: dict[str, list[float]] = {}
    for run in runs:
        for record in run.records():
            if "eval/val_loss" in record:
                losses.setdefault(str(record["step"]), []).append(record["eval/val_loss"])
    changed = differences({}, runs[0].config)
    kept = {key: now for key, (_, now) in changed.items() if not key.startswith("data.")}
    kept = {key: now for key, now in kept.items() if key not in ("out_dir", "seed")}
    return {
        "config": kept,
        "fingerprint": runs[0].last_launch("data", "fingerprint"),
        "losses": losses,
    }


if __name__ == "__main__":
    main()
