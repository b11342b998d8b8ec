"""Read token ids that have no index: of other projects in place, or of `shards()` in --code.

`FORMATS` lists the files of other projects. A folder has one format. The split follows from the
file name, the tokenizer from meta.pkl, a tokenizer.json, `data.tokenizer` or the format.
"""

import contextlib
import hashlib
import json
import pickle
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from accel_gpt.data.downloads import RemoteFolder
from accel_gpt.data.index import INDEX, is_shard_name
from accel_gpt.data.remote import FileInfo
from accel_gpt.data.shards import (
    BLOCK,
    BLOCKS,
    NoSplit,
    Shard,
    Split,
    Tokens,
    npy_header,
    sampled_digest,
    token_dtype,
)
from accel_gpt.data.tokenizer import (
    CharsTokenizer,
    Tokenizer,
    load_gpt2,
    load_tokenizer,
    named_tokenizer,
)
from accel_gpt.data.tokenizer_json import CONFIG
from accel_gpt.errors import DataError, UserError, require
from accel_gpt.files import TOKEN_ENDINGS
from accel_gpt.own_code import OwnFunction

META = "meta.pkl"
TOKENIZER = "tokenizer.json"
GPT2 = ("gpt2", "openai-community/gpt2")  # its names in files of other projects


@dataclass(frozen=True)
class Format:
    """How a project stores token ids. None: the file says it."""

    project: str
    names: str
    """A glob of the names of its files."""
    dtype: str | None = None
    magic: int | None = None
    """uint32 at byte 0 of a .bin file; the version and the number of ids follow as uint32."""
    version: int | None = None
    header: int = 0
    """Bytes before the ids."""
    tokenizer: str | None = None


LLM_C = "llm.c and modded-nanogpt"  # llm.c, dev/data/data_common.py, HEADERS_INFO
FORMATS = (
    Format(LLM_C, "*.bin", "<u2", magic=20240520, version=1, header=1024, tokenizer="gpt2"),
    Format(LLM_C, "*.bin", "<u4", magic=20240801, version=7, header=1024),
    Format("nanoGPT", "train.bin", "<u2"),
    Format("nanoGPT", "val.bin", "<u2"),
    Format("build-nanogpt and other NumPy", "*.npy"),
    Format("datatrove", "*.ds"),
)


@dataclass(frozen=True)
class TokenFile:
    """A file of token ids, as its header or metadata describes it."""

    name: str
    dtype: np.dtype[Any]
    offset: int  # bytes before the ids
    tokens: int | None = None  # None: as many as fit into the file
    tokenizer: str | None = None


