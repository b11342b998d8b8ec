"""The ranks of a run, their device, threads and precision; the machine as run.json records it."""

import ctypes
import hashlib
import json
import logging
import os
import platform
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Mapping
from dataclasses import asdict
from datetime import timedelta
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.tracking import get_available_trackers
from accelerate.utils import (
    DistributedDataParallelKwargs,
    DistributedType,
    GradientAccumulationPlugin,
    LoggerType,
    ProjectConfiguration,
    parse_flag_from_env,
)

from accel_gpt.config.data import DataConfig
from accel_gpt.config.experiment import Config
from accel_gpt.config.parse import to_flat, to_plain
from accel_gpt.config.plan import Plan
from accel_gpt.cost.devices import bf16_instructions
from accel_gpt.data.remote import is_url
from accel_gpt.errors import duration, require
from accel_gpt.launcher import is_main, local_rank, local_world_size, world_size
from accel_gpt.training.engine import (
    check_engine,
    check_fp8,
    check_requested_engine,
    fp8_recipe,
    requested_precision,
    set_up_fsdp,
)
from accel_gpt.training.ranks import require_same

COLLECTIVE_TIMEOUT = timedelta(minutes=30)  # where train.step_timeout is null
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4  # glibc, malloc.h
# keys of the config that may differ between machines: paths, and what does not change training
LOCAL = (
    *("data.train", "data.val", "data.tokenizer", "data.cache_", "data.prepare."),
    "checkpoint.resume",  # on each machine the folder to which it was downloaded
    *("model.init_from", "eval.hellaswag", "train.cpu_threads", "log."),
    "out_dir",  # each save checks that it is shared
)
PACKAGES = ("accel-gpt", "torch", "accelerate", "transformers", "tokenizers", "tiktoken", "numpy")


def ensure_data(data: DataConfig) -> None:
    """Prepare the data folder if it is missing: one rank of each machine, while the others wait.

    `accel-gpt prepare` does it in a process of its own, which needs no torch and gives its memory
    back. Exits with its code if it fails; raises `UserError` if the folder that is there was
    prepared in another way.
    """
    text = data.prepare.path or data.prepare.dataset
    if data.prepare.source is None:
        require(
            not (text and data.folder) or Path(str(data.folder)).exists(),
            f"data.train {data.folder} does not exist, and data.prepare.source does not say what "
            f"{text} is; set it to text, jsonl, parquet, arrow or dataset",
        )
        return
    require(
        bool(data.folder) and not is_url(str(data.folder)),
        f"data.prepare makes one folder, but data.train is {data.train or 'empty'}; name the "
        "folder, or prepare those of a mixture one by one with accel-gpt prepare",
    )
    folder = Path(str(data.folder))
    if local_rank() != 0:
        while not (folder / "dataset.json").exists():
            time.sleep(0.2)
        return
    if (folder / "dataset.json").exists():
        from accel_gpt.prepare.prepare import prepare

        prepare(data.prepare, folder)  # only compares
        return
    settings = {"out": str(folder), **asdict(data.prepare)}
    # through a pipe: everybody on the machine can see a command line, and a URL may hold a password
    reading, writing = os.pipe()
    os.write(writing, json.dumps(settings, ensure_ascii=False).encode("utf-8", "surrogateescape"))
    os.close(writing)
    command = [sys.executable, "-m", "accel_gpt.cli", "prepare", f"/dev/fd/{reading}"]
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
    before = [signal.signal(n, lambda number, _: sys.exit(128 + number)) for n in numbers]
    try:  # a signal kills the process
        code = subprocess.run(command, check=False, pass_fds=(reading,)).returncode
    finally:
        os.close(reading)
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
    if code:
        sys.exit(code)


def start_processes(config: Config) -> PartialState:
    """Join the ranks into one process group; set threads and the precision of float32 products.

    Raises `UserError` for an engine that is not supported, and for processes that do not form one
    group or differ in config, code or versions: they would train apart.
    """
    check_requested_engine()
    if config.train.reproducible:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts
        torch.use_deterministic_algorithms(True)
    # Accelerator reads use_cpu of the accelerate config, PartialState does not
    cpu = parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.accelerator.is_available()
    state, started = PartialState(cpu=cpu, timeout=collective_timeout(config)), world_size()
    require(
        state.num_processes == started,
        f"the launcher started {started} processes but Accelerate sees "
        f"{state.num_processes}; start with accelerate launch or with torchrun",
    )
    if state.num_processes > 1:
        require_same(rank_identity(config))
    matmul = config.train.matmul_precision
    if state.device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = matmul != "highest"
    else:  # on a CPU TF32 sends small products, as in attention, through a slow path of oneDNN
        torch.set_float32_matmul_precision("highest" if matmul == "auto" else matmul)
    if state.device.type == "cpu":
        threads = 1 if config.train.reproducible else shared_cores()
        torch.set_num_threads(config.train.cpu_threads or threads)
        torch.set_flush_denormal(True)  # Adam moments of unseen tokens decay into denormals
        keep_freed_memory()
    return state


