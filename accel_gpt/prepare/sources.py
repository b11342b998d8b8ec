"""Select what is read of a source: its files in order, their kind, and their splits.

Files whose endings are in `ROW_KINDS` are read by row, with `datasets`. All others are text, one
document a file. Downloads go to ~/.cache/accel_gpt/text (or $XDG_CACHE_HOME/accel_gpt/text).
"""

import glob
import hashlib
import json
import os
import re
import sysconfig
import tempfile
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from accel_gpt.config.data import PrepareConfig
from accel_gpt.config.plan import plural
from accel_gpt.data.remote import Store, Unreachable, file_info, short_hash
from accel_gpt.errors import UserError, require
from accel_gpt.files import cache_folder, is_local, is_url, sha256
from accel_gpt.hub import is_repo
from accel_gpt.prepare.text_files import (
    LFS_POINTER,
    is_page,
    marked_encoding,
    read_head,
    unpacked_name,
)

KEY = "data.prepare.source"
STDLIB = "stdlib"
HUB = "hub"
TEXT = "text"
EXPECTED = "expected text, JSON, CSV or Parquet"
HIDDEN = "hidden, a lock or a link to a folder"
HTML_ENDINGS = (".html", ".htm", ".xhtml")
# Ending of a file with rows -> its kind, the builder of `datasets` except for tsv
ROW_KINDS: Mapping[str, str] = MappingProxyType(
    {
        ".json": "json",
        ".jsonl": "json",
        ".ndjson": "json",
        ".csv": "csv",
        ".tsv": "tsv",
        ".parquet": "parquet",
        ".arrow": "arrow",
        ".tar": "webdataset",
    }
)
# Files that mark the folder of a run, or a data folder, finished or not
MARKER_FILES = (".lock", "run.json", "dataset.json", "progress.json")
# Tests and installed packages do not count as the library's sources.
STDLIB_SKIP = frozenset(
    ("test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "_bundled")
)
# Words in the paths of a folder, or names of splits on the Hub, as `datasets` recognizes them
SPLIT_WORDS = MappingProxyType(
    {
        "train": frozenset(("train", "training")),
        "val": frozenset(("validation", "valid", "val", "dev")),
        "test": frozenset(("test", "testing", "eval", "evaluation")),
    }
)
# Names, without endings, of files that lie beside data and describe it
BESIDE_DATA = frozenset(
    ("readme", "license", "config", "dataset_info", "dataset_infos", "dataset_dict", "state")
)


@dataclass(frozen=True)
class TextSource:
    """What is read in one go: files of a kind, or a data set of the Hub."""

    name: str
    """The path, URL or id that the user gave."""
    kind: str
    """text, stdlib, hub, or a kind of `ROW_KINDS`."""
    files: list[Path] = field(default_factory=list)
    split: str | None = None
    """train or val; None: a hash of each document decides."""
    data: Any = None
    """The split of a data set of the Hub, when it is opened."""


# Sources, and lines that say what is read and what is left out
Selection = tuple[list[TextSource], list[str]]


def select(config: PrepareConfig, key: str = KEY) -> Selection:
    """Select what is read, after downloading the file of a URL; errors name `key`.

    A data set of the Hub is not opened. Raises `UserError` if there is nothing to read.
    """
    sources, lines = select_source(str(config.source), key)
    if config.val is not None:
        others, other_lines = select_source(config.val, "data.prepare.val")
        if any(source.split == "val" for source in sources):
            lines.append(f"left out: the validation split of {config.source}, for {config.val}")
        # of a source that has splits, its validation split
        for_val = [source for source in others if source.split == "val"] or others
        sources = [source for source in sources if source.split != "val"]
        sources = without_files(sources, for_val, key)
        sources += [replace(source, split="val") for source in for_val]
        lines += other_lines
    reading = [describe_read(source) for source in sources if source.kind not in (STDLIB, HUB)]
    return sources, [*reading, *lines]


def without_files(
    sources: Sequence[TextSource], held_out: Sequence[TextSource], key: str
) -> list[TextSource]:
    """Return `sources` as the train split, without the files of `held_out`."""
    val_files = {file.resolve() for source in held_out for file in source.files}
    found = []
    for source in sources:
        files = [file for file in source.files if file.resolve() not in val_files]
        require(
            bool(files) or not source.files,
            f"{key} is {source.name}, but data.prepare.val has all of its files",
        )
        found.append(replace(source, files=files, split="train"))
    return found


def select_source(name: str, key: str) -> Selection:
    """Select what is read of the source `name`, which is the value of `key`."""
    if name == STDLIB:
        return [TextSource(name, STDLIB, stdlib_files())], []
    if is_url(name):
        file = download_text(name, key)
        return [TextSource(name, kind_of_file(file.name), [file])], []
    if os.path.exists(name) or glob.has_magic(name):
        return select_files(name, key)
    if "/" in name and not is_local(name) and is_repo(name):
        return [TextSource(name, HUB)], []
    raise UserError(
        f"{key} is {name}, but there is no such file; expected a file, folder, glob, URL or data "
        "set of the Hub (user/name)"
    )


def kind_of_file(name: str) -> str:
    """Return the kind of a file by the ending of its name: one of `ROW_KINDS`, or else text."""
    return ROW_KINDS.get(os.path.splitext(unpacked_name(name))[1], TEXT)


# --------------------------------------------------------------------------- local files


def select_files(name: str, key: str) -> Selection:
    """Select the files to read from a local file, folder or glob.

    If there are several kinds, the kind with the most bytes is read. A .json file beside text is
    text, such as settings beside notes.
    """
    left_out: defaultdict[str, list[Path]] = defaultdict(list)
    if os.path.isdir(name):
        files = walk(Path(name), left_out)
    elif os.path.exists(name):
        files = [Path(name)]
    else:
        paths = sorted(glob.glob(name, recursive=True))
        files = [Path(path) for path in paths if os.path.isfile(path)]
    kinds: dict[Path, str] = {}
    for path in files:
        if reason := why_not_read(path):
            left_out[reason].append(path)
        else:
            kinds[path] = kind_of_file(path.name)
    if not kinds:
        problem = describe_left_out(left_out) or "it holds no file"
        raise UserError(f"{key} is {name}, but {problem}; {EXPECTED}")
    data = {path for path in kinds if not is_beside_data(path)} or set(kinds)
    if any(kinds[path] == TEXT for path in data):
        for path in kinds:
            if unpacked_name(path.name).endswith(".json"):
                kinds[path] = TEXT
    amounts: Counter[str] = Counter()
    for path in data:
        amounts[kinds[path]] += path.stat().st_size
    kind = max(sorted(amounts), key=amounts.__getitem__)
    chosen = [path for path in kinds if kinds[path] == kind and (path in data or kind == TEXT)]
    for path in kinds.keys() - set(chosen):
        left_out[f"{path.suffix or 'text'} beside {kind}"].append(path)
    return by_split(name, kind, chosen, left_out)


def why_not_read(path: Path) -> str | None:
    """Return why a file is not read; None: it is."""
    if not path.is_file():
        return "not a regular file"
    if path.stat().st_size == 0:
        return "empty"
    head = read_head(path)
    if head.startswith(LFS_POINTER):
        return "a pointer of Git LFS"
    if kind_of_file(path.name) != TEXT:
        return "with :: in its path" if "::" in str(path) else None  # a URL for `datasets`
    if b"\0" in head and marked_encoding(head) is None:
        return f"not text ({path.suffix or 'no ending'})"
    return None


def is_beside_data(path: Path) -> bool:
    """Return whether a file describes the data beside it."""
    return path.name.lower().partition(".")[0] in BESIDE_DATA


def by_split(
    name: str, kind: str, files: list[Path], left_out: defaultdict[str, list[Path]]
) -> Selection:
    """Return the sources of the files of one kind, by the splits that they are named after."""
    sources = [TextSource(name, kind, files)]
    if splits := named_splits(files):
        named: defaultdict[str, list[Path]] = defaultdict(list)
        for file in files:
            named[splits.get(file, "")].append(file)
        left_out["named test"] = named["test"]
        left_out["beside the splits"] = named[""]
        sources = [TextSource(name, kind, named["train"], "train" if named["val"] else None)]
        if named["val"]:
            sources.append(TextSource(name, kind, named["val"], "val"))
    found = describe_left_out(left_out)
    return sources, [f"left out of {name}: {found}"] if found else []


def describe_read(source: TextSource) -> str:
    """Return the line on the files that are read."""
    size = sum(file.stat().st_size for file in source.files)
    where = f"{plural(len(source.files), 'file')} of {source.name}"
    use = " for validation" if source.split == "val" else ""
    return f"reading {where} as {source.kind}{use}, {size:,} bytes"


def describe_left_out(left_out: Mapping[str, Sequence[Path]]) -> str:
    """Return how many files are left out for each reason."""
    found = []
    for reason, paths in sorted(left_out.items()):
        if paths:
            found.append(f"{len(paths):,} {reason}")
    return ", ".join(found)


def named_splits(files: Sequence[Path]) -> dict[Path, str]:
    """Return the split that each file is named after: train, val or test.

    Returns none, unless each file names one split by its folders, or else by its name, and train
    and another split are named. `BESIDE_DATA` need not. So a test.py among other code is text.
    """
    root = os.path.commonpath([file.parent for file in files])
    found: dict[Path, str] = {}
    for file in files:
        if is_beside_data(file):
            continue
        relative = file.relative_to(root)
        named = splits_in(relative.parent.as_posix()) or splits_in(relative.name)
        if len(named) != 1:
            return {}
        found[file] = named[0]
    return found if "train" in found.values() and len(set(found.values())) > 1 else {}


def splits_in(name: str) -> list[str]:
    """Return the splits that the words of a path name."""
    words = set(re.split(r"[-._ 0-9/]+", name.lower()))
    return [split for split, names in SPLIT_WORDS.items() if words & names]


def walk(
    root: Path, left_out: defaultdict[str, list[Path]], skipped: frozenset[str] = frozenset()
) -> list[Path]:
    """List the files below `root` by relative path, and add to `left_out` what is not read.

    `skipped`: names of folders that are not entered.
    """
    found: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in skipped]
        for name in list(folders):
            path = Path(folder, name)
            is_made = any((path / marker).exists() for marker in MARKER_FILES)
            if is_made or name.startswith(".") or path.is_symlink():
                reason = "folders of runs or of prepared data" if is_made else HIDDEN
                left_out[reason].append(path)
                folders.remove(name)
        for name in names:
            path = Path(folder, name)
            if name.startswith(".") or name.endswith(".lock"):
                left_out[HIDDEN].append(path)
            else:
                found.append(path)
    found.sort(key=lambda path: path.relative_to(root).parts)
    return found


