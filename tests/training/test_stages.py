"""Runs with stages: stopped and resumed anywhere, changed at a resume, evaluated by stage."""

import json
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from accel_gpt.cli import dispatch
from accel_gpt.config.data import PrepareConfig
from accel_gpt.prepare.prepare import prepare
from tests.conftest import launch, run_here, text_of
from tests.faults.harness import (
    FSDP,
    Server,
    assert_same,
    checkpoint_names,
    finish,
    forget_after,
    rewound,
)
from tests.test_train import assert_same_weights, records, signal_after, weights

Arguments = Callable[..., list[str]]
EDGES = (3, 6, 9)
KEPT = ("--checkpoint.every", "1", "--checkpoint.keep_last", "99", "--checkpoint.keep_best")


@pytest.fixture
def staged(small_run: Arguments, corpus: Path, tmp_path: Path) -> Callable[..., list[str]]:
    """Arguments of a run whose data, batch and length change; more options may follow."""
    add_other(tmp_path)

    def arguments(*options: str, stages: str | None = None) -> list[str]:
        found = small_run("--model.preset", "llama", "--data.train", f"{corpus}")
        return [*found, "--stages", stages or three(tmp_path), *options]

    return arguments


def add_other(folder: Path) -> Path:
    """Prepare `other`, a second data folder of bytes."""
    text = folder / "other.txt"
    text.write_text(text_of(3000, seed=1))
    prepare(PrepareConfig(source=str(text), tokenizer="bytes"), folder / "other")
    return folder / "other"


def three(folder: Path, edges: tuple[float, ...] = EDGES) -> str:
    """Return stages with other data, then a larger batch, then longer sequences."""
    mixed = (
        f"[{{path: {folder / 'corpus'}, weight: 0.7}}, {{path: {folder / 'other'}, weight: 0.3}}]"
    )
    return (
        f"[{{from: {edges[0]}, data.train: {mixed}}}, "
        f"{{from: {edges[1]}, train.tokens_per_step: 512}}, "
        f"{{from: {edges[2]}, model.block_size: 64, train.micro_batch_size: 4}}]"
    )


