"""What a run or a checkpoint holds, and whether it is intact. Changes nothing there.

`inspect_run` gives the object that `accel-gpt inspect PLACE --json` prints; null: not known.

    kind "run" or "checkpoint", place, problems [one sentence each]
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
from typing import Any

from accel_gpt.commands.inspect_report import printable
from accel_gpt.config.changes import changed
from accel_gpt.cost.flops import parameter_counts
from accel_gpt.data.tokenizer import load_tokenizer
from accel_gpt.errors import UserError
from accel_gpt.training.checkpoint import (
    find_checkpoint,
    is_checkpoint,
    read_shape,
    read_state,
    verify,
)
from accel_gpt.training.run_folder import checkpoint_steps, step_name
from accel_gpt.training.state import TrainState


def inspect_run(place: str, quick: bool) -> dict[str, Any]:
    """The report on the run or checkpoint at `place`, as the module tells; `quick`: not hashed.

    Raises `UserError` when it holds no checkpoint.
    """
    path, root = Path(place), Path(place) / "checkpoints"
    best = None
    if root.is_dir() and not is_checkpoint(path):
        found = [root / step_name(step) for step in checkpoint_steps(root)]
        if not found:
            find_checkpoint(path)  # raises
        if (path / "best").is_file():
            best = find_checkpoint(path, "best").name
    else:
        found = [path]
    problems: list[str] = []
    return {
        "kind": "run" if found != [path] else "checkpoint",
        "place": place,
        "best": best,
        "checkpoints": [inspect_checkpoint(one, quick, problems) for one in found],
        "problems": problems,
    }


def inspect_checkpoint(path: Path, quick: bool, problems: list[str]) -> dict[str, Any]:
    """The entry of one checkpoint; what is wrong with it is added to `problems`."""
    intact = None
    if not quick:
        sys.stderr.write(f"verifying {path}\n")
        try:
            verify(path)
            intact = True
        except UserError as error:
            problems.append(str(error))
            intact = False
    entry: dict[str, Any] = {"name": path.resolve().name, "intact": intact}
    try:
        return entry | facts(path)
    except (UserError, KeyError, TypeError, ValueError, AttributeError) as error:
        if intact is not False:
            problems.append(f"checkpoint {path} cannot be read: {error}")
            entry["intact"] = False
        return entry


def trained_on(state: TrainState) -> Any:
    """`data.train` as the config gave it; of streamed text the data set or path."""
    keys = ("data.train", "data.train.dataset", "data.train.path")
    return next((state.config[key] for key in keys if state.config.get(key)), None)


def facts(path: Path) -> dict[str, Any]:
    """What a checkpoint says of itself."""
    state, (config, vocab_size) = read_state(path), read_shape(path)
    try:
        kind = load_tokenizer(path).kind
    except UserError:  # gpt2's file may not be at hand
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
        "data": {"train": trained_on(state), "fingerprint": state.data_fingerprint},
        "tokenizer": {"kind": kind, "fingerprint": state.tokenizer_fingerprint},
        "changed": changed(state.config),
        "versions": state.versions,
    }


def run_text(report: dict[str, Any]) -> str:
    """The report of `inspect_run` for people; the model and data are those of the newest."""
    lines = [report["place"]]
    readable = [entry for entry in report["checkpoints"] if "step" in entry]
    for entry in report["checkpoints"]:
        state = {True: "intact", False: "DAMAGED", None: "not verified"}[entry["intact"]]
        line = f"{entry['name']}  {state:<12}"
        if entry in readable:
            line += (
                f"  step {entry['step']:,}, {entry['tokens']:,} tokens, {entry['seconds']:,.0f} s, "
                f"train loss {loss(entry['train_loss'])}, val loss {loss(entry['val_loss'])}, best "
                f"{loss(entry['best_val_loss'])} at step "
                f"{entry['best_step']}{'  <- best' if entry['name'] == report['best'] else ''}"
            )
        lines.append(line)
    if readable:
        lines += last_lines(readable[-1])
    return "".join(f"{printable(line)}\n" for line in lines)


def last_lines(entry: dict[str, Any]) -> list[str]:
    """Model, data, tokenizer, config and versions of a checkpoint."""
    model, data, tokenizer = entry["model"], entry["data"], entry["tokenizer"]
    changes = [f"{key} {json.dumps(value)}" for key, value in sorted(entry["changed"].items())]
    versions = ", ".join(f"{name} {version}" for name, version in entry["versions"].items())
    return [
        f"model      {model['preset']}, {entry['parameters']['total']:,} parameters: "
        f"{model['n_layer']} layers, {model['n_head']} heads, {model['n_embd']} channels, "
        f"{model['block_size']} positions, vocabulary {entry['vocab_size']:,}",
        f"data       {data['train']}, fingerprint {data['fingerprint'][:12]}",
        f"tokenizer  {tokenizer['kind'] or 'unknown'}, fingerprint {tokenizer['fingerprint'][:12]}",
        *(f"{'' if i else 'config':<11}{line}" for i, line in enumerate(changes)),
        f"versions   {versions or 'unknown'}",
    ]


def loss(value: float | None) -> str:
    """A loss, in nats per token, or that there is none."""
    return "unknown" if value is None else f"{value:.4f}"
