"""The page of a report: one HTML file that needs no network.

`page.html` is the template, `page.css` and `page.js` are put into it; a Content-Security-Policy
with their hashes lets a browser run nothing else. Texts of a run can be anybody's: Jinja2 escapes
them.
"""

import base64
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import numpy as np

from accel_gpt import __version__
from accel_gpt.config.parse import changed_keys
from accel_gpt.config.plan import plural
from accel_gpt.report.payload import (
    HELLASWAG,
    MOST_MARKS,
    MOST_POINTS,
    PLOTS,
    all_marks,
    is_thinned,
    payload,
)
from accel_gpt.report.plots import short
from accel_gpt.report.runs import NamedRun

MOST_STEPS = 12  # of samples, of one run
MOST_TEXTS = 8  # of one step
LONGEST_TEXT = 3000  # characters of a sample
LONGEST_VALUE = 400  # characters of a value of the config
ERRORS = ("_se", "_stderr")  # how the key of a standard error ends
# what of eval/ is shown elsewhere
SHOWN = ("eval/train_loss", "eval/val_loss", "eval/val_perplexity", "eval/val_bits_per_byte")
# labels of results that rank runs
BEST_LOSS, TRAIN_LOSS, BITS_PER_BYTE = "best val loss", "train loss, last", "bits per byte, last"
PER_TOKEN = (BEST_LOSS, TRAIN_LOSS)
HERE = Path(__file__).parent


