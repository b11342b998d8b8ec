"""The output of a run and of a task: live on a terminal, plain lines elsewhere."""

import io
import re
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console
from rich.text import Text

from accel_gpt.training import display as displays
from accel_gpt.training.display import BLOCKS, LABEL_COLUMNS, Display, Progress, loss_curve
from tests.conftest import QUIET
from tests.helpers.terminals import Terminal

Arguments = Callable[..., list[str]]
TRAINER = (sys.executable, "-m", "accel_gpt", "train")
LONG = ("--train.max_steps", "100000", "--checkpoint.every", "0", *QUIET)
SHOWN, HIDDEN = b"\x1b[?25h", b"\x1b[?25l"  # the cursor


def make(active: bool = True) -> Display:
    return Display(active)


def drawn(
    display: Display, width: int, monkeypatch: pytest.MonkeyPatch, height: int = 24
) -> list[str]:
    """Return the lines of the panel without colours."""
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("LINES", str(height))
    file = io.StringIO()
    Console(file=file, width=width, color_system=None).print(display.panel())
    return file.getvalue().splitlines()


@pytest.mark.parametrize("width", [200, 60, 1])
def test_the_panel_fits_the_terminal(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    display = make()
    for step in range(1, 16):
        display.show(
            {
                **{"step": step, "tokens": step * 524_288, "train/loss": 11 / step},
                **{"train/lr": 6e-4, "train/grad_norm": 0.5, "eval/val_loss": 3.2},
                **{"eval/val_bits_per_byte": 1.234, "train/skipped": 0},
                **{"perf/tokens_per_second": 1_234_567.0, "perf/mfu": 0.412},
                **{"perf/memory_gb": 71.2, "perf/step_ms": 424.2},
            },
            20,
            75.0,
        )
    lines = drawn(display, width, monkeypatch)
    assert max(map(len, lines)) <= min(width, 100)
    if width >= 100:
        assert lines[0].split()[0] == "11.000"
        assert lines[5].split()[0] == "0"
        assert re.match(r"step 15/20 ━+", lines[6])
        assert lines[6].split()[-2] == "75%"
        assert lines[7:] == [
            "loss 0.7333   lr 6.00e-04   norm 0.50   skipped 0",
            "val 3.2000   1.2340 bits/byte",
            "1,234,567 tok/s   MFU 41.2%   71.20 GB   424.2 ms/step   7,864,320 tokens",
        ]


def heights(lines: list[Text]) -> list[float]:
    """Return the height of each column of a curve, from 0 to 1."""
    blocks = [line.plain[LABEL_COLUMNS:] for line in lines]
    return [sum(map(BLOCKS.index, column)) / 8 / len(lines) for column in zip(*blocks, strict=True)]


def test_the_height_of_the_curve_is_the_loss_from_zero() -> None:
    """Neither the lowest loss nor the newest one is at the bottom."""
    losses = [(step, 4.0) for step in range(1, 41)]
    losses[9] = (10, 8.0)
    losses[19] = (20, 2.0)
    losses[39] = (40, 3.0)
    lines = loss_curve(losses, 40, width=40, height=8)
    assert (lines[0].plain.split()[0], lines[-1].plain.split()[0]) == ("8.000", "0")
    assert heights(lines) == [loss / 8 for _, loss in losses]
    assert loss_curve([(1, -2.0), (2, -3.0)], 2, width=40, height=8) == []


def test_the_curve_grows_with_the_run() -> None:
    """Between two records it is their line, and right of the last one it is empty."""
    curve = heights(loss_curve([(1, 8.0), (9, 4.0), (17, 4.0)], 65, width=65, height=8))
    assert curve == [1 - step / 16 for step in range(8)] + [0.5] * 9
    whole = heights(loss_curve([(1, 8.0), (17, 4.0)], 17, width=65, height=8))
    assert len(whole) == 65


def test_figures_of_an_earlier_step_than_the_bar_say_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    display = make()
    figures = {"train/loss": 2.0, "perf/tokens_per_second": 50.0, "eval/val_loss": 3.0}
    display.show({"step": 5, "tokens": 500, **figures}, 20, 75.0)
    display.show({"step": 8, "tokens": 800, "eval/val_loss": 2.5}, 20, 60.0)
    now = 110.0
    bar, *rows = drawn(display, 80, monkeypatch)
    assert (bar.split()[1], bar.split()[-1]) == ("8/20", "0:00:50")
    assert rows == ["step 5: loss 2.0000", "val 2.5000", "step 5: 50 tok/s   500 tokens"]


def test_plain_lines_off_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with make() as display:
        display.show({"step": 4, "tokens": 400, "train/loss": 2.0}, 20, 75.0)
        display.log("x[a:car:2] [red] 😀 ❤\ufe0f")
    lines = ["step 4/20 | loss 2.0000 | left 0:01:15", "x[a:car:2] [red] 😀 ❤\ufe0f"]
    assert capsys.readouterr().err.splitlines() == lines


def test_each_named_set_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    losses = {"eval/val_loss": 2.0, "eval/val_loss/web": 1.5, "eval/val_loss/code": 2.5}
    with make() as display:
        display.show({"step": 4, "tokens": 400, **losses, "eval/val_loss_se": 0.1}, 20, 75.0)
    line = "step 4/20 | val 2.0000 | val web 1.5000 | val code 2.5000 | left 0:01:15"
    assert capsys.readouterr().err.splitlines() == [line]


def test_other_ranks_print_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)  # still no panel
    with make(active=False) as display:
        display.show({"step": 4, "tokens": 400, "eval/val_loss": 2.0}, 20, 75.0)
        display.log("hello")
        display.log("WARNING: it is late")
    assert capsys.readouterr().err == ""


