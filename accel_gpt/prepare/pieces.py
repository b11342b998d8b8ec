"""Cut long texts into pieces that have the same tokens as the whole text.

No token of the kinds bytes, chars, bpe and gpt2 contains any of these pairs:

- a non-space and a space after it: the text may be cut before the space;
- a single line end and a non-space after it: the text may be cut after the line end;
- a letter and another kind of character after it: the text may be cut between them. This serves
  text without spaces, such as Chinese.

The characters in `CUT` are letters and punctuation in every version of Unicode.

Any other tokenizer.json is asked: a place is a cut if the text around it has the same tokens with
and without the cut. If no place passes, the text stays whole, and memory grows with its length.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import chain

from accel_gpt.data.tokenizer import Tokenizer

LINE = re.compile(r"\S(?=\n\S)")
CUT = re.compile(
    r"\S(?=[\n ]\S)|[A-Za-zぁ-ゖァ-ヺ一-龥](?=[\u3000-\u3002\uff01\uff0c\uff1a\uff1b\uff1f]|\s\s)"
)
SPACE = re.compile(r"\S(?= \S)")
TRIES = 16  # places at which `CutsByEncoding` tries to cut, in `size` characters
CONTEXT = 1000  # characters that `CutsByEncoding` encodes on each side of a place; assumption

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
    """Find cuts for a tokenizer.json before a line end or a space, by encoding the text around."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.prepends = prepends_space(tokenizer)

    def find(self, text: str, start: int, size: int) -> int:
        """Return the end of the piece that begins at `start`; 0 if `text` has no place to cut.

        The text that is not read yet changes no answer, so the chunks of a text make no difference.
        """
        step = max(200, size // TRIES)
        for first in range(start + size - 1, len(text) - step - CONTEXT, step):
            for pattern in (LINE, SPACE):
                if found := pattern.search(text, first, first + step):
                    cut = found.end()
                    left = text[max(start, cut - CONTEXT) : cut]
                    if self.keeps_ids(left, text[cut : cut + CONTEXT]):
                        return cut
        return 0

    def keeps_ids(self, left: str, right: str) -> bool:
        """Return whether `left` and `right` have the same tokens apart as joined."""
        after = continuation(right) if self.prepends else right
        ids = [self.tokenizer.encode(text) for text in (left, after, left + right)]
        return ids[0] + ids[1] == ids[2]


def prepends_space(tokenizer: Tokenizer) -> bool:
    """Return whether a tokenizer adds a space before a text, even if the text begins with one."""
    if tokenizer.kind != "hf":
        return False
    content = json.loads(tokenizer.file_text)
    return '"Prepend"' in json.dumps(content.get("normalizer"))


def continuation(text: str) -> str:
    """Leave out the space at the start of a piece, for a tokenizer that prepends one."""
    return text.removeprefix(" ")


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