def build_page(
    runs: Sequence[NamedRun],
    reference: Mapping[str, Any] | None,
    series: Mapping[str, Any] | None = None,
    title: str | None = None,
) -> str:
    """The whole page; `series`: what a sweep or a ladder found: `heading`, `image`, a PNG as
    base64 or None, `lines` of text and `rows` of a table, the first of which names its columns."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=drop_unprintable,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    style, script = ((HERE / f"page.{kind}").read_text("utf-8") for kind in ("css", "js"))
    return environment.get_template("page.html").render(
        runs=runs,
        title=title or (runs[0].name if len(runs) == 1 else f"{len(runs)} runs"),
        series=series,
        reference=reference,
        version=__version__,
        style=style,
        style_hash=content_hash(style),
        script=script,
        script_hash=content_hash(script),
        data=payload(runs, reference),
        results=results(runs[0]),
        comparison=comparison(runs),
        facts=facts_table(runs),
        notes=notes(runs),
        evaluations=evaluations(runs),
        hellaswag=HELLASWAG,
        samples=[samples(run, number) for number, run in enumerate(runs) if run.samples],
        config=config(runs),
    )


def drop_unprintable(value: object) -> object:
    """A value as a template shows it: a text without control characters."""
    if not isinstance(value, str) or hasattr(value, "__html__"):  # which is markup
        return value
    return "".join(c for c in value if c.isprintable() or c in "\n\t")


def content_hash(content: str) -> str:
    """The hash by which a Content-Security-Policy allows a script or style."""
    digest = hashlib.sha256(content.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"


def notes(runs: Sequence[NamedRun]) -> list[str]:
    """How to read the curves."""
    found: list[str] = []
    if empty := [run.name for run in runs if not len(run.metrics.steps)]:
        found.append(f"No metrics yet: {', '.join(empty)}.")
    marks = [all_marks(run) for run in runs]
    kinds = {mark["kind"] for one in marks for mark in one[:MOST_MARKS]}
    for kind, note in (
        ("resume", "Dashed vertical lines: the run was resumed."),
        ("skip", "Red triangles: skipped updates."),
        ("spike", "Orange triangles: loss spikes."),
    ):
        found += [note] if kind in kinds else []
    if any(len(one) > MOST_MARKS for one in marks):
        found.append(f"Only the first {MOST_MARKS} marks of a run are drawn.")
    if not same_tokenizer(runs):
        found.append(
            "The runs have different tokenizers: compare their bits per byte, not their losses in "
            "nats per token."
        )
    if any(map(is_thinned, runs)):
        found.append(
            f"Curves of more than {MOST_POINTS:,} points are thinned: the lowest and the highest "
            "value of each bucket are drawn, the smoothed curve is that of the means. "
            "metrics.jsonl has all values."
        )
    return found


# --------------------------------------------------------------------------- results


class Result(NamedTuple):
    """A number that a run is judged by."""

    label: str
    value: str
    step: int | None = None  # at which it was reached
    loss: float = math.nan  # or bits per byte: to compare runs by


def results(run: NamedRun) -> list[Result]:
    """The final metrics of a run."""
    metrics, found = run.metrics, []
    steps, losses = metrics.curve("eval/val_loss")
    train_loss = metrics.last("train/loss")
    if len(losses):
        i = int(losses.argmin())
        found.append(Result(BEST_LOSS, f"{losses[i]:.4f}", int(steps[i]), losses[i]))
    for key, label, form in (
        ("eval/val_bits_per_byte", BITS_PER_BYTE, ",.4g"),
        ("eval/val_perplexity", "perplexity, last", ",.4g"),
        ("eval/hellaswag_acc_norm", "HellaSwag acc_norm", ".2%"),
    ):
        if (value := metrics.last(key)) is not None:
            found.append(Result(label, format(value, form), loss=value))
    if not len(losses) and train_loss is not None:
        found.append(Result(TRAIN_LOSS, f"{train_loss:.4f}", None, train_loss))
    found.append(Result("steps", f"{run.last_step:,}"))
    if len(metrics.tokens) and np.isfinite(metrics.tokens[-1]):
        found.append(Result("tokens", short(float(metrics.tokens[-1]))))
    if len(metrics.seconds) and np.isfinite(metrics.seconds[-1]):
        seconds = round(min(max(float(metrics.seconds[-1]), 0.0), 1e9))
        found.append(Result("duration", str(timedelta(seconds=seconds))))
    for key, label, form, summarize in (
        ("perf/tokens_per_second", "tokens/s, median", ",.0f", np.median),
        ("perf/mfu", "MFU, median", ".1%", np.median),
        ("perf/memory_gb", "peak memory, GB", ".2f", np.max),
    ):
        if len(values := metrics.curve(key)[1]):
            found.append(Result(label, format(float(summarize(values)), form)))
    return found


def comparison(runs: Sequence[NamedRun]) -> dict[str, Any]:
    """The results of several runs: labels, and for each run the values and which are the best.

    Losses in nats per token compare runs of one tokenizer, bits per byte those of several.
    """
    each = [{result.label: result for result in results(run)} for run in runs]
    labels = list(dict.fromkeys(label for one in each for label in one))
    ranked = PER_TOKEN if same_tokenizer(runs) else (BITS_PER_BYTE,)
    lowest = {
        label: min(one[label].loss for one in each if label in one)
        for label in labels
        if label in ranked
    }
    rows = []
    for one in each:
        row = []
        for label in labels:
            result = one.get(label)
            best = result is not None and result.loss == lowest.get(label)
            row.append((result.value if result else "", best))
        rows.append(row)
    return {"labels": labels, "rows": rows}


def same_tokenizer(runs: Sequence[NamedRun]) -> bool:
    """Whether all runs have one tokenizer, as far as they recorded it."""
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
    """What ran, on what and where: a row each, with one value if all runs agree."""
    each = [run_facts(run) for run in runs]
    rows = [(name, [one[name] for one in each]) for name in each[0]]
    return [(name, values[:1] if len(set(values)) == 1 else values) for name, values in rows]


def run_facts(run: NamedRun) -> dict[str, str]:
    """Model, data, hardware, commit, versions and command, as the last launch recorded them."""
    parameters, vocabulary = (run.last_launch("model", k) for k in ("parameters", "vocab_size"))
    model = [in_one_line(run.config.get("model.preset", "not recorded"))]
    if isinstance(parameters, int):
        model.append(f"{parameters:,} parameters")
    for key, label in (
        ("n_layer", "{} layers"),
        ("n_head", "{} heads"),
        ("n_embd", "{} channels"),
        ("block_size", "context {}"),
    ):
        if (value := run.config.get(f"model.{key}")) is not None:
            model.append(label.format(in_one_line(value)))
    if isinstance(vocabulary, int):
        model.append(f"vocabulary {vocabulary:,}")
    data, versions = run.last_launch("data", "lines"), run.last_launch("versions")
    if not isinstance(data, list):
        data = [in_one_line(run.config.get("data.train", "not recorded"))]
    launches, steps = f"{len(run.launches):,}", [f"{step:,}" for step, _ in run.resumes()]
    if steps:
        launches += f"; resumed at step {', '.join(steps[:8])}{', ...' if len(steps) > 8 else ''}"
    return {
        "Model": ", ".join(model),
        "Data": "\n".join(map(str, data)),
        "Hardware": hardware(run),
        "Commit": str(run.last_launch("commit") or "not recorded"),
        "Launches": launches,
        "Versions": ", ".join(f"{name} {version}" for name, version in versions.items())
        if isinstance(versions, dict)
        else "not recorded",
        "Command": str(run.last_launch("command") or "not recorded"),
    }


def hardware(run: NamedRun) -> str:
    """`8 x NVIDIA H100, precision bf16, torch 2.13.0`."""
    processes, device = run.last_launch("processes"), run.last_launch("device")
    if not isinstance(device, str) or not isinstance(processes, int):
        return "not recorded"
    torch, threads = run.last_launch("versions", "torch"), run.last_launch("threads_per_process")
    parts = [f"{processes} x {' '.join(device.split())}"]
    if isinstance(threads, int) and "cpu" in str(torch):
        parts.append(plural(threads, "thread"))
    precision = run.last_launch("mixed_precision")
    parts.append(f"precision {'fp32' if precision == 'no' else precision}")
    return ", ".join([*parts, f"torch {torch}"])


def evaluations(runs: Sequence[NamedRun]) -> list[tuple[str, list[str]]]:
    """The newest values of HellaSwag and of other tasks: a row each, a value for each run."""
    drawn = {key for panel in PLOTS for key in panel.keys} - {"eval/hellaswag_acc_norm"}
    keys = [
        key
        for key in dict.fromkeys(key for run in runs for key in run.metrics.keys("eval/"))
        if key not in drawn and not key.startswith(SHOWN) and not key.endswith(ERRORS)
    ]
    return [(key.removeprefix("eval/"), [newest(run, key) for run in runs]) for key in keys]


def newest(run: NamedRun, key: str) -> str:
    """The last value of a metric with its standard error, and its step unless that is the last."""
    steps, values = run.metrics.curve(key)
    if not len(values):
        return ""
    text = f"{values[-1]:.4g}"
    for ending in ERRORS:
        if (error := run.metrics.last(key + ending)) is not None:
            text += f" ± {error:.2g}"
    return text + (f" (step {steps[-1]:,.0f})" if steps[-1] != run.step else "")


def samples(run: NamedRun, number: int) -> dict[str, Any]:
    """The texts that a run sampled, at up to `MOST_STEPS` steps spread evenly."""
    steps = list(run.samples)
    chosen = sorted({round(i) for i in np.linspace(0, len(steps) - 1, MOST_STEPS)})
    columns = []
    for step in (steps[i] for i in chosen):
        texts = run.sample_texts(step)
        cut = [
            f"{text[:LONGEST_TEXT]}\n[{len(text) - LONGEST_TEXT:,} more characters]"
            if len(text) > LONGEST_TEXT
            else text
            for text in texts[:MOST_TEXTS]
        ]
        columns.append((step, cut, len(texts) - len(cut)))
    return {"run": run.name, "number": number, "columns": columns, "steps": len(steps)}


def config(runs: Sequence[NamedRun]) -> dict[str, Any]:
    """The settings of one run that are not the default, and all; of several those that differ."""
    configs = [run.config for run in runs]
    names = list(dict.fromkeys(name for one in configs for name in one))
    if len(runs) == 1:
        shown = list(changed_keys(configs[0]))
    else:
        values = {n: {json.dumps(one.get(n), default=str) for one in configs} for n in names}
        shown = [name for name in names if len(values[name]) > 1 and name != "out_dir"]

    def table(keys: Sequence[str]) -> list[tuple[str, list[str]]]:
        return [(name, [in_one_line(one.get(name)) for one in configs]) for name in keys]

    return {"rows": table(shown), "all": table(names) if len(runs) == 1 else []}


def in_one_line(value: Any) -> str:
    """A value of the config as YAML has it on one line."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}..."
