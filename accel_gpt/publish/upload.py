"""The child process of one upload of `uploader.py`.

    python -m accel_gpt.publish.copies CHECKPOINT SETTINGS [--if_missing]
    python -m accel_gpt.publish.push CHECKPOINT SETTINGS [--if_missing]

SETTINGS are the arguments of `copy_checkpoint` or `push`, as JSON. The process ends if the training
process dies.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

from accel_gpt.console import install_exit_handlers
from accel_gpt.launcher import die_with_launcher


def upload_as_child(argv: Sequence[str], upload: Callable[..., Any]) -> int:
    """Make the upload of a child's command line; return the exit code."""
    checkpoint, settings, *flags = argv
    die_with_launcher()
    install_exit_handlers()
    upload(checkpoint, if_missing=bool(flags), **json.loads(settings))
    return 0
