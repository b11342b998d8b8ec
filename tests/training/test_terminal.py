"""The output of a run: the live panel on a terminal, and plain lines elsewhere."""

import io
import re
import signal
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from accel_gpt.config.experiment import CheckpointConfig, Config, EvalConfig, LogConfig, TrainConfig
from accel_gpt.config.model import ModelConfig
from accel_gpt.config.plan import make_plan
from accel_gpt.console import Progress, ticking
from accel_gpt.training.panel import Panel, draw_columns, mean_losses
from accel_gpt.training.state import TrainState
from accel_gpt.training.stopping import SAME_PRESS_SECONDS
from accel_gpt.training.terminal import Display, summarize_run
from tests.helpers.terminals import Terminal, in_python

Arguments = Callable[..., list[str]]
COLORS = re.compile(rb"\x1b\[(?:\d+;)*(?:3[0-8]|4[0-8]|9[0-7])(?:;\d+)*m")
SHOWN, HIDDEN = b"\x1b[?25h", b"\x1b[?25l"  # the cursor
FRAME = b"\x1b[2mstep "  # the start of the bar
SCENE = """
import logging, sys, time, warnings
from accel_gpt.config.experiment import Config, EvalConfig, TrainConfig
from accel_gpt.config.plan import make_plan
from accel_gpt.training.terminal import Display

early = logging.StreamHandler()  # before there is a panel
logging.getLogger("library").addHandler(early)
config = Config(train=TrainConfig(max_steps=20), eval=EvalConfig(every=6))
display = Display(True, config, make_plan(config, 1))
def show(step, **more):
    figures = {"train/loss": 4.0 / step, "train/lr": 1e-3, "perf/tokens_per_second": 1234.5}
    figures |= {"step": step, "tokens": 100 * step, "time": step, **more}
    display.show(figures, 75.0)
"""


def make(**sections: object) -> tuple[Config, Panel]:
    config = Config(**{"train": TrainConfig(max_steps=20), **sections})  # type: ignore[arg-type]
    return config, Panel(config, make_plan(config, 1))


def full_panel() -> Panel:
    _, panel = make()
    for step in range(1, 16):
        panel.update(
            {
                **{"step": step, "tokens": step * 524_288, "train/loss": 11 / step},
                **{"train/lr": 6e-4, "train/grad_norm": 0.5, "eval/val_loss": 3.2},
                **{"eval/val_bits_per_byte": 1.234, "train/skipped": 0},
                **{"perf/tokens_per_second": 1_234_567.0, "perf/mfu": 0.412},
                **{"perf/memory_gb": 71.2, "perf/step_ms": 424.2},
            },
            3 * 86400.0,
        )
    return panel


def drawn(panel: Panel, width: int) -> list[str]:
    """Return the lines of a panel without colours."""
    file = io.StringIO()
    Console(file=file, width=width, color_system=None).print(panel)
    return file.getvalue().splitlines()


def test_the_panel_tells_where_the_run_is_and_what_comes() -> None:
    lines = drawn(full_panel(), 80)
    curve, figures = lines[:3], lines[3:]
    assert curve[0].split() == ["11.000", "█▂"]
    assert curve[2].split()[0] == "0.733"
    assert curve[2].endswith("▁")
    assert re.fullmatch(r"step 15/20 ━+─+ 75% left 3 days, 0:00:00", figures[0])
    assert len(figures[0]) == 80
    told = "loss 0.7333   val 3.2000   1.2340 bits/byte   lr 6.00e-04   norm 0.50   skipped 0"
    assert figures[1] == told.removesuffix("   skipped 0")  # this part does not fit
    assert drawn(full_panel(), 100)[4] == told
    assert figures[2].startswith("1,234,567 tok/s   MFU 41.2%   71.20 GB   424.2 ms/step")
    assert figures[3].startswith("evaluation in 5 steps (3 days, 0:00:00)   save in 5 steps")


def test_the_bar_is_read_without_colors() -> None:
    _, panel = make()
    (empty,) = [line for line in drawn(panel, 60) if line.startswith("step")]
    assert re.fullmatch(r"step 0/20 ─+ 0% left \?", empty)
    panel.step = 20
    assert re.fullmatch(r"step 20/20 ━+ 100% left \?", drawn(panel, 60)[0])
    panel.step = 10
    bar = drawn(panel, 60)[0]
    assert abs(bar.count("━") - bar.count("─")) <= 1


