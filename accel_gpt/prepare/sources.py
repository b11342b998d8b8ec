"""Which files of a source are read, in which order, and which are left out.

The ending of a name tells JSON lines, Parquet and Arrow, also of compressed files; every other file
is text unless it is binary. One kind is read: the source that the config names, or with `auto` the
kind with the most bytes. Downloads go to ~/.cache/accel_gpt (or $XDG_CACHE_HOME/accel_gpt).
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

COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
JSON_ENDINGS = (".jsonl", ".json", ".ndjson")
DATA_ENDINGS: Mapping[str, tuple[str, ...]] = types.MappingProxyType(
    {
        "jsonl": JSON_ENDINGS + tuple(a + b for a in JSON_ENDINGS for b in COMPRESSIONS),
        "parquet": (".parquet",),
        "arrow": (".arrow", ".feather"),
    }
)
# Endings of files that hold text for certain: a .json file beside them only describes them.
TEXT_ENDINGS = (".txt", ".text", ".md", ".rst", ".tex", ".html", ".py", ".c", ".h", ".cpp", ".js")
COMPRESSED_TEXT = tuple(a + b for a in TEXT_ENDINGS for b in COMPRESSIONS)
BINARY = "binary"
SNIFFED_BYTES = 8192  # bytes at the start of a file that tell text from binary, as in git
TEXT_CONTROLS = frozenset(b"\a\b\t\n\f\r\x1b")  # control characters that text may hold
# Files that only a run, a data folder, or an unfinished one holds.
MADE_HERE = (".lock", "run.json", "dataset.json", "progress.json")
# Tests and installed packages are no part of the library's own sources.
STDLIB_SKIP = frozenset(
    ("test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "_bundled")
)
LINES = 10  # lines about endings that are printed; assumption: more are not read


def check_source(config: PrepareConfig) -> None:
    """Raise `UserError` for a source that is not text, or not of standard input."""
    require(
        config.source is not None,
        "data.prepare.source is not set; for text give stdlib, text, jsonl, "
        "parquet, arrow or dataset, otherwise an existing folder as data.train",
    )
    require(
        config.path != "-" or config.source in ("text", "jsonl"),
        f"data.prepare.source is {config.source}, which cannot be read from standard input; give "
        "text or jsonl, or a file",
    )


def select(config: PrepareConfig) -> "Selection":
    """Choose the files of a source; a URL is downloaded first.

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
        f"data.prepare.path is {path}, which holds no text: {selection.files[0]} is empty; "
        "expected a file with text in it",
    )
    return selection


