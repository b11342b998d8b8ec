"""Two processes of one thread each beside one process of two threads, at the same global batch.

    python benchmarks/scaling.py CONFIG.yaml [--rounds 5] [--steps 60] [--json FILE]
        [--allow_busy] [--section.key value ...]

Whole launches in turn on a CPU, through gloo; a round's figure is the median time of a step in
metrics.jsonl, after warm-up. Each of the two processes takes half of train.micro_batch_size. Prints
the tokens per second of two processes over those of one.
"""

import argparse
import shutil
import sys
import tempfile
from functools import partial
from pathlib import Path

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
    pace,
    save,
    table,
)

from accel_gpt.config.experiment import Config
from accel_gpt.config.parse import load_config
from accel_gpt.training.setup import ensure_data

WINDOW = 5  # steps a line


def main() -> None:
    """Run both in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    add_report_options(parser)
    args, options = parser.parse_known_args()
    config = load_config([str(args.config), *options], "benchmarks/scaling.py")
    ensure_data(config.data)
    machine, load = facts(threads=2), OtherLoad(args)
    with tempfile.TemporaryDirectory() as folder:
        run = partial(launch, config, args, options, Path(folder))
        subjects = {f"{n} x {2 // n} threads": partial(run, n) for n in (1, 2)}
        found = interleave(subjects, args.rounds, load)
    tokens = config.train.tokens_per_step
    one, two = (median(rounds, "step_ms") for rounds in found.values())
    rows = [
        [name, f"{ms:.1f}", f"{1e3 * tokens / ms:,.0f}", f"{one / ms:.3f}"]
        for name, ms in zip(found, (one, two), strict=True)
    ]
    print(headline(machine))
    print(table([args.config.name, "ms a step", "tokens/s", "of one process"], rows))
    save(args.json, {"facts": machine, "config": str(args.config), "rounds": found}, load)


def launch(
    config: Config, args: argparse.Namespace, options: list[str], folder: Path, processes: int
) -> Metrics:
    """One run of one or two processes."""
    out = folder / f"run{processes}"
    words = [str(args.config), *options, "--out_dir", str(out)]
    words += ["--train.cpu_threads", str(2 // processes), "--train.max_steps", str(args.steps)]
    words += ["--train.micro_batch_size", str(config.train.micro_batch_size // processes)]
    words += ["--log.every", str(WINDOW), "--eval.every", "0", "--checkpoint.every", "0"]
    words += ["--eval.tokens", str(config.model.block_size * 2), "--sample.every", "0"]
    start = [sys.executable, "-m", "accel_gpt.cli", "train"]
    if processes > 1:
        start = [sys.executable, "-m", "accelerate.commands.launch"]
        start += ["--config_file", str(ROOT / "accelerate_config.yaml")]
        start += ["--num_processes", str(processes), str(ROOT / "accel_gpt/train.py")]
    call([*start, *words], OMP_NUM_THREADS=str(2 // processes))
    found = pace(out, 2)
    shutil.rmtree(out)
    return found


if __name__ == "__main__":
    main()
