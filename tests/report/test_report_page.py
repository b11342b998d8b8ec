"""The report in a browser: every plot drawn, in both themes, wide and on a phone; no error."""

from collections.abc import Iterator

import pytest

from accel_gpt import cli
from tests.conftest import run_here
from tests.helpers.browser import CHROMIUM, Browser
from tests.helpers.runs import LAUNCH, make_run, record

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium"),
]
PANELS = ["loss", "val_sets", "bits_per_byte", "lr", "grad_norm", "throughput", "mfu", "memory"]
PANELS += ["further_0", "further_1", "further_2"]
WIDTHS = {"desktop": 1280, "phone": 400}
# for each plot: its name, the number of curves inside its frame, and whether text is cut off
DRAWN = """[...document.querySelectorAll('.plot')].map((plot) => {
  const frame = plot.querySelector('.canvas svg').getBoundingClientRect();
  const inside = (box) => box.width + box.height > 0
    && box.left < frame.right && box.right > frame.left && box.top < frame.bottom && box.bottom > frame.top;
  const curves = [...plot.querySelectorAll('.canvas path.curve')];
  const labels = [...plot.querySelectorAll('.axis text')];
  const ticks = labels.map((text) => text.getBoundingClientRect());
  const values = labels.filter((text) => text.getAttribute('text-anchor') === 'end').map((text) => text.textContent);
  return { name: plot.id.slice(5), curves: curves.length,
    drawn: curves.filter((c) => c.getAttribute('d').length > 8 && !c.getAttribute('d').includes('NaN') && inside(c.getBoundingClientRect())).length,
    ticks: ticks.length, alike: values.length - new Set(values).size, cut: ticks.filter((t) => t.left < frame.left - 1 || t.right > frame.right + 1).length };
})"""  # noqa: E501


