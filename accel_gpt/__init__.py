"""accel_gpt: pretrain GPT language models with Hugging Face Accelerate.

    run = accel_gpt.run("quickstart", {"train.max_steps": 100})
    model, tokenizer = accel_gpt.load("runs/quickstart")

docs/reference/python.md describes both. Importing this package imports no torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accel_gpt.api import Run, load, run

__version__ = "0.1.0"
__all__ = ("Run", "load", "run")


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("accel_gpt.api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
