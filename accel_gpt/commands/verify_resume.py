"""`accel-gpt verify-resume CONFIG`: kill and resume runs; equal to never stopping?"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro

from accel_gpt.config.parse import load_config, parse_command, split_options
from accel_gpt.console import exit_on_sigterm
from accel_gpt.errors import not_negative, require


@dataclass(frozen=True)
class VerifyResumeCommand:
    """Prove that a config's runs, killed and launched again, equal one that was never stopped.

    Any --section.key of the config may be set as well, but the length of the run and where it
    writes. Exit code 1 when something differs.
    """

    config: Annotated[str, tyro.conf.Positional]
    """YAML file, or name of a shipped config, as for train."""
    steps: int = 20
    """Steps of each run."""
    kills: int = 5
    """Launches that end with SIGKILL to all their processes at a random moment; 0: one run more,
    not stopped, tells whether the machine repeats itself."""
    processes: tuple[int, ...] = (1,)
    """Numbers of processes, separated by commas, of which each launch has one at random; the run
    that is never stopped has the first."""
    seed: int = 0
    """Of the moments and of the numbers of processes; that of the run stays the config's."""
    keep: bool = False
    """Keep the temporary folder of the runs also when all is equal."""

    def __post_init__(self) -> None:
        require(self.steps >= 2, f"steps is {self.steps}; it must be 2 or more, to stop between")
        not_negative("verify-resume", self, "kills")
        require(
            bool(self.processes) and min(self.processes) > 0,
            f"processes is {','.join(map(str, self.processes))}; expected numbers above 0",
        )


def main(argv: Sequence[str]) -> int:
    """Kill and resume runs of a config; 1 where they differ from one that was never stopped."""
    from accel_gpt.hub.pretrained import inherit

    own, rest = split_options(VerifyResumeCommand, argv)
    options = parse_command(VerifyResumeCommand, own, "accel-gpt verify-resume")
    config = load_config([options.config, *rest], "accel-gpt verify-resume", inherit)
    exit_on_sigterm()
    from accel_gpt.commands.resume_trial import verify_resume

    return verify_resume(options, config)
