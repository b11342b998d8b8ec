"""Long texts cut into pieces whose tokens are those of the whole.

No token of our own BPE or of GPT-2's reaches from a non-space over a space, or from one line end to
a non-space: a text may be cut after such a line end and before such a space. Nor does one reach
from a letter to what is none: text without spaces, as Chinese, is cut before its punctuation and
its white space. The letters and signs below are such in any version of Unicode.
"""

import re
from collections.abc import Iterable, Iterator
from itertools import chain

from accel_gpt.errors import DataError

LINE = re.compile(r"\S(?=\n\S)")
CUT = re.compile(
    r"\S(?=[\n ]\S)|[A-Za-zぁ-ゖァ-ヺ一-龥](?=[\u3000-\u3002\uff01\uff0c\uff1a\uff1b\uff1f]|\s\s)"
)
LONGEST = 1 << 28  # characters that cannot be cut; assumption: longer is no text


def pieces(chunks: Iterable[str], size: int, name: object = None) -> Iterator[str]:
    """Cut a text into pieces of `size` to twice `size` characters, if it can be cut there.

    The text is what `chunks` add up to; where they end makes no difference. With the `name` of the
    text, raises `DataError` for `LONGEST` characters that cannot be cut.
    """
    held: list[str] = []
    length = 0
    enough = size
    for chunk in chain(chunks, (None,)):
        if chunk is not None:
            held.append(chunk)
            length += len(chunk)
            if length <= enough:
                continue
        text = "".join(held)
        start = 0
        while len(text) - start > size and (cut := find_cut(text, start, size)):
            yield text[start:cut]
            start = cut
        held = [text[start:]]
        length = len(held[0])
        enough = size
        if length > size:
            enough = 2 * length  # or searching would take quadratic time
        if name is not None and length > LONGEST:
            raise DataError(
                f"{name} has {length:,} characters without a line end or a space between words; "
                f"text is cut there, so expected at most {LONGEST:,}: put line ends into it"
            )
    yield "".join(held)


def find_cut(text: str, start: int, size: int) -> int:
    """Return where the piece that begins at `start` ends; 0 if `text` does not reach that far.

    It is after the first line end between two non-spaces in the second `size` characters; if there
    is none, then at the next such line end or other `CUT`.
    """
    end = start + 2 * size
    found = LINE.search(text, start + size - 1, end) or CUT.search(text, end - 1)
    if found is None:
        return 0
    if LINE.match(text, found.end() - 1):
        return found.end() + 1  # after the line end
    return found.end()
