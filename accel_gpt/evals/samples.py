"""Text written by the model: at which steps, from which prompts, with a generator of its own."""

from collections.abc import Callable

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, gather_object
from torch import Tensor

from accel_gpt.config.experiment import SampleConfig
from accel_gpt.data.order import derive_seed
from accel_gpt.data.tokenizer import Tokenizer
from accel_gpt.errors import AccelGPTError, require
from accel_gpt.evals.validation import Beat, no_beat
from accel_gpt.model.generate import all_ended, context_start, do_nothing, generate
from accel_gpt.model.gpt import GPT

SEPARATOR = "\n---------------\n"  # between the texts of `accel-gpt sample`
QUOTED = 40  # characters of a prompt in a message


def samples_due(config: SampleConfig, step: int, last: bool) -> bool:
    """Whether samples are due at a completed step; unless disabled, at the last one, too.

    A pure function, so there is no state to save: the i-th interval is `every * growth**i` steps,
    rounded.
    """
    if not config.every or last or config.growth == 1:
        return bool(config.every) and (last or step % config.every == 0)
    due, interval = config.every, float(config.every)
    while due < step:
        interval *= config.growth
        due += round(interval)
    return due == step


def prompt_ids(prompt: str, tokenizer: Tokenizer, vocab_size: int) -> list[int]:
    """Token ids of a prompt; an empty one is the start of a document.

    Without an end-of-text token that is a new line, or token 0 where the text has none. Raises
    `UserError` for a character that the tokenizer does not know, and for an id beyond the model's
    `vocab_size`.
    """
    if prompt:
        ids = tokenizer.encode(prompt)
    elif tokenizer.eot_id is not None:
        ids = [tokenizer.eot_id]
    else:
        try:
            ids = tokenizer.encode("\n")
        except AccelGPTError:
            ids = [0]
    require(bool(ids), f"the tokenizer makes no token of the prompt {prompt!r}")
    require(
        max(ids) < vocab_size,
        f"the prompt {prompt!r} has token {max(ids)}, but the model knows {vocab_size:,} tokens; "
        "its tokenizer has more than it was trained with",
    )
    return ids


def check_prompts(
    config: SampleConfig, tokenizer: Tokenizer, block_size: int, warn: Callable[[str], None]
) -> None:
    """Raise `UserError` for a prompt that could not be sampled later; warn about prompts cut."""
    if config.every:
        for prompt in dict.fromkeys(config.prompts):
            warn_cut(prompt, tokenizer, block_size, warn)


def warn_cut(
    prompt: str, tokenizer: Tokenizer, block_size: int, warn: Callable[[str], None]
) -> None:
    """Warn about a prompt longer than the context, of which the model sees the end alone."""
    length = len(prompt_ids(prompt, tokenizer, tokenizer.vocab_size))
    if cut := context_start(length, block_size):
        quoted = prompt if len(prompt) <= QUOTED else f"{prompt[:QUOTED]}..."
        warn(
            f"the prompt {quoted!r} has {length:,} tokens, model.block_size is {block_size:,}: "
            f"the model sees the last {length - cut:,}"
        )


def write_text(
    model: GPT,
    tokenizer: Tokenizer,
    prompt: str,
    config: SampleConfig,
    generator: torch.Generator,
    done: Callable[[Tensor], bool] = all_ended,
    before_token: Callable[[], object] = do_nothing,
) -> list[str]:
    """Write `config.num` continuations of `prompt`, each after the prompt, up to end-of-text.

    `generator` is on the device of the model; `done` and `before_token` as in `generate`.
    """
    start = prompt_ids(prompt, tokenizer, model.vocab_size)
    ids = torch.tensor([start] * config.num, device=generator.device)  # (num, T0)
    vocab_size, eot_id = tokenizer.vocab_size, tokenizer.eot_id
    out = generate(
        model,
        ids,
        config,
        generator,
        eot_id=eot_id,
        choices=vocab_size,
        done=done,
        before_token=before_token,
    )
    texts, before = [], tokenizer.decode(start)
    for new in out[:, len(start) :].tolist():
        if eot_id in new:
            new = new[: new.index(eot_id)]
        # decoded after the prompt: some decoders drop the first space of a text
        whole = tokenizer.decode(start + new)
        follows = whole.startswith(before)
        texts.append(prompt + (whole.removeprefix(before) if follows else tokenizer.decode(new)))
    return texts


def sample(
    accelerator: Accelerator,
    model: GPT,
    tokenizer: Tokenizer,
    config: SampleConfig,
    seed: int,
    step: int,
    beat: Beat = no_beat,
) -> str:
    """Samples of all ranks as one text; a collective.

    Each rank and prompt has its own seed: the length of one text does not change the others. Under
    FSDP all ranks generate until the texts of all have ended, as each forward pass all-gathers
    weights. `beat` is called `max_new_tokens` times for each prompt, however early its texts end.
    """
    done, generator = all_ended, torch.Generator(accelerator.device)
    if accelerator.distributed_type == DistributedType.FSDP:

        def done(ended: Tensor) -> bool:
            return not accelerator.reduce((~ended).sum(), "sum").item()

    beats = 0
    total = config.max_new_tokens * len(config.prompts)

    def before_token() -> None:
        nonlocal beats
        beat(beats, total)
        beats += 1

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
            done=done,
            before_token=before_token,
        )
        while beats < config.max_new_tokens * (number + 1):
            before_token()
    if accelerator.num_processes > 1:
        texts = gather_object(texts)
    return "\n\n".join(f"--- sample {i}\n{text}" for i, text in enumerate(texts, start=1))
