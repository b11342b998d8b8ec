"""Build the model of a run: a GPT, or the module that `model()` in the file of --code returns.

Shapes: B batch, T tokens, V vocabulary.
"""

import inspect
import itertools
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from accel_gpt.config.experiment import Config
from accel_gpt.config.model import ModelConfig
from accel_gpt.errors import UserError, require
from accel_gpt.model.gpt import GPT, evaluating
from accel_gpt.model.language_model import LanguageModel, seeded
from accel_gpt.model.layers import KVCache
from accel_gpt.model.loss import next_token_loss, sequence_losses

CHECKED_TOKENS = 64  # most tokens that the check changes; assumption
CACHED_TOKENS = (5, 1, 17, 1, 2)  # given to the cache at once, then one at a time; assumption
VECTOR_NOISE = 0.1  # standard deviation of what is added to vectors; assumption
CHECKED_LOGITS = 2**24  # in one batch of the check: 64 MiB in float32; assumption
MOST_CHECKED = 1_000_000_000  # parameters; a larger model is not made once more; assumption
LEAST_LEAK = 2e-5  # of the largest logit, between rows of a batch; 200 roundings; assumption
ROUNDING = 1e-3  # of the largest logit; TF32 rounds each factor to 2**-11


class OwnModel(LanguageModel):
    """Give a module that maps tokens (B, T) to logits (B, T, V) the interface of a model.

    The module may have these: `flops_per_token()`, in place of the estimate from its weights, and
    `_no_split_modules`, the names of the classes that FSDP shards as units. It generates text
    without a cache.
    """

    def __init__(self, inner: nn.Module, place: str, config: ModelConfig, vocab_size: int) -> None:
        super().__init__()
        self.config = config
        self.vocab_size = vocab_size
        self.inner = inner
        self.place = place  # of `model()`, for errors
        self._no_split_modules = getattr(inner, "_no_split_modules", None) or unit_classes(self)
        self.tied = list(tied_weights(self))

    def tie_weights(self) -> None:
        """Tie the weights that `inner` shares between modules."""
        for name, first in self.tied:
            module, _, attribute = name.rpartition(".")
            setattr(self.get_submodule(module), attribute, self.get_parameter(first))

    def flops_per_token(self) -> int:
        """Return what the module says, else 6 FLOPs for each weight in a matrix product."""
        own = getattr(self.inner, "flops_per_token", None)
        return super().flops_per_token() if own is None else int(own())

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        cache: KVCache | None = None,
        last_only: bool = False,
        documents: Tensor | None = None,
        per_sequence: bool = False,
    ) -> Tensor:
        """Compute logits or losses, as `GPT.forward` does, without a cache."""
        assert cache is None
        logits: Tensor
        logits = self.inner(tokens) if documents is None else self.inner(tokens, documents)
        shape = (*tokens.shape, self.vocab_size)
        found = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        if found != shape:
            raise UserError(
                f"the module of {self.place} returns {found}, but must return the logits {shape}: "
                "sequences, tokens, vocabulary"
            )
        if not logits.is_floating_point():
            raise UserError(
                f"the module of {self.place} returns {logits.dtype}, but logits are floating-point "
                "numbers"
            )
        if self.training and torch.is_grad_enabled() and not logits.requires_grad:
            raise UserError(
                f"the logits of the module of {self.place} have no gradient, so no weight would be "
                "trained; leave out detach() and torch.no_grad() in its forward"
            )
        if targets is None:
            return logits[:, -1:] if last_only else logits
        if per_sequence:
            return sequence_losses(logits, targets)
        return next_token_loss(logits, targets)


def unit_classes(module: nn.Module) -> list[str]:
    """Return the names of the classes in the outermost lists of modules, for FSDP."""
    names: set[str] = set()
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.Sequential):
            # a class of torch, such as Linear, is also in other places of the model
            kinds = {type(one) for one in child if not type(one).__module__.startswith("torch.")}
            names |= {kind.__name__ for kind in kinds}
        else:
            names |= set(unit_classes(child))
    return sorted(names)


