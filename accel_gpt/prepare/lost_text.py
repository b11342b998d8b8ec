"""Count what the tokens of a text do not hold, and say it.

The tokens of a text are decoded and compared with it. Characters are compared without case and
accents and in form NFKD, because a tokenizer may normalize them.
"""

import unicodedata
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from accel_gpt.config.plan import plural
from accel_gpt.data.shards import Tokens
from accel_gpt.data.tokenizer import Tokenizer

EXAMPLES = 5  # lost characters that are named
ACCENTS = range(200, 235)  # canonical combining classes: marks at, above and below a letter


@dataclass
class LostText:
    """Counts over a text and its tokens."""

    tokens: int = 0
    unknown: int = 0  # tokens that stand for unknown text
    characters: int = 0  # visible ones
    lost: int = 0  # visible characters that are not in the decoded text
    examples: str = ""  # some of them
    spaces: int = 0  # white-space characters
    lost_spaces: int = 0  # white-space characters that are not in the decoded text
    pieces: int = 0  # pieces of text that were compared
    changed: int = 0  # pieces that differ from their decoded tokens although nothing is lost
    ends: int = 0  # times that the text spells the end-of-text token, which becomes letters

    def add(self, other: "LostText") -> None:
        """Add the counts over another text."""
        for name, count in vars(other).items():
            setattr(self, name, getattr(self, name) + count)
        self.examples = "".join(dict.fromkeys(self.examples))[:EXAMPLES]

    @property
    def is_all_lost(self) -> bool:
        """Return whether the tokens hold no visible character of a text that has some."""
        return self.lost > 0 and self.lost == self.characters

    def warnings(self, tokenizer: Tokenizer) -> Iterator[str]:
        """Yield a sentence on what the tokens do not hold, and one on what ends no document."""
        counts = []
        if self.unknown:
            assert tokenizer.unk_id is not None
            name = tokenizer.decode([tokenizer.unk_id])
            counts.append(
                f"{self.unknown:,} of {plural(self.tokens, 'token')} "
                f"({self.unknown / self.tokens:.1%}) are {name}"
            )
        if self.lost:
            named = ", ".join(map(repr, self.examples))
            counts.append(
                f"{self.lost:,} of {self.characters:,} visible characters are missing, such as "
                f"{named}"
            )
        if self.lost_spaces:
            counts.append(
                f"{self.lost_spaces:,} of {self.spaces:,} spaces, line ends and tabs are missing"
            )
        if self.changed:
            counts.append(
                f"case, accents or white space differ in {self.changed:,} of "
                f"{plural(self.pieces, 'piece')} of text"
            )
        if counts:
            yield f"the tokens do not hold all of the text: {'; '.join(counts)}"
        if self.ends:
            yield (
                f"the text spells {tokenizer.eot} {plural(self.ends, 'time')}, which became "
                f"letters and ends no document; to end documents there, give --separator "
                f"{tokenizer.eot!r} (data.prepare.separator in a config)"
            )


def find_lost_text(tokenizer: Tokenizer, text: str, ids: Tokens) -> LostText:
    """Compare a text with its tokens, which have no end-of-text."""
    found = LostText(tokens=len(ids), pieces=1, ends=text.count(tokenizer.eot))
    if tokenizer.kind != "hf":
        return found  # the other kinds hold every text
    letters = "".join(text.split())
    found.characters = len(letters)
    found.spaces = len(text) - len(letters)
    known = ids
    if tokenizer.unk_id is not None:
        known = ids[ids != tokenizer.unk_id]
        found.unknown = len(ids) - len(known)
    decoded = tokenizer.decode(known.tolist())
    if decoded.strip() == text.strip():
        return found
    written = visible(text)
    lost = written - visible(decoded)
    lost_spaces = spaces(text.strip()) - spaces(decoded)
    found.characters = written.total()
    found.lost = lost.total()
    found.examples = "".join(character for character, _ in lost.most_common(EXAMPLES))
    found.lost_spaces = lost_spaces.total()
    if not lost and (not lost_spaces or letters != "".join(decoded.split())):
        found.changed = 1
    return found


def visible(text: str) -> Counter[str]:
    """Count the visible characters of a text, without case and accents and in form NFKD.

    U+2581 is left out, because SentencePiece spells a space as this character.
    """
    counts = Counter(unicodedata.normalize("NFKD", text.replace("\u2581", " ")).casefold())
    return Counter(
        {
            character: count
            for character, count in counts.items()
            if character.isprintable()
            and not character.isspace()
            and unicodedata.combining(character) not in ACCENTS
        }
    )


def spaces(text: str) -> Counter[str]:
    """Count the white-space characters of a text."""
    counts = Counter(text)
    return Counter({character: count for character, count in counts.items() if character.isspace()})
