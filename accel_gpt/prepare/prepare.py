"""Text -> a data folder of token shards, made once, completely or not at all.

Reads what `text/documents.py` finds; writes shards, dataset.json and tokenizer.json, in
`<out>.partial` until all is there. Stopped at any moment and called again it continues; see
`builder.py` for that, and for the memory that it takes.
"""

import errno
import hashlib
import re
import shutil
import sys
import time
import urllib.parse
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from accel_gpt.config.data import PrepareConfig
from accel_gpt.data.shards import INDEX, Shard, read_index
from accel_gpt.errors import UserError, require
from accel_gpt.files import lock, sync
from accel_gpt.prepare.builder import (
    OURS,
    Work,
    begin,
    check_begun,
    differences,
    discard,
    fingerprint,
    other_text,
    write_shards,
)
from accel_gpt.prepare.shard_writer import write_index
from accel_gpt.text.documents import describe_source
from accel_gpt.text.files import is_url


def prepare(config: PrepareConfig, out: Path, rank: int = 0, world: int = 1) -> bool:
    """Make the data folder `out`, unless it was already made with the same settings; of several
    machines (`world`) each makes its part of it, which `merge` joins.

    Of several processes one builds and the others wait; the answer is whether this one did. Raises
    `UserError` for other settings, a folder in the way, too little text, a full disk; `DataError`
    for text that cannot be read.
    """
    check_part(config, rank, world)
    out = part_folder(Path(out).resolve(), rank, world)
    if is_ready(config, out, rank, world):
        return False
    source = fingerprint(config, rank, world)  # fails before anything is made
    folder = out.with_name(f"{out.name}.partial")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        notice = f"another process prepares {out}; waiting for it\n"
        with lock(out.with_name(f"{out.name}.lock"), notice=notice):
            if is_ready(config, out, rank, world):
                return False
            line = build(config, folder, source, rank, world)
            publish(folder, out)
    except OSError as error:
        room = "make room and " if error.errno == errno.ENOSPC else ""
        advice = f"; {room}run the same command again: it continues"
        advice = advice if room and config.path != "-" else ""
        raise UserError(f"data folder {out} could not be written: {error}{advice}") from None
    except KeyboardInterrupt:
        if folder.exists() and config.path != "-":
            sys.stderr.write(f"{folder} is kept; run the same command again: it continues\n")
        raise
    sys.stdout.write(f"prepared {out}: {line}\n")
    return True


def build(config: PrepareConfig, folder: Path, source: str, rank: int, world: int) -> str:
    """Make all that the data folder holds, in `folder`; a line that tells what was made."""
    start = time.monotonic()
    same = fingerprint(config, rank, world, times=False)
    asked = recorded(config, same, rank, world)
    if (folder / INDEX).exists():
        made = read_index(folder)["prepared"]
        if not source:
            discard(folder)  # of standard input, which need not be the same
        else:
            check_begun(folder, made, asked)
            if made.get("source_fingerprint", same) != same:
                raise other_text(folder)
    if not (folder / INDEX).exists():
        work = begin(config, folder, asked, source)
        try:
            write_shards(config, work, rank, world)
        finally:
            work.close()
        finish(config, work, asked, world)
    return f"{summary(read_index(folder))}, {time.monotonic() - start:.1f} s"


def finish(config: PrepareConfig, work: Work, asked: Mapping[str, Any], world: int) -> None:
    """Name the shards and write the index: from here on the folder is complete."""
    splits = {name: writer.finish() for name, writer in work.writers.items()}
    if world == 1:
        try:
            check_splits(config, splits)
        except UserError:
            shutil.rmtree(work.folder)
            raise
    _, dropped, skipped = work.counts()  # those of the journal are as far as its position
    counts = {}
    if config.dedupe:
        counts["dropped"] = dropped
    if config.skip_invalid:
        counts["skipped"] = skipped
    sync(work.folder)
    write_index(
        work.folder,
        kind=work.tokenizer.kind,
        fingerprint=work.tokenizer.fingerprint,
        vocab_size=work.tokenizer.vocab_size,
        eot_id=work.tokenizer.eot_id,
        splits=splits,
        prepared={**asked, **counts},
    )


def publish(folder: Path, out: Path) -> None:
    """Remove what only the making needed, and give the complete folder its name."""
    index = read_index(folder)
    keep = {INDEX, "tokenizer.json", "tokenizer_config.json"}
    keep |= {shard["name"] for shards in index["splits"].values() for shard in shards}
    for path in folder.iterdir():
        if path.name not in keep and re.match(OURS, path.name):
            path.unlink()
    sync(folder)
    folder.rename(out)
    sync(out.parent)


def summary(index: Mapping[str, Any]) -> str:
    """Shards, tokens and bytes per token, and what was left out."""
    splits = index["splits"]
    shards = [shard for part in splits.values() for shard in part]
    tokens, utf8_bytes = sum(s["tokens"] for s in shards), sum(s["bytes"] for s in shards)
    each = ", ".join(f"{name} {sum(s['tokens'] for s in p):,}" for name, p in splits.items())
    left_out = "".join(
        f", {index['prepared'][key]:,} {what}"
        for key, what in (("dropped", "duplicates dropped"), ("skipped", "invalid skipped"))
        if key in index["prepared"]
    )
    return (
        f"{len(shards)} shards, {tokens:,} tokens ({each}), {utf8_bytes / max(1, tokens):.2f} "
        f"bytes per token{left_out}"
    )


