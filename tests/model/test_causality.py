"""A model of a file of --code that sees later tokens is refused; one that does not is trained."""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor, nn

from accel_gpt.config.data import DataConfig
from accel_gpt.config.experiment import Config, TrainConfig
from accel_gpt.config.model import ModelConfig
from accel_gpt.config.plan import make_plan
from accel_gpt.errors import UserError
from accel_gpt.evals.own_check import ROUNDING, check_own_code, rounding_of
from accel_gpt.model.gpt import GPT
from accel_gpt.model.layers import CausalSelfAttention
from accel_gpt.model.make import make_model
from accel_gpt.own_code import OwnCode, OwnFunction
from tests.conftest import tiny

V = 61  # tokens in the vocabulary
C = 16  # channels
T = 64  # tokens in a sequence
Make = Callable[[Config, int], nn.Module]


def check(
    make: Make,
    shape: ModelConfig | None = None,
    document_mask: bool = False,
    seed: int = Config.seed,
    precision: str = "no",
) -> None:
    """Check a model as a run does that begins."""
    config = Config(
        seed=seed,
        data=DataConfig(document_mask=document_mask),
        model=shape or tiny(n_layer=1, n_embd=C, block_size=T),
        train=TrainConfig(max_steps=1),
        own=OwnCode(file="my.py", model=make and OwnFunction("model", make, "my.py")),
    )
    corpus: Any = None  # there is no loss() to check
    plan = make_plan(config, 1)
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    check_own_code(config, plan, make_model(config, V), corpus, accelerator)


class Mixer(nn.Module):
    """Embed the tokens, mix positions with `mix`, (B, T, C) to (B, T, C), and return logits."""

    def __init__(self, mix: nn.Module) -> None:
        super().__init__()
        self.embedding = nn.Embedding(V, C)
        self.mix = mix
        self.head = nn.Linear(C, V)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        return self.head(x + self.mix(x))


