"""Open the sources of training data: local folders and URLs, in our format or another project's."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import msgspec

from accel_gpt.config.data import DataConfig, Weighted
from accel_gpt.config.experiment import Config, TrainConfig
from accel_gpt.config.stages import stage_configs
from accel_gpt.data.downloads import Cache, RemoteFolder
from accel_gpt.data.foreign import TOKENIZER, DataFolder, open_foreign, open_own_shards
from accel_gpt.data.index import INDEX
from accel_gpt.data.remote import Missing, is_repository
from accel_gpt.data.shards import Split, open_split
from accel_gpt.data.tokenizer import Tokenizer
from accel_gpt.data.tokenizer_json import CONFIG
from accel_gpt.errors import DataError, require
from accel_gpt.files import is_url
from accel_gpt.hub import newest_commit, parse_url
from accel_gpt.json_files import Count


@dataclass(frozen=True)
class Source:
    """One opened split of a data folder or URL, with its weight in the mixture."""

    name: str
    """Name in metrics and messages."""
    path: str
    weight: float
    split: Split
    tokenizer: Tokenizer
    folder: DataFolder


@dataclass(frozen=True)
class TrainedSource:
    """A source of the training data, as a checkpoint stores it."""

    name: str
    weight: Annotated[float, msgspec.Meta(gt=0)]  # in the mixture
    fingerprint: str  # of its tokens


@dataclass(frozen=True)
class DataRead:
    """The sources that a run reads from a position on, as a checkpoint stores them."""

    first: Count  # position in the data: see config/stages.py
    sources: list[TrainedSource]


def open_sources(
    listed: Sequence[Weighted],
    split: str,
    data: DataConfig,
    names: Sequence[str] = (),
    known: Sequence[Source] = (),
    cache: Cache | None = None,
) -> list[Source]:
    """Open a split of each path.

    `names` default to `source_names`. `known`: opened sources; their folder is reused for the same
    path. Raises `UserError` if a path does not exist, `DataError` if its data is not usable.
    """
    names = names or source_names([source.path for source in listed])
    folders = {source.path: source.folder for source in known}
    found = []
    for name, source in zip(names, listed, strict=True):
        folder = folders.get(source.path) or open_folder(source.path, data, cache)
        opened, tokenizer = open_data(source.path, split, data, folder)
        found.append(Source(name, source.path, source.weight, opened, tokenizer, folder))
    return found


def source_names(paths: Sequence[str]) -> list[str]:
    """Return the last parts of paths, or the paths if two parts are equal."""
    names = [Path(path).name for path in paths]
    return names if len(set(names)) == len(names) else list(paths)


def open_folder(path: str, data: DataConfig, cache: Cache | None = None) -> DataFolder:
    """Open a data folder or URL. `cache`: None for a cache of this process.

    Download the index and tokenizer of a URL now; each shard is downloaded before it is read.
    Raises `UserError` if the URL does not exist. For a local folder, `open_data()` checks this.
    """
    if not is_url(path) or data.own_shards is not None:
        return DataFolder(Path(path))
    if is_repository(path):
        commit = (data.commits or {}).get(path) or newest_commit(path)
        path = replace(parse_url(path), revision=commit).to_uri()
    if cache is None:
        cache = Cache(data.cache_gb, run=None, timeout=TrainConfig().timeout_seconds)
    remote = RemoteFolder(path, cache)
    with contextlib.suppress(Missing):  # shards of another project have no index
        for name in (INDEX, TOKENIZER, CONFIG):
            remote.fetch(name)
    return DataFolder(remote.folder, remote)


def open_data(
    path: str, split: str, data: DataConfig, folder: DataFolder | None = None
) -> tuple[Split, Tokenizer]:
    """Open a split of a data folder or URL, and its tokenizer.

    `folder`: the folder at `path`, if it is already open. `data.tokenizer` is for files that do not
    say it. Raises `UserError` if there is no folder or no tokenizer, `DataError` if the data is not
    usable.
    """
    folder = folder or open_folder(path, data)
    if data.own_shards is not None:
        return open_own_shards(data.own_shards, folder, split, data.tokenizer)
    if folder.is_foreign:
        return open_foreign(folder, split, data.tokenizer)
    opened = open_split(folder.path, split, folder.remote)
    tokenizer = folder.tokenizer
    if opened.tokenizer_fingerprint != tokenizer.fingerprint:
        raise DataError(
            f"the {split} shards of {folder.path} were made with a different tokenizer "
            f"({opened.tokenizer_kind}, {opened.tokenizer_fingerprint[:12]}) than its "
            f"tokenizer.json ({tokenizer.kind}, {tokenizer.fingerprint[:12]}); prepare the data "
            "again"
        )
    return opened, tokenizer


# --------------------------------------------------------------------------- what the config names


def train_paths(data: DataConfig) -> list[Weighted]:
    """Return the folders or URLs of `data.train`."""
    require(
        bool(data.train),
        "data.train is empty; set it to a folder of token shards, or to the folder to prepare",
    )
    return [Weighted(data.train)] if isinstance(data.train, str) else list(data.train)


def all_train_paths(config: Config) -> list[Weighted]:
    """Return the folders or URLs that any stage of a run trains on, each once."""
    found = {one.path: one for stage in stage_configs(config) for one in train_paths(stage.data)}
    return list(found.values())


def train_names(config: Config) -> dict[str, str]:
    """Return the names of the folders or URLs that any stage trains on, by path."""
    paths = [source.path for source in all_train_paths(config)]
    return dict(zip(paths, source_names(paths), strict=True))


def val_paths(data: DataConfig) -> list[Weighted]:
    """Return the folders or URLs of `data.val`, with equal weights; empty if it is not set."""
    if data.val is None or isinstance(data.val, str):
        return [Weighted(data.val)] if data.val else []
    return [Weighted(path) for path in data.val.values()]


def val_names(data: DataConfig) -> tuple[str, ...]:
    """Return the names that `data.val` gives to its folders; empty if it gives none."""
    return tuple(data.val) if isinstance(data.val, Mapping) else ()
