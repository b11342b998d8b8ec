"""Run a script unmodified, and watch its optimizer steps from outside.

    python benchmarks/observe.py SETTINGS SCRIPT [ARGUMENT ...]
    python benchmarks/observe.py SETTINGS -m MODULE [ARGUMENT ...]

SETTINGS is JSON. Its `step` names the method that the script calls once a step, as
torch.optim:AdamW.step. `watch` is profile or curve. The result is written to the file `out` as
JSON; then the process ends.

profile: after `warmup` steps, records `steps` steps with PyTorch's profiler. Writes the trace to
    the file `trace`. `plain_step_ms` is the time of the steps just before, without the profiler.
curve: evaluates the model on fixed tokens after each step in `evaluated`. The clock starts after
    `first` steps, when everything is compiled, and stops during evaluations. `model` names a method
    that the script calls once on its model.

Imports nothing of accel_gpt, so that another trainer's process is its own.
"""

import functools
import hashlib
import importlib
import json
import os
import runpy
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile, record_function

STEP = "watched_step"  # name of the optimizer step in a trace
PLAIN_STEPS = 10  # timed without the profiler


def main() -> None:
    """Watch the script that the command line names."""
    settings = json.loads(sys.argv[1])
    sys.path[0] = os.getcwd()  # as if the script itself were run
    watcher = {"profile": Profile, "curve": Curve}[settings["watch"]](settings)
    call_after(settings["step"], watcher.after_step, name=STEP)
    if "model" in settings:
        call_after(settings["model"], watcher.after_model, name="watched_model")
    if sys.argv[2] == "-m":
        module = sys.argv[3]
        sys.argv = sys.argv[3:]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    else:
        sys.argv = sys.argv[2:]
        runpy.run_path(sys.argv[0], run_name="__main__")
    sys.exit("the script ended before the last watched step")


def call_after(target: str, after: Callable[[Any], None], name: str) -> None:
    """Make a method, module:Class.method, call `after` with its object at its end."""
    module, _, path = target.partition(":")
    class_name, _, method_name = path.partition(".")
    owner = getattr(importlib.import_module(module), class_name)
    method = getattr(owner, method_name)

    @functools.wraps(method)
    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        with record_function(name):
            result = method(self, *args, **kwargs)
        after(self)
        return result

    setattr(owner, method_name, watched)


def now() -> float:
    """Return the time in seconds after all work of the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def finish(out: str, result: Mapping[str, Any]) -> None:
    """Write the result and end the process, without the script's own end."""
    Path(out).write_text(json.dumps(result), encoding="utf-8")
    sys.stdout.flush()
    os._exit(0)


class Profile:
    """Records steps with PyTorch's profiler, from the end of one step to the end of another."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.settings = settings
        self.steps = 0  # completed
        self.plain_start = 0.0
        self.plain_step_ms = 0.0
        self.start = 0.0
        self.profiler = self.make_profiler()

    def make_profiler(self) -> Any:
        """Make a profiler of this machine's devices."""
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        return profile(activities=activities, record_shapes=True)

    def after_step(self, _: Any) -> None:
        """Start, stop and write at the steps of the settings."""
        self.steps += 1
        warmup = self.settings["warmup"]
        plain_steps = min(PLAIN_STEPS, warmup - 1)
        if self.steps == warmup - plain_steps:
            with self.make_profiler():  # loads its libraries, which takes seconds
                now()
            self.plain_start = now()
        elif self.steps == warmup:
            self.plain_step_ms = 1e3 * (now() - self.plain_start) / plain_steps
            self.profiler.start()
            self.start = now()
        elif self.steps == warmup + self.settings["steps"]:
            wall_ms = 1e3 * (now() - self.start)
            self.profiler.stop()
            self.profiler.export_chrome_trace(self.settings["trace"])
            result = {"plain_step_ms": self.plain_step_ms, "wall_ms": wall_ms}
            finish(self.settings["out"], result)


class Curve:
    """Evaluates a model on fixed tokens, at steps of its training, with the clock stopped."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.settings = settings
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model: Any = None
        self.tokens = self.read_tokens()  # (S, T + 1)
        self.steps = 0  # completed
        self.seconds = 0.0  # of training since step `first`
        self.since = 0.0
        self.points: list[tuple[float, int, float]] = []  # seconds, steps, loss

    def read_tokens(self) -> np.ndarray:
        """Read `sequences` sequences (S, T + 1) of a file, spread evenly over it."""
        tokens = np.fromfile(self.settings["val"], dtype=np.uint16)
        T = self.settings["block_size"]
        whole = (len(tokens) - 1) // T
        count = min(self.settings["sequences"], whole)
        starts = np.arange(count) * whole // count * T
        return np.stack([tokens[start : start + T + 1] for start in starts])

    def after_model(self, model: Any) -> None:
        """Keep the model, which the script may compile and wrap later."""
        self.model = model

    def after_step(self, _: Any) -> None:
        """Evaluate if a point is due; end after the last step or if the time is up."""
        self.steps += 1
        late = self.steps > self.settings["first"] and (
            time.perf_counter() - self.since + self.seconds > self.settings["most_seconds"]
        )
        last = late or self.steps == self.settings["steps"]
        if self.steps == self.settings["first"]:
            self.since = now()
        elif last or (self.steps in self.settings["evaluated"] and self.since):
            self.seconds += now() - self.since
            self.points.append((self.seconds, self.steps, self.evaluate()))
            self.since = now()
        if last:
            digest = hashlib.sha256(self.tokens.tobytes()).hexdigest()
            targets = self.tokens[:, 1:].size
            result = {"points": self.points, "val_sha256": digest, "val_tokens": targets}
            finish(self.settings["out"], result | {"ended_early": late})

    @torch.no_grad()
    def evaluate(self) -> float:
        """Return the mean loss over the tokens, in nats, uncompiled; in bf16 on a GPU."""
        cuda = self.device == "cuda"
        sequences = torch.from_numpy(self.tokens.astype(np.int64))
        total = 0.0
        training = self.model.training
        self.model.eval()
        for batch in sequences.split(self.settings["batch_size"]):
            x = batch[:, :-1].contiguous().to(self.device)
            y = batch[:, 1:].contiguous().to(self.device)
            with torch.autocast(self.device, dtype=torch.bfloat16, enabled=cuda):
                # the method, not the module: the module may call its compiled form
                found = self.model.forward(x, y, **self.settings["arguments"])
            if isinstance(found, tuple):  # nanoGPT: logits and the mean loss
                total += found[1].item() * y.numel()
            else:  # ours: the summed loss of each sequence
                total += found.sum().item()
        self.model.train(training)
        return total / self.tokens[:, 1:].size


if __name__ == "__main__":
    main()
