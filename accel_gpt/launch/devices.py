"""Look up the peak FLOP/s and memory of GPUs, and the fastest precision of a GPU or this CPU."""

import re
import types
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

# On CPUs with one of these flags, bf16 is faster than float32: benchmarks/notes/precision.md.
FAST_BF16 = frozenset({"amx_bf16", "avx512_bf16"})


class Device(NamedTuple):
    """A row of the table `DEVICES`."""

    memory_gb: tuple[int, ...]  # all sizes, the smallest first
    rates: Mapping[str, float]  # FLOP/s by dtype


def _device(*memory_gb: int, **teraflops: float) -> Device:
    rates = {dtype: rate * 1e12 for dtype, rate in teraflops.items()}
    return Device(memory_gb, types.MappingProxyType(rates))


# A key holds the words that distinguish a device from similar ones. Units of a row:
# - memory: GB. A device of "80 GB" reports slightly more than 80e9 bytes, so estimates have room.
# - rates: teraFLOP/s without sparsity. Rates that data sheets quote "with sparsity" are halved.
#   bf16, fp16 and fp8 accumulate in float32.
DEVICES: Mapping[str, Device] = types.MappingProxyType(
    {
        # NVIDIA B200, HGX B200 data sheet (2024), one of 8 GPUs
        "b200": _device(180, fp8=4500, bf16=2250, fp16=2250),
        # NVIDIA H200 SXM data sheet (2024)
        "h200": _device(141, fp8=1979, bf16=989.5, fp16=989.5, tf32=494.5, fp32=67),
        # NVIDIA H100 data sheet (2023), SXM5 and PCIe columns
        "h100": _device(80, fp8=1979, bf16=989.5, fp16=989.5, tf32=494.5, fp32=67),
        "h100 pcie": _device(80, fp8=1513, bf16=756.5, fp16=756.5, tf32=378, fp32=51),
        # NVIDIA A100 data sheet (2021); the same for SXM4 and PCIe
        "a100": _device(40, 80, bf16=312, fp16=312, tf32=156, fp32=19.5),
        # NVIDIA A10 data sheet (2021); the A10G of AWS is another chip
        "a10": _device(24, bf16=125, fp16=125, tf32=62.5, fp32=31.2),
        # NVIDIA A30 data sheet (2021)
        "a30": _device(24, bf16=165, fp16=165, tf32=82, fp32=10.3),
        # NVIDIA A40 data sheet (2021)
        "a40": _device(48, bf16=149.7, fp16=149.7, tf32=74.8, fp32=37.4),
        # NVIDIA GA102 white paper (2021), appendices A and C
        "rtx a6000": _device(48, bf16=154.8, fp16=154.8, tf32=77.4, fp32=38.7),
        # arithmetic: 3,584 cores at 1.78 GHz, with the rates per core of the rtx 3070
        "rtx 3060": _device(12, bf16=25.5, fp16=25.5, tf32=12.7, fp32=12.7),
        "rtx 3070": _device(8, bf16=40.6, fp16=40.6, tf32=20.3, fp32=20.3),
        "rtx 3080": _device(10, bf16=59.5, fp16=59.5, tf32=29.8, fp32=29.8),
        "rtx 3090": _device(24, bf16=71, fp16=71, tf32=35.6, fp32=35.6),
        # NVIDIA L4, L40 and L40S data sheets (2023)
        "l4": _device(24, fp8=242.5, bf16=121, fp16=121, tf32=60, fp32=30.3),
        "l40": _device(48, fp8=362, bf16=181, fp16=181, tf32=90.5, fp32=90.5),
        "l40s": _device(48, fp8=733, bf16=362, fp16=362, tf32=183, fp32=91.6),
        # NVIDIA Ada GPU architecture white paper (2022), appendix A
        # two by arithmetic: 3,072 cores at 2.46 GHz and 5,888 at 2.48, each as fast as one of 4090
        "rtx 4060": _device(8, fp8=60.5, bf16=30.2, fp16=30.2, tf32=15.1, fp32=15.1),
        "rtx 4070": _device(12, fp8=116.6, bf16=58.3, fp16=58.3, tf32=29.1, fp32=29.1),
        "rtx 4080": _device(16, fp8=194.9, bf16=97.5, fp16=97.5, tf32=48.7, fp32=48.7),
        "rtx 4090": _device(24, fp8=330.3, bf16=165.2, fp16=165.2, tf32=82.6, fp32=82.6),
        # NVIDIA RTX 6000 Ada Generation data sheet (2022)
        "rtx 6000 ada": _device(48, fp8=728.5, bf16=364.2, fp16=364.2, tf32=182.1, fp32=91.1),
        # NVIDIA RTX Blackwell GPU architecture white paper (2025), appendix A
        "rtx 5090": _device(32, fp8=419, bf16=209.5, fp16=209.5, tf32=104.8, fp32=104.8),
        # NVIDIA Turing GPU architecture white paper (2018), appendix A, reference clock; no bf16
        "rtx 2080 ti": _device(11, fp16=53.8, fp32=13.4),
        # NVIDIA V100 data sheet (2020), SXM2 and PCIe columns; no bf16
        "v100 sxm2": _device(16, 32, fp16=125, fp32=15.7),
        "v100": _device(16, 32, fp16=112, fp32=14),
        # NVIDIA T4 data sheet (2019); no bf16
        "t4": _device(16, fp16=65, fp32=8.1),
        # AMD Instinct MI300X data sheet (2023)
        "mi300x": _device(192, fp8=2614.9, bf16=1307.4, fp16=1307.4, tf32=653.7, fp32=163.4),
    }
)

