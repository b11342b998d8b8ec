"""Read text files of any size and encoding, in bounded memory.

A file is UTF-8, or UTF-16 or UTF-32 with a byte order mark. If it is not, `charset-normalizer`
detects its encoding. Windows line ends (CR LF) become line feeds. Files that end in .gz, .zst or
.bz2 are decompressed.
"""

import codecs
import contextlib
import hashlib
import io
import re
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from accel_gpt.errors import AccelGPTError, DataError

COMPRESSIONS = MappingProxyType({".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"})
CHUNK_BYTES = 1 << 20  # bytes of a file read at once
HEAD_BYTES = 8192  # bytes at the start of a file that tell what it is
SAMPLE_BYTES = 1 << 17  # bytes of lines beyond ASCII that tell an encoding; assumption
# Byte order marks of other encodings than UTF-8; UTF-32's mark begins with UTF-16's
MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
# The encodings that are detected, the likeliest first. Among all that Python knows, a French text
# in Latin-1 passes for Central European.
ENCODINGS = (
    "cp1252",
    "cp1250",
    "cp1251",
    "cp1253",
    "cp1254",
    "cp1255",
    "cp1256",
    "cp1257",
    "iso8859_2",
    "koi8_r",
    "cp932",
    "euc_jp",
    "gb18030",
    "big5",
    "cp949",
    "mac_roman",
    "cp850",
    "cp866",
)
CLOSE = 0.05  # difference in mess and coherence that decides nothing; assumption
UTF8 = "utf-8"
DAMAGED_UTF8 = "utf-8 with invalid bytes"  # each becomes U+FFFD
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
# The beginning of an HTML page, after comments and the declaration of XML
HTML = re.compile(r"\s*((<\?xml[^>]*>|<!--.*?-->)\s*)*<(!doctype\s+html|html)\b", re.I | re.S)


class Text(NamedTuple):
    """A text file after its first reading."""

    path: Path
    encoding: str
    """Empty if it is not known."""
    characters: int
    key: bytes
    """Hash of its text; see `start_hash`."""


def start_hash(data: bytes = b"") -> "hashlib.blake2b":
    """Start the hash (8 bytes) of a document: it decides the split, and tells duplicates."""
    return hashlib.blake2b(data, digest_size=8, key=b"accel_gpt val")


def text_hash(text: str) -> bytes:
    """Return the hash of a document."""
    return start_hash(text.encode()).digest()


# --------------------------------------------------------------------------- files


@contextlib.contextmanager
def open_file(path: Path) -> Iterator[Any]:
    """Open a file for reading, decompressed if its name ends in one of `COMPRESSIONS`.

    Errors of reading become a `DataError` that names the file.
    """
    import pyarrow as pa

    compression = COMPRESSIONS.get(path.suffix.lower())
    try:
        if compression is None:
            with path.open("rb") as file:
                yield file
        else:
            with path.open("rb") as raw, pa.CompressedInputStream(raw, compression) as file:
                yield file
    except (AccelGPTError, UnicodeDecodeError):
        raise
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read completely: {error}") from None


def read_head(path: Path) -> bytes:
    """Return the first bytes of a file, decompressed, which tell what it is."""
    with open_file(path) as file:
        head: bytes = file.read(HEAD_BYTES)
    return head


def unpacked_name(name: str) -> str:
    """Return a file name in small letters without the ending of a compression that is read."""
    name = name.lower()
    for ending in COMPRESSIONS:
        name = name.removesuffix(ending)
    return name


def is_page(text: str) -> bool:
    """Return whether a text begins as an HTML page."""
    return "<" in text[:100] and HTML.match(text[:HEAD_BYTES]) is not None


def marked_encoding(head: bytes) -> str | None:
    """Return the encoding that the byte order mark at the start of a text says."""
    return next((encoding for mark, encoding in MARKS if head.startswith(mark)), None)


# --------------------------------------------------------------------------- text


def read_text(path: Path, encoding: str) -> Iterator[str]:
    """Yield a text file as chunks of text, without the byte order mark.

    Raises `UnicodeDecodeError` if it is not in this encoding.
    """
    errors = "replace" if encoding == DAMAGED_UTF8 else "strict"
    codec = "utf-8-sig" if encoding in (UTF8, DAMAGED_UTF8) else encoding
    decoder = io.IncrementalNewlineDecoder(  # never splits \r\n
        codecs.getincrementaldecoder(codec)(errors), translate=False
    )
    ended = False
    with open_file(path) as file:
        while not ended:
            data = file.read(CHUNK_BYTES)
            ended = not data
            if text := decoder.decode(data, final=ended):
                yield text.replace("\r\n", "\n")


def examine(path: Path) -> Text:
    """Read a text file for the first time, to learn its encoding, length and hash."""
    marked = marked_encoding(read_head(path))
    with contextlib.suppress(UnicodeDecodeError):
        return measure_text(path, marked or UTF8)
    detected = None if marked else detect_encoding(beyond_ascii(path))
    if detected:
        with contextlib.suppress(UnicodeDecodeError):
            return measure_text(path, detected)
    return Text(path, "", 0, b"")


def measure_text(path: Path, encoding: str) -> Text:
    """Count the characters of a text file and hash its text."""
    characters = 0
    key = start_hash()
    for chunk in read_text(path, encoding):
        characters += len(chunk)
        key.update(chunk.encode("utf-8", "replace"))
    return Text(path, encoding, characters, key.digest())


def beyond_ascii(path: Path) -> bytes:
    """Return the first lines of a file that are not ASCII, about `SAMPLE_BYTES` of them."""
    found = b""
    rest = b""
    with open_file(path) as file:
        while len(found) < SAMPLE_BYTES and (data := file.read(CHUNK_BYTES)):
            *lines, rest = (rest + data).split(b"\n")
            found += b"".join(line + b"\n" for line in lines if not line.isascii())
    return (found or rest)[:SAMPLE_BYTES]


def detect_encoding(sample: bytes) -> str | None:
    """Return the encoding of a text that is not UTF-8; None if it is none of `ENCODINGS`.

    If few characters beyond ASCII are invalid in UTF-8, the text is damaged UTF-8.
    """
    from charset_normalizer import from_bytes

    text = sample.decode("utf-8", "replace")
    letters = sum(not character.isascii() for character in text)
    if text.count("\ufffd") * 5 < letters:
        return DAMAGED_UTF8
    matches = from_bytes(sample, cp_isolation=list(ENCODINGS))
    best = matches.best()
    if best is None:
        return None
    close: set[str] = set()
    for match in matches:
        if match.chaos <= best.chaos + CLOSE and match.coherence >= best.coherence - CLOSE:
            close.update(match.could_be_from_charset)
    return next((encoding for encoding in ENCODINGS if encoding in close), best.encoding)
