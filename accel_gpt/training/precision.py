"""Mixed precision and compilation where they are `auto`, chosen at the start of a run.

A table of devices decides; where it cannot know, a few real steps are timed. Rank 0 decides for all
ranks. The choice is kept in `config.yaml` of the run, and a resume keeps it.
"""

import os
import statistics
import sys
import time
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from accelerate import PartialState

from accel_gpt.config.experiment import Config
from accel_gpt.config.plan import Plan, make_plan
from accel_gpt.cost.devices import MATRIX_UNITS, bf16_instructions, peak_flops
from accel_gpt.cost.flops import flops_per_token
from accel_gpt.errors import AccelGPTError, first_line, require
from accel_gpt.launcher import launcher_precision, world_size
from accel_gpt.model.gpt import GPT
from accel_gpt.optim.groups import make_optimizer
from accel_gpt.training.accelerator import PRECISIONS, requested_precision
from accel_gpt.training.checkpoint import read_state
from accel_gpt.training.machine import device_name
from accel_gpt.training.ranks import all_gather, on_main
from accel_gpt.training.run_folder import RunFolder
from accel_gpt.training.setup import open_corpus

BF16_CAPABILITY = (8, 0)  # Ampere: NVIDIA's first matrix units for bf16
TIMED_STEPS, TIMED_SECONDS = 3, 2.0  # at most so many steps of about so many seconds
SHORT = 60.0  # seconds; nothing is timed for a shorter run
SLOW_CORE = 1e10  # FLOP/s of a slow core while training: assumption
GPU_MFU = 0.3  # of a step that is not compiled: assumption
# The share of a step that compiling saves, and the seconds that it takes. CPU: measured, see
# docs/speed.md. CUDA: nanoGPT's README, 250 ms become 135; the seconds are an assumption.
CPU_GAIN_FLOAT32, CPU_GAIN_MATRIX_UNITS, CUDA_GAIN = 0.05, 0.25, 0.45
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
    device, train = PartialState().device, config.train
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
    if instructions == MATRIX_UNITS:
        return "bf16", f"this CPU has matrix units for it ({MATRIX_UNITS})"
    if train.reproducible or config.eval.only or train.micro_batch_size == "auto":
        return "no", f"what {instructions} gains is not timed with these options"
    plan, vocab_size = make_plan(config, world_size()), open_corpus(config).vocab_size
    if slow_cpu_seconds(config, plan, vocab_size) < SHORT:
        return "no", f"the run is too short to try {instructions}"
    times = {p: step_seconds(config, plan, vocab_size, p) for p in ("no", "bf16")}
    return min(times, key=lambda precision: times[precision]), (
        f"a step takes {1000 * times['bf16']:,.0f} ms in bf16 ({instructions}) and "
        f"{1000 * times['no']:,.0f} ms in fp32"
    )


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
    bf16 = requested_precision(config) != "no"
    if device == "cpu" and bf16 and bf16_instructions() != MATRIX_UNITS:
        return False, "it saves nothing in bf16 on a CPU without matrix units"
    cpu_gain = CPU_GAIN_MATRIX_UNITS if bf16 else CPU_GAIN_FLOAT32
    gain, cost = CUDA_GAIN if device == "cuda" else cpu_gain, COMPILE_SECONDS[device]
    seconds = run_seconds(config, plan)
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


def run_seconds(config: Config, plan: Plan) -> float:
    """Estimate the seconds that the run takes without compiling: by arithmetic on CUDA; on a CPU by
    timing a step, unless even a slow CPU takes less than a minute.
    """
    device, vocab_size = PartialState().device, open_corpus(config).vocab_size
    precision = requested_precision(config)
    if device.type == "cuda":
        fp32 = "fp32" if config.train.matmul_precision == "highest" else "tf32"
        peak = peak_flops(device_name(device), fp32 if precision == "no" else "bf16") or 1e14
        return run_flops(config, plan, vocab_size) / (GPU_MFU * peak)
    longest = slow_cpu_seconds(config, plan, vocab_size)
    if longest < SHORT:
        return longest
    return plan.max_steps * step_seconds(config, plan, vocab_size, precision)


def run_flops(config: Config, plan: Plan, vocab_size: int) -> float:
    """FLOPs of each rank in the whole run."""
    tokens = plan.max_steps * plan.tokens_per_step / plan.world_size
    return tokens * flops_per_token(config.model, vocab_size)


def slow_cpu_seconds(config: Config, plan: Plan, vocab_size: int) -> float:
    """Seconds of the run on a slow CPU."""
    return run_flops(config, plan, vocab_size) / (SLOW_CORE * torch.get_num_threads())


def step_seconds(config: Config, plan: Plan, vocab_size: int, precision: str) -> float:
    """Seconds of an optimizer step of this rank, timed on the CPU with a model of its own.

    Its weights and tokens are random; the run draws its own after this. Of a large micro-batch as
    many sequences are timed as a slow CPU computes in `TIMED_SECONDS`.
    """
    work = plan.block_size * flops_per_token(config.model, vocab_size)  # of a sequence
    most = int(TIMED_SECONDS * SLOW_CORE * torch.get_num_threads() / work)
    sequences = max(1, min(plan.micro_batch_size, most))
    micro_steps = plan.accumulation_steps * plan.micro_batch_size / sequences
    gpt = GPT(config.model, vocab_size)
    gpt.recompute = config.train.activation_checkpointing == "blocks"
    optimizer = make_optimizer(gpt, config.optim)
    tokens, targets = torch.randint(vocab_size, (2, sequences, plan.block_size))
    times = []
    for _ in range(1 + TIMED_STEPS):
        start = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            loss = gpt(tokens, targets)
        loss.backward()
        middle = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        end = time.perf_counter()
        times.append(micro_steps * (middle - start) + end - middle)
        if end - start > TIMED_SECONDS:
            break
    return statistics.median(times[1:] or times)  # the first one warms up
