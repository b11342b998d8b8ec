"""Cut long texts into pieces that have the same tokens as the whole text.

No token of the kinds bytes, chars, bpe and gpt2 contains any of these pairs:

- a non-space and a space after it: the text may be cut before the space;
- a single line end and a non-space after it: the text may be cut after the line end;
- a letter and another kind of character after it: the text may be cut between them. This serves
  text without spaces, such as Chinese.

The characters in `CUT` are letters and punctuation in every version of Unicode. With any other
tokenizer.json, a token or two beside a cut may differ, once in a million characters.

A text without such a place stays whole, and memory grows with its length.
"""

import re
from collections.abc import Iterable, Iterator
from itertools import chain

LINE = re.compile(r"\S(?=\n\S)")
CUT = re.compile(
    r"\S(?=[\n ]\S)|[A-Za-zぁ-ゖァ-ヺ一-龥](?=[\u3000-\u3002\uff01\uff0c\uff1a\uff1b\uff1f]|\s\s)"
)


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


def pieces(chunks: Iterable[str], size: int) -> Iterator[str]:
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
