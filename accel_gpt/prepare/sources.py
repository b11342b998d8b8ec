"""Select the files of a source, in the order in which they are read.

The ending of a name decides the kind: JSON lines, Parquet, a table, or else text. `.gz` and `.zst`
after it are decompressed. Only one kind is read: the source that the config names, or with `auto`
the kind with the most bytes. A table is read only as text, if the config names that source.
Downloads go to ~/.cache/accel_gpt (or $XDG_CACHE_HOME/accel_gpt).
"""

import codecs
import contextlib
import glob
import hashlib
import json
import os
import re
import sysconfig
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from accel_gpt.config.data import PrepareConfig, SourceKind
from accel_gpt.console import write_err
from accel_gpt.data.remote import (
    Missing,
    Refused,
    Store,
    Unreachable,
    file_info,
    is_url,
    short_hash,
)
from accel_gpt.errors import AccelGPTError, UserError, require
from accel_gpt.files import cache_folder, sha256
from accel_gpt.prepare.readers import (
    HEAD_BYTES,
    encoding_of,
    open_file,
    unpacked_name,
)

Kind = SourceKind | Literal["table"]

JSON_ENDINGS = (".jsonl", ".json", ".ndjson")
TABLE_ENDINGS = (".csv", ".tsv")
TEXT_ENDINGS = (".txt", ".text", ".md")
NOT_TEXT = "not UTF-8 text"
PAGE = "an HTML page"
HTML_ENDINGS = (".html", ".htm", ".xhtml")
# The beginning of an HTML page, after comments and the declaration of XML
HTML = re.compile(rb"\s*((<\?xml[^>]*>|<!--.*?-->)\s*)*<(!doctype\s+html|html)\b", re.I | re.S)
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
SPECIAL = "hidden, a lock, a link to a folder, or not a regular file"
# Files that mark the folder of a run, or a data folder, finished or not
MARKER_FILES = (".lock", "run.json", "dataset.json", "progress.json")
# Tests and installed packages do not count as the library's sources.
STDLIB_SKIP = frozenset(
    ("test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "_bundled")
)
# Words in the paths of a folder that name a split, as `datasets` recognizes them
SPLIT_WORDS = MappingProxyType(
    {
        "train": frozenset(("train", "training")),
        "val": frozenset(("validation", "valid", "val", "dev")),
        "test": frozenset(("test", "testing", "eval", "evaluation")),
    }
)
# Names, without endings, of files that lie beside splits and describe them
BESIDE_SPLITS = ("readme", "license", "config", "dataset_info", "dataset_infos", "dataset_dict")
KEY = "data.prepare.path"
ADVICE = "give a file, a folder, a glob or an http(s) URL"


@dataclass(frozen=True)
class Selection:
    """The files of a source that are read, and what is left out."""

    path: str
    source: SourceKind
    files: list[Path]
    left_out: Mapping[str, list[Path]] = field(default_factory=dict)
    """Reason -> files and folders that are left out for it."""

    def lines(self) -> list[str]:
        """Describe the selection: a line for the files that are read, then lines for the rest."""
        size = sum(file.stat().st_size for file in self.files)
        files = "1 file" if len(self.files) == 1 else f"{len(self.files):,} files"
        val = list(named_splits(self.path, self.files).values()).count("val")
        named = f"; {val:,} of them named validation, used for val" if val else ""
        found = [f"reading {files} of {self.path} as {self.source}, {size:,} bytes{named}"]
        for reason, paths in sorted(self.left_out.items()):
            if not paths:
                continue
            size = sum(path.stat().st_size for path in paths if path.is_file())
            found.append(f"left out: {reason}: {len(paths):,} ({size:,} bytes)")
        return found


def select(config: PrepareConfig) -> Selection:
    """Select the files of a source, after downloading the file of a URL; a data set has none.

    Raises `UserError` if there is nothing to read.
    """
    require(
        config.source is not None,
        "data.prepare.source is not set; set it to stdlib, text, jsonl, parquet or dataset, or set "
        "data.train to an existing data folder",
    )
    assert config.source is not None
    path = str(config.path)
    if config.source == "dataset":
        return Selection(path, config.source, [])
    if config.source == "stdlib":
        return Selection(path, config.source, stdlib_files())
    if is_url(path):
        source = kind_of_file(path.split("?")[0].split("#")[0], config.source)
        selection = Selection(path, source, [download_text(path)])
    else:
        selection = select_files(path, config.source)
    require(
        any(file.stat().st_size for file in selection.files),
        f"{KEY} is {path}, but {selection.files[0]} is empty; give a file that holds text",
    )
    return selection


def kind_of_name(name: str) -> Kind:
    """Return the kind of source by the ending of a name."""
    if name.lower().endswith(".parquet"):
        return "parquet"
    name = unpacked_name(name)
    if name.endswith(TABLE_ENDINGS):
        return "table"
    return "jsonl" if name.endswith(JSON_ENDINGS) else "text"


def kind_of_file(path: str, source: SourceKind) -> SourceKind:
    """Return `source`, or for auto the kind of a file; raise `UserError` if that is a table."""
    kind = kind_of_name(path) if source == "auto" else source
    if kind == "table":
        raise is_a_table(path)
    return kind


def is_a_table(path: str) -> UserError:
    """Return the error for a source of tables."""
    return UserError(
        f"{KEY} is {path}, a table; expected text, JSON lines or Parquet; to train on the table as "
        "it is, set data.prepare.source to text"
    )


def select_files(path: str, source: SourceKind) -> Selection:
    """Select the files to read from a local file, folder or glob.

    `source` auto selects the kind with the most bytes, except tables. Any other source reads a
    file, or the files of a glob, regardless of their endings; of a folder it reads the files of its
    kind. A file that is not text is left out of a folder or glob, unless it is named as a text.

    Raises `UserError` if `path` does not exist or holds nothing to read.
    """
    if os.path.isfile(path):
        return Selection(path, kind_of_file(path, source), [Path(path)])
    left_out: defaultdict[str, list[Path]] = defaultdict(list)
    kinds: dict[Path, Kind] = {}
    if os.path.isdir(path):
        for file in walk(Path(path), left_out):
            kind = kind_of_name(file.name)
            kinds[file] = "text" if kind == "table" and source == "text" else kind
    else:
        for file in glob_files(path):
            kinds[file] = kind_of_name(file.name) if source == "auto" else source
    for file in list(kinds):
        if kinds[file] == "text" and not is_named_text(file) and not holds_text(file):
            left_out[f"{NOT_TEXT}, ending in {file.suffix or 'nothing'}"].append(file)
            del kinds[file]
    if source == "auto" and kinds:
        amounts: Counter[SourceKind] = Counter()
        for file, kind in kinds.items():
            if kind != "table":
                amounts[kind] += file.stat().st_size
        if not amounts:
            raise is_a_table(path)
        source = max(amounts, key=amounts.__getitem__)
    for file, kind in kinds.items():
        if kind == "table":
            left_out["table, read as text if data.prepare.source is text"].append(file)
        elif kind != source:
            left_out[f"{kind}, read instead if data.prepare.source is {kind}"].append(file)
    files = [file for file, kind in kinds.items() if kind == source]
    if splits := named_splits(path, files):
        left_out["named test"] = [file for file in files if splits.get(file) == "test"]
        left_out["beside the splits"] = [file for file in files if file not in splits]
        files = [file for file in files if splits.get(file) in ("train", "val")]
    selection = Selection(path, source, files, left_out)
    require(
        bool(files),
        f"{KEY} is {path}, but it holds no {'text' if source == 'auto' else source} to read"
        f"{''.join(f'; {line}' for line in selection.lines()[1:])}; {ADVICE}",
    )
    return selection


def named_splits(path: str | None, files: Sequence[Path]) -> dict[Path, str]:
    """Return the split that each file of the folder `path` is named after: train, val or test.

    Returns none, unless each file names one split by its folders, or else by its name, and train
    and another split are named. `BESIDE_SPLITS` need not. So a test.py among other code is text.
    """
    root = Path(path or "")
    if path is None or not root.is_dir():
        return {}
    found: dict[Path, str] = {}
    for file in files:
        if file.name.lower().partition(".")[0] in BESIDE_SPLITS:
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


def is_named_text(path: Path) -> bool:
    """Return whether the ending of a name promises text, so that other content is a mistake."""
    return unpacked_name(path.name).endswith(TEXT_ENDINGS)


def holds_text(path: Path) -> bool:
    """Return whether the start of a file, decompressed, is text without a zero character."""
    with open_file(path, "text") as file:
        start = file.read(HEAD_BYTES)
    decoder = codecs.getincrementaldecoder(encoding_of(start))()
    try:
        return "\0" not in decoder.decode(start, final=len(start) < HEAD_BYTES)
    except UnicodeDecodeError:
        return False


def glob_files(path: str) -> list[Path]:
    """List the files of a glob. Raises `UserError` if there are none."""
    found = [Path(name) for name in sorted(glob.glob(path, recursive=True))]
    found = [file for file in found if file.is_file()]
    require(bool(found), f"{KEY} is {path}, but there is no such file; {ADVICE}")
    return found


def walk(root: Path, left_out: defaultdict[str, list[Path]]) -> list[Path]:
    """List the files below `root` by relative path, and add to `left_out` what is not read."""
    found: list[Path] = []
    for folder, folders, names in os.walk(root):
        paths = {name: Path(folder, name) for name in (*folders, *names)}
        for name in list(folders):
            is_made = any((paths[name] / marker).exists() for marker in MARKER_FILES)
            if is_made or name.startswith(".") or paths[name].is_symlink():
                reason = "folders of runs and of prepared data" if is_made else SPECIAL
                left_out[reason].append(paths[name])
                folders.remove(name)
        for name in names:
            is_special = name.startswith(".") or name.endswith(".lock")
            if is_special or not paths[name].is_file():
                left_out[SPECIAL].append(paths[name])
            else:
                found.append(paths[name])
    found.sort(key=lambda path: path.relative_to(root).parts)
    return found


def source_fingerprint(config: PrepareConfig, files: Sequence[Path]) -> str:
    """Return a SHA-256 (hex) that identifies the source.

    For files it covers names and sizes, so a copy of the files has the same. For a download it
    covers URL and content; for a data set its id, configuration and split.
    """
    seen: list[object] = []
    if config.source == "dataset":
        seen = [config.dataset, config.dataset_config, config.dataset_split]
    elif config.path is not None and is_url(config.path):
        seen = [config.path, *(sha256(path) for path in files)]
    else:
        paths = [path.absolute() for path in files]
        root = os.path.commonpath([path.parent for path in paths])
        for path in paths:
            seen.append([path.relative_to(root).as_posix(), path.stat().st_size])
    return hashlib.sha256(json.dumps(seen).encode()).hexdigest()


def stdlib_files() -> list[Path]:
    """List the Python sources of the standard library, without tests."""
    root = Path(sysconfig.get_path("stdlib"))
    found: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [n for n in folders if n not in STDLIB_SKIP and not n.startswith(".")]
        for name in names:
            path = Path(folder, name)
            if name.lower().endswith(".py") and not name.startswith(".") and path.is_file():
                found.append(path)
    found.sort(key=lambda path: path.relative_to(root).parts)
    require(
        bool(found),
        f"this Python has no library sources in {root}; set data.prepare.source to another kind",
    )
    return found


def download_text(url: str) -> Path:
    """Download the file at `url`; return its path in the cache.

    A file in the cache is read again if the tag or date that the server gives is the same. If the
    server cannot be reached, the newest file of this URL is read, and a line says so. Raises
    `UserError` if there is none, or if a placeholder comes, such as an HTML page.
    """
    cache = cache_folder()
    address, mark, query = url.partition("?")
    folder, _, name = address.rstrip("/").rpartition("/")
    store = Store(f"{folder}{mark}{query}")
    beginning = short_hash(url)
    ending = re.sub(r"[^A-Za-z0-9._-]", "_", name)
    info: dict[str, Any] = {}
    with contextlib.suppress(AccelGPTError, Unreachable):  # the download says why
        info = store.info(name)
    require_text(url, PAGE if info.get("mimetype") == "text/html" else None)
    known = file_info(info)
    version = known.tag or known.changed
    target = cache / f"{beginning}-{short_hash(f'{known.size} {version}')}-{ending}"
    if version and target.exists():
        return target
    temporary = cache / f"{beginning}.tmp-{os.getpid()}"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        store.download(name, temporary)
        require_text(url, placeholder_in(temporary))
        if not version:
            target = cache / f"{beginning}-{sha256(temporary)[:16]}-{ending}"
        temporary.rename(target)
    except Unreachable as error:
        earlier = [(path.stat().st_mtime, path) for path in cache.glob(f"{beginning}-*-{ending}")]
        if not earlier:
            raise not_downloaded(url, cache, error) from None
        seconds, target = max(earlier)
        write_err(
            f"{url} cannot be reached ({error}); reading {target} from the cache, downloaded on "
            f"{datetime.fromtimestamp(seconds).astimezone():%Y-%m-%d}"
        )
    except (OSError, Missing, Refused) as error:
        raise not_downloaded(url, cache, error) from None
    finally:
        temporary.unlink(missing_ok=True)
    return target


def not_downloaded(url: str, cache: Path, error: Exception) -> UserError:
    """Return the error for a file that could not be downloaded to the folder `cache`."""
    return UserError(
        f"{url} could not be downloaded to {cache}: {error}; if the network blocks it, download "
        "the file yourself and set data.prepare.path to it"
    )


def placeholder_in(path: Path) -> str | None:
    """Return what a downloaded file is, if it stands in place of a text."""
    with path.open("rb") as file:
        start = file.read(HEAD_BYTES).removeprefix(codecs.BOM_UTF8)
    if start.startswith(LFS_POINTER):
        return "a pointer of Git LFS"
    return PAGE if HTML.match(start) else None


def require_text(url: str, placeholder: str | None) -> None:
    """Raise `UserError` if a placeholder comes from a URL, but not for a page named as one."""
    named = url.partition("?")[0].lower().endswith(HTML_ENDINGS)
    require(
        placeholder is None or (placeholder == PAGE and named),
        f"{KEY} is {url}, but {placeholder} comes from there; give the address of a file of text, "
        "JSON lines or Parquet",
    )
