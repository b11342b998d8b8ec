"""Text written by the model: which steps, from which prompts, with a generator of its own."""

from collections.abc import Callable

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, gather_object
from torch import Tensor

from accel_gpt.config.experiment import SampleConfig
from accel_gpt.data.order import derive_seed
from accel_gpt.data.tokenizer import Tokenizer
from accel_gpt.errors import UserError, require
from accel_gpt.model.generate import all_rows, context_start, generate
from accel_gpt.model.gpt import GPT

SEPARATOR = "\n---------------\n"  # between the texts of `accel-gpt sample`
QUOTED = 40  # characters of a prompt in a message


def samples_due(config: SampleConfig, step: int, last: bool) -> bool:
    """Whether samples are due at a completed step; where any are asked for, at the last one too."""
    return bool(config.every) and (last or is_sample_step(step, config.every, config.growth))


def is_sample_step(step: int, every: int, growth: float) -> bool:
    """Whether samples are due at a completed step: a pure function, so there is nothing to resume.

    The i-th interval is `every * growth**i` steps, rounded.
    """
    if not every or step < every:
        return False
    if growth == 1:
        return step % every == 0
    due, interval = every, float(every)
    while due < step:
        interval *= growth
        due += round(interval)
    return due == step


def prompt_ids(prompt: str, tokenizer: Tokenizer) -> list[int]:
    """Token ids of a prompt; an empty one is the start of a document.

    Without an end-of-text token that is a new line, or token 0 where the text has none. Raises
    `UserError` for a character that the tokenizer does not know.
    """
    if prompt:
        return tokenizer.encode(prompt)
    if tokenizer.eot_id is not None:
        return [tokenizer.eot_id]
    try:
        return tokenizer.encode("\n")
    except UserError:
        return [0]


def known_ids(prompt: str, tokenizer: Tokenizer, model: GPT) -> list[int]:
    """`prompt_ids`; `UserError` for one that the model has no embedding for."""
    ids = prompt_ids(prompt, tokenizer)
    require(
        max(ids, default=0) < model.vocab_size,
        f"the prompt {prompt!r} has token {max(ids, default=0)}, but the model knows "
        f"{model.vocab_size:,} tokens; its tokenizer has more than it was trained with",
    )
    return ids


def check_prompts(
    config: SampleConfig, tokenizer: Tokenizer, block_size: int, say: Callable[[str], None]
) -> None:
    """Raise `UserError` now for a prompt that could not be sampled later, and say what is cut."""
    if config.every:
        for prompt in dict.fromkeys(config.prompts):
            say_cut(prompt, tokenizer, block_size, say)


def say_cut(prompt: str, tokenizer: Tokenizer, block_size: int, say: Callable[[str], None]) -> None:
    """Say of a prompt longer than the context that its end alone counts; of others nothing."""
    length = len(prompt_ids(prompt, tokenizer))
    if cut := context_start(length, block_size):
        quoted = prompt if len(prompt) <= QUOTED else f"{prompt[:QUOTED]}..."
        say(
            f"the prompt {quoted!r} has {length:,} tokens, model.block_size is {block_size:,}: "
            f"the model sees the last {length - cut:,}"
        )


def write_text(
    model: GPT,
    tokenizer: Tokenizer,
    prompt: str,
    config: SampleConfig,
    generator: torch.Generator,
    done: Callable[[Tensor], bool] = all_rows,
) -> list[str]:
    """`config.num` continuations of `prompt`, each with the prompt before it, up to end-of-text.

    `generator` is on the device of the model; `done` as `generate` takes it.
    """
    given = known_ids(prompt, tokenizer, model)
    ids = torch.tensor([given] * config.num, device=generator.device)  # (num, T0)
    out = generate(
        model,
        ids,
        config.max_new_tokens,
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        generator=generator,
        eot_id=tokenizer.eot_id,
        choices=tokenizer.vocab_size,
        done=done,
    )
    return [
        prompt + decode_after(given, until(row, tokenizer.eot_id), tokenizer)
        for row in out[:, ids.shape[1] :].tolist()
    ]


def decode_after(given: list[int], ids: list[int], tokenizer: Tokenizer) -> str:
    """Text of `ids` where they follow `given`: some decoders drop the first space of a text."""
    before, whole = tokenizer.decode(given), tokenizer.decode(given + ids)
    return whole.removeprefix(before) if whole.startswith(before) else tokenizer.decode(ids)


def until(ids: list[int], eot_id: int | None) -> list[int]:
    """`ids` up to the first end-of-text."""
    return ids[: ids.index(eot_id)] if eot_id in ids else ids


def agreement(accelerator: Accelerator) -> Callable[[Tensor], bool]:
    """The `done` of a process: under FSDP, once the rows of all have ended.

    There every forward pass gathers weights that all processes hold parts of, so none may stop
    before the others. Otherwise each goes its own way.
    """
    if accelerator.distributed_type != DistributedType.FSDP:
        return all_rows
    return lambda ended: not accelerator.reduce((~ended).sum(), "sum").item()


def sample(
    accelerator: Accelerator,
    model: GPT,
    tokenizer: Tokenizer,
    config: SampleConfig,
    seed: int,
    step: int,
) -> str:
    """Samples of all processes as one text; a collective.

    Each process and prompt has its own seed: how long one text goes on leaves the others alone.
    """
    generator, done = torch.Generator(accelerator.device), agreement(accelerator)
    own: list[str] = []
    for number, prompt in enumerate(config.prompts):
        rank = accelerator.process_index
        generator.manual_seed(derive_seed(seed, "sample", step, rank, number))
        own += write_text(model, tokenizer, prompt, config, generator, done)
    everyone = gather_object(own) if accelerator.num_processes > 1 else own
    return "\n\n".join(f"--- sample {i}\n{text}" for i, text in enumerate(everyone, start=1))
