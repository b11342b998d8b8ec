"""Sweeps: which runs they make, their order, halving, kills, mistakes."""

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from accel_gpt.cli import dispatch
from accel_gpt.commands import grid, sweep
from accel_gpt.commands.grid import draw_settings, split_values
from accel_gpt.commands.series import SeriesRun
from accel_gpt.config.parse import load_config
from accel_gpt.errors import UserError
from tests.conftest import THOROUGH, run_here
from tests.helpers.runs import LAUNCH, make_run, record

LOSSES = {"1e-3": 3.0, "3e-3": 2.0, "1e-2": 2.5, "1": float("inf")}


class Trained:
    """Stands in for a series: the loss follows from the learning rate and seed."""

    launched: list[str]

    def __init__(self, runs: Sequence[SeriesRun]) -> None:
        self.runs = runs

    def train(self) -> dict[str, str]:
        for run in self.runs:
            lr = load_config(run.arguments, "").optim.lr
            (text,) = (rate for rate in LOSSES if float(rate) == lr)
            loss = LOSSES[text] + 0.01 * int(run.name.partition("seed=")[2] or 0)
            self.launched.append(f"{text} to {run.steps}")
            if not run.folder.exists():
                make_run(run.folder, [record(run.steps)], [LAUNCH])
            with (run.folder / "metrics.jsonl").open("a") as file:
                found = {"step": run.steps, "tokens": 0, "time": 0, "eval/val_loss": loss}
                file.write(json.dumps(found) + "\n")
        return {}


@pytest.fixture
def made(
    small_run: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., int]:
    """Run a sweep with simulated training; return the exit code."""
    Trained.launched = []
    monkeypatch.setattr(sweep, "Series", Trained)
    folder = str(tmp_path / "sweep")
    return lambda *words: run_here(dispatch, ["sweep", *small_run(), "--out_dir", folder, *words])


def test_the_best_setting_stands_first_with_its_spread_over_seeds(
    made: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert made("--optim.lr", "1e-3,3e-3,1", "--seed=1,2", "--sample.prompts", "a,b") == 0
    assert capsys.readouterr().out.splitlines()[:4] == [
        "optim.lr  val loss  ± over seeds  bits per byte  runs  of the steps",
        "3e-3        2.0150        0.0071                    2          100%",
        "1e-3        3.0150        0.0071                    2          100%",
        "1                                                   2            0%",
    ]
    found = json.loads((tmp_path / "sweep/sweep.json").read_text())["settings"]
    assert found[0]["runs"] == {"optim.lr=3e-3,seed=1": 2.01, "optim.lr=3e-3,seed=2": 2.02}
    page = (tmp_path / "sweep/report.html").read_text()
    assert page.index(">3e-3</t") < page.index(">1e-3</t")
    assert made("--optim.lr", "1e-3,3e-3,1e-2", "--seed=1,2", "--sample.prompts", "a,b") == 0


def test_the_better_half_goes_on(
    made: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert made("--optim.lr", "1e-3,1e-2,3e-3", "--halve_at", "0.25,0.5") == 0
    launched = ["1e-3 to 3", "1e-2 to 3", "3e-3 to 3", "3e-3 to 6", "1e-2 to 6", "3e-3 to 12"]
    assert Trained.launched == launched
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:4]]
    assert [(row[0], row[-1]) for row in rows] == [
        ("3e-3", "100%"),
        ("1e-2", "50%"),
        ("1e-3", "25%"),
    ]


def test_values_that_no_folder_can_be_named_by(
    made: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = ["a/b", "a b", f"{'x' * 300}1", f"{'x' * 300}2"]
    monkeypatch.setattr(grid, "split_values", lambda key, text: text.split(","))
    assert made("--optim.lr", "1", "--sample.prompts", ",".join(prompts)) == 0
    found = (tmp_path / "sweep").glob("sample.prompts=*")
    names = [path.name for path in found if path.is_dir()]
    assert (len(names), max(map(len, names)) < 255) == (4, True)


def test_settings_are_drawn_with_all_their_seeds() -> None:
    swept = {"optim.lr": ["1", "2", "3"], "seed": ["7", "8"], "optim.beta1": ["0", "0.5"]}
    assert len(draw_settings(swept, None)) == 6
    drawn = draw_settings(swept, 4)
    assert drawn == draw_settings(swept, 4)
    assert [[run.pop("seed") for run in runs] for runs in drawn] == [["7", "8"]] * 4
    assert len({tuple(one.items()) for one, _ in drawn}) == 4
    with pytest.raises(UserError, match="make 1,001 runs"):
        draw_settings({"seed": [*map(str, range(1001))]}, None)


def test_a_comma_of_a_list_separates_no_values() -> None:
    for key, text, count in (
        ("sample.prompts", "a,b", 1),
        ("data.train", "[{path: a, weight: 1}, {path: b, weight: 2}]", 1),
        ("data.train", "a,b", 2),
        ("optim.lr", "1e-3, 1e-2", 2),
    ):
        assert len(split_values(key, text)) == count


def test_the_folder_of_another_sweep_is_refused(
    made: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert made("--optim.lr", "1e-3,3e-3") == 0
    assert made("--optim.lr", "1e-3,3e-3", "--optim.beta1", "0.5") == 2
    message = (
        f"{tmp_path / 'sweep'} holds another sweep: optim.beta1 was not set and is now 0.5; set"
    )
    assert message in capsys.readouterr().err
    (tmp_path / "sweep/sweep.json").write_text("{")
    assert made("--optim.lr", "1e-3,3e-3") == 2
    assert "sweep.json cannot be read; remove it" in capsys.readouterr().err
    (tmp_path / "sweep/run.json").touch()
    assert made("--optim.lr", "1e-3,3e-3") == 2
    assert f"{tmp_path / 'sweep'} is the folder of a run" in capsys.readouterr().err


def test_a_sweep_of_which_no_run_starts(
    made: Callable[..., int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(Trained, "train", lambda _: {"optim.lr=1e-3": "no data"})
    assert made("--optim.lr", "1e-3,3e-3") == 1
    assert capsys.readouterr().out.rstrip().endswith("sweep.json")
    assert not (tmp_path / "sweep/report.html").exists()


@pytest.mark.slow
def test_killed_and_started_again_gives_the_same_file(
    small_run: Callable[..., list[str]], tmp_path: Path
) -> None:
    def start(name: str) -> subprocess.Popen[bytes]:
        words = ["--optim.lr", "1e-3,1e-2", "--halve_at", "0.5", "--out_dir", str(tmp_path / name)]
        command = [sys.executable, "-m", "accel_gpt.cli", "sweep", *small_run(), *words]
        return subprocess.Popen(command, env={**os.environ, "ACCEL_GPT_FAULT": "step:5=sleep"})

    began = time.monotonic()
    assert start("whole").wait() == 0
    whole, draw = time.monotonic() - began, random.Random(0)
    for _ in range(3 * THOROUGH or 1):
        killed = start("killed")
        time.sleep(draw.uniform(0.2, 0.7) * whole)
        killed.kill()
        killed.wait()
    assert start("killed").wait() == 0
    files = [(tmp_path / name / "sweep.json").read_bytes() for name in ("whole", "killed")]
    assert files[0] == files[1]
