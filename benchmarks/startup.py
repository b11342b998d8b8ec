"""Seconds from the start of Python to the end of the first step of a run.

    python benchmarks/startup.py CONFIG.yaml [--section.key value ...]

In the order of `accel-gpt train`, each launch a process of its own, into an empty folder; the data
must be prepared. Prints the
medians of `LAUNCHES`, and which of the heavy modules were there when the first step ended.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from itertools import pairwise

LAUNCHES = 7
HEAVY = ("torch._dynamo", "torch.distributed.tensor", "sympy", "tensorboard", "transformers")
# times are kept in a list, and the process ends with its first step
CODE = """
import json, os, sys, time
marks = [time.perf_counter()]
from accel_gpt.cli import load_config
from accel_gpt.hub.sources import inherit
config = load_config(sys.argv[2:], "startup", inherit)
marks.append(time.perf_counter())
import torch
marks.append(time.perf_counter())
import accelerate
marks.append(time.perf_counter())
from accel_gpt import train
marks.append(time.perf_counter())
update = train.update
def first(run):
    marks.append(time.perf_counter())
    update(run)
    if run.accelerator.device.type == "cuda":
        torch.cuda.synchronize()
    marks.append(time.perf_counter())
    heavy = [name for name in json.loads(sys.argv[1]) if name in sys.modules]
    sys.stdout.write(json.dumps([marks, heavy]))
    sys.stdout.flush()
    os._exit(0)
train.update = first
train.launch(config)
"""
PARTS = (
    "command line, config",
    "import torch",
    "import accelerate",
    "import train",
    "start",
    "first step",
)


def main(argv: list[str]) -> int:
    """Launch and print."""
    found, heavy = [], []
    for _ in range(LAUNCHES):
        with tempfile.TemporaryDirectory() as out:
            command = [sys.executable, "-c", CODE, json.dumps(HEAVY), *argv, "--out_dir", out]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
        marks, heavy = json.loads(done.stdout)
        found.append([after - before for before, after in pairwise(marks)])
    for name, seconds in zip(PARTS, zip(*found, strict=True), strict=True):
        print(f"{name:22} {statistics.median(seconds):6.3f} s")
    after_torch = [sum(spent[2:]) for spent in found]
    print(
        f"{'after import torch':22} {statistics.median(after_torch):6.3f} s, "
        f"{min(after_torch):.3f} to {max(after_torch):.3f}; heavy: {', '.join(heavy) or 'none'}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
