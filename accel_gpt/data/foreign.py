"""Read the token files of other projects in place, without conversion.

- nanoGPT: train.bin and val.bin hold raw ids; meta.pkl may hold a vocabulary of characters.
- llm.c and modded-nanogpt: .bin files with a header of 256 int32.
- build-nanogpt: .npy files.
- datatrove: .ds files hold raw ids; NAME.ds.metadata and NAME.ds.index describe them.

The split follows from the file name.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from accel_gpt.data.index import ENDINGS, INDEX, is_shard_name
from accel_gpt.data.remote import FileInfo, RemoteFolder
from accel_gpt.data.safe_pickle import read_vocabulary
from accel_gpt.data.shards import NoSplit, Shard, Split, npy_header, token_dtype
from accel_gpt.data.tokenizer import (
    CharsTokenizer,
    Tokenizer,
    load_gpt2,
    load_tokenizer,
    named_tokenizer,
)
from accel_gpt.errors import DataError, UserError

META = "meta.pkl"
TOKENIZER = "tokenizer.json"
CONFIG = "tokenizer_config.json"
GPT2 = frozenset({"gpt2", "openai-community/gpt2"})  # its names in files of other projects
RAW = ("train.bin", "val.bin")
BLOCK = 4096  # bytes of one sampled block, a multiple of every token size
BLOCKS = 5  # blocks sampled from each shard: the first, the last, and three between
FEWEST = 16  # ids; with fewer, zeros at every second place may be chance
# magic, version, type and tokenizer of a .bin file; llm.c, dev/data/data_common.py
HEADERS = ((20240520, 1, "<u2", "gpt2"), (20240801, 7, "<u4", None))
EVALUATION = 20240522  # magic of files with questions and answers, such as hellaswag_val.bin
HEADER_BYTES = 1024
NPY_MAGIC = b"\x93NUMPY"


@dataclass(frozen=True)
class TokenFile:
    """A file of tokens, as its header or metadata describes it; None if they do not say."""

    name: str
    size: int  # bytes
    project: str
    offset: int = 0  # bytes before the tokens
    dtype: np.dtype[Any] | None = None
    tokens: int | None = None
    tokenizer: str | None = None
    path: Path | None = None  # None: not downloaded


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
        files = [file for file in self.path.iterdir() if file.is_file()]
        return {file.name: FileInfo(file.stat().st_size) for file in files}

    def size(self, name: str) -> int:
        """Return the size of a file in bytes; 0 if there is no such file."""
        return self.files[name].size if name in self.files else 0

    def fetch(self, name: str) -> Path:
        """Return the path of a file, after downloading it if the folder is remote."""
        return self.remote.fetch(name) if self.remote else self.path / name


def open_foreign(folder: DataFolder, split: str, tokenizer: str | None) -> tuple[Split, Tokenizer]:
    """Open a split of a folder that another project wrote, with its tokenizer.

    `tokenizer`: gpt2, bytes, a path or a Hub id, for files that do not name their tokenizer. If the
    folder is remote, only the first shard of each series is downloaded. Raises `DataError` if the
    files have several formats or are damaged, `UserError` if the tokenizer is not known.
    """
    files = find_token_files(folder, split)
    require_one(folder, split, "formats", {file.project: file.name for file in files})
    made_by = foreign_tokenizer(folder, files, tokenizer)
    default_dtype = token_dtype(made_by.vocab_size)
    require_one(
        folder, split, "types", {str(file.dtype or default_dtype): file.name for file in files}
    )
    dtype = files[0].dtype or default_dtype
    unsigned = np.dtype(f"<u{dtype.itemsize}")
    shards: list[Shard] = []
    content: list[list[Any]] = []  # hashed into the fingerprint
    for file in files:
        tokens = tokens_in(folder.path, file, dtype)
        if not tokens:
            continue
        shards.append(Shard(file.name, tokens, offset=file.offset))
        blocks: list[bytes] = []
        if file.path is not None:
            blocks = list(sample_blocks(file.path, file))
            check_ids(file, blocks, unsigned, made_by.vocab_size)
        digest = hashlib.sha256(b"".join(blocks)).hexdigest()
        if folder.remote:
            info = folder.files[file.name]
            content.append([file.name, file.size, info.sha256 or info.tag, digest])
        else:
            content.append([tokens, digest])
    if not shards:
        raise DataError(f"the {split} shards of {folder.path} are all empty; write them again")
    identity = json.dumps([made_by.fingerprint, content])
    opened = Split(
        folder=folder.path,
        name=split,
        shards=tuple(shards),
        dtype=unsigned,
        vocab_size=made_by.vocab_size,
        eot_id=made_by.eot_id,
        tokenizer_kind=made_by.kind,
        tokenizer_fingerprint=made_by.fingerprint,
        fingerprint=hashlib.sha256(identity.encode()).hexdigest(),
        remote=folder.remote,
    )
    return opened, made_by


def require_one(folder: DataFolder, split: str, what: str, found: Mapping[str, str]) -> None:
    """Raise `DataError` if the files of a split differ in format or type.

    `what`: "formats" or "types". `found`: one file name for each format or type.
    """
    if len(found) > 1:
        several = ", ".join(f"{kind} ({name})" for kind, name in found.items())
        raise DataError(
            f"{folder.path} holds {split} shards of several {what}: {several}; put each into its "
            "own folder"
        )


# --------------------------------------------------------------------------- which files


def find_token_files(folder: DataFolder, split: str) -> list[TokenFile]:
    """Describe the token files of a split, sorted by the numbers in their names.

    Files whose names differ only in numbers form a series. In a remote folder only the first file
    of each series is read.
    """
    names = [name for name in folder.files if name.endswith(ENDINGS) and is_shard_name(name)]
    candidates = sorted(names, key=number_order)
    series: dict[str, TokenFile | None] = {}
    files: list[TokenFile] = []
    for name in files_of_split(candidates, split):
        key = re.sub("[0-9]+", "0", name)
        if folder.remote and key in series:
            file = series[key]
            if file is not None:
                file = replace(file, name=name, size=folder.size(name), tokens=None, path=None)
        else:
            file = READERS[Path(name).suffix](folder, name)
            series[key] = file
        if file is not None:
            files.append(file)
    if not files:
        remedy = "; set data.val to a folder that has them" if split == "val" else ""
        raise NoSplit(
            f"{folder.path} has no {INDEX}, and no {split} shards of a known format: train.bin and "
            "val.bin of nanoGPT, .bin of llm.c and modded-nanogpt, .npy of build-nanogpt, .ds of "
            f"datatrove, with {split} as a word of the name (letters, digits, '.', '_', '-'); "
            f"token files found: {', '.join(candidates[:5]) or 'none'}{remedy}"
        )
    return files


def number_order(name: str) -> tuple[list[str | int], str]:
    """Return a sort key that compares the numbers in names by value."""
    parts = re.split(r"([0-9]+)", name)
    return [int(part) if i % 2 else part for i, part in enumerate(parts)], name


def split_of(name: str) -> str | None:
    """Return the split that the words of a file name say: val, train or test; else None.

    datatrove's test files count as val.
    """
    words = set(re.split(r"[^a-z]+", name.lower()))
    if words & {"val", "valid", "validation"} or ("test" in words and name.endswith(".ds")):
        return "val"
    for split in ("train", "test"):
        if split in words:
            return split
    return None


def files_of_split(names: Sequence[str], split: str) -> list[str]:
    """Choose the files of a split.

    If no name says train, the datatrove files whose names say no split are train. If no name in
    the folder says a split, all files are train.
    """
    chosen = [name for name in names if split_of(name) == split]
    if chosen or split != "train":
        return chosen
    unnamed = [name for name in names if split_of(name) is None]
    if len(unnamed) == len(names):
        return unnamed
    return [name for name in unnamed if name.endswith(".ds")]


# --------------------------------------------------------------------------- the formats
# Each function returns the description of a file, or None if the file does not hold tokens.


def read_npy(folder: DataFolder, name: str) -> TokenFile | None:
    """Describe a one-dimensional .npy array."""
    path = folder.fetch(name)
    if folder.size(name) >= len(NPY_MAGIC) and read_at(path, 0, len(NPY_MAGIC)) != NPY_MAGIC:
        raise DataError(
            f"{path} has no header of NumPy; if it holds raw ids, as OLMo's files do, save them "
            "with their type, for example numpy.save(path, numpy.fromfile(path, 'uint16')); "
            "otherwise restore it"
        )
    dtype, tokens, offset = npy_header(path)
    if dtype.str not in ("<u2", "<u4", "<i4"):
        raise DataError(
            f"{path} holds {dtype} ({dtype.str}); save it as little-endian uint16, uint32 or int32"
        )
    return TokenFile(
        name=name,
        size=folder.size(name),
        project="build-nanogpt .npy",
        offset=offset,
        dtype=dtype,
        tokens=tokens,
        path=path,
    )


def read_bin(folder: DataFolder, name: str) -> TokenFile | None:
    """Describe a .bin file: of llm.c if it has the header, else of nanoGPT if its name is in `RAW`.

    Returns None for llm.c's evaluation files and for files whose name says no split. Raises
    `DataError` for any other file without the header.
    """
    path = folder.fetch(name)
    size = folder.size(name)
    raw: TokenFile | None = None
    if name in RAW:
        raw = TokenFile(name, size, "nanoGPT", path=path)
    start = read_at(path, 0, 12) if size >= HEADER_BYTES else bytes(12)
    magic, version, tokens = np.frombuffer(start, "<u4").tolist()  # up to 4.29e9 tokens
    for known, known_version, dtype_name, tokenizer in HEADERS:
        dtype = np.dtype(dtype_name)
        fits = size == HEADER_BYTES + tokens * dtype.itemsize
        if magic != known or (raw and not (fits and version == known_version)):
            continue
        if version != known_version:
            raise DataError(
                f"{path} has version {version} of llm.c's format; expected {known_version}; write "
                "it again"
            )
        return TokenFile(
            name=name,
            size=size,
            project="llm.c",
            offset=HEADER_BYTES,
            dtype=dtype,
            tokens=tokens,
            tokenizer=tokenizer,
            path=path,
        )
    if not raw and magic != EVALUATION and split_of(name):
        raise DataError(
            f"{path} has no header of llm.c ({HEADER_BYTES} bytes that begin with 20240520 or "
            "20240801); if it holds raw ids, rename it to train.bin or val.bin"
        )
    return raw


def read_datatrove(folder: DataFolder, name: str) -> TokenFile | None:
    """Describe a .ds file from its .metadata and its .index (document ends as uint64)."""
    path = None if folder.remote else folder.fetch(name)
    file = TokenFile(name, folder.size(name), "datatrove .ds", path=path)
    if f"{name}.metadata" in folder.files:
        file = with_metadata(file, folder)
    size = folder.size(f"{name}.index")
    if size >= 8 and not (folder.remote and file.dtype):
        index = folder.fetch(f"{name}.index")
        tokens = int.from_bytes(read_at(index, size - 8, 8), "little")
        if file.tokens not in (None, tokens):
            raise DataError(
                f"{index} ends at token {tokens}, but its .metadata says {file.tokens} tokens; "
                "write both again"
            )
        file = replace(file, tokens=tokens)
    return file


def with_metadata(file: TokenFile, folder: DataFolder) -> TokenFile:
    """Add the fields of NAME.ds.metadata.

    Line 1 is `tokenizer|bytes per token`, line 2 the number of tokens.
    """
    name = f"{file.name}.metadata"
    path = folder.fetch(name)
    text = read_at(path, 0, min(folder.size(name), BLOCK)).decode("utf-8", "replace")
    first, second = (*text.splitlines(), "", "")[:2]
    described = re.fullmatch(r"(.*?)(?:\|([0-9]+))?", first)
    if not described or described[2] not in (None, "2", "4"):
        raise DataError(f"{path} begins with {first[:80]!r}; expected tokenizer|2 or tokenizer|4")
    tokenizer = described[1]
    if tokenizer.startswith("Unknown Tokenizer"):
        tokenizer = ""
    return replace(
        file,
        dtype=np.dtype(f"<u{described[2]}") if described[2] else None,
        tokens=int(second) if re.fullmatch("[0-9]{1,18}", second) else None,
        tokenizer=tokenizer or None,
    )


READERS = MappingProxyType({".npy": read_npy, ".bin": read_bin, ".ds": read_datatrove})


def read_at(path: Path, start: int, length: int) -> bytes:
    """Read exactly `length` bytes of a file, starting at byte `start`."""
    try:
        with path.open("rb") as file:
            file.seek(start)
            content = file.read(length)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; restore it") from None
    if len(content) < length:
        raise DataError(
            f"{path} ends before byte {start + length}: it was cut short or changed; restore it"
        )
    return content


# --------------------------------------------------------------------------- checks


def tokens_in(folder: Path, file: TokenFile, dtype: np.dtype[Any]) -> int:
    """Return the number of tokens in a file. Raises `DataError` if its size does not fit."""
    tokens = file.tokens
    if tokens is None:
        tokens = max(file.size - file.offset, 0) // dtype.itemsize
    expected = file.offset + tokens * dtype.itemsize
    if file.size != expected:
        raise DataError(
            f"{folder / file.name} has {file.size} bytes, expected {expected} for {tokens} tokens "
            f"of {dtype}: it was cut short or changed, or the type is wrong; restore it, or check "
            "data.tokenizer"
        )
    return tokens


def sample_blocks(path: Path, file: TokenFile) -> Iterator[bytes]:
    """Yield a few blocks of a file's tokens: the first, the last, and some between."""
    body = file.size - file.offset
    last = max(body - BLOCK, 0)
    starts = {last}
    for i in range(BLOCKS - 1):
        starts.add(last * i // (BLOCKS - 1) // 4 * 4)  # a multiple of every token size
    for start in sorted(starts):
        yield read_at(path, file.offset + start, min(body, BLOCK))


def check_ids(file: TokenFile, blocks: list[bytes], dtype: np.dtype[Any], vocab_size: int) -> None:
    """Raise `DataError` if sampled ids look like another type or exceed the vocabulary."""
    ids = [np.frombuffer(block, dtype) for block in blocks]
    if dtype.itemsize == 2 and sum(map(len, ids)) >= FEWEST:
        even = max(int(part[0::2].max(initial=0)) for part in ids)
        odd = max(int(part[1::2].max(initial=0)) for part in ids)
        if even and not odd:
            raise DataError(
                f"{file.path} looks like uint32 but is read as uint16: every second number is 0; "
                "set data.tokenizer to the tokenizer that made it, or convert the file to uint16"
            )
    largest = max(int(part.max()) for part in ids)
    if largest >= vocab_size:
        remedy = "set data.tokenizer to the tokenizer that made it"
        if file.dtype is None:
            remedy += ", or save the ids with numpy.save, which records their type"
        raise DataError(
            f"{file.path} holds token {largest}, beyond the vocabulary of {vocab_size}, when it is "
            f"read as {dtype}; {remedy}"
        )


# --------------------------------------------------------------------------- tokenizers


def foreign_tokenizer(
    folder: DataFolder, files: Sequence[TokenFile], spec: str | None
) -> Tokenizer:
    """Return the tokenizer of the folder, else of `data.tokenizer`, else the one the files name.

    Raises `DataError` if the folder's tokenizer differs from `data.tokenizer`.
    """
    given = named_tokenizer(spec) if spec else None
    stored: Tokenizer | None = None
    if META in folder.files:
        stored = CharsTokenizer(read_vocabulary(folder.fetch(META)))
    elif TOKENIZER in folder.files:
        if CONFIG in folder.files:
            folder.fetch(CONFIG)
        stored = load_tokenizer(folder.fetch(TOKENIZER))
    if stored and given:
        given.require_same(stored, f"data.tokenizer {spec}", f"the folder {folder.path}")
    known = stored or given
    if known is not None:
        return known
    named = {file.tokenizer for file in files}
    if named <= GPT2:
        return load_gpt2()
    name = min(str(name) for name in named - GPT2)
    problem = "do not name their tokenizer" if None in named else f"name the tokenizer {name!r}"
    raise UserError(
        f"the token shards in {folder.path} {problem}; set data.tokenizer to gpt2, bytes or the "
        "path of a tokenizer.json"
    )
