"""Define the decoder. `ModelConfig` makes it GPT-2, Llama, Qwen3, NanoChat or a mixture of them.

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
from accel_gpt.errors import require
from accel_gpt.model.documents import attention_mask, positions
from accel_gpt.model.language_model import LanguageModel
from accel_gpt.model.layers import Block, KVCache, build_norm, rotary_table
from accel_gpt.model.loss import Head, autocast_dtype
from accel_gpt.model.sharding import load_full
from accel_gpt.model.sizes import padded_vocab_size, training_flops


class _SkipInit(TorchFunctionMode):
    """Skip `torch.nn.init`. For tensors on meta, it imports torch._dynamo, which takes 1 to 2 s."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if getattr(function, "__module__", "") == "torch.nn.init":
            return None
        return function(*args, **(kwargs or {}))


class GPT(LanguageModel):
    """Predict the next token with a decoder-only transformer over `vocab_size` real tokens.

    Embedding and head have `padded_vocab_size` rows, for the matrix units. The rows beyond the real
    tokens start at zero, get no gradient and are cut from the logits. Without `init`, the weights
    are uninitialized and not tied.
    """

    _no_split_modules = ["Block"]  # noqa: RUF012 - Accelerate expects this name and a list
    rotary: Tensor | None

    def __init__(self, config: ModelConfig, vocab_size: int, init: bool = True) -> None:
        super().__init__()
        self.config = config
        self.vocab_size = vocab_size
        self.padded_vocab_size = padded_vocab_size(vocab_size)
        learned = config.position == "learned"
        with _SkipInit():
            self.wte = nn.Embedding(self.padded_vocab_size, config.n_embd)
            self.wpe = nn.Embedding(config.block_size, config.n_embd) if learned else None
            self.norm_e = build_norm(config) if config.norm == "plain_rmsnorm" else None
            self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
            self.norm_f = build_norm(config)
            self.head = Head(config, vocab_size)
        self.register_buffer("rotary", None, persistent=False)
        if init:
            self.init_weights()

    @classmethod
    def allocate(
        cls, config: ModelConfig, vocab_size: int, device: torch.device | str = "cpu"
    ) -> "GPT":
        """Build a model with uninitialized weights, for a caller that loads them.

        On the device meta, the weights have no storage until `materialize`.
        """
        with torch.device(device):
            model = cls(config, vocab_size, init=False)
        model.tie_weights()
        if device != "meta":
            model.build_buffers()
        return model

    def tie_weights(self) -> None:
        """Tie the head to the embedding, if configured.

        Accelerate calls this after FSDP2 has sharded the weights.
        """
        if self.config.tie_embeddings:
            self.head.weight = self.wte.weight

    def check_tied(self) -> None:
        """Raise `UserError` if the head is not tied, although the config says so.

        A checkpoint holds tied weights once, so it would lose the head.
        """
        names = [name for name, _ in self.named_parameters()]  # tied weights once
        require(
            not self.config.tie_embeddings or "head.weight" not in names,
            "model.tie_embeddings is true, but head.weight is not the weight of the embedding, and "
            "no checkpoint would hold it; call tie_weights(), or set model.tie_embeddings to false",
        )

    def flops_per_token(self) -> int:
        """Compute the FLOPs to train on one token, from the weights of this model.

        See `sizes.training_flops`. The head counts without its padded rows.
        """
        matrices = sum(p.numel() for p in self.matrices() if p is not self.head.weight)
        return training_flops(self.config, matrices + self.vocab_size * self.config.n_embd)

    def make_cache(self, tokens: int) -> KVCache:
        """Return an empty cache of keys and values for up to `tokens` tokens."""
        return KVCache(self.config, tokens)

    def build_buffers(self) -> None:
        """Put the rotary table on the device of the weights."""
        if self.config.position == "rope":
            self.rotary = rotary_table(self.config).to(self.wte.weight.device)

    def get_input_embeddings(self) -> nn.Embedding:
        """Return the embedding, so that Accelerate gives it an FSDP unit."""
        return self.wte

    def get_output_embeddings(self) -> Head:
        """Return the head, so that Accelerate gives it an FSDP unit."""
        return self.head

    @torch.no_grad()
    def init_weights(self) -> None:
        """Draw all weights from the global CPU generator, tie them and build the rotary table.

        GPT-2, Radford et al. 2019, section 2.3: weights are normal(0, init_std). The weights of
        projections onto the residual stream are divided by the root of their number, 2 n_layer.
        With `zero_init`, they are zero instead. Every rank draws each weight in full, so the
        weights do not depend on the number of ranks.
        """
        self.tie_weights()
        self.build_buffers()
        residual = [m for m in self.modules() if getattr(m, "onto_residual", False)]
        for module in self.modules():
            if isinstance(module, nn.LayerNorm | nn.RMSNorm):
                module.reset_parameters()
            elif isinstance(module, nn.Linear | nn.Embedding):
                std = self.config.init_std
                if module in residual:
                    std = 0.0 if self.config.zero_init else std / math.sqrt(len(residual))
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
        """Compute the logits (B, T, V) of `tokens` (B, T) int64, or their loss in nats.

        With `targets` (B, T) the result is the mean loss (); with `per_sequence` as well, it is
        the summed loss of each sequence (B,). With `last_only`, it covers only the last token.

        With a `cache`, `tokens` continue the cached tokens and are appended to them. With
        `documents` (B, T), the numbers of `documents.separate`, attention and positions restart in
        each document.

        Token ids are not checked, as a check would wait for the device.
        """
        start = 0 if cache is None else cache.position
        end = start + tokens.shape[1]
        assert end <= self.config.block_size
        assert documents is None or cache is None
        dropout = self.config.dropout if self.training else 0.0

        position = None  # position of each token in its document (B, T)
        mask = None
        if documents is not None:
            position = positions(documents)
            mask = attention_mask(documents, self.config.head_size, dropout)

        x = self.wte(tokens)  # (B, T, C)
        if self.wpe is not None:
            x = x + (self.wpe.weight[start:end] if position is None else self.wpe(position))
        rotary = self.rotary
        if rotary is not None:  # (2, T, 1, D), or (2, B, T, 1, D) with documents
            rotary = rotary[:, start:end] if position is None else rotary[:, position]
        if dropout > 0:
            x = F.dropout(x, dropout)
        if self.norm_e is not None:
            x = self.norm_e(x)
        if self.bf16_residual and autocast_dtype(x.device) == torch.bfloat16:
            x = x.to(torch.bfloat16)  # and so is each sum with the output of attention or MLP

        for block in self.blocks:
            if self.recompute and torch.is_grad_enabled():
                x = checkpoint(block, x, rotary=rotary, mask=mask, use_reentrant=False)
            else:
                x = block(x, rotary=rotary, cache=cache, mask=mask)
        if cache is not None:
            cache.position = end

        if last_only:
            x = x[:, -1:]  # (B, 1, C)
        out: Tensor = self.head(self.norm_f(x), targets, per_sequence)
        return out


@contextlib.contextmanager
def evaluating(model: nn.Module, compiled: bool = True) -> Iterator[None]:
    """Switch `model` to evaluation mode, without gradients, and restore its mode afterwards.

    A compiled model runs uncompiled on a CPU, and everywhere if `compiled` is false. Compiling the
    evaluation on a CPU takes 10 to 20 s and makes it no faster (benchmarks/notes/precision.md).
    """
    eager = not compiled or next(model.parameters()).device.type == "cpu"
    compiled_calls = {}
    if eager:
        for module in model.modules():
            if module._compiled_call_impl:
                compiled_calls[module] = module._compiled_call_impl
                module._compiled_call_impl = None
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, call in compiled_calls.items():
            module._compiled_call_impl = call
        model.train(training)