@pytest.mark.parametrize("width", [200, 80, 60, 20, 1])
def test_no_line_is_longer_than_the_terminal_is_wide(width: int) -> None:
    lines = drawn(full_panel(), width)
    assert len(lines) <= 7
    assert max(map(len, lines)) <= min(width, 100)
    if width >= 60:
        assert any(line.startswith("loss 0.7333   val 3.2000") for line in lines)


@given(
    every=st.integers(0, 9), tokens=st.none() | st.integers(1, 40), step=st.integers(0, 19),
    evaluating=st.integers(0, 9),
)  # fmt: skip
def test_what_is_announced_is_what_comes(
    every: int, tokens: int | None, step: int, evaluating: int
) -> None:
    saves = CheckpointConfig(every=every, every_tokens=tokens)
    length = TrainConfig(max_steps=20, tokens_per_step=8, micro_batch_size=1)
    _, panel = make(
        train=length, model=ModelConfig(block_size=8), checkpoint=saves,
        eval=EvalConfig(every=evaluating),
    )  # fmt: skip
    panel.step = step
    later = range(step + 1, 21)
    saving = (s for s in later if s == 20 or TrainState(step=s, tokens=8 * s).save_is_due(saves, 8))
    evaluated = (s for s in later if s == 20 or (evaluating and s % evaluating == 0))
    announced = [step + int(line.split()[2]) for line in panel.due()]
    assert announced == [next(evaluated), next(saving)]


@given(st.lists(st.floats(0, 20), min_size=1, max_size=400), st.integers(1, 120))
def test_a_curve_has_a_mean_for_each_column(losses: list[float], width: int) -> None:
    points = mean_losses(losses, width)
    assert 0 < len(points) <= width
    assert min(losses) - 1e-6 <= min(points) <= max(points) <= max(losses) + 1e-6
    assert mean_losses(losses, len(losses)) == losses


def test_a_curve_falls_from_top_to_bottom_and_knows_no_nan() -> None:
    _, panel = make()
    panel.resume(3, [8.0, float("nan"), 4.0, float("inf"), 2.0])
    assert panel.losses == [8.0, 4.0, 2.0]
    assert draw_columns(panel.losses, 1) == ["█▅▁"]
    assert draw_columns(panel.losses, 2) == ["█▁ ", "██▁"]
    assert draw_columns([1.0, 1.0], 1) == ["▁▁"]


def test_plain_lines_off_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    config, panel = make()
    with Display(True, config, panel.plan) as display:
        display.show({"step": 4, "tokens": 400, "train/loss": 2.0}, 75.0)
        display.show_step(5)
        display.resume(3, [1.0])
    assert capsys.readouterr().err == "step 4/20 | loss 2.0000 | left 0:01:15\n"


@pytest.mark.parametrize(("active", "text"), [(True, "WARNING: it is late\n"), (False, "")])
def test_quiet_runs_print_warnings_and_other_ranks_nothing(
    active: bool, text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)  # still no panel
    config, panel = make(log=LogConfig(level="warning"))
    with Display(active, config, panel.plan) as display:
        display.show({"step": 4, "tokens": 400, "eval/val_loss": 2.0}, 75.0)
        display.log("hello")
        display.log("WARNING: it is late")
    assert capsys.readouterr().err == text


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
    monkeypatch.setattr("accel_gpt.training.panel.FRAMES_PER_SECOND", 100)
    config, panel = make()
    with Display(True, config, panel.plan) as display:
        assert display.panel
        file.gone = True
        display.show({"step": 4, "tokens": 400, "eval/val_loss": 2.0}, 75.0)
        display.log("hello")
        time.sleep(0.05)  # for some frames
    assert display.panel is None
    assert sys.stderr is file


def test_messages_of_libraries_stay_above_a_panel_that_is_whole() -> None:
    play = """
with display:
    display.log("hello")
    for step in range(1, 5):
        show(step)
        time.sleep(0.6)
        logging.getLogger("library").warning("from logging %d", step)
        warnings.warn(f"from warnings {step}")
        print(f"from print {step}")
    show(12, **{"eval/val_loss": 2.0})
"""
    with Terminal(in_python(SCENE + play), rows=40) as shell:
        assert shell.finish() == 0
        lines = shell.lines()
        cursor = shell.screen().cursor
    for step in range(1, 5):
        for source in ("logging", "print"):
            assert lines.count(f"from {source} {step}") == 1
        assert sum(line.endswith(f"UserWarning: from warnings {step}") for line in lines) == 1
    assert lines[0] == "hello"
    assert lines[-8].startswith("step 12/20 | loss 0.3333")  # an evaluation stays
    assert [line.split()[0] for line in lines[-7:]] == [
        *("4.000", "██▆▃", "0.333"), "step", "loss", "1,234", "evaluation"
    ]  # fmt: skip
    assert sum("━" in line for line in lines) == 1
    assert not cursor.hidden
    assert cursor.x == 0  # below the panel


