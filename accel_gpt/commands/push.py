"""`accel-gpt push RUN --repo user/name`: export a run and upload it to the Hub."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from accel_gpt.config.options import REQUIRED, option
from accel_gpt.config.parse import parse_command
from accel_gpt.console import exit_on_sigterm, write_out
from accel_gpt.errors import require


@dataclass(frozen=True)
class PushCommand:
    """Export a run and upload it to the Hub with a model card, its metrics and its curves.

    Examples:
      accel-gpt push runs/quickstart --repo user/quickstart
      accel-gpt push runs/quickstart --repo user/quickstart --checkpoint best --private
      accel-gpt push runs/quickstart --repo user/quickstart --include_state --license mit
    """

    run: str = option(
        REQUIRED,
        "Folder of a run, or of one checkpoint.",
        positional=True,
    )
    repo: str = option(
        "",
        "Repository, user/name; made if it is missing.",
    )
    checkpoint: str | None = option(
        None,
        "last, best, or a step; null: the one that --revision step-N names, else last.",
    )
    revision: str | None = option(
        None,
        "Branch to upload to, made if it is missing; null: main, with a tag step-N.",
    )
    private: bool = option(
        False,
        "Make the repository a private one.",
    )
    dtype: Literal["fp32", "bf16", "fp16"] = option(
        "fp32",
        "Of the weights.",
    )
    include_state: bool = option(
        False,
        "Upload the whole checkpoint too, so that training can resume from hf://user/name@step-N.",
    )
    license: str | None = option(
        None,
        "Of the weights, as the Hub spells it: apache-2.0, mit, cc-by-4.0, ...",
    )
    data_license: str | None = option(
        None,
        "Of the data, for the model card.",
    )

    def __post_init__(self) -> None:
        require(bool(self.repo), "--repo is missing; give the repository as user/name")


def main(argv: Sequence[str]) -> int:
    """Export a run and upload it to the Hub."""
    options = parse_command(PushCommand, argv, "accel-gpt push")
    exit_on_sigterm()
    from accel_gpt.hub.push import push

    write_out(push(**vars(options)))
    return 0