def make_accelerator(config: Config, plan: Plan) -> Accelerator:
    """The `Accelerator` of a run, after `start_processes`, with a precision that is not auto.

    Raises `UserError` for an engine or precision that is not supported: see `training/engine.py`.
    """
    check_trackers(config.log.trackers)
    check_fp8(config)
    if config.log.dashboard and is_main():
        from accel_gpt.training.dashboard import check_port

        check_port(config.log.dashboard_port)
    # at every save it logs that tied weights are stored once
    logging.getLogger("accelerate.utils.other").setLevel(logging.ERROR)
    # twice a step Accelerate would search all of sys.path for this optimizer: 0.25 ms
    sys.modules.setdefault("lomo_optim", None)  # type: ignore[arg-type]
    # torch 2.13 has another name for it, which Accelerate 1.15 cannot pass on
    warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
    accelerator = Accelerator(
        cpu=PartialState().device.type == "cpu",
        mixed_precision=config.train.mixed_precision,
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=plan.accumulation_steps, sync_with_dataloader=False
        ),
        log_with=list(config.log.trackers) or None,
        project_config=ProjectConfiguration(
            config.out_dir, logging_dir=str(Path(config.out_dir) / "tensorboard")
        ),
        kwargs_handlers=[
            DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True),
            *fp8_recipe(config),
        ],
    )
    check_engine(accelerator, config)
    if accelerator.distributed_type == DistributedType.FSDP:
        set_up_fsdp(accelerator)
    bf16_on_cpu = accelerator.device.type == "cpu" and accelerator.mixed_precision == "bf16"
    if bf16_on_cpu and is_main() and bf16_instructions() is None:
        sys.stderr.write(
            "WARNING: mixed_precision is bf16, for which this CPU has no instructions: a step "
            "takes several times as long as in float32; set train.mixed_precision to auto or no\n"
        )
    return accelerator


def collective_timeout(config: Config) -> timedelta:
    """How long a collective waits for the other ranks."""
    seconds = duration("train.step_timeout", config.train.step_timeout)
    return timedelta(seconds=seconds) if seconds else COLLECTIVE_TIMEOUT


def host_group(config: Config, accelerator: Accelerator) -> dist.ProcessGroup | None:
    """A gloo process group beside that of the devices; None for one rank. A collective."""
    if accelerator.num_processes == 1:
        return None
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=collective_timeout(config))
    return group


def keep_freed_memory() -> None:
    """Have the C library keep freed blocks rather than return them to the system.

    A training step frees and allocates the same blocks again; mapping each anew costs a page fault
    per 4 KiB, measured in benchmarks/RESULTS.md. glibc only: mallopt(3).
    """
    if platform.libc_ver()[0] != "glibc":
        return
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(M_MMAP_MAX, 0)
    mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
    mallopt(M_TOP_PAD, 64 * 2**20)


def check_trackers(names: tuple[str, ...]) -> None:
    """Raise `UserError` for a tracker that Accelerate does not know or would silently drop."""
    known = [str(kind) for kind in LoggerType if str(kind) != "all"]
    usable = [str(kind) for kind in get_available_trackers()]
    for name in names:
        require(name in known, f"log.trackers has {name!r}; Accelerate knows {', '.join(known)}")
        require(name in usable, f"log.trackers has {name} but it is not installed; pip install it")


def shared_cores() -> int:
    """Cores that this process may use, divided by the number of ranks on the machine.

    `accelerate launch` and `torchrun` set OMP_NUM_THREADS=1; a trainer wants them all.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, (cores or 1) // local_world_size())


def device_name(device: torch.device) -> str:
    """The product name of the device."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    if device.type != "cpu":
        return device.type
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or "CPU"
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else "CPU"


def memory_gb(device: torch.device) -> float:
    """Peak memory of the device's allocator since the start, or of this process on a CPU; 1e9 B."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    import resource

    unit = 1 if sys.platform == "darwin" else 1024  # bytes on macOS, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def describe_machine(accelerator: Accelerator) -> dict[str, Any]:
    """Versions, commit and hardware, as JSON."""
    return {
        "versions": {"python": platform.python_version(), **package_versions()},
        "commit": commit(),
        "device": device_name(accelerator.device),
        "processes": accelerator.num_processes,
        "threads_per_process": torch.get_num_threads(),
        "mixed_precision": accelerator.mixed_precision,
        "platform": platform.platform(),
    }


def code_versions() -> dict[str, str]:
    """Versions of Python and `PACKAGES`, and the commit where it is known."""
    found = {"python": platform.python_version(), **package_versions()}
    return found | ({"commit": known} if (known := commit()) else {})


def rank_identity(config: Config) -> dict[str, Any]:
    """What must be the same on all ranks: the config without `LOCAL`, the code of this package, and
    versions. The content of the data is compared when it is open.
    """
    package, code = Path(__file__).resolve().parents[1], hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        if file.is_file():  # no dangling link of an editor
            code.update(str(file.relative_to(package)).encode() + file.read_bytes())
    flat = to_flat(to_plain(config))
    versions = package_versions()
    return {key: value for key, value in flat.items() if not key.startswith(LOCAL)} | {
        "mixed_precision": requested_precision(config),
        "the code of accel_gpt (SHA-256)": code.hexdigest()[:12],
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "torch": versions.get("torch"),
        "accelerate": versions.get("accelerate"),
    }


@cache
def package_versions() -> Mapping[str, str]:
    """Installed versions of `PACKAGES`."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return MappingProxyType(found)


@cache
def commit() -> str | None:
    """The commit of this package's source, `-dirty` added if changed; None outside a checkout."""
    here = Path(__file__).resolve().parents[2]
    if not (here / ".git").exists():
        return None
    try:
        command = ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=12"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
