"""Prepare a data folder in a child process of a run, see `missing_data.py`.

    ACCEL_GPT_PREPARE='{"out": "data/x", "source": "text", ...}' python -m accel_gpt.prepare.child

The settings are in the environment, because every user of a machine can read command lines.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path

from accel_gpt.config.data import PrepareConfig
from accel_gpt.console import run_process
from accel_gpt.prepare.prepare import prepare

SETTINGS = "ACCEL_GPT_PREPARE"


def main(_: Sequence[str]) -> int:
    """Prepare the folder; return the exit code."""
    settings = json.loads(os.environ.pop(SETTINGS))
    out = Path(settings.pop("out"))
    prepare(PrepareConfig(**settings), out, keep_changed=True)
    return 0


if __name__ == "__main__":
    run_process(main)
