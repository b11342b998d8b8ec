"""What a data folder, of any project or behind a URL, holds, and whether it is whole.

`inspect_data` returns the object that `accel-gpt inspect PATH --json` prints; null: not known.

    kind "data", path, problems [one sentence each]
    tokenizer {kind, fingerprint}, vocab_size, eot_id, dtype (of the stored ids)
    prepared {...}             how it was made, as dataset.json says
    splits {name: {fingerprint, shards, tokens, documents, bytes, bytes_per_token,
        windows [decoded text], read}}
    read                       what reading every shard found; null with --quick:
        {tokens, documents (end-of-text tokens), bytes, bytes_per_token, largest_id,
         sha256 {equal, different, unknown} (shards), file_bytes, seconds}
"""

import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from accel_gpt.config.data import DataConfig
from accel_gpt.console import table
from accel_gpt.data.index import INDEX, read_index
from accel_gpt.data.shards import NoSplit, Split
from accel_gpt.data.sources import is_url, open_data
from accel_gpt.data.tokenizer import Tokenizer
from accel_gpt.errors import AccelGPTError, DataError, require
from accel_gpt.files import describe_path, sha256
from accel_gpt.prepare.progress import Progress

KEPT_SHARDS = 2  # shards behind a URL that are kept: the one being read and the next
COUNTED_TOKENS = 1 << 20  # at once


def inspect_data(
    path: str, data: DataConfig, quick: bool, windows: int, block_size: int
) -> dict[str, Any]:
    """Report on the data at `path`, see the module; `quick`: read no shard.

    The first `windows` sequences of `block_size` tokens of each split are decoded. Raises
    `UserError` when the path does not exist or its tokenizer is not known, `DataError` when no
    split can be opened; what else is wrong is listed in `problems`.
    """
    expected = "give a data folder or its URL, or the folder of a run or of a checkpoint"
    if Path(path).is_file():
        expected += f"; accel-gpt prepare {shlex.quote(path)} makes a data folder of a text"
    require(is_url(path) or Path(path).is_dir(), f"{path} {describe_path(path)}; {expected}")
    opened: list[tuple[Split, Tokenizer]] = []
    missing, problems = list[str](), list[str]()
    for name in ("train", "val", "test"):
        try:
            opened.append(open_data(path, name, data))
        except DataError as error:
            (missing if isinstance(error, NoSplit) else problems).append(str(error))
    if not opened:
        raise DataError("; ".join(dict.fromkeys(problems or missing[:1])))
    splits = {split.name: describe(split) for split, _ in opened}
    if not quick:
        size = sum(split.tokens * split.dtype.itemsize for split, _ in opened)
        with Progress("reading", size) as progress:
            for split, tokenizer in opened:
                found, wrong = read_split(split, tokenizer, progress)
                problems += wrong
                splits[split.name]["read"] = found
                if not wrong:
                    texts = first_texts(split, tokenizer, windows, block_size)
                    splits[split.name]["windows"] = texts
    for split, _ in opened:
        if split.remote:
            split.remote.close()
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


def describe(split: Split) -> dict[str, Any]:
    """What is known of a split without reading it."""
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
    """Their sum; None where one is not known."""
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def ratio(part: int | None, whole: int) -> float | None:
    """Their quotient; None where it is not known."""
    return None if part is None or not whole else part / whole


def first_texts(split: Split, tokenizer: Tokenizer, windows: int, block_size: int) -> list[str]:
    """The first sequences of a split as text."""
    tokens = split.read(0, 0, min(windows * block_size, split.shards[0].tokens))
    starts = range(0, len(tokens), block_size)
    return [tokenizer.decode(tokens[i : i + block_size].tolist()) for i in starts]


