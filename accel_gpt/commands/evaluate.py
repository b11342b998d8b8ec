"""`accel-gpt evaluate RUN`: losses and benchmark scores of a model."""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from accel_gpt.config.checks import Positional, Positive, Section
from accel_gpt.config.parse import parse_command
from accel_gpt.console import exit_on_sigterm, write_out

LOSS = re.compile(r"eval/(train|val)_loss(/.+)?")
OF_LOSSES = re.compile(r"eval/(train|val)_(loss|perplexity|bits_per_byte)(_se)?(/.+)?")


@dataclass(frozen=True)
class EvaluateCommand(Section, prefix="evaluate."):
    """Measure a model on held-out data and on questions; those of a run are added to its metrics.

    On several processes: accelerate launch -m accel_gpt.cli evaluate RUN ... Examples:
      accel-gpt evaluate runs/quickstart
      accel-gpt evaluate runs/quickstart --checkpoint best --tokens null
      accel-gpt evaluate gpt2 --data data/web --hellaswag hellaswag_val.jsonl
    """

    run: Positional[str]
    """Folder of a run, of one checkpoint, or in transformers format; or a Hub id, as gpt2."""
    checkpoint: str = "last"
    """Of a run: last, best, or a step."""
    data: str | None = None
    """Data folder, or its URL, whose val split is measured; null: the data of the run."""
    tokens: Positive[int | Literal["run"] | None] = "run"
    """Tokens of each split, spread over it; null: all; run: as many as the run's eval.tokens."""
    hellaswag: str | None = None
    """JSONL file in the original format, or Hub id, as Rowan/hellaswag; null: the run's, if any."""
    hellaswag_limit: Positive[int | None] = None
    """Number of questions of hellaswag, from the first. null: as many as in the run, else all."""
    tasks: tuple[str, ...] = ()
    """Tasks of lm-evaluation-harness, separated by commas, such as arc_easy,piqa; needs lm-eval and
    a single process."""
    tasks_limit: Positive[int | None] = None
    """Number of questions of each task, from the first. null: all."""
    tasks_path: str | None = None
    """Folder with YAML files of more tasks."""
    batch_size: Positive[int | None] = None
    """Windows per process and forward; null: the run's train.micro_batch_size, else 8."""
    json: bool = False
    """One JSON object in place of a table."""
    allow_pickle: bool = False
    """Also read weights in pickle files (.bin), without running what they hold."""


def main(argv: Sequence[str]) -> int:
    """Print the metrics of a model, and add those of a run to its metrics."""
    options = parse_command(EvaluateCommand, argv, "accel-gpt evaluate")
    exit_on_sigterm()
    from accel_gpt.commands.evaluate_model import evaluate

    write_out(evaluate(options))
    return 0


def as_table(name: str, step: int | None, metrics: dict[str, float], kept: str, dtype: str) -> str:
    """Losses as a table with their standard errors, then all other metrics, then what was kept."""
    lines = [f"{name if step is None else f'{name}, step {step:,}'}, in {dtype}"]
    losses = [match for key in metrics if (match := LOSS.fullmatch(key))]
    if losses:
        lines += ["", f"{'':<20}{'loss':>16}  {'perplexity':>12}  {'bits per byte':>16}"]
    for match in losses:
        split, source = match[1], match[2] or ""
        value = metrics[match[0]]
        loss = with_error(metrics, f"eval/{split}_loss", source)
        perplexity = f"{math.exp(value):,.2f}" if value < 700 else "inf"
        bits = with_error(metrics, f"eval/{split}_bits_per_byte", source)
        lines.append(f"{split + source:<20}{loss:>16}  {perplexity:>12}  {bits:>16}")
    rest = [key for key in metrics if not OF_LOSSES.fullmatch(key)]
    if rest:
        lines.append("")
    for key in rest:
        if not (key.endswith("_se") and key.removesuffix("_se") in rest):
            lines.append(f"{key.removeprefix('eval/'):<32}{with_error(metrics, key):>20}")
    return "\n".join([*lines, "", kept, ""])


def as_json(name: str, step: int | None, metrics: dict[str, float], kept: str, dtype: str) -> str:
    """One JSON object; null for what is not finite."""
    finite = {key: value if math.isfinite(value) else None for key, value in metrics.items()}
    content = {"model": name, "step": step, "precision": dtype, "metrics": finite, "kept": kept}
    return json.dumps(content, ensure_ascii=False) + "\n"


def with_error(metrics: dict[str, float], key: str, source: str = "") -> str:
    """`3.1416 ±0.0123`; "" if there is no such metric."""
    value = metrics.get(key + source)
    if value is None:
        return ""
    error = metrics.get(f"{key}_se{source}", math.nan)
    return f"{value:.4f}" + (f" ±{error:.4f}" if math.isfinite(error) else "")
