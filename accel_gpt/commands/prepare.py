"""`accel-gpt prepare [PATH|RECIPE]`: convert text to a folder of token shards."""

from dataclasses import fields
from glob import has_magic
from pathlib import Path
from typing import Any

from accel_gpt.commands.options import PrepareCommand, errors_name_options
from accel_gpt.config.data import PrepareConfig
from accel_gpt.console import write_out
from accel_gpt.prepare.prepare import prepare


def run(options: PrepareCommand) -> int:
    """Create a data folder."""
    with errors_name_options("data.prepare."):
        config = prepare_config(options)
        out = Path(options.out or default_folder(config))
        if not prepare(config, out):
            write_out(f"already prepared: {out}\n")
    return 0


def prepare_config(options: PrepareCommand) -> PrepareConfig:
    """Return the config of the data; a missing source is derived from path and dataset."""
    values: dict[str, Any] = {}
    for field in fields(PrepareConfig):
        values[field.name] = getattr(options, field.name)
    if options.source in (None, "auto"):
        if options.path:
            values["source"] = "auto"
        elif options.dataset:
            values["source"] = "dataset"
        else:
            values["source"] = "stdlib"
    return PrepareConfig(**values)


def default_folder(config: PrepareConfig) -> str:
    """Return data/<name of the path, or source>_<tokenizer>."""
    tokenizer = Path(config.tokenizer).name.removesuffix(".json")
    for part in reversed(Path(config.path or "").parts):
        if not has_magic(part):
            return f"data/{Path(part).stem}_{tokenizer}"
    return f"data/{config.source}_{tokenizer}"
