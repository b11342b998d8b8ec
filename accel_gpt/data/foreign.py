"""Read the token files of other projects in place, without conversion.

`FORMATS` lists them. A folder has one format. The split follows from the file name, the tokenizer
from meta.pkl, a tokenizer.json, `data.tokenizer` or the format.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from accel_gpt.data.index import INDEX, is_shard_name
from accel_gpt.data.remote import FileInfo, RemoteFolder
from accel_gpt.data.safe_pickle import read_vocabulary
from accel_gpt.data.shards import (
    BLOCK,
    NoSplit,
    Shard,
    Split,
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
from accel_gpt.data.tokenizer_json import CONFIG, SPECIAL
from accel_gpt.errors import DataError, UserError, require
from accel_gpt.files import TOKEN_ENDINGS

META = "meta.pkl"
TOKENIZER = "tokenizer.json"
GPT2 = ("gpt2", "openai-community/gpt2")  # its names in files of other projects
RAW = ("train.bin", "val.bin")
CHECKED_IDS = 64  # fewer ids of a raw file do not show their type; assumption
EVALUATION = 20240522  # magic of llm.c's files with questions, such as hellaswag_val.bin


@dataclass(frozen=True)
class Format:
    """How a project stores token ids. None: the file says it."""

    project: str
    ending: str
    header: int | None  # bytes before the ids
    dtype: str | None
    magic: int | None = None  # uint32 at byte 0; the number of ids follows at byte 8
    version: int | None = None  # uint32 at byte 4
    tokenizer: str | None = None


LLM_C = "llm.c and modded-nanogpt"  # llm.c, dev/data/data_common.py, HEADERS_INFO
NANOGPT = "nanoGPT"
FORMATS = (
    Format(LLM_C, ".bin", 1024, "<u2", magic=20240520, version=1, tokenizer="gpt2"),
    Format(LLM_C, ".bin", 1024, "<u4", magic=20240801, version=7),
    Format(NANOGPT, ".bin", 0, "<u2"),  # train.bin and val.bin; other names need data.dtype
    Format("build-nanogpt and other NumPy", ".npy", None, None),
    Format("OLMo", ".npy", 0, None),  # raw ids in spite of the ending; needs data.dtype
    Format("datatrove", ".ds", 0, None),  # NAME.ds.metadata says it; else data.dtype
)


@dataclass(frozen=True)
class TokenFile:
    """A file of token ids, as its header or metadata describes it."""

    name: str
    project: str
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


def open_foreign(
    folder: DataFolder, split: str, tokenizer: str | None, dtype: str | None = None
) -> tuple[Split, Tokenizer]:
    """Open a split of a folder that another project wrote, with its tokenizer.

    `tokenizer` and `dtype`: `data.tokenizer` and `data.dtype`, for files that do not say them. If
    the folder is remote, only the first shard of each series is downloaded. Raises `DataError` if
    the files have several formats or are damaged, `UserError` if tokenizer or type are not known.
    """
    files = find_token_files(folder, split, dtype)
    kinds = {f"{file.project} in {file.dtype}": file.name for file in files}
    if len(kinds) > 1:
        several = ", ".join(f"{kind} ({name})" for kind, name in kinds.items())
        raise DataError(
            f"{folder.path} holds {split} shards of several formats: {several}; put each into its "
            "own folder"
        )
    made_by = foreign_tokenizer(folder, files, tokenizer)
    shards: list[Shard] = []
    content: list[list[Any]] = []  # hashed into the fingerprint
    for file in files:
        info = folder.files[file.name]
        tokens = tokens_in(folder.path, file, info.size)
        if not tokens:
            continue
        if dtype is None and file.project == NANOGPT:
            check_default_dtype(folder.path / file.name, folder.fetch(file.name), made_by)
        sample = None
        if folder.remote:
            content.append([file.name, info.size, info.sha256 or info.tag])
        else:
            sample = sampled_digest(folder.path / file.name, file.offset)
            content.append([tokens, sample])
        shards.append(Shard(file.name, tokens, sample=sample, offset=file.offset))
    if not shards:
        raise DataError(f"the {split} shards of {folder.path} are all empty; write them again")
    opened = split_without_index(
        folder=folder.path,
        name=split,
        shards=shards,
        dtype=np.dtype(f"<u{files[0].dtype.itemsize}"),
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


# --------------------------------------------------------------------------- which files


def find_token_files(folder: DataFolder, split: str, dtype: str | None) -> list[TokenFile]:
    """Describe the token files of a split, sorted by the numbers in their names.

    Files whose names differ only in numbers form a series. In a remote folder only the first file
    of each series is read.
    """
    names = [name for name in folder.files if name.endswith(TOKEN_ENDINGS) and is_shard_name(name)]
    candidates = sorted(names, key=number_order)
    series: dict[str, TokenFile | None] = {}
    files: list[TokenFile] = []
    for name in files_of_split(candidates, split):
        key = re.sub("[0-9]+", "0", name)
        if folder.remote and key in series:
            first = series[key]
            file = first and replace(first, name=name, tokens=None)
        else:
            file = series[key] = describe(folder, name, dtype)
        if file is not None:
            files.append(file)
    if not files:
        remedy = "; set data.val to a folder that has them" if split == "val" else ""
        if not candidates and not folder.remote:
            remedy = "; if it holds text, set data.text to it"
        known = ", ".join(dict.fromkeys(f"{one.ending} of {one.project}" for one in FORMATS))
        raise NoSplit(
            f"{folder.path} has no {INDEX}, and no {split} shards of a known format: {known}, with "
            f"{split} as a word of the name (letters, digits, '.', '_', '-'); token files found: "
            f"{', '.join(candidates[:5]) or 'none'}{remedy}"
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


# --------------------------------------------------------------------------- one file


def describe(folder: DataFolder, name: str, dtype: str | None) -> TokenFile | None:
    """Describe a file of token ids; None if it is one of llm.c's evaluation files."""
    if name.endswith(".npy"):
        with folder.fetch(name).open("rb") as file:
            is_numpy = file.read(len(np.lib.format.MAGIC_PREFIX)) == np.lib.format.MAGIC_PREFIX
        if not is_numpy:
            return TokenFile(name, "OLMo", stated_dtype(folder.path / name, dtype), 0)
        found, tokens, offset = npy_header(folder.fetch(name))
        if found.str not in ("<u2", "<u4", "<i4"):
            raise DataError(
                f"{folder.path / name} holds {found} ({found.str}); save it as little-endian "
                "uint16, uint32 or int32"
            )
        return TokenFile(name, "NumPy", found, offset, tokens)
    if name.endswith(".ds"):
        return describe_datatrove(folder, name, dtype)
    with folder.fetch(name).open("rb") as file:
        start = file.read(12).ljust(12, b"\0")
    magic, version, tokens = np.frombuffer(start, "<u4").tolist()
    for form in FORMATS:
        if form.magic == magic:
            assert form.header is not None
            if version != form.version:
                raise DataError(
                    f"{folder.path / name} has an unknown header version {version}, expected "
                    f"{form.version}; write it as llm.c's dev/data/data_common.py does"
                )
            stated = np.dtype(form.dtype)
            return TokenFile(name, LLM_C, stated, form.header, tokens, form.tokenizer)
    if magic == EVALUATION:
        return None
    if name in RAW:
        dtype = dtype or "uint16"
    return TokenFile(name, NANOGPT, stated_dtype(folder.path / name, dtype), 0)


