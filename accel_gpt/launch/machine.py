"""Describe the machine and code of a run, for run.json and to compare the ranks."""

import contextlib
import hashlib
import platform
import resource
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil
import torch
from accelerate import Accelerator

from accel_gpt.config.compare import option_of
from accel_gpt.launch.devices import cpu_info
from accel_gpt.launcher import launcher_precision, local_world_size

PACKAGES = ("accel-gpt", "torch", "accelerate", "transformers", "tokenizers", "tiktoken", "numpy")


def device_name(device: torch.device) -> str:
    """Return the product name of the device."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    if device.type != "cpu":
        return device.type
    return cpu_info("model name") or platform.processor() or "CPU"


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type != "cpu":
        torch.accelerator.synchronize()


def memory_gb(device: torch.device) -> float:
    """Return the peak memory of this process in GB (1e9 bytes): of the GPU, else of the host."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    unit = 1 if sys.platform == "darwin" else 1024  # bytes on macOS, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def process_started() -> float:
    """Return when this process began, in seconds since 1970."""
    return float(psutil.Process().create_time())


def describe_machine(accelerator: Accelerator) -> dict[str, Any]:
    """Return versions, commit and hardware, as JSON values."""
    return {
        "versions": dict(package_versions()),
        "commit": commit(),
        "device": device_name(accelerator.device),
        "processes": accelerator.num_processes,
        "idle_gpus": idle_gpus(accelerator),
        "threads_per_process": torch.get_num_threads(),
        "mixed_precision": accelerator.mixed_precision,
        "platform": platform.platform(),
    }


def idle_gpus(accelerator: Accelerator) -> int:
    """Count the GPUs of this machine that no process of the run uses."""
    if accelerator.device.type != "cuda":
        return 0
    return max(0, torch.cuda.device_count() - local_world_size())


def rank_identity(options: Mapping[str, Any], own_code: str = "") -> dict[str, Any]:
    """Return values that must be the same on all ranks: options, code and versions.

    `own_code`: the SHA-256 of the file of --code.
    Leaves out options marked `per_machine`: they may differ. The data is compared later, once it is
    open.
    """
    package = Path(__file__).resolve().parents[1]
    code = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        name = str(file.relative_to(package))
        # skip the dangling links of editors, and the recipes, which are a link in a checkout
        if file.is_file() and not name.startswith("configs"):
            code.update(name.encode() + file.read_bytes())
    versions = package_versions()
    shared = {}
    for key, value in options.items():
        if not option_of(key).per_machine:
            shared[key] = value
    return shared | {
        "mixed_precision": options["train.mixed_precision"] or launcher_precision(),
        "the code of accel_gpt (SHA-256)": code.hexdigest()[:12],
        "the file of --code (SHA-256)": own_code[:12],
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "torch": versions.get("torch"),
        "accelerate": versions.get("accelerate"),
    }


@cache
def package_versions() -> Mapping[str, str]:
    """Return the versions of Python and of the installed `PACKAGES`."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return MappingProxyType(found)


@cache
def commit() -> str | None:
    """Return the commit of this package's source, with `-dirty` if files have changed.

    Returns None outside a checkout.
    """
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    try:
        command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
