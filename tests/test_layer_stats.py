"""Statistics of layers: equal to plain arithmetic, alone in the trackers, without a trace."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from accel_gpt.model.documents import separate
from accel_gpt.model.gpt import GPT
from accel_gpt.model.layers import CausalSelfAttention
from accel_gpt.training import layer_stats as stats
from tests.conftest import launch, tiny
from tests.test_train import assert_same_weights, records, weights

Arguments = Callable[..., list[str]]
VOCAB = 65
TOKENS = torch.randint(VOCAB, (3, 16), generator=torch.Generator().manual_seed(4))


@pytest.fixture
def accelerator() -> Accelerator:
    return Accelerator(cpu=True)


def make(*arguments: Any, **changes: Any) -> GPT:
    torch.manual_seed(0)
    return GPT(tiny(*arguments, **{"init_std": 0.3, **changes}), VOCAB)


def length(tensors: Iterator[Tensor]) -> float:
    return math.sqrt(sum(x * x for t in tensors for x in t.detach().flatten().tolist()))


def test_norms_are_those_of_plain_arithmetic() -> None:
    model = make()
    model(TOKENS, TOKENS).backward()
    true_norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    old = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    before = stats.copies(model)
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    found = {k: v.item() for k, v in stats.weight_stats(model, before, true_norm).items()}
    names = ["embedding", "position", "00.attn", "00.mlp", "01.attn", "01.mlp", "norm"]
    assert [key for key in found if key.startswith("weight_norm/")] == [
        f"weight_norm/{name}" for name in names
    ]
    now = dict(model.named_parameters())
    starts = ("blocks.1.norm_2.", "blocks.1.mlp.")
    mlp = [name for name in now if name.startswith(starts)]
    assert len(mlp) == 6
    weight = length(now[name] for name in mlp)
    update = length(now[name] - old[name] for name in mlp)
    clip = 0.01 / true_norm.item()
    assert found["weight_norm/01.mlp"] == pytest.approx(weight)
    assert found["update_norm/01.mlp"] == pytest.approx(update, rel=1e-3)  # a small difference
    assert found["update_ratio/01.mlp"] == pytest.approx(update / weight, rel=1e-3)
    gradient = length(now[name].grad for name in mlp) / clip  # type: ignore[misc]
    assert found["grad_norm/01.mlp"] == pytest.approx(gradient, rel=1e-4)
    assert update == pytest.approx(0.5 * gradient * clip, rel=1e-3)
    parts = [value for key, value in found.items() if key.startswith("grad_norm/")]
    assert math.hypot(*parts) == pytest.approx(true_norm.item(), rel=1e-5)


def test_an_untied_head_is_a_part_and_weightless_norms_are_none() -> None:
    assert list(stats.parts(make("llama")))[-2:] == ["norm", "head"]
    assert list(stats.parts(make("fast"))) == [
        *("embedding", "00.attn", "00.mlp", "01.attn", "01.mlp", "head")
    ]
    for preset in ("gpt2", "llama", "qwen3", "fast"):
        model = make(preset)
        found = [weight for weights in stats.parts(model).values() for weight in weights]
        assert sorted(map(id, found)) == sorted(map(id, model.parameters()))


def test_activations_are_those_of_each_block(accelerator: Accelerator) -> None:
    model = make("llama", dropout=0.5).train()
    found = stats.activation_stats(model, TOKENS, None, accelerator)
    assert all(module.training and not module._forward_hooks for module in model.modules())
    model.eval()
    with torch.no_grad():
        x = model.wte(TOKENS)
        for layer, block in enumerate(model.blocks):
            attended = block.attn(block.norm_1(x), model.rotary)
            added = block.mlp(block.norm_2(x + attended))
            x = x + attended + added
            for name, tensor in (("rms", x), ("attn_rms", attended), ("mlp_rms", added)):
                expected = tensor.square().mean().sqrt()
                torch.testing.assert_close(found[f"{name}/{layer:02d}"], expected)


def reference(attention: CausalSelfAttention, x: Tensor, rotary: Any, seen: Tensor) -> float:
    """Mean entropy, one query at a time in Python; `seen` (B, T, T) of booleans."""
    q, k, _ = attention.project(x, rotary)
    B, H, T, D = q.shape
    group = H // k.shape[1]
    values = []
    for b in range(B):
        for h in range(H):
            for t in range(T):
                keys = k[b, h // group][seen[b, t]]
                weights = [math.exp(score) for score in (keys @ q[b, h, t] / D**0.5).tolist()]
                shares = [weight / sum(weights) for weight in weights]
                values.append(-sum(share * math.log(share) for share in shares if share))
    return sum(values) / len(values)


@pytest.mark.parametrize("documents", [False, True])
def test_entropy_is_that_of_a_plain_softmax(documents: bool, accelerator: Accelerator) -> None:
    model = make("qwen3", n_kv_head=2, n_layer=1)
    numbers = separate(TOKENS, TOKENS, int(TOKENS[0, 5]))[1] if documents else None
    seen = torch.ones(2, 16, 16, dtype=torch.bool).tril()
    if numbers is not None:
        assert numbers[:2].max() > 0
        seen = seen & (numbers[:2, :, None] == numbers[:2, None, :])
    inputs: list[Any] = []
    hook = model.blocks[0].attn.register_forward_hook(lambda _, args, __: inputs.append(args))
    found = stats.activation_stats(model, TOKENS, numbers, accelerator)
    hook.remove()
    x, rotary, *_ = inputs[0]
    rotary = rotary[:, :2] if documents else rotary
    expected = reference(model.blocks[0].attn, x[:2], rotary, seen)
    assert found["attn_entropy/00"].item() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("preset", ["gpt2", "llama"])
def test_units_that_no_token_switches_on_are_dead(preset: str, accelerator: Accelerator) -> None:
    model = make(preset, mlp_hidden=40)
    with torch.no_grad():
        model.blocks[1].mlp.up.weight[:5] = 0.0  # of the gate, where there is one
        if preset == "gpt2":
            model.blocks[1].mlp.up.bias[:5] = -1.0
    found = stats.activation_stats(model, TOKENS, None, accelerator)
    assert found["dead_units/01"].item() == pytest.approx(5 / 40)
    assert found["dead_units/00"].item() == 0


def scalars(run: Path) -> dict[str, dict[int, float]]:
    """What TensorBoard has of layers: name -> step -> value."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard" / "accel_gpt")).Reload()
    tags = [tag for tag in events.Tags()["scalars"] if tag.startswith("layers/")]
    return {tag[7:]: {e.step: e.value for e in events.Scalars(tag)} for tag in tags}


