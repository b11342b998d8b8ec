"""What fp8 needs of a machine, and where compiled code is kept between launches."""

import os
import warnings
from importlib.util import find_spec
from pathlib import Path

import torch

from accel_gpt.config.experiment import Config
from accel_gpt.errors import require
from accel_gpt.launcher import launcher_precision

FP8_CAPABILITY = (8, 9)  # Ada and Hopper: torchao's and NVIDIA's lists of devices with fp8 products
CACHE = "TORCHINDUCTOR_CACHE_DIR"


def requested_precision(config: Config) -> str:
    """The precision that the config names, else that of `accelerate launch`, else no."""
    return config.train.mixed_precision or launcher_precision()


def check_fp8(config: Config) -> None:
    """Raise `UserError` where fp8 is asked for and would not be, naming what is missing.

    Accelerate would compute in fp16 on older devices, with a warning. Of its backends torchao alone
    keeps the weights and their names as they are.
    """
    if requested_precision(config) != "fp8":
        return
    missing = []
    if not torch.cuda.is_available():
        missing.append("a GPU of compute capability 8.9 or more, of which there is none")
    elif (found := torch.cuda.get_device_capability()) < FP8_CAPABILITY:
        name, (major, minor) = torch.cuda.get_device_name(), found
        missing.append(f"compute capability 8.9 or more, where {name} has {major}.{minor}")
    if find_spec("torchao") is None:
        missing.append("the package torchao, which is not installed")
    if (backend := os.environ.get("ACCELERATE_FP8_BACKEND", "NO")) not in ("NO", "AO"):
        missing.append(f"the fp8 backend AO in the accelerate config, which has {backend}")
    require(
        not missing,
        f"mixed_precision is fp8, which needs {' and '.join(missing)}; set train.mixed_precision "
        "to bf16",
    )


def compiler_error(device: str) -> str | None:
    """Why torch.compile fails on a device, as it fails on the smallest function; None: it works."""
    keep_compiled()
    try:
        with warnings.catch_warnings(action="ignore"):
            torch.compile(lambda x: x.sin() + 1)(torch.ones(8, device=device))
    except Exception as error:  # what a missing or broken compiler raises has no public class
        return next(iter(str(error).strip().splitlines()), type(error).__name__)[:200]
    return None


def keep_compiled() -> None:
    """Let torch keep what it compiles where later launches find it, and nobody else writes.

    In the user's cache, not in the run, as it is code that the next launch executes; torch's own
    place in /tmp may be another user's. Does nothing where the environment names a place, or where
    there is no cache to write to: then torch takes its own.

    Raises `UserError` where the folder is not the user's alone.
    """
    if CACHE in os.environ:
        return
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = home / "accel_gpt" / "compiled"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except (OSError, RuntimeError):  # the latter: no home
        return
    if not os.access(folder, os.W_OK):
        return
    require(
        found.st_uid == os.geteuid() and not found.st_mode & 0o022,
        f"{folder}, whose compiled code would be executed, can be written by others; "
        f"chmod 700 it, or set {CACHE}",
    )
    os.environ[CACHE] = str(folder)
