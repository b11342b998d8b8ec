"""`accel-gpt inspect PATH`: verify data, a run or a checkpoint. Changes nothing there.

With --json it prints the report as one JSON object; null means unknown.
"""

from pathlib import Path
from typing import Any

from accel_gpt.commands.options import InspectCommand
from accel_gpt.commands.printing import write_report
from accel_gpt.config.data import DataConfig
from accel_gpt.config.plan import plural
from accel_gpt.console import write_err
from accel_gpt.damage import Expected, find_damage
from accel_gpt.data.shards import NoSplit, Split, data_error, token_beyond
from accel_gpt.data.sources import open_data, open_folder
from accel_gpt.data.tokenizer import Tokenizer
from accel_gpt.errors import AccelGPTError, CheckpointError, DataError
from accel_gpt.model.sizes import parameter_counts
from accel_gpt.runs.checkpoint import find_checkpoint, read_evaluated, read_shape, verify_checkpoint
from accel_gpt.runs.folder import RunFolder
from accel_gpt.training.display import Progress

MARKS = ("run.json", "checkpoints", "manifest.json")  # in the folder of a run or a checkpoint
COUNTED_TOKENS = 1 << 20  # tokens read at once
SHOWN_TOKENS = 64  # of the beginning of a split


def run(options: InspectCommand) -> int:
    """Print a report, then its problems on stderr; 0 if there are none."""
    path = Path(options.path)
    if any((path / mark).exists() for mark in MARKS):
        report = inspect_run(path)
        code = CheckpointError.exit_code
    else:
        report = inspect_data(options.path, options.data)
        code = DataError.exit_code
    write_report(report, options.json)
    for problem in report["problems"]:
        write_err(f"error: {problem}")
    return code if report["problems"] else 0


# --------------------------------------------------------------------------- data


def inspect_data(path: str, data: DataConfig) -> dict[str, Any]:
    """Return the report on the data at `path`.

    Raises `UserError` if the path does not exist or its tokenizer is unknown, `DataError` if there
    is no split. `problems` lists all other problems.
    """
    folder = open_folder(path, data)
    facts: dict[str, Any] = {"path": path}
    splits: dict[str, Any] = {}
    problems: list[str] = []
    missing: list[NoSplit] = []
    for name in ("train", "val", "test"):
        try:
            split, tokenizer = open_data(path, name, data, folder)
        except NoSplit as error:
            missing.append(error)
            continue
        except DataError as error:
            problems.append(str(error))
            continue
        facts |= {
            "tokenizer": split.tokenizer_kind,
            "vocab_size": split.vocab_size,
            "eot_id": split.eot_id,
            "dtype": split.dtype.name,
        }
        splits[name] = read_split(split, tokenizer, problems)
    if not splits and not problems:
        raise missing[0]
    if folder.remote:
        folder.remote.close()
    return {**facts, "splits": splits, "problems": problems}


def read_split(split: Split, tokenizer: Tokenizer, problems: list[str]) -> dict[str, Any]:
    """Read every shard once; return what it holds, and append its problems to `problems`."""
    before = len(problems)
    documents = 0
    size = split.tokens * split.dtype.itemsize
    with Progress(f"reading {split.name}", "bytes", total=size) as progress:
        for number in range(len(split.shards)):
            try:
                documents += count_documents(split, number, progress)
            except AccelGPTError as error:
                problems.append(str(error))
    found: dict[str, Any] = {"shards": len(split.shards), "tokens": split.tokens}
    if len(problems) > before:
        return found
    listed = [shard.documents for shard in split.shards if shard.documents is not None]
    if split.eot_id is not None:
        found["documents"] = documents
        if listed and documents != sum(listed):
            problems.append(
                f"the {split.name} split of {split.folder} has "
                f"{plural(documents, 'end-of-text token')}, but its index says "
                f"{plural(sum(listed), 'document')}; prepare the data again"
            )
    first = split.read(0, 0, min(SHOWN_TOKENS, split.shards[0].tokens))
    return found | {"begins": tokenizer.decode(first.tolist())}


def count_documents(split: Split, number: int, progress: Progress) -> int:
    """Return the number of end-of-text tokens in a shard.

    Raises `DataError` if the shard is damaged or holds a token beyond the vocabulary.
    """
    shard = split.shards[number]
    path = split.path(number)
    documents = 0
    split.prefetch([number], range(number + 1, min(number + 2, len(split.shards))))
    for first in range(0, shard.tokens, COUNTED_TOKENS):
        ids = split.read(number, first, min(COUNTED_TOKENS, shard.tokens - first))
        place = int(ids.argmax())
        if ids[place] >= split.vocab_size:
            raise token_beyond(path, int(ids[place]), first + place, split.vocab_size)
        if split.eot_id is not None:
            documents += int((ids == split.eot_id).sum())
        progress.advance(ids.nbytes)
    damage = find_damage([Expected(path, digest=shard.sha256)])
    if damage:
        raise data_error(damage)
    return documents


# --------------------------------------------------------------------------- runs and checkpoints


def inspect_run(path: Path) -> dict[str, Any]:
    """Return the report on the run or checkpoint at `path`.

    Raises `UserError` if it holds no checkpoint.
    """
    run = RunFolder(path)
    checkpoints: dict[str, Any] = {}
    problems: list[str] = []
    for folder in run.checkpoints.values() or [find_checkpoint(path)]:
        write_err(f"verifying {folder}")
        try:
            entry = inspect_checkpoint(folder)
        except AccelGPTError as error:
            problems.append(str(error))
            entry = {"state": "DAMAGED"}
        checkpoints[folder.resolve().name] = entry
    if run.best and run.best not in map(str, run.checkpoints):
        problems.append(f"the best checkpoint, of step {run.best}, is missing")
    return {"path": str(path), "best": run.best, "checkpoints": checkpoints, "problems": problems}


def inspect_checkpoint(path: Path) -> dict[str, Any]:
    """Return what an intact checkpoint holds; raises an `AccelGPTError` if it is damaged."""
    verify_checkpoint(path)
    state = read_evaluated(path)
    return {
        "state": "intact",
        "step": state.step,
        "tokens": state.tokens,
        "seconds": round(state.seconds),
        "train_loss": state.train_loss,
        "val_loss": state.val_loss,
        "parameters": parameter_counts(*read_shape(path))["total"],
    }
