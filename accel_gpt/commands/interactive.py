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
    show(USAGE)
    while True:
        try:
            line = input(PROMPT)
        except (EOFError, KeyboardInterrupt):
            break
        except UnicodeDecodeError as error:
            show(f"a prompt is not valid {error.encoding} ({error.reason}); convert it\n")
            continue
        prompt = re.sub(r"\\([n\\])", lambda found: "\n" if found[1] == "n" else "\\", line)
        try:
            warn_cut(prompt, tokenizer, model.config.block_size, warn)
            start = prompt_ids(prompt, tokenizer, model.vocab_size)
            ids = torch.tensor([start], device=generator.device)
            ends = tokenizer.eot_id, tokenizer.vocab_size
            for number in range(config.num):
                show(SEPARATOR if number else "")
                tokens = map(int, stream(model, ids, config, generator, *ends))
                for text in decode_stream(tokenizer, tokens, context=start if prompt else ()):
                    show(text)
        except AccelGPTError as error:  # a character that the tokenizer does not know
            show(str(error))
        except KeyboardInterrupt:
            pass
        show("\n")
    show("\n")


def decode_stream(
    tokenizer: Tokenizer, tokens: Iterable[int], context: Sequence[int] = ()
) -> Iterator[str]:
    """Yield the text that each of `tokens`, up to end-of-text, adds to `context`; then the rest.

    A character is held back until its last byte is there. Ids are decoded with those before them,
    as some decoders put a space by what stands there, but with the last few alone: the time grows
    linearly with the number of tokens.
    """
    ids = list(context)
    shown, whole = len(tokenizer.decode(ids)), len(ids)  # ids up to `whole` are whole characters
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
            if len(ids) > 2 * OVERLAP:
                del ids[:-OVERLAP]
                shown = len(tokenizer.decode(ids))
            whole = len(ids)
    yield tokenizer.decode(ids)[shown:]


def show(text: str) -> None:
    """Write to the terminal at once."""
    write_out(text)
    sys.stdout.flush()