# Words of a device name that do not change its rates. Any other word ("MIG", "Laptop", "Ti", "D")
# indicates another device.
_NEUTRAL = re.compile(
    r"nvidia|generation|tesla|geforce|amd|instinct|oam|pcie|sxm\d?|hbm\d?e?|\d+gb"
)


def device_key(device_name: str) -> str | None:
    """Return the key in `DEVICES` for the name that a driver reports; None if no key matches.

    If several keys match, the key with the most words wins.
    """
    words = set(re.findall(r"[a-z0-9]+", device_name.lower()))
    found: str | None = None
    most_words = 0
    for key in DEVICES:
        key_words = set(key.split())
        rest = words - key_words
        matches = key_words <= words and all(_NEUTRAL.fullmatch(word) for word in rest)
        if matches and len(key_words) > most_words:
            found = key
            most_words = len(key_words)
    return found


def peak_flops(device_name: str, dtype: str) -> float | None:
    """Return the peak FLOP/s of a device, without sparsity; None if `DEVICES` does not have it.

    `device_name` is the name that the driver reports. `dtype` is the dtype of matrix products:
    fp8, bf16, fp16, tf32 or fp32. A GPU without TF32 computes the products of tf32 in float32.
    """
    key = device_key(device_name)
    if key is None:
        return None
    rates = DEVICES[key].rates
    return rates.get(dtype, rates.get("fp32") if dtype == "tf32" else None)


def precision_problem(precision: str, sharded: bool, reproducible: bool) -> str | None:
    """Return why a run under FSDP, or a reproducible run, cannot use a precision; None if it can.

    Such a run uses float32 on a GPU that has matrix units only for fp16.
    """
    if sharded and precision == "fp16":
        return "under FSDP a resume cannot restore the loss scale"
    if reproducible and precision in ("fp16", "fp8"):
        return f"train.reproducible cannot sum the scaled gradients of {precision}"
    return None


def fast_precision(gpu: str | None, sharded: bool, reproducible: bool) -> str:
    """Return the precision in which a GPU, or this CPU, is fastest and which the run supports."""
    has_bf16 = cpu_flags() & FAST_BF16 if gpu is None else peak_flops(gpu, "bf16")
    if has_bf16:
        return "bf16"
    # GPUs before Ampere, such as T4 and V100, have matrix units only for fp16
    has_fp16 = gpu is not None and peak_flops(gpu, "fp16") is not None
    return "fp16" if has_fp16 and not precision_problem("fp16", sharded, reproducible) else "no"


def device_memory(device_name: str) -> int | None:
    """Return the memory of a device in bytes; None if `DEVICES` does not have the device.

    A name such as `a100-80gb` selects one of several sizes. Without a size, the smallest is used.
    """
    key = device_key(device_name)
    if key is None:
        return None
    sizes = DEVICES[key].memory_gb
    for gigabytes in re.findall(r"(\d+) ?gb", device_name.lower()):
        if int(gigabytes) in sizes:
            return int(gigabytes) * 10**9
    return sizes[0] * 10**9


def cpu_info(*fields: str) -> str:
    """Return the value of the first line of /proc/cpuinfo that starts with one of `fields`.

    Returns "" if no line does, or if there is no such file, as outside Linux.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    for line in lines:
        if line.startswith(fields):
            return line.partition(":")[2].strip()
    return ""


def cpu_flags() -> frozenset[str]:
    """Return the feature flags of the CPU's first core; empty outside Linux."""
    return frozenset(cpu_info("flags", "Features").split())
