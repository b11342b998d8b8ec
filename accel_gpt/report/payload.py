"""The numbers of a page, as the JSON that its script draws; long runs thinned.

    runs        [{name, clock {step, tokens, seconds}, flops_per_token, marks [{step, kind, text}]}]
    panels      [{name, title, unit, log, smooth, low, keys, guides [{value, label}],
                  curves [{run, key, name, color, style, s, v, ms, m}]}]
    reference   {clock, flops_per_token, s, v}, or null

`s` are steps and `v` values; of a thinned curve `v` has the lowest and highest of each bucket, and
`m` the means that are smoothed, at the steps `ms`.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from accel_gpt.report.figures import Figures, Floats, means, thin
from accel_gpt.report.panels import PANELS, Panel, color, key_name, style
from accel_gpt.report.run_folder import RunFolder

MOST_POINTS = 1600  # of a curve, drawn in some 1,200 pixels
MOST_MARKS = 400  # of a run
HELLASWAG = (
    (25.0, "random", ""),
    (
        29.55,
        "GPT-2 124M",
        "https://github.com/karpathy/build-nanogpt/blob/master/hellaswag.py",
    ),
    (33.7, "GPT-3 124M", "https://arxiv.org/abs/2005.14165"),
)
"""acc_norm in percent: one of four endings; completion style; table H.1, zero-shot."""


def payload(runs: Sequence[RunFolder], reference: Mapping[str, Any] | None) -> str:
    """The JSON of the page, with nothing in it that HTML could take for a tag."""
    content = {
        "runs": [run_entry(run) for run in runs],
        "panels": [found for panel in PANELS if (found := panel_entry(panel, runs, reference))],
        "reference": reference_entry(reference),
    }
    text = json.dumps(content, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def run_entry(run: RunFolder) -> dict[str, Any]:
    """Name, clock and marks of a run."""
    figures = run.figures
    kept = np.unique(np.linspace(0, max(len(figures.steps) - 1, 0), MOST_POINTS).astype(int))
    clock = {
        key: rounded(values[kept])
        for key, values in zip(
            ("step", "tokens", "seconds"),
            (figures.steps, figures.tokens, figures.seconds),
            strict=True,
        )
        if len(values) and np.isfinite(values).all()
    }
    return {
        "name": run.name,
        "clock": clock,
        "flops_per_token": run.flops_per_token(),
        "marks": all_marks(run)[:MOST_MARKS],
    }


def all_marks(run: RunFolder) -> list[dict[str, Any]]:
    """Where later launches took the run up, and where updates were skipped or losses spiked."""
    found: list[dict[str, Any]] = []
    for step, times in run.seams():
        text = f"resumed at step {step:,}" + (f", {times} times" if times > 1 else "")
        found.append({"step": step, "kind": "resume", "text": text})
    for key, kind, one, several in (
        ("train/skipped", "skip", "skipped update", "skipped updates"),
        ("train/spikes", "spike", "spike of the loss", "spikes of the loss"),
    ):
        steps, counts = run.figures.curve(key)
        before = np.concatenate([[0.0], counts[:-1]])
        since = np.concatenate([[0.0], steps[:-1]])
        for i in np.flatnonzero(counts > before):
            count, first, last = int(counts[i] - before[i]), int(since[i]) + 1, int(steps[i])
            where = f"step {last:,}" if first >= last else f"steps {first:,} to {last:,}"
            text = f"{count:,} {one if count == 1 else several}, {where}"
            found.append({"step": last, "kind": kind, "text": text})
    return found


def panel_entry(
    panel: Panel, runs: Sequence[RunFolder], reference: Mapping[str, Any] | None
) -> dict[str, Any] | None:
    """One plot; None where no run has recorded what it shows."""
    keys = list(dict.fromkeys(key for run in runs for key in panel.present(run.figures)))
    keys.sort(key=lambda key: panel.keys.index(key) if key in panel.keys else 0)
    curves = [
        {
            "run": number,
            "key": key,
            "name": key_name(key) if len(panel.keys) > 1 or key not in panel.keys else "",
            "color": color(panel, key, keys),
            "style": style(key),
            **points(run.figures, key, panel),
        }
        for key in keys
        for number, run in enumerate(runs)
        if key in run.figures.columns
    ]
    if not curves:
        return None
    return {
        **{"name": panel.name, "title": panel.title, "unit": panel.unit, "log": panel.log},
        **{"smooth": panel.smooth, "low": panel.low, "keys": len(keys)},
        "guides": guides(panel, reference),
        "curves": curves,
    }


def points(figures: Figures, key: str, panel: Panel) -> dict[str, Any]:
    """Steps and values of a curve, thinned."""
    steps, values = figures.curve(key)
    values = values * panel.factor
    if len(values) <= MOST_POINTS:
        return {"s": rounded(steps), "v": rounded(values)}
    kept = thin(values, MOST_POINTS)
    found = {"s": rounded(steps[kept]), "v": rounded(values[kept])}
    if panel.smooth:
        buckets = MOST_POINTS // 2
        found |= {"ms": rounded(means(steps, buckets)), "m": rounded(means(values, buckets))}
    return found


def guides(panel: Panel, reference: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Horizontal lines to compare with."""
    if panel.name == "hellaswag":
        return [{"value": value, "label": f"{name} {value:g} %"} for value, name, _ in HELLASWAG]
    if panel.name == "loss" and reference:
        return [
            {"value": point["val_loss"], "label": f"{point['label']}: {point['val_loss']:.2f}"}
            for point in reference["points"]
        ]
    return []


def reference_entry(reference: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The curve of a reference."""
    if reference is None:
        return None
    curve = reference["curve"]
    return {
        "clock": {key: curve[key] for key in ("step", "tokens", "seconds")},
        "flops_per_token": reference.get("flops_per_token"),
        "s": curve["step"],
        "v": curve["val_loss"],
    }


def rounded(values: Floats) -> list[float | int]:
    """Six digits of each, as a plot shows no more; whole numbers stay whole."""
    return [int(v) if v == int(v) else float(f"{v:.6g}") for v in values.tolist()]


def thinned(runs: Sequence[RunFolder]) -> bool:
    """Whether a curve has more points than are drawn."""
    return any(len(rows) > MOST_POINTS for run in runs for rows, _ in run.figures.columns.values())
