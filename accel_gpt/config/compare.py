"""Compare two configs, each a mapping from dotted keys to values."""

from collections.abc import Mapping
from typing import Any

from accel_gpt.config.experiment import Config
from accel_gpt.config.options import Option, Resume, all_options
from accel_gpt.config.values import to_flat

Differences = dict[str, tuple[Any, Any]]  # key -> (before, now)
UNKNOWN = Option("", resume="ask")  # for a key that only another version has


def option_of(key: str) -> Option:
    """Return the `Option` of a key.

    A key inside an option belongs to that option: `data.val.web` belongs to `data.val`, and
    `data.train[web]` to `data.train`.
    """
    known = all_options(Config)
    name = key.partition("[")[0]
    while name and name not in known:
        name = name.rpartition(".")[0]
    return known.get(name, UNKNOWN)


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> Differences:
    """Return the keys whose values differ, with both values.

    Keys that `before` lacks have their defaults.
    """
    known = {**to_flat(Config()), **before}
    return {
        key: (known.get(key), now.get(key))
        for key in sorted(known.keys() | now.keys())
        if known.get(key) != now.get(key)
    }


def resume_kind(key: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> Resume:
    """Return what a resume does if the value of `key` has changed; see `Option.resume`."""
    one = option_of(key)
    if one.exact and now.get("train.reproducible"):
        return "ask"
    was_null = before.get(key) is None
    is_null = now.get(key) is None
    if one.null_is_another_run and was_null != is_null:
        return "refuse"
    assert one.resume is not None
    return one.resume
