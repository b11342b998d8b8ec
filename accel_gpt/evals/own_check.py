"""Check a file of --code before the first step, on a model that is made for it.

Shapes: B batch, T tokens, V vocabulary.
"""

import contextlib
from collections.abc import Callable

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from accel_gpt.config.experiment import Config
from accel_gpt.config.plan import Plan
from accel_gpt.data.corpus import Corpus
from accel_gpt.errors import AccelGPTError, require
from accel_gpt.evals.validation import CHECKED_SEQUENCES, first_sequences
from accel_gpt.launch.accelerator import compute_as_prepared
from accel_gpt.model.gpt import evaluating
from accel_gpt.model.language_model import LanguageModel, seeded
from accel_gpt.model.loss import IGNORE, next_token_loss, sequence_losses
from accel_gpt.model.make import make_model
from accel_gpt.training.losses import Called

MOST_CHECKED = 1_000_000_000  # parameters; assumption
VECTOR_NOISE = 0.1  # standard deviation of what is added to vectors; assumption
CHECKED_TOKENS = 64  # most tokens that the check changes; assumption
CHECKED_LOGITS = 2**24  # in one batch of the check: 64 MiB in float32; assumption
LEAST_LEAK = 2e-5  # of the largest logit, between rows of a batch; 200 roundings; assumption
ROUNDINGS = 4  # of the type of the weights; one is 2**-7 in bf16; assumption
ROUNDING = ROUNDINGS * 2**-10  # of the largest number: TF32


@torch.no_grad()
def check_own_code(
    config: Config, plan: Plan, gpt: LanguageModel, corpus: Corpus, accelerator: Accelerator
) -> None:
    """Raise `UserError` if the val loss of the run would say nothing; see the two checks.

    `gpt`: the model of the run. One that is larger than `MOST_CHECKED` is not made once more.
    Random numbers are added to the weights, since weights that begin at zero hide a leak. Computes
    in float32. If that fails, the check is made in the precision of the run: flash_attn, for one,
    accepts only half precision.
    """
    if gpt.parameter_count() > MOST_CHECKED:
        return
    device = accelerator.device
    model = make_model(config, gpt.vocab_size).to(device)
    with seeded(config.seed):
        model.init_weights()
        for weight in model.parameters():  # of a matrix: outputs are as large as its inputs
            fan_in = weight.shape[1:].numel()
            deviation = fan_in**-0.5 if weight.dim() > 1 else VECTOR_NOISE
            weight.add_((torch.randn(weight.shape) * deviation).to(device))
    try:
        check_model(config, model, device, rounding_of(model))
    except AccelGPTError:
        raise
    except Exception:  # if float32 is not the cause, the second check raises it once more
        if accelerator.mixed_precision == "no":
            raise
        compute_as_prepared(model, accelerator)
        check_model(config, model, device, ROUNDINGS * torch.finfo(torch.bfloat16).eps)
    if config.own.loss is not None:
        check_loss(config, plan, model, corpus, device)


# --------------------------------------------------------------------------- the model