class Function(nn.Module):
    """A module of a function."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Mask(nn.Module):
    """Add to each position a mean over the positions that its row of a mask (T, T) names."""

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", mask.float() / mask.sum(-1, keepdim=True).clamp(min=1))
        self.value = nn.Linear(C, C)

    def forward(self, x: Tensor) -> Tensor:
        size = x.shape[1]
        return self.mask[:size, :size] @ self.value(x)


def leak_in_blocks(size: int) -> nn.Module:
    """Each token sees its whole block of `size` tokens: patches that were not shifted."""
    block = torch.arange(T) // size
    return Mixer(Mask(block[:, None] >= block))


def leak_at(seed: int) -> nn.Module:
    """One token sees one later token."""
    draw = torch.Generator().manual_seed(seed)
    query = int(torch.randint(T - 1, (1,), generator=draw))
    key = int(torch.randint(query + 1, T, (1,), generator=draw))
    mask = torch.ones(T, T).tril()
    mask[query, key] = 1
    return Mixer(Mask(mask))


def leak_behind_zeros() -> nn.Module:
    """Each pair of tokens sees itself through weights that begin at zero."""
    model = leak_in_blocks(2)
    for weight in model.mix.parameters():
        nn.init.zeros_(weight)
    return model


class LeakInOneHead(CausalSelfAttention):
    """Attention in which one head of one query sees one later key."""

    def forward(self, x: Tensor, rotary: Any = None, cache: Any = None, mask: Any = None) -> Tensor:
        q, k, v = self.project(x, rotary)
        seen = torch.ones(1, q.shape[1], x.shape[1], x.shape[1]).tril().bool()
        seen[0, 0, 54, 61] = True
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return self.proj(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class LeakInCache(CausalSelfAttention):
    """Attention whose tokens see later ones if they reach the cache together."""

    def forward(self, x: Tensor, *args: Any, cache: Any = None, **kwargs: Any) -> Tensor:
        y = super().forward(x, *args, cache=cache, **kwargs)
        return y if cache is None else y + x.mean(1, keepdim=True) - x


def changed_gpt(attention: type[CausalSelfAttention]) -> Make:
    """Return a function that makes a GPT with another attention."""

    def make(config: Config, vocab_size: int) -> nn.Module:
        gpt = GPT(config.model, vocab_size, init=False)
        for layer, block in enumerate(gpt.blocks):
            block.attn = attention(config.model, layer)
        return gpt

    return make


LEAKS: dict[str, Make] = {
    **{f"blocks of {n}": lambda *_, n=n: leak_in_blocks(n) for n in (2, 17)},
    **{f"place {n}": lambda *_, n=n: leak_at(n) for n in range(3)},
    "weights of zero": lambda *_: leak_behind_zeros(),
    "attention of a changed GPT": changed_gpt(LeakInOneHead),
}


@pytest.mark.parametrize("name", LEAKS)
def test_a_model_that_sees_a_later_token_is_refused(name: str) -> None:
    with pytest.raises(UserError, match="depend on later tokens"):
        check(LEAKS[name])


@pytest.mark.parametrize("seed", range(6))
def test_bf16_rounds_more(seed: int) -> None:
    shape = tiny("llama", n_layer=3, block_size=T)
    check(
        lambda config, vocab_size: GPT(config.model, vocab_size).to(torch.bfloat16),
        shape,
        seed=seed,
    )


def test_the_tolerance_is_that_of_the_weights() -> None:
    gpt = GPT(tiny(), V)
    assert rounding_of(gpt) == ROUNDING
    assert rounding_of(gpt.to(torch.bfloat16)) == 4 * 2**-7


def test_a_gpt_with_another_result_through_its_cache_is_refused() -> None:
    with pytest.raises(UserError, match="computes other logits with its cache"):
        check(changed_gpt(LeakInCache))


def test_a_file_that_changes_our_attention_without_a_model_is_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forward = CausalSelfAttention.forward
    monkeypatch.setattr(
        CausalSelfAttention,
        "forward",
        lambda self, x, *args, **kwargs: forward(self, x, *args, **kwargs) + x.roll(-1, 1),
    )
    with pytest.raises(UserError, match=r"the logits of my\.py depend on later tokens"):
        check(None)  # type: ignore[arg-type]


def test_sequences_that_see_each_other_are_named_as_such() -> None:
    with pytest.raises(UserError, match="depend on the other sequences of a batch"):
        check(lambda *_: Mixer(Function(lambda x: x.mean(0, keepdim=True))))


class OfDocuments(nn.Module):
    """Average over the tokens before, of one document unless it `ignores` the documents."""

    def __init__(self, ignores: bool) -> None:
        super().__init__()
        self.inner = Mixer(nn.Identity())
        self.ignores = ignores

    def forward(self, tokens: Tensor, documents: Tensor) -> Tensor:
        seen = (documents[:, :, None] == documents[:, None]) | self.ignores
        mask = seen.tril().float()
        x = mask / mask.sum(-1, keepdim=True) @ self.inner.embedding(tokens)
        logits: Tensor = self.inner.head(x)
        return logits


def test_with_document_masks_a_token_that_sees_another_document_is_refused() -> None:
    check(lambda *_: OfDocuments(ignores=False), document_mask=True)
    with pytest.raises(UserError, match="depend on another document"):
        check(lambda *_: OfDocuments(ignores=True), document_mask=True)


@pytest.mark.slow
def test_one_head_of_a_deep_model_that_sees_one_later_token_is_refused() -> None:
    def make(config: Config, vocab_size: int) -> nn.Module:
        gpt = GPT(config.model, vocab_size, init=False)
        gpt.blocks[6].attn = LeakInOneHead(config.model, 6)
        return gpt

    shape = tiny("gpt2", n_layer=12, n_head=8, n_embd=256, block_size=T)
    with pytest.raises(UserError, match="depend on later tokens"):
        check(make, shape)


class LossOfTargets(GPT):
    """A GPT that reads the targets if it gets them, so that its logits alone are causal."""

    def forward(self, tokens: Tensor, targets: Tensor | None = None, **options: Any) -> Tensor:
        return super().forward(tokens if targets is None else targets, targets, **options)


def test_a_loss_that_is_not_the_cross_entropy_of_the_logits_is_refused() -> None:
    with pytest.raises(UserError, match="is not the cross entropy of its logits"):
        check(lambda config, vocab_size: LossOfTargets(config.model, vocab_size, init=False))


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_model_of_one_length_is_checked_with_that_length(ahead: int) -> None:
    class OneLength(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mask = Mask(torch.ones(2 * T, 2 * T).tril(ahead))

        def forward(self, x: Tensor) -> Tensor:
            if x.shape[1] != 2 * T:
                raise RuntimeError("another length")
            out: Tensor = self.mask(x)
            return out

    shape = tiny(n_layer=1, n_embd=C, block_size=2 * T)
    refused = pytest.raises(UserError, match="depend on later tokens")
    with refused if ahead else contextlib.nullcontext():
        check(lambda *_: Mixer(OneLength()), shape)


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_model_that_takes_no_float32_is_checked_in_the_precision_of_the_run(ahead: int) -> None:
    class HalfAlone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(C, C)
            self.mask = Mask(torch.ones(T, T).tril(ahead))

        def forward(self, x: Tensor) -> Tensor:
            x = self.layer(x)
            if x.dtype == torch.float32:
                raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
            out: Tensor = self.mask(x.float())
            return out

    refused = pytest.raises(UserError, match="depend on later tokens")
    with refused if ahead else contextlib.nullcontext():
        check(lambda *_: Mixer(HalfAlone()), precision="bf16")
    with pytest.raises(RuntimeError, match="FlashAttention"):
        check(lambda *_: Mixer(HalfAlone()))


@pytest.mark.parametrize("ahead", [0, 1])
def test_rounding_that_differs_between_rows_is_no_leak(ahead: int) -> None:
    """As in a product of a GPU that is divided between its multiprocessors."""
    mask = Mask(torch.ones(T, T).tril(ahead))

    def mix(x: Tensor) -> Tensor:
        row = torch.arange(len(x))[:, None, None]
        out: Tensor = mask(x) + 1e-4 * (row % 2)
        return out

    refused = pytest.raises(UserError, match="depend on later tokens")
    with refused if ahead else contextlib.nullcontext():
        check(lambda *_: Mixer(Function(mix)))


def test_a_leak_can_be_allowed() -> None:
    def make(*_: object) -> nn.Module:
        model = leak_in_blocks(2)
        model.causal = False
        return model

    check(make)


# --------------------------------------------------------------------------- causal models


class Convolution(nn.Module):
    """A causal convolution of three tokens, each eight behind the next."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv1d(C, C, 3, dilation=8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(F.pad(x.mT, (16, 0))).mT
        return out


def running_mean(x: Tensor) -> Tensor:
    return x.cumsum(1) / torch.arange(1, 1 + x.shape[1])[:, None]


CAUSAL: dict[str, Callable[[], nn.Module]] = {
    "a dilated convolution": Convolution,
    "a running mean": lambda: Function(running_mean),
}


@pytest.mark.parametrize("name", CAUSAL)
def test_a_causal_model_passes(name: str) -> None:
    check(lambda *_: Mixer(CAUSAL[name]()))


@pytest.mark.parametrize("preset", ["gpt2", "fast"])
def test_a_gpt_of_each_preset_passes(preset: str) -> None:
    shape = replace(tiny(preset, n_layer=2), block_size=T)
    check(changed_gpt(CausalSelfAttention), shape)
