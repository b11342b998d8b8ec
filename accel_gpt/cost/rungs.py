"""Make the configs of a ladder's rungs: one config at several depths and lengths. No torch.

`given` maps the dotted keys that a config sets to their values.
"""

from collections.abc import Mapping
from typing import Any

from accel_gpt.config.compare import differences, option_of
from accel_gpt.config.depth import HEAD_SIZE, scaling_parameters, width
from accel_gpt.config.experiment import Config
from accel_gpt.config.parse import config_of, to_flat
from accel_gpt.config.plan import LENGTH
from accel_gpt.cost.flops import flops_per_token
from accel_gpt.cost.scaling import Size


def config_at(
    given: Mapping[str, Any], depth: int, max_steps: int, seed: int | None = None
) -> Config:
    """Build the config of a rung: `given` with another depth, length and, if not None, seed."""
    varied = {"model.depth", *shape_keys(depth), *LENGTH}
    values = {key: value for key, value in given.items() if key not in varied}
    values |= depth_keys(given, depth)
    values["train.max_steps"] = max_steps
    if seed is not None:
        values["seed"] = seed
    return config_of(values)


def depth_keys(given: Mapping[str, Any], depth: int) -> dict[str, Any]:
    """Return the keys that set the depth: model.depth if `given` sets it, else the shape."""
    if given.get("model.depth") is not None:
        return {"model.depth": depth}
    return shape_keys(depth)


def shape_keys(depth: int) -> dict[str, Any]:
    """Return the keys of the shape that follows from a depth."""
    channels = width(depth)
    return {
        "model.n_layer": depth,
        "model.n_head": channels // HEAD_SIZE,
        "model.n_embd": channels,
    }


def run_size(config: Config, vocab_size: int, tokens: int) -> Size:
    """Compute the size of a run, from which a law predicts the loss."""
    return Size(
        parameters=scaling_parameters(config.model, vocab_size),
        tokens=tokens,
        flops=flops_per_token(config.model, vocab_size) * tokens,
    )


def recipe_differences(config: Config, other: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the keys that affect the loss and differ, with the values in `config` and in `other`.

    `other` maps dotted keys to values; keys that it lacks are not compared. The data are not
    compared either, as a fingerprint identifies them.
    """
    found = {}
    for key, (then, now) in differences(other, to_flat(config)).items():
        if key in other and now != "auto" and option_of(key).resume != "free":
            found[key] = (now, then)
    return found


def other_recipe(config: Config, rung: Mapping[str, Any]) -> list[str]:
    """Return the keys that affect the loss and differ between a config and a rung.

    Ignores the keys of evaluation and the keys that a ladder varies: size, length and seed.
    """
    found = []
    for key in recipe_differences(config, rung):
        varied = option_of(key).size or key in LENGTH or key == "seed"
        if not varied and not key.startswith("eval."):
            found.append(key)
    return found
