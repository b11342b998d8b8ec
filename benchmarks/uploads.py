"""What uploads to the Hub cost the steps beside which they run.

    python benchmarks/uploads.py TEXT [--steps 1500] [--every 300]

One run of configs/shakespeare_char_cpu.yaml with `hub.push: every_checkpoint` to a Hub on the
loopback address. Uploads are halted and let go on in turn, every `TURN_SECONDS`, so that the speed
of the machine, which drifts, is that of both: the median step beside an upload against the others.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.hub_server import HubServer, environment  # noqa: E402


def main() -> None:
    """Train, watch, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", help="tinyshakespeare.txt")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--every", type=int, default=300, help="steps between checkpoints")
    asked = parser.parse_args()
    with HubServer() as hub, tempfile.TemporaryDirectory() as room:
        options = {
            "out_dir": f"{room}/run",
            "data.train": f"{room}/data",
            "data.prepare.path": os.path.abspath(asked.text),
            "train.max_steps": asked.steps,
            "checkpoint.every": asked.every,
            "checkpoint.keep_best": "false",
            "eval.every": 0,
            "sample.every": 0,
            "log.every": 1,
            "hub.repo_id": "tester/bench",
            "hub.push": "every_checkpoint",
        }
        command = [sys.executable, str(ROOT / "accel_gpt" / "train.py")]
        command += [str(ROOT / "configs" / "shakespeare_char_cpu.yaml")]
        command += [word for key, value in options.items() for word in (f"--{key}", str(value))]
        known = {**os.environ, **environment(hub, Path(room) / "home"), "PYTHONPATH": str(ROOT)}
        metrics = Path(room) / "run" / "metrics.jsonl"
        spans, origin = watch(subprocess.Popen(command, env=known), metrics)
        records = [json.loads(line) for line in metrics.read_text().splitlines()]
        tags = hub.tags("tester/bench")
    beside, alone = [], []
    for record in records[10:]:
        moment = origin + record["time"]
        during = any(start <= moment <= end for start, end in spans)
        (beside if during else alone).append(record["perf/step_ms"])
    ratio = statistics.median(beside) / statistics.median(alone)
    print(f"{len(tags)} uploads; {len(beside)} steps beside one, {len(alone)} without")
    print(
        f"median step {statistics.median(beside):.2f} ms beside, {statistics.median(alone):.2f} "
        f"without: {100 * (ratio - 1):+.2f} %"
    )


TURN_SECONDS = 3.0


def watch(process: "subprocess.Popen[bytes]", metrics: Path) -> tuple[list[list[float]], float]:
    """When an upload ran, as (start, end) of the wall clock; and when the run's own clock began."""
    spans: list[list[float]] = []
    origin, parent, before = 0.0, psutil.Process(process.pid), [0.0, 0.0]
    while process.poll() is None:
        now = time.time()
        if not origin and metrics.is_file() and (text := metrics.read_text()).endswith("\n"):
            origin = now - json.loads(text.splitlines()[-1])["time"]
        try:
            pushes = [child for child in parent.children() if "push" in child.cmdline()]
            halted = int(now / TURN_SECONDS) % 2 == 0 and process_trains(metrics, before)
            for push in pushes:
                push.suspend() if halted else push.resume()
        except psutil.Error:
            break
        busy = bool(pushes) and not halted
        if busy and spans and now - spans[-1][1] < 0.3:
            spans[-1][1] = now
        elif busy:
            spans.append([now, now])
        time.sleep(0.05)
    process.wait()
    return spans, origin


def process_trains(metrics: Path, before: list[float]) -> bool:
    """Whether steps still come: at the end the uploads may have the machine."""
    size = metrics.stat().st_size if metrics.is_file() else 0
    if size != before[0]:
        before[:] = [size, time.time()]
    return time.time() - before[1] < 2


if __name__ == "__main__":
    main()
