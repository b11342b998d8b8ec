"""`accel-gpt sample RUN`: write text with a model."""

import torch

from accel_gpt.commands.options import SampleCommand
from accel_gpt.commands.resolve import load_code
from accel_gpt.config.experiment import SampleConfig
from accel_gpt.console import write_out
from accel_gpt.evals.samples import SEPARATOR, write_text
from accel_gpt.transformers_io.load import load_pretrained


def run(options: SampleCommand) -> int:
    """Print samples."""
    write_out(SEPARATOR.join(continue_prompt(options)) + "\n")
    return 0


def continue_prompt(options: SampleCommand) -> list[str]:
    """Return the generated texts."""
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
        return write_text(model, tokenizer, options.prompt, config, generator)
