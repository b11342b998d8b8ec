"""Load a model for transformers or llama.cpp: a GPT, also one that `exported()` of --code makes."""

import torch
from torch import Tensor

from accel_gpt.config.experiment import Config
from accel_gpt.data.tokenizer import Tokenizer
from accel_gpt.errors import require
from accel_gpt.model.gpt import GPT
from accel_gpt.model.language_model import LanguageModel
from accel_gpt.own_code import OwnCode, unexpected
from accel_gpt.runs.checkpoint import check_code, read_state
from accel_gpt.transformers_io.compare_export import EXPORT_TOLERANCE, largest_difference
from accel_gpt.transformers_io.load import NO_CODE, load_found, recorded_config
from accel_gpt.transformers_io.pretrained import Pretrained

COMPARED_SEQUENCES = 2
COMPARED_TOKENS = 1024  # of each sequence, at most the context
COMPARED_LOGITS = 128  # of the last tokens; the logits of all tokens can take gigabytes


def load_exportable(pretrained: Pretrained, own: OwnCode = NO_CODE) -> tuple[GPT, Tokenizer]:
    """Load a model for transformers or llama.cpp; see `load_found` and `check_exportable`.

    With a function `exported()`, it is the GPT that the function returns. Raises `UserError` unless
    that GPT computes the same logits.
    """
    check_exportable(pretrained, own)
    model, tokenizer = load_found(pretrained, own=own)
    if pretrained.is_checkpoint and own.exported is not None:
        config = recorded_config(pretrained.folder, own)
        return as_plain_gpt(model, tokenizer, config), tokenizer
    assert isinstance(model, GPT)
    return model, tokenizer


def check_exportable(pretrained: Pretrained, own: OwnCode) -> None:
    """Raise `UserError` if transformers lacks the class of a model of --code."""
    if not pretrained.is_checkpoint:
        return
    used = read_state(pretrained.folder).code
    if used is None or "model" not in used.functions:
        return
    require(
        own.exported is not None or "exported" in used.functions,
        f"{pretrained.name} has the model() of {used.file}, which neither transformers nor "
        "llama.cpp has; define exported(model) there, which returns a GPT of the same logits, and "
        "add --code",
    )
    check_code(pretrained.folder, own, {"model", "exported"})


@torch.no_grad()
def as_plain_gpt(model: LanguageModel, tokenizer: Tokenizer, config: Config) -> GPT:
    """Return the GPT that `exported()` of --code makes of a model; compare their logits."""
    exported = config.own.exported
    assert exported is not None
    place = exported.place
    tokens = compared_tokens(model, tokenizer)
    expected = compute_logits(model, tokens)
    gpt = exported(model=getattr(model, "inner", model), config=config)
    if type(gpt) is not GPT:
        raise unexpected(place, gpt, "a GPT of accel_gpt.model.gpt, not of a class of your own")
    gpt.eval()
    require(
        gpt.vocab_size == model.vocab_size and gpt.config.block_size == model.config.block_size,
        f"{place} returned a GPT with another vocab_size or block_size than the model",
    )
    difference = largest_difference(expected, compute_logits(gpt, tokens))
    require(
        difference <= EXPORT_TOLERANCE * max(1.0, expected.abs().max().item()),
        f"{place} returned a GPT whose logits differ from those of the model by {difference:.1e}",
    )
    return gpt


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
