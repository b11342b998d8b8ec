"""Text from a model, token by token, with a KV cache.

Shapes: B batch, T tokens, V vocabulary.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from accel_gpt.config.experiment import SampleConfig
from accel_gpt.model.gpt import GPT, evaluating
from accel_gpt.model.layers import KVCache


def all_ended(ended: Tensor) -> bool:
    """Whether all texts have ended; `ended` (B,) is true for those that have."""
    return bool(ended.all())


def do_nothing() -> None:
    """Do nothing before a token."""


def stream(
    model: GPT,
    prompt_ids: Tensor,
    config: SampleConfig,
    generator: torch.Generator,
    eot_id: int | None = None,
    choices: int | None = None,
    use_cache: bool = True,
    done: Callable[[Tensor], bool] = all_ended,
    before_token: Callable[[], object] = do_nothing,
) -> Iterator[Tensor]:
    """Continue `prompt_ids` (B, T), T > 0: yield up to `config.max_new_tokens` times tokens (B,).

    `choices`: only ids below it are sampled; None: the whole vocabulary. Random numbers come from
    `generator` alone, on the device of the prompt; temperature 0 is greedy and draws none. A text
    that has ended with `eot_id` is padded with it; generation stops once `done`, called after each
    token with the texts that have ended, is true (ranks that share a model agree there).
    `before_token` is called before each token. The model is in evaluation mode, without gradients,
    until the iterator ends or is closed.
    """
    B, T = prompt_ids.shape
    tokens = torch.cat((prompt_ids, prompt_ids.new_zeros(B, config.max_new_tokens)), dim=1)
    ended = torch.zeros(B, dtype=torch.bool, device=tokens.device)
    cache = KVCache(model.config, tokens.shape[1]) if use_cache else None
    with evaluating(model, compiled=False):  # the length changes with every token
        for length in range(T, T + config.max_new_tokens):
            before_token()
            logits = _next_logits(model, tokens[:, :length], cache)[:, :choices]
            token = sample_token(logits, config.temperature, config.top_k, config.top_p, generator)
            if eot_id is not None:
                token = token.masked_fill(ended, eot_id)
                ended |= token == eot_id
            tokens[:, length] = token
            yield token
            if eot_id is not None and done(ended):
                return


def context_start(length: int, block_size: int) -> int:
    """Position at which the context of the token after `length` others starts.

    The smallest multiple of half a block that leaves at most `block_size` tokens. It depends on
    these two alone, so the text is the same with and without a cache, which is filled anew once in
    half a block.
    """
    half = max(block_size // 2, 1)
    excess = max(length - block_size, 0)
    return -(-excess // half) * half


def _next_logits(model: GPT, tokens: Tensor, cache: KVCache | None) -> Tensor:
    """Logits (B, V) after `tokens`, float32; only tokens that are not cached are computed."""
    length, block_size = tokens.shape[1], model.config.block_size
    start = context_start(length, block_size)
    if cache is not None:
        # the cache holds all but the newest token, unless it is empty or the context has moved
        if cache.position and start == context_start(length - 1, block_size):
            start = length - 1
        else:
            cache.position = 0
    # called, not its `forward`: FSDP gathers the weights in hooks
    logits: Tensor = model(tokens[:, start:], cache=cache, last_only=True)
    return logits[:, -1].float()


def sample_token(
    logits: Tensor,
    temperature: float,
    top_k: int | None,
    top_p: float,
    generator: torch.Generator,
) -> Tensor:
    """Sample a token id (B,) from each row of `logits` (B, V).

    `top_k` keeps the most likely tokens. `top_p` keeps the fewest that together reach this
    probability (nucleus sampling, Holtzman et al. 2020, section 3.1), of those that `top_k` left.
    """
    if temperature == 0:
        return logits.argmax(-1)
    # minus the largest: a temperature near 0 then gives -inf, not inf - inf
    logits = (logits - logits.amax(-1, keepdim=True)) / temperature
    if top_k is None and top_p == 1:
        return torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(-1)
    V = logits.shape[-1]
    likeliest, ids = logits.topk(min(top_k or V, V))  # (B, k), in descending order
    probabilities = likeliest.softmax(-1)
    if top_p < 1:
        # on the CPU, as CUDA's kernel is refused where all must be deterministic
        sums = probabilities.cpu().cumsum(-1).to(probabilities.device)
        before = sums - probabilities  # exactly 0 for the likeliest: it stays
        probabilities = probabilities.masked_fill(before >= top_p, 0.0)
    index = torch.multinomial(probabilities, 1, generator=generator)
    return ids.gather(-1, index).squeeze(-1)