def test_a_terminal_that_is_gone_ends_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone(io.StringIO):
        """A terminal that was closed."""

        gone, encoding = False, "utf-8"

        def isatty(self) -> bool:
            return True

        def write(self, text: str) -> int:
            if self.gone:
                raise OSError(5, "Input/output error")
            return len(text)

    file = Gone()
    monkeypatch.setattr(sys, "stderr", file)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(displays, "FRAMES_PER_SECOND", 100)
    with make() as display:
        display.show({"step": 3, "tokens": 300}, 20, 75.0)
        assert display.live
        file.gone = True
        display.show({"step": 4, "tokens": 400, "eval/val_loss": 2.0}, 20, 75.0)
        display.log("hello")
        time.sleep(0.05)  # for some frames
    assert sys.stderr is file


@pytest.mark.slow
def test_ctrl_c_saves_and_leaves_the_terminal_as_it_was(
    small_run: Arguments, tmp_path: Path
) -> None:
    command = [*TRAINER, *small_run(*LONG, "--log.every", "70")]
    with Terminal(command, cwd=tmp_path) as shell:
        shell.wait_for("tok/s")
        shell.press(b"\x03")
        assert shell.finish() == 75
        plain = re.sub(rb"\x1b\[[\d;?]*[A-Za-z]", b"", shell.written).replace(b",", b"")
        # the bar and the tokens of a frame are of the same step
        frames = re.findall(rb"step (\d+)/100000 [^|]*?(\d+) tokens\r", plain)
        assert len({int(tokens) / int(step) for step, tokens in frames}) == 1
        assert b"SIGINT: saving after this step; press again to abandon it" in shell.written
        assert termios.tcgetattr(shell.master) == shell.modes
    assert shell.written.rindex(SHOWN) > shell.written.rindex(HIDDEN)
    assert b"SIGINT: saved at step" in shell.written.splitlines()[-1]  # below the panel


@pytest.mark.slow
def test_a_closed_terminal_saves(small_run: Arguments, tmp_path: Path) -> None:
    """The kernel sends SIGHUP, and every write fails from then on."""
    with Terminal([*TRAINER, *small_run(*LONG)], cwd=tmp_path) as shell:
        shell.wait_for("tok/s")
        shell.hang_up()
        assert shell.process.wait(60) == 75
    assert len(list((tmp_path / "run" / "checkpoints").iterdir())) == 1


def test_progress_is_a_line_every_ten_seconds(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with Progress("tokenizing", "bytes", total=80_000_000, done=2_000_000) as progress:
        for now in (101.0, 109.0, 111.0, 112.0, 122.0):  # noqa: B007 - `monotonic` returns it
            progress.advance(4_000_000)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[:3] for line in lines] == [
        ["tokenizing", "14.0/80.0", "MB"],
        ["tokenizing", "22.0/80.0", "MB"],
    ]
    quiet = Progress("tokenizing", "bytes", active=False)
    now = 200.0
    quiet.advance(4_000_000)
    assert capsys.readouterr().err == ""
