"""Write folders that look like runs, without training."""

import json
import math
from pathlib import Path
from typing import Any

from accel_gpt.config.experiment import Config
from accel_gpt.config.model import ModelConfig
from accel_gpt.config.values import to_yaml

SHAPE = {"n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 32}
LAUNCH = {
    "step": 0,
    "command": "accel-gpt train configs/small.yaml",
    "plan": {"max_steps": 40, "block_size": 32},
    "versions": {"python": "3.11.7", "torch": "2.13.0+cpu"},
    "commit": "0123456789ab",
    "device": "A processor",
    "processes": 1,
    "threads_per_process": 2,
    "mixed_precision": "no",
    "model": {"parameters": 30_000, "vocab_size": 257, "flops_per_token": 200_000},
    "data": {"fingerprint": "f" * 64, "tokenizer": "bytes", "lines": ["data/x: 18,000 tokens"]},
}


def record(step: int, **more: Any) -> dict[str, Any]:
    """Return a record of metrics, with an evaluation every tenth step."""
    loss = 1.5 + 2 * math.exp(-step / 10)
    found = {"step": step, "tokens": 256 * step, "time": 0.5 * step, "train/loss": loss}
    found |= {"train/lr": 1e-3, "train/grad_norm": 1.0 + 1 / step, "train/skipped": 0}
    found |= {"perf/tokens_per_second": 500.0, "perf/memory_gb": 0.5}
    if step % 10 == 0:
        found |= {"eval/train_loss": loss, "eval/val_loss": loss + 0.1}
        found |= {"eval/val_perplexity": math.exp(loss + 0.1), "eval/val_bits_per_byte": 2.0}
    return {**found, **more}


def make_run(
    folder: Path,
    records: list[dict[str, Any]] | None = None,
    launches: list[dict[str, Any]] | None = None,
    **config: Any,
) -> Path:
    """Write a run of 40 steps; `config`: fields of `Config`."""
    folder.mkdir(parents=True)
    lines = [json.dumps(one) for one in records or [record(step) for step in range(1, 41)]]
    (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    (folder / "run.json").write_text(json.dumps({"launches": launches or [LAUNCH]}))
    given = {"model": ModelConfig(**SHAPE), **config}
    (folder / "config.yaml").write_text(to_yaml(Config(**given)))
    (folder / "samples").mkdir()
    for step in (20, 40):
        text = f"--- sample 1\nfirst of {step}\n\n--- sample 2\nsecond of {step}\n"
        (folder / "samples" / f"step_{step:08d}.txt").write_text(text)
    return folder


def png_size(path: Path) -> tuple[int, int]:
    """Return the width and height of a PNG in pixels."""
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(head[16:20]), int.from_bytes(head[20:24])
