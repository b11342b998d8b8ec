"""What a run or a checkpoint holds, and whether it is intact. Changes nothing there.

`inspect_run` returns the object that `accel-gpt inspect PATH --json` prints; null: not known.

    kind "run" or "checkpoint", path, problems [one sentence each]
    best                       name of the run's best checkpoint
    checkpoints [{name, intact (null: not verified, with --quick), step, tokens, seconds,
        train_loss, val_loss, best_val_loss, best_step, world_size, parameters {part: count, total,
        total_unpadded}, model {the fields of ModelConfig}, vocab_size, data {train, fingerprint},
        tokenizer {kind, fingerprint}, changed {key of the config: value, where it is not the
        default}, versions {python, package: version, commit}}], by step; of one whose files cannot
        be read: name, intact
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any

from accel_gpt.config.parse import changed_keys
from accel_gpt.console import table
from accel_gpt.cost.flops import parameter_counts
from accel_gpt.data.tokenizer import load_tokenizer
from accel_gpt.errors import AccelGPTError
from accel_gpt.training.checkpoint import (
    find_checkpoint,
    is_checkpoint,
    read_evaluated,
    read_shape,
    verify,
)
from accel_gpt.training.run_folder import RunFolder, step_name

STATES = MappingProxyType({True: "intact", False: "DAMAGED", None: "not verified"})


def inspect_run(path: Path, quick: bool) -> dict[str, Any]:
    """Report on the run or checkpoint at `path`, see the module; `quick`: verify no hash.

    Raises `UserError` when it holds no checkpoint.
    """
    one = is_checkpoint(path) or not (path / "checkpoints").is_dir()
    found = [path] if one else list(RunFolder(path).checkpoints.values())
    if not found:
        find_checkpoint(path)  # raises
    number = "" if one else RunFolder(path).best
    best = step_name(int(number)) if number.isdecimal() else None
    missing = best is not None and best not in [folder.name for folder in found]
    problems = [f"the best checkpoint, {best}, is not there"] if missing else []
    return {
        "kind": "checkpoint" if one else "run",
        "path": str(path),
        "best": best,
        "checkpoints": [inspect_checkpoint(folder, quick, problems) for folder in found],
        "problems": problems,
    }


def inspect_checkpoint(path: Path, quick: bool, problems: list[str]) -> dict[str, Any]:
    """The entry of one checkpoint; what is wrong with it is added to `problems`."""
    entry: dict[str, Any] = {"name": path.resolve().name, "intact": None}
    if not quick:
        sys.stderr.write(f"verifying {path}\n")
        try:
            verify(path)
            entry["intact"] = True
        except AccelGPTError as error:
            problems.append(str(error))
            entry["intact"] = False
    try:
        return entry | facts(path)
    except (AccelGPTError, KeyError, TypeError, ValueError, AttributeError) as error:
        if entry["intact"] is not False:
            problems.append(f"checkpoint {path} cannot be read: {error}")
        return entry | {"intact": False}


def facts(path: Path) -> dict[str, Any]:
    """What a checkpoint says of itself."""
    state = read_evaluated(path)
    config, vocab_size = read_shape(path)
    try:
        kind = load_tokenizer(path).kind
    except AccelGPTError:  # gpt2's file may not be on this machine
        kind = None
    return {
        "step": state.step,
        "tokens": state.tokens,
        "seconds": state.seconds,
        "train_loss": state.train_loss,
        "val_loss": state.val_loss,
        "best_val_loss": state.best_val_loss,
        "best_step": state.best_step,
        "world_size": state.world_size,
        "parameters": parameter_counts(config, vocab_size),
        "model": asdict(config),
        "vocab_size": vocab_size,
        "data": {
            "train": state.config.get("data.train") or None,
            "fingerprint": state.data_fingerprint,
        },
        "tokenizer": {"kind": kind, "fingerprint": state.tokenizer_fingerprint},
        "changed": changed_keys(state.config),
        "versions": state.versions,
    }


def run_lines(report: dict[str, Any]) -> list[str]:
    """The report of `inspect_run` for people; model, data and config are those of the newest."""
    losses = ["train loss", "val loss", "best val loss"]
    rows = [["checkpoint", "state", "step", "tokens", "seconds", *losses, "at step", ""]]
    for entry in report["checkpoints"]:
        row = [entry["name"], STATES[entry["intact"]], *[""] * 8]
        if "step" in entry:
            row[2:5] = [f"{entry[key]:,.0f}" for key in ("step", "tokens", "seconds")]
            row[5:8] = [loss(entry[key]) for key in ("train_loss", "val_loss", "best_val_loss")]
            row[8:] = [str(entry["best_step"]), "<- best" * (entry["name"] == report["best"])]
        rows.append(row)
    lines = [report["path"], *table(rows, "<0", "<0", *[">0"] * 7, "<0").splitlines()]
    newest = next((entry for entry in reversed(report["checkpoints"]) if "step" in entry), None)
    return lines + (newest_lines(newest) if newest else [])


def newest_lines(entry: dict[str, Any]) -> list[str]:
    """Model, data, tokenizer, config and versions of a checkpoint."""
    model, data, tokenizer = entry["model"], entry["data"], entry["tokenizer"]
    changes = [f"{key} {json.dumps(value)}" for key, value in sorted(entry["changed"].items())]
    versions = ", ".join(f"{name} {version}" for name, version in entry["versions"].items())
    return [
        f"model      {model['preset']}, {entry['parameters']['total']:,} parameters: "
        f"{model['n_layer']} layers, {model['n_head']} heads, {model['n_embd']} channels, "
        f"block size {model['block_size']}, vocabulary {entry['vocab_size']:,}",
        f"data       {data['train']}, fingerprint {data['fingerprint'][:12]}",
        f"tokenizer  {tokenizer['kind'] or 'unknown'}, fingerprint {tokenizer['fingerprint'][:12]}",
        *(f"{'' if i else 'config':<11}{line}" for i, line in enumerate(changes)),
        f"versions   {versions or 'unknown'}",
    ]


def loss(value: float | None) -> str:
    """A loss, in nats per token; `unknown` for None."""
    return "unknown" if value is None else f"{value:.4f}"
