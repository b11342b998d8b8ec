"""The backward passes of our own give the gradients of autograd, in fewer passes."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accel_gpt.model import passes
from accel_gpt.model.gpt import GPT, rotary_table
from accel_gpt.model.passes import (
    ROWS,
    RMSNorm,
    causal_attention,
    products_pay,
    rotate,
    squared_relu,
)
from tests.conftest import tiny

pytestmark = pytest.mark.usefixtures("avx512")
B, T, H, D = 3, 16, 4, 8  # as in `tiny`


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def gradients(out: Tensor, *given: Tensor) -> list[Tensor]:
    """Of a sum that weighs each value differently."""
    return list(torch.autograd.grad((out * drawn(*out.shape)).sum(), given))


def plainly_rotated(x: Tensor, rotary: Tensor) -> Tensor:
    """Each pair of channels as a complex number, times the one of its angle."""
    pairs = torch.complex(*x.chunk(2, dim=-1))
    (cos, _), (_, sin) = rotary[0].chunk(2, -1), rotary[1].chunk(2, -1)
    turned = pairs * torch.complex(cos, sin)
    return torch.cat((turned.real, turned.imag), dim=-1)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])  # the first is near eps
def test_rmsnorm_is_that_of_torch(weighted: bool, scale: float) -> None:
    ours, theirs = (kind(D, 1e-6, weighted) for kind in (RMSNorm, nn.RMSNorm))
    x = (scale * drawn(B, T, H, D)).transpose(1, 2).requires_grad_()  # as heads lie
    given = [x]
    if weighted:
        for module in (ours, theirs):
            module.weight.data.copy_(drawn(D))
    found = gradients(ours(x), *given, *ours.parameters())
    expected = gradients(theirs(x), *given, *theirs.parameters())
    torch.testing.assert_close(ours(x), theirs(x))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5 / scale)
    with torch.no_grad():
        assert torch.equal(ours(x), ours(x.detach().requires_grad_()))


def test_rmsnorm_of_zeros_is_zero() -> None:
    x = torch.zeros(2, D, requires_grad=True)
    out = RMSNorm(D, 1e-6, False)(x)
    assert not out.any()
    assert gradients(out, x)[0].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_squared_relu_is_that_of_autograd(dtype: torch.dtype) -> None:
    x = drawn(B, T, D).to(dtype).requires_grad_()
    assert torch.equal(squared_relu(x), F.relu(x).square())
    torch.testing.assert_close(gradients(squared_relu(x), x), gradients(F.relu(x).square(), x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("by_row", [False, True])
def test_rotation_is_a_product_of_complex_numbers(dtype: torch.dtype, by_row: bool) -> None:
    rotary = rotary_table(tiny("llama"), torch.device("cpu"))  # (2, T, 1, D)
    if by_row:  # as with documents
        rotary = rotary[:, torch.randint(T, (B, T))]
    x = drawn(B, T, H, D).to(dtype).requires_grad_()
    expected = plainly_rotated(x.float(), rotary)
    close = {} if dtype == torch.float32 else {"rtol": 0.01, "atol": 0.01}
    torch.testing.assert_close(rotate(x, rotary).float(), expected, **close)
    torch.testing.assert_close(
        gradients(rotate(x, rotary), x), gradients(expected, x), check_dtype=False, **close
    )
    torch.testing.assert_close(rotate(rotate(x, rotary), rotary, -1), x, **close)


@pytest.mark.parametrize("tokens", [1, ROWS, ROWS + 1, 3 * ROWS])
@pytest.mark.parametrize("shared", [False, True])
def test_attention_is_that_of_torch(tokens: int, shared: bool) -> None:
    """In float32, where nothing is rounded away; heads lie as the model makes them."""
    kv_heads = 2 if shared else H
    drawing = torch.Generator().manual_seed(2)
    q, k, v = (
        torch.randn(2, tokens, heads, D, generator=drawing).transpose(1, 2).requires_grad_()
        for heads in (H, kv_heads, kv_heads)
    )
    found = causal_attention(q, k, v)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shared)
    torch.testing.assert_close(found, expected)
    ours, theirs = gradients(found, q, k, v), gradients(expected, q, k, v)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("spread", [1, 3, 8, 20])
@pytest.mark.parametrize("head_size", [32, 64])
def test_attention_in_bf16_is_exact_to_rounding(spread: int, head_size: int) -> None:
    """Of scores as large as a trained model has, too. A unit of bf16 is 0.8 %."""
    drawing = torch.Generator().manual_seed(5)
    q, k, v, coming = torch.randn(4, 2, H, 160, head_size, generator=drawing).bfloat16().unbind(0)
    given = [x.detach().requires_grad_() for x in (spread * q, k, v)]
    wide = [x.detach().double().requires_grad_() for x in given]
    found = torch.autograd.grad(causal_attention(*given), given, coming)
    exact = F.scaled_dot_product_attention(*wide, is_causal=True)
    for ours, theirs in zip(found, torch.autograd.grad(exact, wide, coming.double()), strict=True):
        assert (ours - theirs).norm() < 0.007 * theirs.norm()


@pytest.mark.parametrize("capability", ["AVX512", "AVX2"])
def test_products_are_left_alone_where_the_processor_has_no_wide_ones(
    capability: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passes, "HAS_AVX512", capability == "AVX512")
    q = drawn(1, H, T, D).bfloat16().requires_grad_()
    assert products_pay(q, q) == (capability == "AVX512")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile uses torch.jit
@pytest.mark.parametrize(
    ("preset", "compiled"),
    [
        ("gpt2", False),
        ("llama", False),
        pytest.param("llama", True, marks=pytest.mark.slow),
        pytest.param("gpt2", True, marks=[pytest.mark.slow, pytest.mark.long]),
    ],
)
def test_bf16_trains_by_attention_of_ours(
    preset: str, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its gradients are as near to those of float32 as those of PyTorch's backward pass."""
    torch.manual_seed(3)
    gpt = GPT(tiny(preset, n_embd=64, block_size=160), 97)
    tokens = torch.randint(97, (2, 161))
    calls: list[int] = []

    def counted(*given: Tensor) -> Tensor:
        calls.append(1)
        return causal_attention(*given)

    monkeypatch.setattr("accel_gpt.model.gpt.causal_attention", counted)

    def gradient(dtype: torch.dtype | None) -> Tensor:
        gpt.zero_grad()
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            loss = gpt(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        return torch.cat([weight.grad.flatten() for weight in gpt.parameters()])

    exact = gradient(None)
    assert not calls
    with monkeypatch.context() as patched:
        patched.setattr("accel_gpt.model.gpt.products_pay", lambda *_: False)
        theirs = (gradient(torch.bfloat16) - exact).norm()
    if compiled:
        gpt.compile()
    ours = (gradient(torch.bfloat16) - exact).norm()
    assert calls
    assert 0 < ours < 1.2 * theirs


@pytest.mark.parametrize("function", ["norm", "activation", "rotation"])
def test_nothing_beside_the_input_is_kept(function: str) -> None:
    x = drawn(B, T, H, D).requires_grad_()
    rotary = rotary_table(tiny("llama"), torch.device("cpu"))
    calls = {
        "norm": lambda: RMSNorm(D, 1e-6, False)(x),
        "activation": lambda: squared_relu(x),
        "rotation": lambda: rotate(x, rotary),
    }
    kept: list[int] = []

    def note(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        calls[function]()
    large = {"norm": [x.numel(), B * T * H], "activation": [x.numel()], "rotation": [2 * T * D]}
    assert kept == large[function]
