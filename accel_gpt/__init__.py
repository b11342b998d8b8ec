"""accel_gpt: pretrain GPT language models with Hugging Face Accelerate.

    run = accel_gpt.run("quickstart", {"train.max_steps": 100, "out_dir": "runs/short"})
    model, tokenizer = accel_gpt.load("runs/quickstart")

docs/reference/python.md describes both. Importing this package imports no torch.
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accel_gpt.api import Run, load, run

__version__ = "0.1.0"
__all__ = ("Run", "load", "run")

# On a CPU, a thread of torch that waits for the others looks this often before it sleeps. libgomp's
# default is 300,000, some milliseconds: if the machine has other work, the thread keeps its core
# from the one that it waits for. Read when torch is imported.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("accel_gpt.api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
