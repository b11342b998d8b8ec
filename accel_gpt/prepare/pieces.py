"""Cut long texts into pieces that have the same tokens as the whole text.

No token of the kinds bpe and gpt2 contains any of these pairs:

- a non-space and a space after it: the text may be cut before the space;
- a single line end and a non-space after it: the text may be cut after the line end;
- a letter and another kind of character after it: the text may be cut between them. This serves
  text without spaces, such as Chinese.

The characters in `CUT` are letters and punctuation in every version of Unicode.

For other tokenizers, `checked_cuts()` asks at each place whether a cut keeps the ids.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from itertools import chain

from accel_gpt.data.cuts import LONGEST_CONTEXT
from accel_gpt.errors import DataError

LINE = re.compile(r"\S(?=\n\S)")
CUT = re.compile(
    r"\S(?=[\n ]\S)|[A-Za-zぁ-ゖァ-ヺ一-龥](?=[\u3000-\u3002\uff01\uff0c\uff1a\uff1b\uff1f]|\s\s)"
)
SPACE = re.compile(r"\S(?= \S)")
TRIES = 16  # places at which `checked_cuts` tries to cut, in `size` characters
LONGEST = 1 << 28  # longest text without a cut, in characters; assumption: no real text is longer


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


def checked_cuts(keeps_ids: Callable[[str, str], bool]) -> FindCut:
    """Return a `FindCut` that cuts before a line end or a space where `keeps_ids(left, right)`.

    `left` and `right`: the text on both sides, at most `LONGEST_CONTEXT` characters each.
    """

    def find(text: str, start: int, size: int) -> int:
        step = max(200, size // TRIES)
        for first in range(start + size - 1, len(text) - step - LONGEST_CONTEXT, step):
            for pattern in (LINE, SPACE):
                if found := pattern.search(text, first, first + step):
                    cut = found.end()
                    left = text[max(start, cut - LONGEST_CONTEXT) : cut]
                    if keeps_ids(left, text[cut : cut + LONGEST_CONTEXT]):
                        return cut
        return 0

    return find


def pieces(
    chunks: Iterable[str], size: int, name: object = None, find_cut: FindCut = find_cut
) -> Iterator[str]:
    """Cut a text into pieces of `size` to `2 * size` characters, or longer if it cannot be cut.

    `chunks` are joined; their borders do not matter. If `name` (of the text) is given, raises
    `DataError` for more than `LONGEST` characters without a place to cut.
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
        if name is not None and length > LONGEST:
            raise DataError(
                f"{name} has {length:,} characters without a line end or a space between words; "
                f"the limit is {LONGEST:,}: insert line ends"
            )
    yield "".join(buffered)
