"""`accel-gpt inspect PATH`: verify data, a run or a checkpoint. Changes nothing there.

With --json it prints the report as one JSON object; null means unknown.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from accel_gpt.commands.options import InspectCommand
from accel_gpt.config.data import DataConfig
from accel_gpt.config.plan import plural
from accel_gpt.console import table, write_out
from accel_gpt.damage import Expected, find_damage
from accel_gpt.data.index import INDEX, read_index
from accel_gpt.data.remote import is_url
from accel_gpt.data.shards import NoSplit, Split, data_error
from accel_gpt.data.sources import open_data, open_folder
from accel_gpt.data.tokenizer import Tokenizer
from accel_gpt.errors import AccelGPTError, CheckpointError, DataError, UserError
from accel_gpt.files import strict_json
from accel_gpt.model.sizes import parameter_counts
from accel_gpt.runs.checkpoint import (
    find_checkpoint,
    is_checkpoint,
    read_evaluated,
    read_shape,
    verify_checkpoint,
)
from accel_gpt.runs.folder import RunFolder, step_name
from accel_gpt.training.display import Progress

MARKS = ("run.json", "manifest.json", "trainer_state.json")  # files of a run or a checkpoint
KEPT_SHARDS = 2  # remote shards that are kept: the current one and the next
COUNTED_TOKENS = 1 << 20  # tokens counted at once
SHOWN_TOKENS = 64  # of the beginning of a split
SPLIT_COLUMNS = ("shards", "tokens", "documents", "bytes", "largest_id", "begins")
CHECKPOINT_COLUMNS: Sequence[str] = (
    "state",
    "step",
    "tokens",
    "seconds",
    "train_loss",
    "val_loss",
    "parameters",
)


def run(options: InspectCommand) -> int:
    """Print a report, then its problems on stderr; 0 if there are none."""
    path = Path(options.path)
    columns: Sequence[str]
    if is_run(path):
        report = inspect_run(path)
        listed = report["checkpoints"]
        columns = CHECKPOINT_COLUMNS
        code = CheckpointError.exit_code
    else:
        report = inspect_data(options.path, options.data)
        listed = report["splits"]
        columns = SPLIT_COLUMNS
        code = DataError.exit_code
    if options.json:
        write_out(f"{strict_json(report, indent=1)}\n")
    else:
        sections = ("splits", "checkpoints", "problems")
        facts = [[key, text_of(value)] for key, value in report.items() if key not in sections]
        rows = [[name, *(text_of(one.get(key)) for key in columns)] for name, one in listed.items()]
        write_out(table(facts, "<", "<"))
        write_out(table([["", *columns], *rows], "<", *[">"] * len(columns)))
    sys.stdout.flush()
    for problem in report["problems"]:
        sys.stderr.write(f"error: {problem}\n")
    return code if report["problems"] else 0


def text_of(value: Any) -> str:
    """Format a value of a report in one line: `unknown` for None."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {text_of(one)}" for key, one in value.items() if one is not None)
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.4f}"
    text = "unknown" if value is None else str(value)
    return text if text.isprintable() else repr(text)


def is_run(path: Path) -> bool:
    """Return whether a folder is a run or a checkpoint, and not a data folder."""
    marked = any((path / mark).exists() for mark in MARKS)
    return (marked or bool(RunFolder(path).checkpoints)) and not (path / INDEX).exists()


# --------------------------------------------------------------------------- data


def inspect_data(path: str, data: DataConfig) -> dict[str, Any]:
    """Return the report on the data at `path`.

    Raises `UserError` if the path does not exist or its tokenizer is unknown, `DataError` if no
    split can be opened. `problems` lists all other problems.
    """
    if not is_url(path) and not Path(path).is_dir():
        raise UserError(f"{path} is not a folder; expected data or its URL, a run or a checkpoint")
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
    size = sum(split.tokens * split.dtype.itemsize for split, _ in opened)
    with Progress("reading", "bytes", total=size) as progress:
        splits = {
            split.name: read_split(split, tokenizer, progress, problems)
            for split, tokenizer in opened
        }
    if folder.remote:
        folder.remote.close()
    first = opened[0][0]
    return {
        "path": path,
        "tokenizer": first.tokenizer_kind,
        "tokenizer_fingerprint": first.tokenizer_fingerprint,
        "vocab_size": first.vocab_size,
        "eot_id": first.eot_id,
        "dtype": first.dtype.name,
        "prepared": read_index(first.folder).prepared if (first.folder / INDEX).exists() else None,
        "splits": splits,
        "problems": problems,
    }