def stated_dtype(path: Path, dtype: str | None) -> np.dtype[Any]:
    """Return `data.dtype`. Raises `UserError` if it is not set."""
    problem = "does not say the type of its ids"
    if path.suffix == ".npy":
        problem = "has no NumPy header: it is damaged, or holds raw ids, as OLMo's files do"
    require(dtype is not None, f"{path} {problem}; set data.dtype to uint16 or uint32 for raw ids")
    return np.dtype(dtype).newbyteorder("<")


def check_default_dtype(name: Path, file: Path, tokenizer: Tokenizer) -> None:
    """Raise `UserError` if the ids of a raw file seem to be uint32 in place of the default uint16.

    Read as uint16, each second id is then 0, or 1 above 65,535. `name` stands in the error.
    """
    with file.open("rb") as opened:
        ids = np.frombuffer(opened.read(BLOCK), "<u2")
    problem = ""
    if token_dtype(tokenizer.vocab_size).itemsize > ids.itemsize:
        problem = f"does not hold all {tokenizer.vocab_size:,} tokens of the tokenizer"
    elif len(ids) >= CHECKED_IDS and ids[1::2].max() <= 1 < ids[::2].max():
        problem = "makes every second id 0 or 1"
    require(
        not problem,
        f"{name} does not say the type of its ids, and the default, uint16, {problem}; set "
        "data.dtype to uint32, or to uint16 if each id takes 2 bytes",
    )


def describe_datatrove(folder: DataFolder, name: str, dtype: str | None) -> TokenFile:
    """Describe a .ds file of datatrove from NAME.ds.metadata.

    Its line 1 is `tokenizer|bytes per token`, line 2 the number of tokens.
    """
    path = folder.path / name
    if f"{name}.metadata" not in folder.files:
        return TokenFile(name, "datatrove", stated_dtype(path, dtype), 0)
    text = folder.fetch(f"{name}.metadata").read_text(encoding="utf-8", errors="replace")
    first, second = (*text.splitlines(), "", "")[:2]
    found = re.fullmatch(r"(.*?)(?:\|([0-9]+))?", first)
    if found is None or found[2] not in (None, "2", "4"):
        raise DataError(f"{path}.metadata begins with {first[:80]!r}; expected tokenizer|2 or |4")
    tokenizer = found[1]
    if tokenizer.startswith("Unknown Tokenizer"):
        tokenizer = ""
    return TokenFile(
        name=name,
        project="datatrove",
        dtype=np.dtype(f"<u{found[2]}") if found[2] else stated_dtype(path, dtype),
        offset=0,
        tokens=int(second) if second.isdecimal() else None,
        tokenizer=tokenizer or None,
    )


def tokens_in(folder: Path, file: TokenFile, size: int) -> int:
    """Return the number of tokens in a file. Raises `DataError` if its `size` does not fit."""
    tokens = file.tokens
    if tokens is None:
        tokens = max(size - file.offset, 0) // file.dtype.itemsize
    expected = file.offset + tokens * file.dtype.itemsize
    if size != expected:
        raise DataError(
            f"{folder / file.name} has {size} bytes, expected {expected} for {tokens} tokens of "
            f"{file.dtype}: it was cut short or changed, or the type is wrong; restore it, or "
            "check data.dtype"
        )
    return tokens


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
        for name in (CONFIG, SPECIAL):
            if name in folder.files:
                folder.fetch(name)
        stored = load_tokenizer(folder.fetch(TOKENIZER))
    if stored and given:
        given.require_same(stored, f"data.tokenizer {spec}", f"the folder {folder.path}")
    known = stored or given
    if known is not None:
        return known
    other = [file.tokenizer for file in files if file.tokenizer not in GPT2]
    if not other:
        return load_gpt2()
    problem = f"name the tokenizer {other[0]!r}" if other[0] else "do not name their tokenizer"
    raise UserError(
        f"the token shards in {folder.path} {problem}; set data.tokenizer to gpt2, bytes or the "
        "path of a tokenizer.json"
    )
