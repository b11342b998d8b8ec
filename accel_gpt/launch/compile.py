"""Choose whether to use torch.compile, for `train.compile: auto`, and set its cache.

Writes compiled code to `~/.cache/accel_gpt/compiled`.
"""

import os
import sys
import warnings
from collections.abc import Mapping
from types import MappingProxyType

import torch
from accelerate import PartialState

from accel_gpt.config.experiment import Config, TrainConfig
from accel_gpt.config.options import duration
from accel_gpt.config.plan import Plan, plural
from accel_gpt.errors import MachineError, first_line, require
from accel_gpt.files import cache_folder
from accel_gpt.launch.ranks import all_gather

CAPABILITY = (7, 0)  # of CUDA: Volta, the first GPUs that Triton supports
# On an H100, compiling takes 20 s (benchmarks/RESULTS.md); assumption: it pays after
LEAST_SECONDS = 180.0
# Options of inductor for `train.compile: graphs`
GRAPH_OPTIONS: Mapping[str, bool] = MappingProxyType({"triton.cudagraphs": True})
CACHE = "TORCHINDUCTOR_CACHE_DIR"


def check_compile(train: TrainConfig, plan: Plan) -> None:
    """Raise `UserError` if the config asks for torch.compile but it does not work; a collective.

    With CUDA graphs, a step is one forward and one backward pass on one GPU. A gradient that a
    graph writes is overwritten by the next micro-step, so gradients cannot be accumulated.
    DistributedDataParallel and FSDP2 have not been tried with CUDA graphs.
    """
    device = PartialState().device.type
    micro_steps = [one.accumulation_steps for one in plan.stages or (plan,)]
    one_pass = device == "cuda" and plan.world_size == max(micro_steps) == 1
    require(
        one_pass or train.compile != "graphs",
        "train.compile graphs needs one GPU and no gradient accumulation; this run has "
        f"{plural(plan.world_size, 'process', 'processes')} on {device} and "
        f"{plural(max(micro_steps), 'micro-step')}; set train.compile to true",
    )
    error = compiler_error_on_any_machine() if train.compiled else None
    require(
        error is None,
        f"train.compile is {str(train.compile).lower()} but torch.compile does not work here "
        f"({error}); install a C++ compiler such as g++, or set train.compile to auto or false",
    )


def choose_compile(config: Config) -> tuple[bool, str]:
    """Return whether to compile on this device, and why: on CUDA, unless the run is short."""
    device = PartialState().device
    if device.type != "cuda":
        return False, f"compiling saves little on {device.type}"
    seconds = duration("train.budget", config.train.budget)
    if seconds is not None and seconds <= LEAST_SECONDS:
        return False, f"the run takes {seconds:,.0f} s; compiling pays after {LEAST_SECONDS:.0f} s"
    capability = torch.cuda.get_device_capability(device)
    number = ".".join(map(str, capability))
    return capability >= CAPABILITY, f"the GPU has compute capability {number}"


def compiler_error_on_any_machine() -> str | None:
    """Return an error of torch.compile from any machine; None if it works on all. A collective."""
    state = PartialState()
    local = compiler_error(state.device.type) if state.is_local_main_process else None
    errors = [error for error in all_gather(local) if error]
    return errors[0] if errors else None


def compiler_error(device: str) -> str | None:
    """Compile a tiny function on a device; return the error, or None if it works."""
    use_compile_cache()
    try:
        with warnings.catch_warnings(action="ignore"):
            torch.compile(lambda x: x.sin() + 1)(torch.ones(8, device=device))
    except Exception as error:  # the errors of a missing or broken compiler have no public class
        return first_line(error)
    return None


def forget_compiled() -> None:
    """Drop the functions that this process has compiled for other shapes.

    torch.compile compiles a function for at most eight shapes. A trial or an earlier run of this
    process may have used some of them.
    """
    if "torch._dynamo" in sys.modules:  # importing it takes a second
        torch.compiler.reset()


def use_compile_cache() -> None:
    """Set torch's cache of compiled code to a folder in the user's home, for later launches.

    Launches execute this code, so the folder must be safe. The folder of a run may come from
    someone else. Torch's default is in /tmp, where other users can write.

    Does nothing if the environment sets the folder, or if there is no writable home. Raises
    `UserError` if other users can write to the folder.
    """
    if CACHE in os.environ:
        return
    try:
        folder = cache_folder() / "compiled"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except (OSError, MachineError):  # MachineError: there is no home
        return
    if not os.access(folder, os.W_OK):
        return
    require(
        status.st_uid == os.geteuid() and not status.st_mode & 0o022,
        f"other users can write to {folder}, and torch.compile would execute code from it; run "
        f"chmod 700 on it, or set {CACHE} to another folder",
    )
    os.environ[CACHE] = str(folder)
