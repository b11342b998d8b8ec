"""Each fault shows on its line, and a sound run has none."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from accel_gpt.config.experiment import CheckpointConfig, Config, OptimConfig, Stage, TrainConfig
from accel_gpt.config.model import ModelConfig
from accel_gpt.health import bands
from accel_gpt.health.case import Case, Line
from accel_gpt.health.doctor import answers, verdict
from accel_gpt.health.learning import rise_of
from accel_gpt.health.text import TextStatistics
from accel_gpt.report.runs import NamedRun
from tests.helpers.runs import LAUNCH, SHAPE, make_run

STEPS = 400
EVERY = 5
Records = list[dict[str, Any]]
Launch = dict[str, Any]
TEXT = TextStatistics(
    train_tokens=2_000_000,
    counted_tokens=2_000_000,
    bytes_per_token=3.5,
    losses={"unigram": 6.0, "bigram": 4.5, "5-gram": 4.2},
    window=57,
    val_in_train=0.02,
    repeated=0.05,
    used_tokens=4000,
    most_frequent=" the",
    most_frequent_share=0.03,
    documents=600,
    median_document=2000,
    copied_share=0.001,
    unreadable=0.0,
    read_back=0.99,
)


def records() -> Records:
    """A sound run: warm-up, a loss that falls as a power of the step, a rate that decays."""
    found = []
    for step in [1, *range(EVERY, STEPS + 1, EVERY)]:
        loss = 10 * step**-0.15 + 0.01 * math.sin(step)  # some noise
        rate = min(step / 20, 0.1 + 0.9 * (1 - step / STEPS))
        one = {"step": step, "tokens": 4096 * step, "time": 0.1 * step, "train/loss": loss}
        one |= {"train/lr": 1e-3 * rate, "train/grad_norm": 0.5, "data/epochs": step / 500}
        one |= {"train/skipped": 0, "train/spikes": 0}
        one |= {f"train/update_ratio/{part}": 0.01 * rate for part in ("wte", "blocks.mlp")}
        one |= {"train/update_ratio/least": 0.005 * rate}
        one |= {"perf/tokens_per_second": 40960.0, "perf/step_ms": 90.0, "perf/data_wait_ms": 0.1}
        if step % 50 == 0:
            one |= {"eval/train_loss": loss, "eval/val_loss": loss + 0.1, "perf/evaluation_s": 0.3}
            one |= {"eval/val_loss_se": 0.02, "eval/val_bits_per_byte": (loss + 0.1) / 2.43}
        found.append(one)
    return found


def launch(**more: Any) -> Launch:
    plan = {"max_steps": STEPS, "warmup_steps": 20, "world_size": 1, "micro_batch_size": 32}
    plan |= {"block_size": 128, "accumulation_steps": 1}
    model = {**LAUNCH["model"], "dtypes": ["float32"]}
    optimizer = {"weights": 20, "never_updated": 0, "vectors": 8, "decayed_vectors": 0}
    return {**LAUNCH, "plan": plan, "model": model, "optimizer": optimizer, **more}


def examine(
    folder: Path,
    text: TextStatistics | None = TEXT,
    rows: Records | None = None,
    launches: list[Launch] | None = None,
    **config: Any,
) -> dict[str, Line]:
    """Return the lines of a run, without the line on checkpoints, of which it has none."""
    run = make_run(folder / "run", rows or records(), launches or [launch()], **config)
    given = {"model": ModelConfig(**SHAPE), **config}
    case = Case(NamedRun(run, "run"), replace(Config(), **given))
    if text is not None:
        case.__dict__["text"] = text
    return {line.name: line for line in answers(case) if line.name != "kill"}


def flagged(lines: dict[str, Line]) -> dict[str, str]:
    return {name: str(line.verdict) for name, line in lines.items() if line.verdict != "fine"}


def test_a_sound_run_is_fine(tmp_path: Path) -> None:
    lines = examine(tmp_path)
    assert flagged(lines) == {}
    assert lines["counting"].figure == "1.713 bits per byte"
    assert "5-gram 1.73" in lines["counting"].compared
    assert not any(line.todo for line in lines.values())


def changed(key: str, change: Callable[[int, float], float]) -> Records:
    """Return the sound records with other values of a metric."""
    rows = records()
    for row in rows:
        if key in row:
            row[key] = change(row["step"], row[key])
    return rows


def evaluated_at(loss: float) -> Records:
    """Return the sound records with this loss in all evaluations."""
    rows = records()
    for row in rows:
        if "eval/val_loss" in row:
            row |= {"eval/val_loss": loss, "eval/train_loss": loss - 0.1}
    return rows


# (line, verdict, what differs from the sound run)
FAULTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "no better than the unigram model": (
        *("counting", "wrong"),
        {"rows": evaluated_at(5.99)},
    ),
    "worse than the bigram model": (
        *("counting", "look"),
        {"rows": evaluated_at(5.0)},
    ),
    "a loss that nothing can have": (
        *("leak", "wrong"),
        {"rows": changed("eval/val_loss", lambda step, loss: 0.3)},
    ),
    "validation in train": ("leak", "wrong", {"text": replace(TEXT, val_in_train=0.9)}),
    "some validation in train": ("leak", "look", {"text": replace(TEXT, val_in_train=0.35)}),
    "val loss rises": (
        *("fit", "wrong"),
        {"rows": changed("eval/val_loss", lambda step, loss: 4.3 + 0.0014 * max(0, step - 150))},
    ),
    "learned by heart": (
        *("fit", "look"),
        {"rows": changed("eval/train_loss", lambda step, loss: loss - step / 200)},
    ),
    "a dropout that costs": (
        *("fit", "look"),
        {"rows": changed("eval/train_loss", lambda step, loss: 0.8 * loss)}
        | {"model": ModelConfig(**SHAPE, dropout=0.5)},
    ),
    "a head of its own": (
        *("fit", "look"),
        {"model": ModelConfig(**SHAPE, tie_embeddings=False)}
        | {"launches": [launch(model={"parameters": 9_000_000, "vocab_size": 50_000})]},
    ),
    "no warm-up": (
        *("curve", "look"),
        {"rows": changed("train/lr", lambda step, rate: 1e-3 * (1 - 0.9 * step / STEPS))},
    ),
    "no decay": (
        *("curve", "look"),
        {"rows": changed("train/lr", lambda step, rate: 1e-3 * min(1, step / 20))},
    ),
    "the train loss rises": (
        *("curve", "wrong"),
        {"rows": changed("train/loss", lambda step, loss: loss + max(0, step - 100) / 100)},
    ),
    "the train loss does not fall": (
        *("curve", "wrong"),
        {"rows": changed("train/loss", lambda step, loss: 7.0)},
    ),
    "a train loss that falls too fast": (
        *("curve", "look"),
        {"rows": changed("train/loss", lambda step, loss: 6 / step)},
    ),
    "moments lost at a resume": (
        *("curve", "look"),
        {"launches": [launch(), launch(step=200)]}
        | {
            "rows": changed(
                "train/update_ratio/wte", lambda step, size: size * (2 if step > 200 else 1)
            )
        },
    ),
    "steps that forget": (
        *("rates", "wrong"),
        {"rows": changed("train/update_ratio/wte", lambda step, size: 100 * size)},
    ),
    "a weight that stands still": (
        *("rates", "wrong"),
        {"rows": changed("train/update_ratio/least", lambda step, size: 0.0)},
    ),
    "a gradient that is always clipped": (
        *("rates", "look"),
        {"rows": changed("train/grad_norm", lambda step, norm: 20.0)},
    ),
    "skipped updates": (
        *("rates", "wrong"),
        {"rows": changed("train/skipped", lambda step, count: step / 10)},
    ),
    "loss spikes": (
        *("rates", "look"),
        {"rows": changed("train/spikes", lambda step, count: step / 100)},
    ),
    "decay of norms": (
        *("rates", "look"),
        {"launches": [launch(optimizer={"decayed_vectors": 8})]},
    ),
    "a weight in no group": (
        *("rates", "look"),
        {"launches": [launch(optimizer={"never_updated": 2})]},
    ),
    "bf16 weights": (
        *("rates", "look"),
        {"launches": [launch(model={**LAUNCH["model"], "dtypes": ["bfloat16"]})]},
    ),
    "copies": ("data", "wrong", {"text": replace(TEXT, copied_share=0.8)}),
    "copies without an end": ("data", "wrong", {"text": replace(TEXT, repeated=1.0)}),
    "padding": ("data", "wrong", {"text": replace(TEXT, most_frequent_share=0.7)}),
    "lost letters": ("data", "look", {"text": replace(TEXT, unreadable=0.01)}),
    "another tokenizer": ("data", "wrong", {"text": replace(TEXT, read_back=0.3)}),
    "no end of a document": ("data", "look", {"text": replace(TEXT, documents=0)}),
    "waits for data": (
        *("machine", "look"),
        {"rows": changed("perf/data_wait_ms", lambda step, wait: 45.0)},
    ),
    "evaluates all the time": (
        *("machine", "look"),
        {"rows": changed("perf/evaluation_s", lambda step, seconds: 4.0)},
    ),
    "a slow rank": (
        *("machine", "look"),
        {"rows": [{**row, "perf/slowest_rank": 3.0} for row in records()]},
    ),
    "a GPU that waits": (
        *("machine", "look"),
        {"rows": [{**row, "perf/mfu": 0.05} for row in records()]}
        | {"launches": [launch(model={**LAUNCH["model"], "parameters": 124_000_000})]},
    ),
    "code that no commit holds": (
        *("identity", "look"),
        {"launches": [launch(commit="0123456789ab-dirty")]},
    ),
    "another commit at a resume": (
        *("identity", "look"),
        {"launches": [launch(), launch(step=200, commit="ba9876543210")]},
    ),
    "another config at a resume": (
        *("identity", "look"),
        {"launches": [launch(), launch(step=200, changed={"optim.lr": [1e-3, 2e-3]})]},
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_shows_on_its_line(fault: str, tmp_path: Path) -> None:
    name, expected, changes = FAULTS[fault]
    lines = examine(tmp_path, **changes)
    assert lines[name].verdict == expected, lines[name]
    assert lines[name].todo
    assert flagged(lines).keys() == {name}


def test_noise_is_no_rise() -> None:
    draw = np.random.default_rng(0)
    steps = np.arange(1.0, 401)
    for noise, rise, expected in ((0.3, 0.0, 0), (0.01, 0.0, 0), (0.01, 0.2, 0.05)):
        losses = 4 + noise * draw.standard_normal(400)
        losses[200:] += rise
        found, step = rise_of(steps, losses)
        assert found == pytest.approx(expected, abs=0.005 if expected else 0)
        assert not expected or step <= 200


def test_updates_count_at_the_peak_rate_alone(tmp_path: Path) -> None:
    rows = records()
    for row in rows:
        if row["step"] > 100:
            row["train/lr"] = 1e-4
            row["train/update_ratio/wte"] = 9.0
    assert flagged(examine(tmp_path, rows=rows)) == {}


def test_what_a_resume_may_change_is_no_fault(tmp_path: Path) -> None:
    second = launch(step=200, changed={"log.every": [5, 10], "out_dir": ["a", "b"]})
    assert flagged(examine(tmp_path, launches=[launch(), second])) == {}


def test_updates_that_shrink_by_themselves_are_no_loss_of_moments(tmp_path: Path) -> None:
    """Each logged update is 0.85 of the one before, across the resume, too."""
    rows = records()
    for row in rows:
        for key in ("train/update_ratio/wte", "train/update_ratio/blocks.mlp"):
            row[key] *= 0.85 ** min(row["step"] / EVERY, 10)
    assert flagged(examine(tmp_path, rows=rows, launches=[launch(), launch(step=25)])) == {}


def test_another_loss_in_training_is_told_from_a_rate_that_is_too_high(tmp_path: Path) -> None:
    rows = changed("train/loss", lambda step, loss: loss + (2 if step > 200 else 0))
    line = examine(tmp_path, rows=rows)["curve"]
    assert line.verdict == "wrong"
    assert "its evaluation does not" in line.todo


def test_a_batch_far_below_the_best_is_looked_at(tmp_path: Path) -> None:
    plan = {**launch()["plan"], "micro_batch_size": 1, "block_size": 32}
    line = examine(tmp_path, launches=[launch(plan=plan)])["rates"]
    assert line.verdict == "look"
    assert line.compared.startswith("32 tokens a step, 0.6% of the best")


STAGES = (Stage(200, {"train.tokens_per_step": 12288}), Stage(0.75, {"data.train": "harder"}))


def staged() -> Launch:
    """Return a launch of a run with `STAGES`."""
    batch = {"block_size": 128, "micro_batch_size": 32, "accumulation_steps": 1}
    larger = {**batch, "accumulation_steps": 3}
    stages = [{"first_step": 0, **batch}]
    stages += [{"first_step": first, **larger} for first in (200, 300)]
    return launch(plan={**launch()["plan"], "stages": stages})


def test_what_a_stage_changes_at_once_is_no_fault(tmp_path: Path) -> None:
    """Losses and updates jump at the edges, and a resume at an edge is no lost optimizer."""
    rows = records()
    for row in rows:
        if row["step"] > 200:
            row["train/update_ratio/wte"] *= 2
            row["train/update_ratio/blocks.mlp"] *= 2
        for key in ("train/loss", "eval/train_loss", "eval/val_loss"):
            if key in row and row["step"] > 300:
                row[key] += 0.3
    launches = [launch(), {**launch(), "step": 200}]
    assert set(flagged(examine(tmp_path / "without", rows=rows, launches=launches))) >= {
        *("fit", "curve")
    }
    config = {"stages": STAGES, "train": TrainConfig(tokens_per_step=4096, max_steps=STEPS)}
    launches = [launch(), {**staged(), "step": 200}]
    lines = examine(tmp_path / "with", rows=rows, launches=launches, **config)
    assert flagged(lines) == {}
    assert "lowest val of the stage" in lines["fit"].compared
    assert "8,192 tokens a step" in lines["rates"].compared  # the mean of 4,096 and 12,288


def test_a_loss_that_falls_at_an_edge_tells_no_exponent(tmp_path: Path) -> None:
    rows = changed("train/loss", lambda step, loss: loss * (0.4 if step > 200 else 1))
    assert flagged(examine(tmp_path / "without", rows=rows))["curve"] == "look"
    lines = examine(tmp_path / "with", rows=rows, launches=[staged()], stages=STAGES)
    assert lines["curve"].verdict == "fine"


def test_dropout_is_not_judged_by_the_loss_of_other_data(tmp_path: Path) -> None:
    rows = changed("train/loss", lambda step, loss: loss + (step > 300))
    model = ModelConfig(**SHAPE, dropout=0.1)
    verdicts = []
    for number, last in enumerate(({"data.train": "harder"}, {"train.micro_batch_size": 1})):
        stages = (STAGES[0], Stage(0.75, last))
        folder = tmp_path / str(number)
        lines = examine(folder, rows=rows, launches=[staged()], stages=stages, model=model)
        verdicts.append(lines["fit"].verdict)
    assert verdicts == ["fine", "look"]


def test_a_fault_within_a_stage_is_one(tmp_path: Path) -> None:
    def risen(step: int, loss: float) -> float:
        return loss + max(0, step - 320) / 200

    rows = changed("train/loss", risen)
    for row in rows:
        if "eval/val_loss" in row:
            row["eval/val_loss"] = risen(row["step"], row["eval/val_loss"])
    config = {"stages": STAGES, "train": TrainConfig(tokens_per_step=4096, max_steps=STEPS)}
    found = flagged(examine(tmp_path, rows=rows, launches=[staged()], **config))
    assert {*found} == {"fit", "curve"}


def test_a_run_that_stopped_early_is_told(tmp_path: Path) -> None:
    rows = [row for row in records() if row["step"] <= 100]
    line = examine(tmp_path, rows=rows)["curve"]
    assert line.verdict == "look"
    assert line.todo == "it stopped at step 100 of 400: launch it again"


def test_a_run_without_records_has_no_verdict_where_nothing_is_known(tmp_path: Path) -> None:
    rows = [{"step": 1, "tokens": 4096, "time": 1.0}]
    lines = examine(tmp_path, rows=rows, text=None, launches=[launch()])
    unknown = {name for name, line in lines.items() if line.verdict is None}
    assert unknown == {"counting", "leak", "fit", "curve", "rates", "data", "machine"}


def test_own_targets_have_a_loss_of_their_own(tmp_path: Path) -> None:
    own = launch(code={"file": "my.py", "sha256": "0" * 64, "functions": ["targets"]})
    rows = changed("eval/val_loss", lambda step, loss: 0.3)
    lines = examine(tmp_path, rows=rows, launches=[own])
    assert lines["counting"].verdict is None
    assert lines["leak"].verdict == "fine"


def test_trained_weights_begin_where_others_end(tmp_path: Path) -> None:
    """A finetuned model knows more than its text tells, and its loss hardly falls."""
    rows = changed("train/loss", lambda step, loss: 3.2 - step / 1e4)
    for row in rows:
        if "eval/val_loss" in row:
            row["eval/val_loss"] = row["eval/train_loss"] = 1.0
    model = ModelConfig(**SHAPE, init_from="gpt2")
    assert flagged(examine(tmp_path, rows=rows, model=model)) == {}


def test_the_first_steps_of_a_run_are_not_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a warm-up of 2,000 steps, the loss has hardly fallen, and updates are small."""
    monkeypatch.setattr(NamedRun, "in_use", True)
    plan = {**launch()["plan"], "max_steps": 20_000, "warmup_steps": 2000}
    rows = [row for row in records() if row["step"] <= 50]
    for row in rows:
        row |= {"train/loss": 9.0, "train/lr": 1e-6 * row["step"]}
        row |= {"train/update_ratio/wte": 1e-5, "train/update_ratio/blocks.mlp": 1e-5}
        if "eval/val_loss" in row:
            row |= {"eval/val_loss": 9.0, "eval/train_loss": 9.0}
    lines = examine(tmp_path, rows=rows, launches=[launch(plan=plan)])
    assert {name: verdict for name, verdict in flagged(lines).items() if verdict != "None"} == {}


