"""The machine that a run is planned for: devices, their memory, precision, how state is spread."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from accel_gpt.config.experiment import Config
from accel_gpt.config.parse import read_yaml
from accel_gpt.cost.activations import Numerics
from accel_gpt.cost.flops import PEAK_FLOPS, device_key, device_memory, peak_flops
from accel_gpt.cost.processor import MATRIX_UNITS, bf16_instructions
from accel_gpt.errors import require

SHARDING = "FSDP"
PRECISIONS = ("no", "bf16", "fp16", "fp8")


@dataclass(frozen=True)
class Machine:
    """What a run is planned for."""

    devices: int  # one process each
    gpu: str | None  # as asked for; None: CPUs
    memory: float | None  # bytes of a device; None: not known
    sharded: bool  # FSDP
    precision: str  # of PRECISIONS
    precision_source: str

    @property
    def numerics(self) -> Numerics:
        """Types and kernels."""
        return Numerics(self.precision != "no", self.gpu is not None, self.sharded)

    def dtype(self, matmul_precision: str) -> str:
        """What products compute in, a key of `PEAK_FLOPS`."""
        if self.precision != "no":
            return self.precision
        return "tf32" if self.gpu and matmul_precision != "highest" else "fp32"

    def peak(self, matmul_precision: str) -> float | None:
        """FLOP/s of one device, where they are known."""
        return peak_flops(self.gpu, self.dtype(matmul_precision)) if self.gpu else None

    def spoken(self) -> str:
        """`8 x h100, ddp, bf16`."""
        way = [] if self.devices == 1 else ["fsdp" if self.sharded else "ddp"]
        precision = "float32" if self.precision == "no" else self.precision
        return ", ".join([f"{self.devices} x {self.gpu or 'CPU process'}", *way, precision])


def make_machine(
    config: Config,
    gpus: int | None = None,
    gpu: str | None = None,
    memory_gb: float | None = None,
    distribution: str | None = None,
    config_file: str | None = None,
) -> Machine:
    """What options, config and accelerate config say; `UserError` where they do not fit."""
    said = read_accelerate(config_file) if config_file else {}
    if gpu is not None:
        near = difflib.get_close_matches(gpu.lower(), PEAK_FLOPS, n=1, cutoff=0.3)
        hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(PEAK_FLOPS)}"
        require(device_key(gpu) is not None, f"--gpu {gpu} is not in the table of devices; {hint}")
    memory = memory_gb * 1e9 if memory_gb else device_memory(gpu) if gpu else None
    precision, source = precision_of(config, said, config_file, gpu)
    if distribution is None:
        distribution = "fsdp" if str(said.get("distributed_type")) == SHARDING else "ddp"
    machine = Machine(
        devices=gpus or processes(said, config_file),
        gpu=gpu,
        memory=memory,
        sharded=distribution == "fsdp",
        precision=precision,
        precision_source=source,
    )
    check(machine, config)
    return machine


def check(machine: Machine, config: Config) -> None:
    """Raise `UserError` for what training would refuse."""
    require(
        machine.precision not in ("fp16", "fp8") or machine.gpu is not None,
        f"the precision is {machine.precision} but no --gpu is given, and a CPU has no "
        f"{machine.precision} training; give --gpu, or --train.mixed_precision bf16",
    )
    require(
        not (
            config.train.reproducible and (machine.sharded or machine.precision in ("fp16", "fp8"))
        ),
        "train.reproducible is true, which goes neither with fsdp, fp16 nor fp8; leave it out, or "
        "plan for --distribution ddp in bf16 or float32",
    )


def read_accelerate(path: str) -> Mapping[str, Any]:
    """The keys of an accelerate config."""
    content = read_yaml(path)
    require(
        isinstance(content, dict) and "distributed_type" in content,
        f"--config_file {path} has no distributed_type; expected what accelerate config writes",
    )
    return content


def processes(said: Mapping[str, Any], path: str | None) -> int:
    """Processes that an accelerate config asks for, else one."""
    number = said.get("num_processes", 1)
    ok = isinstance(number, int) and number > 0
    require(ok, f"num_processes in {path} is {number!r}; expected a number above 0, or give --gpus")
    return int(number)


def precision_of(
    config: Config, said: Mapping[str, Any], path: str | None, gpu: str | None
) -> tuple[str, str]:
    """The precision and who says it: the config goes before the accelerate config."""
    if config.train.mixed_precision not in (None, "auto"):
        return config.train.mixed_precision, "train.mixed_precision"
    found = said.get("mixed_precision") or "no"  # YAML reads a bare no as false
    if config.train.mixed_precision == "auto" and found == "no":
        if gpu is None:
            fits = bf16_instructions() == MATRIX_UNITS
        else:
            fits = peak_flops(gpu, "bf16") is not None
        return "bf16" if fits else "no", "train.mixed_precision auto"
    require(
        found in PRECISIONS,
        f"mixed_precision in {path} is {found!r}; planned is for {', '.join(PRECISIONS)}",
    )
    return str(found), str(path) if path else "nothing says otherwise"
