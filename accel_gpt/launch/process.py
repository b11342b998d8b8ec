"""Set up this process: join the ranks, set threads, float32 products and memory."""

import ctypes
import os
import platform
from datetime import timedelta

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import parse_flag_from_env

from accel_gpt.config.experiment import TrainConfig
from accel_gpt.config.plan import plural
from accel_gpt.errors import require
from accel_gpt.launch.ranks import keep_group
from accel_gpt.launch.unsupported import check_accelerate_config
from accel_gpt.launcher import shared_cores, started_by_launcher, world_size

# Added to the timeout of a collective, so that it does not expire while a process is paused;
# assumption
LONGEST_PAUSE = timedelta(days=1)
M_TRIM_THRESHOLD = -1  # glibc, malloc.h
M_TOP_PAD = -2  # glibc, malloc.h
M_MMAP_MAX = -4  # glibc, malloc.h


def join_ranks(train: TrainConfig) -> PartialState:
    """Join the ranks into one process group; set threads and the precision of float32 products.

    The first call comes before the folder of the run is locked. The second, in `resolve`, changes
    nothing.

    Raises `UserError` if the engine is not supported, or if the processes do not form one group.
    """
    check_accelerate_config()
    if train.reproducible:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts
        # on CUDA, this also excludes cuDNN's attention and makes the backward passes of flash and
        # efficient attention deterministic (PyTorch's cuda/sdp_utils.cpp, attention_backward.cu)
        torch.use_deterministic_algorithms(True)
    # `PartialState` does not read use_cpu from the accelerate config as `Accelerator` does
    cpu = uses_cpu()
    state = PartialState(cpu=cpu, timeout=collective_timeout(train))
    started = world_size()
    require(
        state.num_processes == started,
        f"the launcher started {plural(started, 'process', 'processes')} but Accelerate finds "
        f"{state.num_processes}; start with accelerate launch, torchrun or srun",
    )
    if state.num_processes > 1:
        keep_group()
        if state.device.type == "cuda":
            # Accelerate's DDP and barriers use the local rank as the index of the GPU. Under `srun
            # --gpus-per-task 1` each process sees one GPU, with index 0
            state.local_process_index = state.device.index
    set_matmul_precision(train, state.device)
    if state.device.type == "cpu":
        torch.set_num_threads(cpu_threads(train))
        torch.set_flush_denormal(True)  # Adam moments of unseen tokens decay into denormals
    return state


def uses_cpu() -> bool:
    """Return whether this process computes on the CPU."""
    return parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.accelerator.is_available()


def set_matmul_precision(train: TrainConfig, device: torch.device) -> None:
    """Set whether float32 products are computed in TF32."""
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = train.matmul_precision != "highest"
        return
    # on a CPU, TF32 makes oneDNN take a slow path for the small products of attention
    precision = "highest" if train.matmul_precision == "auto" else train.matmul_precision
    torch.set_float32_matmul_precision(precision)


def cpu_threads(train: TrainConfig) -> int:
    """Return the number of threads of this process on a CPU: all cores that it may use.

    OMP_NUM_THREADS overrides it, except under torchrun and `accelerate launch`, which set it
    themselves. With `train.reproducible` it is 1: the number changes the order of sums in kernels.
    """
    if train.reproducible:
        return 1
    outer = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()  # it may be a list
    if outer.isdecimal() and not started_by_launcher():
        return int(outer) or shared_cores()
    return shared_cores()


def keep_freed_memory() -> None:
    """Make the C library keep freed blocks instead of returning them to the system.

    Each training step frees and allocates the same blocks. Mapping a block again costs a page
    fault per 4 KiB; benchmarks/RESULTS.md has the measurement. glibc only: mallopt(3). Does nothing
    if this process computes on a GPU. Only commands call it, since it cannot be undone.
    """
    if platform.libc_ver()[0] != "glibc" or not uses_cpu():
        return
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(M_MMAP_MAX, 0)
    mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
    mallopt(M_TOP_PAD, 64 * 2**20)


def collective_timeout(train: TrainConfig) -> timedelta:
    """Return how long a collective waits for the other ranks.

    The timeout is long, since a collective must survive a paused process. The watchdog ends a run
    that hangs.
    """
    return timedelta(seconds=train.timeout_seconds) + LONGEST_PAUSE


def make_host_group(train: TrainConfig, processes: int) -> dist.ProcessGroup | None:
    """Make a gloo process group for the hosts; return None for one rank. A collective."""
    if processes == 1:
        return None
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=collective_timeout(train))
    return group
