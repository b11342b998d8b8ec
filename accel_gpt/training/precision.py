"""Mixed precision and compilation where they are `auto`, chosen at the start of a run.

The device and the flags of the processor decide, and for compilation the length of the run. Rank 0
decides for all ranks. The choice is kept in `config.yaml` of the run, and a resume keeps it.
"""

import os
import sys
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from accelerate import PartialState

from accel_gpt.config.experiment import Config
from accel_gpt.config.plan import Plan
from accel_gpt.cost.devices import FAST_BF16, MATRIX_UNITS, bf16_instructions, peak_flops
from accel_gpt.cost.flops import flops_per_token
from accel_gpt.data.corpus import open_corpus
from accel_gpt.errors import AccelGPTError, first_line, require
from accel_gpt.launcher import launcher_precision
from accel_gpt.training.accelerator import PRECISIONS, requested_precision
from accel_gpt.training.checkpoint import read_state
from accel_gpt.training.machine import device_name
from accel_gpt.training.ranks import all_gather, on_main
from accel_gpt.training.run_folder import RunFolder

BF16_CAPABILITY = (8, 0)  # Ampere: NVIDIA's first matrix units for bf16
GPU_MFU = 0.3  # of a step that is not compiled; assumption
UNKNOWN_PEAK = 1e14  # FLOP/s of a GPU that is not in the table of devices; assumption
# FLOP/s of a core with matrix units: the quickstart, not compiled, on two cores of a Xeon
MATRIX_UNIT_FLOPS = 1.2e11
# Share of a step that compiling saves, and the seconds that it takes. CPU: measured, see
# docs/how-to/speed.md. CUDA: nanoGPT's README, 250 ms become 135; the seconds are an assumption.
COMPILE_GAIN: Mapping[str, float] = MappingProxyType({"cpu": 0.25, "cuda": 0.45})
COMPILE_SECONDS: Mapping[str, float] = MappingProxyType({"cpu": 45.0, "cuda": 60.0})
CACHE = "TORCHINDUCTOR_CACHE_DIR"


def resolve_precision(config: Config) -> Config:
    """`config` with a mixed precision in place of auto; a collective."""
    precision, reason = on_main(lambda: choose_precision(config))
    report_choice(config, f"precision {precision.replace('no', 'fp32')}", reason)
    return replace(config, train=replace(config.train, mixed_precision=precision))


def resolve_compile(config: Config, plan: Plan) -> Config:
    """`config` with true or false in place of `train.compile: auto`; a collective.

    Raises `UserError` where `train.compile` is true and torch.compile does not work.
    """
    requested = config.train.compile is True
    compiled, reason = (True, "") if requested else on_main(lambda: choose_compile(config, plan))
    if compiled and (error := compiler_error_on_any_machine()):
        require(
            not requested,
            f"train.compile is true but torch.compile does not work here ({error}); install a C++ "
            "compiler such as g++, or set train.compile to auto or false",
        )
        compiled, reason = False, f"torch.compile does not work here ({error})"
    if not requested:
        report_choice(config, "compiled" if compiled else "not compiled", reason)
    return replace(config, train=replace(config.train, compile=compiled))


def report_choice(config: Config, choice: str, reason: str) -> None:
    """Print a choice and its reason."""
    if PartialState().is_main_process and config.log.level == "info":
        sys.stderr.write(f"auto     {choice}: {reason}\n")


def earlier_choice(config: Config, key: str) -> tuple[Any, str] | None:
    """The value of `key` in the run that `config` resumes, and where it was found."""
    resumed, run = Path(config.checkpoint.resume), RunFolder(config.out_dir)
    if key in run.config:
        return run.config[key], str(run.path / "config.yaml")
    try:
        if (resumed / "trainer_state.json").is_file():
            return read_state(resumed).config[key], str(resumed)
    except (AccelGPTError, KeyError):  # raised again, and reported, when the run resumes
        pass
    return None


