"""Count what a preparation read and what the tokens do not hold, and say it once at the end.

The tokens of a text are decoded and compared with it. Characters are compared without case and
accents and in form NFKD, because a tokenizer may normalize them.
"""

import unicodedata
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from accel_gpt.config.plan import plural
from accel_gpt.data.shards import Tokens
from accel_gpt.data.tokenizer import Tokenizer
from accel_gpt.prepare.documents import Piece
from accel_gpt.prepare.text_files import is_page

EXAMPLES = 5  # characters and files that are named
ACCENTS = range(200, 235)  # canonical combining classes: marks at, above and below a letter


@dataclass
class Counts:
    """Counts over documents and their tokens."""

    documents: int = 0
    empty: int = 0  # rows and files without text
    pages: int = 0  # documents that begin as an HTML page
    encodings: dict[str, list[str]] = field(default_factory=dict)  # detected -> files
    characters: int = 0
    lost: int = 0  # characters that are not in the decoded text
    examples: str = ""  # some of them
    ends: int = 0  # times that the text spells the end-of-text token, which becomes letters

    def add(self, other: "Counts") -> None:
        """Add the counts over other documents."""
        for name, count in vars(other).items():
            if name != "encodings":
                setattr(self, name, getattr(self, name) + count)
        self.examples = "".join(dict.fromkeys(self.examples))[:EXAMPLES]
        for encoding, files in other.encodings.items():
            self.encodings.setdefault(encoding, []).extend(files)

    def begin(self, piece: Piece) -> bytes:
        """Count a piece that begins a document; return the hash of the document's text."""
        if piece.detected is not None:
            name = piece.detected.path.name
            self.encodings.setdefault(piece.detected.encoding, []).append(name)
        if not piece.text:
            self.empty += bool(piece.key)
            return b""
        self.documents += 1
        self.pages += is_page(piece.text)
        return piece.key

    def add_tokens(self, tokenizer: Tokenizer, text: str, ids: Tokens) -> None:
        """Compare a text with its tokens, which have no end-of-text."""
        if tokenizer.kind != "hf":
            return  # the other kinds hold every text
        self.characters += len(text)
        if tokenizer.unk_id is not None:
            ids = ids[ids != tokenizer.unk_id]
        decoded = tokenizer.decode(ids.tolist())
        if decoded.strip() == text.strip():
            return
        lost = comparable(text) - comparable(decoded)
        self.lost += lost.total()
        self.examples += "".join(character for character, _ in lost.most_common(EXAMPLES))

    def lines(self, tokenizer: Tokenizer, duplicates: int) -> Iterator[str]:
        """Yield what was read, and a warning for each thing that the tokens do not hold."""
        share = duplicates / max(1, self.documents)
        yield (
            f"{plural(self.documents, 'document')}; {self.empty:,} without text; "
            f"{plural(duplicates, 'exact duplicate')} ({share:.1%})"
        )
        read = {name: files for name, files in self.encodings.items() if name}
        if read:
            named = "; ".join(f"{name}: {', '.join(files)}" for name, files in sorted(read.items()))
            count = sum(map(len, read.values()))
            yield f"WARNING: {plural(count, 'file')} not in UTF-8, read as detected: {named}"
        if left_out := self.encodings.get(""):
            named = ", ".join(left_out)
            yield f"WARNING: {plural(len(left_out), 'file')} not in UTF-8, left out: {named}"
        if self.pages:
            yield f"WARNING: the markup of HTML is in {plural(self.pages, 'document')}"
        if self.lost:
            yield (
                f"WARNING: {self.lost:,} of {plural(self.characters, 'character')} are not in the "
                f"tokens, such as {', '.join(map(repr, self.examples))}"
            )
        if self.ends:
            yield (
                f"WARNING: the text spells {tokenizer.eot} {plural(self.ends, 'time')} as letters, "
                "which ends no document"
            )


def comparable(text: str) -> Counter[str]:
    """Count the characters of a text without case and accents, in form NFKD.

    White space at both ends is left out. U+2581 is a space, as SentencePiece spells it.
    """
    plain = unicodedata.normalize("NFKD", text.replace("\u2581", " ")).casefold().strip()
    counts = Counter(plain)
    for character in list(counts):
        if unicodedata.combining(character) in ACCENTS or unicodedata.category(character) == "Cf":
            del counts[character]
    return counts


def count_duplicates(path: Path) -> int:
    """Return how many of the hashes in a file repeat an earlier one."""
    hashes = np.sort(np.fromfile(path, np.uint64))
    return int((hashes[1:] == hashes[:-1]).sum())
