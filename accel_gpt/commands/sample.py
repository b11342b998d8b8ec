"""`accel-gpt sample RUN`: text from a model, for a prompt or, interactively, for several."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from accel_gpt.config.experiment import SampleConfig
from accel_gpt.config.options import REQUIRED, option
from accel_gpt.config.parse import parse_command
from accel_gpt.console import write_err, write_out
from accel_gpt.errors import require


@dataclass(frozen=True)
class SampleCommand:
    """Write text with a model: a run's, a checkpoint's, an exported one or one of the Hub.

    Examples:
      accel-gpt sample runs/quickstart --prompt "def read(" --num 3
      accel-gpt sample runs/quickstart --checkpoint best --temperature 0
      accel-gpt sample runs/quickstart --interactive
    """

    run: str = option(
        REQUIRED,
        "Folder of a run, of one checkpoint, or in transformers format; or a Hub id, as gpt2.",
        positional=True,
    )
    prompt: str = option(
        "",
        "Text to continue; empty: the start of a document.",
    )
    num: int = option(
        1,
        "Samples.",
    )
    max_new_tokens: int = option(
        200,
        "Tokens per sample.",
    )
    temperature: float = option(
        0.8,
        "0: greedy.",
    )
    top_k: int | None = option(
        50,
        "Tokens to choose from; null: all.",
    )
    top_p: float = option(
        1.0,
        "Probability mass to choose from.",
    )
    seed: int = option(
        1337,
        "Of the draws.",
    )
    checkpoint: str = option(
        "last",
        "Of a run: last, best, or a step.",
    )
    interactive: bool = option(
        False,
        "Type prompts on a terminal, a line each; \\n in one is a line end; texts as they come.",
    )

    def __post_init__(self) -> None:
        require(
            not (self.interactive and self.prompt),
            f"--interactive asks for prompts, so --prompt {self.prompt!r} is one too many",
        )
        require(
            not self.interactive or sys.stdin.isatty(),
            "--interactive needs a terminal; give a prompt with --prompt",
        )


def main(argv: Sequence[str]) -> int:
    """Print samples."""
    texts = continue_prompt(parse_command(SampleCommand, argv, "accel-gpt sample"))
    if texts:
        from accel_gpt.evals.samples import SEPARATOR

        write_out(SEPARATOR.join(texts) + "\n")
    return 0


def continue_prompt(options: SampleCommand) -> list[str]:
    """Texts of a model; none where they were shown on the terminal as they came."""
    config = SampleConfig(
        num=options.num,
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
    )
    import torch

    from accel_gpt.commands.interactive import interact
    from accel_gpt.evals.samples import warn_cut, write_text
    from accel_gpt.hub.load import load_pretrained

    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    model, tokenizer = load_pretrained(options.run, options.checkpoint, device)
    generator = torch.Generator(device).manual_seed(options.seed)
    with torch.inference_mode():  # on a CPU 10 to 14 % faster than without gradients alone
        if options.interactive:
            interact(model, tokenizer, config, generator, write_err)
            return []
        warn_cut(options.prompt, tokenizer, model.config.block_size, write_err)
        return write_text(model, tokenizer, options.prompt, config, generator)
