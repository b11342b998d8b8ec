"""Documents within a row: each is computed separately, and ends at the right token."""

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import flex_attention

from accel_gpt.config.model import ModelConfig
from accel_gpt.model import documents, gpt
from accel_gpt.model.documents import (
    attention_mask,
    block_mask,
    dense_mask,
    positions,
    separate,
)
from accel_gpt.model.gpt import GPT
from accel_gpt.model.loss import IGNORE
from tests.conftest import tiny
from tests.model.test_gpt import VOCAB, make

EOT = 64
# no end; two documents and a part; two ends in a row; first and last token; only ends
ENDS = [(), (4, 9), (3, 4, 11), (0, 15), range(16)]
CONFIGS = {"gpt2": tiny(), "llama grouped": tiny("llama", n_kv_head=2)}
configs = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
# PyTorch's own warning when the compiler traces `create_block_mask`
traced_mask = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


def draw(length: int = 16, scale: int = 1, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Return tokens and targets (5, length); documents end at `scale` times `ENDS`."""
    generator = torch.Generator().manual_seed(seed)
    window = torch.randint(EOT, (len(ENDS), length + 1), generator=generator)
    for row, ends in enumerate(ENDS):
        window[row, [scale * end for end in ends]] = EOT
    return window[:, :-1], window[:, 1:]


def bounds(row: list[int]) -> list[tuple[int, int]]:
    """Return start and end of each document."""
    cuts = [i + 1 for i, token in enumerate(row) if token == EOT and i + 1 < len(row)]
    return list(pairwise([0, *cuts, len(row)]))


def every_document(tokens: Tensor) -> list[tuple[int, int, int]]:
    return [(row, a, b) for row, ids in enumerate(tokens.tolist()) for a, b in bounds(ids)]


def gradients(model: GPT, loss: Tensor) -> dict[str, Tensor]:
    names, weights = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, weights), strict=True))


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, gradient in expected.items():
        torch.testing.assert_close(
            actual[name], gradient, atol=1e-5, rtol=1e-5, msg=lambda m, name=name: f"{name}: {m}"
        )


@given(st.lists(st.booleans(), min_size=1, max_size=40))
def test_documents_targets_and_positions_of_any_row(ends: list[bool]) -> None:
    tokens = torch.tensor([[EOT if end else 1 for end in ends], [1] * len(ends)])
    targets = torch.arange(2 * len(ends)).view(2, -1)
    kept, numbers = separate(tokens, targets, EOT)
    assert targets.tolist() == torch.arange(2 * len(ends)).view(2, -1).tolist()
    assert numbers[1].tolist() == [0] * len(ends)
    assert kept[1].tolist() == targets[1].tolist()
    pieces = bounds(tokens[0].tolist())
    assert numbers[0].tolist() == [n for n, (a, b) in enumerate(pieces) for _ in range(a, b)]
    assert positions(numbers)[0].tolist() == [i for a, b in pieces for i in range(b - a)]
    assert positions(numbers)[1].tolist() == list(range(len(ends)))
    expected = [IGNORE if end else i for i, end in enumerate(ends)]
    assert kept[0].tolist() == expected


@configs
def test_loss_and_gradients_are_those_of_documents_alone_weighted_by_targets(
    config: ModelConfig,
) -> None:
    model, (tokens, targets) = make(config), draw()
    kept, numbers = separate(tokens, targets, EOT)
    loss = model(tokens, kept, documents=numbers)
    nats, count = torch.zeros(()), 0
    for row, a, b in every_document(tokens):
        # the last document continues after the row
        inside = b - 1 if tokens[row, b - 1] == EOT else b
        if targets_inside := inside - a:
            alone = model(tokens[row : row + 1, a:b])[0, :targets_inside]
            nats = nats + F.cross_entropy(alone, targets[row, a:inside], reduction="sum")
            count += targets_inside
    assert count == (tokens != EOT).sum()
    expected = nats / count
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-5)
    assert_same(gradients(model, loss), gradients(model, expected))


def test_nothing_asks_the_device_for_a_value() -> None:
    """A meta tensor has no values: any read of one raises."""
    model = GPT(CONFIGS["llama grouped"], VOCAB).to("meta")
    tokens = torch.zeros(2, 16, dtype=torch.int64, device="meta")
    kept, numbers = separate(tokens, tokens, EOT)
    model(tokens, kept, documents=numbers).backward()
    assert block_mask(numbers).kv_indices.is_meta


def test_the_mask_of_any_device_is_causal_within_documents() -> None:
    _, numbers = separate(*draw(48, scale=3), EOT)
    expected = torch.zeros(5, 1, 48, 48, dtype=torch.bool)
    for row, ids in enumerate(numbers.tolist()):
        for query in range(48):
            for key in range(query + 1):
                expected[row, 0, query, key] = ids[query] == ids[key]
    assert torch.equal(dense_mask(numbers), expected)
    flex = flex_attention.create_mask(block_mask(numbers).mask_mod, 5, 1, 48, 48, "cpu")
    assert torch.equal(flex, expected)


@pytest.fixture
def flex_gradients_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch refuses gradients of FlexAttention on CPU, as inductor has no kernel; without
    inductor the definition of the operator computes them.
    """
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *args: None)
    torch._dynamo.reset()


