"""`accel-gpt inspect PATH`: verify data, a run or a checkpoint. Changes nothing there.

With --json it prints one object; null means unknown. For data of any project, local or at a URL:

    kind "data", path, problems [one sentence each]
    tokenizer {kind, fingerprint}, vocab_size, eot_id, dtype (of the stored ids)
    prepared {...}             how it was made, as dataset.json says
    splits {name: {fingerprint, shards, tokens, documents, bytes, bytes_per_token,
        windows [decoded text], read}}
    read                       result of reading every shard; null with --quick:
        {tokens, documents (end-of-text tokens), bytes, bytes_per_token, largest_id,
         sha256 {equal, different, unknown} (shards), file_bytes, seconds}

For a run or a checkpoint:

    kind "run" or "checkpoint", path, problems [one sentence each]
    best                       name of the run's best checkpoint
    checkpoints [{name, intact (null: not verified, with --quick), step, tokens, seconds,
        train_loss, val_loss, best_val_loss, best_step, world_size, parameters {part: count, total,
        total_unpadded}, model {the fields of ModelConfig}, vocab_size, data {train, fingerprint},
        tokenizer {kind, fingerprint}, changed {key of the config: value that is not the default},
        versions {python, package: version, commit}}], by step; an unreadable checkpoint has only
        name and intact
"""

import json
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from accel_gpt.commands.options import InspectCommand
from accel_gpt.config.data import DataConfig
from accel_gpt.config.parse import changed_keys
from accel_gpt.config.plan import plural
from accel_gpt.console import table, write_out
from accel_gpt.cost.flops import parameter_counts
from accel_gpt.data.index import DATA_MARKS, INDEX, read_index
from accel_gpt.data.remote import is_url
from accel_gpt.data.shards import NoSplit, Split
from accel_gpt.data.sources import open_data, open_folder
from accel_gpt.data.tokenizer import Tokenizer, load_tokenizer
from accel_gpt.errors import AccelGPTError, CheckpointError, DataError, UserError
from accel_gpt.files import describe_path, nearest_folder, sha256, strict_json
from accel_gpt.training.checkpoint import (
    find_checkpoint,
    is_checkpoint,
    read_evaluated,
    read_shape,
    verify,
)
from accel_gpt.training.display import Progress
from accel_gpt.training.run_folder import RUN_MARKS, RunFolder, step_name

MARKS = ("run.json", "manifest.json", "trainer_state.json")  # files of a run or a checkpoint
KEPT_SHARDS = 2  # remote shards that are kept: the current one and the next
COUNTED_TOKENS = 1 << 20  # tokens counted at once
STATES = MappingProxyType({True: "intact", False: "DAMAGED", None: "not verified"})


def run(options: InspectCommand) -> int:
    """Print a report, then its problems on stderr; 0 if there are none."""
    if is_run(Path(options.path)):
        report = inspect_run(Path(options.path), options.quick)
        lines = run_lines(report)
        code = CheckpointError.exit_code
    else:
        report = inspect_data(
            path=options.path,
            data=DataConfig(tokenizer=options.tokenizer),
            quick=options.quick,
            windows=options.windows,
            block_size=options.block_size,
        )
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


def inspect_data(
    path: str, data: DataConfig, quick: bool, windows: int, block_size: int
) -> dict[str, Any]:
    """Return the report on the data at `path`, see the module; `quick` reads no shard.

    Decodes the first `windows` sequences of `block_size` tokens of each split. Raises `UserError`
    if the path does not exist or its tokenizer is unknown, `DataError` if no split can be opened.
    `problems` lists all other problems.
    """
    expected = "give a data folder or its URL, or the folder of a run or of a checkpoint"
    if Path(path).is_file():
        expected += f"; to make a data folder of a text, run accel-gpt prepare {shlex.quote(path)}"
    if not is_url(path) and not Path(path).is_dir():
        near = None if Path(path).exists() else nearest_folder(path, (*RUN_MARKS, *DATA_MARKS))
        advice = f"did you mean {near}?" if near else expected
        raise UserError(f"{path} {describe_path(path)}; {advice}")
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
    splits = {split.name: describe_split(split) for split, _ in opened}
    if not quick:
        size = sum(split.tokens * split.dtype.itemsize for split, _ in opened)
        with Progress("reading", "bytes", total=size) as progress:
            for split, tokenizer in opened:
                found, wrong = read_split(split, tokenizer, progress)
                problems += wrong
                splits[split.name]["read"] = found
                if not wrong:
                    texts = first_texts(split, tokenizer, windows, block_size)
                    splits[split.name]["windows"] = texts
    if folder.remote:
        folder.remote.close()
    first = opened[0][0]
    ours = (first.folder / INDEX).exists()
    return {
        "kind": "data",
        "path": path,
        "tokenizer": {"kind": first.tokenizer_kind, "fingerprint": first.tokenizer_fingerprint},
        "vocab_size": first.vocab_size,
        "eot_id": first.eot_id,
        "dtype": first.dtype.name,
        "prepared": read_index(first.folder).prepared if ours else None,
        "splits": splits,
        "problems": problems,
    }