def rich(step: int) -> dict[str, float]:
    """Return a record with a value for every plot."""
    found = record(
        step,
        **{"perf/mfu": 0.4, "train/skipped": step // 15, "train/spikes": step // 25},
        **{"train/z": 1 / step, "train/norm/0": step, "train/norm/1": step + 1},
    )
    if step % 10 == 0:
        found |= {"eval/val_loss/a": 2.0 + 1 / step, "eval/val_loss/b": 3.0 + 1 / step}
        found |= {"eval/hellaswag_acc_norm": 0.25 + step / 1000}
    return found


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """URLs of a report of one run and a report of two runs."""
    folder = tmp_path_factory.mktemp("reports")
    records = [rich(step) for step in range(1, 41)]
    launches = [LAUNCH, {**LAUNCH, "step": 17, "device": "Another processor"}]  # a strip
    one = make_run(folder / "one", records, launches)
    two = make_run(folder / "two </script><b>", records[:20], seed=2)
    for runs, name in (([one], "one.html"), ([one, two], "two.html")):
        words = ["report", *map(str, runs), "--out", str(folder / name)]
        assert run_here(cli.dispatch, words) == 0
    return {name: (folder / f"{name}.html").as_uri() for name in ("one", "two")}


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


def show(browser: Browser, url: str, theme: str = "light", width: int = 1280) -> None:
    """Open a report."""
    browser.errors.clear()
    browser.requests.clear()
    browser.emulate(prefers_color_scheme=theme)
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.send("Emulation.setDeviceMetricsOverride", **size)
    browser.open(url)
    browser.wait_for("document.documentElement.dataset.drawn")


def check_plots(browser: Browser) -> None:
    """Assert that every plot has its curves and ticks, none cut off."""
    plots = browser.evaluate(DRAWN)
    assert [plot["name"] for plot in plots] == PANELS
    for plot in plots:
        assert plot["drawn"] == plot["curves"] > 0, plot
        assert plot["ticks"] >= 3, plot
        assert plot["cut"] == 0, plot
        assert plot["alike"] == 0, plot
    assert browser.errors == []


@pytest.mark.parametrize(
    ("name", "theme", "device"), [("one", "light", "phone"), ("two", "dark", "desktop")]
)
def test_every_plot_is_drawn(
    name: str, theme: str, device: str, browser: Browser, pages: dict[str, str]
) -> None:
    show(browser, pages[name], theme, WIDTHS[device])
    check_plots(browser)
    assert browser.requests == [pages[name]]
    assert browser.evaluate("document.documentElement.scrollWidth") == WIDTHS[device]
    paper = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    bright = sum(map(int, paper.removeprefix("rgb(").rstrip(")").split(","))) > 3 * 128
    assert bright == (theme == "light")
    assert browser.evaluate("document.querySelectorAll('#plot-loss line.resume').length") == 1
    assert browser.evaluate("document.querySelectorAll('#plot-loss path.skip').length") >= 2
    assert browser.evaluate("document.querySelectorAll('main b b, main > b').length") == 0


def test_dashes_are_resumes_alone_and_memory_begins_at_zero(
    browser: Browser, pages: dict[str, str]
) -> None:
    show(browser, pages["one"])
    dashes = "(query) => getComputedStyle(document.querySelector(query)).strokeDasharray"
    assert browser.evaluate(f"({dashes})('#plot-loss line.resume')") == "7px, 5px"
    curves = "[...document.querySelectorAll('path.curve')]"
    style = browser.evaluate(f"{curves}.map((curve) => getComputedStyle(curve).strokeDasharray)")
    assert {*style} == {"none", "1.5px, 4px"}  # 1.5: dots, with round ends
    ticks = "[...document.querySelectorAll('#plot-memory .axis text[text-anchor=end]')]"
    assert browser.evaluate(f"{ticks}.map((tick) => tick.textContent)")[0] == "0"


def test_every_switch_draws(browser: Browser, pages: dict[str, str]) -> None:
    show(browser, pages["two"])
    count = browser.evaluate("document.querySelectorAll('.tools .switch button').length")
    assert count == 9
    for number in [*range(count), *range(count)]:
        browser.evaluate(f"document.querySelectorAll('.tools .switch button')[{number}].click()")
        check_plots(browser)
    slide = "(v) => { const s = document.querySelector('input'); s.value = v; s.oninput(); }"
    for value in (0, 5):
        browser.evaluate(f"({slide})({value})")
        check_plots(browser)
    paper = "getComputedStyle(document.body).backgroundColor"
    before = browser.evaluate(paper)
    browser.evaluate("document.getElementById('theme').click()")
    assert browser.evaluate(paper) != before
    browser.evaluate("document.getElementById('theme').click()")
    assert browser.evaluate(paper) == before


def test_crosshair_zoom_and_legend(browser: Browser, pages: dict[str, str]) -> None:
    show(browser, pages["one"])
    frame = "document.querySelector('#plot-loss .canvas').getBoundingClientRect()"
    browser.evaluate("document.getElementById('plot-loss').scrollIntoView({block: 'center'})")
    x, y = (browser.evaluate(f"{frame}.{side}") for side in ("left", "top"))

    def mouse(kind: str, at: float, **more: object) -> None:
        browser.send("Input.dispatchMouseEvent", type=kind, x=x + at, y=y + 100, **more)

    mouse("mouseMoved", 700)
    tip = browser.evaluate("document.querySelector('#plot-loss .tip').innerText")
    assert tip.startswith("step ")
    assert {"train, smoothed", "val"} <= set(tip.splitlines())
    assert browser.evaluate("document.querySelectorAll('line.cross').length") == len(PANELS)
    mouse("mousePressed", 500, button="left", buttons=1, clickCount=1)
    mouse("mouseMoved", 700, button="left", buttons=1)
    mouse("mouseReleased", 700, button="left", clickCount=1)
    assert not browser.evaluate("document.getElementById('reset').hidden")
    assert 0 < browser.evaluate("view.zoom[0]") < browser.evaluate("view.zoom[1]") < 40
    browser.evaluate("document.getElementById('reset').click()")
    check_plots(browser)
    val = "[...document.querySelectorAll('#plot-loss .chip')].find((c) => c.innerText === 'val')"
    shown = "document.querySelectorAll('#plot-loss .canvas .c1.dots').length"
    assert browser.evaluate(shown) == 1
    browser.evaluate(f"{val}.click()")
    assert browser.evaluate(shown) == 0
    assert browser.errors == []
