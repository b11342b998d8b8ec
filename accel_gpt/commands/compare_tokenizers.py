"""Tokenizers compared on one text.

`compare` gives the object that `accel-gpt inspect --text FILE --json` prints:
{kind "text", text, bytes, problems [one sentence each], tokenizers [{tokenizer, kind, vocab_size,
tokens, tokens_per_byte, bytes_per_token, single_byte_share (of the bytes, 0 to 1), mb_per_s (UTF-8
bytes encoded, one text, one process), round_trip (whether decoding gives the text back)}]}.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from accel_gpt.config.data import DataConfig
from accel_gpt.data.sources import is_url, open_data
from accel_gpt.data.tokenizer import Tokenizer, clean, named_tokenizer
from accel_gpt.data.tokenizer_json import FILE
from accel_gpt.errors import AccelGPTError, UserError, require

WARM_UP = 1000  # characters encoded before the clock starts: patterns are compiled on first use


def compare(path: str, specs: Sequence[str], data: DataConfig) -> dict[str, Any]:
    """The report on the text in the file `path`; see the module.

    `specs`: gpt2, bytes, a tokenizer.json, a Hub id, or a data folder or URL. Raises `UserError`
    for what is not there or is no UTF-8; a tokenizer that cannot encode the text is a problem of
    the report.
    """
    text = clean(read(Path(path)))
    size = len(text.encode())
    rows, problems = [], []
    for spec in dict.fromkeys(specs):
        tokenizer = find_tokenizer(spec, data)
        try:
            rows.append({"tokenizer": spec, **measure(tokenizer, text, size)})
        except AccelGPTError as error:
            problems.append(f"{spec} cannot encode {path}: {error}")
    return {"kind": "text", "text": path, "bytes": size, "problems": problems, "tokenizers": rows}


def read(path: Path) -> str:
    """The text of a file, as it is."""
    require(path.is_file(), f"--text is {path}, which is no file; give a file of UTF-8 text")
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except (OSError, ValueError) as error:
        raise UserError(f"--text {path} cannot be read as UTF-8: {error}") from None
    require(bool(text), f"--text {path} is empty; give a file of UTF-8 text")
    return text


def find_tokenizer(spec: str, data: DataConfig) -> Tokenizer:
    """The tokenizer that `spec` names, or that goes with the data at `spec`."""
    if is_url(spec) or (Path(spec).is_dir() and not (Path(spec) / FILE).is_file()):
        return open_data(spec, "train", data)[1]
    return named_tokenizer(spec, "--tokenizers", "gpt2, bytes, a folder or URL of data")


def measure(tokenizer: Tokenizer, text: str, size: int) -> dict[str, Any]:
    """A row of the comparison."""
    tokenizer.encode_array(text[:WARM_UP])
    start = time.perf_counter()
    ids = tokenizer.encode_array(text)
    seconds = time.perf_counter() - start
    single = int(np.count_nonzero(tokenizer.token_bytes[ids] == 1))
    return {
        "kind": tokenizer.kind,
        "vocab_size": tokenizer.vocab_size,
        "tokens": len(ids),
        "tokens_per_byte": len(ids) / size,
        "bytes_per_token": size / len(ids),
        "single_byte_share": single / size,
        "mb_per_s": size / 1e6 / max(seconds, 1e-9),
        "round_trip": tokenizer.decode(ids.tolist()) == text,
    }
