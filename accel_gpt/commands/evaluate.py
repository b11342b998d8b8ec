"""`accel-gpt evaluate RUN`: losses and benchmark scores of a model."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro

from accel_gpt.config.parse import parse_command
from accel_gpt.console import exit_on_sigterm, write_out
from accel_gpt.errors import positive, require


@dataclass(frozen=True)
class EvaluateCommand:
    """Measure a model on held-out data and on questions; a run's figures are kept in its metrics.

    On several processes: accelerate launch -m accel_gpt.cli evaluate RUN ...
    """

    run: Annotated[str, tyro.conf.Positional]
    """Folder of a run, of one checkpoint, or in transformers format; or a Hub id, as gpt2."""
    checkpoint: str = "last"
    """Of a run: last, best, or a step."""
    data: str | None = None
    """Data folder, or its URL, whose val split is measured; null: the data of the run."""
    tokens: str = "run"
    """Tokens of each split, spread over it; null: all; run: as many as the run's eval.tokens."""
    hellaswag: str | None = None
    """JSONL file in the original format, or Hub id, as Rowan/hellaswag; null: the run's, if any."""
    tasks: tuple[str, ...] = ()
    """Tasks of lm-evaluation-harness, separated by commas, as arc_easy,piqa; needs lm-eval."""
    include_path: str | None = None
    """Folder with more tasks for lm-evaluation-harness."""
    limit: int | None = None
    """First questions of hellaswag and of each task; null: as many as in the run, else all."""
    batch_size: int | None = None
    """Windows per process and forward; null: the run's train.micro_batch_size, else 8."""
    json: bool = False
    """One JSON object in place of a table."""
    allow_pickle: bool = False
    """Also read weights in pickle files (.bin), without running what they hold."""

    def __post_init__(self) -> None:
        positive("evaluate", self, "limit", "batch_size")
        require(
            self.tokens in ("run", "null") or bool(re.fullmatch("0*[1-9][0-9]{0,15}", self.tokens)),
            f"--tokens is {self.tokens}; expected a whole number above 0, null for all, or run",
        )


def main(argv: Sequence[str]) -> int:
    """Print the metrics of a model, and add those of a run to its metrics."""
    options = parse_command(EvaluateCommand, argv, "accel-gpt evaluate")
    exit_on_sigterm()
    from accel_gpt.commands.evaluate_model import evaluate

    write_out(evaluate(options))
    return 0
