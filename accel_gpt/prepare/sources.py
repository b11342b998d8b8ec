"""Select the files of a source, in the order in which they are read.

JSON lines, Parquet and Arrow are recognized by the ending of the name, also if compressed. Every
other file is text unless it is binary. Only one kind is read: the source that the config names, or
with `auto` the kind with the most bytes. Downloads go to ~/.cache/accel_gpt (or
$XDG_CACHE_HOME/accel_gpt).
"""

import codecs
import functools
import glob
import hashlib
import json
import os
import re
import sysconfig
import types
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from accel_gpt.config.data import PrepareConfig, SourceKind
from accel_gpt.data.remote import Store, Unreachable, is_url
from accel_gpt.errors import AccelGPTError, DataError, UserError, require
from accel_gpt.files import describe_path, read_json
from accel_gpt.prepare.readers import SNIFFED_BYTES, python_literal, wide_encoding

COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
JSON_ENDINGS = (".jsonl", ".json", ".ndjson")
DATA_ENDINGS: Mapping[str, tuple[str, ...]] = types.MappingProxyType(
    {
        "jsonl": JSON_ENDINGS + tuple(a + b for a in JSON_ENDINGS for b in COMPRESSIONS),
        "parquet": (".parquet",),
        "arrow": (".arrow", ".feather"),
    }
)
# Endings of files that hold text. A .json file in the same folder only describes them.
TEXT_ENDINGS = (".txt", ".text", ".md", ".rst", ".tex", ".html", ".py", ".c", ".h", ".cpp", ".js")
COMPRESSED_TEXT = tuple(a + b for a in TEXT_ENDINGS for b in COMPRESSIONS)
TABLE_ENDINGS = tuple(a + b for a in (".csv", ".tsv") for b in ("", *COMPRESSIONS))
TABLE = "table"
BINARY = "binary"
TEXT_CONTROLS = frozenset(b"\a\b\t\n\f\r\x1b")  # control characters that text may hold
# Files that mark the folder of a run, or a data folder, finished or not
MARKER_FILES = (".lock", "run.json", "dataset.json", "progress.json")
# Tests and installed packages do not count as the library's sources.
STDLIB_SKIP = frozenset(
    ("test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "_bundled")
)
LINES = 10  # endings to print; assumption: nobody reads more


def check_source(config: PrepareConfig) -> None:
    """Raise `UserError` if there is no source, or if standard input cannot provide it."""
    require(
        config.source is not None,
        "data.prepare.source is not set; set it to stdlib, text, jsonl, parquet, arrow or dataset, "
        "or set data.train to an existing data folder",
    )
    require(
        config.path != "-" or config.source in ("text", "jsonl"),
        f"data.prepare.source is {config.source}, but standard input holds text or jsonl; set "
        "data.prepare.source to text or jsonl, or give a file",
    )


def select(config: PrepareConfig) -> "Selection":
    """Select the files of a source, after downloading the file of a URL.

    A data set and standard input have no files. Raises `UserError` if all files are empty.
    """
    check_source(config)
    assert config.source is not None
    path = str(config.path)
    if config.source == "dataset" or path == "-":
        return Selection(path=path, source=config.source, files=[])
    if config.source == "stdlib":
        return Selection(path=path, source=config.source, files=stdlib_files())
    saved: list[Path] | None = None
    if is_url(path):
        saved = [download_text(path)]
    elif config.source == "arrow":
        saved = saved_files(path, config.dataset_split)
    if saved is None:
        selection = select_files(path, config.source)
    else:
        selection = Selection(path=path, source=config.source, files=saved)
    require(
        any(file.stat().st_size for file in selection.files),
        f"data.prepare.path is {path}, but {selection.files[0]} is empty; give a file that holds "
        "text",
    )
    return selection


def source_fingerprint(config: PrepareConfig, files: Sequence[Path], times: bool = True) -> str:
    """Return a SHA-256 (hex) that identifies the source; empty for standard input.

    For files it covers names, sizes and, with `times`, modification times. Without `times`, a copy
    of the files has the same fingerprint. For a download it covers URL and size; for a data set its
    id, configuration and split.
    """
    if config.path == "-":
        return ""
    seen: list[object] = []
    if config.source == "dataset":
        seen = [config.dataset, config.dataset_config, config.dataset_split]
    elif config.path is not None and is_url(config.path):
        seen = [config.path, *(path.stat().st_size for path in files)]
    else:
        paths = [path.absolute() for path in files]
        root = os.path.commonpath([path.parent for path in paths])
        for path in paths:
            status = path.stat()
            entry: list[object] = [path.relative_to(root).as_posix(), status.st_size]
            if times:
                entry.append(status.st_mtime_ns)
            seen.append(entry)
    return hashlib.sha256(json.dumps(seen).encode()).hexdigest()


def guess_source(path: str) -> SourceKind:
    """Guess the kind of source of `path`.

    A folder of save_to_disk is arrow. Other files are guessed as in `select_files()`. A URL is
    guessed by its ending, and is text if the ending is unknown. Raises `UserError` if there is
    nothing to read, and for standard input, which has no ending.
    """
    require(
        path != "-",
        "data.prepare.path is -, and the kind of standard input cannot be guessed; set --source "
        "text or --source jsonl",
    )
    if is_saved(Path(path).expanduser()):
        return "arrow"
    if is_url(path):
        kind = kind_of_name(path.split("?")[0].split("#")[0])
        require(kind != TABLE, is_table(path))
        return cast(SourceKind, kind or "text")
    return select_files(path).source


# --------------------------------------------------------------------------- a selection


@dataclass(frozen=True)
class Group:
    """Files with the same ending that are left out for the same reason."""

    name: str
    """The ending; empty if the files have none."""
    reason: str
    files: int
    bytes: int

    def line(self) -> str:
        """Describe the group in one line."""
        ending = f"ending in {self.name}" if self.name else "without an ending"
        return f"left out: {files_text(self.files)} {ending}, {self.bytes:,} bytes: {self.reason}"


@dataclass(frozen=True)
class Selection:
    """The files of a path that are read, and those that are left out."""

    path: str
    source: SourceKind
    files: list[Path]
    groups: list[Group] = field(default_factory=list)
    """Files that are left out, grouped by ending, largest group first."""
    skipped: Mapping[str, int] = field(default_factory=dict)
    """Numbers of entries that were skipped without looking at them, by reason."""

    def lines(self) -> list[str]:
        """Describe the selection: a line for the files that are read, then lines for the rest."""
        size = sum(file.stat().st_size for file in self.files)
        what = self.path
        if not os.path.isfile(os.path.expanduser(self.path)):
            what = f"{files_text(len(self.files))} of {self.path}"
        found = [f"reading {what} as {self.source}, {size:,} bytes"]
        found += [group.line() for group in self.groups[:LINES]]
        if rest := self.groups[LINES:]:
            files = sum(group.files for group in rest)
            size = sum(group.bytes for group in rest)
            found.append(
                f"left out: {files_text(files)} of {len(rest)} more endings, {size:,} bytes"
            )
        for reason, count in sorted(self.skipped.items()):
            found.append(f"left out: {reason}: {count:,}")
        return found


def select_files(path: str, source: SourceKind = "auto") -> Selection:
    """Select the files to read from `path`: a local file, folder or glob.

    `source` auto selects the kind with the most bytes. Other sources read a named file regardless
    of its ending. They also read every file of a glob if no file has the source's kind; text still
    skips binary files.

    Raises `UserError` if `path` does not exist or holds nothing to read.
    """
    check_path(path)
    local = os.path.expanduser(path)
    if source != "auto" and os.path.isfile(local):
        return Selection(path=path, source=source, files=[Path(local)])
    found, skipped = list_files(path)
    kinds = {file: kind_of_file(file) for file in found}
    if source == "text":  # a table is read as text on request only
        kinds = {file: "text" if kind == TABLE else kind for file, kind in kinds.items()}
    chosen = largest_kind(kinds) if source == "auto" else source
    files = [file for file in found if kinds[file] == chosen]
    if not files and not os.path.isdir(local):
        files = [f for f in found if chosen != "text" or kinds[f] not in (BINARY, TABLE)]
    read = set(files)
    groups = group_files([file for file in found if file not in read], kinds)
    if not files:
        raise UserError(nothing_to_read(path, chosen, groups))
    return Selection(path=path, source=chosen, files=files, groups=groups, skipped=skipped)


def check_path(path: str) -> None:
    """Raise `UserError` unless `path` is a file, a folder or a glob that matches a file."""
    local = os.path.expanduser(path)
    if os.path.isfile(local) or os.path.isdir(local):
        return
    key = "data.prepare.path"
    advice = "give a file, a folder, a glob or an http(s) URL"
    if os.path.exists(local):
        raise UserError(f"{key} is {path}, but it {describe_path(local)}; {advice}")
    if glob.has_magic(path):
        matched = glob.iglob(local, recursive=True)
        if any(os.path.isfile(name) for name in matched):
            return
        raise UserError(
            f"{key} is {path}, but it matches no file (looked from {Path.cwd()}); {advice}"
        )
    raise UserError(
        f"{key} is {path}, but it does not exist (looked for {os.path.abspath(local)}); {advice}"
    )


# --------------------------------------------------------------------------- what a path holds


def list_files(path: str) -> tuple[list[Path], dict[str, int]]:
    """List the files of a file, folder or glob in order, and count skipped entries by reason."""
    local = os.path.expanduser(path)
    if os.path.isdir(local):
        return walk(Path(local))
    if os.path.isfile(local):
        return [Path(local)], {}
    names = sorted(glob.glob(local, recursive=True))
    return [Path(name) for name in names if os.path.isfile(name)], {}


def walk(root: Path) -> tuple[list[Path], dict[str, int]]:
    """List the regular files below `root` by relative path, and count skipped entries by reason."""
    found: list[Path] = []
    skipped: defaultdict[str, int] = defaultdict(int)
    for folder, folders, names in os.walk(root):
        entered = []
        for name in folders:
            if reason := folder_reason(Path(folder, name)):
                skipped[reason] += 1
            else:
                entered.append(name)
        folders[:] = entered
        for name in names:
            path = Path(folder, name)
            if name.startswith("."):
                skipped["hidden files and folders"] += 1
            elif not path.is_file():
                skipped["broken links, pipes, sockets and devices"] += 1
            elif name.endswith(".lock") and not path.stat().st_size:
                skipped["empty lock files"] += 1
            else:
                found.append(path)
    found.sort(key=lambda path: path.relative_to(root).parts)
    return found, dict(skipped)


def folder_reason(folder: Path) -> str:
    """Return the reason to skip a folder; empty if it is read."""
    if folder.name.startswith("."):
        return "hidden files and folders"
    if folder.is_symlink():
        return "links to folders"
    if any((folder / name).exists() for name in MARKER_FILES):
        return "folders of runs and of prepared data"
    return ""


def kind_of_file(path: Path) -> str:
    """Return the kind of source of a file, or `TABLE` or `BINARY`."""
    if kind := kind_of_name(path.name):
        return kind
    status = path.stat()
    return BINARY if is_binary(path, status.st_size, status.st_mtime_ns) else "text"


def kind_of_name(name: str) -> str:
    """Return the kind of source by the ending of a name, or `TABLE`; empty if it is unknown."""
    for kind, endings in DATA_ENDINGS.items():
        if name.lower().endswith(endings):
            return kind
    if name.lower().endswith(TABLE_ENDINGS):
        return TABLE
    return "text" if name.lower().endswith(COMPRESSED_TEXT) else ""


@functools.lru_cache(maxsize=1 << 20)
def is_binary(path: Path, size: int, mtime_ns: int) -> bool:
    """Return whether the start of a file looks binary.

    A binary file holds a zero byte, or is not UTF-8 and holds control characters; it is not text in
    UTF-16 or UTF-32. Text in another encoding does not count as binary; reading it raises an error
    with the first invalid byte. `size` and `mtime_ns` are part of the cache key, so a changed file
    is read again.
    """
    if not size:
        return False
    try:
        with path.open("rb") as file:
            start = file.read(SNIFFED_BYTES)
    except OSError:
        return False  # reading the file raises the error later
    if wide_encoding(start):
        return False
    if b"\0" in start:
        return True
    try:
        codecs.getincrementaldecoder("utf-8")().decode(start)
    except UnicodeDecodeError:
        return any(byte < 32 and byte not in TEXT_CONTROLS for byte in start)
    return False


def largest_kind(kinds: Mapping[Path, str]) -> SourceKind:
    """Return the kind of source with the most bytes.

    If another file has the ending of a kind, .json files do not count.
    """
    readable = {file: kind for file, kind in kinds.items() if kind not in (BINARY, TABLE)}
    known = [
        file
        for file in readable
        if file.name.lower().endswith(TEXT_ENDINGS)
        or (kind_of_name(file.name) and not file.name.lower().endswith(".json"))
    ]
    amounts: defaultdict[str, int] = defaultdict(int)
    for file, kind in readable.items():
        if not (known and file.name.lower().endswith(".json")):
            amounts[kind] += file.stat().st_size + 1
    order = ("text", *DATA_ENDINGS)
    return cast(SourceKind, max(order, key=lambda kind: amounts[kind]))


# --------------------------------------------------------------------------- what is left out


def group_files(files: list[Path], kinds: Mapping[Path, str]) -> list[Group]:
    """Group files that are left out by ending and kind, largest group first."""
    members: defaultdict[tuple[str, str], list[Path]] = defaultdict(list)
    for file in files:
        members[file.suffix.lower(), kinds[file]].append(file)
    groups = [
        Group(
            name=ending,
            reason=kind_reason(kind),
            files=len(group),
            bytes=sum(file.stat().st_size for file in group),
        )
        for (ending, kind), group in members.items()
    ]
    return sorted(groups, key=lambda group: (-group.bytes, group.name))


def kind_reason(kind: str) -> str:
    """Return the reason why files of a kind are left out."""
    if kind == BINARY:
        return "binary, not UTF-8 text"
    if kind == TABLE:
        return "a table; to read one of its columns, write it as JSON lines"
    return f"{kind}; set source to {kind} to read it instead"


def nothing_to_read(path: str, source: SourceKind, groups: list[Group]) -> str:
    """Return the error message for a path that holds no file of the source's kind."""
    if source == "text" and any(group.reason == kind_reason(TABLE) for group in groups):
        return is_table(path)
    if os.path.isfile(os.path.expanduser(path)):
        return (
            f"data.prepare.path is {path}, but it is binary, not UTF-8 text; give a file of text "
            "(iconv converts other encodings), or set data.prepare.source to jsonl, parquet or "
            "arrow"
        )
    problem = f"data.prepare.path is {path}, but it holds no file"
    if not groups:
        return f"{problem}; put text into it, or give another folder"
    files = files_text(sum(group.files for group in groups))
    endings = " ".join(sorted({group.name for group in groups} - {""})[:LINES])
    if source == "text":
        problem = f"data.prepare.path is {path}, but it holds no text"
    else:
        problem += f" ending in {' '.join(DATA_ENDINGS[source])}"
    return (
        f"{problem}, only {files} that {source} does not read ({endings or 'without an ending'}); "
        "give another folder, or set data.prepare.source to another kind"
    )


def is_table(path: str) -> str:
    """Return the error message for a path that holds tables."""
    file = python_literal(path if kind_of_name(path) == TABLE else "FILE.csv")
    if ".tsv" in path:
        file += r", sep='\t'"
    return (
        f"data.prepare.path is {path}, a table; write it as JSON lines, for example with python -c "
        f"\"import datasets; datasets.Dataset.from_csv({file}).to_json('table.jsonl')\", give that "
        "file, and set data.prepare.text_field to the column of the text; to read the table as it "
        "is, set data.prepare.source to text"
    )


def files_text(count: int) -> str:
    """Return `1 file` or `N files`."""
    return f"{count:,} file" if count == 1 else f"{count:,} files"


# --------------------------------------------------------------------------- other places


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


def is_saved(folder: Path) -> bool:
    """Return whether `datasets` wrote a folder with save_to_disk."""
    names = ("state.json", "dataset_dict.json")
    return any(os.path.isfile(folder / name) for name in names)


def saved_files(path: str, split: str) -> list[Path] | None:
    """List the files of a folder that `datasets` wrote with save_to_disk; None for other folders.

    Other Arrow files in the folder are caches and are not listed. `split` selects one of several
    splits.
    """
    folder = Path(path).expanduser()
    if not is_saved(folder):
        return None
    try:
        if os.path.isfile(folder / "dataset_dict.json"):
            splits = [str(name) for name in read_json(folder / "dataset_dict.json")["splits"]]
            require(
                split in splits,
                f"data.prepare.dataset_split is {split}, but {path} has no such split; set it to "
                f"one of its splits: {', '.join(splits)}",
            )
            folder /= split
        state = folder / "state.json"
        found = [state.with_name(part["filename"]) for part in read_json(state)["_data_files"]]
        missing = [file.name for file in found if not file.is_file()]
        if missing:
            raise ValueError(f"{missing[0]} is missing")
    except AccelGPTError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{folder / 'state.json'} or dataset_dict.json was not written by save_to_disk, or is "
            f"damaged ({error!r:.80}); copy the whole folder again"
        ) from None
    return found


def download_text(url: str) -> Path:
    """Download the file at `url`, unless it is in the cache; return its path."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "accel_gpt"
    address, mark, query = url.partition("?")
    folder, _, name = address.rstrip("/").rpartition("/")
    number = hashlib.sha256(url.encode()).hexdigest()[:16]
    target = cache / f"{number}-{re.sub(r'[^A-Za-z0-9._-]', '_', name)}"
    if target.exists():
        return target
    temporary = target.with_name(f"{target.name}.tmp-{os.getpid()}")
    try:
        cache.mkdir(parents=True, exist_ok=True)
        store = Store(f"{folder}{mark}{query}")
        store.download(name, temporary)
        temporary.rename(target)
    except (OSError, AccelGPTError, Unreachable) as error:
        raise UserError(
            f"{url} could not be downloaded to {cache}: {error}; if the network blocks it, "
            "download the file yourself and set data.prepare.path to it"
        ) from None
    finally:
        temporary.unlink(missing_ok=True)
    return target
