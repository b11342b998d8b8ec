"""Sweeps: which runs they make, what they compare, kills, mistakes."""

import contextlib
import json
import math
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from accel_gpt.cli import dispatch
from accel_gpt.commands import sweep
from accel_gpt.commands.resolve import load_config
from accel_gpt.commands.series import SeriesRun
from accel_gpt.commands.sweep_settings import read_grid, split_values
from accel_gpt.config.budget import with_length
from accel_gpt.config.experiment import Config
from accel_gpt.config.plan import Budget, Costs
from accel_gpt.config.values import to_yaml
from accel_gpt.errors import UserError
from accel_gpt.runs.folder import step_name
from tests.conftest import run_here
from tests.helpers.runs import LAUNCH, make_run, record

LOSSES = {1e-3: 3.0, 2e-3: 3.0, 3e-3: 2.0, 1e-2: 2.5, 1.0: math.inf, 2.0: 9.0}
NOISE = [0.011, -0.013, 0.002, -0.007, 0.015, 0.004, -0.002, 0.009]


class Trained:
    """Stands in for a series: the loss follows from the config and the seed.

    The noise of a seed is shared by all settings; a tenth of it depends on the setting. Runs with
    more layers are better and slower, most of all with seed 3. Runs with lr 1 diverge, and those of
    9 layers with an odd seed.
    """

    launched: list[str]
    failing: set[str]

    def __init__(self, runs: Sequence[SeriesRun]) -> None:
        self.runs = runs

    def train(self) -> dict[str, str]:
        failures = {}
        for run in self.runs:
            if run.finished:
                continue
            run.folder.mkdir(exist_ok=True)
            self.launched.append(run.name)
            config = load_config([str(run.config)], "")
            launch = LAUNCH
            if config.train.budget:
                config = self.spend(config)
                steps = config.train.max_steps
                assert steps is not None
                budget = Budget(str(run.budget), 285, Costs(step=0.1), steps, steps)
                plan = {"max_steps": steps, "budget": asdict(budget)}
                launch = {**LAUNCH, "plan": plan}
                (run.folder / "run.json").write_text(json.dumps({"launches": [launch]}))
            loss = LOSSES[config.optim.lr] - 0.1 * run.steps + 10 * NOISE[config.seed % 8]
            loss += NOISE[(config.seed + round(1e4 * config.optim.lr) + run.steps) % 8]
            loss -= 0.4 * (config.model.n_layer - 2)
            if config.model.n_layer == 9 and config.seed % 2:
                loss = math.inf
            if run.name in self.failing or math.isinf(loss):
                failures[run.name] = "an error"
                if run.name not in self.failing:
                    run.divergence.touch()
                continue
            slower = 1.1 if config.model.n_layer > 2 and config.seed == 3 else 1.0
            layers = {"perf/step_ms": 50.0 * config.model.n_layer * slower}
            found = {"eval/val_loss": loss, "eval/val_bits_per_byte": loss / 2}
            first = record(1, **{"perf/step_ms": 9000.0})
            steps = run.steps
            shutil.rmtree(run.folder)
            make_run(run.folder, [first, record(steps, **layers, **found)], [launch])
            (run.folder / "config.yaml").write_text(to_yaml(config))
            (run.folder / "checkpoints" / step_name(run.steps)).mkdir(parents=True)
        return failures

    @staticmethod
    def spend(config: Config) -> Config:
        """Return a config with the steps that a budget comes to: fewer if it has more layers."""
        return with_length(config, 80 // config.model.n_layer + config.seed)


@pytest.fixture
def made(
    small_run: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., int]:
    """Run a sweep with simulated training; return the exit code."""
    Trained.launched = []
    Trained.failing = set()
    monkeypatch.setattr(sweep, "Series", Trained)
    folder = str(tmp_path / "sweep")
    return lambda *words: run_here(dispatch, ["sweep", *small_run(), "--out_dir", folder, *words])


def verdicts(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return the lines after the table and the paths."""
    return capsys.readouterr().out.split("\n\n")[2].splitlines()


FIVE = "--seed=1,2,3,4,5"


def test_settings_are_paired_by_seed_and_the_last_line_is_a_verdict(
    made: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The seeds differ by far more than the settings; paired, three of them are enough."""
    assert made("--optim.lr", "1e-2,3e-3", FIVE, "--sample.prompts", "a,b") == 0
    out = capsys.readouterr().out.splitlines()
    found = json.loads((tmp_path / "sweep/sweep.json").read_text())["settings"]
    difference = found[1]["comparison"]
    assert out[0].split() == [*("setting", "val", "loss", "difference", "tokens", "time", "seeds")]
    assert [line.split()[0] for line in out[1:3]] == ["optim.lr=1e-2", "optim.lr=3e-3"]
    assert out[-1] == (
        "optim.lr=3e-3 is better than optim.lr=1e-2: "
        f"{difference['mean']:+.4f} ± {difference['standard_error']:.4f} in val loss over 3 seeds"
    )
    assert difference["mean"] == pytest.approx(-0.5, abs=0.02)
    assert difference["standard_error"] < 0.02
    assert [*difference["differences"]] == ["1", "2", "3"]
    assert Trained.launched == [
        f"optim.lr={lr},seed={seed}" for seed in (1, 2, 3) for lr in ("1e-2", "3e-3")
    ]


def test_equal_settings_use_all_seeds_and_added_ones_keep_the_runs_that_exist(
    made: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert made("--optim.lr", "1e-3,2e-3", "--seed", "1") == 0
    capsys.readouterr()
    assert made("--optim.lr", "1e-3,2e-3", FIVE) == 0
    line, rule = verdicts(capsys)
    assert line.startswith("no difference that 5 seeds could show between optim.lr=2e-3 and ")
    found = json.loads((tmp_path / "sweep/sweep.json").read_text())
    comparison = found["settings"][1]["comparison"]
    smallest = comparison["smallest"]
    assert smallest == pytest.approx(5.385 * comparison["standard_error"], rel=1e-3)
    assert line.endswith(f" in val loss over 5 seeds; a difference counts from {smallest:.4f} on")
    assert rule == (
        "A difference counts from 5.4 standard errors on with 5 seeds, from 4.6 with 7: then at "
        "most 5% of sweeps of equal settings find one"
    )
    assert found["lines"] == [line, rule]
    assert made("--optim.lr", "1e-3,2e-3,3e-3", "--seed", "1") == 0
    *lines, rule = verdicts(capsys)
    assert all(line.endswith("over 1 seed; a verdict takes at least 4 seeds") for line in lines)
    assert rule.startswith("A difference counts from 8.7 standard errors on with 4 seeds, ")
    assert len(Trained.launched) == len(set(Trained.launched)) == 11
    before = (tmp_path / "sweep/sweep.json").read_bytes()
    assert made("--optim.lr", "1e-3,2e-3,3e-3", "--seed", "1") == 0
    assert (tmp_path / "sweep/sweep.json").read_bytes() == before
    assert len(Trained.launched) == 11


def test_with_a_budget_each_run_has_the_steps_that_it_came_to(
    made: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--model.n_layer", "2,4", "--seed=1,2,3", "--train.budget", "5m")
    assert made(*words) == 0
    out = capsys.readouterr().out
    assert "model.n_layer=4 is worse than model.n_layer=2" in out
    assert out.splitlines()[-1].endswith("; its budget was enough for 0.52 times the tokens")
    settings = json.loads((tmp_path / "sweep/sweep.json").read_text())["settings"]
    assert [one["steps"] for one in settings] == [[41, 42, 43], [21, 22, 23]]
    assert made(*words) == 0
    assert len(Trained.launched) == len(set(Trained.launched))


def test_a_setting_that_always_diverges_needs_three_seeds(
    made: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    """With lr 2, the run ends with a loss that is worse than the loss of a guess."""
    assert made("--optim.lr", "1e-3,1,2,3e-3", "--seed=3,4,5,6") == 0
    out = capsys.readouterr().out
    for lr in ("1", "2"):
        assert f"\noptim.lr={lr} diverged with 3 of 3 seeds: 3, 4, 5\n" in out
        assert re.search(rf"^optim.lr={lr} +diverged ", out, re.MULTILINE)
        assert f"optim.lr={lr},seed=6" not in Trained.launched


def test_a_setting_that_diverged_is_not_told_which_difference_counts(
    made: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    """A lower loss would give no verdict, since the setting diverged more often."""
    assert made("--model.n_layer", "2,9", "--seed=1,2,4,6") == 0
    line, rule = verdicts(capsys)
    assert re.search(r"over 3 seeds; model\.n_layer=9 diverged with 1 of 4 seeds: 1;", line)
    assert rule.startswith("A difference counts from ")


def test_a_run_that_fails_for_another_reason_is_no_verdict(
    made: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    """Its setting takes no more seeds."""
    Trained.failing = {"optim.lr=3e-3,seed=1"}
    assert made("--optim.lr", "1e-3,3e-3", "--seed=1,2") == 1
    assert verdicts(capsys) == ["no seed has the val loss of optim.lr=3e-3 and optim.lr=1e-3"]
    assert Trained.launched == ["optim.lr=1e-3,seed=1", "optim.lr=3e-3,seed=1"]


def test_two_configs_of_different_tokenizers_are_compared_in_bits_per_byte(
    made: Callable[..., int],
    small_run: Callable[..., list[str]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (config, *_) = small_run()
    other = tmp_path / "other.yaml"
    shutil.copytree(tmp_path / "corpus", tmp_path / "chars")
    content = Path(config).read_text().replace(str(tmp_path / "corpus"), str(tmp_path / "chars"))
    other.write_text(content.replace("block_size: 32", "block_size: 16"))
    assert made(str(other), "--seed=1,2,3") == 0
    lines = verdicts(capsys)
    assert lines[:2] == [
        "data.train differ: bits per byte are compared",
        "model.block_size differ: other sequences are evaluated",
    ]
    assert f" between {other} and {config}: " in lines[2]
    assert " in bits per byte over 3 seeds" in lines[2]
    assert len([path for path in (tmp_path / "sweep").glob("*seed=1*") if path.is_dir()]) == 2


def test_two_tokenizers_for_one_data_folder_are_refused(
    made: Callable[..., int], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ("--data.prepare.tokenizer", "bytes,chars", "--seed=1")
    assert made("--data.text", str(tmp_path / "text.txt"), *words) == 2
    told = capfd.readouterr().err
    assert "was prepared with other settings (tokenizer: bytes, requested chars)" in told


def test_the_first_combination_is_the_baseline(small_run: Callable[..., list[str]]) -> None:
    words = ["--optim.lr", "1,2,3", "--optim.beta1", "0,0.5", "--eval.tokens=512"]
    settings = read_grid(small_run(), words).settings
    assert len(settings) == 6
    assert settings[0].name == "optim.lr=1,optim.beta1=0"
    with pytest.raises(UserError, match=r"^optim\.lr: a config or a value is listed twice"):
        read_grid(small_run(), ["--optim.lr", "1,2,1"])


def test_a_comma_of_a_list_separates_no_values() -> None:
    for key, text, count in (
        ("data.train", "[{path: a, weight: 1}, {path: b, weight: 2}]", 1),
        ("data.train", "a,b", 2),
        ("optim.lr", "1e-3, 1e-2", 2),
    ):
        assert len(split_values(key, text)) == count


def test_a_config_behind_a_url_names_the_folder(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.yaml").write_text("seed: 1")
    url = f"file://{tmp_path}/mine/config.yaml"
    assert read_grid([url], ["--optim.lr", "1,2"]).folder == Path("runs/mine_sweep")


def test_the_runs_of_another_sweep_are_not_taken(
    made: Callable[..., int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert made("--optim.lr", "1e-3,3e-3") == 0
    assert made("--optim.lr", "1e-3,3e-3", "--optim.beta1=0.5") == 2
    told = r"was trained with optim.beta1 .*, but now has 0.5; "
    assert re.search(told, capsys.readouterr().err)
    assert made("--optim.lr", "1e-3,3e-3", "--train.stop_at=5") == 2
    assert "was trained to step 12, but now ends at step 5; " in capsys.readouterr().err


def test_files_that_keep_other_targets_are_not_compared(
    small_run: Callable[..., list[str]], tmp_path: Path
) -> None:
    """Nothing is trained; files with the same targets() and another difference are compared."""
    for name, letter, line in (("one", "e", ""), ("two", "o", ""), ("three", "e", "x = 1")):
        (tmp_path / f"{name}.py").write_text(
            f"{line}\ndef targets(tokens, targets, documents):\n"
            f"    return targets.masked_fill(tokens != ord({letter!r}), -100)\n"
        )
    config = small_run()[0]
    for other, refused in (("two.py", True), ("null", True), ("three.py", False)):
        files = f"{'null' if other == 'null' else tmp_path / other},{tmp_path / 'one.py'}"
        grid = read_grid([config], ["--code", files], out_dir=str(tmp_path / "sweep"))
        expected = pytest.raises(UserError, match=rf"one\.py keeps other targets than code={other}")
        with expected if refused else contextlib.nullcontext():
            sweep.Sweep(grid).check_targets()


def test_a_metric_of_the_users_decides_and_its_goal_orders(
    made: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bits per byte stand for any metric; the higher ones are called better on request."""
    asked = ("--optim.lr", "1e-2,3e-3,1e-3", FIVE, "--metric", "eval/val_bits_per_byte")
    orders = {}
    for goal in ("min", "max"):
        assert made(*asked, "--goal", goal) == 0
        assert capsys.readouterr().out.splitlines()[0].split()[1:4] == ["bits", "per", "byte"]
        found = json.loads((tmp_path / "sweep/sweep.json").read_text())
        assert found["metric"] == "val_bits_per_byte"
        orders[goal] = [
            (setting["name"], setting["comparison"]["verdict"]) for setting in found["settings"][1:]
        ]
    assert orders["min"] == [("optim.lr=3e-3", "better"), ("optim.lr=1e-3", "worse")]
    assert orders["max"] == [("optim.lr=1e-3", "better"), ("optim.lr=3e-3", "worse")]
    saved = (tmp_path / "sweep" / "optim.lr=3e-3,seed=1.yaml").read_text()
    assert "best: max eval/val_bits_per_byte" in saved
    for words, problem in (
        (("--goal", "max"), "--goal is max, but --metric is missing"),
        (("--metric", "eval/mine"), "--metric is eval/mine; expected min eval/mine or max"),
    ):
        assert made("--optim.lr", "1e-2,3e-3", *words) == 2
        assert problem in capsys.readouterr().err


def test_a_metric_that_the_last_evaluation_lacks_is_not_taken_from_an_earlier_one(
    tmp_path: Path,
) -> None:
    loss = {"eval/val_loss": 2.0}
    run = make_run(
        tmp_path / "run",
        [record(4, **loss, **{"eval/mine": 0.5}), record(8, **loss, **{"eval/mine": math.nan})],
        [LAUNCH],
    )
    series: Any = SimpleNamespace(finished=True, folder=run, steps=8)
    assert sweep.final_loss(series, "val_loss") == 2.0
    assert sweep.final_loss(series, "mine") is None