def source_fingerprint(config: PrepareConfig, sources: Sequence[TextSource]) -> str:
    """Return a SHA-256 (hex) that identifies what is read.

    For files it covers names and sizes, so a copy of the files has the same. For a download it
    covers URL and content; for a data set its id, subset and split.
    """
    seen: list[object] = []
    for source in sources:
        seen.append([source.kind, source.split])
        if source.kind == HUB:
            seen.append([source.name, config.subset, config.split])
        elif is_url(source.name):
            seen.append([source.name, *(sha256(path) for path in source.files)])
        else:
            paths = [path.absolute() for path in source.files]
            root = os.path.commonpath([path.parent for path in paths])
            for path in paths:
                seen.append([path.relative_to(root).as_posix(), path.stat().st_size])
    return hashlib.sha256(json.dumps(seen).encode()).hexdigest()


def stdlib_files() -> list[Path]:
    """List the Python sources of the standard library, without tests."""
    root = Path(sysconfig.get_path("stdlib"))
    files = walk(root, defaultdict(list), STDLIB_SKIP)
    found = [path for path in files if path.suffix.lower() == ".py" and path.is_file()]
    require(bool(found), f"this Python has no library sources in {root}; give another {KEY}")
    return found


# --------------------------------------------------------------------------- downloads


def download_text(url: str, key: str) -> Path:
    """Download the file at `url`; return its path in the cache.

    A file in the cache is read again if the server gives the same size, and the same tag or date.
    Raises `UserError` if there is none, or if a placeholder comes, such as an HTML page.
    """
    address, mark, query = url.partition("?")
    folder, _, name = address.rpartition("/")
    store = Store(f"{folder}{mark}{query}")
    try:
        info = file_info(store.info(name))
        version = info.tag or info.changed
        cache = cache_folder() / "text" / short_hash(f"{url} {info.size} {version}")
        target = cache / (name or "text")
        if version and target.exists():
            return target
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as temporary:
            file = Path(temporary, target.name)
            store.download(name, file)
            reason = why_not_read(file)
            text = read_head(file).decode("utf-8-sig", "replace")
            if is_page(text) and not address.lower().endswith(HTML_ENDINGS):
                reason = "an HTML page"
            if reason is not None:
                raise UserError(
                    f"{key} is {url}, but what comes from there is {reason}; {EXPECTED}"
                )
            file.rename(target)
        return target
    except (OSError, Unreachable) as error:
        raise UserError(f"{key} is {url}, but it cannot be downloaded: {error}") from None