def test_a_text_without_order_gives_no_verdict_on_order(tmp_path: Path) -> None:
    for bigram in (6.0, 6.2):
        text = replace(TEXT, losses={"unigram": 6.0, "bigram": bigram, "5-gram": 6.0})
        rows = changed("eval/val_loss", lambda step, loss: 6.0)
        for row in rows:
            if "eval/val_loss" in row:
                row["eval/train_loss"] = 5.9
        assert flagged(examine(tmp_path / str(bigram), rows=rows, text=text)) == {}


def test_a_part_of_the_text_tells_of_the_whole() -> None:
    """A tenth was read: a tenth of what leaked is found, and noise is not multiplied."""
    part = replace(TEXT, counted_tokens=200_000, val_in_train=0.1, repeated=0.0)
    assert part.leaked(4.0) == pytest.approx(1.0)
    assert part.read == "the 200,000 train tokens that were read"
    assert replace(part, val_in_train=0.052, repeated=0.05).leaked(4.0) == 0
    assert replace(TEXT, val_in_train=0.1, repeated=0.04).leaked(4.0) == pytest.approx(0.06)


@pytest.mark.parametrize(
    "text",
    [
        replace(TEXT, used_tokens=2, most_frequent_share=0.6),  # an alphabet of two letters
        replace(TEXT, window=2, repeated=1.0, val_in_train=1.0),  # of a block_size of two
        replace(TEXT, losses={"unigram": 0.7, "bigram": 0.7, "5-gram": 0.7}),
    ],
)
def test_odd_text_is_no_fault(tmp_path: Path, text: TextStatistics) -> None:
    rows = evaluated_at(min(3.9, text.losses["5-gram"]))
    assert flagged(examine(tmp_path, rows=rows, text=text)) == {}


