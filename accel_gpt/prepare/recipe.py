"""The settings that the content of a data folder depends on, and whether a folder was made so.

The index of a folder holds them under `prepared`: `recipe` gives them.
"""

import hashlib
import sys
import urllib.parse
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from accel_gpt.config.data import PrepareConfig
from accel_gpt.data.index import INDEX, read_index
from accel_gpt.data.remote import is_url
from accel_gpt.data.tokenizer import load_tokenizer, named_tokenizer
from accel_gpt.errors import AccelGPTError, UserError, require
from accel_gpt.prepare.shard_writer import UNRECORDED
from accel_gpt.prepare.sources import select, source_fingerprint

# Not `workers`; not `skip_invalid`: a folder that can be made without it is the same with it, and a
# preparation that stopped at an invalid byte resumes with it.
NOT_RECORDED = ("workers", "skip_invalid")


def recipe(config: PrepareConfig) -> dict[str, Any]:
    """Return all settings that the content depends on."""
    kept = {key: value for key, value in asdict(config).items() if key not in NOT_RECORDED}
    return {**kept, "path": recorded_path(config.path)}


def recorded_path(path: str | None) -> str | None:
    """Return a path as an index records it: a URL without the user, its query as a SHA-256."""
    if path is None or not is_url(path):
        return path
    parts = urllib.parse.urlsplit(path)
    query = parts.query
    if query:
        query = f"sha256={hashlib.sha256(query.encode()).hexdigest()}"
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query=query).geturl()


def other_settings(made: Mapping[str, Any], requested: Mapping[str, Any]) -> list[str]:
    """Describe the settings in which `made` differs; options of a bpe count only for a bpe."""
    differences = []
    for key, value in requested.items():
        if key in ("vocab_size", "sample_bytes") and requested.get("tokenizer") != "bpe":
            continue
        if made.get(key) != value:
            differences.append(f"{key}: {made.get(key)}, requested {value}")
    return differences


def check_same(folder: Path, begun: Mapping[str, Any], requested: Mapping[str, Any]) -> None:
    """Raise `UserError` if `folder` was begun with other settings or text: its work is kept.

    The path may be written differently, as the fingerprint says what it holds.
    """
    settings = {k: v for k, v in requested.items() if k not in ("path", "source_fingerprint")}
    # an earlier version could drop documents, and mark the tokens of prompts
    removed = {"dedupe": False, "loss_on": "text"}
    begun = {**removed, **dict(UNRECORDED), **begun}
    remedy = f"or remove {folder} to start over"
    if differ := other_settings(begun, {**settings, **removed}):
        raise UserError(
            f"{folder} was begun with other settings ({'; '.join(differ)}); repeat the command "
            f"with those, {remedy}"
        )
    require(
        begun["source_fingerprint"] == requested["source_fingerprint"],
        f"{folder} was begun with another text: names, sizes or times of its files have changed; "
        f"repeat the command with that text, {remedy}",
    )


def is_ready(config: PrepareConfig, out: Path) -> bool:
    """Whether `out` was prepared with these settings; `UserError` for other settings or files."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        if config.source is None:
            read_index(out)  # raises
        return False
    if not (out / INDEX).exists():
        raise UserError(
            f"{out} exists and has no {INDEX}, so it is not a data folder; it is left unchanged: "
            "choose another one"
        )
    prepared = read_index(out).prepared
    if config.source is None:
        return True
    default = {field.name: field.default for field in fields(PrepareConfig)}
    made = {**default, **prepared}
    made["skip_invalid"] = config.skip_invalid or prepared.get("skipped", 0) > 0
    if made["tokenizer"] != config.tokenizer and is_tokenizer_of(config.tokenizer, out):
        made["tokenizer"] = config.tokenizer  # by another name
    requested = {**recipe(config), "skip_invalid": config.skip_invalid}
    if differ := other_settings(made, requested):
        raise UserError(
            f"data folder {out} was prepared with other settings ({'; '.join(differ)}); delete the "
            "folder or choose another one"
        )
    if text_changed(config, prepared.get("source_fingerprint")):
        sys.stderr.write(
            f"WARNING: the files that are read of {config.path or config.source} are not those "
            f"that {out} was prepared from; the folder is left unchanged: delete it to prepare "
            "again\n"
        )
    return True


def is_tokenizer_of(spec: str, folder: Path) -> bool:
    """Whether gpt2, bytes or the tokenizer.json at `spec` is the tokenizer of a data folder."""
    try:
        return named_tokenizer(spec).fingerprint == load_tokenizer(folder).fingerprint
    except AccelGPTError:
        return False


def text_changed(config: PrepareConfig, prepared: str | None) -> bool:
    """Whether the files of the source are on this machine and differ from the files prepared."""
    if not prepared or is_url(str(config.path)):
        return False
    try:
        return source_fingerprint(config, select(config).files, times=False) != prepared
    except (AccelGPTError, OSError):
        return False
