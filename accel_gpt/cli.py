"""`accel-gpt COMMAND ...`: runs `main` of `commands/COMMAND.py`, which is imported only then."""

import difflib
import importlib
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from accel_gpt import __version__
from accel_gpt.config.removed import REMOVED_COMMANDS
from accel_gpt.console import run_main, write_out
from accel_gpt.errors import UserError

COMMANDS: Mapping[str, str] = MappingProxyType(  # what `accel-gpt --help` says of each
    {
        "train": "train a GPT as a config says, or go on with its run",
        "prepare": "text -> tokenized shards",
        "sample": "text from a run, an exported folder or a Hub id",
        "evaluate": "loss, bits per byte and questions, with standard errors",
        "export": "a folder that transformers opens, proven equal",
        "push": "the same to the Hub, with a model card",
        "inspect": "verify data or a checkpoint",
        "plan": "size, FLOPs, memory, hours and cost of a config; does it fit?",
        "sweep": "a run for each combination of values, compared over seeds",
        "ladder": "train small sizes; a law of the loss, for plan to predict with",
        "bench": "tokens/s, MFU, memory of a config; where a step's time goes",
        "report": "curves and samples of runs, one HTML file",
        "verify-resume": "kill and continue runs: equal to never stopping?",
    }
)


def dispatch(argv: Sequence[str]) -> int:
    """Run the command that `argv` names; returns its exit code."""
    if not argv or argv[0] in ("-h", "--help"):
        write_out(overview())
        return 0
    if argv[0] in ("-V", "--version"):
        write_out(f"accel-gpt {__version__}\n")
        return 0
    if argv[0] in REMOVED_COMMANDS:
        raise UserError(f"accel-gpt {argv[0]} no longer exists; {REMOVED_COMMANDS[argv[0]]}")
    if argv[0] not in COMMANDS:
        near = difflib.get_close_matches(argv[0], COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(COMMANDS)}"
        raise UserError(f"unknown command {argv[0]!r}; {hint}")
    module = importlib.import_module(f"accel_gpt.commands.{argv[0].replace('-', '_')}")
    return int(module.main(argv[1:]))


def overview() -> str:
    """The help of `accel-gpt` itself."""
    lines = [f"  {name:<13} {text}" for name, text in COMMANDS.items()]
    return (
        "usage: accel-gpt COMMAND [...]\n\nPretrain GPT language models.\n\n"
        + "\n".join(lines)
        + "\n\naccel-gpt COMMAND --help lists its options with types, defaults and units.\n"
    )


def main() -> None:
    """Entry point of the `accel-gpt` script."""
    sys.exit(run_main(dispatch, sys.argv[1:]))


if __name__ == "__main__":
    main()
