"""Training a tiny model: exact resume, evaluation without side effects, rejected configs."""

import csv
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector

from accel_gpt import train
from accel_gpt.config.data import PrepareConfig
from accel_gpt.launch import machine
from accel_gpt.model.gpt import GPT
from accel_gpt.prepare.prepare import prepare
from accel_gpt.runs.checkpoint import find_checkpoint
from accel_gpt.runs.tensor_files import weights_of
from accel_gpt.transformers_io.load import load_checkpoint
from tests.conftest import QUIET, launch, text_of

Arguments = Callable[..., list[str]]
Trained = Callable[..., Path]


def records(run: Path) -> list[dict[str, float]]:
    """Return the lines of metrics.jsonl without clock figures."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [
        {k: v for k, v in line.items() if k != "time" and not k.startswith(("perf/", "launch/"))}
        for line in lines
    ]


def weights(run: Path, step: int = 12) -> dict[str, Tensor]:
    return weights_of(load_checkpoint(run / "checkpoints" / f"step_{step:08d}")[0])


def assert_same_weights(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


def around_updates(
    monkeypatch: pytest.MonkeyPatch,
    before: Callable[[train.Training], object] = lambda _: None,
    after: Callable[[train.Training], object] = lambda _: None,
) -> None:
    """Call functions before and after each update of the weights."""
    update = train.update

    def surrounded(run: train.Training) -> None:
        before(run)
        update(run)
        after(run)

    monkeypatch.setattr(train, "update", surrounded)


def before_step(monkeypatch: pytest.MonkeyPatch, step: int, act: Callable[[], object]) -> None:
    """Call a function before step `step` is trained."""
    around_updates(monkeypatch, lambda run: run.state.step == step - 1 and act())


def signal_after(monkeypatch: pytest.MonkeyPatch, step: int, number: int) -> None:
    """Send this process a signal during step `step`."""
    before_step(monkeypatch, step, lambda: os.kill(os.getpid(), number))


def test_the_rate_that_is_logged_is_optim_lr_whatever_the_groups(
    small_run: Arguments, tmp_path: Path
) -> None:
    """With Muon in the fast recipe, the embedding is the first group."""
    own = ["--optim.name", "muon", "--optim.lr", "0.01", "--optim.embedding_lr", "0.3"]
    assert launch(small_run("--model.preset", "fast", *own, *QUIET, "--train.max_steps", "3")) == 0
    assert records(tmp_path / "run")[0]["train/lr"] == pytest.approx(0.005)


# Without moments and with an eps that no gradient reaches: gradient descent at a rate of lr / eps.
DESCENT = ("--optim.beta1", "0", "--optim.beta2", "0", "--optim.eps", "1e3", "--optim.lr", "1e3")
DESCENT += ("--optim.weight_decay", "0", "--model.dropout", "0", *QUIET)


def lengths(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Record the norm of each later update of the weights."""
    found = []

    def measured(run: train.Training) -> None:
        before = parameters_to_vector(run.gpt.parameters()).detach().double()
        update(run)
        after = parameters_to_vector(run.gpt.parameters()).detach().double()
        found.append((after - before).norm().item())

    update = train.update
    monkeypatch.setattr(train, "update", measured)
    return found


