"""Write the Python source on this machine as the tokens that nanoGPT and accel-gpt read.

    python benchmarks/corpus.py FOLDER [--tokenizer gpt2] [--megabytes 400]

Takes the .py files of the Python installations of this machine and of their site-packages, in the
order of their paths, each content once, up to 400 MB. Every 20th file is for validation. Writes
nanoGPT's train.bin and val.bin (uint16), and meta.pkl with the tokenizer bytes. Prints the numbers
as JSON.

gpt2 needs GPT-2's vocabulary; without a network, set TIKTOKEN_CACHE_DIR. bytes makes each byte a
character, for tests.

All cores encode. By arithmetic, 400 MB take 10 s on 16 cores at 3 MB/s each, and 20 s to be read
from a disk.
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import pickle
import site
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

EOT = 50256  # end of text, GPT-2
VAL_EVERY = 20  # files
LARGEST_FILE = 10**6  # bytes; larger ones are mostly tables
BATCH_BYTES = 2 * 10**6  # encoded at once by a process
Batch = tuple[bool, list[str], str]  # whether for validation, texts, tokenizer


def main() -> None:
    """Write the tokens and print how many there are."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokenizer", choices=["gpt2", "bytes"], default="gpt2")
    parser.add_argument("--megabytes", type=float, default=400)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    texts = list(read_texts(find_files(python_folders()), limit=int(args.megabytes * 1e6)))
    found: dict[str, Any] = {
        "files": len(texts),
        "bytes": sum(len(text.encode()) for text in texts),
    }
    if args.tokenizer == "gpt2":
        load_gpt2()  # before the processes fork
    batches = batch_texts(texts, args.tokenizer)
    names = {False: "train", True: "val"}
    paths = {is_val: args.folder / f"{name}.bin" for is_val, name in names.items()}
    tokens = {"train": 0, "val": 0}
    with (
        multiprocessing.Pool(os.cpu_count()) as pool,
        paths[False].open("wb") as train,
        paths[True].open("wb") as val,
    ):
        for is_val, ids in pool.imap(encode, batches):
            tokens[names[is_val]] += len(ids)
            (val if is_val else train).write(ids.tobytes())
    if args.tokenizer == "bytes":
        write_characters(args.folder / "meta.pkl")
    print(json.dumps(found | {"tokens": tokens}))


def python_folders() -> list[Path]:
    """List the folders of the standard libraries and site-packages on this machine."""
    paths = sysconfig.get_paths()
    found = {paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    found |= set(site.getsitepackages())
    for root in ("/usr/lib", "/usr/local/lib"):
        found |= {str(path) for path in Path(root).glob("python3*")}
    return [Path(path).resolve() for path in sorted(found) if Path(path).is_dir()]


def find_files(folders: Iterable[Path]) -> list[Path]:
    """List the .py files in all folders, each once, sorted by path."""
    found = set()
    for folder in folders:
        for path, _, names in os.walk(folder):
            found |= {os.path.join(path, name) for name in names if name.endswith(".py")}
    return [Path(path) for path in sorted(found)]


def read_texts(files: Iterable[Path], limit: int) -> Iterator[str]:
    """Yield each text once, up to `limit` bytes; skip what is not UTF-8, empty or large."""
    seen = set()
    total = 0
    for file in files:
        try:
            if not 0 < file.stat().st_size <= LARGEST_FILE:
                continue
            content = file.read_bytes()
            text = content.decode("utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        digest = hashlib.sha256(content).digest()
        if digest in seen:
            continue
        if total + len(content) > limit:
            return
        seen.add(digest)
        total += len(content)
        yield text


def batch_texts(texts: Sequence[str], tokenizer: str) -> Iterator[Batch]:
    """Yield the texts of each split in their order, `BATCH_BYTES` at a time."""
    for is_val in (False, True):
        batch: list[str] = []
        characters = 0
        for number, text in enumerate(texts):
            if (number % VAL_EVERY == 0) != is_val:
                continue
            batch.append(text)
            characters += len(text)
            if characters > BATCH_BYTES:
                yield is_val, batch, tokenizer
                batch, characters = [], 0
        if batch:
            yield is_val, batch, tokenizer


def encode(batch: Batch) -> tuple[bool, np.ndarray]:
    """Encode the texts of a batch; a token that ends a text comes after each."""
    is_val, texts, tokenizer = batch
    if tokenizer == "bytes":
        content = b"".join(text.encode() + b"\0" for text in texts)
        return is_val, np.frombuffer(content, np.uint8).astype(np.uint16)
    parts = []
    for text in texts:
        parts.append(np.array([*load_gpt2().encode_ordinary(text), EOT], dtype=np.uint16))
    return is_val, np.concatenate(parts)


@cache
def load_gpt2() -> Any:
    """Load GPT-2's tokenizer."""
    import tiktoken

    return tiktoken.get_encoding("gpt2")


def write_characters(path: Path) -> None:
    """Write nanoGPT's vocabulary of characters: one for each byte."""
    characters = {number: chr(number) for number in range(256)}
    meta = {
        "vocab_size": len(characters),
        "itos": characters,
        "stoi": {character: number for number, character in characters.items()},
    }
    path.write_bytes(pickle.dumps(meta))


if __name__ == "__main__":
    main()