@pytest.mark.slow
@traced_mask
@pytest.mark.usefixtures("flex_gradients_on_cpu")
@pytest.mark.parametrize("mask", [dense_mask, block_mask])
def test_a_compiled_model_is_one_graph_and_equals_the_dense_one(
    mask: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make(CONFIGS["llama grouped"]).train()

    def loss_of(tokens: Tensor, targets: Tensor) -> Tensor:
        kept, numbers = separate(tokens, targets, EOT)
        loss: Tensor = model(tokens, kept, documents=numbers)
        return loss

    compiled = torch.compile(loss_of, backend="aot_eager", fullgraph=True)
    for seed in (1, 2):  # the second mask must not cause a recompile
        tokens, targets = draw(seed=seed)
        expected = loss_of(tokens, targets)
        with monkeypatch.context() as patch:
            patch.setattr(gpt, "attention_mask", lambda numbers, *_: mask(numbers))
            with torch._dynamo.config.patch(error_on_recompile=seed > 1):
                loss = compiled(tokens, targets)
        torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-5)
        assert_same(gradients(model, loss), gradients(model, expected))


@pytest.mark.parametrize(
    ("device", "head_size", "dropout", "expected"),
    [
        ("cuda", 64, 0.0, "blocks"),
        ("cuda", 8, 0.0, "dense"),
        ("cuda", 64, 0.1, "dense"),
        ("cpu", 64, 0.0, "dense"),
    ],
)
def test_flex_attention_is_taken_where_it_can_do_the_work(
    device: str, head_size: int, dropout: float, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(name: str) -> Callable[[Tensor], str]:
        return lambda numbers: name

    monkeypatch.setattr(documents, "block_mask", answer("blocks"))
    monkeypatch.setattr(documents, "dense_mask", answer("dense"))
    with FakeTensorMode():
        numbers = torch.zeros(2, 16, dtype=torch.int32, device=device)
    assert attention_mask(numbers, head_size, dropout) == expected


@pytest.mark.gpu
@traced_mask
@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("preset", ["gpt2", "llama"])
def test_on_cuda_the_flex_kernel_equals_the_dense_mask(
    preset: str, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny(preset, n_embd=64, n_kv_head=2, block_size=200)  # heads of 16 channels
    model = make(config).cuda().train()
    tokens, targets = (x.cuda() for x in draw(200, scale=12))
    kept, numbers = separate(tokens, targets, EOT)
    assert isinstance(attention_mask(numbers, config.head_size, 0.0), flex_attention.BlockMask)
    torch._dynamo.reset()
    run = torch.compile(model, fullgraph=True) if compiled else model
    loss = run(tokens, kept, documents=numbers)
    ours = gradients(model, loss)
    monkeypatch.setattr(gpt, "attention_mask", lambda numbers, *args: dense_mask(numbers))
    expected = model(tokens, kept, documents=numbers)
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-5)
    assert_same(ours, gradients(model, expected))
