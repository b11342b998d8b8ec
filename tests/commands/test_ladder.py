"""Ladders: the fit of a scaling law, what it predicts, its errors; killed and started again."""

import json
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from accel_gpt.cli import dispatch
from accel_gpt.commands.ladder import all_rungs, fit_ladder, ladder_lines, make_rung
from accel_gpt.commands.options import LadderCommand
from accel_gpt.commands.series import SeriesRun
from accel_gpt.config.experiment import Config
from accel_gpt.config.parse import read_values, to_flat
from accel_gpt.console import run_main
from accel_gpt.cost.scaling import Ladder, Law, Size, read_ladder
from accel_gpt.cost.scaling_fit import HUBER, fit_law, minimize
from accel_gpt.errors import BusyError, UserError
from accel_gpt.report.plots import ladder_png
from accel_gpt.training.run_folder import RunFolder, locked, step_name
from tests.conftest import THOROUGH
from tests.helpers.runs import LAUNCH, make_run, record

# the rungs are so short that no law holds
ANY_FIT = (
    "import sys, accel_gpt.cost.scaling_fit as fit; fit.FLAT, fit.STEEPEST = -1.0, 1e9\n"
    "from accel_gpt.cli import dispatch; sys.exit(dispatch(['ladder', *sys.argv[1:]]))\n"
)
GIVEN = {"data.tokenizer": "bytes", "train.tokens_per_step": 512, "model.block_size": 64}
WIDTHS = (0.7e6, 0.9e6, 3.4e6, 4.2e6)  # parameters


def size(parameters: float, tokens: float) -> Size:
    return Size(int(parameters), int(tokens), 6 * parameters * tokens)


GRID = [size(n, ratio * n) for n in WIDTHS for ratio in (1, 2, 4)]
TARGET = size(1.5 * WIDTHS[-1], 12 * WIDTHS[-1])  # 4.5 times the compute of the largest
SINGLE = [size(n, 2 * n) for n in WIDTHS]
SAME_TOKENS = [size(n, tokens) for n in WIDTHS[:3] for tokens in (1e6, 2e6)]
MORE = [*SINGLE, size(2e6, 4e6), size(1.2e6, 2.4e6)]


def true_loss(one: Size) -> float:
    """Hoffmann et al. 2022, equation 10."""
    return float(1.69 + 406.4 / one.parameters**0.34 + 410.7 / one.tokens**0.28)


def noisy(sizes: list[Size], seed: int, noise: float = 0.004) -> list[float]:
    errors = np.random.default_rng(seed).standard_normal(len(sizes))
    return [true_loss(s) * np.exp(noise * e) for s, e in zip(sizes, errors, strict=True)]