def check_model(
    config: Config, model: LanguageModel, device: torch.device, rounding: float
) -> None:
    """Raise `UserError` if the val loss of a model would say nothing about text.

    The logits must depend neither on later tokens nor on another document, and be the same with the
    cache of keys. The loss must be their cross entropy. `rounding`: see `rounding_of`.
    """
    place = config.own.place("model") if config.own.model else config.own.file
    masked = config.data.document_mask
    with seeded(config.seed):
        tokens = torch.randint(model.vocab_size, (1, config.model.block_size)).to(device)

    def compute(tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        one_document = torch.zeros_like(tokens) if masked else None
        logits: Tensor = model(tokens, documents=one_document if documents is None else documents)
        return logits

    with evaluating(model):
        with contextlib.suppress(Exception):  # raised below, if the length is not the cause
            compute(tokens[:, :CHECKED_TOKENS])
            tokens = tokens[:, :CHECKED_TOKENS]
        T = tokens.shape[1]
        if getattr(getattr(model, "inner", model), "causal", True):
            check_earlier_logits(compute, tokens, model.vocab_size, place, rounding)
            if masked:
                halves = (torch.arange(T, device=device) >= T // 2).int()[None]
                changed = torch.where(halves == 0, (tokens + 1) % model.vocab_size, tokens)
                logits = compute(tokens, halves)[:, T // 2 :]
                require(
                    same_logits(logits, compute(changed, halves)[:, T // 2 :], rounding),
                    f"the logits of {place} depend on another document, but data.document_mask is "
                    "true; let a token see its own document only, or set data.document_mask to "
                    "false",
                )
        logits = compute(tokens)
        targets = tokens.roll(-1, 1)
        documents = torch.zeros_like(tokens) if masked else None
        require(
            same_logits(
                sequence_losses(logits, targets),
                model(tokens, targets, documents=documents, per_sequence=True),
                rounding,
            ),
            f"the loss of {place} in evaluations is not the cross entropy of its logits; compute "
            "other losses in loss()",
        )
        cache = model.make_cache(T)
        if cache is not None:  # a prompt, then one token at a time
            half = (T + 1) // 2
            parts = [model(tokens[:, :half], cache=cache)]
            parts += [model(tokens[:, i : i + 1], cache=cache) for i in range(half, T)]
            require(
                same_logits(model(tokens), torch.cat(parts, dim=1), rounding),
                f"the GPT of {place} computes other logits with its cache of keys and values, so "
                "it would sample other text; number the attention layers by attn.layer",
            )


def check_earlier_logits(
    compute: Callable[[Tensor], Tensor],
    tokens: Tensor,
    vocab_size: int,
    place: str,
    rounding: float,
) -> None:
    """Raise `UserError` if a change of one of the `tokens` (1, T) changes logits before it.

    Each of the first `CHECKED_TOKENS` is changed in turn, each in another sequence.
    """
    T = tokens.shape[1]
    end = min(T, CHECKED_TOKENS)
    alone = compute(tokens)
    rows = max(1, CHECKED_LOGITS // (T * vocab_size))
    equal = compute(tokens.repeat(min(rows + 1, end), 1))
    leak = max(LEAST_LEAK, 2 * share_of_difference(equal, equal[:1]))  # a GPU may round by row
    for first in range(1, end, rows):
        positions = torch.arange(first, min(first + rows, end), device=tokens.device)
        changed = tokens.repeat(len(positions) + 1, 1)  # the first row stays as it is
        number = torch.arange(1, len(changed), device=tokens.device)
        changed[number, positions] = (changed[number, positions] + 1) % vocab_size
        logits = compute(changed)
        require(
            same_logits(alone, logits[:1], rounding),
            f"the logits of {place} depend on the other sequences of a batch, so its loss depends "
            "on the batch size; compute each sequence alone in evaluation mode",
        )
        is_before = torch.arange(T, device=tokens.device) < positions[:, None]
        same = logits[1:].where(is_before[..., None], logits[:1])
        require(
            same_logits(logits[:1], same, leak),
            f"the logits of {place} depend on later tokens, so its loss says nothing about text; "
            "let a token see those before it only, or set causal = False on the module to allow it",
        )


def rounding_of(model: LanguageModel) -> float:
    """Return by which share of the largest logit two ways to compute logits may differ."""
    types = {weight.dtype for weight in model.parameters() if weight.is_floating_point()}
    return max([ROUNDING, *(ROUNDINGS * torch.finfo(dtype).eps for dtype in types)])


def same_logits(logits: Tensor, others: Tensor, tolerance: float) -> bool:
    """Return whether logits are equal within a share of the largest, where they are finite."""
    return share_of_difference(logits, others) <= tolerance


def share_of_difference(logits: Tensor, others: Tensor) -> float:
    """Return the largest difference as a share of the largest logit, where they are finite."""
    difference = (logits.float() - others.float()).nan_to_num(0, 0, 0).abs().max()
    largest = logits.float().nan_to_num(0, 0, 0).abs().max()
    return (difference / largest).nan_to_num(0).item()


# --------------------------------------------------------------------------- the loss


class Watched(Called):
    """The model as `loss()` gets it in the check: a call keeps its logits, to derive by them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.logits: list[Tensor] = []

    def __call__(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        documents: Tensor | None = None,
        per_sequence: bool = False,
    ) -> Tensor:
        """Return the logits (B, T, V), or their loss, as a `LanguageModel` does."""
        with torch.no_grad():
            logits: Tensor = self.wrapped(tokens, documents=documents)
        logits.requires_grad_()
        self.logits.append(logits)
        if targets is None:
            return logits
        loss_of = sequence_losses if per_sequence else next_token_loss
        return loss_of(logits, targets)


def check_loss(
    config: Config, plan: Plan, model: LanguageModel, corpus: Corpus, device: torch.device
) -> None:
    """Raise `UserError` if `loss()` drops targets so that the loss depends on the micro-batch.

    Compares the gradient that logits get from a few train sequences together with the one they get
    from each sequence alone. A loss that uses every target may couple sequences. Cannot check a
    loss that draws random numbers or does not take a sequence alone.
    """
    loss = config.own.loss
    assert loss is not None
    block_size = config.model.block_size
    B = max(2, min(CHECKED_SEQUENCES, CHECKED_LOGITS // (block_size * corpus.vocab_size)))
    tokens, targets = first_sequences(corpus.evaluated["train"][0], block_size, B)
    targets, documents = corpus.target_mask.apply(tokens, targets)
    tokens = tokens.to(device)
    targets = targets.to(device)
    counted = targets != IGNORE

    def derive(rows: slice) -> Tensor:
        watched = Watched(model)
        part = None if documents is None else documents[rows].to(device)
        returned = loss(
            model=watched,
            tokens=tokens[rows],
            targets=targets[rows],
            documents=part,
            step=0,
            config=config,
            plan=plan,
        )
        scalar = returned[0] if isinstance(returned, tuple) else returned
        gradients = torch.autograd.grad(scalar, watched.logits, allow_unused=True)
        total = torch.stack([one for one in gradients if one is not None]).sum(0)  # (B, T, V)
        return total.reshape(*tokens[rows].shape, total.shape[-1]) * counted[rows].sum()

    try:
        with evaluating(model), torch.enable_grad(), seeded(config.seed):
            together = derive(slice(None))
            is_random = not together.equal(derive(slice(None)))
            alone = torch.cat([derive(slice(row, row + 1)) for row in range(len(tokens))])
    except Exception:  # the first step raises it once more, with its line
        return
    dropped = counted & (together == 0).all(-1)
    alone = alone.nan_to_num()
    # a loss may choose its targets by the logits of the whole batch, such as the hardest half
    in_both = (together != 0).any(-1) & (alone != 0).any(-1)
    difference = ((together - alone) * in_both[..., None]).abs().max()
    require(
        is_random or not dropped.any() or bool(difference <= ROUNDING * together.abs().max()),
        f"{config.own.place('loss')} learns nothing from {int(dropped.sum()):,} of "
        f"{int(counted.sum()):,} targets, and its mean depends on the micro-batch; drop these "
        "targets in a function targets(tokens, targets, documents)",
    )
