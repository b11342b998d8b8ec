"""Load a model for transformers or llama.cpp, and compute what they must compute."""

import torch
from torch import Tensor

from accel_gpt.data.tokenizer import Tokenizer
from accel_gpt.errors import require
from accel_gpt.model.gpt import GPT
from accel_gpt.model.language_model import LanguageModel
from accel_gpt.runs.checkpoint import read_state
from accel_gpt.transformers_io.load import load_found
from accel_gpt.transformers_io.pretrained import Pretrained

COMPARED_SEQUENCES = 2
COMPARED_TOKENS = 1024  # of each sequence, at most the context
COMPARED_LOGITS = 128  # of the last tokens; the logits of all tokens can take gigabytes


def load_exportable(pretrained: Pretrained) -> tuple[GPT, Tokenizer]:
    """Load a model for transformers or llama.cpp; see `load_found` and `check_exportable`."""
    check_exportable(pretrained)
    model, tokenizer = load_found(pretrained)
    assert isinstance(model, GPT)
    return model, tokenizer


def check_exportable(pretrained: Pretrained) -> None:
    """Raise `UserError` if the model is one of --code: transformers lacks its class."""
    if not pretrained.is_checkpoint:
        return
    used = read_state(pretrained.folder).code
    require(
        used is None or "model" not in used.functions,
        f"{pretrained.name} has the model() of {used and used.file}, which neither transformers "
        "nor llama.cpp has",
    )


def compared_tokens(model: LanguageModel, tokenizer: Tokenizer) -> Tensor:
    """Return random tokens (B, T) to compare on, always the same."""
    return torch.randint(
        min(tokenizer.vocab_size, model.vocab_size),
        (COMPARED_SEQUENCES, min(COMPARED_TOKENS, model.config.block_size)),
        generator=torch.Generator().manual_seed(0),
    )


@torch.no_grad()
def compute_logits(model: LanguageModel, tokens: Tensor) -> Tensor:
    """Return the logits (B, L, V) of the last L of `tokens` (B, T)."""
    logits: Tensor = model(tokens)
    return logits[:, -COMPARED_LOGITS:].contiguous()
