"""Check a file of --code before the first step, on a model that is made for it.

Shapes: B batch, T tokens, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from accel_gpt.config.experiment import Config
from accel_gpt.data.corpus import Corpus
from accel_gpt.errors import require
from accel_gpt.evals.validation import CHECKED_SEQUENCES, first_sequences
from accel_gpt.model.causality import CHECKED_LOGITS, ROUNDING, check_causality
from accel_gpt.model.gpt import evaluating
from accel_gpt.model.language_model import LanguageModel, seeded
from accel_gpt.model.loss import IGNORE, next_token_loss, sequence_losses
from accel_gpt.model.make import make_model
from accel_gpt.own_code import Function
from accel_gpt.training.losses import Called

MOST_CHECKED = 1_000_000_000  # parameters; assumption
VECTOR_NOISE = 0.1  # standard deviation of what is added to vectors; assumption


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
        return (
            sequence_losses(logits, targets) if per_sequence else next_token_loss(logits, targets)
        )


@torch.no_grad()
def check_own_code(
    config: Config, gpt: LanguageModel, corpus: Corpus, device: torch.device
) -> None:
    """Raise `UserError` if the val loss of the run would say nothing; see the two checks.

    `gpt`: the model of the run. One that is larger than `MOST_CHECKED` is not made once more.
    Random numbers are added to the weights, since weights that begin at zero hide a leak.
    """
    if gpt.parameter_count() > MOST_CHECKED:
        return
    model = make_model(config, gpt.vocab_size).to(device)
    model.init_weights()
    with seeded(config.seed):
        for weight in model.parameters():  # of a matrix: outputs are as large as its inputs
            fan_in = weight.shape[1:].numel()
            deviation = fan_in**-0.5 if weight.dim() > 1 else VECTOR_NOISE
            weight.add_((torch.randn(weight.shape) * deviation).to(device))
    check_causality(config, model, device)
    if config.own.loss is not None:
        check_own_loss(config, model, corpus, device)


def check_own_loss(
    config: Config, model: LanguageModel, corpus: Corpus, device: torch.device
) -> None:
    """Raise `UserError` if `loss()` drops targets so that the loss depends on the micro-batch.

    Compares the gradient that logits get from several sequences together with the one they get from
    each sequence alone. A loss that uses every target may couple sequences. Cannot check a loss
    that draws random numbers or does not take a sequence alone.
    """
    loss = config.own.loss
    assert loss is not None
    tokens, targets, documents = checked_sequences(corpus, config.model.block_size, device)
    counted = targets != IGNORE

    def derive(rows: slice) -> Tensor:
        part = None if documents is None else documents[rows]
        arguments = (tokens[rows], targets[rows], part)
        return logit_gradient(loss, model, arguments) * counted[rows].sum()

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


def logit_gradient(loss: Function, model: nn.Module, arguments: Sequence[Tensor | None]) -> Tensor:
    """Return the gradient of `loss(model, *arguments)` by all logits that it uses, (B, T, V)."""
    watched = Watched(model)
    returned = loss(watched, *arguments)
    scalar = returned[0] if isinstance(returned, tuple) else returned
    gradients = torch.autograd.grad(scalar, watched.logits, allow_unused=True)
    return torch.stack([one for one in gradients if one is not None]).sum(0)


def checked_sequences(
    corpus: Corpus, block_size: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return tokens, targets and documents of a few train sequences, each (B, T)."""
    B = max(2, min(CHECKED_SEQUENCES, CHECKED_LOGITS // (block_size * corpus.vocab_size)))
    tokens, targets = first_sequences(corpus.evaluated["train"][0], block_size, B)
    targets, documents = corpus.target_mask.apply(tokens, targets)
    if documents is not None:
        documents = documents.to(device)
    return tokens.to(device), targets.to(device), documents