def test_an_update_has_the_clipped_length_and_the_rate_of_its_step(
    small_run: Arguments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With gradient descent: the sum over micro-batches is clipped to a norm of 0.05."""
    found, fractions = lengths(monkeypatch), [0.5, 1, 1, 0.8, 0.6, 0.4]
    words = ["--schedule.name", "linear", "--train.max_steps", "6", "--optim.grad_clip", "0.05"]
    assert launch(small_run(*DESCENT, *words, "--schedule.min_lr", "200")) == 0
    lines = records(tmp_path / "run")
    assert [line["train/lr"] for line in lines] == pytest.approx([1e3 * f for f in fractions])
    assert all(line["train/grad_norm"] > 0.06 for line in lines)
    assert found == pytest.approx([0.05 * f for f in fractions], rel=2e-3)


# a refactoring leaves these losses alone; a change of the numerics says by how much
GOLDEN = [
    *(5.5535, 5.2159, 4.8436, 4.3732, 3.9465, 3.5957),
    *(3.3325, 3.1635, 3.0592, 2.9743, 2.9501, 2.9120),
]


def test_loss_curve_is_the_stored_one_and_the_contract_names_what_is_left(
    small_run: Arguments, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = ("--model.dropout", "0", "--train.micro_batch_size", "4")
    assert launch(small_run(*own, "--log.trackers", "tensorboard")) == 0
    run = tmp_path / "run"
    names = {p.name for p in run.iterdir() if not p.name.startswith(".")}
    assert names == {
        *("config.yaml", "data_files.json", "run.json", "metrics.jsonl", "metrics.csv"),
        *("tensorboard", "samples", "checkpoints"),
    }
    lines = records(run)
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert [line["tokens"] for line in lines] == [256 * step for step in range(1, 13)]
    assert [line["train/loss"] for line in lines] == pytest.approx(GOLDEN, abs=2e-4)
    assert [line["step"] for line in lines if "eval/val_loss" in line] == [4, 8, 12]
    assert lines[0]["train/lr"] == pytest.approx(0.005)
    assert len(list(csv.DictReader((run / "metrics.csv").read_text().splitlines()))) == 12
    assert [p.name for p in sorted((run / "samples").iterdir())] == [
        "step_00000006.txt",
        "step_00000012.txt",
    ]
    launches = json.loads((run / "run.json").read_text())["launches"]
    assert launches[0]["plan"]["max_steps"] == 12
    shown = capsys.readouterr().err
    assert "256 tokens per step = 4 sequences x 32 tokens x 2 micro-steps x 1 process" in shown
    assert re.search(r"^options  train\..*\bmax_steps 12\b", shown, flags=re.MULTILINE)
    assert shown.index(f"run      {tmp_path / 'run'}\n") < shown.index("model    ")


def test_evaluation_and_samples_leave_no_trace(small_run: Arguments, tmp_path: Path) -> None:
    questions = tmp_path / "questions.jsonl"
    questions.write_text('{"ctx": "the king", "endings": ["a sea", "war"], "label": 0}\n' * 5)
    short = ["--train.max_steps", "4", "--eval.hellaswag", str(questions), "--out_dir"]
    often = ["--eval.every", "1", "--sample.every", "1"]
    assert launch(small_run(*short, str(tmp_path / "with"), *often)) == 0
    quiet = ["--eval.every", "0", "--sample.every", "0", "--log.every", "3"]
    assert launch(small_run(*short, str(tmp_path / "without"), *quiet)) == 0
    assert_same_weights(weights(tmp_path / "with", 4), weights(tmp_path / "without", 4))
    asked = [line["step"] for line in records(tmp_path / "with") if "eval/hellaswag_acc" in line]
    assert asked == [1, 2, 3, 4]
    steps = [line["step"] for line in records(tmp_path / "without")]
    assert steps == [1, 3, 4]  # the first step is logged at once
    assert "eval/val_loss" in records(tmp_path / "without")[-1]  # the last step is evaluated


def test_a_folder_of_another_run_is_refused(
    small_run: Arguments, trained: Trained, tmp_path: Path, corpus: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    before = weights(trained())
    capsys.readouterr()
    assert launch(small_run("--model.n_layer", "3", "--optim.lr", "0.5")) == 4
    message = capsys.readouterr().err
    assert "model.n_layer was 2, is 3, optim.lr was 0.01, is 0.5" in message
    assert "allow_change" not in message  # it would not help
    (tmp_path / "other.txt").write_text(text_of(5000, seed=1))
    other = PrepareConfig(source=str(tmp_path / "other.txt"), tokenizer="bytes")
    prepare(other, tmp_path / "other")
    assert launch(small_run("--data.train", str(tmp_path / "other"))) == 2
    assert re.search(r"data\.train was .*corpus.* is .*other", capsys.readouterr().err)
    assert_same_weights(weights(tmp_path / "run"), before)
    corpus.rename(tmp_path / "moved")
    assert launch(small_run("--data.train", str(tmp_path / "moved"))) == 0


def test_starting_from_the_weights_of_a_run(
    small_run: Arguments, trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained()
    short = ("--train.max_steps", "1", *QUIET)
    own = ("--out_dir", str(tmp_path / "tuned"), "--model.init_from", str(tmp_path / "run"))
    assert launch(small_run(*own, *short)) == 0
    first, last = records(tmp_path / "tuned")[1], records(tmp_path / "run")[-1]
    assert first["train/loss"] == pytest.approx(last["train/loss"], abs=0.3)
    own = ("--out_dir", str(tmp_path / "again"), "--model.init_from", str(tmp_path / "run"))
    assert launch([str(tmp_path / "run/config.yaml"), *own, *short]) == 0  # it has all keys
    assert records(tmp_path / "again")[1]["train/loss"] == pytest.approx(first["train/loss"])
    capsys.readouterr()
    other = ["--out_dir", str(tmp_path / "wide"), "--model.n_embd", "64"]
    assert launch(small_run("--model.init_from", str(tmp_path / "run"), *other)) == 2
    assert "which model.init_from names, has 32" in capsys.readouterr().err


def test_best_checkpoint_outlives_newer_ones(
    small_run: Arguments, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The learning rate is far too high: step 4 is worse than step 2."""
    options = ["--checkpoint.keep_best", "true", "--checkpoint.keep_last", "1", "--eval.every", "2"]
    options += ["--optim.lr", "0.3", "--optim.grad_clip", "0", "--train.max_steps", "4"]
    assert launch(small_run("--schedule.name", "constant", "--sample.every", "0", *options)) == 0
    first, second = (
        record["eval/val_loss"] for record in records(tmp_path / "run") if record["step"] in (2, 4)
    )
    assert first < second
    assert (tmp_path / "run" / "best").read_text() == "2\n"
    kept = {p.name for p in (tmp_path / "run" / "checkpoints").iterdir()}
    assert kept == {"step_00000002", "step_00000004"}
    assert f"\nbest     step 2, eval/val_loss {first:.4f}; sample" in capfd.readouterr().err
    assert find_checkpoint(tmp_path / "run").name == "step_00000002"


def test_many_epochs_and_idle_gpus_are_told_at_the_start(
    small_run: Arguments, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine, "idle_gpus", lambda _: 3)
    assert launch(small_run("--train.max_steps", "9000", "--train.stop_at", "1")) == 0
    written = capfd.readouterr().err
    assert "epochs; more than 4 add little" in written
    assert "device   idle: 3 other GPUs; accelerate launch --multi_gpu" in written


def test_speed_counts_training_alone(
    small_run: Arguments, trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a simulated clock a step takes 1 s, and the work before and after it takes 1,000 s."""
    source = trained(*QUIET, to="source")
    now = [0.0]
    monkeypatch.setattr(
        "accel_gpt.training.metrics.time", SimpleNamespace(monotonic=lambda: now[0])
    )

    def lasting(place: Any, name: str, seconds: float) -> None:
        function = getattr(place, name)

        def timed(*args: Any, **options: Any) -> Any:
            now[0] += seconds
            return function(*args, **options)

        monkeypatch.setattr(place, name, timed)

    lasting(train, "update", 1.0)
    for name in ("save", "sample"):
        lasting(train, name, 1000.0)
    lasting(train, "evaluate", 1000.0)
    words = ["--model.init_from", str(source)]  # is evaluated first
    words += ["--checkpoint.every", "5"]  # evaluates and samples at other steps
    assert launch(small_run(*words)) == 0
    _, *lines = [
        json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    ]
    assert [line["perf/step_ms"] for line in lines] == pytest.approx([1000.0] * 12)
    assert [line["perf/tokens_per_second"] for line in lines] == pytest.approx([256.0] * 12)
    assert now[0] == 12 + 1000 * (4 + 3 + 2)


def test_a_run_of_one_step_prepares_missing_data_and_warms_up_in_no_step(
    small_run: Arguments, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "own.txt"
    text.write_text(text_of(3000))
    made = ["--data.train", str(tmp_path / "own"), "--data.prepare.source", str(text)]
    made += ["--data.prepare.tokenizer", "chars"]
    assert launch(small_run(*made, "--train.max_steps", "1", *QUIET)) == 0
    assert (tmp_path / "own" / "dataset.json").is_file()
    told = "= 1 step, 0 of them warm-up (schedule.warmup_steps is 2)\n"
    assert told in capsys.readouterr().err


def test_a_tracker_is_checked_before_data_are_prepared(
    small_run: Arguments, tmp_path: Path
) -> None:
    made = ["--data.train", str(tmp_path / "own"), "--data.prepare.source", "stdlib"]
    assert launch(small_run(*made, "--log.trackers", "swanlab")) == 2
    assert not (tmp_path / "own").exists()


def test_weights_that_no_checkpoint_would_hold_are_refused(
    small_run: Arguments,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    draw = GPT.init_weights

    def untie(gpt: GPT) -> None:
        draw(gpt)
        gpt.head.weight = torch.nn.Parameter(gpt.wte.weight.detach().clone())

    monkeypatch.setattr(GPT, "init_weights", untie)
    assert launch(small_run(*QUIET)) == 2
    told = capsys.readouterr().err
    assert "head.weight is not the weight of the embedding" in told
    assert not list((tmp_path / "run").glob("checkpoints/*"))
