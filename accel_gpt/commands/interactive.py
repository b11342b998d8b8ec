r"""Text from a model as it comes, token by token; prompts from a terminal or a pipe, a line each.

A terminal shows a sign where a prompt may be typed, and the continuation alone; to a pipe goes what
`accel-gpt sample` writes for each prompt. In a prompt, `\n` (a backslash and an n) is a line end
and `\\` a backslash.
"""

import contextlib
import functools
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TextIO

import torch

from accel_gpt.config.experiment import SampleConfig
from accel_gpt.console import visible
from accel_gpt.data.tokenizer import Tokenizer
from accel_gpt.errors import UserError
from accel_gpt.evals.samples import SEPARATOR, known_ids, say_cut
from accel_gpt.model.generate import stream
from accel_gpt.model.gpt import GPT

SIGN = "> "
USE = (
    r"Type a text to continue (\n in it is a line end, \\ a backslash) or nothing to start a "
    "document; Ctrl-C stops a text, Ctrl-D leaves.\n"
)
REPLACEMENT = "\ufffd"
LONGEST = 4  # bytes of a character in UTF-8; the first three may be tokens that spell nothing yet
WINDOW = 16  # tokens decoded along with a new one; assumption: no decoder looks further back

Continue = Callable[[str], Iterator[str]]


def interact(
    model: GPT,
    tokenizer: Tokenizer,
    config: SampleConfig,
    generator: torch.Generator,
    lines: TextIO,
    out: TextIO,
    say: Callable[[str], None],
) -> None:
    """Write `config.num` continuations of each prompt that `lines` hold, until they end.

    An empty prompt is the start of a document. On a terminal, Ctrl-C stops the text that is being
    written and leaves where there is none, and a prompt that cannot be encoded is told and asked
    for again. In a pipe both end the whole: raises `UserError` for a character that the tokenizer
    does not know and for bytes that are no text. `say` is told of prompts beyond the context.
    """

    @functools.lru_cache(maxsize=1)  # once for all continuations of a prompt
    def check(prompt: str) -> None:
        say_cut(prompt, tokenizer, model.config.block_size, say)

    def answer(prompt: str) -> Iterator[str]:
        check(prompt)
        return continuation(model, tokenizer, prompt, config, generator)

    if lines.isatty():
        _converse(answer, config.num, lines, out)
    else:
        _pipe(answer, config.num, lines, out)


def continuation(
    model: GPT, tokenizer: Tokenizer, prompt: str, config: SampleConfig, generator: torch.Generator
) -> Iterator[str]:
    """What one continuation of `prompt` adds to it, in pieces; `config.num` does not count.

    Raises `UserError` at once for a character that the tokenizer does not know.
    """
    ids = known_ids(prompt, tokenizer, model)
    tokens = stream(
        model,
        torch.tensor([ids], device=next(model.parameters()).device),
        config.max_new_tokens,
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        generator=generator,
        eot_id=tokenizer.eot_id,
        choices=tokenizer.vocab_size,
    )
    return spell(tokenizer, map(int, tokens), context=ids if prompt else ())


def spell(
    tokenizer: Tokenizer, tokens: Iterable[int], context: Sequence[int] = ()
) -> Iterator[str]:
    """What each of `tokens`, up to end-of-text, adds to the text of `context`; then what is left.

    A character is held back until its last byte has come. Ids are decoded with those before them,
    as some decoders put a space by what stands there, but with the last few alone: the time grows
    with the number of tokens, not with its square.
    """
    ids = list(context)
    mark = whole = len(ids)  # ids end with a whole character at both; those before mark may go
    text = tokenizer.decode(ids)
    shown = len(text)
    for token in tokens:
        if token == tokenizer.eot_id:
            break
        ids.append(token)
        text = tokenizer.decode(ids)
        ready = text.rstrip(REPLACEMENT)
        if len(ids) - whole >= LONGEST:  # bytes that are no UTF-8, whatever follows
            ready = max(ready, text[:-1], key=len)
        yield ready[shown:]
        shown = max(shown, len(ready))
        if ready == text:
            whole = len(ids)
            if whole - mark >= WINDOW:
                del ids[:mark]
                mark = whole = len(ids)
                text = tokenizer.decode(ids)
                shown = len(text)
    yield text[shown:]


def _pipe(answer: Continue, num: int, lines: TextIO, out: TextIO) -> None:
    """Texts with their prompts, as `accel-gpt sample` separates and ends them."""
    before = ""
    try:
        for line in lines:
            prompt = _unescape(line.removesuffix("\n"))
            for _ in range(num):
                pieces = answer(prompt)
                _write(out, before + prompt)
                _write_all(out, pieces)
                before = SEPARATOR
    except UnicodeDecodeError as error:
        raise _unreadable(error) from None
    finally:
        _write(out, "\n" if before else "")


def _converse(answer: Continue, num: int, lines: TextIO, out: TextIO) -> None:
    """Prompts that a person types, each with its continuations after it."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - gives `input` its history
    _write(out, USE)
    while True:
        try:
            line = _ask(lines, out)
        except (EOFError, KeyboardInterrupt):
            break
        except UnicodeDecodeError as error:
            _write(out, f"{_unreadable(error)}\n")
            continue
        try:
            for i in range(num):
                pieces = answer(_unescape(line))
                _write(out, SEPARATOR if i else "")
                _write_all(out, pieces)
        except UserError as error:
            _write(out, str(error))
        except KeyboardInterrupt:
            pass
        _write(out, "\n")
    _write(out, "\n")


def _ask(lines: TextIO, out: TextIO) -> str:
    """The line that is typed next; raises `EOFError` when there is none."""
    if lines is sys.stdin and out is sys.stdout:
        return input(SIGN)
    _write(out, SIGN)
    line = lines.readline()
    if not line:
        raise EOFError
    return line.removesuffix("\n")


def _unreadable(error: UnicodeDecodeError) -> UserError:
    return UserError(f"a prompt is not valid {error.encoding} ({error.reason}); convert it")


def _unescape(line: str) -> str:
    r"""`line` with a line end for `\n` and a backslash for `\\`."""
    return re.sub(r"\\([n\\])", lambda found: "\n" if found[1] == "n" else "\\", line)


def _write_all(out: TextIO, pieces: Iterator[str]) -> None:
    for piece in pieces:
        _write(out, piece)


def _write(out: TextIO, text: str) -> None:
    """Write at once; a terminal is spared the control characters, which it would obey."""
    out.write(visible(text, out))
    out.flush()
