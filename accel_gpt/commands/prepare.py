"""`accel-gpt prepare [SOURCE]`: convert text to a folder of token shards."""

from dataclasses import fields
from glob import has_magic
from pathlib import Path

from accel_gpt.commands.options import PrepareCommand
from accel_gpt.config.data import PrepareConfig
from accel_gpt.console import write_out
from accel_gpt.prepare.upload import prepare_at


def run(options: PrepareCommand) -> int:
    """Create a data folder, or upload one."""
    values = {field.name: getattr(options, field.name) for field in fields(PrepareConfig)}
    config = PrepareConfig(**values)
    out = options.out or default_folder(config)
    if not prepare_at(config, out):
        write_out(f"already prepared: {out}\n")
    return 0


def default_folder(config: PrepareConfig) -> str:
    """Return data/<last part of the source>_<tokenizer>."""
    tokenizer = Path(config.tokenizer).name.removesuffix(".json")
    parts = [part for part in Path(str(config.source)).parts if not has_magic(part)]
    return f"data/{Path(parts[-1]).stem if parts else 'text'}_{tokenizer}"