def choose_precision(config: Config) -> tuple[str, str]:
    """The mixed precision, and the reason."""
    earlier = earlier_choice(config, "train.mixed_precision")
    if earlier and earlier[0] in PRECISIONS:
        return earlier[0], f"as in {earlier[1]}"
    if (launcher := launcher_precision()) != "no":
        return launcher, "set by accelerate launch"
    device = PartialState().device
    if device.type == "cuda":
        name, amd = device_name(device), torch.version.hip is not None
        units = not amd and torch.cuda.get_device_capability(device) >= BF16_CAPABILITY
        if units or peak_flops(name, "bf16"):
            return "bf16", f"{name} has matrix units for it"
        return "no", f"{name} is not known to have matrix units for bf16"
    if device.type != "cpu":
        return "no", f"bf16 on {device.type} has not been measured"
    instructions = bf16_instructions()
    if instructions is None:
        return "no", "this CPU has no bf16 instructions"
    if instructions not in FAST_BF16:
        return "no", f"bf16 with {instructions} has not been measured"
    return "bf16", f"this CPU has instructions for it ({instructions})"


# --------------------------------------------------------------------------- torch.compile


def choose_compile(config: Config, plan: Plan) -> tuple[bool, str]:
    """Whether to compile, and the reason."""
    earlier = earlier_choice(config, "train.compile")
    device = PartialState().device.type
    if config.train.reproducible:
        return False, "train.reproducible excludes it"
    if device not in COMPILE_SECONDS:
        return False, f"torch.compile on {device} has not been measured"
    if earlier and isinstance(earlier[0], bool):
        return earlier[0], f"as in {earlier[1]}"
    matrix_units = requested_precision(config) != "no" and bf16_instructions() == MATRIX_UNITS
    if device == "cpu" and not matrix_units:
        return False, "it saves little on a CPU without matrix units for bf16"
    gain = COMPILE_GAIN[device]
    cost = COMPILE_SECONDS[device]
    seconds = estimated_seconds(config, plan)
    return seconds * gain > cost, (
        f"it saves about {gain:.0%} of a step and takes about {cost:.0f} s; the run is "
        f"estimated at {seconds:,.0f} s without"
    )


def compiler_error_on_any_machine() -> str | None:
    """The error of torch.compile on one of the machines; None: it works on all. A collective."""
    state = PartialState()
    local = compiler_error(state.device.type) if state.is_local_main_process else None
    return next((error for error in all_gather(local) if error), None)


def compiler_error(device: str) -> str | None:
    """The error of torch.compile for the smallest function on a device; None: it works."""
    use_compile_cache()
    try:
        with warnings.catch_warnings(action="ignore"):
            torch.compile(lambda x: x.sin() + 1)(torch.ones(8, device=device))
    except Exception as error:  # what a missing or broken compiler raises has no public class
        return first_line(error)
    return None


def forget_compiled() -> None:
    """Drop what torch.compile made for other shapes: it compiles a function for eight, and a trial
    or an earlier run of this process has had its own.
    """
    if "torch._dynamo" in sys.modules:  # else there is nothing, and the import takes a second
        torch.compiler.reset()


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


# --------------------------------------------------------------------------- how long a run takes


def estimated_seconds(config: Config, plan: Plan) -> float:
    """Estimate by arithmetic how many seconds the run takes without compiling.

    For a GPU, or a CPU with matrix units.
    """
    device = PartialState().device
    vocab_size = open_corpus(config).vocab_size
    tokens_per_rank = plan.max_steps * plan.tokens_per_step / plan.world_size
    flops = tokens_per_rank * flops_per_token(config.model, vocab_size)
    if device.type == "cpu":
        return flops / (MATRIX_UNIT_FLOPS * torch.get_num_threads())
    in_float32 = requested_precision(config) == "no"
    tf32 = config.train.matmul_precision != "highest"
    kind = ("tf32" if tf32 else "fp32") if in_float32 else "bf16"
    peak = peak_flops(device_name(device), kind) or UNKNOWN_PEAK
    return flops / (GPU_MFU * peak)
