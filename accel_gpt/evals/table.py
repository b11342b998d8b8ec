"""The figures of an evaluation, for people and for scripts."""

import json
import math
import re

from accel_gpt.training.metrics import Record, without_inf

LOSS = re.compile(r"eval/(train|val)_loss(/.+)?")


def as_table(place: str, step: int | None, figures: Record, fate: str, precision: str) -> str:
    """Losses as a table with their standard errors, then all other figures, then their fate.

    `precision`: no, bf16 or fp16, in which they were computed.
    """
    model = place if step is None else f"{place}, step {step:,}"
    lines = [f"{model}, in {spelled(precision)}"]
    losses = [match for key in figures if (match := LOSS.fullmatch(key))]
    rest = {key: value for key, value in figures.items() if not _of_losses(key)}
    if losses:
        lines += ["", f"{'':<20}{'loss':>16}  {'perplexity':>12}  {'bits per byte':>16}"]
    for match in losses:
        split, name = match[1], match[2] or ""
        loss = figures[match[0]]
        bits = _with_error(figures, f"eval/{split}_bits_per_byte", name)
        perplexity = f"{math.exp(loss):,.2f}" if loss < 700 else "inf"
        whole = _with_error(figures, f"eval/{split}_loss", name)
        lines.append(f"{split + name:<20}{whole:>16}  {perplexity:>12}  {bits:>16}")
    if rest:
        lines.append("")
    for key in rest:
        if not (key.endswith("_se") and key.removesuffix("_se") in rest):
            lines.append(f"{key.removeprefix('eval/'):<32}{_with_error(figures, key, ''):>20}")
    return "\n".join([*lines, "", fate, ""])


def as_json(place: str, step: int | None, figures: Record, fate: str, precision: str) -> str:
    """One JSON object; null for what is not finite."""
    model = {"place": place, "step": step, "precision": spelled(precision)}
    content = model | {"figures": without_inf(figures), "kept": fate}
    return json.dumps(content, ensure_ascii=False) + "\n"


def spelled(precision: str) -> str:
    """The precision as a type."""
    return "float32" if precision == "no" else precision


def _of_losses(key: str) -> bool:
    return bool(re.fullmatch(r"eval/(train|val)_(loss|perplexity|bits_per_byte)(_se)?(/.+)?", key))


def _with_error(figures: Record, key: str, name: str) -> str:
    """`3.1416 ±0.0123`; nothing where there is no such figure."""
    value = figures.get(key + name)
    if value is None:
        return ""
    error = figures.get(f"{key}_se{name}", math.nan)
    return f"{value:.4f}" + (f" ±{error:.4f}" if math.isfinite(error) else "")