def source_fingerprint(config: PrepareConfig, files: Sequence[Path], times: bool = True) -> str:
    """Return a SHA-256 in hex that changes with the source; empty for standard input.

    For files it covers names, sizes and, with `times`, times of change: without them, a copy of the
    files has the same one. For a download it covers URL and size; for a data set its id.
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
    """Tell what `path` holds: see `select_files`; a URL by its ending, else text.

    Raises `UserError` if there is nothing to read, and for standard input, which has no ending.
    """
    require(
        path != "-",
        "data.prepare.path is -, and standard input does not tell what it holds; give --source "
        "text or --source jsonl",
    )
    if is_saved(Path(path).expanduser()):
        return "arrow"
    if is_url(path):
        name = path.split("?")[0].split("#")[0]
        return cast(SourceKind, kind_of_name(name) or "text")
    return select_files(path).source


# --------------------------------------------------------------------------- a selection


@dataclass(frozen=True)
class Group:
    """Files of one ending that are left out for one reason."""

    name: str
    """Their ending; empty: they have none."""
    reason: str
    files: int
    bytes: int

    def line(self) -> str:
        """Describe the group in one line."""
        ending = f"ending in {self.name}" if self.name else "without an ending"
        return f"left out: {files_text(self.files)} {ending}, {self.bytes:,} bytes: {self.reason}"


@dataclass(frozen=True)
class Selection:
    """What is read of a path, and what is left out."""

    path: str
    source: SourceKind
    files: list[Path]
    groups: list[Group] = field(default_factory=list)
    """Files that are left out, by ending, the most bytes first."""
    skipped: Mapping[str, int] = field(default_factory=dict)
    """Entries of folders that were not looked into, by description."""

    def lines(self) -> list[str]:
        """Describe the selection: one line for what is read, one for each kind left out."""
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
    """Choose the files of `path` (a file, a folder or a glob of this machine) that are read.

    `source` auto: the kind with the most bytes. A file that is given by name, or by a glob that
    matches no file of the source's kind, is read as the source whatever its ending.

    Raises `UserError` if `path` does not exist or holds nothing to read.
    """
    check_path(path)
    given = os.path.expanduser(path)
    if source != "auto" and os.path.isfile(given):
        return Selection(path=path, source=source, files=[Path(given)])
    found, skipped = list_files(path)
    kinds = {file: kind_of_file(file) for file in found}
    chosen = largest_kind(kinds) if source == "auto" else source
    files = [file for file in found if kinds[file] == chosen]
    if not files and not os.path.isdir(given):
        files = [file for file in found if chosen != "text" or kinds[file] != BINARY]
    read = set(files)
    groups = group_files([file for file in found if file not in read], kinds)
    if not files:
        raise UserError(nothing_to_read(path, chosen, groups))
    return Selection(path=path, source=chosen, files=files, groups=groups, skipped=skipped)


def check_path(path: str) -> None:
    """Raise `UserError` unless `path` is a file, a folder or a glob that matches a file."""
    given = os.path.expanduser(path)
    if os.path.isfile(given) or os.path.isdir(given):
        return
    key = "data.prepare.path"
    expected = "give a file, a folder, a glob or an http(s) URL"
    if os.path.exists(given):
        raise UserError(f"{key} is {path}, which {describe_path(given)}; {expected}")
    if glob.has_magic(path):
        matched = glob.iglob(given, recursive=True)
        if any(os.path.isfile(name) for name in matched):
            return
        raise UserError(
            f"{key} is {path}, which matches no file (looked from {Path.cwd()}); {expected}"
        )
    raise UserError(
        f"{key} is {path}, which does not exist (looked for {os.path.abspath(given)}); {expected}"
    )


# --------------------------------------------------------------------------- what a path holds


def list_files(path: str) -> tuple[list[Path], dict[str, int]]:
    """List the files that a path stands for, in order, and count what is not looked into."""
    given = os.path.expanduser(path)
    if os.path.isdir(given):
        return walk(Path(given))
    if os.path.isfile(given):
        return [Path(given)], {}
    names = sorted(glob.glob(given, recursive=True))
    return [Path(name) for name in names if os.path.isfile(name)], {}


def walk(root: Path) -> tuple[list[Path], dict[str, int]]:
    """List the regular files below `root` by relative path, and count what is not looked into."""
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
    """Say why a folder is not looked into; empty if it is."""
    if folder.name.startswith("."):
        return "hidden files and folders"
    if folder.is_symlink():
        return "links to folders"
    if any((folder / name).exists() for name in MADE_HERE):
        return "folders of runs and of prepared data"
    return ""


def kind_of_file(path: Path) -> str:
    """Return the kind of source that a file is, or `BINARY`."""
    if kind := kind_of_name(path.name):
        return kind
    status = path.stat()
    return BINARY if is_binary(path, status.st_size, status.st_mtime_ns) else "text"


def kind_of_name(name: str) -> str:
    """Tell the kind of source from the ending of a name; empty if it tells none."""
    for kind, endings in DATA_ENDINGS.items():
        if name.lower().endswith(endings):
            return kind
    return "text" if name.lower().endswith(COMPRESSED_TEXT) else ""


@functools.lru_cache(maxsize=1 << 20)
def is_binary(path: Path, size: int, mtime_ns: int) -> bool:
    """Return whether the start of a file is not text.

    A binary file holds a zero byte, or is not UTF-8 and holds control characters. Text in another
    encoding is not binary: reading it raises an error that names the first wrong byte. `size` and
    `mtime_ns` tell versions of the file apart.
    """
    if not size:
        return False
    try:
        with path.open("rb") as file:
            start = file.read(SNIFFED_BYTES)
    except OSError:
        return False  # the error is raised when the file is read
    if b"\0" in start:
        return True
    try:
        codecs.getincrementaldecoder("utf-8")().decode(start)
    except UnicodeDecodeError:
        return any(byte < 32 and byte not in TEXT_CONTROLS for byte in start)
    return False


def largest_kind(kinds: Mapping[Path, str]) -> SourceKind:
    """Return the kind of source with the most bytes.

    Bare .json beside other kinds does not count, unless they are text only by their content.
    """
    readable = {file: kind for file, kind in kinds.items() if kind != BINARY}
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
    """Group files that are left out by ending and kind, the most bytes first."""
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
    """Say why files of a kind are left out."""
    if kind == BINARY:
        return "binary, not UTF-8 text"
    return f"{kind}; set source to {kind} to read it instead"


def nothing_to_read(path: str, source: SourceKind, groups: list[Group]) -> str:
    """Describe a path that holds no file of the source's kind."""
    if os.path.isfile(os.path.expanduser(path)):
        return (
            f"data.prepare.path is {path}, which is binary, not UTF-8 text; give a file of text, "
            "or set data.prepare.source to jsonl, parquet or arrow"
        )
    problem = f"data.prepare.path is {path}, which holds no file"
    if not groups:
        return f"{problem}; put text into it, or give another folder"
    files = files_text(sum(group.files for group in groups))
    endings = " ".join(sorted({group.name for group in groups} - {""})[:LINES])
    if source == "text":
        problem = f"data.prepare.path is {path}, which holds no text"
    else:
        problem += f" ending in {' '.join(DATA_ENDINGS[source])}"
    return (
        f"{problem}, only {files} that {source} does not read ({endings or 'without an ending'}); "
        "give another folder, or set data.prepare.source to another kind"
    )