@dataclass(frozen=True)
class DataFolder:
    """A local folder, or a folder at a URL whose files `remote` downloads to `path`."""

    path: Path
    remote: RemoteFolder | None = None

    @property
    def is_foreign(self) -> bool:
        """Return whether another project wrote the folder, so that it has no index."""
        exists = self.remote is not None or self.path.is_dir()
        return exists and not (self.path / INDEX).exists()

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Load the tokenizer of a folder that has an index."""
        return load_tokenizer(self.path)

    @cached_property
    def files(self) -> dict[str, FileInfo]:
        """List the files by name. Raises `UserError` if a remote folder cannot be listed."""
        if self.remote:
            return self.remote.list()
        if not self.path.is_dir():
            return {}
        files = [file for file in self.path.iterdir() if file.is_file()]
        return {file.name: FileInfo(file.stat().st_size) for file in files}

    def fetch(self, name: str) -> Path:
        """Return the path of a file, after downloading it if the folder is remote."""
        return self.remote.fetch(name) if self.remote else self.path / name


def open_foreign(folder: DataFolder, split: str, tokenizer: str | None) -> tuple[Split, Tokenizer]:
    """Open a split of a folder that another project wrote, with its tokenizer.

    `tokenizer`: `data.tokenizer`, for files that do not say it. If the folder is remote, only the
    first shard of each series is downloaded. Raises `DataError` if the files have several formats
    or are damaged, `UserError` if tokenizer or type are not known.
    """
    files = find_token_files(folder, split)
    first = files[0]
    made_by = foreign_tokenizer(folder, [file.tokenizer for file in files], tokenizer)
    shards: list[Shard] = []
    content: list[list[Any]] = []  # hashed into the fingerprint
    for file in files:
        if (file.dtype, file.offset) != (first.dtype, first.offset):
            raise DataError(
                f"{folder.path} holds {split} shards of several formats: {first.name} in "
                f"{first.dtype}, {file.name} in {file.dtype}; put each into its own folder"
            )
        info = folder.files[file.name]
        itemsize = file.dtype.itemsize
        tokens = file.tokens
        if tokens is None:
            tokens = max(info.size - file.offset, 0) // itemsize
        expected = file.offset + tokens * itemsize
        if info.size != expected:
            raise DataError(
                f"{folder.path / file.name} has {info.size} bytes, expected {expected} for "
                f"{tokens} tokens of {file.dtype}: it is damaged, or the type is wrong"
            )
        if not tokens:
            continue
        sample = None
        if folder.remote:
            content.append([file.name, info.size, info.sha256 or info.tag])
        else:
            sample = sampled_digest(folder.path / file.name, file.offset)
            content.append([tokens, sample])
        shards.append(Shard(file.name, tokens, sample=sample, offset=file.offset))
    if not shards:
        raise DataError(f"the {split} shards of {folder.path} are all empty")
    is_raw = first.name.endswith(".bin") and first.offset == 0
    require(
        not is_raw or token_dtype(made_by.vocab_size).itemsize <= first.dtype.itemsize,
        f"{folder.path / first.name} is read as uint16, which does not hold all "
        f"{made_by.vocab_size:,} tokens of the tokenizer; use shards() in a file of --code",
    )
    opened = split_without_index(
        folder=folder.path,
        name=split,
        shards=shards,
        dtype=np.dtype(f"<u{first.dtype.itemsize}"),
        tokenizer=made_by,
        content=content,
    )
    return replace(opened, remote=folder.remote), made_by


def split_without_index(
    folder: Path,
    name: str,
    shards: Sequence[Shard],
    dtype: np.dtype[Any],
    tokenizer: Tokenizer,
    content: Sequence[Sequence[Any]],
) -> Split:
    """Return a split whose fingerprint follows from tokenizer and `content`, one for each shard."""
    identity = json.dumps([tokenizer.fingerprint, content])
    return Split(
        folder=folder,
        name=name,
        shards=tuple(shards),
        dtype=dtype,
        vocab_size=tokenizer.vocab_size,
        eot_id=tokenizer.eot_id,
        tokenizer_kind=tokenizer.kind,
        tokenizer_fingerprint=tokenizer.fingerprint,
        fingerprint=hashlib.sha256(identity.encode()).hexdigest(),
    )


def open_own_shards(
    function: OwnFunction, folder: DataFolder, split: str, tokenizer: str | None
) -> tuple[Split, Tokenizer]:
    """Open the arrays that `shards(folder, split)` in --code returns, with their tokenizer.

    They may be `numpy.memmap`: only what is trained on is read. Raises `UserError` unless they are
    one-dimensional arrays of whole numbers, with at least one token.
    """
    place = function.place
    returned = function(folder=folder.path, split=split)
    arrays: list[Tokens] = []
    with contextlib.suppress(TypeError, ValueError):  # not a list of arrays; lists of many lengths
        arrays = [np.asanyarray(value) for value in returned]
    are_ids = all(array.ndim == 1 and array.dtype.kind in "ui" for array in arrays if array.size)
    arrays = [array for array in arrays if array.size]
    require(
        bool(arrays) and are_ids,
        f"{place} returned no token ids for the {split} split of {folder.path}; return a list of "
        "one-dimensional arrays of whole numbers, for train and for val",
    )
    dtype = np.result_type(*arrays)
    if dtype.kind not in "ui":  # the common type of int64 and uint64 is float64
        dtype = np.dtype(np.int64)
    shards = []
    content = []
    for number, array in enumerate(arrays):
        shards.append(Shard(f"array {number} of {place}", len(array)))
        hasher = hashlib.sha256()
        last = max(len(array) - BLOCK, 0)
        for i in range(BLOCKS):  # the first, the last, and some between, in one type
            start = last * i // (BLOCKS - 1)
            hasher.update(array[start : start + BLOCK].astype("<i8").tobytes())
        content.append([len(array), hasher.hexdigest()])
    made_by = foreign_tokenizer(folder, [None], tokenizer)
    opened = split_without_index(
        folder=folder.path,
        name=split,
        shards=shards,
        dtype=dtype,
        tokenizer=made_by,
        content=content,
    )
    return replace(opened, arrays=tuple(arrays)), made_by


# --------------------------------------------------------------------------- which files


def find_token_files(folder: DataFolder, split: str) -> list[TokenFile]:
    """Describe the token files of a split, sorted by the numbers in their names.

    Files whose names differ only in numbers form a series. In a remote folder only the first file
    of each series is read.
    """
    names = [name for name in folder.files if name.endswith(TOKEN_ENDINGS) and is_shard_name(name)]
    # "a_9.npy" before "a_10.npy": each number as 20 digits
    candidates = sorted(
        sorted(names), key=lambda name: re.sub("[0-9]+", lambda n: n[0].zfill(20), name)
    )
    series: dict[str, TokenFile] = {}
    files: list[TokenFile] = []
    for name in files_of_split(candidates, split):
        key = re.sub("[0-9]+", "0", name)
        if folder.remote and key in series:
            files.append(replace(series[key], name=name, tokens=None))
        else:
            series[key] = describe(folder, name)
            files.append(series[key])
    if not files:
        known = ", ".join(dict.fromkeys(f"{one.names} of {one.project}" for one in FORMATS))
        raise NoSplit(
            f"{folder.path} has no {INDEX}, and no {split} shards: expected {known}, with {split} "
            f"as a word of the name; token files: {', '.join(candidates[:5]) or 'none'}"
        )
    return files


def files_of_split(names: Sequence[str], split: str) -> list[str]:
    """Choose the files of a split: train, val or test, as a word of the name says.

    If no name says train, the files whose names say no split are train.
    """
    said: dict[str, str | None] = {}
    for name in names:
        words = set(re.split(r"[^a-z]+", name.lower()))
        if words & {"val", "valid", "validation"}:
            said[name] = "val"
        else:
            said[name] = next((word for word in ("train", "test") if word in words), None)
    if split == "train" and "train" not in said.values():
        return [name for name in names if said[name] is None]
    return [name for name in names if said[name] == split]


# --------------------------------------------------------------------------- one file


def describe(folder: DataFolder, name: str) -> TokenFile:
    """Describe a file of token ids.

    Of datatrove, NAME.ds.metadata does: line 1 is `tokenizer|bytes per token`, line 2 the number
    of tokens.
    """
    path = folder.path / name
    if name.endswith(".npy"):
        with folder.fetch(name).open("rb") as file:
            stored, tokens, offset = npy_header(path, file)
        if stored.str not in ("<u2", "<u4", "<i4"):
            raise DataError(
                f"{path} holds {stored} ({stored.str}), expected little-endian uint16, uint32 or "
                "int32"
            )
        return TokenFile(name, stored, offset, tokens)
    if name.endswith(".ds"):
        where = folder.path / f"{name}.metadata"
        if where.name not in folder.files:
            raise UserError(f"{where} does not exist, which says the type of the ids")
        text = folder.fetch(where.name).read_text(encoding="utf-8", errors="replace")
        first, second = (*text.splitlines(), "", "")[:2]
        tokenizer, _, size = first.rpartition("|")
        if size not in ("2", "4"):
            raise DataError(f"{where} begins with {first[:80]!r}; expected tokenizer|2 or |4")
        count = int(second) if second.isdecimal() else None
        return TokenFile(name, np.dtype(f"<u{size}"), 0, count, tokenizer)
    with folder.fetch(name).open("rb") as file:
        start = file.read(12).ljust(12, b"\0")
    magic, version, tokens = np.frombuffer(start, "<u4").tolist()
    for form in FORMATS:
        if form.magic is not None and form.magic == magic:
            if version != form.version:
                raise DataError(f"{path} has header version {version}, expected {form.version}")
            return TokenFile(name, np.dtype(form.dtype), form.header, tokens, form.tokenizer)
        if form.magic is None and name == form.names:
            return TokenFile(name, np.dtype(form.dtype), form.header)
    raise UserError(f"{path} does not say the type of its ids; use shards() in a file of --code")


# --------------------------------------------------------------------------- tokenizers


def foreign_tokenizer(
    folder: DataFolder, named: Sequence[str | None], spec: str | None
) -> Tokenizer:
    """Return the tokenizer of the folder, else of `data.tokenizer`, else the one the files name.

    `named`: the name in each file. Raises `DataError` if the folder's tokenizer differs from
    `data.tokenizer`.
    """
    stated = named_tokenizer(spec) if spec else None
    stored: Tokenizer | None = None
    if META in folder.files:
        stored = CharsTokenizer(read_vocabulary(folder.fetch(META)))
    elif TOKENIZER in folder.files:
        if CONFIG in folder.files:
            folder.fetch(CONFIG)
        stored = load_tokenizer(folder.fetch(TOKENIZER))
    if stored and stated:
        stated.require_same(stored, f"data.tokenizer {spec}", f"the folder {folder.path}")
    tokenizer = stored or stated
    if tokenizer is not None:
        return tokenizer
    other = [name for name in named if name not in GPT2]
    if not other:
        return load_gpt2()
    problem = f"name the tokenizer {other[0]!r}" if other[0] else "do not name their tokenizer"
    raise UserError(
        f"the token shards in {folder.path} {problem}; set data.tokenizer to gpt2, bytes or the "
        "path of a tokenizer.json"
    )


class PlainUnpickler(pickle.Unpickler):
    """Unpickle plain values only, by rejecting every class and function that a pickle names."""

    def find_class(self, module: str, name: str, /) -> NoReturn:
        """Raise `UnpicklingError`."""
        raise pickle.UnpicklingError(f"it names {module}.{name}, and calling that executes code")


def read_vocabulary(path: Path) -> str:
    """Return the characters in nanoGPT's meta.pkl in the order of their ids.

    nanoGPT's data/shakespeare_char/prepare.py writes the file. Raises `DataError` if it holds
    anything else.
    """
    try:
        with path.open("rb") as file:
            meta = PlainUnpickler(file).load()
    except Exception as error:  # pickle has no common class of errors for damaged files
        raise DataError(
            f"{path} cannot be read: {error}; remove the file and set data.tokenizer"
        ) from None
    itos = meta.get("itos") if isinstance(meta, dict) else None
    chars: list[Any] = []
    if isinstance(itos, dict):
        chars = [itos.get(i) for i in range(len(itos))]
    plain = all(isinstance(c, str) and len(c) == 1 and not "\ud800" <= c <= "\udfff" for c in chars)
    if not chars or not plain or len(set(chars)) < len(chars):
        raise DataError(
            f"{path} holds no vocabulary of characters: itos must map the ids from 0 to different "
            "characters; remove the file and set data.tokenizer"
        )
    return "".join(chars)
