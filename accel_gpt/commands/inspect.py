"""`accel-gpt inspect PATH`: verify data, a run or a checkpoint. Changes nothing there.

With --json it prints the report as one JSON object; null means unknown.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from accel_gpt.commands.options import InspectCommand, errors_name_options
from accel_gpt.config.data import DataConfig
from accel_gpt.config.plan import plural
from accel_gpt.config.values import changed_keys
from accel_gpt.console import table, write_out
from accel_gpt.cost.flops import parameter_counts
from accel_gpt.damage import Expected, find_damage
from accel_gpt.data.index import DATA_MARKS, INDEX, read_index
from accel_gpt.data.remote import is_url
from accel_gpt.data.shards import NoSplit, Split, data_error
from accel_gpt.data.sources import open_data, open_folder
from accel_gpt.data.tokenizer import Tokenizer
from accel_gpt.errors import AccelGPTError, CheckpointError, DataError, UserError
from accel_gpt.files import describe_path, did_you_mean_folder, strict_json
from accel_gpt.runs.checkpoint import (
    find_checkpoint,
    is_checkpoint,
    read_evaluated,
    read_shape,
    verify_checkpoint,
)
from accel_gpt.runs.folder import RUN_MARKS, RunFolder, step_name
from accel_gpt.training.display import Progress

MARKS = ("run.json", "manifest.json", "trainer_state.json")  # files of a run or a checkpoint
KEPT_SHARDS = 2  # remote shards that are kept: the current one and the next
COUNTED_TOKENS = 1 << 20  # tokens counted at once
SHOWN_TOKENS = 64  # of the beginning of a split
STATES = MappingProxyType({True: "intact", False: "DAMAGED", None: "not verified"})


def run(options: InspectCommand) -> int:
    """Print a report, then its problems on stderr; 0 if there are none."""
    path = Path(options.path)
    if is_run(path):
        report = inspect_run(path, options.quick)
        lines = run_lines(report)
        code = CheckpointError.exit_code
    else:
        data = DataConfig(tokenizer=options.tokenizer, dtype=options.dtype)
        with errors_name_options("data.tokenizer", "data.dtype"):
            report = inspect_data(options.path, data, options.quick)
        lines = data_lines(report)
        code = DataError.exit_code
    if options.json:
        lines = [strict_json(report, indent=1)]
    write_out("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()
    for problem in report["problems"]:
        sys.stderr.write(f"error: {problem}\n")
    return code if report["problems"] else 0


def is_run(path: Path) -> bool:
    """Return whether a folder is a run or a checkpoint, and not a data folder."""
    marked = any((path / mark).exists() for mark in MARKS)
    return (marked or bool(RunFolder(path).checkpoints)) and not (path / INDEX).exists()


# --------------------------------------------------------------------------- data


def inspect_data(path: str, data: DataConfig, quick: bool) -> dict[str, Any]:
    """Return the report on the data at `path`; `quick` reads no shard.

    Raises `UserError` if the path does not exist or its tokenizer is unknown, `DataError` if no
    split can be opened. `problems` lists all other problems.
    """
    if not is_url(path) and not Path(path).is_dir():
        raise no_data(path)
    folder = open_folder(path, data)
    opened: list[tuple[Split, Tokenizer]] = []
    missing: list[str] = []
    problems: list[str] = []
    for name in ("train", "val", "test"):
        try:
            opened.append(open_data(path, name, data, folder))
        except NoSplit as error:
            missing.append(str(error))
        except DataError as error:
            problems.append(str(error))
    if not opened:
        raise DataError("; ".join(dict.fromkeys(problems or missing[:1])))
    splits: dict[str, dict[str, Any]] = {}
    size = sum(split.tokens * split.dtype.itemsize for split, _ in opened)
    with Progress("reading", "bytes", total=size) as progress:
        for split, tokenizer in opened:
            splits[split.name] = describe_split(split)
            if not quick:
                splits[split.name] |= read_split(split, tokenizer, progress, problems)
    if folder.remote:
        folder.remote.close()
    first = opened[0][0]
    ours = (first.folder / INDEX).exists()
    return {
        "path": path,
        "tokenizer": {"kind": first.tokenizer_kind, "fingerprint": first.tokenizer_fingerprint},
        "vocab_size": first.vocab_size,
        "eot_id": first.eot_id,
        "dtype": first.dtype.name,
        "prepared": read_index(first.folder).prepared if ours else None,
        "splits": splits,
        "problems": problems,
    }


def no_data(path: str) -> UserError:
    """Return the error for a path that is not a folder."""
    expected = "give a data folder or its URL, or the folder of a run or of a checkpoint"
    advice = did_you_mean_folder(path, (*RUN_MARKS, *DATA_MARKS), expected)
    return UserError(f"{path} {describe_path(path)}; {advice}")


def describe_split(split: Split) -> dict[str, Any]:
    """Describe a split without reading its shards."""
    return {
        "fingerprint": split.fingerprint,
        "shards": len(split.shards),
        "tokens": split.tokens,
        "documents": total([shard.documents for shard in split.shards]),
        "bytes": total([shard.bytes for shard in split.shards]),
    }


def total(values: Sequence[int | None]) -> int | None:
    """Return the sum of `values`; None if a value is unknown."""
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def read_split(
    split: Split, tokenizer: Tokenizer, progress: Progress, problems: list[str]
) -> dict[str, Any]:
    """Read every shard once; return what it holds, and append its problems to `problems`."""
    before = len(problems)
    # number of tokens by id; the last counts ids outside the vocabulary
    counts = np.zeros(split.vocab_size + 1, np.int64)
    hashed = 0
    largest = -1
    for number, shard in enumerate(split.shards):
        path = split.path(number)
        try:
            largest_here = count_tokens(split, number, counts, progress)
            damage = find_damage([Expected(path, digest=shard.sha256)])
        except AccelGPTError as error:
            problems.append(str(error))
            continue
        hashed += shard.sha256 is not None
        largest = max(largest, largest_here)
        if damage:
            problems.append(str(data_error(damage)))
        if largest_here >= split.vocab_size:
            problems.append(
                f"shard {path} holds token {largest_here}, expected less than vocab_size "
                f"{split.vocab_size}; it is damaged, or was made with another tokenizer"
            )
    ends = None if split.eot_id is None else int(counts[split.eot_id])
    expected = total([shard.documents for shard in split.shards])
    if len(problems) > before:
        return {"largest_id": largest, "hashed_shards": hashed}
    if None not in (ends, expected) and ends != expected:
        problems.append(
            f"the {split.name} split of {split.folder} has {plural(ends or 0, 'end-of-text token')}"
            f", but its index says {plural(expected or 0, 'document')}; prepare the data again"
        )
    first = split.read(0, 0, min(SHOWN_TOKENS, split.shards[0].tokens))
    found = {"largest_id": largest, "hashed_shards": hashed, "documents": ends}
    if tokenizer.bytes_add_up:
        sizes = tokenizer.token_bytes[: split.vocab_size]
        found["bytes"] = int(counts[: len(sizes)] @ sizes)
    return found | {"begins": tokenizer.decode(first.tolist())}


def count_tokens(
    split: Split, number: int, counts: npt.NDArray[np.int64], progress: Progress
) -> int:
    """Add the tokens of a shard to `counts`, by id; return the largest id."""
    next_shards = range(number + 1, min(number + KEPT_SHARDS, len(split.shards)))
    split.prefetch([number], next_shards)
    length = split.shards[number].tokens
    largest = -1
    for first in range(0, length, COUNTED_TOKENS):
        ids = split.read(number, first, min(COUNTED_TOKENS, length - first)).astype(np.int64)
        largest = max(largest, int(ids.max()))
        counts += np.bincount(np.minimum(ids, split.vocab_size), minlength=len(counts))
        progress.advance(len(ids) * split.dtype.itemsize)
    return largest


def data_lines(report: Mapping[str, Any]) -> list[str]:
    """Format the report of `inspect_data` for people."""
    tokenizer = report["tokenizer"]
    prepared = report["prepared"] or {}
    words = [f"{key} {value}" for key, value in prepared.items() if value not in (None, "")]
    columns = ("shards", "tokens", "documents", "bytes", "largest_id", "hashed_shards")
    rows = [["split", *(column.replace("_", " ") for column in columns), "fingerprint"]]
    for name, split in report["splits"].items():
        numbers = [number_text(split.get(column)) for column in columns]
        rows.append([name, *numbers, split["fingerprint"][:12]])
    lines = [
        report["path"],
        f"tokenizer   {tokenizer['kind']}, {report['vocab_size']:,} tokens, end-of-text "
        f"{number_text(report['eot_id'])}, fingerprint {tokenizer['fingerprint'][:12]}",
        f"stored as   {report['dtype']}",
        f"prepared    {', '.join(words) or 'unknown'}",
        *table(rows, "<10", *[">0"] * len(columns), "<0").splitlines(),
    ]
    for name, split in report["splits"].items():
        if "begins" in split:
            lines.append(f"{f'{name} begins':<14}{split['begins']!r}")
    return lines


def number_text(value: int | None) -> str:
    """Format a number with separators; `unknown` for None."""
    return "unknown" if value is None else f"{value:,}"


# --------------------------------------------------------------------------- runs and checkpoints


def inspect_run(path: Path, quick: bool) -> dict[str, Any]:
    """Return the report on the run or checkpoint at `path`; `quick` hashes no file.

    Raises `UserError` if it holds no checkpoint.
    """
    best: str | None = None
    problems: list[str] = []
    folders = [path]
    if not (is_checkpoint(path) or (path / "trainer_state.json").exists()):
        run = RunFolder(path)
        folders = list(run.checkpoints.values())
        if not folders:
            find_checkpoint(path)  # raises
        if run.best.isdecimal():
            best = step_name(int(run.best))
            if best not in [folder.name for folder in folders]:
                problems.append(f"the best checkpoint, {best}, is missing")
    checkpoints = [inspect_checkpoint(folder, quick, problems) for folder in folders]
    return {"path": str(path), "best": best, "checkpoints": checkpoints, "problems": problems}


def inspect_checkpoint(path: Path, quick: bool, problems: list[str]) -> dict[str, Any]:
    """Return the entry of one checkpoint; append its problems to `problems`."""
    entry: dict[str, Any] = {"name": path.resolve().name, "intact": None}
    try:
        if not quick:
            sys.stderr.write(f"verifying {path}\n")
            verify_checkpoint(path)
            entry["intact"] = True
        state = read_evaluated(path)
        model, vocab_size = read_shape(path)
    except AccelGPTError as error:
        problems.append(str(error))
        return entry | {"intact": False}
    return entry | {
        "step": state.step,
        "tokens": state.tokens,
        "seconds": state.seconds,
        "train_loss": state.train_loss,
        "val_loss": state.val_loss,
        "world_size": state.world_size,
        "parameters": parameter_counts(model, vocab_size)["total"],
        "vocab_size": vocab_size,
        "data_fingerprint": state.data_fingerprint,
        "tokenizer_fingerprint": state.tokenizer_fingerprint,
        "changed": changed_keys(state.config),
        "versions": state.versions,
    }


def run_lines(report: Mapping[str, Any]) -> list[str]:
    """Format the report of `inspect_run` for people, with details of the newest checkpoint."""
    rows = [["checkpoint", "state", "step", "tokens", "seconds", "train loss", "val loss", ""]]
    newest: dict[str, Any] = {}
    for entry in report["checkpoints"]:
        state = STATES[entry["intact"]]
        if "step" not in entry:  # its files cannot be read
            rows.append([entry["name"], state, *[""] * 6])
            continue
        newest = entry
        numbers = [f"{entry['step']:,}", f"{entry['tokens']:,}", f"{entry['seconds']:,.0f}"]
        losses = [loss_text(entry["train_loss"]), loss_text(entry["val_loss"])]
        best = "<- best" if entry["name"] == report["best"] else ""
        rows.append([entry["name"], state, *numbers, *losses, best])
    lines = [report["path"], *table(rows, "<0", "<0", *[">0"] * 5, "<0").splitlines()]
    if not newest:
        return lines
    versions = ", ".join(f"{name} {version}" for name, version in newest["versions"].items())
    lines += [
        f"model      {newest['parameters']:,} parameters, vocabulary {newest['vocab_size']:,}",
        f"data       fingerprint {newest['data_fingerprint'][:12]}",
        f"tokenizer  fingerprint {newest['tokenizer_fingerprint'][:12]}",
        f"versions   {versions or 'unknown'}",
        "config",
    ]
    lines += [f"  {key} {json.dumps(value)}" for key, value in sorted(newest["changed"].items())]
    return lines


def loss_text(value: float | None) -> str:
    """Format a loss, in nats per token; `unknown` for None."""
    return "unknown" if value is None else f"{value:.4f}"
