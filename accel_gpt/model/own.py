"""Build the model of a run: a GPT, or the module that `model()` in the file of --code returns.

Shapes: B batch, T tokens, V vocabulary.
"""

import inspect
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

CHECKED_TOKENS = 16  # of the texts that check a model; assumption
MOST_CHECKED = 1_000_000_000  # parameters; a larger model is not copied for the check; assumption


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
def check_own_model(config: Config, model: LanguageModel, device: torch.device) -> None:
    """Raise `UserError` if logits depend on later tokens, or differ with the cache of keys.

    Both are found on a copy of the model with random weights, since weights that begin at zero hide
    them. Models above `MOST_CHECKED` parameters are not checked.
    """
    if model.remake is None or model.parameter_count() > MOST_CHECKED:
        return
    place = config.own.place("model")
    copy = model.remake().to(device)
    copy.init_weights()
    for weight in copy.parameters():
        weight.add_(torch.randn_like(weight), alpha=0.1)
    T = min(config.model.block_size, CHECKED_TOKENS)
    half = T // 2
    tokens = torch.arange(T, device=device)[None] % copy.vocab_size
    others = tokens.clone()
    others[:, half:] = (others[:, half:] + 1) % copy.vocab_size
    documents = torch.zeros_like(tokens) if config.data.document_mask else None
    with evaluating(copy):
        logits = copy(tokens, documents=documents)
        changed = copy(others, documents=documents)
        inner = copy.inner if isinstance(copy, OwnModel) else copy
        require(
            same_logits(logits[:, :half], changed[:, :half]) or not getattr(inner, "causal", True),
            f"the logits of {place} depend on later tokens, so its loss says nothing about text; "
            "let a token see those before it only, or set causal = False on the module to allow it",
        )
        cache = copy.make_cache(T)
        if cache is None:
            return
        copy(tokens[:, :half], cache=cache)
        continued = copy(tokens[:, half:], cache=cache)
        require(
            same_logits(copy(tokens)[:, half:], continued),
            f"the GPT of {place} computes other logits with its cache of keys and values, so it "
            "would sample other text; number the attention layers by attn.layer",
        )


def same_logits(one: Tensor, two: Tensor) -> bool:
    """Return whether two logits are equal within rounding; numbers that are not finite are."""
    difference = (one.float() - two.float()).abs().max()
    return not difference > 1e-3 * max(1.0, float(one.abs().max()))