def read_split(
    split: Split, tokenizer: Tokenizer, progress: Progress, problems: list[str]
) -> dict[str, Any]:
    """Read every shard once; return what it holds, and append its problems to `problems`."""
    # number of tokens by id; the last counts ids outside the vocabulary
    counts = np.zeros(split.vocab_size + 1, np.int64)
    before = len(problems)
    largest = -1
    for number, shard in enumerate(split.shards):
        path = split.path(number)
        try:
            largest_here = count_tokens(split, number, counts, progress)
            damage = find_damage([Expected(path, digest=shard.sha256)])
        except AccelGPTError as error:
            problems.append(str(error))
            continue
        largest = max(largest, largest_here)
        if damage:
            problems.append(str(data_error(damage)))
        if largest_here >= split.vocab_size:
            problems.append(
                f"shard {path} holds token {largest_here}, expected less than vocab_size "
                f"{split.vocab_size}; it is damaged, or was made with another tokenizer"
            )
    documents = total([shard.documents for shard in split.shards])
    found = {
        "fingerprint": split.fingerprint,
        "shards": len(split.shards),
        "tokens": split.tokens,
        "documents": documents,
        "bytes": total([shard.bytes for shard in split.shards]),
        "largest_id": largest,
    }
    if len(problems) > before:
        return found
    if split.eot_id is not None:
        ends = int(counts[split.eot_id])
        found["documents"] = ends
        if documents not in (None, ends):
            problems.append(
                f"the {split.name} split of {split.folder} has "
                f"{plural(ends, 'end-of-text token')}, but its index says "
                f"{plural(documents or 0, 'document')}; prepare the data again"
            )
    if tokenizer.bytes_add_up:
        sizes = tokenizer.token_bytes[: split.vocab_size]
        found["bytes"] = int(counts[: len(sizes)] @ sizes)
    first = split.read(0, 0, min(SHOWN_TOKENS, split.shards[0].tokens))
    return found | {"begins": tokenizer.decode(first.tolist())}


def total(values: Sequence[int | None]) -> int | None:
    """Return the sum of `values`; None if a value is unknown."""
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


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


# --------------------------------------------------------------------------- runs and checkpoints


def inspect_run(path: Path) -> dict[str, Any]:
    """Return the report on the run or checkpoint at `path`.

    Raises `UserError` if it holds no checkpoint.
    """
    report: dict[str, Any] = {"path": str(path), "best": None, "checkpoints": {}, "problems": []}
    folders = [path]
    if not (is_checkpoint(path) or (path / "trainer_state.json").exists()):
        run = RunFolder(path)
        folders = list(run.checkpoints.values())
        if not folders:
            find_checkpoint(path)  # raises
        if run.best.isdecimal():
            best = step_name(int(run.best))
            report["best"] = best
            if best not in [folder.name for folder in folders]:
                report["problems"].append(f"the best checkpoint, {best}, is missing")
    for folder in folders:
        sys.stderr.write(f"verifying {folder}\n")
        try:
            entry = inspect_checkpoint(folder)
        except AccelGPTError as error:
            report["problems"].append(str(error))
            entry = {"state": "DAMAGED"}
        report["checkpoints"][folder.resolve().name] = entry
    return report


def inspect_checkpoint(path: Path) -> dict[str, Any]:
    """Return what an intact checkpoint holds; raises an `AccelGPTError` if it is damaged."""
    verify_checkpoint(path)
    state = read_evaluated(path)
    model, vocab_size = read_shape(path)
    return {
        "state": "intact",
        "step": state.step,
        "tokens": state.tokens,
        "seconds": round(state.seconds),
        "train_loss": state.train_loss,
        "val_loss": state.val_loss,
        "world_size": state.world_size,
        "parameters": parameter_counts(model, vocab_size)["total"],
        "vocab_size": vocab_size,
        "data_fingerprint": state.data_fingerprint,
        "tokenizer_fingerprint": state.tokenizer_fingerprint,
    }
