"""Let any optimizer of torch clip the gradient and skip updates, as `GuardedAdamW` does.

The host waits for the device in each step, unless the optimizer reads `found_inf` and `grad_scale`
on the device, as the fused ones of torch do.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map, tree_structure

from accel_gpt.config.experiment import Config
from accel_gpt.config.plan import make_plan
from accel_gpt.errors import UserError, first_line, require
from accel_gpt.launcher import world_size
from accel_gpt.model.language_model import seeded
from accel_gpt.model.sharding import is_sharded
from accel_gpt.optim.adamw import UNGUARDED, Guard, divide_gradients, given_to_kernel
from accel_gpt.optim.groups import OPTIONS, PEAK
from accel_gpt.own_code import unexpected

PLAIN = (int, float, bool, str, type(None))  # what a checkpoint can hold beside tensors
CONTAINERS = (dict, list, tuple)


class OwnOptimizer(Guard, torch.optim.Optimizer):
    """Guard the optimizer that `optimizer()` in the file of --code returns.

    It has no groups and no state of its own: the inner optimizer holds them. In each group, `PEAK`
    is the learning rate that `optimizer()` gave it.
    """

    def __init__(self, inner: torch.optim.Optimizer, place: str) -> None:
        # without the constructor of torch: the inner optimizer holds groups and state
        self.inner = inner
        self.place = place  # of `optimizer()`, for errors
        self.checked = False
        for group in self.param_groups:
            group[OPTIONS] = {key: value for key, value in group.items() if key != "params"}
            group[PEAK] = peak_of(group)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the inner optimizer: its groups, state and defaults."""
        return getattr(self.inner, name)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients."""
        self.inner.zero_grad(set_to_none=set_to_none)

    # ----------------------------------------------------------------------- the update

    @property
    def reads_guard(self) -> bool:
        """Return whether the inner optimizer reads `found_inf` and `grad_scale` on the device."""
        if isinstance(self.inner, Guard):  # one of ours, from `make_optimizer`
            return True
        if not self.checked:  # in its first update, a fused kernel may skip without a state to skip
            return False
        tensor = self.skip if self.skip is not None else self.divisor
        on_device = tensor is None or tensor.device.type not in UNGUARDED
        return on_device and bool(getattr(self.inner, "_step_supports_amp_scaling", False))

    _step_supports_amp_scaling = reads_guard  # of the loss scaler: else it skips and unscales

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update the parameters, or skip the update."""
        skip = self.skip_or_found_inf()
        divisor = self.divisor_and_grad_scale()
        if self.reads_guard:
            with given_to_kernel(self.inner, skip, divisor):
                return self.update()
        guards = [guard for guard in (skip, divisor) if guard is not None]
        values = torch.stack(guards).tolist() if guards else []  # waits for the device
        if skip is not None and values[0]:
            return None
        if divisor is not None and values[-1] != 1:
            divide_gradients(self, values[-1])
        return self.update()

    def update(self) -> Any:
        """Call the inner optimizer. Raises `UserError` if it cannot update the shards of FSDP."""
        try:
            result = self.inner.step()
        except (NotImplementedError, RuntimeError) as error:
            sharded = any(is_sharded(p) for group in self.param_groups for p in group["params"])
            if not sharded or isinstance(error, torch.OutOfMemoryError):
                raise
            raise UserError(
                f"the step() of {type(self.inner).__name__}, the optimizer of {self.place}, cannot "
                f"update the shards of FSDP: {first_line(error)}; train with DDP"
            ) from error
        if not self.checked:
            self.state_dict()  # a state that no checkpoint can hold is an error now
            self.checked = True
        return result

    # ----------------------------------------------------------------------- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the inner optimizer; NumPy numbers become Python numbers.

        Raises `UserError` if a checkpoint could not hold it.
        """
        packed: dict[str, Any] = tree_map(
            lambda one: one.item() if isinstance(one, np.generic) else one, self.inner.state_dict()
        )
        unknown = not_stored(packed)
        require(
            unknown is None,
            f"the optimizer of {self.place} keeps a {unknown} in its state or its groups, and no "
            "checkpoint can hold it; keep tensors, numbers, texts, lists and dictionaries there",
        )
        for p, state in self.state.items():
            for key, value in state.items() if is_sharded(p) else ():
                is_number = isinstance(value, int | float)
                if isinstance(value, Tensor):
                    is_number = not value.dim()
                require(
                    is_number or (is_sharded(value) and value.shape == p.shape),
                    f"the optimizer of {self.place} keeps {key}, a {type(value).__name__}, but "
                    "with FSDP a checkpoint holds only numbers, and tensors in the shape of their "
                    "parameter; train with DDP",
                )
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of the inner optimizer; see `keep_options`.

        Restores the tensors that torch has converted to the type of their parameter: it makes
        float32 of bfloat16, and of a count of int64.
        """
        now = [group[OPTIONS] for group in self.param_groups]
        self.inner.load_state_dict(state_dict)
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        parameters = [p for group in self.param_groups for p in group["params"]]
        for number, p in zip(numbers, parameters, strict=True):
            saved = state_dict["state"].get(number, {})
            if tree_structure(saved) == tree_structure(self.state.get(p, {})):
                self.state[p] = tree_map(as_saved, self.state[p], saved)
        self.keep_options(now)

    def group_values(self) -> list[dict[str, Any]]:
        """Return the values of each group for JSON, without its parameters; see `state_dict`."""
        groups = []
        for group in self.state_dict()["param_groups"]:
            values = {key: value for key, value in group.items() if key != "params"}
            groups.append(tree_map(lambda x: x.item() if isinstance(x, Tensor) else x, values))
        return groups

    def load_group_values(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Load what `group_values` or the groups of `state_dict` hold; see `keep_options`."""
        now = [group[OPTIONS] for group in self.param_groups]
        for group, values in zip(self.param_groups, saved, strict=True):
            group |= {key: as_tuple(one) for key, one in values.items() if key != "params"}
        self.keep_options(now)

    def keep_options(self, now: Sequence[dict[str, Any]]) -> None:
        """Restore each option that differs from the one in the loaded checkpoint.

        Other values of a group, such as a count of updates, continue as in the checkpoint.
        """
        for group, options in zip(self.param_groups, now, strict=True):
            before = group.get(OPTIONS, {})
            for key, value in options.items():
                if key not in before or as_tuple(before[key]) != as_tuple(value):
                    group[key] = value
            group[OPTIONS] = options
            group[PEAK] = peak_of(options)


def peak_of(group: Mapping[str, Any]) -> float:
    """Return the peak learning rate of a group; the groups of `make_optimizer` name theirs."""
    return float(group.get(PEAK, group["lr"]))


def as_saved(loaded: Any, saved: Any) -> Any:
    """Return a value of the state, with the type that it was saved with."""
    if not isinstance(saved, Tensor) or loaded.dtype == saved.dtype:
        return loaded
    return saved.to(loaded.device)


def not_stored(value: Any) -> str | None:
    """Return the name of the first type in a state that no checkpoint can hold; None: none."""
    if type(value) in CONTAINERS:
        inside = value.values() if isinstance(value, dict) else value
        return next(filter(None, map(not_stored, inside)), None)
    stored = type(value) in PLAIN or isinstance(value, Tensor)
    return None if stored else type(value).__name__


def as_tuple(value: Any) -> Any:
    """Return a list, which JSON makes of a tuple, as a tuple; other values as they are."""
    return tuple(map(as_tuple, value)) if isinstance(value, list) else value


def make_own_optimizer(model: nn.Module, config: Config) -> OwnOptimizer:
    """Call `optimizer()` in the file of --code, and guard what it returns.

    Raises `UserError` unless it is an optimizer of torch that holds every trainable parameter.
    """
    assert config.own.optimizer is not None
    place = config.own.place("optimizer")
    with seeded(config.seed):
        plan = make_plan(config, world_size())
        optimizer = config.own.optimizer(model=model, config=config, plan=plan)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise unexpected(place, optimizer, "a torch.optim.Optimizer")
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for name, p in model.named_parameters():
        require(
            id(p) in held or not p.requires_grad,
            f"the optimizer of {place} lacks {name}, which would never train; give it all "
            "parameters, or set requires_grad of the others to False",
        )
    return OwnOptimizer(optimizer, place)
