"""A fault: the middle block never trains; `requires_grad_` was left from a finetuning."""

from accel_gpt.model.gpt import GPT


def model(config, vocab_size):
    gpt = GPT(config.model, vocab_size, init=False)
    gpt.blocks[len(gpt.blocks) // 2].requires_grad_(False)
    return gpt
