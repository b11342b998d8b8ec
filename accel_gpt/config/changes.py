"""What of a config is not the default. No torch."""

from collections.abc import Mapping
from typing import Any

from accel_gpt.config.experiment import Config
from accel_gpt.config.model import PRESETS
from accel_gpt.config.parse import to_flat, to_plain


def changed(config: Mapping[str, Any]) -> dict[str, Any]:
    """What is set in a config, by dotted keys, and not the default of its preset."""
    default = to_flat(to_plain(Config()))
    preset = PRESETS.get(str(config.get("model.preset")), {})
    default |= {f"model.{key}": value for key, value in preset.items()}
    return {key: value for key, value in config.items() if default.get(key) != value}
