"""Where training data comes from: a folder of this machine or a URL, ours or of another project."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from accel_gpt.config.data import DataConfig, Weighted
from accel_gpt.config.options import REQUIRED, option
from accel_gpt.data.foreign import DataFolder, open_foreign
from accel_gpt.data.hub_folder import HubFolder, is_repository
from accel_gpt.data.index import INDEX
from accel_gpt.data.remote import Missing, Refused, RemoteFolder, is_url
from accel_gpt.data.shards import Split, open_split
from accel_gpt.data.tokenizer import Tokenizer
from accel_gpt.errors import DataError, require


@dataclass(frozen=True)
class Source:
    """One split of one data folder or URL, opened, with its weight in a mixture."""

    name: str
    """As metrics and messages have it."""
    path: str
    weight: float
    split: Split
    tokenizer: Tokenizer
    folder: DataFolder


@dataclass(frozen=True)
class TrainedSource:
    """A source of the training data, as a checkpoint keeps it."""

    FORMER_KEYS: ClassVar = ("start",)

    name: str
    weight: float = option(REQUIRED, "Weight in the mixture.", above=0)
    fingerprint: str = option(REQUIRED, "Fingerprint of its tokens.")


def trained_sources(state: Mapping[str, Any]) -> list[TrainedSource]:
    """Return the sources of a state; a state that lists none had one."""
    one = TrainedSource(name="data", weight=1.0, fingerprint=state["data_fingerprint"])
    return state["data_sources"] or [one]


def open_sources(
    listed: Sequence[Weighted],
    split: str,
    data: DataConfig,
    names: Sequence[str] = (),
    known: Sequence[Source] = (),
) -> list[Source]:
    """Open a split of each path; `names` default to the paths, made short.

    `known`: sources whose open folder serves another split of the same path.
    Raises `UserError` for a path that does not exist, `DataError` for one that cannot be trained
    on.
    """
    folders = {source.path: source.folder for source in known}
    found = []
    for name, source in zip(names or names_of(listed), listed, strict=True):
        folder = folders.get(source.path) or open_folder(source.path, data)
        opened, tokenizer = open_data(source.path, split, data, folder)
        found.append(Source(name, source.path, source.weight, opened, tokenizer, folder))
    return found


def open_folder(path: str, data: DataConfig) -> DataFolder:
    """Open a data folder or URL.

    The index and tokenizer of a URL are downloaded now, and each shard before its use. Raises
    `UserError` if there is no such URL; `open_data` raises it if there is no such folder.
    """
    if not is_url(path):
        return DataFolder(Path(path))
    remote: RemoteFolder
    if is_repository(path):
        commit = (data.commits or {}).get(path)
        remote = HubFolder(path, data.cache_dir, data.cache_gb, commit)
    else:
        remote = RemoteFolder(path, data.cache_dir, data.cache_gb)
    with contextlib.suppress(Missing):  # shards of another project have no index
        remote.fetch(INDEX)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            with contextlib.suppress(Missing, Refused):  # S3 refuses files that do not exist
                remote.fetch(name)
    return DataFolder(remote.folder, remote)


def newest_commit(url: str, data: DataConfig) -> str:
    """Return the newest commit of the repository that `url` names, or the cached one if offline."""
    return HubFolder(url, data.cache_dir, data.cache_gb).commit


def open_data(
    path: str, split: str, data: DataConfig, folder: DataFolder | None = None
) -> tuple[Split, Tokenizer]:
    """Open a split of a data folder or URL, and its tokenizer.

    `folder`: the one at `path`, if it is open already. `data.tokenizer` names the tokenizer of
    files that do not name their own. Raises `UserError` if there is no such folder or no tokenizer,
    `DataError` for unusable data.
    """
    folder = folder or open_folder(path, data)
    if folder.is_foreign:
        return open_foreign(folder, split, data.tokenizer)
    opened = open_split(folder.path, split, folder.remote)
    tokenizer = folder.tokenizer
    if opened.tokenizer_fingerprint != tokenizer.fingerprint:
        raise DataError(
            f"the {split} shards of {folder.path} were made with another tokenizer "
            f"({opened.tokenizer_kind}, {opened.tokenizer_fingerprint[:12]}) than the one beside "
            f"them ({tokenizer.kind}, {tokenizer.fingerprint[:12]}); prepare them again"
        )
    return opened, tokenizer


# --------------------------------------------------------------------------- what the config names


def train_paths(data: DataConfig) -> list[Weighted]:
    """The folders or URLs of `data.train`, one or several."""
    require(
        bool(data.train), "data.train is empty; name the folder of token shards, or one to prepare"
    )
    return [Weighted(data.train)] if isinstance(data.train, str) else list(data.train)


def val_paths(data: DataConfig) -> list[Weighted]:
    """The folders or URLs of `data.val`, of equal weight; empty: those of `data.train`."""
    if data.val is None or isinstance(data.val, str):
        return [Weighted(data.val)] if data.val else []
    return [Weighted(path) for path in data.val.values()]


def val_names(data: DataConfig) -> tuple[str, ...]:
    """The names that `data.val` gives to its folders; empty where it gives none."""
    return tuple(data.val) if isinstance(data.val, Mapping) else ()


def names_of(listed: Sequence[Weighted]) -> tuple[str, ...]:
    """The last part of each path where these differ, else the whole path."""
    paths = tuple(source.path for source in listed)
    names = tuple(Path(path).name for path in paths)
    return names if len(set(names)) == len(names) else paths
