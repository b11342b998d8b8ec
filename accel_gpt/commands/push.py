"""`accel-gpt push RUN --repo user/name`: export a run and upload it to the Hub."""

from accel_gpt.commands.options import PushCommand
from accel_gpt.console import install_exit_handlers, write_out
from accel_gpt.publish.push import push


def run(options: PushCommand) -> int:
    """Export a run and upload it to the Hub."""
    install_exit_handlers()
    step, url = push_model(options)
    write_out(f"step {step:,} is at {url}\n")
    return 0


def push_model(options: PushCommand) -> tuple[int, str]:
    """Export a run and upload it to the Hub; return the step and its address."""
    return push(
        run=options.run,
        repo=options.repo,
        checkpoint=options.checkpoint,
        private=options.private,
        dtype=options.dtype,
        license=options.license,
    )