def test_records_of_any_numbers_are_judged(tmp_path: Path) -> None:
    """Zeros, values that are huge, and records without the schedule."""
    resumed = [launch(), launch(step=200)]
    for number, value in enumerate((0.0, -1.0, 1e200, 10**400)):
        rows = [{key: value if key != "step" else row[key] for key in row} for row in records()]
        assert len(examine(tmp_path / str(number), rows=rows, launches=resumed)) == 8
    rows = [{key: row[key] for key in row if key != "train/lr"} for row in records()]
    assert flagged(examine(tmp_path / "rates", rows=rows, launches=resumed)) == {}
    lines = examine(tmp_path / "plan", launches=[launch(plan={"max_steps": 1e999})])
    assert lines["curve"].verdict == "fine"


def test_the_wait_of_a_launch_that_compiles_is_counted(tmp_path: Path) -> None:
    rows = changed("perf/data_wait_ms", lambda step, wait: 45.0)
    rows[0]["perf/step_ms"] = 9_000_000.0
    assert examine(tmp_path, rows=rows)["machine"].verdict == "look"


def test_a_busy_gpu_hides_the_wait(tmp_path: Path) -> None:
    rows = [{**row, "perf/mfu": 0.45} for row in changed("perf/data_wait_ms", lambda *_: 45.0)]
    assert examine(tmp_path, rows=rows)["machine"].verdict == "fine"


