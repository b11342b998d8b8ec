"""Count what the tokens of a text do not hold, and say it.

The tokens of a text are decoded and compared with it. Characters are compared without case and in
form NFKD, because a tokenizer may normalize them.
"""

import unicodedata
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from accel_gpt.config.plan import plural
from accel_gpt.data.shards import Tokens
from accel_gpt.data.tokenizer import Tokenizer
from accel_gpt.data.tokenizer_json import EOT_NAMES

EXAMPLES = 5  # lost characters that are named
# Texts that may separate documents: the names of end-of-text tokens, and others in use for it
SEPARATORS = (*EOT_NAMES, "<EOS>", "[EOS]", "[SEP]", "<|im_end|>", "<|eot_id|>", "<end_of_turn>")


@dataclass
class LostText:
    """Counts over a text and its tokens."""

    tokens: int = 0
    unknown: int = 0  # tokens that stand for unknown text
    characters: int = 0  # visible ones
    lost: int = 0  # visible characters that are not in the decoded text
    examples: str = ""  # some of them
    pieces: int = 0  # pieces of text that were compared
    changed: int = 0  # pieces that differ from their decoded tokens
    separators: dict[str, int] = field(default_factory=dict)
    """The `SEPARATORS` that the text spells, and how often each becomes letters."""

    def add(self, other: "LostText") -> None:
        """Add the counts over another text."""
        self.tokens += other.tokens
        self.unknown += other.unknown
        self.characters += other.characters
        self.lost += other.lost
        self.examples = "".join(dict.fromkeys(self.examples + other.examples))[:EXAMPLES]
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
                f"{self.unknown:,} of {plural(self.tokens, 'token')} are "
                f"{tokenizer.decode([tokenizer.unk_id])}, which stands for unknown text; a "
                "tokenizer with a token for each byte (bpe, bytes, gpt2) knows all text"
            )
        if self.lost:
            named = ", ".join(map(repr, self.examples))
            yield (
                f"the tokens lack {self.lost:,} of {self.characters:,} visible characters, such as "
                f"{named}; a tokenizer with a token for each byte (bpe, bytes, gpt2) loses none"
            )
        elif self.changed:
            yield (
                f"the tokens change case, accents or white space in {self.changed:,} of "
                f"{plural(self.pieces, 'piece')} of text, such as line ends and indentation"
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
    for name in dict.fromkeys((tokenizer.eot, *SEPARATORS)):
        if count := text.count(name):
            found.separators[name] = count
    if tokenizer.kind != "hf":
        return found  # the other kinds hold every text
    found.characters = len("".join(text.split()))
    known = ids
    if tokenizer.unk_id is not None:
        known = ids[ids != tokenizer.unk_id]
        found.unknown = len(ids) - len(known)
    decoded = tokenizer.decode(known.tolist())
    if decoded.strip() == text.strip():
        return found
    found.changed = 1
    lost = visible(text) - visible(decoded)
    found.lost = lost.total()
    found.examples = "".join(character for character, _ in lost.most_common(EXAMPLES))
    return found


def visible(text: str) -> Counter[str]:
    """Count the visible characters of a text, without case and in form NFKD.

    U+2581 is left out, because SentencePiece spells a space as this character.
    """
    counts = Counter(unicodedata.normalize("NFKD", text.replace("\u2581", " ")).casefold())
    return Counter({c: n for c, n in counts.items() if c.isprintable() and not c.isspace()})
