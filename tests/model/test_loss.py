"""Head and loss by chunks of tokens, against the plain form; activations computed again."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from accel_gpt.model import loss as module
from accel_gpt.model.gpt import GPT
from accel_gpt.model.loss import (
    IGNORE,
    add_product,
    chunked_loss,
)
from accel_gpt.model.sizes import padded_vocab_size
from tests.conftest import THREADS, tiny

VOCAB, ROWS, C = 100, 128, 32
caps = pytest.mark.parametrize("cap", [None, 2.0], ids=["plain", "capped"])


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 16 tokens, however few logits there are."""
    monkeypatch.setattr(module, "WHOLE_LOGITS", 0)
    monkeypatch.setattr(module, "chunk_tokens", lambda *_: 16)


def draw(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states (3, 11, C), a head with nonzero padding, and targets.

    The last chunk is one token, and the targets of a whole chunk are ignored.
    """
    x = torch.randn(3, 11, C, dtype=dtype, requires_grad=True)
    weight = torch.randn(ROWS, C, dtype=dtype)
    weight[VOCAB:] = 100.0
    targets = torch.randint(VOCAB, (3, 11))
    targets[0], targets[1, :5], targets[2, 3] = IGNORE, IGNORE, IGNORE
    return x, weight.requires_grad_(), targets


def plain(x: Tensor, weight: Tensor, targets: Tensor, cap: float | None) -> Tensor:
    """Return the mean loss by its definition, in the type of `x`."""
    logits = F.linear(x, weight)[..., :VOCAB].flatten(0, 1)
    logits = cap * torch.tanh(logits / cap) if cap else logits
    real = targets.flatten() != IGNORE
    picked = logits.log_softmax(-1)[real].gather(1, targets.flatten()[real, None])
    return -picked.sum() / real.sum()


@caps
@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 3e-6)])
def test_loss_and_gradients_equal_the_definition(
    cap: float | None, dtype: torch.dtype, tolerance: float
) -> None:
    x, weight, targets = draw(dtype)
    loss = chunked_loss(x, weight, targets, VOCAB, cap)
    found = torch.autograd.grad(3 * loss, (x, weight))
    wide, table = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    expected = plain(wide, table, targets, cap)
    wanted = torch.autograd.grad(3 * expected, (wide, table))
    close = {"rtol": tolerance, "atol": tolerance, "check_dtype": False}
    torch.testing.assert_close(loss, expected, **close)
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(one, other, **close)
    assert not found[0][0].any()  # ignored
    assert not found[1][VOCAB:].any()  # padded


@caps
@pytest.mark.usefixtures("small_chunks")
def test_rows_have_the_sums_of_their_tokens(cap: float | None) -> None:
    x, weight, targets = draw()
    with torch.no_grad():
        found = chunked_loss(x, weight, targets, VOCAB, cap, per_sequence=True)
        for row, loss in enumerate(found[1:], 1):
            count = (targets[row] != IGNORE).sum()
            expected = plain(x[row : row + 1], weight, targets[row], cap) * count
            torch.testing.assert_close(loss, expected)
    assert found[0] == 0


@pytest.mark.usefixtures("small_chunks")
def test_in_bf16_the_gradient_is_not_scaled_by_a_rounded_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """bf16 would round the scale 1.332 to 1.328, and so change every gradient by 0.29 %."""
    chunks, types = module._chunks, list[torch.dtype]()
    monkeypatch.setattr(
        module, "_chunks", lambda x, *args: types.append(x.dtype) or chunks(x, *args)
    )
    x = torch.randn(4, 512, C, requires_grad=True)
    weight = torch.randn(ROWS, C)
    targets = torch.randint(VOCAB, (4, 512))
    with torch.autocast("cpu", torch.bfloat16):
        total = targets.numel() * chunked_loss(x, weight, targets, VOCAB, None)
    (exact,) = torch.autograd.grad(total, x, retain_graph=True)  # times 1: not rounded
    (found,) = torch.autograd.grad(1.332 * total, x)
    assert types == [torch.bfloat16]
    scale = (found * exact).sum() / exact.square().sum()
    assert scale.item() == pytest.approx(1.332, abs=3e-4)


@pytest.mark.usefixtures("small_chunks")
def test_in_fp16_the_sums_over_a_chunk_do_not_overflow() -> None:
    """They must not overflow before the loss scaler, since a lower scale would not help."""
    size = 16_000.0  # times the 16 tokens of a chunk: four times what float16 holds
    x = (size * (1 + 0.1 * torch.rand(1, 40, C))).half().requires_grad_()
    weight = (torch.randn(ROWS, C) / size / 10).requires_grad_()
    targets = torch.full((1, 40), 7)
    with torch.autocast("cpu", torch.float16):
        loss = chunked_loss(x, weight, targets, VOCAB, None)
    (2**16 * loss).backward()
    wide = x.detach().double()
    table = weight.detach().double().requires_grad_()
    expected = plain(wide, table, targets, None)
    (2**16 * expected).backward()
    torch.testing.assert_close(loss, expected, rtol=1e-3, atol=0, check_dtype=False)
    assert weight.grad is not None
    assert table.grad is not None
    assert (weight.grad - table.grad).norm() < 1e-2 * table.grad.norm()


@pytest.mark.usefixtures("small_chunks")
def test_nothing_but_ignored_targets_gives_zero() -> None:
    x, weight, targets = draw()
    loss = chunked_loss(x, weight, targets.fill_(IGNORE), VOCAB, None)
    loss.backward()
    assert loss == 0
    assert weight.grad is not None
    assert not weight.grad.any()


def gradients(
    model: GPT, call: Callable[..., Tensor] | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of fixed tokens, and the gradients by name."""
    tokens = torch.arange(48).view(3, 16) * 7 % VOCAB
    targets = tokens.roll(-1, 1)
    targets[1, :9] = IGNORE
    torch.manual_seed(1)  # dropout
    loss = (model if call is None else call)(tokens, targets)
    loss.backward()
    found = {name: w.grad.clone() for name, w in model.named_parameters() if w.grad is not None}
    model.zero_grad()
    return loss.detach(), found


@pytest.mark.parametrize("preset", ["gpt2", "fast"])
def test_a_model_has_the_same_gradients_in_chunks(
    preset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = GPT(tiny(preset), VOCAB).train()
    loss, whole = gradients(model)
    monkeypatch.setattr(module, "WHOLE_LOGITS", 0)
    monkeypatch.setattr(module, "chunk_tokens", lambda *_: 16)
    in_chunks, parts = gradients(model)
    torch.testing.assert_close(in_chunks, loss)
    for name, gradient in whole.items():
        torch.testing.assert_close(parts[name], gradient, rtol=1e-5, atol=1e-7)


@pytest.mark.usefixtures("small_chunks")
def test_no_more_than_a_chunk_of_logits_is_held() -> None:
    model = GPT(tiny(block_size=256), 1000).train()
    tokens = torch.randint(1000, (1, 256))
    cpu = torch.profiler.ProfilerActivity.CPU
    torch.set_num_threads(1)  # attention on a CPU has a buffer for each thread
    with torch.profiler.profile(activities=[cpu], profile_memory=True) as profile:
        model(tokens, tokens).backward()
    torch.set_num_threads(THREADS)
    events = profile.profiler.kineto_results.events()  # type: ignore[union-attr]
    largest = max(e.nbytes() for e in events if e.name() == "[memory]")
    head = 4 * padded_vocab_size(1000) * C
    assert head <= largest < 1.1 * head  # its gradient, or a buffer of the matrix product
    assert 4 * 16 * 1000 < largest < 4 * 256 * 1000


@pytest.mark.slow
@pytest.mark.usefixtures("small_chunks")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile uses torch.jit
def test_a_compiled_model_has_one_graph_and_the_same_gradients() -> None:
    model = GPT(tiny("fast"), VOCAB).train()
    model.recompute = True
    expected = gradients(model)
    torch._dynamo.reset()
    call = torch.compile(model, backend="aot_eager", fullgraph=True)
    loss, found = gradients(model, call=call)
    torch.testing.assert_close(loss, expected[0])
    for name, gradient in expected[1].items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_activations_computed_again_change_no_bit(dropout: float) -> None:
    model = GPT(tiny(dropout=dropout), VOCAB).train()
    loss, kept = gradients(model)
    model.recompute = True
    again, found = gradients(model)
    assert torch.equal(again, loss)
    assert all(torch.equal(found[name], gradient) for name, gradient in kept.items())


# --------------------------------------------------------------------------- on a GPU


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_in_half_precision_are_added_in_float32(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `out_dtype` does on a GPU; rounding each product first loses ten times as much."""
    left = [torch.randn(24, 16, dtype=dtype) for _ in range(8)]
    right = [torch.randn(16, 8, dtype=dtype) for _ in range(8)]
    exact = sum((a.double() @ b.double() for a, b in zip(left, right, strict=True)), torch.zeros(1))
    plain = torch.addmm

    def addmm(*operands: Tensor, out_dtype: torch.dtype | None = None, **options: Any) -> Tensor:
        return plain(*(x.to(out_dtype or x.dtype) for x in operands), **options)

    errors = {}
    for exactly in (True, False):
        monkeypatch.setattr(module, "adds_in_float32", lambda *_, known=exactly: known)
        monkeypatch.setattr(torch, "addmm", addmm)
        total = torch.full((24, 8), torch.nan)  # the first product overwrites it
        for number, (a, b) in enumerate(zip(left, right, strict=True)):
            add_product(total, a, b, first=number == 0)
        errors[exactly] = ((total - exact).norm() / exact.norm()).item()
    assert errors[True] < 1e-6
    assert errors[False] > 1e-4


def test_a_device_without_memory_is_not_one_without_the_product(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else a trial that runs out of memory would let the whole run round each product."""

    def full(*_: Any, **__: Any) -> Tensor:
        raise torch.OutOfMemoryError("full")

    module.adds_in_float32.cache_clear()
    monkeypatch.setattr(torch, "addmm", full)
    with pytest.raises(torch.OutOfMemoryError):
        module.adds_in_float32(torch.device("cpu"), torch.float16)
    assert module.adds_in_float32.cache_info().currsize == 0