def describe_split(split: Split) -> dict[str, Any]:
    """Describe a split without reading its shards."""
    utf8_bytes = total([shard.bytes for shard in split.shards])
    return {
        "fingerprint": split.fingerprint,
        "shards": len(split.shards),
        "tokens": split.tokens,
        "documents": total([shard.documents for shard in split.shards]),
        "bytes": utf8_bytes,
        "bytes_per_token": ratio(utf8_bytes, split.tokens),
        "windows": [],
        "read": None,
    }


def total(values: Sequence[int | None]) -> int | None:
    """Return the sum of `values`; None if a value is unknown."""
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def ratio(part: int | None, whole: int) -> float | None:
    """Return `part / whole`; None if it is unknown."""
    if part is None or not whole:
        return None
    return part / whole


def first_texts(split: Split, tokenizer: Tokenizer, windows: int, block_size: int) -> list[str]:
    """Decode the first sequences of a split."""
    tokens = split.read(0, 0, min(windows * block_size, split.shards[0].tokens))
    texts = []
    for start in range(0, len(tokens), block_size):
        texts.append(tokenizer.decode(tokens[start : start + block_size].tolist()))
    return texts


def read_split(
    split: Split, tokenizer: Tokenizer, progress: Progress
) -> tuple[dict[str, Any], list[str]]:
    """Read every shard once; return the totals and a list of problems."""
    start = time.monotonic()
    problems: list[str] = []
    counts = np.zeros(
        split.vocab_size + 1, np.int64
    )  # by token id; the last counts ids outside the vocabulary
    hashes = {"equal": 0, "different": 0, "unknown": 0}
    tokens = 0
    largest = -1
    for number, shard in enumerate(split.shards):
        path = split.path(number)
        try:
            largest_here = count_tokens(split, number, counts, progress)
            verdict = "unknown"
            if shard.sha256 is not None:
                verdict = "equal" if sha256(path) == shard.sha256 else "different"
        except AccelGPTError as error:
            problems.append(str(error))
            continue
        tokens += shard.tokens
        largest = max(largest, largest_here)
        hashes[verdict] += 1
        if verdict == "different":
            problems.append(
                f"shard {path} is damaged: its SHA-256 differs from the index; restore it, or "
                "prepare the data again"
            )
        if largest_here >= split.vocab_size:
            problems.append(
                f"shard {path} holds token {largest_here}, expected less than vocab_size "
                f"{split.vocab_size}; it is damaged, or was made with another tokenizer"
            )
    documents = None
    if split.eot_id is not None:
        documents = int(counts[split.eot_id])
    expected = total([shard.documents for shard in split.shards])
    if documents is not None and expected is not None and documents != expected and not problems:
        problems.append(
            f"the {split.name} split of {split.folder} has "
            f"{plural(documents, 'end-of-text token')}, but its index says "
            f"{plural(expected, 'document')}; prepare the data again"
        )
    utf8_bytes = None
    if tokenizer.bytes_add_up:
        sizes = tokenizer.token_bytes[: split.vocab_size]
        utf8_bytes = int(counts[: len(sizes)] @ sizes)
    found = {
        "tokens": tokens,
        "documents": documents,
        "bytes": utf8_bytes,
        "bytes_per_token": ratio(utf8_bytes, tokens),
        "largest_id": largest if tokens else None,
        "sha256": hashes,
        "file_bytes": tokens * split.dtype.itemsize,
        "seconds": time.monotonic() - start,
    }
    return found, problems


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
    rows = [["split", "shards", "tokens", "documents", "bytes", "bytes/token", "fingerprint"]]
    for name, split in report["splits"].items():
        row = [name]
        for key in ("shards", "tokens", "documents", "bytes", "bytes_per_token"):
            row.append(number_text(split[key]))
        rows.append([*row, split["fingerprint"][:12]])
    lines = [
        report["path"],
        f"tokenizer   {tokenizer['kind']}, {report['vocab_size']:,} tokens, end-of-text "
        f"{number_text(report['eot_id'])}, fingerprint {tokenizer['fingerprint'][:12]}",
        f"stored as   {report['dtype']}",
        f"prepared    {prepared_text(report['prepared'])}",
        *table(rows, "<10", *[">0"] * 5, "<0").splitlines(),
    ]
    for name, split in report["splits"].items():
        for number, text in enumerate(split["windows"], start=1):
            lines.append(f"{f'{name} {number}':<12}{text!r}")
        if split["read"]:
            lines.append(f"{name} read: {read_text(split['read'])}")
    return lines


