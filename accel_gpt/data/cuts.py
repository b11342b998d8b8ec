"""Decide where a text may be cut so that its parts get the ids of the whole, for a tokenizer.json.

A tokenizer splits a text into words and encodes each word by itself. A cut between two words
changes no id if the words on both sides stay the same:

- The steps before the model look only at a few runs of white space or visible characters around a
  place (`reach()`). Other steps, and regexes that look further, allow no cut.
- Starting at any character before the cut, as far as the steps look, the text is encoded with the
  text after the cut and without it. The ids and the words must agree.
- A BPE that does not split into words may be cut if no token holds the two characters at the cut.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tokenizers

# Steps that look at one character, or at one run of characters of a kind
LOCAL_STEPS = frozenset(
    (
        "BertNormalizer",
        "BertPreTokenizer",
        "ByteLevel",
        "CharDelimiterSplit",
        "Digits",
        "Lowercase",
        "Metaspace",
        "NFC",
        "NFD",
        "NFKC",
        "NFKD",
        "Nmt",
        "Precompiled",
        "Prepend",
        "Punctuation",
        "Replace",
        "Sequence",
        "Split",
        "Strip",
        "StripAccents",
        "Whitespace",
        "WhitespaceSplit",
    )
)
LONGEST_CONTEXT = 2000  # characters on each side of a cut; every start in them is tried
LONGEST_COUNT = 16  # of {n,m} in a regex; more counts as unlimited
WHITE = " \t\n\r\v\f"
# A run of white space or of visible characters. White space beyond ASCII counts to either, because
# some regexes repeat it together with visible characters.
RUN = re.compile(rf"[{WHITE}]\s*|\S(?:\S|[^\S{WHITE}])*")
VISIBLE = "aZ1.,_-\"<>('\xe9\u4e2d\u3042\u0301\U0001f600"
CLASS_ENDS = re.compile(r"\\.|[\[\]]", re.DOTALL)
ATOM = re.compile(
    r"\\[pP]\{[^}]*\}|\\x\{[^}]*\}|\\x[0-9A-Fa-f]{2}|\\u[0-9A-Fa-f]{4}|\\.|.", re.DOTALL
)
GROUP = re.compile(r"\((\?(:|=|!|>|i:))?")
COUNT = re.compile(r"([+*?]|\{(\d*)(,?)(\d*)\})[+?]?")
BYTE = re.compile("<0x..>")  # a token of a BPE with byte_fallback
LOOKS_BACK = re.compile(r"\\[1-9ABGKRXbgky]|\^")  # depends on the text before, or on a group


class Cuts:
    """Answer whether the text may be cut at a place, for one tokenizer."""

    def __init__(
        self, tokenizer: "tokenizers.Tokenizer", content: Mapping[str, Any], runs: int
    ) -> None:
        self.tokenizer = tokenizer
        self.unknown = content["model"].get("unk_token")
        self.joins_words = is_plain_bpe(content["model"])
        normalizer = steps([content.get("normalizer")])
        self.prepends = any(step["type"] == "Prepend" for step in normalizer)
        self.runs = runs
        """Runs of white space and visible characters around a cut that the steps look at."""
        self.merged: dict[str, bool] = {}

    def continuation(self, text: str) -> str:
        """Return the text to encode for a part that begins after a cut, before white space.

        The normalizer Prepend replaces the space that is left out.
        """
        return text.removeprefix(" ") if self.prepends else text

    def keeps_ids(self, left: str, right: str) -> bool:
        """Return whether a text may be cut between `left` and `right`.

        They are the text on both sides of the place, `LONGEST_CONTEXT` characters are enough.
        """
        before = [run.start() for run in RUN.finditer(left)][-self.runs :]
        after = [run.end() for run in RUN.finditer(right)][: self.runs]
        if min(len(before), len(after)) < self.runs:
            return False
        left = left[before[0] :]
        right = right[: after[-1]]
        (rest,) = self.encode([self.continuation(right)])
        starts = [left[i:] for i in range(len(left))]
        for some in (starts[:1], starts[1:]):  # most places that allow no cut fail with the first
            parts = self.encode(some)
            wholes = self.encode([start + right for start in some])
            each = zip(parts, wholes, strict=True)
            if not all(self.joins(part, rest, whole) for part, whole in each):
                return False
        return True

    def encode(self, texts: list[str]) -> list["tokenizers.Encoding"]:
        """Encode texts with the words of their tokens."""
        return self.tokenizer.encode_batch(texts, add_special_tokens=False)

    def joins(
        self,
        part: "tokenizers.Encoding",
        rest: "tokenizers.Encoding",
        whole: "tokenizers.Encoding",
    ) -> bool:
        """Return whether `part` and `rest` have the ids and words of `whole`."""
        count = len(part.ids)
        words = whole.word_ids
        if not part.ids or not rest.ids or part.ids + rest.ids != whole.ids:
            return False
        same_words = numbered(words[:count]) == numbered(part.word_ids)
        same_words = same_words and numbered(words[count:]) == numbered(rest.word_ids)
        between_words = words[count - 1] != words[count]
        return same_words and (between_words or self.never_merges(part.tokens[-1], rest.tokens[0]))

    def never_merges(self, left: str, right: str) -> bool:
        """Return whether a BPE can never join the end of token `left` to the start of `right`."""
        if not self.joins_words:
            return False
        if any(token == self.unknown or BYTE.fullmatch(token) for token in (left, right)):
            return False
        pair = left[-1] + right[0]
        if pair not in self.merged:
            vocabulary = self.tokenizer.get_vocab(with_added_tokens=False)
            known = vocabulary.keys() >= {*pair}
            self.merged[pair] = not known or any(pair in token for token in vocabulary)
        return not self.merged[pair]


def numbered(words: Sequence[int | None]) -> list[int]:
    """Number the words from 0."""
    return [(word or 0) - (words[0] or 0) for word in words]


def is_plain_bpe(model: Mapping[str, Any]) -> bool:
    """Return whether a model is a BPE whose tokens only depend on the characters that they join."""
    spelled = model.get("continuing_subword_prefix") or model.get("end_of_word_suffix")
    return model.get("type") == "BPE" and not spelled and not model.get("ignore_merges")


# --------------------------------------------------------------------------- how far steps look


def reach(content: Mapping[str, Any]) -> int | None:
    """Return how many runs of characters around a place the steps look at; None if not known."""
    runs = 4
    try:
        for token in content.get("added_tokens") or []:
            if not token["special"]:
                runs = max(runs, 4 + runs_of_text(token["content"]))
        for step in steps([content.get("normalizer"), content.get("pre_tokenizer")]):
            runs += reach_of_step(step)
    except (ValueError, LookupError, TypeError, AttributeError):
        return None
    return runs


def steps(listed: Iterable[Any]) -> Iterable[Mapping[str, Any]]:
    """Yield the steps of a normalizer and a pre-tokenizer, with the steps of sequences."""
    for step in listed:
        if step is None:
            continue
        yield step
        yield from steps(step.get("normalizers") or step.get("pretokenizers") or [])


def reach_of_step(step: Mapping[str, Any]) -> int:
    """Return how many runs a step looks at. Raises `ValueError` if that is not known."""
    kind = step["type"]
    if kind not in LOCAL_STEPS:
        raise ValueError(kind)
    pattern = step.get("pattern")
    if pattern is None:
        return 0
    if "String" in pattern:
        return runs_of_text(pattern["String"])
    return runs_of_regex(pattern["Regex"])


def runs_of_text(text: str) -> int:
    """Return the runs that a match of `text` may touch."""
    return len(RUN.findall(text)) + 1


def runs_of_regex(pattern: str) -> int:
    """Return the runs that a match of a regex may touch.

    Raises `ValueError` if it looks back, or repeats something that holds visible characters and
    white space, so that a match may be as long as the text.
    """
    most = white = 0
    depth = 0
    i = 0
    while i < len(pattern):
        start = i
        char = pattern[i]
        is_group = char in "()"
        if char == "(":
            group = GROUP.match(pattern, i)
            assert group is not None
            i = group.end()
            if pattern[i : i + 1] == "?":
                raise ValueError(pattern)  # looks back, sets flags or has a name
            depth += 1
            continue
        if char == "|" and depth == 0:
            most = max(most, white)
            white = 0
        if char == "[":
            i = end_of_class(pattern, i)
        else:
            atom = ATOM.match(pattern, i)
            assert atom is not None
            i = atom.end()
        depth -= char == ")"
        atom_text = pattern[start:i]
        if LOOKS_BACK.fullmatch(atom_text):
            raise ValueError(pattern)
        repeats = 1
        unlimited = False
        if count := COUNT.match(pattern, i):
            i = count.end()
            unlimited = count[1] in "+*" or (count[1] != "?" and count[4] == "" and count[3] != "")
            repeats = 1 if unlimited or count[1] == "?" else int(count[4] or count[2] or 0)
            unlimited = unlimited or repeats > LONGEST_COUNT
        if char in "|$" or (is_group and not unlimited and repeats == 1):
            continue
        is_white = True
        is_visible = True
        if not is_group:
            is_white = matches_any(atom_text, WHITE)
            is_visible = matches_any(atom_text, VISIBLE)
        if unlimited and is_white and is_visible:
            raise ValueError(pattern)
        white += is_white * repeats
    return 2 * max(most, white) + 1


def end_of_class(pattern: str, start: int) -> int:
    """Return the end of the character class that begins at `start`; classes may be nested."""
    depth = 0
    for found in CLASS_ENDS.finditer(pattern, start):
        depth += {"[": 1, "]": -1}.get(found[0], 0)
        if depth == 0:
            return found.end()
    raise ValueError(pattern)


def matches_any(atom: str, characters: str) -> bool:
    """Return whether an atom of a regex matches one of `characters`, as `tokenizers` reads it."""
    import tokenizers

    try:
        split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(atom), "removed")
        return any(not split.pre_tokenize_str(character) for character in characters)
    except Exception as error:  # the library's bare Exception for a regex that it cannot read
        raise ValueError(atom) from error
