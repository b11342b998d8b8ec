"""Cut long texts into pieces that have the same tokens as the whole text.

No token of the kinds bytes, chars, bpe and gpt2 contains any of these pairs:

- a non-space and a space after it: the text may be cut before the space;
- a single line end and a non-space after it: the text may be cut after the line end;
- a letter and another kind of character after it: the text may be cut between them. This serves
  text without spaces, such as Chinese.

The characters in `CUT` are letters and punctuation in every version of Unicode.

Any other tokenizer.json is asked: a place is a cut if the text around it has the same tokens with
and without the cut. Such places are beside white space and punctuation. If no place passes, the
text stays whole, and memory grows with its length.
"""

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import chain

from accel_gpt.data.tokenizer import Tokenizer
from accel_gpt.errors import DataError

LINE = re.compile(r"\S(?=\n\S)")
CUT = re.compile(
    r"\S(?=[\n ]\S)|[A-Za-zぁ-ゖァ-ヺ一-龥](?=[\u3000-\u3002\uff01\uff0c\uff1a\uff1b\uff1f]|\s\s)"
)
# Places that `CutsByEncoding` tries: before a single line end or space, before and after other
# white space, and between a letter and punctuation
PLACES = (
    LINE,
    re.compile(r"\S(?= \S)"),
    re.compile(r"\S(?=\s)"),
    re.compile(r"\s(?=\S)"),
    re.compile(r"\w(?=[^\w\s])|[^\w\s](?=\w)"),
)
TRIES = 16  # places at which `CutsByEncoding` tries to cut, in `size` characters
CONTEXT = 1000  # characters that `CutsByEncoding` encodes on each side of a place; assumption
LEADS = ("", "\n", ".")  # texts that `lead_of` tries
BEGINNINGS = (" b", "\nb", "\n\nb", ",b", "\tb", "中")  # of the pieces that `lead_of` tries

# Return the end of the piece of a text that begins at a place and has about a size; 0: no such end
FindCut = Callable[[str, int, int], int]


def find_cut(text: str, start: int, size: int) -> int:
    """Return the end of the piece that begins at `start`; 0 if `text` has no place to cut.

    Prefer the first single line end in the second `size` characters; otherwise cut at the next
    match of `CUT`.
    """
    end = start + 2 * size
    found = LINE.search(text, start + size - 1, end) or CUT.search(text, end - 1)
    if found is None:
        return 0
    if LINE.match(text, found.end() - 1):
        return found.end() + 1  # after the line end
    return found.end()


def cut_finder(tokenizer: Tokenizer) -> FindCut:
    """Return the function that finds cuts for a tokenizer."""
    return CutsByEncoding(tokenizer).find if tokenizer.kind == "hf" else find_cut


class CutsByEncoding:
    """Find cuts for a tokenizer.json at one of `PLACES`, by encoding the text around."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.lead = lead_of(tokenizer)

    def find(self, text: str, start: int, size: int) -> int:
        """Return the end of the piece that begins at `start`; 0 if `text` has no place to cut.

        The text that is not read yet changes no answer, so the chunks of a text make no difference.
        """
        step = max(200, size // TRIES)
        for first in range(start + size - 1, len(text) - step - CONTEXT, step):
            for pattern in PLACES:
                if found := pattern.search(text, first, first + step):
                    cut = found.end()
                    left = text[max(start, cut - CONTEXT) : cut]
                    if self.keeps_ids(left, text[cut : cut + CONTEXT]):
                        return cut
        return 0

    def keeps_ids(self, left: str, right: str) -> bool:
        """Return whether `left` and `right` have the same tokens apart as joined."""
        apart = self.tokenizer.encode(left) + encode_after(self.tokenizer, self.lead, right)
        return apart == self.tokenizer.encode(left + right)


def lead_of(tokenizer: Tokenizer) -> str:
    """Return the lead after which a tokenizer reads the later pieces of a text.

    Without a lead, many tokenizers would add a space to a piece or strip it, as at the beginning of
    a text. The lead is the one of `LEADS` that suits most beginnings of a piece.
    """
    if tokenizer.kind != "hf":
        return ""

    def suits(lead: str) -> int:
        count = 0
        for piece in BEGINNINGS:
            with contextlib.suppress(DataError):  # there is no token for the text
                ids = tokenizer.encode("b") + encode_after(tokenizer, lead, piece)
                count += ids == tokenizer.encode(f"b{piece}")
        return count

    return max(LEADS, key=suits)


def encode_after(tokenizer: Tokenizer, lead: str, piece: str) -> list[int]:
    """Encode a piece after `lead`, whose tokens are left out."""
    return tokenizer.encode(lead + piece)[len(tokenizer.encode(lead)) :]


def pieces(chunks: Iterable[str], size: int, find_cut: FindCut = find_cut) -> Iterator[str]:
    """Cut a text into pieces of `size` to `2 * size` characters, or longer if it cannot be cut.

    `chunks` are joined; their borders do not matter.
    """
    buffered: list[str] = []
    length = 0  # characters in `buffered`
    wanted = size  # characters to collect before the next search for a cut
    for chunk in chain(chunks, (None,)):
        if chunk is not None:
            buffered.append(chunk)
            length += len(chunk)
            if length <= wanted:
                continue
        text = "".join(buffered)
        start = 0
        while len(text) - start > size and (cut := find_cut(text, start, size)):
            yield text[start:cut]
            start = cut
        buffered = [text[start:]]
        length = len(buffered[0])
        wanted = size
        if length > size:
            wanted = 2 * length  # doubling keeps the time of all searches linear
    yield "".join(buffered)
