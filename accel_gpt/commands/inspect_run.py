"""Report what a run or a checkpoint holds, and whether it is intact. Changes nothing there.

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

    Raises `UserError` if it holds no checkpoint.
    """
    kind = "run"
    best: str | None = None
    problems: list[str] = []
    if is_checkpoint(path) or not (path / "checkpoints").is_dir():
        kind = "checkpoint"
        folders = [path]
    else:
        run = RunFolder(path)
        folders = list(run.checkpoints.values())
        if not folders:
            find_checkpoint(path)  # raises
        if run.best.isdecimal():
            best = step_name(int(run.best))
            if best not in [folder.name for folder in folders]:
                problems.append(f"the best checkpoint, {best}, is not there")
    checkpoints = [inspect_checkpoint(folder, quick, problems) for folder in folders]
    return {
        "kind": kind,
        "path": str(path),
        "best": best,
        "checkpoints": checkpoints,
        "problems": problems,
    }


def inspect_checkpoint(path: Path, quick: bool, problems: list[str]) -> dict[str, Any]:
    """Return the entry of one checkpoint; adds what is wrong with it to `problems`."""
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
        return entry | read_facts(path)
    except (AccelGPTError, KeyError, TypeError, ValueError, AttributeError) as error:
        if entry["intact"] is not False:
            problems.append(f"checkpoint {path} cannot be read: {error}")
        return entry | {"intact": False}


def read_facts(path: Path) -> dict[str, Any]:
    """Read what a checkpoint says of itself."""
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
    """Format the report of `inspect_run` for people, with model, data and config of the newest."""
    losses = ["train loss", "val loss", "best val loss"]
    rows = [["checkpoint", "state", "step", "tokens", "seconds", *losses, "at step", ""]]
    newest: list[str] = []
    for entry in report["checkpoints"]:
        if "step" not in entry:  # its files cannot be read
            rows.append([entry["name"], STATES[entry["intact"]], *[""] * 8])
            continue
        newest = newest_lines(entry)
        rows.append(
            [
                entry["name"],
                STATES[entry["intact"]],
                f"{entry['step']:,}",
                f"{entry['tokens']:,}",
                f"{entry['seconds']:,.0f}",
                loss_text(entry["train_loss"]),
                loss_text(entry["val_loss"]),
                loss_text(entry["best_val_loss"]),
                str(entry["best_step"]),
                "<- best" if entry["name"] == report["best"] else "",
            ]
        )
    lines = table(rows, "<0", "<0", *[">0"] * 7, "<0").splitlines()
    return [report["path"], *lines, *newest]


def newest_lines(entry: dict[str, Any]) -> list[str]:
    """Describe model, data, tokenizer, config and versions of a checkpoint."""
    model = entry["model"]
    data = entry["data"]
    tokenizer = entry["tokenizer"]
    versions = ", ".join(f"{name} {version}" for name, version in entry["versions"].items())
    config: list[str] = []
    for key, value in sorted(entry["changed"].items()):
        title = "" if config else "config"
        config.append(f"{title:<11}{key} {json.dumps(value)}")
    return [
        f"model      {model['preset']}, {entry['parameters']['total']:,} parameters: "
        f"{model['n_layer']} layers, {model['n_head']} heads, {model['n_embd']} channels, "
        f"block size {model['block_size']}, vocabulary {entry['vocab_size']:,}",
        f"data       {data['train']}, fingerprint {data['fingerprint'][:12]}",
        f"tokenizer  {tokenizer['kind'] or 'unknown'}, fingerprint {tokenizer['fingerprint'][:12]}",
        *config,
        f"versions   {versions or 'unknown'}",
    ]


def loss_text(value: float | None) -> str:
    """Format a loss, in nats per token; `unknown` for None."""
    return "unknown" if value is None else f"{value:.4f}"