def read_split(
    split: Split, tokenizer: Tokenizer, progress: Progress
) -> tuple[dict[str, Any], list[str]]:
    """Read every shard once: what they hold, and what is wrong with them."""
    start, problems = time.monotonic(), []
    counts = np.zeros(split.vocab_size + 1, np.int64)  # of each token; the last: ids beyond
    hashes = {"equal": 0, "different": 0, "unknown": 0}
    largest, tokens = -1, 0
    for number, shard in enumerate(split.shards):
        split.prefetch([number], range(number + 1, min(number + KEPT_SHARDS, len(split.shards))))
        path, most = split.folder / shard.name, -1
        try:
            for first in range(0, shard.tokens, COUNTED_TOKENS):
                ids = split.read(number, first, min(COUNTED_TOKENS, shard.tokens - first))
                most = max(most, int(ids.max()))
                counts += np.bincount(np.minimum(ids, split.vocab_size), minlength=len(counts))
                progress.add(ids.nbytes)
            different = shard.sha256 is not None and sha256(path) != shard.sha256
        except AccelGPTError as error:
            problems.append(str(error))
            continue
        tokens, largest = tokens + shard.tokens, max(largest, most)
        hashes["different" if different else "equal" if shard.sha256 else "unknown"] += 1
        if different:
            problems.append(
                f"shard {path} is damaged: its SHA-256 is not that of the index; restore it, or "
                "prepare the data again"
            )
        if most >= split.vocab_size:
            problems.append(
                f"shard {path} holds token {most}, expected less than vocab_size "
                f"{split.vocab_size}; it is damaged, or was made with another tokenizer"
            )
    documents = None if split.eot_id is None else int(counts[split.eot_id])
    expected = total([shard.documents for shard in split.shards])
    if not problems and None not in (expected, documents) and expected != documents:
        problems.append(
            f"the {split.name} split of {split.folder} has {documents:,} end-of-text tokens,"
            f" but its index says {expected:,} documents; prepare the data again"
        )
    sizes = tokenizer.token_bytes[: split.vocab_size] if tokenizer.bytes_add_up else None
    utf8_bytes = None if sizes is None else int(counts[: len(sizes)] @ sizes)
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


def data_lines(report: dict[str, Any]) -> list[str]:
    """The report of `inspect_data` for people."""
    tokenizer, splits = report["tokenizer"], report["splits"]
    made = report["prepared"] if isinstance(report["prepared"], dict) else {}
    how = ", ".join(f"{key} {value}" for key, value in made.items() if value not in (None, ""))
    rows = [["split", "shards", "tokens", "documents", "bytes", "bytes/token", "fingerprint"]]
    for name, split in splits.items():
        counts = ("shards", "tokens", "documents", "bytes", "bytes_per_token")
        numbers = [number_text(split[key]) for key in counts]
        rows.append([name, *numbers, split["fingerprint"][:12]])
    lines = [
        report["path"],
        f"tokenizer   {tokenizer['kind']}, {report['vocab_size']:,} tokens, end-of-text "
        f"{number_text(report['eot_id'])}, fingerprint {tokenizer['fingerprint'][:12]}",
        f"stored as   {report['dtype']}",
        f"prepared    {how or 'unknown'}",
        *table(rows, "<10", *[">0"] * 5, "<0").splitlines(),
    ]
    for name, split in splits.items():
        lines += [f"{name} {i:<{11 - len(name)}}{t!r}" for i, t in enumerate(split["windows"], 1)]
        if read := split["read"]:
            hashes = ", ".join(f"{count} {what}" for what, count in read["sha256"].items() if count)
            speed = read["file_bytes"] / 1e6 / max(read["seconds"], 1e-9)
            lines.append(
                f"{name} read: {read['tokens']:,} tokens, {number_text(read['documents'])} "
                f"end-of-text, {number_text(read['bytes'])} bytes, largest id "
                f"{number_text(read['largest_id'])}; SHA-256 of shards: {hashes or 'none'}; "
                f"{read['file_bytes'] / 1e6:.1f} MB at {speed:,.0f} MB/s"
            )
    return lines


def number_text(value: float | None) -> str:
    """A number with separators; `unknown` for None."""
    if value is None:
        return "unknown"
    return f"{value:,}" if isinstance(value, int) else f"{value:.3f}"