def tied_weights(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the further names of each weight that has several, with its first name."""
    names: dict[int, str] = {}
    for name, weight in module.named_parameters(remove_duplicate=False):
        first = names.setdefault(id(weight), name)
        if first != name:
            yield name, first


def make_model(
    config: Config, vocab_size: int, device: torch.device | str = "cpu"
) -> LanguageModel:
    """Build the model of a run with weights that are not drawn yet; see `draw_weights`.

    On the device meta, the weights have no storage until `materialize`. Raises `UserError` if
    `model()` in the file of --code returns no model for this config.
    """
    if config.own.model is None:
        return GPT.allocate(config.model, vocab_size, device)

    def make() -> LanguageModel:
        with seeded(config.seed):
            return make_own_model(config, vocab_size)

    with torch.device(device):
        model = make()
    model.remake = make
    return model


def make_own_model(config: Config, vocab_size: int) -> LanguageModel:
    """Call `model()` of the file of --code; return its GPT, or any other module as an `OwnModel`.

    Raises `UserError` unless it is a module with weights, or if it cannot do what the config asks.
    """
    assert config.own.model is not None
    place = config.own.place("model")
    made = config.own.model(config, vocab_size)
    require(
        isinstance(made, nn.Module) and next(made.parameters(), None) is not None,
        f"{place} returned {type(made).__name__}; return a torch.nn.Module with parameters",
    )
    require(
        any(p.requires_grad for p in made.parameters()),
        f"{place} returned a module without trainable parameters; set requires_grad of some",
    )
    for module in made.modules():
        for name, value in vars(module).items():
            require(
                not isinstance(value, Tensor),
                f"{place}: {name} of {type(module).__name__} is a tensor, but neither a parameter "
                f'nor a buffer, so no checkpoint holds it; use register_buffer("{name}", ...)',
            )
    if isinstance(made, GPT):
        require(
            made.vocab_size == vocab_size,
            f"{place} returned a GPT of {made.vocab_size:,} tokens; give it vocab_size, "
            f"{vocab_size:,}",
        )
        require(
            made.config.block_size >= config.model.block_size,
            f"{place} returned a GPT with a block_size of {made.config.block_size:,}, but "
            f"model.block_size is {config.model.block_size:,}; give it config.model.block_size",
        )
        made.given = config.model
        made.tie_weights()
        made.build_buffers()
        return made
    require(
        config.train.activation_checkpointing == "none",
        f"train.activation_checkpointing is {config.train.activation_checkpointing}, but {place} "
        "returned another class than GPT; set it to none, or call torch.utils.checkpoint in the "
        "module",
    )
    require(
        not config.data.document_mask or takes_documents(made),
        f"data.document_mask is true, but the module of {place} takes the tokens alone; give its "
        "forward a second argument, documents, or set data.document_mask to false",
    )
    return OwnModel(made, place, config.model, vocab_size)


def takes_documents(module: nn.Module) -> bool:
    """Return whether the module can be called with tokens and documents."""
    try:
        inspect.signature(module.forward).bind("tokens", "documents")
    except TypeError:
        return False
    return True


# --------------------------------------------------------------------------- the check


@torch.no_grad()
def check_causality(config: Config, model: LanguageModel, device: torch.device) -> None:
    """Raise `UserError` if the val loss of a model would say nothing about text.

    The logits must depend neither on later tokens nor on another document, and be the same with the
    cache of keys. The loss must be their cross entropy.

    Checks a new model of a run with a file of --code. Random numbers are added to its weights,
    since weights that begin at zero hide a leak. Models above `MOST_CHECKED` parameters are not
    checked.
    """
    if model.parameter_count() > MOST_CHECKED:
        return
    place = config.own.place("model") if config.own.model else config.own.file
    copy = make_model(config, model.vocab_size).to(device)
    copy.init_weights()
    with seeded(config.seed):
        for weight in copy.parameters():
            weight.add_(draw_noise(weight.shape).to(device))
        tokens = torch.randint(model.vocab_size, (1, config.model.block_size)).to(device)
    inner = copy.inner if isinstance(copy, OwnModel) else copy
    with evaluating(copy):
        if can_read(copy, tokens[:, :CHECKED_TOKENS], config.data.document_mask):
            tokens = tokens[:, :CHECKED_TOKENS]
        if getattr(inner, "causal", True):
            check_earlier_logits(copy, tokens, config.data.document_mask, place)
            if config.data.document_mask:
                check_next_document(copy, tokens, place)
        check_cross_entropy(copy, tokens, config.data.document_mask, place)
        check_cached_logits(copy, tokens, place)


def can_read(model: LanguageModel, tokens: Tensor, with_documents: bool) -> bool:
    """Return whether a model reads `tokens` (1, T), which may be fewer than its block_size."""
    try:
        model(tokens, documents=torch.zeros_like(tokens) if with_documents else None)
    except Exception:  # raised once more for block_size tokens, if the length is not the cause
        return False
    return True


def draw_noise(shape: torch.Size) -> Tensor:
    """Draw numbers for a weight: of a matrix, so that its outputs are as large as its inputs."""
    deviation = shape[1:].numel() ** -0.5 if len(shape) > 1 else VECTOR_NOISE
    return torch.randn(shape) * deviation


def check_earlier_logits(
    model: LanguageModel, tokens: Tensor, with_documents: bool, place: str
) -> None:
    """Raise `UserError` if a change of one of the `tokens` (1, T) changes logits before it.

    Each of the first `CHECKED_TOKENS` is changed in turn, in a sequence of its own.
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
