"""Make the model of a run: a GPT, or what `model()` in the file of --code returns."""

import inspect

import torch
from torch import Tensor, nn

from accel_gpt.config.experiment import Config
from accel_gpt.errors import require
from accel_gpt.model.gpt import GPT
from accel_gpt.model.language_model import LanguageModel, seeded
from accel_gpt.model.own import OwnModel
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

    Raises `UserError` unless it is a module with weights, or if it cannot do what the config asks.
    """
    assert config.own.model is not None
    place = config.own.place("model")
    module = config.own.model(config, vocab_size)
    if not isinstance(module, nn.Module) or not any(p.requires_grad for p in module.parameters()):
        raise unexpected(place, module, "a torch.nn.Module with trainable parameters")
    for part in module.modules():
        for name, value in vars(part).items():
            require(
                not isinstance(value, Tensor),
                f"{place}: {name} of {type(part).__name__} is a tensor, but neither a parameter "
                f'nor a buffer, so no checkpoint holds it; use register_buffer("{name}", ...)',
            )
    if isinstance(module, GPT):
        require(
            module.vocab_size == vocab_size and module.config.block_size >= config.model.block_size,
            f"{place} returned a GPT of {module.vocab_size:,} tokens and a block_size of "
            f"{module.config.block_size:,}; give it the vocab_size {vocab_size:,} and "
            f"config.model.block_size, {config.model.block_size:,}",
        )
        module.given = config.model
        module.tie_weights()
        module.build_buffers()
        return module
    require(
        config.train.activation_checkpointing == "none",
        f"train.activation_checkpointing is {config.train.activation_checkpointing}, but {place} "
        "returned another class than GPT; set it to none, or call torch.utils.checkpoint in the "
        "module",
    )
    require(
        not config.data.document_mask or takes_documents(module),
        f"data.document_mask is true, but the module of {place} takes the tokens alone; give its "
        "forward a second argument, documents, or set data.document_mask to false",
    )
    return OwnModel(module, place, config.model, vocab_size)


def takes_documents(module: nn.Module) -> bool:
    """Return whether the module can be called with tokens and documents."""
    try:
        inspect.signature(module.forward).bind("tokens", "documents")
    except TypeError:
        return False
    return True
