"""Make the pictures of the terminal and the report in docs/images, each light and dark.

    python -m benchmarks.pictures [--only terminal report] [--config quickstart]
        [--work runs/pictures] [--out docs/images]

terminal: trains the config in a terminal of 84 columns and draws the screen at the end of the run.
report: draws the curves of the same run's report.

Trains for as long as the config does. The run and the terminal's text are kept in `--work`: delete
that folder to train again. Needs chromium and pip install -c constraints.txt -e '.[dev]'.
"""

import argparse
import base64
import io
import shutil
import sys
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

import pyte
from PIL import Image

from accel_gpt.training.display import BLOCKS
from benchmarks.common import OURS, ROOT, SCHEMES, run_command
from tests.helpers.browser import Browser
from tests.helpers.terminals import Terminal

COLUMNS = 84
ROWS = 30
LONGEST_SECONDS = 3600  # of the run
WIDTH = 1000  # of the page, in its pixels
PIXELS = 2  # of the picture, for each pixel of the page
REPORT_PLOTS = ".plot:nth-child(-n+4)"
BAR = "━╸╺"
BAR_REST = ("3a3a3a", "default")  # colors of the part of the bar that is not filled
COLORS = {  # colors of the terminal: light, dark
    "paper": ("#ffffff", "#0d1117"),
    "head": ("#eaeef2", "#1c2128"),
    "line": ("#d0d7de", "#3d444d"),
    "title": ("#59636e", "#9198a1"),
    "ink": ("#1f2328", "#e6edf3"),
    "cyan": ("#1b7c83", "#39c5cf"),
    "green": ("#1a7f37", "#3fb950"),
}
STYLE = """
:root { color-scheme: light dark; }
body { margin: 0; background: var(--paper); }
#window { width: max-content; border: 1px solid var(--line); border-radius: 8px; overflow: hidden;
  background: var(--paper); color: var(--ink); }
header { padding: 7px; border-bottom: 1px solid var(--line); background: var(--head);
  color: var(--title); font: 600 13px/18px system-ui, "DejaVu Sans", sans-serif;
  text-align: center; }
pre { margin: 0; padding: 12px 16px; font: 14px/20px "DejaVu Sans Mono", monospace; }
i { display: inline-block; width: 1ch; height: 20px; vertical-align: top; }
"""


def main() -> None:
    """Train, unless the run is finished, and draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--config", default="quickstart")
    parser.add_argument("--work", type=Path, default=Path("runs/pictures"))
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    args = parser.parse_args()
    work = args.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    written = train(args.config, work)
    with Browser(work / "browser") as browser:
        size = {"width": WIDTH, "height": WIDTH, "deviceScaleFactor": PIXELS, "mobile": False}
        browser.send("Emulation.setDeviceMetricsOverride", **size)
        if "terminal" in args.only:
            page = work / "terminal.html"
            page.write_text(terminal_page(args.config, written), encoding="utf-8")
            draw(browser, page, "#window", args.out / "terminal.png")
        if "report" in args.only:
            page = work / "report.html"
            run_folder = next((work / "runs").iterdir())
            run_command([sys.executable, *OURS, "report", run_folder, "--out", page])
            draw(browser, page, REPORT_PLOTS, args.out / "report.png")
    shutil.rmtree(work / "browser", ignore_errors=True)


def train(config: str, work: Path) -> bytes:
    """Train in a terminal and return all that it wrote; reuse the text of a finished run."""
    file = work / "terminal.txt"
    if not file.exists():
        path = Path(config)
        command = [sys.executable, *OURS, "train", str(path.resolve()) if path.exists() else config]
        with Terminal(command, COLUMNS, ROWS, cwd=work, PYTHONPATH=str(ROOT)) as terminal:
            if terminal.finish(LONGEST_SECONDS) != 0:
                sys.exit(terminal.written.decode(errors="replace"))
            file.write_bytes(terminal.written)
    return file.read_bytes()


def draw(browser: Browser, page: Path, selector: str, picture: Path) -> None:
    """Draw the parts of a page that a selector finds, in a light and a dark picture."""
    for scheme, end in SCHEMES.items():
        browser.emulate(prefers_color_scheme=scheme)
        browser.open(page.as_uri())
        x, y, right, bottom = browser.evaluate(
            f"""(() => {{
                const boxes = [...document.querySelectorAll({selector!r})]
                    .map((one) => one.getBoundingClientRect());
                const least = (side) => Math.min(...boxes.map((box) => box[side]));
                const most = (side) => Math.max(...boxes.map((box) => box[side]));
                return [least("left"), least("top"), most("right"), most("bottom")];
            }})()"""
        )
        place = {"x": x, "y": y, "width": right - x, "height": bottom - y, "scale": 1}
        found = browser.send("Page.captureScreenshot", clip=place, captureBeyondViewport=True)
        image = Image.open(io.BytesIO(base64.b64decode(found["data"])))
        smaller = image.convert("RGB").quantize(256, dither=Image.Dither.NONE)
        smaller.save(picture.with_stem(picture.stem + end), optimize=True)


# --------------------------------------------------------------------------- terminal


def terminal_page(config: str, written: bytes) -> str:
    """Return a page with the last screen of the run, in the colors of the browser's scheme."""
    screen = pyte.Screen(COLUMNS, ROWS)
    pyte.ByteStream(screen).feed(written)
    rows = [[screen.buffer[row][column] for column in range(COLUMNS)] for row in range(ROWS)]
    for end in (0, -1):
        while not "".join(cell.data for cell in rows[end]).strip():
            rows.pop(end)
    colors = "".join(
        f"--{name}: light-dark({light}, {dark}); " for name, (light, dark) in COLORS.items()
    )
    text = "\n".join(map(row_of_html, rows))
    return (
        f'<!doctype html><meta charset="utf-8"><style>:root {{ {colors} }}{STYLE}</style>'
        f'<div id="window"><header>accel-gpt train {escape(config)}</header>'
        f"<pre>{text}</pre></div>"
    )


def row_of_html(cells: list[Any]) -> str:
    """Return a row of the screen as HTML."""
    parts = []
    for (foreground, bold), group in groupby(cells, key=lambda cell: (cell.fg, cell.bold)):
        text = "".join(cell.data for cell in group)
        if foreground == "cyan" and set(text) <= set(BLOCKS):
            # the curve is drawn, so that no font leaves gaps between rows
            parts += [block_of_html(block) for block in text]
            continue
        color = "inherit"
        if set(text) & set(BAR):
            color = "var(--line)" if foreground in BAR_REST else "var(--green)"
        weight = "bold" if bold else "normal"
        parts.append(f'<span style="color: {color}; font-weight: {weight}">{escape(text)}</span>')
    return "".join(parts)


def block_of_html(block: str) -> str:
    """Return a block of the curve as HTML."""
    share = f"{100 * BLOCKS.index(block) / (len(BLOCKS) - 1)}%"
    return (
        f'<i style="background: linear-gradient(to top, var(--cyan) {share}, #0000 {share})"></i>'
    )


PARTS = ("terminal", "report")


if __name__ == "__main__":
    main()
