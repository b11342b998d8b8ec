"""Count what the tokens of a text do not hold, and say it.

The tokens of a text are decoded and compared with it. Characters are compared without case and in
form NFKD, because a tokenizer may normalize them.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from accel_gpt.config.plan import plural
from accel_gpt.data.shards import Tokens
from accel_gpt.data.tokenizer import HFTokenizer, Tokenizer
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
    spaces: int = 0  # runs of white space between visible characters
    changed: int = 0  # runs of white space that are not in the decoded text
    separators: dict[str, int] = field(default_factory=dict)
    """The `SEPARATORS` that the text spells, and how often each becomes letters."""

    def add(self, other: "LostText") -> None:
        """Add the counts over another text."""
        self.tokens += other.tokens
        self.unknown += other.unknown
        self.characters += other.characters
        self.lost += other.lost
        self.examples = "".join(dict.fromkeys(self.examples + other.examples))[:EXAMPLES]
        self.spaces += other.spaces
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
                f"{share(self.unknown, self.tokens)} of the tokens are "
                f"{tokenizer.decode([tokenizer.unk_id])}, which stands for unknown text; a "
                "tokenizer with a token for each byte (bpe, bytes, gpt2) knows all text"
            )
        if self.lost:
            named = ", ".join(map(repr, self.examples))
            yield (
                f"the tokens lack {share(self.lost, self.characters)} of the visible characters, "
                f"such as {named}; a tokenizer with a token for each byte (bpe, bytes, gpt2) loses "
                "none"
            )
        if self.changed:
            yield (
                f"the tokens lack or change {share(self.changed, self.spaces)} of the white space, "
                "such as line ends and indentation"
            )
        other = "" if tokenizer.eot_id is not None else " and --tokenizer bpe, bytes or gpt2"
        for name, count in self.separators.items():
            yield (
                f"the text spells {name} {plural(count, 'time')}, which became letters and ends no "
                f"document; to end documents there, prepare it again with --separator {name!r}"
                f"{other} (data.prepare.separator in a config)"
            )


def share(part: int, whole: int) -> str:
    """Return a share in percent, with two digits; it is 100 only if nothing is left."""
    percent = 100 * part / max(1, whole)
    if percent < 99.5:
        return f"{percent:.2g} %"
    return "100 %" if part == whole else "more than 99 %"


def find_lost_text(tokenizer: Tokenizer, text: str, ids: Tokens) -> LostText:
    """Compare a text with its tokens, which have no end-of-text."""
    found = LostText(tokens=len(ids), separators=spelled_separators(tokenizer, text, ids))
    if not isinstance(tokenizer, HFTokenizer):
        return found  # the other kinds hold every text
    words = text.split()
    found.characters = sum(map(len, words))
    found.spaces = max(0, len(words) - 1)
    known = ids
    if tokenizer.unk_id is not None:
        known = ids[ids != tokenizer.unk_id]
        found.unknown = len(ids) - len(known)
    adds_up = tokenizer.bytes_add_up and tokenizer.token_bytes[ids].sum() == len(text.encode())
    if adds_up and not found.unknown:
        return found
    decoded = tokenizer.decode(ids.tolist())
    if decoded == text:
        return found
    of_known = tokenizer.decode(known.tolist()) if found.unknown else decoded
    lost = visible(text) - visible(of_known)
    found.lost = lost.total()
    found.examples = "".join(character for character, _ in lost.most_common(EXAMPLES))
    if not found.unknown:  # no token stands for the lost characters
        text = text.translate({ord(c): None for c in set(text) if is_among(c, lost)})
    found.changed = (white_space(text) - white_space(decoded)).total()
    return found


def spelled_separators(tokenizer: Tokenizer, text: str, ids: Tokens) -> dict[str, int]:
    """Count the `SEPARATORS` that are letters in the tokens of a text."""
    found: dict[str, int] = {}
    for name in dict.fromkeys((tokenizer.eot, *SEPARATORS)):
        count = text.count(name)
        if count and name == tokenizer.eot:  # a vocabulary of words may hold the whole name
            count -= int((ids == tokenizer.eot_id).sum())
        if count:
            found[name] = count
    return found


def is_among(character: str, lost: Counter[str]) -> bool:
    """Return whether a character is visible and lost."""
    parts = visible(character)
    return bool(parts) and parts <= lost


def white_space(text: str) -> Counter[str]:
    """Count the runs of white space in a text, without its ends; SentencePiece spells it U+2581."""
    return Counter(re.findall(r"\s+", text.replace("\u2581", " ").strip()))


def visible(text: str) -> Counter[str]:
    """Count the visible characters of a text, without case and in form NFKD."""
    counts = Counter(unicodedata.normalize("NFKD", text.replace("\u2581", " ")).casefold())
    return Counter({c: n for c, n in counts.items() if c.isprintable() and not c.isspace()})
