"""`accel-gpt sample RUN`: write text with a model."""

import sys

import torch

from accel_gpt.commands.options import SampleCommand
from accel_gpt.commands.resolve import load_code
from accel_gpt.config.experiment import SampleConfig
from accel_gpt.console import write_out
from accel_gpt.evals.samples import SEPARATOR, write_text
from accel_gpt.runs.folder import PROMPT_END
from accel_gpt.transformers_io.load import load_pretrained


def run(options: SampleCommand) -> int:
    """Print samples; on a terminal, mark the end of the prompt."""
    texts = continue_prompt(options, PROMPT_END if sys.stdout.isatty() else "")
    write_out(SEPARATOR.join(texts) + "\n")
    return 0


def continue_prompt(options: SampleCommand, prompt_end: str = "") -> list[str]:
    """Return the generated texts, each with `prompt_end` after its prompt."""
    config = SampleConfig(
        num=options.num,
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
    )
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    own = load_code(options.code)
    model, tokenizer = load_pretrained(
        options.run, options.checkpoint, device, own, options.weights
    )
    generator = torch.Generator(device).manual_seed(options.seed)
    with torch.inference_mode():  # on a CPU 10 to 14 % faster than no_grad
        return write_text(model, tokenizer, options.prompt, config, generator, prompt_end)
