"""Select what everybody may see of a run: the allow-list of a push.

Everything that is not listed here stays private. Device, precision and commit of a launch are
public too.
"""

import re
from collections.abc import Mapping
from typing import Any

from accel_gpt.config.experiment import STAGE_KEYS, Config
from accel_gpt.config.options import all_options
from accel_gpt.runs.folder import RunFolder

# options, and sections of options: numbers as they are, texts as `public_name` returns them
CONFIG = ("seed", "stages", "data", "model", "train", "optim", "schedule", "eval")
# keys of metrics.jsonl whose numbers are public; a source may stand behind the last slash
METRIC = re.compile(r"(step|tokens|time|(train|data|perf|eval)/\w+)(/[\w.-]+)?")
BEST = re.compile(rf"((min|max) )?{METRIC.pattern}")
HOMES = ("home", "users")  # folders whose children are named for people


def public_name(path: str) -> str:
    """Return the last part of a path, URL or id; `data` if nothing harmless is left."""
    *parents, name = re.split(r"[/\\:]", re.split("[?#;&]", path.strip())[0].rstrip("/\\:"))
    parent = parents[-1].lower() if parents else "."
    is_host = parent == "" and len(parents) > 1  # or a bucket, after ://
    is_plain = re.fullmatch(r"[\w*][\w.+* -]*", name) is not None
    return name if is_plain and not is_host and parent not in HOMES else "data"


def public_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the public options of a config, by dotted keys."""
    public = {
        key: public_value(config[key])
        for key in all_options(Config)
        if key in config and key.partition(".")[0] in CONFIG
    }
    if BEST.fullmatch(str(config.get("eval.best"))):  # the name of a metric is no path
        public["eval.best"] = config["eval.best"]
    return public


def public_value(value: Any) -> Any:
    """Return a number or switch as it is, and names in place of paths.

    Of a source or a stage, return what they may hold, and no more.
    """
    if isinstance(value, str):
        return public_name(value)
    if isinstance(value, list):
        return [public_value(item) for item in value]
    if isinstance(value, Mapping):
        known = ("path", "weight", "from", *STAGE_KEYS)
        return {key: public_value(value[key]) for key in known if key in value}
    return value


def public_records(run: RunFolder) -> list[dict[str, Any]]:
    """Return the public numbers in metrics.jsonl, a record per step."""
    return [
        {
            key: value
            for key, value in record.items()
            if METRIC.fullmatch(key) and (value is None or isinstance(value, int | float))
        }
        for record in run.records()
    ]
