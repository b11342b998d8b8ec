"""Hold what the parts of a run share: the resolved config, the plan and the device."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from accelerate import Accelerator

from accel_gpt.config.experiment import Config
from accel_gpt.config.plan import Plan
from accel_gpt.model.language_model import LanguageModel
from accel_gpt.runs.state import InitialWeights

Initialize = Callable[[LanguageModel], InitialWeights | None]
"""Set the weights of a new run; return where they come from, None if they are drawn."""


@dataclass
class Context:
    """What is done, on which device, and where lines are printed. See `resolve`.

    Only `set_length` replaces a field.
    """

    config: Config
    plan: Plan
    accelerator: Accelerator
    log: Callable[[str], None]
    """Print a line on rank 0."""
    check_folder: Callable[[], None] = lambda: None
    """Raise `BusyError` on rank 0 if the run has lost its folder."""
    asked: Mapping[str, Any] = field(default_factory=dict)
    """Dotted keys whose values were resolved -> the values that were asked for."""

    def set_length(self, config: Config, plan: Plan) -> None:
        """Train for another length, which `set_length` of training/length.py has recorded."""
        self.config = config
        self.plan = plan
