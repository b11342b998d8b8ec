"""Write text with the model: at which steps, from which prompts, with a separate generator."""

from collections.abc import Callable, Iterator, Sequence

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, gather_object
from torch import Tensor

from accel_gpt.config.experiment import SampleConfig
from accel_gpt.data.order import derive_seed
from accel_gpt.data.tokenizer import Tokenizer
from accel_gpt.errors import AccelGPTError, require
from accel_gpt.evals.validation import Beat, no_beat
from accel_gpt.model.generate import all_ended, context_start, do_nothing, stream
from accel_gpt.model.gpt import GPT

SEPARATOR = "\n---------------\n"  # between the texts of `accel-gpt sample`
QUOTED = 40  # characters of a prompt in a message
REPLACEMENT = "\ufffd"
LONGEST = 4  # bytes of a character in UTF-8; the first three may be tokens without a character
OVERLAP = 16  # tokens decoded along with a new one; assumption: no decoder looks further back


def samples_due(config: SampleConfig, step: int, last: bool) -> bool:
    """Return whether samples are due at a completed step; unless disabled, at the last one, too.

    A pure function, so there is no state to save: the i-th interval is `every * growth**i` steps,
    rounded.
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
    """Return the token ids of a prompt; an empty prompt is the start of a document.

    Without an end-of-text token that is a new line, or token 0 if the text has none. Raises
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
    """Warn about a prompt longer than the context: the model sees only its end."""
    length = len(prompt_ids(prompt, tokenizer, tokenizer.vocab_size))
    cut = context_start(length, block_size)
    if cut:
        quoted = prompt if len(prompt) <= QUOTED else f"{prompt[:QUOTED]}..."
        warn(
            f"the prompt {quoted!r} has {length:,} tokens, model.block_size is {block_size:,}: "
            f"the model sees the last {length - cut:,}"
        )


class Continuation:
    """The text that a model writes after a prompt, as it grows token by token."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self.tokenizer = tokenizer
        self.prompt = list(prompt)
        self.ids: list[int] = []
        self.ended = False
        # of `new_text`: the last ids, from which it decodes, and how much of their text is shown
        self.window = list(prompt)
        self.shown = len(tokenizer.decode(self.window))
        self.whole = [len(self.window)]  # lengths of the window at which no character is cut
        self.read = 0  # ids that are in the window

    def add(self, token: int) -> None:
        """Add a token; end-of-text ends the text, and later tokens are ignored."""
        self.ended |= token == self.tokenizer.eot_id
        if not self.ended:
            self.ids.append(token)

    def text(self) -> str:
        """Return the whole text, decoded after the prompt: some decoders drop a first space."""
        before = self.tokenizer.decode(self.prompt)
        text = self.tokenizer.decode(self.prompt + self.ids)
        if text.startswith(before):
            return text.removeprefix(before)
        return self.tokenizer.decode(self.ids)

    def new_text(self) -> str:
        """Return the text that has come since the last call.

        A character is held back until its last byte is there, or the text has ended. Only the last
        ids are decoded: the time grows linearly with their number.
        """
        pieces = [self.read_token(token) for token in self.ids[self.read :]]
        self.read = len(self.ids)
        if self.ended:
            text = self.tokenizer.decode(self.window)
            pieces.append(text[self.shown :])
            self.shown = len(text)
        return "".join(pieces)

    def read_token(self, token: int) -> str:
        """Add a token to the window; returns the text that is shown for it."""
        self.window.append(token)
        text = self.tokenizer.decode(self.window)
        ready = text.rstrip(REPLACEMENT)
        not_utf8 = len(self.window) - self.whole[-1] >= LONGEST  # whatever follows
        if not_utf8 and len(text) - 1 > len(ready):
            ready = text[:-1]
        piece = ready[self.shown :]
        self.shown = max(self.shown, len(ready))
        if ready == text:
            self.whole.append(len(self.window))
            self.shorten_window()
        return piece

    def shorten_window(self) -> None:
        """Drop ids that no decoder looks back to, up to the end of a character."""
        if len(self.window) <= 2 * OVERLAP:
            return
        most = len(self.window) - OVERLAP
        cut = max((length for length in self.whole if length <= most), default=0)
        del self.window[:cut]
        self.whole = [length - cut for length in self.whole if length > cut]
        self.shown = len(self.tokenizer.decode(self.window))


def stream_texts(
    model: GPT,
    tokenizer: Tokenizer,
    prompt: str,
    config: SampleConfig,
    generator: torch.Generator,
    done: Callable[[Tensor], bool] = all_ended,
    before_token: Callable[[], object] = do_nothing,
) -> Iterator[list[Continuation]]:
    """Write `config.num` continuations of `prompt`; yield them after each token, and at the end.

    `generator` is on the device of the model; `done` and `before_token` as in `stream`. Raises
    `UserError` for a prompt that has no tokens in the model.
    """
    start = prompt_ids(prompt, tokenizer, model.vocab_size)
    texts = [Continuation(tokenizer, start) for _ in range(config.num)]
    tokens_of = stream(
        model=model,
        prompt_ids=torch.tensor([start] * config.num, device=generator.device),  # (num, T0)
        config=config,
        generator=generator,
        eot_id=tokenizer.eot_id,
        choices=tokenizer.vocab_size,
        done=done,
        before_token=before_token,
    )
    for tokens in tokens_of:
        for text, token in zip(texts, tokens.tolist(), strict=True):
            text.add(token)
        yield texts
    for text in texts:
        text.ended = True
    yield texts


def write_text(
    model: GPT,
    tokenizer: Tokenizer,
    prompt: str,
    config: SampleConfig,
    generator: torch.Generator,
    done: Callable[[Tensor], bool] = all_ended,
    before_token: Callable[[], object] = do_nothing,
) -> list[str]:
    """Return `config.num` texts: `prompt` and its continuations as in `stream_texts`."""
    *_, texts = stream_texts(
        model=model,
        tokenizer=tokenizer,
        prompt=prompt,
        config=config,
        generator=generator,
        done=done,
        before_token=before_token,
    )
    return [prompt + text.text() for text in texts]


def sample(
    accelerator: Accelerator,
    model: GPT,
    tokenizer: Tokenizer,
    config: SampleConfig,
    seed: int,
    step: int,
    beat: Beat = no_beat,
) -> str:
    """Generate samples on all ranks and return them as one text; a collective.

    Each rank and prompt has its own seed: the length of one text does not change the others. Under
    FSDP all ranks generate until the texts of all have ended, as each forward pass all-gathers
    weights. `beat` is called `max_new_tokens` times for each prompt, however early its texts end.
    """
    generator = torch.Generator(accelerator.device)
    done = all_ended
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
