"""The rungs of a ladder: a config at another depth and length. No torch.

`given` holds the keys that a config sets, dotted.
"""

from collections.abc import Mapping
from typing import Any

from accel_gpt.config.compare import differences, option_of
from accel_gpt.config.depth import HEAD_DIM, scaling_parameters, width
from accel_gpt.config.experiment import Config
from accel_gpt.config.parse import config_of, to_flat
from accel_gpt.config.plan import LENGTH
from accel_gpt.cost.flops import flops_per_token
from accel_gpt.cost.scaling import Size


def config_at(
    given: Mapping[str, Any], depth: int, max_steps: int, seed: int | None = None
) -> Config:
    """Return the config in which `given` is set, at another depth, length and seed."""
    varied = {"model.depth", *shape_keys(depth), *LENGTH}
    values = {key: value for key, value in given.items() if key not in varied}
    values |= depth_keys(given, depth)
    values["train.max_steps"] = max_steps
    if seed is not None:
        values["seed"] = seed
    return config_of(values)


def depth_keys(given: Mapping[str, Any], depth: int) -> dict[str, Any]:
    """Return the keys of a size: model.depth if the config sets it, else the shape alone."""
    if given.get("model.depth") is not None:
        return {"model.depth": depth}
    return shape_keys(depth)


def shape_keys(depth: int) -> dict[str, Any]:
    """Return the keys of the shape that a depth has."""
    channels = width(depth)
    return {
        "model.n_layer": depth,
        "model.n_head": channels // HEAD_DIM,
        "model.n_embd": channels,
    }


def run_size(config: Config, vocab_size: int, tokens: int) -> Size:
    """Return the size of a run of `tokens` tokens, by which a law predicts its loss."""
    return Size(
        parameters=scaling_parameters(config.model, vocab_size),
        tokens=tokens,
        flops=flops_per_token(config.model, vocab_size) * tokens,
    )


def recipe_differences(config: Config, other: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the keys that change the loss and differ, with both values.

    `other` is a config by dotted keys; only keys that it has are compared. Data are not, as their
    fingerprint tells.
    """
    found = {}
    for key, (then, now) in differences(other, to_flat(config)).items():
        if key in other and now != "auto" and option_of(key).resume != "free":
            found[key] = (now, then)
    return found


def other_recipe(config: Config, rung: Mapping[str, Any]) -> list[str]:
    """Return the keys that differ between a config and a rung.

    Leaves out evaluation and the keys that a ladder varies: size, length and seed.
    """
    found = []
    for key in recipe_differences(config, rung):
        varied = option_of(key).size or key in LENGTH or key == "seed"
        if not varied and not key.startswith("eval."):
            found.append(key)
    return found
