"""Count what the tokens of a text do not hold, and say it.

The tokens of a text are decoded and compared with it. Characters are compared without case and
accents and in form NFKD, because a tokenizer may normalize them.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from accel_gpt.config.plan import plural
from accel_gpt.data.shards import Tokens
from accel_gpt.data.tokenizer import Tokenizer

EXAMPLES = 5  # lost characters that are named
# Texts that may separate documents: names of tokens in use for it
SEPARATOR = re.compile(
    r"</s>|\[(?:EO[SDT]|SEP)\]"
    r"|(?i:<(?:eo[sdt]|end_?of_?[a-z]+)>)"
    r"|(?i:<[|\uff5c](?:eo[sdt]|eo[tm]_id|im_end|end|end[_\u2581]?of[_\u2581]?[a-z]+)[|\uff5c]>)"
)
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
    separators: dict[str, int] = field(default_factory=dict)
    """The separators that the text spells, and how often each becomes letters."""

    def add(self, other: "LostText") -> None:
        """Add the counts over another text."""
        self.tokens += other.tokens
        self.unknown += other.unknown
        self.characters += other.characters
        self.lost += other.lost
        self.examples = "".join(dict.fromkeys(self.examples + other.examples))[:EXAMPLES]
        self.spaces += other.spaces
        self.lost_spaces += other.lost_spaces
        self.pieces += other.pieces
        self.changed += other.changed
        for name, count in other.separators.items():
            self.separators[name] = self.separators.get(name, 0) + count

    @property
    def is_all_lost(self) -> bool:
        """Return whether the tokens hold no visible character of a text that has some."""
        return self.lost > 0 and self.lost == self.characters

    def warnings(self, tokenizer: Tokenizer) -> Iterator[str]:
        """Yield a sentence for each kind of text that the tokens do not hold."""
        if self.unknown:
            assert tokenizer.unk_id is not None
            yield (
                f"{self.unknown:,} of {plural(self.tokens, 'token')} "
                f"({self.unknown / self.tokens:.1%}) are "
                f"{tokenizer.decode([tokenizer.unk_id])}, which stands for unknown text; a "
                "tokenizer with a token for each byte (bpe, bytes, gpt2) knows all text"
            )
        if self.lost:
            named = ", ".join(map(repr, self.examples))
            yield (
                f"the tokens lack {self.lost:,} of {self.characters:,} visible characters, such as "
                f"{named}; a tokenizer with a token for each byte (bpe, bytes, gpt2) loses none"
            )
        if self.lost_spaces:
            yield (
                f"the tokens lack {self.lost_spaces:,} of {self.spaces:,} spaces, line ends and "
                f"tabs ({self.lost_spaces / self.spaces:.1%}), so that the model cannot learn to "
                "write them"
            )
        if self.changed:
            yield (
                f"the tokens change case, accents or white space in {self.changed:,} of "
                f"{plural(self.pieces, 'piece')} of text, so that the model cannot learn them"
            )
        for name, count in self.separators.items():
            yield (
                f"the text spells {name} {plural(count, 'time')}, which became letters and ends no "
                f"document; to end documents there, prepare it again with --separator {name!r} "
                "(data.prepare.separator in a config), with a tokenizer that has an end-of-text "
                "token"
            )


def find_lost_text(tokenizer: Tokenizer, text: str, ids: Tokens) -> LostText:
    """Compare a text with its tokens, which have no end-of-text."""
    found = LostText(tokens=len(ids), pieces=1)
    found.separators = dict(Counter(SEPARATOR.findall(text)))
    if count := text.count(tokenizer.eot):
        found.separators[tokenizer.eot] = count
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
    if lost:
        return found
    if not lost_spaces or letters != "".join(decoded.split()):
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