def prepared_text(prepared: object) -> str:
    """Describe how the data was prepared, from dataset.json."""
    if not isinstance(prepared, Mapping):
        return "unknown"
    words = [f"{key} {value}" for key, value in prepared.items() if value not in (None, "")]
    return ", ".join(words) or "unknown"


def read_text(read: Mapping[str, Any]) -> str:
    """Format the result of reading the shards of a split."""
    hashes = ", ".join(f"{count} {what}" for what, count in read["sha256"].items() if count)
    megabytes = read["file_bytes"] / 1e6
    speed = megabytes / max(read["seconds"], 1e-9)
    return (
        f"{read['tokens']:,} tokens, {number_text(read['documents'])} end-of-text, "
        f"{number_text(read['bytes'])} bytes, largest id {number_text(read['largest_id'])}; "
        f"SHA-256 of shards: {hashes or 'none'}; {megabytes:.1f} MB at {speed:,.0f} MB/s"
    )


def number_text(value: float | None) -> str:
    """Format a number with separators; `unknown` for None."""
    if value is None:
        return "unknown"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.3f}"


# --------------------------------------------------------------------------- runs and checkpoints


def inspect_run(path: Path, quick: bool) -> dict[str, Any]:
    """Return the report on the run or checkpoint at `path`, see the module; `quick` hashes no file.

    Raises `UserError` if it holds no checkpoint.
    """
    kind = "run"
    best: str | None = None
    problems: list[str] = []
    if is_checkpoint(path) or (path / "trainer_state.json").exists():
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
                problems.append(f"the best checkpoint, {best}, is missing")
    checkpoints = [inspect_checkpoint(folder, quick, problems) for folder in folders]
    return {
        "kind": kind,
        "path": str(path),
        "best": best,
        "checkpoints": checkpoints,
        "problems": problems,
    }


def inspect_checkpoint(path: Path, quick: bool, problems: list[str]) -> dict[str, Any]:
    """Return the entry of one checkpoint; append its problems to `problems`."""
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
    """Read the state, model, data and versions of a checkpoint."""
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
    """Format the report of `inspect_run` for people, with details of the newest checkpoint."""
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
        f"{plural(model['n_layer'], 'layer')}, {plural(model['n_head'], 'head')}, "
        f"{model['n_embd']} channels, block size {model['block_size']}, "
        f"vocabulary {entry['vocab_size']:,}",
        f"data       {data['train']}, fingerprint {data['fingerprint'][:12]}",
        f"tokenizer  {tokenizer['kind'] or 'unknown'}, fingerprint {tokenizer['fingerprint'][:12]}",
        *config,
        f"versions   {versions or 'unknown'}",
    ]


def loss_text(value: float | None) -> str:
    """Format a loss, in nats per token; `unknown` for None."""
    return "unknown" if value is None else f"{value:.4f}"
