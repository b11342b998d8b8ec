"""The table of devices: names that drivers report, peaks and memory."""

import pytest

from accel_gpt.launch.devices import device_memory, peak_flops


@pytest.mark.parametrize(
    ("name", "dtype", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989.5),
        ("NVIDIA A100 80GB PCIe", "tf32", 156),
        ("NVIDIA GeForce RTX 3090", "fp16", 71),
        ("Tesla V100-SXM2-16GB", "fp16", 125),
        ("Tesla T4", "tf32", 8.1),  # its float32
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
        "NVIDIA A10G",
        "NVIDIA H100 NVL",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
    ],
)
def test_a_device_not_in_the_table_has_no_peak(name: str) -> None:
    assert peak_flops(name, "bf16") is None


def test_a_size_in_the_name_selects_the_memory() -> None:
    assert device_memory("a100") == 40e9
    assert device_memory("NVIDIA A100-SXM4-80GB") == 80e9
    assert device_memory("cpu") is None
