"""The decoder: causality, equality with transformers, initial weights, loss, precision, compile."""

import contextlib
import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from accel_gpt.config.model import PRESETS, ModelConfig
from accel_gpt.model.gpt import GPT, evaluating
from accel_gpt.model.layers import KVCache, dot_product_attention, rotary_table, rotate
from tests.conftest import tiny

VOCAB = 65  # padded to 128


SHAPES = {
    "gpt2": tiny(),
    "gpt2 grouped, no bias": tiny(n_kv_head=2, bias=False, tie_embeddings=False),
    "llama": tiny("llama"),
    "llama grouped, tied": tiny("llama", n_kv_head=2, tie_embeddings=True),
    "qwen3 grouped, wide heads": tiny("qwen3", n_kv_head=2, head_dim=12),
    "fast": tiny("fast"),
}
shapes = pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES.keys())


def make(config: ModelConfig, vocab_size: int = VOCAB, seed: int = 0) -> GPT:
    """Return a model in evaluation mode, with weights large enough to show errors."""
    torch.manual_seed(seed)
    model = GPT(config, vocab_size).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(5) if weight.ndim > 1 else weight.add_(0.1 * torch.randn_like(weight))
    return model


def draw(rows: int = 3, length: int = 16, seed: int = 1) -> Tensor:
    return torch.randint(VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


@shapes
def test_a_later_token_never_changes_earlier_logits(config: ModelConfig) -> None:
    model, tokens = make(config), draw()
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % VOCAB
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.allclose(before[:, 9:], after[:, 9:], atol=1e-3)


@shapes
def test_padded_rows_are_zero_get_no_gradient_and_show_nowhere(config: ModelConfig) -> None:
    torch.manual_seed(0)
    model = GPT(config, VOCAB)
    assert model.padded_vocab_size == len(model.wte.weight) == len(model.head.weight) == 128
    assert model(draw()).shape == (3, 16, VOCAB)
    loss = model(draw(), draw(seed=3))
    loss.backward()
    with torch.no_grad():
        for table in (model.wte.weight, model.head.weight):
            assert not table[VOCAB:].any()
            assert table.grad is not None
            assert not table.grad[VOCAB:].any()
            assert table.grad[:VOCAB].any()
        for table in (model.wte.weight, model.head.weight):
            table[VOCAB:] = 100.0
    assert torch.equal(model(draw(), draw(seed=3)), loss)


@pytest.mark.parametrize("preset", ["gpt2", "llama"])
def test_a_model_from_the_meta_device_is_completed_by_init_weights(preset: str) -> None:
    direct = GPT(tiny(preset), VOCAB)
    with torch.device("meta"):
        late = GPT(tiny(preset), VOCAB)
    late.to_empty(device="cpu")
    for model in (direct, late):
        torch.manual_seed(0)
        model.init_weights()
    for model in (direct, late):
        assert (model.head.weight is model.wte.weight) == (preset == "gpt2")
        assert not any("rotary" in name for name in model.state_dict())
    assert torch.equal(direct(draw()), late(draw()))


def test_a_pair_of_channels_turns_by_its_position_as_a_complex_number() -> None:
    config = tiny("llama")
    D, T = config.head_size, config.block_size
    frequencies = config.rope_theta ** -(torch.arange(0, D, 2) / D)
    angles = torch.outer(torch.arange(T), frequencies)
    x = torch.randn(T, D)
    turned = torch.complex(*x.chunk(2, dim=-1)) * torch.polar(torch.ones(T, D // 2), angles)
    found = rotate(x[None, :, None], rotary_table(config))
    expected = torch.cat((turned.real, turned.imag), dim=-1)
    torch.testing.assert_close(found[0, :, 0], expected)


class Devices(TorchDispatchMode):
    """Notes on which device each operation is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.of: dict[str, str] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.of[func.overloadpacket.__name__] = result.device.type
        return result


def test_the_rotary_table_has_the_same_bits_on_every_device() -> None:
    """A new run computes it after its model has moved to the GPU, a resumed one before."""
    model = GPT.allocate(tiny("llama"), VOCAB, "meta")
    with Devices() as devices:
        model.build_buffers()
    assert model.rotary is not None
    assert model.rotary.is_meta
    assert devices.of["cos"] == devices.of["pow"] == "cpu"


@shapes
def test_logits_with_a_cache_equal_those_without(config: ModelConfig) -> None:
    model, tokens = make(config), draw()
    with torch.no_grad():
        cache = KVCache(config)
        parts = [model(part, cache=cache) for part in tokens.split((7, 1, 1, 5, 2), dim=1)]
        assert cache.position == 16
        torch.testing.assert_close(torch.cat(parts, 1), model(tokens), atol=1e-5, rtol=1e-5)
        last = model(tokens, last_only=True)
        torch.testing.assert_close(last, model(tokens)[:, -1:], atol=1e-5, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:Mismatch dtype")  # QKNorm is float32 beside float64 weights
@pytest.mark.parametrize("preset", PRESETS)
def test_a_residual_stream_in_bf16_costs_little_of_the_gradient(preset: str) -> None:
    """Against the gradient in float64."""
    model = make(tiny(preset, zero_init=False)).train()
    tokens = draw()
    exact = copy.deepcopy(model).double()
    exact.build_buffers()
    exact(tokens, tokens.roll(-1, 1)).backward()
    inputs: list[torch.dtype] = []
    model.blocks[1].register_forward_pre_hook(lambda _, given: inputs.append(given[0].dtype))
    model.bf16_residual = True
    with torch.autocast("cpu", torch.bfloat16):
        model(tokens, tokens.roll(-1, 1)).backward()
    assert inputs == [torch.bfloat16]
    found, wanted = (
        nn.utils.parameters_to_vector([p.grad for p in net.parameters()]) for net in (model, exact)
    )
    assert found.dtype == torch.float32
    assert (found - wanted).norm() < 0.02 * wanted.norm()


@pytest.mark.parametrize("spread", [1, 20])
def test_attention_in_bf16_is_exact_to_rounding(spread: int) -> None:
    """Also for scores as large as in a trained model. A unit of bf16 is 0.8 %."""
    draw = torch.Generator().manual_seed(5)
    shapes = [(2, heads, 160, 32) for heads in (4, 2, 2, 4)]
    q, k, v, grad = (torch.randn(shape, generator=draw).bfloat16() for shape in shapes)
    given = [x.detach().requires_grad_() for x in (spread * q, k, v)]
    exact = [x.detach().double().requires_grad_() for x in given]
    with torch.autocast("cpu", torch.bfloat16):
        found = dot_product_attention(*given, None, 0.0, True)
    expected = F.scaled_dot_product_attention(*exact, is_causal=True, enable_gqa=True)
    assert found.dtype == torch.bfloat16
    pairs = zip(
        [found, *torch.autograd.grad(found, given, grad)],
        [expected, *torch.autograd.grad(expected, exact, grad.double())],
        strict=True,
    )
    for ours, theirs in pairs:
        assert (ours - theirs).norm() < 0.003 * theirs.norm()


def test_dropout_falls_on_embedding_attention_and_both_residuals() -> None:
    torch.manual_seed(0)
    model, seen, heads = GPT(tiny(dropout=0.25), VOCAB).train(), dict[str, Tensor](), list[Tensor]()
    block = model.blocks[0]
    block.register_forward_pre_hook(lambda _, given: seen.update(embedding=given[0]))
    block.attn.register_forward_hook(lambda *call: seen.update(attention=call[-1]))
    block.mlp.register_forward_hook(lambda *call: seen.update(mlp=call[-1]))
    block.attn.proj.register_forward_pre_hook(lambda _, given: heads.append(given[0]))
    model(draw(rows=30))
    zeros = {name: (values == 0).double().mean().item() for name, values in seen.items()}
    assert zeros == pytest.approx(dict.fromkeys(("embedding", "attention", "mlp"), 0.25), abs=0.02)
    same = torch.randn(3, 16, 32)
    for _ in range(2):
        block.attn(same)
    assert not torch.allclose(heads[-1], heads[-2])  # of the attention to each token


def test_evaluating_has_no_dropout_and_restores_the_mode() -> None:
    model = GPT(tiny(dropout=0.5), VOCAB)
    with contextlib.suppress(KeyError), evaluating(model):
        assert not model(draw()).requires_grad
        assert torch.equal(model(draw()), model(draw()))
        raise KeyError
    assert model.training
    with evaluating(model.eval()):
        pass
    assert not model.training


def test_with_zero_init_every_block_passes_on_what_it_gets_and_learns() -> None:
    model, tokens = GPT(tiny("fast", zero_init=True), VOCAB), draw()
    inputs = torch.randn(2, 16, 32)
    for block in model.blocks:
        assert torch.equal(block(inputs, model.rotary), inputs)
        assert block.attn.qkv.weight.std() > 0
    assert PRESETS["fast"]["zero_init"] is True
    model(tokens, tokens).backward()
    assert all(block.mlp.down.weight.grad.norm() > 0 for block in model.blocks)