def test_a_run_that_is_stopped_after_each_step_equals_one_that_is_not(
    staged: Arguments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each edge, one step before and one after: the steps of this run are all of them."""
    options = ["--eval.every", "2", "--checkpoint.keep_best"]
    whole = tmp_path / "whole"
    assert launch(staged(*options, "--out_dir", str(whole))) == 0
    for step in range(1, 12):
        with monkeypatch.context() as patch:
            signal_after(patch, step, 15)
            assert launch(staged(*options)) == 75
    assert launch(staged(*options)) == 0
    assert_same(tmp_path / "run", whole)
    assert [one["data/stage"] for one in records(whole)] == [1] * 3 + [2] * 3 + [3] * 3 + [4] * 3


@pytest.fixture
def whole(staged: Arguments, tmp_path: Path) -> Path:
    """The run that never stopped, with a checkpoint of every step."""
    assert launch(staged(*KEPT, "--eval.every", "2", "--out_dir", str(tmp_path / "whole"))) == 0
    return tmp_path / "whole"


def test_a_run_that_is_killed_at_any_step_equals_one_that_is_not(
    staged: Arguments, whole: Path, tmp_path: Path
) -> None:
    """A kill loses steps: the run makes them again, over an edge or two."""
    for step in {2, 5, random.Random().randrange(1, 12)}:
        run = rewound(whole, tmp_path / f"from_{step}", step)
        assert launch(staged(*KEPT, "--eval.every", "2", "--out_dir", str(run))) == 0
        assert_same(run, whole)


# --------------------------------------------------------------------------- several processes


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """Start real processes."""
    with Server(tmp_path / "stderr.txt") as running:
        yield running


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_two_processes_that_are_killed_equal_two_that_are_not(
    engine: str, staged: Arguments, server: Server, tmp_path: Path
) -> None:
    """At each edge, one step before and one after another, and at a random step."""
    environment = [FSDP, FSDP] if engine == "fsdp" else []

    def run(folder: Path) -> None:
        arguments = staged(*KEPT, "--eval.every", "2", "--out_dir", str(folder))
        finish(server, arguments, 2, environment=environment)

    whole = tmp_path / "whole"
    run(whole)
    for step in {*EDGES, 2, 7, random.Random().randrange(1, 12)}:
        copy = rewound(whole, tmp_path / f"from_{step}", step)
        run(copy)
        assert_same(copy, whole)
        shutil.rmtree(copy)


@pytest.mark.slow
def test_another_number_of_processes_goes_on_with_the_same_bits(
    staged: Arguments, server: Server, tmp_path: Path
) -> None:
    """On 1, from one step before an edge on 2, from an edge on 1 again; and the other way round."""
    options = (*KEPT, "--eval.every", "2", "--train.reproducible", "--train.micro_batch_size", "2")
    wholes = []
    for first, second in ((1, 2), (2, 1)):
        whole, run = tmp_path / f"whole_{first}", tmp_path / f"run_{first}"
        finish(server, staged(*options, "--out_dir", str(whole)), first)
        rewound(whole, run, 5)
        finish(server, staged(*options, "--out_dir", str(run)), second)
        assert_same(run, whole, same_world=False)
        forget_after(run, 9)
        finish(server, staged(*options, "--out_dir", str(run)), first)
        assert_same(run, whole, same_world=False)
        wholes.append(whole)
    assert_same(*wholes, same_world=False)


@pytest.mark.slow
def test_verify_resume_proves_a_config_with_stages(
    staged: Arguments, capfd: pytest.CaptureFixture[str]
) -> None:
    """In 8 steps, the edges are at steps 2, 4 and 6."""
    options = ["--steps", "8", "--kills", "1", "--processes", "1,2"]
    options += ["--train.reproducible", "--train.micro_batch_size", "2"]
    assert run_here(dispatch, ["verify-resume", *staged(*options)]) == 0
    shown = capfd.readouterr()
    assert "on 2 processes" in shown.err
    assert "with 1 kill" in shown.out
    assert "equals never stopping, bit for bit" in shown.out


# --------------------------------------------------------------------------- one stage


@pytest.mark.parametrize(
    "stages", ["[{from: 0, train.tokens_per_step: 256}]", "[{from: 5, model.block_size: 32}]"]
)
def test_stages_that_change_nothing_are_as_none(
    stages: str, small_run: Arguments, tmp_path: Path
) -> None:
    """The weights of the last checkpoint are the same file, and the metrics but data/stage."""
    assert launch(small_run("--out_dir", str(tmp_path / "without"))) == 0
    assert launch(small_run("--stages", stages)) == 0
    found = records(tmp_path / "run")
    assert {one.pop("data/stage") for one in found} <= {1, 2}
    assert found == records(tmp_path / "without")
    files = [path / "checkpoints" / "step_00000012" for path in tmp_path.glob("*/")]
    bits = {(path / "model.safetensors").read_bytes() for path in files if path.exists()}
    assert len(bits) == 1


# --------------------------------------------------------------------------- changed stages


def stopped(
    arguments: list[str], step: int, monkeypatch: pytest.MonkeyPatch, *options: str
) -> None:
    """Train and stop after a step."""
    with monkeypatch.context() as patch:
        signal_after(patch, step, 15)
        assert launch([*arguments, *options]) == 75


def read_of(run: Path) -> list[Any]:
    """Return what the newest checkpoint says that a run reads."""
    newest = run / "checkpoints" / checkpoint_names(run)[-1]
    found: list[Any] = json.loads((newest / "trainer_state.json").read_text())["data_read"]
    return found


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("from: 3", "from: 2"),
        ("from: 3", "from: 4"),
        ("from: 6", "from: 4"),
        ("from: 6, train.tokens_per_step: 512", "from: 6, train.tokens_per_step: 768"),
        ("from: 6, ", "from: 6, model.block_size: 16, "),
        ("model.block_size: 64", "model.block_size: 128"),
        ("{from: 6, train.tokens_per_step: 512}, ", ""),
    ],
)
def test_a_stage_that_has_made_steps_may_not_change(
    old: str,
    new: str,
    staged: Arguments,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    stopped(staged(), 8, monkeypatch)
    capsys.readouterr()
    other = three(tmp_path).replace(old, new)
    assert other != three(tmp_path)
    accepted = ("--checkpoint.allow_change", "stages")
    for options in ((), accepted):
        assert launch(staged(*options, stages=other)) == 4
        (line,) = errors(capsys.readouterr().err)
        assert "stages before step 8 was " in line
    assert launch(staged()) == 0


def errors(shown: str) -> list[str]:
    """Return the lines of an error: all but the log."""
    return [line for line in shown.splitlines() if line.startswith("error")]


def test_a_stage_ahead_changes_with_permission_and_leaves_what_was_read(
    staged: Arguments,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """From then on the run equals one that had the other stages from the start."""
    other = three(tmp_path, (3, 7, 8)).replace("train.tokens_per_step: 512", "data.train: ONE")
    other = other.replace("ONE", str(tmp_path / "other")).replace("_size: 64", "_size: 32")
    other = other.replace("micro_batch_size: 4", "tokens_per_step: 512")
    assert launch(staged("--out_dir", str(tmp_path / "always"), stages=other)) == 0
    first = three(tmp_path).replace("model.block_size: 64, ", "")
    stopped(staged(stages=first), 5, monkeypatch)
    before = read_of(tmp_path / "run")
    capsys.readouterr()
    assert launch(staged(stages=other)) == 2
    (line,) = errors(capsys.readouterr().err)
    assert re.search(r"made with another config: stages was from step 6 .*, is from step 7 ", line)
    assert line.endswith("or accept it with --checkpoint.allow_change stages")
    assert launch(staged("--checkpoint.allow_change", "stages", stages=other)) == 0
    assert "from step 5 on stages is from step 7 " in capsys.readouterr().err
    run = tmp_path / "run"
    assert read_of(run)[: len(before)] == before
    assert len(read_of(run)) == 3
    assert records(run) == records(tmp_path / "always")
    assert_same_weights(weights(run), weights(tmp_path / "always"))


def test_changed_data_of_another_stage_are_named(
    staged: Arguments,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of one that has made steps, and of one ahead."""
    back = f"[{{from: 3, data.train: {tmp_path / 'other'}}}, {{from: 6, data.train: HERE}}]"
    back = back.replace("HERE", str(tmp_path / "corpus"))
    mixed = f"[{{path: {tmp_path / 'corpus'}, weight: 3}}, {{path: {tmp_path / 'other'}}}]"
    other = back.replace(f"data.train: {tmp_path / 'other'}", f"data.train: {mixed}")
    for step, code, key in ((2, 2, "stages"), (8, 4, "stages before step 8")):
        stopped(staged(stages=back), step, monkeypatch)
        capsys.readouterr()
        assert launch(staged(stages=other)) == code
        (line,) = errors(capsys.readouterr().err)
        was, _, new = line.partition(f" config: {key} was ")[2].partition(", is ")
        assert was.startswith("other, weight 1 (")
        assert "corpus, weight 3 (" in new
        assert "other, weight 1 (" in new
    # so that all stages have the same data
    never = back.replace(str(tmp_path / "other"), str(tmp_path / "corpus"))
    assert launch(staged("--checkpoint.allow_change", "data.train", stages=never)) == 4
    assert "stages before step 8 was other, weight 1 (" in capsys.readouterr().err


def test_a_longer_run_moves_the_edges_ahead_but_none_that_was_passed(
    staged: Arguments,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Edges at steps 3, 6 and 9 of 12; of 16 steps, they are at 4, 8 and 12."""
    shares = three(tmp_path, (0.25, 0.5, 0.75))
    constant = ("--schedule.name", "constant")
    longer = staged(*constant, "--train.max_steps", "16", stages=shares)
    stopped(staged(*constant, stages=shares), 2, monkeypatch)
    assert launch(longer) == 0
    stages = [one["data/stage"] for one in records(tmp_path / "run")]
    assert stages == [1] * 4 + [2] * 4 + [3] * 4 + [4] * 4
    shutil.rmtree(tmp_path / "run")
    stopped(staged(*constant, stages=shares), 4, monkeypatch)
    capsys.readouterr()
    assert launch(longer) == 4
    (line,) = errors(capsys.readouterr().err)
    assert "stages before step 4 was from step 3 " in line
    steps = three(tmp_path, (3, 0.5, 0.75))  # the same edge as a step
    assert launch(staged(*constant, "--train.max_steps", "16", stages=steps)) == 0
    stages = [one["data/stage"] for one in records(tmp_path / "run")]
    assert stages == [1] * 3 + [2] * 5 + [3] * 4 + [4] * 4


@pytest.mark.parametrize("place", ["in its stage", "in the config"])
@pytest.mark.parametrize("step", [3, 4])
def test_the_data_of_the_present_stage_change_with_permission(
    place: str,
    step: int,
    staged: Arguments,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Also of a stage that had none of its own. The change is allowed once."""
    plain = "[{from: 2, train.micro_batch_size: 4}, {from: 6, model.block_size: 64}]"
    other = staged("--data.train", str(tmp_path / "other"), stages=plain)
    if place == "in its stage":
        data = f"data.train: {tmp_path / 'other'}, train.micro"
        other = staged(stages=plain.replace("train.micro", data))
    stopped(staged(stages=plain), step, monkeypatch)
    capsys.readouterr()
    assert launch(other) == 2
    (line,) = errors(capsys.readouterr().err)
    assert re.search(
        r"config: data\.train was corpus, weight 1 \(\w+\), is other, weight 1 \(", line
    )
    assert line.endswith("or accept it with --checkpoint.allow_change data.train")
    stopped([*other, "--checkpoint.allow_change", "data.train"], step + 1, monkeypatch)
    assert f"from step {step} on data.train is other" in capsys.readouterr().err
    stopped(other, 7, monkeypatch)
    assert launch(other) == 0
    # 8 sequences of 32 tokens a step, in whole sequences of 64
    read = read_of(tmp_path / "run")
    assert [(one["first"], one["sources"][0]["name"]) for one in read] == [
        (0, "corpus"),
        (4 * step, "other"),
    ]


# --------------------------------------------------------------------------- evaluations


def test_each_stage_has_its_own_best_checkpoint_and_evaluates_at_its_length(
    staged: Arguments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The best is that of the highest loss, which is the first one of each stage."""
    lengths: list[int] = []
    note_lengths(monkeypatch, lengths)
    options = ("--eval.best", "max eval/val_loss", *KEPT, "--eval.every", "1")
    best: list[str] = []
    run = tmp_path / "run"
    for step in range(1, 12):
        stopped(staged(*options), step, monkeypatch)
        best += [(run / "best").read_text().strip()] if (run / "best").exists() else [""]
    assert launch(staged(*options)) == 0
    found = records(run)
    losses = [one["eval/val_loss"] for one in found]
    assert losses == sorted(losses, reverse=True)
    # a signal ends the evaluation of its step, which the next launch makes
    assert best == ["", *["1"] * 3, *["4"] * 3, *["7"] * 3, "10"]
    assert (run / "best").read_text() == "10\n"
    assert [one["step"] for one in found] == list(range(1, 13))
    assert lengths == [32] * 9 + [64] * 3
    named = [name for name in found[0] if name.startswith("eval/val_loss/")]
    assert named == ["eval/val_loss/corpus", "eval/val_loss/other"]
    for one in found:
        # the mean is that of the config's own data.train
        assert one["eval/val_loss"] == one["eval/val_loss/corpus"] != one["eval/val_loss/other"]


def note_lengths(monkeypatch: pytest.MonkeyPatch, lengths: list[int]) -> None:
    """Note the length of the sequences of each finished evaluation."""
    from accel_gpt.evals import evaluation

    scored = evaluation.score_splits

    def noted(*arguments: Any, block_size: int, **others: Any) -> Any:
        found = scored(*arguments, block_size=block_size, **others)
        lengths.append(block_size)
        return found

    monkeypatch.setattr(evaluation, "score_splits", noted)


def test_the_window_of_spikes_begins_again_with_a_stage(staged: Arguments, tmp_path: Path) -> None:
    assert launch(staged(*KEPT)) == 0
    counts = []
    for name in checkpoint_names(tmp_path / "run"):
        state = json.loads((tmp_path / "run/checkpoints" / name / "trainer_state.json").read_text())
        counts.append(len(state["losses"]))
    assert counts == [1, 2, 3] * 4


def test_at_an_edge_the_stage_before_is_finished(
    small_run: Arguments,
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    other = add_other(tmp_path)
    stages = ["--stages", f"[{{from: 3, data.train: {other}}}]"]
    stopped(small_run("--data.train", str(corpus), *stages), 3, monkeypatch)
    changed = small_run("--data.train", f"[{{path: {corpus}}}, {{path: {other}}}]", *stages)
    capsys.readouterr()
    assert launch([*changed, "--checkpoint.allow_change", "data.train"]) == 4
    assert "stages before step 3 was corpus" in capsys.readouterr().err


def test_a_longer_run_may_get_a_stage_beyond_its_earlier_end(
    small_run: Arguments, corpus: Path, tmp_path: Path
) -> None:
    """Its rate is constant, so only the stages need permission."""
    options = ["--data.train", str(corpus), "--schedule.name", "constant", "--train.max_steps"]
    assert launch(small_run(*options, "3")) == 0
    beyond = ["--stages", f"[{{from: 4, data.train: {add_other(tmp_path)}}}]"]
    assert launch(small_run(*options, "5", *beyond)) == 2
    allowed = ["--checkpoint.allow_change", "stages"]
    assert launch(small_run(*options, "5", *beyond, *allowed)) == 0
    assert [read["sources"][0]["name"] for read in read_of(tmp_path / "run")] == ["corpus", "other"]
