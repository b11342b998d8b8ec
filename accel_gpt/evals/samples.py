"""Generate text with the model: which steps, which prompts, which texts."""

from collections.abc import Callable, Sequence

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, gather_object

from accel_gpt.config.experiment import SampleConfig
from accel_gpt.data.order import derive_seed
from accel_gpt.data.tokenizer import Tokenizer
from accel_gpt.errors import AccelGPTError, require
from accel_gpt.model.generate import stream
from accel_gpt.model.language_model import LanguageModel
from accel_gpt.runs.folder import PROMPT_END

SEPARATOR = "\n---------------\n"  # between the texts of `accel-gpt sample`


def samples_due(config: SampleConfig, step: int, last: bool) -> bool:
    """Return whether samples are due at a completed step. Samples of the last step are due.

    The i-th interval between samples is `every * growth**i` steps, rounded. `every` 0: never. The
    function is pure, so there is no state to save.
    """
    if not config.every:
        return False
    if last:
        return True
    if config.growth == 1:
        return step % config.every == 0
    due = config.every
    interval = float(config.every)
    while due < step:
        interval *= config.growth
        due += round(interval)
    return due == step


def prompt_ids(prompt: str, tokenizer: Tokenizer, vocab_size: int) -> list[int]:
    """Return the token ids of a prompt. An empty prompt becomes the end-of-text token.

    Special tokens that the prompt spells are read as such, so that a chat model can be prompted. If
    the tokenizer has no end-of-text, an empty prompt becomes a newline, or token 0 if the tokenizer
    cannot encode a newline. Raises `UserError` if the tokenizer cannot encode the prompt, or if an
    id is not below the model's `vocab_size`.
    """
    if prompt:
        ids = tokenizer.encode_prompt(prompt)
    elif tokenizer.eot_id is not None:
        ids = [tokenizer.eot_id]
    else:
        try:
            ids = tokenizer.encode("\n")
        except AccelGPTError:
            ids = [0]
    require(bool(ids), f"the tokenizer makes no token from the prompt {prompt!r}")
    require(
        max(ids) < vocab_size,
        f"the prompt {prompt!r} has token {max(ids)}, but the model was trained with only "
        f"{vocab_size:,} of the tokenizer's tokens; change the prompt",
    )
    return ids


def continuation(tokenizer: Tokenizer, prompt: Sequence[int], ids: Sequence[int]) -> str:
    """Return the text of `ids` up to end-of-text, decoded together with the prompt before them.

    Without the prompt, some decoders drop a leading space.
    """
    text_ids = list(ids)
    if tokenizer.eot_id in text_ids:
        text_ids = text_ids[: text_ids.index(tokenizer.eot_id)]
    before = tokenizer.decode(prompt)
    text = tokenizer.decode([*prompt, *text_ids])
    if text.startswith(before):
        return text.removeprefix(before)
    return tokenizer.decode(text_ids)


def write_text(
    model: LanguageModel,
    tokenizer: Tokenizer,
    prompt: str,
    config: SampleConfig,
    generator: torch.Generator,
    prompt_end: str = "",
    to_the_end: bool = False,
    on_token: Callable[[], object] | None = None,
) -> list[str]:
    """Return `config.num` texts: `prompt`, `prompt_end` and a continuation.

    `generator` is on the device of the model. `to_the_end`: see `stream`. `on_token` is called
    `max_new_tokens` times, after each token and for the tokens of texts that ended early. Raises
    `UserError` if the model has no token ids for the prompt.
    """
    start = prompt_ids(prompt, tokenizer, model.vocab_size)
    tokens_of = stream(
        model=model,
        prompt_ids=torch.tensor([start] * config.num, device=generator.device),  # (num, T0)
        config=config,
        generator=generator,
        eot_id=tokenizer.eot_id,
        choices=tokenizer.vocab_size,
        to_the_end=to_the_end,
    )
    texts: list[list[int]] = [[] for _ in range(config.num)]
    for _ in range(config.max_new_tokens):
        tokens = next(tokens_of, None)
        if tokens is not None:
            for ids, token in zip(texts, tokens.tolist(), strict=True):
                ids.append(token)
        if on_token is not None:
            on_token()
    if prompt:
        prompt += prompt_end
    return [prompt + continuation(tokenizer, start, ids) for ids in texts]


def sample(
    accelerator: Accelerator,
    model: LanguageModel,
    tokenizer: Tokenizer,
    config: SampleConfig,
    seed: int,
    step: int,
    on_token: Callable[[], object] | None = None,
) -> str:
    """Generate samples on all ranks and return them as one text; a collective.

    Each rank and prompt has a separate seed, so the length of one text does not change the others.
    Under FSDP all ranks generate `max_new_tokens`, since each forward pass all-gathers weights.
    `on_token` is called equally often on all ranks.
    """
    generator = torch.Generator(accelerator.device)
    texts: list[str] = []
    for number, prompt in enumerate(config.prompts):
        rank = accelerator.process_index
        generator.manual_seed(derive_seed(seed, "sample", step, rank, number))
        texts += write_text(
            model=model,
            tokenizer=tokenizer,
            prompt=prompt,
            config=config,
            generator=generator,
            prompt_end=PROMPT_END,
            to_the_end=accelerator.distributed_type == DistributedType.FSDP,
            on_token=on_token,
        )
    if accelerator.num_processes > 1:
        texts = gather_object(texts)
    return "\n\n".join(f"--- sample {i}\n{text}" for i, text in enumerate(texts, start=1))
