"""What the CPU's bf16 instructions are, by the flags that the kernel reports; without torch."""

import os
from pathlib import Path

MATRIX_UNITS = "amx_bf16"
# they multiply vectors: bf16 pays for some models only
VECTOR_UNITS = ("avx512_bf16", "bf16", "svebf16")  # x86, and Arm's two


def cpu_flags() -> frozenset[str]:
    """Flags of the first core in /proc/cpuinfo; empty where there is none, as outside Linux."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    found = [line.partition(":")[2] for line in lines if line.startswith(("flags", "Features"))]
    return frozenset(found[0].split()) if found else frozenset()


def bf16_instructions() -> str | None:
    """The flag of the CPU's fastest bf16 instructions that oneDNN may use, None without any.

    `ONEDNN_MAX_CPU_ISA`, where it is set, names the newest instruction set that oneDNN uses.
    """
    flags, limit = cpu_flags(), os.environ.get("ONEDNN_MAX_CPU_ISA", "DEFAULT").upper()
    unlimited = limit in ("DEFAULT", "ALL")
    if MATRIX_UNITS in flags and (unlimited or "AMX" in limit):
        return MATRIX_UNITS
    allowed = unlimited or any(name in limit for name in ("BF16", "FP16", "AMX", "AVX10"))
    return next((flag for flag in VECTOR_UNITS if flag in flags and allowed), None)