def files_text(count: int) -> str:
    """Return a number of files in words."""
    return f"{count:,} file" if count == 1 else f"{count:,} files"


# --------------------------------------------------------------------------- other places


def stdlib_files() -> list[Path]:
    """List the Python sources of the running interpreter's library, without tests."""
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
        f"this Python has no library sources in {root}; choose another data.prepare.source",
    )
    return found


def is_saved(folder: Path) -> bool:
    """Whether `datasets` wrote a folder with save_to_disk."""
    names = ("state.json", "dataset_dict.json")
    return any(os.path.isfile(folder / name) for name in names)


def saved_files(path: str, split: str) -> list[Path] | None:
    """List the files of a folder that `datasets` wrote with save_to_disk; None for other folders.

    Other Arrow files in it are caches of derived data. `split` chooses one of several splits.
    """
    folder = Path(path).expanduser()
    if not is_saved(folder):
        return None
    try:
        if os.path.isfile(folder / "dataset_dict.json"):
            splits = [str(name) for name in read_json(folder / "dataset_dict.json")["splits"]]
            require(
                split in splits,
                f"data.prepare.dataset_split is {split}, which {path} does not have; it has "
                f"{', '.join(splits)}",
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
            f"{folder / 'state.json'} or dataset_dict.json is not as save_to_disk writes it "
            f"({error!r:.80}); copy the whole folder again"
        ) from None
    return found


def download_text(url: str) -> Path:
    """Download the file at `url`, unless it was downloaded before; return its path."""
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
            f"{url} could not be downloaded to {cache}: {error}; if the network does not let you, "
            "fetch it by hand and give data.prepare.path the file"
        ) from None
    finally:
        temporary.unlink(missing_ok=True)
    return target
