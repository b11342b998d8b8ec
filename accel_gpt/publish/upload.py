"""Copy a checkpoint to `checkpoint.copy_to`, or push it: one upload of `uploader.py`.

    python -m accel_gpt.publish.upload copy|push CHECKPOINT SETTINGS [--if_missing]

SETTINGS are the arguments of `copy_checkpoint` or `push`, as JSON. The process ends if the training
process dies.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from accel_gpt.console import install_exit_handlers, run_process
from accel_gpt.launch.stopping import die_with_launcher
from accel_gpt.publish.copies import copy_checkpoint
from accel_gpt.publish.push import push


def main(argv: Sequence[str]) -> int:
    """Make one upload; return the exit code."""
    kind, checkpoint, settings, *flags = argv
    die_with_launcher()
    install_exit_handlers()
    if kind == "copy":
        copy_checkpoint(Path(checkpoint), if_missing=bool(flags), **json.loads(settings))
    else:
        push(checkpoint, if_missing=bool(flags), **json.loads(settings))
    return 0


if __name__ == "__main__":
    run_process(main)