def test_training_is_the_same_and_the_trackers_alone_are_told(
    small_run: Arguments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    calls: list[int] = []
    copies = stats.copies
    monkeypatch.setattr(stats, "copies", lambda gpt: calls.append(1) or copies(gpt))
    quiet = ["--sample.every", "0", "--data.document_mask", "--eval.every", "0"]
    quiet += ["--eval.tokens", "64", "--train.max_steps", "10", "--checkpoint.every", "0"]
    quiet += ["--log.trackers", "tensorboard"]
    asked = ["--log.layer_stats_every", "5", "--optim.grad_clip", "0.1", *quiet]
    assert launch(small_run(*asked, "--out_dir", str(tmp_path / "with"))) == 0
    assert len(calls) == 2  # nothing is copied or hooked at the other steps
    assert "layers" not in capsys.readouterr().err
    found = scalars(tmp_path / "with")
    parts = ["embedding", "position", "00.attn", "00.mlp", "01.attn", "01.mlp", "norm"]
    of_weights = ("weight_norm", "grad_norm", "update_norm", "update_ratio")
    of_tokens = ("rms", "attn_rms", "mlp_rms", "attn_entropy", "dead_units")
    assert found.keys() == {
        *(f"{kind}/{part}" for kind in of_weights for part in parts),
        *(f"{kind}/{layer}" for kind in of_tokens for layer in ("00", "01")),
    }
    assert all(list(values) == [5, 10] for values in found.values())
    lines = records(tmp_path / "with")
    assert not any(key.startswith("layers/") for line in lines for key in line)
    for step in (5, 10):
        total = math.hypot(*(found[f"grad_norm/{part}"][step] for part in parts))
        assert total == pytest.approx(lines[step - 1]["train/grad_norm"], rel=1e-4)
    other = ["--out_dir", str(tmp_path / "without"), "--optim.grad_clip", "0.1", *quiet]
    assert launch(small_run(*other)) == 0
    assert len(calls) == 2
    assert_same_weights(weights(tmp_path / "with", 10), weights(tmp_path / "without", 10))


@pytest.mark.slow
def test_samples_and_layer_stats_compile_nothing(
    small_run: Arguments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many graphs with them as without, and the same weights."""
    import torch._dynamo

    compile_module = nn.Module.compile
    monkeypatch.setattr(GPT, "compile", lambda model: compile_module(model, backend="eager"))

    def graphs(name: str, *options: str) -> int:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        alike = ["--train.compile", "--eval.every", "0", "--model.n_layer", "1"]
        alike += ["--train.max_steps", "5"]
        assert launch(small_run(*alike, *options, "--out_dir", str(tmp_path / name))) == 0
        return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])

    both = ["--sample.every", "3", "--sample.max_new_tokens", "40", "--log.layer_stats_every", "4"]
    both += ["--log.trackers", "tensorboard"]
    count = graphs("with", *both)
    assert count == graphs("without", "--sample.every", "0")
    assert count > 0
    assert_same_weights(weights(tmp_path / "with", 5), weights(tmp_path / "without", 5))