@pytest.mark.parametrize(
    ("environment", "live", "colored"),
    [
        ({"NO_COLOR": "1"}, True, False),
        ({"TERM": "dumb"}, False, False),
        ({"PYTHONIOENCODING": "latin-1"}, False, False),
    ],
)
def test_no_color_and_dumb_terminals(
    environment: dict[str, str], live: bool, colored: bool
) -> None:
    with Terminal(in_python(SCENE + "with display: show(3), show(4)"), **environment) as shell:
        assert shell.finish() == 0
    assert bool(COLORS.search(shell.written)) is colored
    assert (FRAME in shell.written) is live
    assert (b"\x1b" in shell.written) is live
    if not live:
        line = b"step 4/20 | loss 1.0000 | lr 1.00e-03 | 1,234 tok/s | left 0:01:15\r\n"
        assert shell.written.endswith(line)


def test_of_a_run_that_did_not_begin_no_panel_stays() -> None:
    play = """
with display:
    time.sleep(0.7)
    raise SystemExit("error: no")
"""
    with Terminal(in_python(SCENE + play)) as shell:
        assert shell.finish() == 1
        assert shell.lines() == ["error: no"]
    assert FRAME in shell.written


@pytest.mark.slow
def test_ctrl_c_saves_and_leaves_the_terminal_as_it_was(
    small_run: Arguments, tmp_path: Path
) -> None:
    root = Path(__file__).resolve().parents[2]
    train = [sys.executable, str(root / "accel_gpt" / "train.py")]
    long = ["--train.max_steps", "100000", "--eval.every", "0", "--sample.every", "0"]
    with Terminal([*train, *small_run(*long)], cwd=tmp_path) as shell:
        shell.wait_for("tok/s")
        shell.press(b"\x03")
        assert shell.finish() == 75
        assert b"SIGINT: saving after this step; press again to abandon it" in shell.written
        assert termios.tcgetattr(shell.master) == shell.modes
    assert shell.written.rindex(SHOWN) > shell.written.rindex(HIDDEN)
    assert b"SIGINT: saved at step" in shell.written.splitlines()[-1]  # below the panel


@pytest.mark.slow
@pytest.mark.parametrize("term", ["xterm-256color", "dumb"])
def test_a_closed_terminal_saves(term: str, small_run: Arguments, tmp_path: Path) -> None:
    """The kernel sends SIGHUP, and every write fails from then on."""
    train = [sys.executable, "-m", "accel_gpt.cli", "train"]
    long = ["--train.max_steps", "100000", "--eval.every", "0", "--sample.every", "0"]
    long += ["--checkpoint.every", "0"]
    with Terminal([*train, *small_run(*long)], cwd=tmp_path, TERM=term) as shell:
        shell.wait_for("tok/s")
        shell.hang_up()
        assert shell.process.wait(60) == 75
    assert len(list((tmp_path / "run" / "checkpoints").glob("step_*"))) == 1


@pytest.mark.slow
def test_a_second_ctrl_c_leaves_the_terminal_as_it_was() -> None:
    play = """
from accel_gpt.training.stopping import StopSignal
with display:
    stop = StopSignal()
    show(3)
    print("now")
    time.sleep(60)
"""
    with Terminal(in_python(SCENE + play)) as shell:
        shell.wait_for("now")
        shell.press(b"\x03")
        time.sleep(SAME_PRESS_SECONDS + 0.3)
        shell.press(b"\x03")
        assert shell.finish() == 128 + signal.SIGINT
        assert termios.tcgetattr(shell.master) == shell.modes
    assert shell.written.rindex(SHOWN) > shell.written.rindex(HIDDEN)


