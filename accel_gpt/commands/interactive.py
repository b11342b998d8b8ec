r"""`accel-gpt sample RUN --interactive`: continue prompts typed on a terminal, token by token.

In a prompt, `\n` (a backslash and an n) is a line break and `\\` a backslash.
"""

import contextlib
import re
import sys
from collections.abc import Callable
from dataclasses import replace

import torch

from accel_gpt.config.experiment import SampleConfig
from accel_gpt.console import write_out
from accel_gpt.data.tokenizer import Tokenizer
from accel_gpt.errors import AccelGPTError
from accel_gpt.evals.samples import SEPARATOR, stream_texts, warn_cut
from accel_gpt.model.language_model import LanguageModel

PROMPT = "> "
USAGE = (
    r"Type a prompt (\n is a line break, \\ a backslash), or press Enter to start a document. "
    "Ctrl-C stops a text, Ctrl-D exits.\n"
)


def interact(
    model: LanguageModel,
    tokenizer: Tokenizer,
    config: SampleConfig,
    generator: torch.Generator,
    warn: Callable[[str], None],
) -> None:
    """Write `config.num` continuations of each prompt, until the input ends.

    An empty prompt starts a document. Ctrl-C stops the text that is being written; at the prompt it
    exits. If a prompt exceeds the context, `warn` gets a line.
    """
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - gives `input` its history
    show(USAGE)
    one = replace(config, num=1)  # one sample at a time
    while True:
        try:
            line = input(PROMPT)
        except (EOFError, KeyboardInterrupt):
            break
        prompt = unescape(line)
        try:
            warn_cut(prompt, tokenizer, model.vocab_size, model.config.block_size, warn)
            for number in range(config.num):
                show(SEPARATOR if number else "")
                for (text,) in stream_texts(model, tokenizer, prompt, one, generator):
                    show(text.new_text())
        except AccelGPTError as error:  # a character that the tokenizer does not know
            show(str(error))
        except KeyboardInterrupt:
            pass
        show("\n")
    show("\n")


def unescape(line: str) -> str:
    r"""Replace `\n` by a line break and `\\` by a backslash."""

    def replacement(found: re.Match[str]) -> str:
        return "\n" if found[1] == "n" else "\\"

    return re.sub(r"\\([n\\])", replacement, line)


def show(text: str) -> None:
    """Write to the terminal at once."""
    write_out(text)
    sys.stdout.flush()
