"""Whether a tensor is FSDP's, without an import that takes longer than the first step.

`torch.distributed.tensor` brings sympy; measured in benchmarks/RESULTS.md, "Start-up".
"""

import sys
from typing import TYPE_CHECKING, TypeGuard

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_sharded(tensor: object) -> "TypeGuard[DTensor]":
    """Whether `tensor` is a DTensor; there is none before FSDP imported its module."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)
