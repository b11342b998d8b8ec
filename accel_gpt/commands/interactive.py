r"""`accel-gpt sample RUN --interactive`: continue prompts typed on a terminal, token by token.

In a prompt, `\n` (a backslash and an n) is a line end and `\\` a backslash.
"""

import contextlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from accel_gpt.config.experiment import SampleConfig
from accel_gpt.console import write_out
from accel_gpt.data.tokenizer import Tokenizer
from accel_gpt.errors import AccelGPTError
from accel_gpt.evals.samples import SEPARATOR, prompt_ids, warn_cut
from accel_gpt.model.generate import stream
from accel_gpt.model.gpt import GPT

PROMPT = "> "
USAGE = (
    r"Type a text to continue (\n in it is a line end, \\ a backslash) or nothing to start a "
    "document; Ctrl-C stops a text, Ctrl-D leaves.\n"
)
REPLACEMENT = "\ufffd"
LONGEST = 4  # bytes of a character in UTF-8; the first three may be tokens without a character
OVERLAP = 16  # tokens decoded along with a new one; assumption: no decoder looks further back


def interact(
    model: GPT,
    tokenizer: Tokenizer,
    config: SampleConfig,
    generator: torch.Generator,
    warn: Callable[[str], None],
) -> None:
    """Write `config.num` continuations of each prompt, until the input ends.

    An empty prompt is the start of a document. Ctrl-C stops the text that is being written, and
    leaves where there is none. `warn` gets a line for a prompt that exceeds the context.
    """
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - gives `input` its history
    write(USAGE)
    while True:
        try:
            line = input(PROMPT)
        except (EOFError, KeyboardInterrupt):
            break
        except UnicodeDecodeError as error:
            write(f"a prompt is not valid {error.encoding} ({error.reason}); convert it\n")
            continue
        prompt = unescape(line)
        try:
            warn_cut(prompt, tokenizer, model.config.block_size, warn)
            for number in range(config.num):
                write(SEPARATOR if number else "")
                for text in continuation(model, tokenizer, prompt, config, generator):
                    write(text)
        except AccelGPTError as error:  # a character that the tokenizer does not know
            write(str(error))
        except KeyboardInterrupt:
            pass
        write("\n")
    write("\n")


def continuation(
    model: GPT, tokenizer: Tokenizer, prompt: str, config: SampleConfig, generator: torch.Generator
) -> Iterator[str]:
    """Yield one continuation of `prompt` in pieces."""
    ids = prompt_ids(prompt, tokenizer, model.vocab_size)
    tokens = stream(
        model,
        torch.tensor([ids], device=next(model.parameters()).device),
        config,
        generator,
        eot_id=tokenizer.eot_id,
        choices=tokenizer.vocab_size,
    )
    return decode_stream(tokenizer, map(int, tokens), context=ids if prompt else ())


def decode_stream(
    tokenizer: Tokenizer, tokens: Iterable[int], context: Sequence[int] = ()
) -> Iterator[str]:
    """Yield the text that each of `tokens`, up to end-of-text, adds to `context`; then the rest.

    A character is held back until its last byte is there. Ids are decoded with those before them,
    as some decoders put a space by what stands there, but with the last few alone: the time grows
    linearly with the number of tokens.
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
        if len(ids) - whole >= LONGEST:  # bytes that are not UTF-8, whatever follows
            ready = max(ready, text[:-1], key=len)
        yield ready[shown:]
        shown = max(shown, len(ready))
        if ready == text:
            whole = len(ids)
            if whole - mark >= OVERLAP:
                del ids[:mark]
                mark = whole = len(ids)
                text = tokenizer.decode(ids)
                shown = len(text)
    yield text[shown:]


def unescape(line: str) -> str:
    r"""`line` with a line end for `\n` and a backslash for `\\`."""
    return re.sub(r"\\([n\\])", lambda found: "\n" if found[1] == "n" else "\\", line)


def write(text: str) -> None:
    """Write to the terminal at once."""
    write_out(text)
    sys.stdout.flush()
