"""The tables of a report: what ran, on what, how far it got, and with which config."""

import json
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import numpy as np

from accel_gpt.config.changes import changed
from accel_gpt.report.markup import Markup, link, section, table, tag, text
from accel_gpt.report.panels import PANELS
from accel_gpt.report.payload import HELLASWAG
from accel_gpt.report.plots import short
from accel_gpt.report.references import hardware
from accel_gpt.report.run_folder import RunFolder

ERRORS = ("_se", "_stderr")  # how the key of a standard error ends
# of eval/, what has a place of its own
SHOWN = ("eval/train_loss", "eval/val_loss", "eval/val_perplexity", "eval/val_bits_per_byte")
LONGEST_VALUE = 400  # characters of a value of the config


def header(runs: Sequence[RunFolder]) -> Markup:
    """Name and state; of one run its final figures as tiles, of several a table."""
    theme = tag("button", "Light / dark", class_="single theme", type="button", id="theme")
    if len(runs) == 1:
        run = runs[0]
        title = tag("div", tag("h1", run.name), badge(run), theme, class_="title")
        tiles = [
            tag("div", tag("b", value), tag("span", name), class_="tile")
            for name, value in final(run)
        ]
        across = len(tiles) if len(tiles) < 7 else -(-len(tiles) // 2)
        shown = tag("div", *tiles, class_=f"tiles card across{max(across, 4)}")
        return Markup(title + shown + facts_card(runs))
    title = tag("div", tag("h1", f"{len(runs)} runs"), theme, class_="title")
    return Markup(title + tag("div", comparison(runs), class_="runs padded scroll card"))


def badge(run: RunFolder) -> Markup:
    """Whether a run is at work, finished, or stopped before its end."""
    kind = "running" if run.writing else "" if run.status == "finished" else "stopped"
    told = run.status
    if run.writing and run.max_steps:
        told += f": step {run.step:,} of {run.max_steps:,}"
    return tag("span", told, class_=f"badge {kind}".strip())


def final(run: RunFolder) -> list[tuple[str, str]]:
    """Name and value of the figures that a run is judged by."""
    figures, found = run.figures, []
    steps, losses = figures.curve("eval/val_loss")
    if len(losses):
        at = int(np.argmin(losses))
        found.append((f"best val loss, step {steps[at]:,.0f}", f"{losses[at]:.4f}"))
    for key, name in (
        ("eval/val_bits_per_byte", "bits per byte, last"),
        ("eval/val_perplexity", "perplexity, last"),
        ("eval/hellaswag_acc_norm", "HellaSwag acc_norm"),
    ):
        if (value := figures.last(key)) is not None:
            found.append((name, f"{value:.2%}" if "hella" in key else f"{value:,.4g}"))
    if len(losses) == 0 and (value := figures.last("train/loss")) is not None:
        found.append(("train loss, last", f"{value:.4f}"))
    found.append(("steps", f"{run.step:,}"))
    if len(figures.tokens) and np.isfinite(figures.tokens[-1]):
        found.append(("tokens", short(float(figures.tokens[-1]))))
    if len(figures.seconds) and np.isfinite(figures.seconds[-1]):
        found.append(("duration", spoken(float(figures.seconds[-1]))))
    for key, name, form in (
        ("perf/tokens_per_second", "tokens/s, median", "{:,.0f}"),
        ("perf/mfu", "MFU, median", "{:.1%}"),
        ("perf/memory_gb", "GB at the peak", "{:.2f}"),
    ):
        if len(values := figures.curve(key)[1]):
            middle = float(values.max() if "memory" in key else np.median(values))
            found.append((name, form.format(middle)))
    return found


def spoken(seconds: float) -> str:
    """`1:02:03`, with days where there are any."""
    return str(timedelta(seconds=round(min(max(seconds, 0.0), 1e9))))


def comparison(runs: Sequence[RunFolder]) -> Markup:
    """A row for each run; the best of a column stands out."""
    each = [dict(final(run)) for run in runs]
    values = [{name.partition(", step")[0]: v for name, v in one.items()} for one in each]
    names = list(dict.fromkeys(name for one in values for name in one))
    lowest = {
        name: min(float(one[name]) for one in values if name in one)
        for name in names
        if name.startswith(("best val loss", "train loss"))
    }
    rows = []
    for number, (run, one) in enumerate(zip(runs, values, strict=True)):
        cells = []
        for name in names:
            best = name in lowest and name in one and float(one[name]) == lowest[name]
            cells.append(tag("td", one.get(name, ""), class_="number best" if best else "number"))
        title = tag("span", run.name, class_=f"swatch c{number % 8}")
        rows.append((Markup(title + badge(run)), cells))
    head = tag("tr", tag("th", "run"), *(tag("th", n, class_="number") for n in names))
    body = [tag("tr", tag("th", name, scope="row"), *cells) for name, cells in rows]
    return tag("table", tag("thead", head), tag("tbody", *body))


# --------------------------------------------------------------------------- what ran


def facts_card(runs: Sequence[RunFolder]) -> Markup:
    """What ran, on what and where: a row each; of several runs a column each, unless all agree."""
    each = [facts(run) for run in runs]
    rows: list[tuple[object, list[object]]] = []
    for name in each[0]:
        values = [one[name] for one in each]
        same = len(set(values)) == 1
        whole = tag("td", values[0], colspan=str(len(runs)))
        rows.append((name, [whole] if same else list(values)))
    head = ["", *(run.name for run in runs)] if len(runs) > 1 else []
    kind = "several" if len(runs) > 1 else "facts"
    return tag("div", table(rows, head, kind), class_="padded scroll card")


def facts(run: RunFolder) -> dict[str, object]:
    """Model, data, hardware, commit, versions and command, as the last launch recorded them."""
    parameters, vocabulary = run.fact("model", "parameters"), run.fact("model", "vocab_size")
    model = [str(run.config.get("model.preset", "not recorded"))]
    if isinstance(parameters, int):
        model.append(f"{parameters:,} parameters")
    for key, name in (("n_layer", "layers"), ("n_head", "heads"), ("n_embd", "channels")):
        if (value := run.config.get(f"model.{key}")) is not None:
            model.append(f"{value} {name}")
    if (value := run.config.get("model.block_size")) is not None:
        model.append(f"context {value}")
    if isinstance(vocabulary, int):
        model.append(f"vocabulary {vocabulary:,}")
    lines = run.fact("data", "lines")
    data = lines if isinstance(lines, list) else [run.config.get("data.train", "not recorded")]
    launched = len(run.launches)
    return {
        "Model": ", ".join(model),
        "Data": Markup("<br>".join(text(line) for line in data)),
        "Hardware": hardware(run),
        "Commit": tag("code", run.fact("commit") or "not recorded"),
        "Launches": f"{launched:,}" + seams_told(run),
        "Versions": versions(run.fact("versions")),
        "Command": tag("code", run.fact("command") or "not recorded"),
    }


def seams_told(run: RunFolder) -> str:
    """Where a run was resumed."""
    steps = [f"{step:,}" for step, _ in run.seams()]
    more = ", ..." if len(steps) > 8 else ""
    return f"; resumed at step {', '.join(steps[:8])}{more}" if steps else ""


def versions(found: object) -> str:
    """`python 3.11.7, torch 2.13.0`."""
    if not isinstance(found, Mapping):
        return "not recorded"
    return ", ".join(f"{name} {version}" for name, version in found.items())


# --------------------------------------------------------------------------- evaluations


def evaluations(runs: Sequence[RunFolder]) -> Markup:
    """HellaSwag beside the references, and the newest figure of every other task."""
    known = {key for panel in PANELS for key in panel.keys} - {"eval/hellaswag_acc_norm"}
    keys = dict.fromkeys(
        key
        for run in runs
        for key in run.figures.named("eval/")
        if key not in known and not key.startswith(SHOWN) and not key.endswith(ERRORS)
    )
    rows: list[tuple[object, list[object]]] = [
        (key.removeprefix("eval/"), [newest(run, key) for run in runs]) for key in keys
    ]
    if not rows:
        return Markup("")
    head = ["", *(run.name for run in runs)]
    parts: list[object] = [tag("div", table(rows, head, "keys"), class_="padded scroll card")]
    if any("hellaswag" in key for key in keys):
        told = [Markup(f"{link(url, name)} {value:g} %") for value, name, url in HELLASWAG]
        parts.append(
            tag("p", "HellaSwag acc_norm of others: ", Markup(", ".join(told)), ".", class_="note")
        )
    return section("Evaluations", "evaluations", *parts)


def newest(run: RunFolder, key: str) -> str:
    """The last value of a figure with its standard error, and its step unless that is the last."""
    steps, values = run.figures.curve(key)
    if not len(values):
        return ""
    told = f"{values[-1]:.4g}"
    for ending in ERRORS:
        if (error := run.figures.last(key + ending)) is not None:
            told += f" ± {error:.2g}"
    return told + (f" (step {steps[-1]:,.0f})" if steps[-1] != run.step else "")


# --------------------------------------------------------------------------- config


def config(runs: Sequence[RunFolder]) -> Markup:
    """What of the config is not the default; of several runs what differs between them."""
    if len(runs) == 1:
        everything = runs[0].config
        if not everything:
            return section("Config", "config", tag("p", "Not recorded.", class_="note"))
        own = changed(everything)
        rest = tag("details", tag("summary", f"All {len(everything)} keys"), keys([everything]))
        note = tag("p", "What is not the default.", class_="note")
        return section(
            "Config", "config", note, tag("div", keys([own]), rest, class_="padded scroll card")
        )
    configs = [run.config for run in runs]
    different = differing(configs)
    if not different:
        told = tag("p", "The configs of these runs are equal.", class_="note")
        return section("Config", "config", told)
    head = ["", *(run.name for run in runs)]
    note = tag("p", "What differs; all other keys are equal.", class_="note")
    card = tag("div", keys(configs, different, head), class_="padded scroll card")
    return section("Config", "config", note, card)


def differing(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Keys whose values are not the same everywhere; the folders always differ."""
    names = dict.fromkeys(key for one in configs for key in one if key != "out_dir")
    return [n for n in names if len({json.dumps(one.get(n), default=str) for one in configs}) > 1]


def keys(
    configs: Sequence[Mapping[str, Any]], names: Sequence[str] = (), head: Sequence[str] = ()
) -> Markup:
    """A row for each key, a column for each config."""
    rows = [(name, [plain(one.get(name)) for one in configs]) for name in names or configs[0]]
    return table(rows, head, "keys")


def plain(value: Any) -> str:
    """A value of the config as YAML would have it on one line."""
    told = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return told if len(told) <= LONGEST_VALUE else f"{told[:LONGEST_VALUE]}..."
