"""Check a model of a file of --code before the first step: does its val loss say something?

Shapes: B batch, T tokens, V vocabulary.
"""

import itertools

import torch
from torch import Tensor

from accel_gpt.config.experiment import Config
from accel_gpt.errors import require
from accel_gpt.model.gpt import evaluating
from accel_gpt.model.language_model import LanguageModel, seeded
from accel_gpt.model.loss import sequence_losses
from accel_gpt.model.own import OwnModel

CHECKED_TOKENS = 64  # most tokens that the check changes; assumption
CACHED_TOKENS = (5, 1, 17, 1, 2)  # given to the cache at once, then one at a time; assumption
CHECKED_LOGITS = 2**24  # in one batch of the check: 64 MiB in float32; assumption
LEAST_LEAK = 2e-5  # of the largest logit, between rows of a batch; 200 roundings; assumption
ROUNDING = 1e-3  # of the largest number; TF32 rounds each factor to 2**-11


@torch.no_grad()
def check_causality(config: Config, model: LanguageModel, device: torch.device) -> None:
    """Raise `UserError` if the val loss of a model would say nothing about text.

    The logits must depend neither on later tokens nor on another document, and be the same with the
    cache of keys. The loss must be their cross entropy.
    """
    place = config.own.place("model") if config.own.model else config.own.file
    with seeded(config.seed):
        tokens = torch.randint(model.vocab_size, (1, config.model.block_size)).to(device)
    inner = model.inner if isinstance(model, OwnModel) else model
    with evaluating(model):
        if can_read(model, tokens[:, :CHECKED_TOKENS], config.data.document_mask):
            tokens = tokens[:, :CHECKED_TOKENS]
        if getattr(inner, "causal", True):
            check_earlier_logits(model, tokens, config.data.document_mask, place)
            if config.data.document_mask:
                check_next_document(model, tokens, place)
        check_cross_entropy(model, tokens, config.data.document_mask, place)
        check_cached_logits(model, tokens, place)


def can_read(model: LanguageModel, tokens: Tensor, with_documents: bool) -> bool:
    """Return whether a model reads `tokens` (1, T), which may be fewer than its block_size."""
    try:
        model(tokens, documents=torch.zeros_like(tokens) if with_documents else None)
    except Exception:  # raised once more for block_size tokens, if the length is not the cause
        return False
    return True


def check_earlier_logits(
    model: LanguageModel, tokens: Tensor, with_documents: bool, place: str
) -> None:
    """Raise `UserError` if a change of one of the `tokens` (1, T) changes logits before it.

    Each of the first `CHECKED_TOKENS` is changed in turn, each in another sequence.
    """
    T = tokens.shape[1]
    end = min(T, CHECKED_TOKENS)
    alone = model(tokens, documents=torch.zeros_like(tokens) if with_documents else None)
    rows = max(1, CHECKED_LOGITS // (T * model.vocab_size))
    for first in range(1, end, rows):
        positions = torch.arange(first, min(first + rows, end), device=tokens.device)
        changed = tokens.repeat(len(positions) + 1, 1)  # the first row stays as it is
        number = torch.arange(1, len(changed), device=tokens.device)
        changed[number, positions] = (changed[number, positions] + 1) % model.vocab_size
        documents = torch.zeros_like(changed) if with_documents else None
        logits = model(changed, documents=documents)
        require(
            same_logits(alone, logits[:1]),
            f"the logits of {place} depend on the other sequences of a batch, so its loss depends "
            "on the batch size; compute each sequence alone in evaluation mode",
        )
        is_before = torch.arange(T, device=tokens.device) < positions[:, None]
        same = logits[1:].where(is_before[..., None], logits[:1])
        require(
            same_logits(logits[:1], same, LEAST_LEAK),
            f"the logits of {place} depend on later tokens, so its loss says nothing about text; "
            "let a token see those before it only, or set causal = False on the module to allow it",
        )


def check_next_document(model: LanguageModel, tokens: Tensor, place: str) -> None:
    """Raise `UserError` if a change of the first half of `tokens` (1, T) changes the next document.

    The second half is the next document.
    """
    half = tokens.shape[1] // 2
    documents = (torch.arange(tokens.shape[1], device=tokens.device) >= half).int()[None]
    changed = tokens.clone()
    changed[:, :half] = (changed[:, :half] + 1) % model.vocab_size
    logits = model(tokens, documents=documents)
    others = model(changed, documents=documents)
    require(
        same_logits(logits[:, half:], others[:, half:]),
        f"the logits of {place} depend on another document, but data.document_mask is true; let a "
        "token see its own document only, or set data.document_mask to false",
    )


def check_cross_entropy(
    model: LanguageModel, tokens: Tensor, with_documents: bool, place: str
) -> None:
    """Raise `UserError` unless the loss in evaluations is the cross entropy of the logits."""
    documents = torch.zeros_like(tokens) if with_documents else None
    targets = tokens.roll(-1, 1)
    loss = model(tokens, targets, documents=documents, per_sequence=True)
    expected = sequence_losses(model(tokens, documents=documents), targets)
    require(
        same_logits(expected, loss),
        f"the loss of {place} in evaluations is not the cross entropy of its logits; compute other "
        "losses in loss()",
    )


def check_cached_logits(model: LanguageModel, tokens: Tensor, place: str) -> None:
    """Raise `UserError` if logits of `tokens` (1, T) differ when the cache gets them in parts."""
    cache = model.make_cache(tokens.shape[1])
    if cache is None:
        return
    sizes = itertools.chain(CACHED_TOKENS, itertools.repeat(1))
    parts = []
    done = 0
    while done < tokens.shape[1]:
        size = next(sizes)
        parts.append(model(tokens[:, done : done + size], cache=cache))
        done += size
    require(
        same_logits(model(tokens), torch.cat(parts, dim=1)),
        f"the GPT of {place} computes other logits with its cache of keys and values, so it "
        "would sample other text; number the attention layers by attn.layer",
    )


def same_logits(logits: Tensor, others: Tensor, tolerance: float = ROUNDING) -> bool:
    """Return whether logits are equal within rounding, where they are finite."""
    difference = (logits.float() - others.float()).nan_to_num(0, 0, 0).abs().max()
    largest = logits.float().nan_to_num(0, 0, 0).abs().max()
    return bool(difference <= tolerance * largest)
