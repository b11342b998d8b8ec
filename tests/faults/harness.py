"""Tiny runs that are killed, launched again and compared bit for bit with an undisturbed one.

Training is a black box here: arguments go in; exit codes, output and files come out.
"""

import csv
import json
import random
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from accel_gpt.config.data import PrepareConfig
from accel_gpt.prepare.prepare import prepare
from accel_gpt.runs.checkpoint import verify_checkpoint
from tests.conftest import text_of
from tests.faults.launches import Answer, Server

STEPS, EVERY = 12, 2
EPOCH_STEPS = 4  # 16 windows of 16 tokens, 4 a step
KILLED = -signal.SIGKILL
# environment of each process if FSDP shards the model
FSDP = {
    **{"ACCELERATE_USE_CPU": "false", "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"},
    **{"FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP", "FSDP_RESHARD_AFTER_FORWARD": "true"},
}
CLOCK = ("time", "tokens_this_launch")  # figures that depend on the clock or on restarts
LAUNCH_STATE = ("seconds", "world_size", "config")


class Tiny:
    """Arguments of a tiny run: 36,000 weights, 12 steps, three epochs, a checkpoint every 2."""

    def __init__(self, folder: Path) -> None:
        self.config = folder / "tiny.yaml"
        text = folder / "text.txt"
        text.write_text(text_of(100)[:302])  # 272 tokens to train on
        prepare(
            PrepareConfig(source=str(text), tokenizer="bytes"),
            folder / "corpus",
        )
        self.config.write_text(
            f"""
data: {{train: {folder / "corpus"}}}
model: {{n_layer: 2, n_head: 2, n_embd: 32, block_size: 16, dropout: 0.1}}
train: {{tokens_per_step: 64, micro_batch_size: 2, max_steps: {STEPS}}}
optim: {{lr: 1e-2}}
schedule: {{warmup_steps: 2}}
eval: {{every: 3, tokens: 16}}
sample: {{every: 0}}
checkpoint: {{every: {EVERY}}}
log: {{every: 1, trackers: []}}
"""
        )

    def arguments(self, out: Path, *options: str) -> list[str]:
        """Return the arguments of a run in the folder `out`."""
        return [str(self.config), "--out_dir", str(out), *options]


def finish(server: Server, arguments: Sequence[str], processes: int = 1, **asked: Any) -> Answer:
    """Launch, and assert that it succeeds."""
    answer = server.launch(arguments, processes, **asked)
    assert answer.codes == [0] * processes, "\n".join(answer.outputs)
    return answer


# --------------------------------------------------------------------------- what a run left


def records(run: Path) -> list[dict[str, str]]:
    """Return the lines of metrics.jsonl without clock figures; numbers by their bits."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: float(v).hex() for k, v in line.items() if not by_clock(k)} for line in lines]


def rows(run: Path) -> list[dict[str, str]]:
    """Return the rows of metrics.csv without figures of the clock or restarts."""
    with (run / "metrics.csv").open(newline="") as file:
        return [{k: v for k, v in row.items() if not by_clock(k)} for row in csv.DictReader(file)]


def by_clock(name: str) -> bool:
    """Return whether two equal runs may differ in this figure."""
    return name in CLOCK or name.startswith(("perf/", "launch/"))


def checkpoint_names(run: Path) -> list[str]:
    """Folders of checkpoints, oldest first."""
    return sorted(path.name for path in (run / "checkpoints").glob("step_????????"))


def newest(run: Path) -> Path:
    """Return the newest checkpoint."""
    return run / "checkpoints" / checkpoint_names(run)[-1]


def debris(run: Path) -> list[str]:
    """Return the files that a completed run must not leave."""
    patterns = ("*.tmp", ".tmp*", ".trash*")
    return [str(path) for pattern in patterns for path in run.rglob(pattern)]


def assert_whole(run: Path, steps: int = STEPS) -> None:
    """Assert a complete run: each step once in both files, intact checkpoints, no debris."""
    assert [float.fromhex(r["step"]) for r in records(run)] == list(range(1, steps + 1))
    assert [int(row["step"]) for row in rows(run)] == list(range(1, steps + 1))
    assert debris(run) == []
    assert newest(run).name == f"step_{steps:08d}"
    for name in checkpoint_names(run):
        verify_checkpoint(run / "checkpoints" / name)


def assert_same(run: Path, whole: Path, steps: int = STEPS, same_world: bool = True) -> None:
    """Assert that two runs have equal figures, weights and optimizer, bit for bit."""
    assert_whole(run, steps)
    assert records(run) == records(whole)
    assert rows(run) == rows(whole)
    assert (run / "best").read_text() == (whole / "best").read_text()
    a, b = newest(run), newest(whole)
    names = {path.name for path in a.iterdir()}
    if same_world:
        assert names == {path.name for path in b.iterdir()}
    for name in sorted(names - {"manifest.json"}):
        if not name.startswith("random_states"):
            assert identical(content(a / name), content(b / name)), f"{a / name} differs"
        elif same_world:
            key = "torch_manual_seed"
            assert identical(content(a / name)[key], content(b / name)[key]), f"{name} differs"


def content(path: Path) -> Any:
    """Return the content of a file of a checkpoint."""
    if path.suffix == ".safetensors":
        return load_file(path)
    if path.suffix == ".json":
        found = {k: v for k, v in json.loads(path.read_text()).items() if k not in LAUNCH_STATE}
        waiting = found.get("pending_record") or {}
        return found | {"pending_record": {k: v for k, v in waiting.items() if not by_clock(k)}}
    return torch.load(path, weights_only=not path.name.startswith("random_states"))


def identical(a: Any, b: Any) -> bool:
    """Return whether two values are equal in type, keys, order and every bit."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        bits = [t.detach().contiguous().flatten().view(torch.uint8) for t in (a, b)]
        return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(*bits)
    if isinstance(a, dict) and isinstance(b, dict):
        return list(a) == list(b) and all(identical(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(identical, a, b))
    return type(a) is type(b) and (a.hex() == b.hex() if isinstance(a, float) else bool(a == b))


# --------------------------------------------------------------------------- disturbing a run


def rewound(run: Path, copy: Path, step: int) -> Path:
    """Copy a run without its checkpoints after `step`, as a kill may leave it."""
    shutil.copytree(run, copy, symlinks=True)
    forget_after(copy, step)
    return copy


def forget_after(run: Path, step: int) -> None:
    """Remove the checkpoints after `step`."""
    for name in checkpoint_names(run):
        if int(name.removeprefix("step_")) > step:
            shutil.rmtree(run / "checkpoints" / name)


def flip(path: Path, draw: random.Random) -> str:
    """Flip one random bit of a file; return which one."""
    data = bytearray(path.read_bytes())
    bit = draw.randrange(8 * len(data))
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)
    return f"bit {bit} of {path}"