def test_progress_is_a_line_every_ten_seconds(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with Progress("tokenizing", "bytes", total=80_000_000, done=2_000_000) as progress:
        for now in (101.0, 109.0, 111.0, 112.0, 122.0):  # noqa: B007 - `monotonic` returns it
            progress.advance(4_000_000)
    assert capsys.readouterr().err.splitlines() == [
        "tokenizing: 14.0 of 80.0 MB, 1.1 MB/s, left 0:01:01",
        "tokenizing: 22.0 of 80.0 MB, 0.9 MB/s, left 0:01:04",
    ]
    quiet = Progress("tokenizing", "bytes", active=False)
    now = 200.0
    quiet.advance(4_000_000)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("total", ["4_000_000", "None"])
def test_progress_is_a_bar_on_a_terminal(total: str) -> None:
    play = f"""
import time
from accel_gpt.console import Progress
with Progress("tokenizing", "bytes", total={total}) as progress:
    for _ in range(3):
        time.sleep(0.25)
        progress.advance(1_000_000)
    print("a line of another")
print("the end")
"""
    with Terminal(in_python(play)) as shell:
        assert shell.finish() == 0
        lines = shell.lines()
        assert not shell.screen().cursor.hidden
    assert b"tokenizing" in shell.written
    assert "━".encode() in shell.written
    assert b"3.0" in shell.written
    assert lines == ["a line of another", "the end"]  # the bar is gone


def test_a_library_that_reports_nothing_is_ticking(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("accel_gpt.console.LINE_SECONDS", 0.01)
    progress = Progress("training the bpe", "characters")
    shown = ""
    with ticking(progress, seconds=0.02):
        progress.done = 1_234
        end = time.monotonic() + 20
        while not shown and time.monotonic() < end:
            time.sleep(0.01)
            shown = capsys.readouterr().err
    assert shown.startswith("training the bpe: 1,234 characters, 0:00:00\n")


def test_an_evaluation_is_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    config, panel = make()
    panel.activity = "evaluating: 3 of 64 batches"
    assert "evaluating: 3 of 64 batches   evaluation in" in "\n".join(drawn(panel, 100))
    display = Display(True, config, make_plan(config, 1))
    display.show_evaluation(0, 64)
    now = 111.0
    display.show_evaluation(3, 64)
    assert capsys.readouterr().err == "evaluating: 3 of 64 batches, left 0:03:44\n"
    display.show_step(4)  # an evaluation that takes less than 10 s is not shown
    display.show_evaluation(0, 64)
    now = 120.0
    display.show_evaluation(60, 64)
    assert capsys.readouterr().err == ""


def test_an_evaluation_tells_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    _, panel = make()
    display = Display(True, panel.config, panel.plan)
    display.panel = panel

    def shown(done: int, total: int) -> str:
        display.show_evaluation(done, total)
        return panel.activity

    assert shown(0, 64) == "evaluating: 0 of 64 batches"
    now = 104.0
    assert shown(4, 64) == "evaluating: 4 of 64 batches, left 0:01:00"
    now = 1000.0  # at the next split
    assert shown(0, 10) == "evaluating: 0 of 10 batches"
    now = 1002.0
    assert shown(1, 10) == "evaluating: 1 of 10 batches, left 0:00:18"


def test_an_acknowledged_signal_stays_in_the_panel(capsys: pytest.CaptureFixture[str]) -> None:
    text = "SIGINT: saving after this step; press again to abandon it"
    config, panel = make()
    assert text not in "\n".join(drawn(panel, 100))
    panel.acknowledge(text)
    panel.activity = "evaluating: batch 3 of 64"
    assert text in "\n".join(drawn(panel, 100))
    Display(False, config, make_plan(config, 1)).acknowledge(text)  # on another rank
    assert capsys.readouterr().err == ""


def test_a_sample_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    """rich would replace `:car:` by an emoji."""
    text = "x[a:car:2] [red] 😀 👨\u200d👩\u200d👧 ❤\ufe0f"
    make()[1].print(text)
    assert capsys.readouterr().err == f"{text}\n"


def test_the_summary_of_a_run_can_be_pasted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs/my text/samples").mkdir(parents=True)
    for hidden in (".lock", ".tmp_metrics"):
        Path("runs/my text", hidden).touch()
    config = Config(out_dir="runs/my text", train=TrainConfig(max_steps=2))
    words = summarize_run(config, make_plan(config, 1), TrainState(step=2), None)
    assert "accel-gpt sample 'runs/my text' --prompt" in words
    assert "accel-gpt report 'runs/my text'" in words
    assert "run         'runs/my text' (samples)" in words