def check_splits(config: PrepareConfig, splits: Mapping[str, Iterable[Shard]]) -> None:
    """Each split must hold a token and its successor."""
    tokens = {name: sum(shard.tokens for shard in shards) for name, shards in splits.items()}
    if min(tokens.values()) < 2:
        raise UserError(
            f"there is too little text to train on: {tokens['train']} tokens for train and "
            f"{tokens['val']} for val, expected at least 2 each; give more text, or another "
            f"data.prepare.val_fraction than {config.val_fraction}"
        )


# --------------------------------------------------------------------------- the folder


def check_part(config: PrepareConfig, rank: int, world: int) -> None:
    """`UserError` for a part that cannot be made by itself."""
    require(
        0 <= rank < world,
        f"--rank is {rank} and --world {world}; ranks are 0 to world - 1",
    )
    if world > 1:
        require(
            config.path != "-",
            f"data.prepare.path is - with --world {world}; standard input is read in one piece",
        )
        require(
            not config.dedupe,
            f"data.prepare.dedupe is true with --world {world}, but duplicates would be found "
            "within a part only; prepare in one piece, or without dedupe",
        )
        require(
            config.source != "shards",
            f"data.prepare.source is shards with --world {world}; shards are copied in one piece",
        )
    require(
        not (config.dedupe and config.source == "shards"),
        "data.prepare.dedupe is true but data.prepare.source is shards, which are tokens already; "
        "drop duplicates when the shards are made from text",
    )


def part_folder(out: Path, rank: int, world: int) -> Path:
    """`out` itself, or the folder of one part of it."""
    return out if world == 1 else out.with_name(f"{out.name}.part{rank:05d}-of-{world:05d}")


def record(config: PrepareConfig) -> dict[str, Any]:
    """What the index remembers of the config: all that the content depends on.

    Not the workers; not skip_invalid, as a folder that could be made without it is the same with
    it, and a preparation that stopped at an invalid byte continues with it.
    """
    left_out = ("workers", "skip_invalid")
    kept = {key: value for key, value in asdict(config).items() if key not in left_out}
    return kept | {"path": recorded_path(config.path)}


def recorded_path(path: Any) -> Any:
    """A path, or a URL without what may be secret: no user and password, a SHA-256 as its query."""
    if not isinstance(path, str) or not is_url(path):  # None, or whatever a damaged index has
        return path
    parts = urllib.parse.urlsplit(path)
    query = parts.query
    if query and not query.startswith("sha256="):
        query = f"sha256={hashlib.sha256(query.encode()).hexdigest()}"
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query=query).geturl()


def recorded(config: PrepareConfig, source: str, rank: int, world: int) -> dict[str, Any]:
    """`record`, and of which files: those of all parts must be the same; of a part which it is."""
    part = {"rank": rank, "world": world} if world > 1 else {}
    return {**record(config), **part, "source_fingerprint": source}


def is_ready(config: PrepareConfig, out: Path, rank: int = 0, world: int = 1) -> bool:
    """Whether `out` was made with these settings; `UserError` when with others, or by others."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        if config.source is None:
            read_index(out)  # raises
        return False
    if not (out / INDEX).exists():
        raise UserError(
            f"{out} exists and has no {INDEX}, so it is not a data folder; it is left as it is: "
            "choose another data.train"
        )
    prepared = read_index(out).get("prepared") or {}
    if config.source is None:
        return True
    default = {field.name: field.default for field in fields(PrepareConfig)}
    asked = {**record(config), "rank": rank, "world": world}
    made = {"rank": 0, "world": 1, **default, **prepared}
    made["path"] = recorded_path(made["path"])
    if made["tokenizer"] != config.tokenizer and is_tokenizer_of(config.tokenizer, out):
        made["tokenizer"] = config.tokenizer  # by another name
    if differ := differences(made, asked, "prepared"):
        raise UserError(
            f"data folder {out} was prepared with other settings ({'; '.join(differ)}); delete the "
            "folder or choose another data.train"
        )
    skipped = int(prepared.get("skipped", 0))
    require(
        config.skip_invalid or not skipped,
        f"data folder {out} was prepared with data.prepare.skip_invalid, which left out "
        f"{skipped:,} invalid lines or files; set it, or delete the folder and mend the text",
    )
    tell_changes(config, out, prepared.get("source_fingerprint"))
    return True


def is_tokenizer_of(spec: str, folder: Path) -> bool:
    """Whether gpt2 or the tokenizer.json at `spec` gives the ids of a data folder's own."""
    from accel_gpt.data.tokenizer import load_gpt2, load_tokenizer

    if spec != "gpt2" and not Path(spec).exists():
        return False
    try:
        asked = load_gpt2() if spec == "gpt2" else load_tokenizer(spec)
        return bool(asked.fingerprint == load_tokenizer(folder).fingerprint)
    except UserError:
        return False


def tell_changes(config: PrepareConfig, out: Path, made: str | None) -> None:
    """Warn when the files of a finished folder are at hand and are not what they were."""
    here = config.source == "stdlib" or (config.path and not is_url(config.path))
    if not made or not here or config.path == "-" or config.source == "shards":
        return
    try:
        same = describe_source(config, times=False) == made
    except (UserError, OSError):
        return
    if not same:
        sys.stderr.write(
            f"WARNING: the text of {config.path or config.source} has changed since {out} was "
            "prepared; the folder is left as it is: delete it to prepare again\n"
        )