def test_the_verdict_names_what_is_not_fine(tmp_path: Path) -> None:
    lines = examine(tmp_path, text=replace(TEXT, val_in_train=0.9, read_back=0.9))
    assert verdict([*lines.values()]) == "1 wrong (leak), 1 to look at (data), 6 fine"


# --------------------------------------------------------------------------- bands


def test_a_run_of_a_shipped_config_is_compared_with_its_band(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = records()[-1]["eval/val_loss"]
    near = [end - 0.02, end - 0.01, end, end + 0.01, end + 0.02]
    for losses, expected in ((near, "fine"), ([loss - 0.2 for loss in near], "look")):
        band = {"config": {}, "fingerprint": "f" * 64, "losses": {str(STEPS): losses}}
        file = tmp_path / expected
        file.write_text(json.dumps({"small": band}))
        monkeypatch.setattr(bands, "BANDS", file)
        model = ModelConfig()
        line = examine(tmp_path / f"{expected}_run", model=model)["curve"]
        assert line.verdict == expected
        assert f"at step {STEPS}, 5 runs of small: " in line.compared
        other = examine(tmp_path / f"{expected}_lr", model=model, optim=OptimConfig(lr=2e-3))
        assert "small" not in other["curve"].compared
        saves = CheckpointConfig(every=77)  # changes no loss
        free = examine(tmp_path / f"{expected}_free", model=model, checkpoint=saves)
        assert "5 runs of small" in free["curve"].compared
