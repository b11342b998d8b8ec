"""accel_gpt: pretrain GPT language models with Hugging Face Accelerate.

    run = accel_gpt.train("quickstart", {"train.max_steps": 100})
    model, tokenizer = accel_gpt.load("runs/quickstart")

docs/python.md describes both. Importing this package imports no torch.
"""

import importlib
from collections.abc import Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accel_gpt.interface import TrainedRun, load

    train: "TrainFunction"

__version__ = "0.1.0"
__all__ = ("TrainedRun", "load", "train")


class TrainFunction(ModuleType):
    """The module accel_gpt/train.py, which is the function `accel_gpt.train`, too."""

    def __call__(
        self, config: str, options: Mapping[str, object] | None = None, processes: int = 1
    ) -> "TrainedRun":
        """Train as `accel-gpt train CONFIG --section.key value ...`, or go on with its run.

        `config`: a YAML file or the name of a shipped one. `options`: {"section.key": value}, or
        {"section": {"key": value}}.
        `processes`: started by torchrun where more than one. Interrupted, it saves and returns.
        Raises `UserError` for a mistake, other classes of accel_gpt/errors.py for other failures.
        """
        from accel_gpt.interface import train_run

        return train_run(str(config), options or {}, processes)


def __getattr__(name: str) -> Any:
    if name == "train":
        return importlib.import_module("accel_gpt.train")
    if name in __all__:
        return getattr(importlib.import_module("accel_gpt.interface"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
