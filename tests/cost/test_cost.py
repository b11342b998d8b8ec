"""Parameters and FLOPs against the real model, published sizes, and device peaks."""

import pytest

from accel_gpt.config.model import ModelConfig
from accel_gpt.cost.devices import DEVICES, peak_flops
from accel_gpt.cost.flops import flops_per_token, mfu, parameter_counts
from accel_gpt.model.gpt import GPT
from tests.conftest import tiny

SHAPES = {
    "gpt2": tiny(),
    "no bias": tiny(bias=False),
    "untied, grouped": tiny(tie_embeddings=False, n_kv_head=2),
    "rmsnorm with biases": tiny(norm="rmsnorm", mlp="swiglu", mlp_hidden=48),
    "llama": tiny("llama"),
    "llama grouped, tied": tiny("llama", n_kv_head=1, tie_embeddings=True),
    "qwen3 grouped, wide heads": tiny("qwen3", n_kv_head=2, head_dim=12),
    "fast": tiny("fast"),
}
shapes = pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES.keys())


@shapes
@pytest.mark.parametrize("vocab_size", [65, 128])
def test_counts_equal_those_of_the_model(config: ModelConfig, vocab_size: int) -> None:
    model, counts = GPT(config, vocab_size), parameter_counts(config, vocab_size)
    real = {part: 0 for part in counts}
    owners = {"wte": "embedding", "wpe": "position", "attn": "attention", "head": "head"}
    owners |= {
        "mlp": "mlp",
        "qk_norm": "norm",
        "norm_1": "norm",
        "norm_2": "norm",
        "norm_f": "norm",
    }
    for name, weight in model.named_parameters():
        part = next(owners[word] for word in reversed(name.split(".")) if word in owners)
        real[part] += weight.numel()
        real["total"] += weight.numel()
        padded = name.startswith(("wte", "head"))
        real["total_unpadded"] += (weight[:vocab_size] if padded else weight).numel()
    assert counts == real


@pytest.mark.parametrize(
    ("n_layer", "n_head", "n_embd", "expected"),
    [
        (12, 12, 768, 124_439_808),
        (24, 16, 1024, 354_823_168),
        (36, 20, 1280, 774_030_080),
        (48, 25, 1600, 1_557_611_200),
    ],
)
def test_counts_of_gpt2_are_the_published_ones(
    n_layer: int, n_head: int, n_embd: int, expected: int
) -> None:
    config = ModelConfig(n_layer=n_layer, n_head=n_head, n_embd=n_embd)
    counts = parameter_counts(config, 50257)
    assert counts["total_unpadded"] == expected
    assert counts["total"] == expected + (50304 - 50257) * n_embd


@pytest.mark.parametrize(
    ("name", "dtype", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989.5),
        ("NVIDIA H100 PCIe", "bf16", 756.5),
        ("NVIDIA H200", "tf32", 494.5),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312),
        ("NVIDIA A100 80GB PCIe", "tf32", 156),
        ("NVIDIA GeForce RTX 3090", "fp16", 71),
        ("Tesla V100-SXM2-16GB", "fp16", 125),
        ("Tesla T4", "fp16", 65),
        ("AMD Instinct MI300X", "bf16", 1307.4),
    ],
)
def test_devices_are_known_by_the_names_that_drivers_give(
    name: str, dtype: str, teraflops: float
) -> None:
    assert peak_flops(name, dtype) == teraflops * 1e12


@pytest.mark.parametrize(
    "name",
    [
        "cpu",
        "",
        "Apple M3 Max",
        "NVIDIA A10G",
        "NVIDIA H100 NVL",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 3090 Ti",
        "Intel(R) Xeon(R) Processor @ 2.50GHz",
    ],
)
def test_a_device_not_in_the_table_has_no_peak(name: str) -> None:
    assert peak_flops(name, "bf16") is None


def test_every_row_is_found_by_its_own_name_and_falls_with_precision() -> None:
    for name, (_, _, rates) in DEVICES.items():
        assert {dtype: peak_flops(name, dtype) for dtype in rates} == dict(rates)
        ordered = [rates[dtype] for dtype in ("bf16", "fp16", "tf32", "fp32") if dtype in rates]
        assert ordered == sorted(ordered, reverse=True)


def test_mfu_is_the_share_of_all_devices_peak() -> None:
    # 124M GPT-2 on 8 A100: 1.5 million tokens/s at 854,438,400 FLOPs are 51.3 % of 312 TFLOP/s
    work = flops_per_token(ModelConfig(), 50257)
    assert work == 6 * (12 * 12 * 768**2 + 50257 * 768) + 12 * 12 * 768 * 1024
    assert mfu(1.5e6, work, 312e12, n_devices=8) == pytest.approx(0.5135, abs=1e-3)
