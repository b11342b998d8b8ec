"""Where text comes from: Python's own library, files, a URL, JSON lines, Parquet, the Hub.

Every source is a stream of documents in a fixed order; it can be read again from the start.
"""

import codecs
import glob
import hashlib
import http.client
import os
import re
import sysconfig
import tokenize
import types
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from accel_gpt.config import PrepareConfig
from accel_gpt.data.bpe import clean, pieces
from accel_gpt.errors import DataError, UserError

# Endings of the files that a folder is searched for; a file given by name may have any.
SUFFIXES: Mapping[str, tuple[str, ...]] = types.MappingProxyType(
    {
        "text": (".txt", ".text", ".md", ".rst", ".tex", ".html", ".py", ".c", ".h", ".cpp", ".js"),
        "jsonl": (".jsonl", ".json", ".ndjson", ".jsonl.gz", ".json.gz", ".jsonl.zst", ".json.zst"),
        "parquet": (".parquet",),
    }
)
# Tests and installed packages are no part of the library's own sources.
STDLIB_SKIP = frozenset(
    ("test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "_bundled")
)
BATCH_CHARACTERS = 1_000_000  # of text given to a process at once
FEW_TEXTS = 100  # below this many texts, each is parted at its end instead of held out whole
TIMEOUT = 60  # seconds without a byte before a download is given up
CHUNK = 1 << 20  # bytes read from the network at once


class Piece(NamedTuple):
    """A document or a part of one, with the split that it belongs to."""

    split: str
    text: str
    first: bool
    last: bool


def documents(config: PrepareConfig) -> Iterator[str]:
    """The texts of the source, in the same order every time.

    Raises `UserError` when there is nothing to read, `DataError` when a file cannot be decoded.
    """
    if config.source == "stdlib":
        return stdlib_texts(stdlib_files())
    if config.source == "text":
        return (read_text(path) for path in files(config))
    if config.source in ("jsonl", "parquet", "dataset"):
        return rows(config)
    raise UserError(
        "data.prepare.source is not set; give stdlib, text, jsonl, parquet or dataset, or an "
        "existing folder as data.train"
    )


def expected_bytes(config: PrepareConfig) -> int | None:
    """Bytes of text that `documents` will give, or None where that is not known beforehand."""
    return sum(path.stat().st_size for path in files(config)) if counted(config) else None


def count_texts(config: PrepareConfig) -> int | None:
    """Texts that `documents` will give, or None where that is not known beforehand."""
    return len(files(config)) if counted(config) else None


def counted(config: PrepareConfig) -> bool:
    """Whether one file of the source is one text."""
    return config.source in ("stdlib", "text")


def files(config: PrepareConfig) -> list[Path]:
    """Local files of the source, a URL being downloaded first."""
    if config.source == "stdlib":
        return stdlib_files()
    assert config.source is not None
    assert config.path is not None
    return find_files(config.path, SUFFIXES[config.source])


# --------------------------------------------------------------------------- splits


def split_pieces(config: PrepareConfig, cut_long: bool) -> Iterator[Piece]:
    """Every document with its split; `cut_long`: long ones in parts (see `bpe.pieces`)."""
    for split, text in split_documents(config):
        size = BATCH_CHARACTERS if cut_long else max(1, len(text))
        found = list(pieces(text, size)) if text else []
        for i, part in enumerate(found):
            yield Piece(split, part, first=i == 0, last=i == len(found) - 1)


def split_documents(config: PrepareConfig) -> Iterator[tuple[str, str]]:
    """(split, text): whole documents held out by a hash of their content, so that equal ones stay
    together; of fewer than `FEW_TEXTS` texts the end of each, as nanoGPT does.
    """
    count = count_texts(config)
    for text in map(clean, documents(config)):
        if count is not None and count < FEW_TEXTS:
            cut = int(len(text) * (1 - config.val_fraction))
            yield "train", text[:cut]
            yield "val", text[cut:]
        else:
            yield ("val" if held_out(text, config.val_fraction) else "train"), text


def held_out(text: str, fraction: float) -> bool:
    """True for a share `fraction` of all texts, decided by the text alone."""
    key = hashlib.blake2b(text.encode(), digest_size=8, key=b"accel_gpt val").digest()
    return int.from_bytes(key, "big") < fraction * 2**64


# --------------------------------------------------------------------------- files


def stdlib_files() -> list[Path]:
    """Python sources of the running interpreter's library, without tests."""
    root = Path(sysconfig.get_path("stdlib"))
    found = walk(root, (".py",), STDLIB_SKIP)
    if not found:
        raise UserError(
            f"this Python has no library sources in {root}; choose another data.prepare.source"
        )
    return found


def stdlib_texts(paths: list[Path]) -> Iterator[str]:
    """Python sources that decode by their declared encoding and are not empty."""
    for path in paths:
        try:
            with tokenize.open(path) as file:
                text = file.read()
        except (SyntaxError, UnicodeDecodeError):
            continue
        if text:
            yield text


def walk(root: Path, suffixes: tuple[str, ...], skip: frozenset[str] = frozenset()) -> list[Path]:
    """Regular files below `root` with one of `suffixes`, hidden ones left out, by relative path."""
    found: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in skip and not name.startswith(".")]
        matching = [n for n in names if n.lower().endswith(suffixes) and not n.startswith(".")]
        found.extend(path for n in matching if (path := Path(folder, n)).is_file())
    return sorted(found, key=lambda path: path.relative_to(root).parts)


