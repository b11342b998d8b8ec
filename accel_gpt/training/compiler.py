"""torch.compile: whether it works here, and where compiled code is kept between launches."""

import os
import warnings
from pathlib import Path

import torch

from accel_gpt.errors import require

CACHE = "TORCHINDUCTOR_CACHE_DIR"


def compiler_error(device: str) -> str | None:
    """The error of torch.compile for the smallest function on a device; None: it works."""
    use_compile_cache()
    try:
        with warnings.catch_warnings(action="ignore"):
            torch.compile(lambda x: x.sin() + 1)(torch.ones(8, device=device))
    except Exception as error:  # what a missing or broken compiler raises has no public class
        return next(iter(str(error).strip().splitlines()), type(error).__name__)[:200]
    return None


def use_compile_cache() -> None:
    """Set torch's cache of compiled code to a folder of the user, where later launches find it.

    Not in the run, as the next launch executes it; torch's default in /tmp may be another user's.
    Does nothing if the environment names a folder, or if there is no home or cache to write to.
    Raises `UserError` if others can write to the folder.
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
