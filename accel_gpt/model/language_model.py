"""Define what training, evaluation, samples and checkpoints ask of a model.

`GPT` is such a model, and `OwnModel` makes one of any module that maps tokens to logits.

Shapes: B batch, T tokens, V vocabulary.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn

from accel_gpt.config.model import ModelConfig
from accel_gpt.model.layers import KVCache
from accel_gpt.model.sharding import load_full


class LanguageModel(nn.Module):
    """Predict the next token, over `vocab_size` tokens and at most `config.block_size` of them.

    A subclass defines `forward(tokens, targets=None, cache=None, last_only=False, documents=None,
    per_sequence=False)`, as `GPT.forward` describes it.
    """

    config: ModelConfig
    vocab_size: int
    given: ModelConfig | None = None
    """What `model()` of --code was called with, for checkpoints: its model may have another
    `config`. None: the same."""
    recompute = False  # activation checkpointing of each block
    bf16_residual = False  # residual stream in bf16 under autocast to bf16
    remake: "Callable[[], LanguageModel] | None" = None
    """Make a model of --code from the device meta once more, on the CPU. None: it has weights, or
    `init_weights` draws all of them."""

    def init_weights(self) -> None:
        """Draw the weights from the global CPU generator, unless the constructor has drawn them."""

    def tie_weights(self) -> None:
        """Tie the weights that the model shares; Accelerate calls this after FSDP2 has sharded."""

    def build_buffers(self) -> None:
        """Compute the buffers that no checkpoint holds, on the device of the weights."""

    def check_tied(self) -> None:
        """Raise `UserError` if a checkpoint would lose weights, since they are not tied."""

    def materialize(self, device: torch.device | str) -> None:
        """Allocate a model from the device meta on `device`, with uninitialized weights.

        Under FSDP, each rank allocates its shard only.
        """
        self.to_empty(device=device)  # unties tied weights
        self.tie_weights()
        self.build_buffers()
        if self.remake is not None:
            copy_buffers(self.remake(), self)

    def make_cache(self, tokens: int) -> KVCache | None:
        """Return an empty cache for up to `tokens` tokens; None if the model uses no cache."""
        return None

    def parameter_count(self) -> int:
        """Count the parameters, tied weights once, with padded rows of the vocabulary."""
        return sum(p.numel() for p in self.parameters())

    def matrices(self) -> list[nn.Parameter]:
        """Return the weights in matrix products: two or more dimensions, and no embedding."""
        embeddings = {id(one.weight) for one in self.modules() if isinstance(one, nn.Embedding)}
        return [p for p in self.parameters() if p.ndim > 1 and id(p) not in embeddings]

    def flops_per_token(self) -> int:
        """Compute the FLOPs to train on one token: 6 for each weight of `matrices`.

        Attention and other products of activations do not count.
        """
        return 6 * sum(p.numel() for p in self.matrices())


def draw_weights(model: LanguageModel) -> None:
    """Draw all weights of `model`, the same on any number of ranks."""
    if model.remake is None:
        model.init_weights()
        return
    drawn = model.remake()
    drawn.init_weights()
    weights = dict(drawn.named_parameters())
    for name, weight in model.named_parameters():
        load_full(weight, weights[name])
    copy_buffers(drawn, model)


def is_new(name: str, patterns: Sequence[str] | None) -> bool:
    """Return whether the name of a weight matches one of the patterns of `model.new_weights`."""
    return any(fnmatchcase(name, pattern) for pattern in patterns or ())


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Let the CPU's generator start from `seed` inside the block, and restore it afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


@torch.no_grad()
def copy_buffers(source: nn.Module, model: nn.Module) -> None:
    """Copy all buffers of `source` into `model`."""
    buffers = dict(model.named_buffers())
    for name, buffer in source.named_buffers():
        buffers[name].copy_(buffer)
