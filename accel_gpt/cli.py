"""`accel-gpt COMMAND ...`: parse the command line, then import the command and run it."""

import importlib
from collections.abc import Sequence

from accel_gpt import __version__
from accel_gpt.commands.options import COMMANDS
from accel_gpt.console import run_process, write_out
from accel_gpt.errors import UserError, did_you_mean
from accel_gpt.launcher import use_slurm_variables


def dispatch(argv: Sequence[str]) -> int:
    """Run the command that `argv` names; returns its exit code."""
    use_slurm_variables()
    if argv and argv[0] in ("-V", "--version"):
        write_out(f"accel-gpt {__version__}\n")
        return 0
    if argv[:1] == ["help"] and len(argv) > 1:  # accel-gpt help COMMAND
        argv = [argv[1], "--help"]
    if not argv or argv[0] in ("help", "-h", "--help"):
        write_out(overview())
        return 0
    name, *arguments = argv
    if name not in COMMANDS:
        near = did_you_mean(name, COMMANDS, f"expected {', '.join(COMMANDS)}")
        raise UserError(f"unknown command {name!r}; {near}")
    options = COMMANDS[name].parse(arguments)
    # the command line is valid, so the slow import of torch is worth it
    command = importlib.import_module(f"accel_gpt.commands.{options.module()}")
    return int(command.run(options))


def overview() -> str:
    """Return the help of `accel-gpt` itself."""
    lines = [f"  {name:<13} {command.summary}" for name, command in COMMANDS.items()]
    return (
        "usage: accel-gpt COMMAND [...]\n\nPretrain GPT language models.\n\n"
        + "\n".join(lines)
        + "\n\naccel-gpt COMMAND --help lists its options with types, defaults and units.\n"
    )


def main() -> None:
    """Run the `accel-gpt` script."""
    run_process(dispatch)
