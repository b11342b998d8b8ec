"""Generate text from a model, token by token, with a KV cache.

Shapes: B batch, T tokens, V vocabulary, k candidate tokens.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from accel_gpt.config.experiment import SampleConfig
from accel_gpt.model.gpt import evaluating
from accel_gpt.model.language_model import LanguageModel
from accel_gpt.model.layers import KVCache

# cuDNN makes a plan for each number of keys, and each token of a text attends to one more key.
# A plan takes 23 to 37 ms (reported for PyTorch 2.13; not measured here).
WITHOUT_CUDNN = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)


def stream(
    model: LanguageModel,
    prompt_ids: Tensor,
    config: SampleConfig,
    generator: torch.Generator,
    eot_id: int | None = None,
    choices: int | None = None,
    to_the_end: bool = False,
) -> Iterator[Tensor]:
    """Continue `prompt_ids` (B, T), T > 0: yield one token (B,) of each text at a time.

    `config.max_new_tokens` limits the number of steps. Only ids below `choices` are sampled; None
    samples from the whole vocabulary. All random numbers come from `generator`, which must be on
    the device of the prompt. Temperature 0 takes the likeliest token and draws no random numbers.

    A text that has ended with `eot_id` is padded with it. Generation stops when all texts have
    ended, unless it goes `to_the_end`, as on ranks that share a model.

    The model is in evaluation mode, without gradients, until the iterator ends or is closed.
    """
    B, T = prompt_ids.shape
    max_length = T + config.max_new_tokens
    tokens = torch.cat((prompt_ids, prompt_ids.new_zeros(B, config.max_new_tokens)), dim=1)
    ended = torch.zeros(B, dtype=torch.bool, device=tokens.device)
    cache = model.make_cache(max_length)
    with evaluating(model, compiled=False):  # a compiled model would recompile for each length
        for length in range(T, max_length):
            logits = _next_logits(model, tokens[:, :length], cache)  # (B, V)
            token = sample_token(
                logits[:, :choices],
                temperature=config.temperature,
                top_k=config.top_k,
                generator=generator,
            )
            if eot_id is not None:
                token = token.masked_fill(ended, eot_id)
                ended |= token == eot_id
            tokens[:, length] = token
            yield token
            if eot_id is not None and not to_the_end and ended.all():
                return


def context_start(length: int, block_size: int) -> int:
    """Compute where the context of the next token starts, after `length` tokens.

    This is the smallest multiple of half a block that leaves at most `block_size` tokens. The start
    moves only once per half block, so the cache is rarely recomputed. The start does not depend on
    the cache, so the text is the same with and without a cache.
    """
    half_block = max(block_size // 2, 1)
    excess = max(length - block_size, 0)
    half_blocks = -(-excess // half_block)  # rounded up
    return half_blocks * half_block


def _next_logits(model: LanguageModel, tokens: Tensor, cache: KVCache | None) -> Tensor:
    """Compute the logits (B, V) of the next token, float32; skip the tokens in the cache."""
    length = tokens.shape[1]
    start = context_start(length, model.config.block_size)
    if cache is not None:
        context_moved = start != context_start(length - 1, model.config.block_size)
        if cache.position == 0 or context_moved:
            cache.position = 0
        else:
            start = length - 1  # the cache holds all earlier tokens
    with sdpa_kernel(list(WITHOUT_CUDNN)):
        # this calls the model, not its `forward`, because FSDP gathers the weights in hooks
        logits: Tensor = model(tokens[:, start:], cache=cache, last_only=True)  # (B, 1, V)
    return logits[:, -1].float()


def sample_token(
    logits: Tensor,
    temperature: float,
    top_k: int | None,
    generator: torch.Generator,
) -> Tensor:
    """Sample one token id from the `top_k` likeliest in each row of `logits` (B, V): (B,)."""
    if temperature == 0:
        return logits.argmax(-1)
    # without the subtraction, a temperature near 0 gives inf - inf in the softmax
    logits = (logits - logits.amax(-1, keepdim=True)) / temperature
    if top_k is None:
        token = torch.multinomial(logits.softmax(-1), 1, generator=generator)  # (B, 1)
        return token.squeeze(-1)
    likeliest, ids = logits.topk(min(top_k, logits.shape[-1]))  # (B, k), in descending order
    choice = torch.multinomial(likeliest.softmax(-1), 1, generator=generator)  # (B, 1)
    return ids.gather(-1, choice).squeeze(-1)
