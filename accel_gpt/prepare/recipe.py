"""Compare the settings of a data folder with a config.

`recipe()` returns the settings that the content depends on. The index stores them under `prepared`.
"""

import hashlib
import sys
import urllib.parse
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from accel_gpt.config.data import PrepareConfig
from accel_gpt.data.index import INDEX, read_index
from accel_gpt.data.remote import is_url
from accel_gpt.data.tokenizer import load_tokenizer, named_tokenizer
from accel_gpt.errors import AccelGPTError, UserError, require
from accel_gpt.prepare.sources import select, source_fingerprint

# `workers` does not change the content. `skip_invalid` changes it only if a document is invalid; a
# preparation that stopped at an invalid document can resume with it.
NOT_RECORDED = ("workers", "skip_invalid")
# what the index stores under `prepared` beside the settings
BESIDE_SETTINGS = frozenset({"source_fingerprint", "skipped"})


def recipe(config: PrepareConfig) -> dict[str, Any]:
    """Return the settings that the content of a data folder depends on."""
    kept = {key: value for key, value in asdict(config).items() if key not in NOT_RECORDED}
    return {**kept, "path": recorded_path(config.path)}


def recorded_path(path: str | None) -> str | None:
    """Return a path as the index records it: a URL loses its user, its query becomes a SHA-256."""
    if path is None or not is_url(path):
        return path
    parts = urllib.parse.urlsplit(path)
    query = parts.query
    if query:
        query = f"sha256={hashlib.sha256(query.encode()).hexdigest()}"
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query=query).geturl()


def other_settings(made: Mapping[str, Any], requested: Mapping[str, Any]) -> list[str]:
    """Describe the settings that differ; the options of a bpe count only for a bpe.

    A setting that only another version of accel_gpt has always differs.
    """
    differences = []
    for key in {**requested, **made}:
        if key in BESIDE_SETTINGS:
            continue
        if key in ("vocab_size", "sample_bytes") and requested.get("tokenizer") != "bpe":
            continue
        if key not in requested:
            differences.append(f"{key}: {made[key]}, unknown to this version of accel_gpt")
        elif made.get(key) != requested[key]:
            differences.append(f"{key}: {made.get(key)}, requested {requested[key]}")
    return differences


def check_same(folder: Path, begun: Mapping[str, Any], requested: Mapping[str, Any]) -> None:
    """Raise `UserError` if `folder` was begun with other settings or other text.

    The path may differ if the fingerprint of the source is the same.
    """
    made = {**begun, "path": requested["path"]}
    remedy = f"or remove {folder} to start over"
    if differ := other_settings(made, requested):
        raise UserError(
            f"{folder} was begun with other settings ({'; '.join(differ)}); run the command with "
            f"the earlier settings, {remedy}"
        )
    require(
        begun["source_fingerprint"] == requested["source_fingerprint"],
        f"{folder} was begun with other text: names, sizes or times of its files have changed; "
        f"run the command with the earlier text, {remedy}",
    )


def is_ready(config: PrepareConfig, out: Path) -> bool:
    """Return whether `out` was prepared with these settings; False if it is missing or empty.

    Raises `UserError` if it was prepared with other settings or is not a data folder.
    """
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        if config.source is None:
            read_index(out)  # raises
        return False
    if not (out / INDEX).exists():
        raise UserError(
            f"{out} exists and has no {INDEX}, so it is not a data folder; choose another folder"
        )
    prepared = read_index(out).prepared
    if config.source is None:
        return True
    made = dict(prepared)
    made["skip_invalid"] = config.skip_invalid or prepared.get("skipped", 0) > 0
    if made["tokenizer"] != config.tokenizer and is_tokenizer_of(config.tokenizer, out):
        made["tokenizer"] = config.tokenizer  # the same tokenizer under another name
    requested = {**recipe(config), "skip_invalid": config.skip_invalid}
    if differ := other_settings(made, requested):
        raise UserError(
            f"data folder {out} was prepared with other settings ({'; '.join(differ)}); delete it, "
            "or choose another folder"
        )
    if text_changed(config, prepared.get("source_fingerprint")):
        sys.stderr.write(
            f"WARNING: the files of {config.path or config.source} have changed since {out} was "
            "prepared, which is used as it is; to train on the changed files, start a new run "
            "with another out_dir and data folder\n"
        )
    return True


def is_tokenizer_of(spec: str, folder: Path) -> bool:
    """Return whether the data folder has the tokenizer `spec` (gpt2, bytes, a path or a Hub id)."""
    try:
        return named_tokenizer(spec).fingerprint == load_tokenizer(folder).fingerprint
    except AccelGPTError:
        return False


def text_changed(config: PrepareConfig, prepared: str | None) -> bool:
    """Return whether the files of the source exist here and differ from the prepared files."""
    if not prepared or is_url(str(config.path)):
        return False
    try:
        return source_fingerprint(config, select(config).files, times=False) != prepared
    except (AccelGPTError, OSError):
        return False
