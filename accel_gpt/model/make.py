"""Make the model of a run: a GPT, or what `model()` in the file of --code returns.

Shapes: B batch, T tokens, V vocabulary.
"""

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from accel_gpt.config.experiment import Config
from accel_gpt.config.model import ModelConfig
from accel_gpt.errors import UserError, require
from accel_gpt.model.gpt import GPT
from accel_gpt.model.language_model import LanguageModel, seeded
from accel_gpt.model.layers import KVCache
from accel_gpt.model.loss import next_token_loss, sequence_losses
from accel_gpt.own_code import unexpected


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
    if torch.device(device).type == "meta":
        model.remake = make
    return model


def make_own_model(config: Config, vocab_size: int) -> LanguageModel:
    """Call `model()` of the file of --code; return its GPT, or any other module as an `OwnModel`.

    Raises `UserError` unless it is a module with weights, if it would ignore the config, or if a
    checkpoint would not hold all of its state.
    """
    assert config.own.model is not None
    place = config.own.place("model")
    module = config.own.model(config=config, vocab_size=vocab_size)
    if not isinstance(module, nn.Module) or not any(p.requires_grad for p in module.parameters()):
        raise unexpected(place, module, "a torch.nn.Module with trainable parameters")
    for part in module.modules():
        for name, value in vars(part).items():  # no checkpoint would hold such a tensor
            require(
                not isinstance(value, Tensor),
                f"{place}: {name} of {type(part).__name__} is a tensor, but neither a parameter "
                "nor a buffer",
            )
    if isinstance(module, GPT):
        module.given = config.model
        module.tie_weights()
        module.build_buffers()
        return module
    require(
        config.train.activation_checkpointing == "none",
        f"train.activation_checkpointing is {config.train.activation_checkpointing}, but {place} "
        "returned another class than GPT; set it to none",
    )
    if config.data.document_mask:
        try:
            inspect.signature(module.forward).bind("tokens", "documents")
        except TypeError as error:
            raise UserError(
                f"data.document_mask is true, but the forward of {place} takes no documents"
            ) from error
    return OwnModel(module, place, config.model, vocab_size)


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

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of `inner` that this module lacks, for the functions of --code."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "inner":  # it is not set yet
                raise
            return getattr(self.inner, name)

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
        if not isinstance(logits, Tensor) or logits.shape != shape:
            raise unexpected(f"the module of {self.place}", logits, f"logits of shape {shape}")
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
