"""Write the report of runs as one HTML page that needs no network.

Renders the template `page.html`, with `page.css` and `page.js` embedded. A Content-Security-Policy
with their hashes blocks all other scripts and styles. The texts of a run are untrusted, so Jinja2
escapes them.
"""

import base64
import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import numpy as np

from accel_gpt import __version__
from accel_gpt.config.values import changed_keys
from accel_gpt.console import format_clock
from accel_gpt.report.machines import COLUMNS, bands, rows, summary
from accel_gpt.report.payload import MOST_POINTS, all_marks, payload
from accel_gpt.report.plots import short
from accel_gpt.report.runs import NamedRun
from accel_gpt.runs.folder import ERROR_ENDINGS, PROMPT_END, is_benchmark

MOST_STEPS = 12  # steps with samples to show per run
LONGEST_VALUE = 400  # characters of a value of the config
BEST_LOSS = "best val loss"
TRAIN_LOSS = "train loss, last"
BITS_PER_BYTE = "best bits per byte"
NOT_RECORDED = "not recorded"
HERE = Path(__file__).parent


def build_page(runs: Sequence[NamedRun], health: Sequence[Sequence[Any]] = ()) -> str:
    """Return the whole page.

    `health`: the lines of the doctor for each run, see health/case.py. A run may have none.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=drop_unprintable,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    style = (HERE / "page.css").read_text("utf-8")
    script = (HERE / "page.js").read_text("utf-8")
    return environment.get_template("page.html").render(
        runs=runs,
        title=runs[0].name if len(runs) == 1 else f"{len(runs)} runs",
        version=__version__,
        style=style,
        style_hash=content_hash(style),
        script=script,
        script_hash=content_hash(script),
        data=payload(runs),
        health=health,
        prompt_end=PROMPT_END,
        results=final_results(runs[0]),
        comparison=compare_results(runs),
        facts=facts_table(runs),
        notes=explain_curves(runs),
        columns=COLUMNS,
        machines=[(rows(run), summary(run)) for run in runs],
        evaluations=evaluations_table(runs),
        samples=[sample_columns(run, index) for index, run in enumerate(runs) if run.samples],
        config=config_table(runs),
    )


def drop_unprintable(value: object) -> object:
    """Remove control characters from a text of the template; return other values unchanged."""
    is_markup = hasattr(value, "__html__")
    if not isinstance(value, str) or is_markup:
        return value
    return "".join(c for c in value if c.isprintable() or c in "\n\t")


def content_hash(content: str) -> str:
    """Return the hash by which a Content-Security-Policy allows a script or style."""
    digest = hashlib.sha256(content.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"


def explain_curves(runs: Sequence[NamedRun]) -> list[str]:
    """Return sentences on how to read the curves."""
    notes: list[str] = []
    empty = [run.name for run in runs if not len(run.metrics.steps)]
    if empty:
        notes.append(f"No metrics yet: {', '.join(empty)}.")
    if any(all_marks(run) for run in runs):
        notes.append(
            "Dashed vertical lines: resumes. Red triangles: skipped updates. Orange triangles: "
            "loss spikes."
        )
    if len(runs) == 1 and runs[0].stages:
        notes.append(f"Bands: {'; '.join(stage.text for stage in runs[0].stages)}.")
    elif any(run.stages for run in runs):
        notes.append("Dotted vertical lines in the color of a run: its stages.")
    if len(runs) == 1 and bands(runs[0]):
        notes.append("Strip above the x axis: the machines, in the colors of their table.")
    if not same_tokenizer(runs):
        notes.append(
            "The runs have different tokenizers. Compare their bits per byte, not their losses in "
            "nats per token."
        )
    columns = [column for run in runs for column in run.metrics.columns.values()]
    if any(len(rows) > MOST_POINTS for rows, _ in columns):
        notes.append(
            f"Curves of more than {MOST_POINTS:,} points are thinned to the lowest and the highest "
            "value of each bucket. Smoothing uses the means of the buckets. metrics.jsonl has all "
            "values."
        )
    return notes


# --------------------------------------------------------------------------- results


class Result(NamedTuple):
    """A final metric of a run."""

    label: str
    value: str
    step: int | None = None  # step of the value
    loss: float = math.nan  # loss or bits per byte, by which runs are compared


def final_results(run: NamedRun) -> list[Result]:
    """Return the final metrics of a run."""
    metrics = run.metrics
    results: list[Result] = []
    steps, losses = metrics.curve("eval/val_loss")
    counted = run.in_last_stage(steps) & (steps > 0)  # without the loss that the run began with
    losses = losses[counted]
    steps = steps[counted]
    if len(losses):
        i = int(losses.argmin())
        best = int(steps[i])
        results.append(Result(BEST_LOSS, f"{losses[i]:.4f}", best, losses[i]))
        for key, label in (
            ("eval/val_bits_per_byte", BITS_PER_BYTE),
            ("eval/val_perplexity", "best perplexity"),
        ):
            steps, values = metrics.curve(key)
            for value in values[steps == best].tolist():  # of the same step as the loss
                results.append(Result(label, f"{value:,.4g}", best, value))
    train_loss = metrics.last("train/loss")
    if not len(losses) and train_loss is not None:
        results.append(Result(TRAIN_LOSS, f"{train_loss:.4f}", loss=train_loss))
    results.append(Result("steps", f"{run.last_step:,}"))
    if len(metrics.tokens) and np.isfinite(metrics.tokens[-1]):
        results.append(Result("tokens", short(float(metrics.tokens[-1]))))
    if len(metrics.seconds) and np.isfinite(metrics.seconds[-1]):
        seconds = max(float(metrics.seconds[-1]), 0.0)
        results.append(Result("duration", format_clock(seconds)))
    for key, label, form, summarize in (
        ("perf/tokens_per_second", "tokens/s, median", ",.0f", np.median),
        ("perf/mfu", "MFU, median", ".1%", np.median),
        ("perf/memory_gb", "peak memory, GB", ".2f", np.max),
    ):
        _, values = metrics.curve(key)
        if len(values):
            results.append(Result(label, format(float(summarize(values)), form)))
    return results


def compare_results(runs: Sequence[NamedRun]) -> dict[str, Any]:
    """Return `labels` of results, and a row for each run: values, each with whether it is the best.

    The best is the lowest loss if the runs have the same tokenizer, else the lowest bits per byte.
    """
    results = [{result.label: result for result in final_results(run)} for run in runs]
    labels = list(dict.fromkeys(label for of_run in results for label in of_run))
    ranked = (BEST_LOSS, TRAIN_LOSS) if same_tokenizer(runs) else (BITS_PER_BYTE,)
    lowest: dict[str, float] = {}
    for label in ranked:
        losses = [of_run[label].loss for of_run in results if label in of_run]
        if losses:
            lowest[label] = min(losses)
    rows = []
    for of_run in results:
        row = []
        for label in labels:
            result = of_run.get(label)
            best = result is not None and result.loss == lowest.get(label)
            row.append((result.value if result else "", best))
        rows.append(row)
    return {"labels": labels, "rows": rows}


def same_tokenizer(runs: Sequence[NamedRun]) -> bool:
    """Return whether all runs recorded the same tokenizer."""
    found = {
        (
            str(run.last_launch("data", "tokenizer")),
            str(run.last_launch("data", "tokenizer_fingerprint")),
            str(run.last_launch("model", "vocab_size")),
        )
        for run in runs
    }
    return len(found) == 1


# --------------------------------------------------------------------------- tables


def facts_table(runs: Sequence[NamedRun]) -> list[tuple[str, list[str]]]:
    """Return a row for each fact, with one value if all runs agree, else a value for each run."""
    facts = [run_facts(run) for run in runs]
    rows = []
    for name in facts[0]:
        values = [of_run[name] for of_run in facts]
        if not any(values):
            continue
        rows.append((name, values[:1] if len(set(values)) == 1 else values))
    return rows


def run_facts(run: NamedRun) -> dict[str, str]:
    """Return model, data, hardware, commit, versions and command of the last launch."""
    data = run.last_launch("data", "lines")
    if not isinstance(data, list):
        data = [in_one_line(run.config.get("data.train", NOT_RECORDED))]
    versions = run.last_launch("versions")
    if isinstance(versions, dict):
        packages = ", ".join(f"{name} {version}" for name, version in versions.items())
    else:
        packages = NOT_RECORDED
    return {
        "Model": describe_model(run),
        "Own code": describe_code(run),
        "Data": "\n".join(map(str, data)),
        "Hardware": describe_hardware(run),
        "Commit": str(run.last_launch("commit") or NOT_RECORDED),
        "Versions": packages,
        "Command": str(run.last_launch("command") or NOT_RECORDED),
    }


def describe_code(run: NamedRun) -> str:
    """Return the file of --code, its hash and its functions; "" without a file."""
    code = run.last_launch("code")
    if not isinstance(code, dict):
        return ""
    functions = ", ".join(map(str, own_functions(run)))
    return f"{code.get('file')} ({str(code.get('sha256'))[:12]}): {functions}"


def own_functions(run: NamedRun) -> list[object]:
    """Return the names of the functions in the file of --code."""
    functions = run.last_launch("code", "functions")
    return functions if isinstance(functions, list) else []


def describe_model(run: NamedRun) -> str:
    """Return preset or file, parameters and vocabulary; the config has the shape."""
    name = run.config.get("model.preset", NOT_RECORDED)
    if "model" in own_functions(run):
        name = run.last_launch("code", "file")
    parts = [in_one_line(name)]
    parameters = run.last_launch("model", "parameters")
    if isinstance(parameters, int):
        parts.append(f"{parameters:,} parameters")
    vocab_size = run.last_launch("model", "vocab_size")
    if isinstance(vocab_size, int):
        parts.append(f"vocabulary {vocab_size:,}")
    return ", ".join(parts)


def describe_hardware(run: NamedRun) -> str:
    """Return devices and precision: `8 x NVIDIA H100, precision bf16`."""
    device = run.last_launch("device")
    if not isinstance(device, str):
        return NOT_RECORDED
    precision = run.last_launch("mixed_precision")
    shown = "fp32" if precision == "no" else precision
    return f"{run.last_launch('processes')} x {' '.join(device.split())}, precision {shown}"


def evaluations_table(runs: Sequence[NamedRun]) -> list[tuple[str, list[str]]]:
    """Return a row for each result besides the losses of train and val: a value for each run."""
    keys = dict.fromkeys(key for run in runs for key in run.metrics.keys("eval/"))
    rows = []
    for key in keys:
        if is_benchmark(key):
            values = [newest_value(run, key) for run in runs]
            rows.append((key.removeprefix("eval/"), values))
    return rows


def newest_value(run: NamedRun, key: str) -> str:
    """Return the last value of a metric with its standard error.

    The step is added if the run has a later record.
    """
    steps, values = run.metrics.curve(key)
    if not len(values):
        return ""
    text = f"{values[-1]:.4g}"
    for ending in ERROR_ENDINGS:
        error = run.metrics.last(key + ending)
        if error is not None:
            text += f" ± {error:.2g}"
    if steps[-1] != run.step:
        text += f" (step {steps[-1]:,.0f})"
    return text


def sample_columns(run: NamedRun, number: int) -> dict[str, Any]:
    """Return the samples of a run at up to `MOST_STEPS` steps, evenly spaced."""
    steps = list(run.samples)
    chosen = sorted({round(i) for i in np.linspace(0, len(steps) - 1, MOST_STEPS)})
    columns = [(steps[i], run.sample_texts(steps[i])) for i in chosen]
    return {"run": run.name, "number": number, "columns": columns, "steps": len(steps)}


def config_table(runs: Sequence[NamedRun]) -> list[tuple[str, list[str]]]:
    """Return a row for each setting that is not the default; of several runs, that differs."""
    configs = [run.config for run in runs]
    names = list(changed_keys(configs[0]))
    if len(runs) > 1:
        names = []
        for name in dict.fromkeys(name for config in configs for name in config):
            values = {json.dumps(config.get(name), default=str) for config in configs}
            if len(values) > 1 and name != "out_dir":
                names.append(name)
    return [(name, [in_one_line(config.get(name)) for config in configs]) for name in names]


def in_one_line(value: Any) -> str:
    """Return a value of the config on one line, cut after `LONGEST_VALUE` characters."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}..."