def ladder(law: Law, **more: object) -> Ladder:
    names = ("depth", "ratio", "seed", "steps", "name")
    rungs = [
        dict(zip(names, (1 + i // 3, 1.0, 1, 9, f"r{i}"), strict=True))
        | {**one._asdict(), "loss": true_loss(one), "loss_se": 0.01, "bits_per_byte": 1.0}
        for i, one in enumerate(GRID)
    ]
    data = {"vocab_size": 257, "fingerprint": "f", "folder": "d", "train_tokens": 10**9}
    content: dict[str, Any] = {
        "title": "t",
        "law": law,
        "rungs": rungs,
        "left_out": [],
        "config": GIVEN,
        "data": data,
        "bits_per_byte": 0.4,
        "windows": 0.01,
    }
    return Ladder(**content | more)


@pytest.fixture(scope="module")
def law() -> Law:
    return fit_law(GRID, noisy(GRID, 1))


def test_points_of_a_law_give_its_constants() -> None:
    found = fit_law(GRID, noisy(GRID, 0, noise=1e-7)).constants()
    known = {"E": 1.69, "A": 406.4, "a": 0.34, "B": 410.7, "b": 0.28}
    assert {name: value for name, (value, *_) in found.items()} == pytest.approx(known, rel=0.01)
    for name, (_, low, high) in found.items():
        assert low <= known[name] * 1.01
        assert known[name] <= high * 1.01


def test_the_fit_is_that_of_scipy(law: Law) -> None:
    optimize = pytest.importorskip("scipy.optimize")
    features, targets = law.features(GRID), np.log(noisy(GRID, 1))

    def huber(c: np.ndarray) -> float:
        parameters, tokens = features.T
        irreducible_and_size = np.logaddexp(c[0], c[1] - c[2] * parameters)
        predicted = np.logaddexp(irreducible_and_size, c[3] - c[4] * tokens)
        error = np.abs(predicted - targets)
        return float(np.where(error < HUBER, error**2 / 2, HUBER * (error - HUBER / 2)).sum())

    options = {"xatol": 1e-9, "fatol": 1e-13, "maxiter": 20000, "maxfev": 20000}
    best = optimize.minimize(huber, np.array(law.fit), method="Nelder-Mead", options=options)
    assert huber(np.array(law.fit)) <= best.fun * 1.001
    again, _ = minimize(features, targets[None], best.x[None] * 1.05)
    assert huber(again[0]) == pytest.approx(best.fun, rel=1e-3)


def test_one_ratio_has_a_law_in_compute() -> None:
    single = fit_law(SINGLE, noisy(SINGLE, 0, 1e-4))
    assert (list(single.sizes), len(single.fit)) == (["flops"], 3)
    further = size(8e6, 16e6)
    assert single.predict(further).loss == pytest.approx(true_loss(further), rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [GRID, MORE])
def test_intervals_hold_nine_of_ten_runs(sizes: list[Size]) -> None:
    target = TARGET if sizes is GRID else size(8.5e6, 17e6)
    held = 0
    for seed in range(200):
        found = fit_law(sizes, noisy(sizes, seed)).predict(target)
        held += found.low <= noisy([target], 10_000 + seed)[0] <= found.high
    assert 170 <= held <= 190


@pytest.mark.parametrize(
    ("sizes", "losses", "problem"),
    [
        ([], [], "0 values of FLOPs, but a law in FLOPs needs 4; give more --depths or --ratios"),
        (SINGLE[:3], [3.0, 2.9, 2.8], "3 values of FLOPs, but a law in FLOPs needs 4"),
        (SINGLE[:3] * 2, [3.0] * 6, "3 values of FLOPs, but a law in FLOPs needs 4"),
        (GRID[:6], [4.0] * 6, "2 values of parameters, but .* needs 3; give more --depths"),
        (SAME_TOKENS, [4.0] * 6, "2 values of tokens, but .* needs 3; give more --ratios"),
        (GRID[:9:2], [4.0] * 5, "there are 5 rungs of different sizes, but a law in .* needs 6"),
        (2 * GRID[::4], [4.0] * 6, "there are 3 rungs of different sizes, but a law in .* needs 6"),
        (SINGLE, [3.0, 3.1, 3.3, 3.4], "the loss of the rungs does not fall with their FLOPs"),
    ],
)
def test_what_cannot_be_fitted(sizes: list[Size], losses: list[float], problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        fit_law(sizes, losses)


def test_a_ladder_is_written_read_and_drawn(law: Law, tmp_path: Path) -> None:
    (tmp_path / "ladder.json").write_text(json.dumps(ladder(law).content()))
    found = read_ladder(tmp_path)
    assert found.law.predict(TARGET) == law.predict(TARGET)
    assert law.predict(TARGET).low < law.predict(TARGET).loss < law.predict(TARGET).high
    assert found.warnings(GRID[0]) == []
    assert len(found.warnings(size(1e9, 1e11))) == 4  # parameters, tokens, FLOPs, repeated text
    assert ladder_png(found)[:4] == b"\x89PNG"
    (tmp_path / "ladder.json").write_text("{}")
    with pytest.raises(UserError, match="is not a ladder"):
        read_ladder(tmp_path)
    with pytest.raises(UserError, match="give the folder in which accel-gpt ladder"):
        read_ladder(tmp_path / "none")


def test_rungs_differ_in_depth_and_length_alone(tmp_path: Path) -> None:
    first, second = make_rung(GIVEN, 1, 5.0), make_rung(GIVEN, 3, 5.0)
    one, other = to_flat(first.config), to_flat(second.config)
    assert {key for key in one if one[key] != other[key]} == {
        "model.n_layer",
        "model.n_head",
        "model.n_embd",
        "train.max_steps",
    }
    assert (other["model.n_layer"], other["model.n_embd"], other["model.n_head"]) == (3, 192, 3)
    assert second.size.tokens == pytest.approx(5 * second.size.parameters, abs=256)
    dial = make_rung({**GIVEN, "model.depth": 1}, 2, 5.0).config
    assert (dial.model.depth, dial.optim.name) == (2, "muon")


def test_a_rung_of_another_config_is_named(tmp_path: Path) -> None:
    rung = make_rung(GIVEN, 1, 5.0)
    (tmp_path / rung.name).mkdir()
    (tmp_path / rung.name / "config.yaml").write_text("optim: {lr: 0.5}\nout_dir: elsewhere\n")
    with pytest.raises(UserError, match=r"optim\.lr 0\.5, but now has 0\.0006"):
        SeriesRun(rung.name, tmp_path, rung.config)


def test_a_rung_that_diverged_is_left_out_and_one_of_other_data_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rungs = [make_rung(GIVEN, depth, ratio) for depth in (1, 3, 5) for ratio in (1, 2, 4)]
    for rung in rungs:
        loss = {"eval/val_loss": true_loss(rung.size) / 6, "eval/val_loss_se": 0.01}
        make_run(tmp_path / rung.name, [record(10, **loss)])
    diverged, other = tmp_path / rungs[2].name, tmp_path / rungs[-1].name
    (diverged / "metrics.jsonl").write_text(f"{json.dumps(record(10, **{'eval/val_loss': 5.6}))}\n")
    runs = {rung.name: RunFolder(tmp_path / rung.name) for rung in rungs}
    found = fit_ladder("t", GIVEN, rungs, runs, {})
    told = f"{rungs[2].name}: diverged, its val loss is 5.6"
    assert (len(found.rungs), found.left_out) == (8, [told])
    assert capsys.readouterr().err == f"left out: {told}\n"
    assert told in ladder_lines(found)[-1]
    failures = dict.fromkeys([rung.name for rung in rungs[:6]], "not finite")
    with pytest.raises(
        UserError,
        match=r"3 of 9 rungs can be fitted \(depth_1_ratio_1: not f.*\), but .*, or fix the rungs",
    ):
        fit_ladder("t", GIVEN, rungs, runs, failures)
    launch = {**LAUNCH, "data": {**LAUNCH["data"], "tokenizer": "chars"}}
    (other / "run.json").write_text(json.dumps({"launches": [launch]}))
    runs[other.name] = RunFolder(other)
    with pytest.raises(
        UserError, match=f"tokenizer of {other.name} is chars, but bytes in smaller rungs"
    ):
        fit_ladder("t", GIVEN, rungs, runs, {})


def flat_in_parameters(one: Size) -> float:
    return float(1 + 80 / one.tokens**0.28)


def flat_in_tokens(one: Size) -> float:
    return float(1 + 150 / one.parameters**0.34)


def rising(one: Size) -> float:
    return float(3 + 1e-9 * one.tokens)


@pytest.mark.parametrize(
    ("ratios", "loss", "why", "more"),
    [
        (
            "1,2,4",
            flat_in_parameters,
            "with their parameters",
            "longer rungs: repeat the command with --depths 1,3,5 --ratios 8,16",
        ),
        (
            "1,2,4",
            flat_in_tokens,
            "with their tokens",
            "deeper rungs: repeat the command with --depths 6,10 --ratios 1,2,4",
        ),
        (
            "1,2,4",
            rising,
            "with their",
            "longer rungs: repeat the command with --depths 1,3,5 --ratios 8,16",
        ),
    ],
)
def test_rungs_without_a_law_are_written_with_what_to_add(
    ratios: str,
    loss: Callable[[Size], float],
    why: str,
    more: str,
    small_run: Callable[..., list[str]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out, words = tmp_path / "ladder", small_run("--depths", "1,3,5", "--ratios", ratios)
    given = read_values(Config, words[0], [])
    for depth in (1, 3, 5):
        for ratio in map(float, ratios.split(",")):
            rung = make_rung(given, depth, ratio)
            own = {name: getattr(rung.config, name) for name in ("model", "train", "data", "optim")}
            own |= {name: getattr(rung.config, name) for name in ("schedule", "eval", "sample")}
            value = {"eval/val_loss": loss(rung.size), "eval/val_bits_per_byte": 2.0}
            run = make_run(
                out / rung.name, [record(rung.config.train.max_steps or 0, **value)], **own
            )
            (run / "checkpoints" / step_name(rung.config.train.max_steps or 0)).mkdir(parents=True)
    assert run_main(dispatch, ["ladder", *words, "--out", str(out)]) == 2
    printed = capsys.readouterr()
    rows = [line.split() for line in printed.out.splitlines()]
    largest = make_rung(given, 3, 4.0)
    numbers = (
        f"{largest.size.parameters:,}",
        f"{largest.size.tokens:,}",
        f"{largest.size.flops:.2e}",
    )
    assert ["depth_3_ratio_4", *numbers, f"{loss(largest.size):.4f}", "2.0000"] in rows
    assert f"report     {out / 'report.html'}" in printed.out
    assert "depth_3_ratio_4" in (out / "report.html").read_text()
    assert f"the loss of the rungs does not fall {why}" in printed.err
    assert f"add {more}" in printed.err
    assert "exponent" not in printed.err


def test_a_rung_for_each_seed_and_the_rungs_that_the_folder_has(
    small_run: Callable[..., list[str]], tmp_path: Path
) -> None:
    words = small_run("--depths", "1,2", "--ratios", "0.01", "--seeds", "3,4")
    options = LadderCommand.parse(words)
    (tmp_path / "depth_3_ratio_0.02_seed_5").mkdir()
    (tmp_path / "depth_3_ratio_0.02").mkdir()
    rungs = all_rungs(options, options.given, tmp_path)
    assert {rung.name: rung.config.seed for rung in rungs} == {
        "depth_1_ratio_0.01_seed_3": 3,
        "depth_1_ratio_0.01_seed_4": 4,
        "depth_2_ratio_0.01_seed_3": 3,
        "depth_2_ratio_0.01_seed_4": 4,
        "depth_3_ratio_0.02_seed_5": 5,
        "depth_3_ratio_0.02": Config.seed,
    }


def test_a_folder_that_another_ladder_uses_is_refused(
    small_run: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = small_run("--depths", "1,2,3", "--ratios", "1,2,4", "--out", str(tmp_path / "ladder"))
    with locked(tmp_path / "ladder"):
        assert run_main(dispatch, ["ladder", *words]) == BusyError.exit_code
    assert f"{tmp_path / 'ladder'} is in use" in capsys.readouterr().err


# --------------------------------------------------------------------------- plan


@pytest.fixture
def folder(law: Law, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ladder.json").write_text(json.dumps(ladder(law).content()))
    (tmp_path / "c.yaml").write_text("data: {tokenizer: bytes}\ntrain: {max_steps: 900}\n")
    return tmp_path


def test_a_budget_leaves_depths_aside_of_which_the_rungs_tell_nothing(
    law: Law, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", "--ladder", ".", "--gpu", "h100", "--hours", "2e-3", "--json"]
    best = []
    for deepest in (4, 2):  # with few parameters
        rungs = [rung for rung in ladder(law).rungs if rung["depth"] <= deepest]
        known = [
            {**rung, "tokens": 4 * rung["tokens"], "flops": 20 * rung["flops"]} for rung in rungs
        ]
        (folder / "ladder.json").write_text(json.dumps(ladder(law, rungs=known).content()))
        assert dispatch(words) == 0
        answer = json.loads(capsys.readouterr().out)
        rows = {row["depth"]: row for row in answer["rows"]}
        best.append(rows[answer["best"]])
    assert best[0]["depth"] > best[1]["depth"]
    deeper = rows[best[1]["depth"] + 1]
    assert deeper["loss"] < best[1]["loss"]
    assert "times the parameters" in deeper["doubts"][0]


def test_a_budget_trains_the_best_depth(
    law: Law, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {**GIVEN, "train.mixed_precision": "auto"}  # bf16 on this device
    (folder / "ladder.json").write_text(json.dumps(ladder(law, config=given).content()))
    words = ["plan", "--ladder", ".", "--gpu", "h100", "--price", "2.5", "--out", "best.yaml"]
    assert dispatch([*words, "--budget", "0.1", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    rows = {row["depth"]: row for row in answer["rows"]}
    assert len(rows) in (2, 3)
    assert rows[answer["best"]]["loss"] == min(row["loss"] for row in rows.values())
    assert all(row["cost"] == pytest.approx(0.1, rel=0.01) for row in rows.values())
    assert dispatch(["plan", "best.yaml", "--ladder", ".", "--gpu", "h100", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["loss"]["loss"] == pytest.approx(rows[answer["best"]]["loss"])
    assert planned["time"]["hours"] == pytest.approx(0.04, rel=0.01)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--ladder", ".", "--budget", "9", "--gpu", "h100"], "--price is missing; give --price"),
        (["--ladder", ".", "--hours", "1"], "holds no runs"),
        (["--ladder", ".", "--hours", "1e-7", "--gpu", "h100"], "are too few"),
        (["--ladder", ".", "--hours", "1", "--optim.lr", "9"], "--optim.lr has no effect with"),
        (["--ladder", ".", "--hours", "1", "--vocab_size", "9"], "--vocab_size has no effect with"),
        (["--ladder", ".", "--hours", "1", "--gpu", "h100", "--out", "c.yaml"], "another config"),
        (["c.yaml", "--ladder", ".", "--vocab_size", "300"], "c.yaml has 300"),
    ],
)
def test_bad_input_is_one_sentence(words: list[str], problem: str, folder: Path) -> None:
    with pytest.raises(UserError, match=problem):
        dispatch(["plan", *words])


def test_a_guess_is_called_one(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert dispatch(["plan", "c.yaml", "--ladder", ".", "--optim.lr", "1"]) == 0
    printed = capsys.readouterr().out
    assert "expected val loss" in printed
    assert "times the parameters of the largest rung" in printed
    assert re.search(r"other values of .*optim\.lr.* than in the rungs", printed)


def test_the_quickstart_has_a_shipped_ladder(capsys: pytest.CaptureFixture[str]) -> None:
    assert dispatch(["plan", "quickstart", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["loss"]
    value, low, high = found["bits_per_byte"]
    assert value == pytest.approx(1.5909, rel=0.01)  # docs/explanation/fast.md: measured
    assert low < 1.5909 < high
    assert found["doubts"] == []


# --------------------------------------------------------------------------- the command


@pytest.mark.slow
def test_killed_at_random_moments_it_is_the_same_ladder(
    small_run: Callable[..., list[str]], tmp_path: Path
) -> None:
    """Tiny rungs: one ladder runs undisturbed, another is killed repeatedly with its runs."""
    command = [sys.executable, "-c", ANY_FIT, *small_run("--checkpoint.every", "2")]
    command += ["--train.tokens_per_step", "128", "--train.micro_batch_size", "4"]
    command += ["--depths", "1,2,3,4", "--ratios", "0.01", "--out"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    subprocess.run([*command, str(whole)], check=True, capture_output=True)
    generator, kills = random.Random(1), 0
    while not (killed / "ladder.json").exists():
        process = subprocess.Popen([*command, str(killed)], stderr=subprocess.DEVNULL)
        with_time = generator.uniform(4, 14) if kills < (5 * THOROUGH or 2) else 600
        try:
            assert process.wait(with_time) == 0
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            kills += 1
    same = (whole / "ladder.json").read_text().replace('"title": "whole"', '"title": "killed"')
    assert kills
    assert (killed / "ladder.json").read_text() == same