def find_files(path: str, suffixes: tuple[str, ...]) -> list[Path]:
    """The files that `path` (file, folder, glob or URL) stands for, sorted."""
    if re.match(r"https?://", path):
        return [download(path)]
    place = Path(path).expanduser()
    if place.is_file():
        return [place]
    if place.is_dir():
        if found := walk(place, suffixes):
            return found
        raise UserError(
            f"data.prepare.path is the folder {path}, which holds no file ending in "
            f"{' '.join(suffixes)}; give a glob such as {path.rstrip('/')}/* to take others"
        )
    if not glob.has_magic(path):
        raise UserError(
            f"data.prepare.path is {path}, which does not exist (looked for {place.absolute()}); "
            "give a file, a folder, a glob or an http(s) URL"
        )
    found = [Path(name) for name in sorted(glob.glob(str(place), recursive=True))]
    found = [file for file in found if file.is_file()]
    if not found:
        raise UserError(
            f"data.prepare.path is {path}, which matches no file (looked from {Path.cwd()}); "
            "give a file, a folder, a glob or an http(s) URL"
        )
    return found


def read_text(path: Path) -> str:
    """A UTF-8 file as it is, line ends included; a byte order mark is dropped."""
    try:
        data = path.read_bytes().removeprefix(codecs.BOM_UTF8)
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        offset = error.start + path.stat().st_size - len(data)
        raise DataError(
            f"{path} is not UTF-8: byte 0x{data[error.start]:02x} at offset {offset}; convert it "
            "first, for example with iconv -t UTF-8"
        ) from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None


# --------------------------------------------------------------------------- network


def download(url: str) -> Path:
    """The file at `url`, fetched once into ~/.cache/accel_gpt (or $XDG_CACHE_HOME/accel_gpt)."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "accel_gpt"
    name = re.sub(r"[^A-Za-z0-9._-]", "_", url.split("?")[0].rstrip("/").rpartition("/")[2])
    target = cache / f"{hashlib.sha256(url.encode()).hexdigest()[:16]}-{name}"
    if target.exists():
        return target
    temporary = target.with_name(f"{target.name}.tmp-{os.getpid()}")
    try:
        cache.mkdir(parents=True, exist_ok=True)
        fetch(url, temporary)
        temporary.rename(target)
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise UserError(
            f"{url} could not be downloaded to {cache}: {error}; check the address and the "
            "network, or fetch it by hand and give data.prepare.path the file"
        ) from None
    finally:
        temporary.unlink(missing_ok=True)
    return target


def fetch(url: str, target: Path) -> None:
    """Write the content of `url` to `target`; an answer that breaks off is an `OSError`."""
    request = urllib.request.Request(url, headers={"User-Agent": "accel_gpt"})
    with urllib.request.urlopen(request, timeout=TIMEOUT) as answer, target.open("wb") as file:
        while data := answer.read(CHUNK):
            file.write(data)
        expected = answer.headers.get("Content-Length")
        if expected is not None and file.tell() != int(expected):
            raise OSError(f"it broke off after {file.tell()} of {expected} bytes")


# --------------------------------------------------------------------------- data sets


def rows(config: PrepareConfig) -> Iterator[str]:
    """Column `text_field` of every row that has text in it."""
    field = config.text_field
    what = config.dataset if config.source == "dataset" else config.path
    for number, row in enumerate(stream(config)):
        if field not in row:
            raise UserError(
                f"data.prepare.text_field is {field!r}, which {what} does not have; its columns: "
                f"{', '.join(row)}"
            )
        text = row[field]
        if text is not None and not isinstance(text, str):
            raise DataError(
                f"row {number} of {what} has {text!r:.50} in column {field}; expected text"
            )
        if text:
            yield text


def stream(config: PrepareConfig) -> Iterator[dict[str, Any]]:
    """Rows of a data set, read as they are asked for."""
    try:
        import datasets
    except ImportError:
        raise UserError(
            f"data.prepare.source is {config.source}, which needs the package datasets; "
            "pip install datasets"
        ) from None
    where = config.dataset if config.source == "dataset" else config.path
    try:
        if config.source == "dataset":
            yield from datasets.load_dataset(
                config.dataset, config.dataset_config, split=config.dataset_split, streaming=True
            )
        else:
            builder = "json" if config.source == "jsonl" else "parquet"
            names = [glob.escape(str(f)) for f in files(config) if f.stat().st_size]
            if names:
                yield from datasets.load_dataset(
                    builder, data_files=names, split="train", streaming=True
                )
    except UserError:
        raise
    except Exception as error:  # of datasets, pyarrow, fsspec, huggingface_hub, requests
        reason = f"{type(error).__name__}: {error}"
        if config.source == "dataset":
            raise UserError(
                f"data set {where} (config {config.dataset_config}, split {config.dataset_split}) "
                f"could not be read from the Hub: {reason}; check its id and the network"
            ) from None
        raise DataError(f"{where} cannot be read as {config.source}: {reason}") from None
