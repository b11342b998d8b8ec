"""One HTML file with everything in it: it asks no server for anything.

`page.html` has the places, `page.css` and `page.js` what goes there; the script and the style are
allowed by their hashes alone, so that a browser runs nothing that a run has brought.
"""

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accel_gpt import __version__
from accel_gpt.report.markup import Markup, link, section, tag, text
from accel_gpt.report.payload import MOST_MARKS, MOST_POINTS, all_marks, payload, thinned
from accel_gpt.report.run_folder import RunFolder
from accel_gpt.report.sample_texts import sample_files, texts_in
from accel_gpt.report.tables import config, evaluations, facts_card, header

MOST_STEPS = 12  # of samples, of one run
MOST_TEXTS = 8  # of one step
LONGEST_TEXT = 3000  # characters
HERE = Path(__file__).parent


def build_page(runs: Sequence[RunFolder], reference: Mapping[str, Any] | None) -> str:
    """The whole page."""
    script, style, frame = (
        (HERE / name).read_text(encoding="utf-8") for name in ("page.js", "page.css", "page.html")
    )
    several = facts_card(runs) if len(runs) > 1 else Markup("")
    parts = {
        "title": text(runs[0].name if len(runs) == 1 else f"{len(runs)} runs"),
        "style_hash": content_hash(style),
        "script_hash": content_hash(script),
        "style": style,
        "script": script,
        "header": header(runs),
        "notes": notes(runs, reference),
        "sections": "\n".join(
            [
                evaluations(runs),
                samples(runs),
                config(runs),
                section("What ran", "what", several) if several else "",
            ]
        ),
        "footer": text(f"accel-gpt {__version__} report"),
        "data": payload(runs, reference),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda place: parts[place[1]], frame)


def content_hash(content: str) -> str:
    """The hash by which a Content-Security-Policy allows a script or style."""
    digest = hashlib.sha256(content.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"


def notes(runs: Sequence[RunFolder], reference: Mapping[str, Any] | None) -> Markup:
    """How the curves are to be read."""
    found: list[object] = []
    if any(len(run.figures.steps) == 0 for run in runs):
        names = ", ".join(run.name for run in runs if len(run.figures.steps) == 0)
        found.append(f"No figures yet: {names}.")
    kinds = {mark["kind"] for run in runs for mark in all_marks(run)[:MOST_MARKS]}
    for kind, told in (
        ("resume", "Dashed vertical lines: a later launch took the run up there."),
        ("skip", "Red triangles: updates that were skipped."),
        ("spike", "Orange triangles: spikes of the loss."),
    ):
        found += [told] if kind in kinds else []
    if any(len(all_marks(run)) > MOST_MARKS for run in runs):
        found.append(f"Of the marks of a run the first {MOST_MARKS} are drawn.")
    if thinned(runs):
        found.append(
            f"Curves of more than {MOST_POINTS:,} points are thinned: the lowest and the highest "
            "of each bucket are drawn, and the smoothed curve is that of the means; --csv has all."
        )
    lines = [tag("p", " ".join(map(str, found)), class_="note")] if found else []
    if reference:
        about = [f"Grey: {reference['title']} ("]
        about += [link(reference["source"], reference["source"]), ")"]
        where = [str(reference[key]) for key in ("hardware", "commit") if reference.get(key)]
        about += [f"; {', '.join(where)}"] if where else []
        lines.append(tag("p", *about, ".", class_="note"))
    return Markup("".join(lines))


# --------------------------------------------------------------------------- samples


def samples(runs: Sequence[RunFolder]) -> Markup:
    """The texts of each run, a column for each step, the same prompt on the same height."""
    strips = []
    for number, run in enumerate(runs):
        files = list(sample_files(run.path).items())
        kept = [files[i] for i in spread(len(files), MOST_STEPS)]
        columns = [step_column(step, path) for step, path in kept]
        if not columns:
            continue
        if len(runs) > 1:
            strips.append(tag("h3", tag("span", run.name, class_=f"swatch c{number % 8}")))
        if len(kept) < len(files):
            told = f"{len(kept)} of {len(files):,} steps with samples."
            strips.append(tag("p", told, class_="note"))
        strips.append(tag("div", *columns, class_="strip card", tabindex="0"))
    return section("Samples", "samples", *strips) if strips else Markup("")


def spread(count: int, most: int) -> list[int]:
    """At most `most` of `count` places, evenly, first and last among them."""
    if count <= most:
        return list(range(count))
    return [round(i * (count - 1) / (most - 1)) for i in range(most)]


def step_column(step: int, path: Path) -> Markup:
    """The texts of one step."""
    try:
        texts = texts_in(path)
    except OSError:
        texts = []
    shown = [tag("pre", shortened(one)) for one in texts[:MOST_TEXTS]]
    if len(texts) > MOST_TEXTS:
        shown.append(tag("p", f"and {len(texts) - MOST_TEXTS:,} more", class_="note"))
    return tag("div", tag("h3", f"Step {step:,}"), *shown, class_="step")


def shortened(content: str) -> str:
    """A text of at most `LONGEST_TEXT` characters, and what was cut."""
    if len(content) <= LONGEST_TEXT:
        return content
    return f"{content[:LONGEST_TEXT]}\n[{len(content) - LONGEST_TEXT:,} characters more]"
