"""Text from a model, token by token, with a key-value cache.

Shapes: B batch, T tokens, V vocabulary.
"""

import contextlib
from collections.abc import Callable, Generator, Iterator, Sequence

import torch
from torch import Tensor, nn

from accel_gpt.errors import require
from accel_gpt.model.decode import Decoder
from accel_gpt.model.evaluating import uncompiled
from accel_gpt.model.gpt import GPT, KVCache


def all_rows(ended: Tensor) -> bool:
    """Whether all rows have ended, told which have (B,)."""
    return bool(ended.all())


def generate(
    model: GPT,
    prompt_ids: Tensor,
    max_new_tokens: int,
    *,
    temperature: float,
    top_k: int | None,
    top_p: float,
    generator: torch.Generator,
    eot_id: int | None = None,
    use_cache: bool = True,
    choices: int | None = None,
    done: Callable[[Tensor], bool] = all_rows,
) -> Tensor:
    """Continue `prompt_ids` (B, T), T > 0, by `max_new_tokens`: (B, T + max_new_tokens).

    `choices`: only ids below it are chosen; None: all of the model. Random numbers come from
    `generator` alone, on the device of the prompt; temperature 0 is greedy and draws none. A row
    that has produced `eot_id` is filled up with it; no more is computed once `done` says so, which
    is asked after each token with the rows that have ended (processes that share a model agree
    there). The mode of the model is restored. Raises `ValueError` for settings out of range.
    """
    _check(prompt_ids, max_new_tokens, temperature, top_k, top_p)
    how = (temperature, top_k, top_p, generator)
    with _evaluating(list(model.modules())):
        steps = _steps(model, prompt_ids, max_new_tokens, how, eot_id, use_cache, choices, done)
        new = list(steps)
    B, T = prompt_ids.shape
    tokens = prompt_ids.new_full((B, T + max_new_tokens), 0 if eot_id is None else eot_id)
    tokens[:, :T] = prompt_ids
    if new:
        tokens[:, T : T + len(new)] = torch.stack(new, dim=1)
    return tokens


def stream(
    model: GPT,
    prompt_ids: Tensor,
    max_new_tokens: int,
    *,
    temperature: float,
    top_k: int | None,
    top_p: float,
    generator: torch.Generator,
    eot_id: int | None = None,
    use_cache: bool = True,
    choices: int | None = None,
    done: Callable[[Tensor], bool] = all_rows,
) -> Generator[Tensor, None, None]:
    """The tokens of `generate` one step at a time: (B,) each, until `done`.

    Between two tokens the model is in its own mode, gradients are as the caller has them and
    compiled code runs, so it may be used for something else, or the rest be left unasked for.
    With a cache its weights must stay as they are: the cache holds what they made of the text.
    Raises `ValueError` for settings out of range at once, not at the first token.
    """
    _check(prompt_ids, max_new_tokens, temperature, top_k, top_p)
    how, modules = (temperature, top_k, top_p, generator), list(model.modules())
    steps = _steps(model, prompt_ids, max_new_tokens, how, eot_id, use_cache, choices, done)

    def one_at_a_time() -> Generator[Tensor, None, None]:
        while True:
            with _evaluating(modules):
                chosen = next(steps, None)
            if chosen is None:
                return
            yield chosen

    return one_at_a_time()


def _steps(
    model: GPT,
    prompt_ids: Tensor,
    max_new_tokens: int,
    how: tuple[float, int | None, float, torch.Generator],
    eot_id: int | None,
    use_cache: bool,
    choices: int | None,
    done: Callable[[Tensor], bool],
) -> Iterator[Tensor]:
    """The tokens of `stream`, of a model that is evaluating; `how` as `sample_token` takes it."""
    B, T = prompt_ids.shape
    tokens = torch.cat((prompt_ids, prompt_ids.new_zeros(B, max_new_tokens)), dim=1)
    ended = torch.zeros(B, dtype=torch.bool, device=tokens.device)
    cache = KVCache(model.config, tokens.shape[1]) if use_cache else None
    decoder = Decoder(model, cache) if cache and Decoder.suits(model) else None
    for length in range(T, T + max_new_tokens):
        logits = _next_logits(model, tokens[:, :length], cache, decoder)[:, :choices]
        chosen = sample_token(logits, *how)
        if eot_id is not None:
            chosen = chosen.masked_fill(ended, eot_id)
            ended |= chosen == eot_id
        tokens[:, length] = chosen
        yield chosen
        if eot_id is not None and done(ended):
            return


def _check(
    prompt_ids: Tensor, max_new_tokens: int, temperature: float, top_k: int | None, top_p: float
) -> None:
    require(
        prompt_ids.ndim == 2 and prompt_ids.shape[1] > 0,
        f"the prompt has shape {tuple(prompt_ids.shape)}; it must be (rows, tokens), with one "
        "token at least",
    )
    require(max_new_tokens >= 0, f"max_new_tokens is {max_new_tokens}; it must be 0 or more")
    require(temperature >= 0, f"temperature is {temperature}; it must be 0 (greedy) or more")
    require(top_k is None or top_k >= 1, f"top_k is {top_k}; it must be 1 or more, or None for all")
    require(0 < top_p <= 1, f"top_p is {top_p}; it must be above 0 and at most 1 (all)")


@contextlib.contextmanager
def _evaluating(modules: Sequence[nn.Module]) -> Iterator[None]:
    """No gradients, no dropout, no compiled code; afterwards the modes that `modules` were in."""
    training = [module for module in modules if module.training]
    for module in training:
        module.training = False
    try:
        with torch.no_grad(), uncompiled(modules):  # lengths change with every token
            yield
    finally:
        for module in training:
            module.training = True


def context_start(length: int, block_size: int) -> int:
    """Where the context of the token after `length` others starts; a function of these alone.

    The smallest multiple of half a block that leaves at most `block_size` tokens, so a cache is
    filled anew once in half a block, and sees what would be seen without it.
    """
    half = max(block_size // 2, 1)
    excess = max(length - block_size, 0)
    return -(-excess // half) * half


def _next_logits(
    model: GPT, tokens: Tensor, cache: KVCache | None, decoder: Decoder | None
) -> Tensor:
    """Logits (B, V) after `tokens`, float32; only those that `cache` lacks are computed.

    Without a decoder it calls the model, not its `forward`: FSDP gathers the weights in hooks.
    """
    length = tokens.shape[1]
    start = context_start(length, model.config.block_size)
    if cache is not None:
        # the cache holds all but the newest token, unless it is empty or the context has moved
        if cache.position and start == context_start(length - 1, model.config.block_size):
            start = length - 1
            if decoder is not None:
                return decoder(tokens[:, -1]).float()
        else:
            cache.position = 0
    logits: Tensor = model(tokens[:, start:], cache=cache, last_only=True)
    return logits[:, -1].float()


def sample_token(
    logits: Tensor,
    temperature: float,
    top_k: int | None,
    top_p: float,
    generator: torch.Generator,
) -> Tensor:
    """One token id for each row of `logits` (B, V): (B,).

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
    likeliest, ids = logits.topk(min(top_k or V, V))  # (B, k), in falling order
    probabilities = likeliest.softmax(-1)
    if top_p < 1:
        before = probabilities.cumsum(-1) - probabilities  # exactly 0 for the likeliest: it stays
        probabilities = probabilities.masked_fill(before >= top_p, 0.0)
    choice = torch.multinomial(probabilities, 1, generator=generator)
    return ids.gather(-1, choice).squeeze(-1)
