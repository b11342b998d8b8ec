"""Seconds from the start of Python to the end of the first step of a run.

    python benchmarks/startup.py CONFIG.yaml [--section.key value ...]

In the order of `accel-gpt train`, each launch a process of its own, into an empty folder; the data
must be prepared. Prints the medians of `LAUNCHES`, by the clock and in seconds of the CPU, which
other work disturbs less, and which heavy modules were there when the first step ended.
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
def now():
    marks.append((time.perf_counter(), time.process_time()))
marks = []
now()
from accel_gpt.cli import load_config
from accel_gpt.hub.sources import inherit
config = load_config(sys.argv[2:], "startup", inherit)
now()
import torch
now()
import accelerate
now()
from accel_gpt import train
now()
update = train.update
def first(run):
    now()
    update(run)
    if run.accelerator.device.type == "cuda":
        torch.cuda.synchronize()
    now()
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
    wall, cpu, heavy = [], [], []
    for _ in range(LAUNCHES):
        with tempfile.TemporaryDirectory() as out:
            command = [sys.executable, "-c", CODE, json.dumps(HEAVY), *argv, "--out_dir", out]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
        marks, heavy = json.loads(done.stdout)
        for spent, clock in zip((wall, cpu), zip(*marks, strict=True), strict=True):
            parts = [after - before for before, after in pairwise(clock)]
            spent.append([*parts, sum(parts[2:])])
    print(f"{'':22} {'wall':>7} {'of the CPU':>12}")
    for number, name in enumerate((*PARTS, "after import torch")):
        seconds, work = (statistics.median(row[number] for row in rows) for rows in (wall, cpu))
        print(f"{name:22} {seconds:6.3f} s {work:10.3f} s")
    print(f"heavy modules: {', '.join(heavy) or 'none'}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
