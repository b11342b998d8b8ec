"""The decoder: GPT-2, Llama, Qwen3, NanoChat and what lies between, by `ModelConfig`.

Shapes: B batch, T tokens, C channels (n_embd), D head size, V vocabulary.
"""

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from accel_gpt.config.model import ModelConfig
from accel_gpt.cost.flops import padded_vocab_size
from accel_gpt.errors import require
from accel_gpt.model.documents import attention_mask, positions
from accel_gpt.model.layers import (
    MLP,
    Block,
    CausalSelfAttention,
    KVCache,
    build_norm,
    rotary_table,
)
from accel_gpt.model.loss import Head
from accel_gpt.model.sharding import load_full


class _SkipInit(TorchFunctionMode):
    """Leaves out torch.nn.init, which for a meta tensor imports torch._dynamo: 1 to 2 s."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if getattr(function, "__module__", "") == "torch.nn.init":
            return None
        return function(*args, **(kwargs or {}))


class GPT(nn.Module):
    """A decoder-only transformer over `vocab_size` real tokens.

    Embedding and head have `padded_vocab_size` rows, for the matrix units; the rows beyond the
    real tokens start at zero, get no gradient and are cut from the logits. Without `init` the
    weights are uninitialized, and not tied.
    """

    _no_split_modules = ["Block"]  # noqa: RUF012 - the name and type that Accelerate reads
    rotary: Tensor | None

    def __init__(self, config: ModelConfig, vocab_size: int, init: bool = True) -> None:
        super().__init__()
        require(vocab_size > 0, f"vocab_size is {vocab_size}; a model needs at least one token")
        self.config = config
        self.vocab_size = vocab_size
        self.padded_vocab_size = padded_vocab_size(vocab_size)
        learned = config.position == "learned"
        with _SkipInit():
            self.wte = nn.Embedding(self.padded_vocab_size, config.n_embd)
            self.wpe = nn.Embedding(config.block_size, config.n_embd) if learned else None
            self.norm_e = build_norm(config) if config.embedding_norm else None
            self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
            self.norm_f = build_norm(config)
            self.head = Head(config, vocab_size)
        self.recompute = False  # activation checkpointing of each block
        self.register_buffer("rotary", None, persistent=False)
        if init:
            self.init_weights()

    @classmethod
    def allocate(
        cls, config: ModelConfig, vocab_size: int, device: torch.device | str = "cpu"
    ) -> "GPT":
        """A model with uninitialized weights, which the caller loads; on the device meta without
        storage for them, until `materialize`.
        """
        with torch.device(device):
            model = cls(config, vocab_size, init=False)
        model.tie_weights()
        if device != "meta":
            model.build_rotary()
        return model

    def materialize(self, device: torch.device | str) -> None:
        """Allocate the weights, of which FSDP leaves each rank its shard, on `device`."""
        self.to_empty(device=device)  # unties tied weights
        self.tie_weights()
        self.build_rotary()

    def tie_weights(self) -> None:
        """Tie the head to the embedding, if configured; Accelerate calls this after FSDP2 sharded
        the weights.
        """
        if self.config.tie_embeddings:
            self.head.weight = self.wte.weight

    def build_rotary(self) -> None:
        """Compute the rotary table on the device of the weights."""
        if self.config.position == "rope":
            self.rotary = rotary_table(self.config, self.wte.weight.device)

    def get_input_embeddings(self) -> nn.Embedding:
        """The embedding, which Accelerate then has FSDP gather by itself."""
        return self.wte

    def get_output_embeddings(self) -> Head:
        """The head, which Accelerate then has FSDP gather by itself."""
        return self.head

    @torch.no_grad()
    def init_weights(self) -> None:
        """Draw all weights from the global CPU generator; tie them and build the rotary table.

        GPT-2, Radford et al. 2019, section 2.3: normal(0, init_std), projections onto the residual
        stream divided by the root of their number, 2 n_layer; zero with `zero_init`. Each weight is
        drawn whole: any number of ranks has the weights that one would have.
        """
        self.tie_weights()
        self.build_rotary()
        for module in self.modules():  # draws as the constructors do: a seed keeps its weights
            if isinstance(module, nn.Linear):
                nn.Linear(module.in_features, module.out_features, module.bias is not None)
            elif isinstance(module, nn.Embedding):
                nn.Embedding(module.num_embeddings, module.embedding_dim)
        branches = [m for m in self.modules() if isinstance(m, CausalSelfAttention | MLP)]
        onto_residual = {m.down if isinstance(m, MLP) else m.proj for m in branches}
        for module in self.modules():
            if isinstance(module, nn.LayerNorm | nn.RMSNorm):
                module.reset_parameters()
            elif isinstance(module, nn.Linear | nn.Embedding):
                std = self.config.init_std
                if module in onto_residual:
                    std = 0.0 if self.config.zero_init else std / math.sqrt(2 * len(self.blocks))
                full = torch.empty(module.weight.shape)
                nn.init.normal_(full, std=std)
                if module in (self.wte, self.head):
                    full[self.vocab_size :] = 0.0
                load_full(module.weight, full)
                if isinstance(module, nn.Linear) and module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        cache: KVCache | None = None,
        last_only: bool = False,
        documents: Tensor | None = None,
        per_sequence: bool = False,
    ) -> Tensor:
        """Logits (B, T, V) of `tokens` (B, T) int64; with `targets` (B, T) their mean loss () or,
        `per_sequence`, the summed loss of each sequence (B,).

        `cache`: `tokens` follow the cached ones and are appended. `last_only`: logits of the last
        token alone (B, 1, V). `documents` (B, T): the numbers of `documents.separate`; attention
        and positions restart in each. Raises `ValueError` where the tokens exceed `block_size`, and
        for `documents` with a cache; ids are not checked, as that would wait for the device.
        """
        start = 0 if cache is None else cache.position
        end = start + tokens.shape[1]
        if end > self.config.block_size:
            raise ValueError(
                f"the model got {end} tokens ({start} of them cached); model.block_size is "
                f"{self.config.block_size}, give it at most as many"
            )
        dropout = self.config.dropout if self.training else 0.0
        position, mask = None, None  # position of each token in its document
        if documents is not None:
            if cache is not None:
                raise ValueError("the model got documents and a cache; give it one of them")
            position = positions(documents)
            mask = attention_mask(documents, self.config.head_size, dropout)
        x = self.wte(tokens)  # (B, T, C)
        if self.wpe is not None:
            x = x + (self.wpe.weight[start:end] if position is None else self.wpe(position))
        rotary = self.rotary
        if rotary is not None:
            rotary = rotary[:, start:end] if position is None else rotary[:, position]
        if dropout:
            x = F.dropout(x, dropout)
        if self.norm_e is not None:
            x = self.norm_e(x)
        for block in self.blocks:
            if self.recompute and torch.is_grad_enabled():
                x = checkpoint(block, x, rotary, None, mask, use_reentrant=False)
            else:
                x = block(x, rotary, cache, mask)
        if cache is not None:
            cache.position = end
        x = self.norm_f(x[:, -1:] if last_only else x)
        out: Tensor = self.head(x, targets, per_sequence)
        return out


@contextlib.contextmanager
def evaluating(model: nn.Module, compiled: bool = True) -> Iterator[None]:
    """Switch `model` to evaluation mode, without gradients; restore its mode, also after an error.

    A compiled model runs uncompiled unless `compiled`, and always on a CPU: there compiling the
    evaluation takes 10 to 20 s and makes it no faster (docs/speed.md).
    """
    eager = not compiled or next(model.parameters()).device.type == "cpu"
    calls = [(m, m._compiled_call_impl) for m in model.modules() if m._compiled_call_impl and eager]
    training = model.training
    model.eval()
    for module, _ in calls:
        module._compiled_call_impl = None
    try:
        with torch.no_grad():
            yield
    finally:
        for module, call in calls:
            module._compiled_call_impl = call
        model.train(training)
