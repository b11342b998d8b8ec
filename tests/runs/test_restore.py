"""A resume restores everything, or names what is missing; allowed and rejected changes."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_gpt.commands.resolve import load_config
from accel_gpt.config.experiment import Config
from accel_gpt.config.options import all_options
from accel_gpt.config.plan import LENGTH_KEYS, make_plan
from accel_gpt.config.values import build, leaves, to_flat, to_yaml
from accel_gpt.errors import CheckpointError, NewerFormatError, UserError
from accel_gpt.optim.schedule import lr_fraction
from accel_gpt.runs.changes import check_same_config, check_same_run, length_keys
from accel_gpt.runs.folder import checkpoint_steps
from accel_gpt.runs.resume import best_step_is_valid, describe_load_error
from accel_gpt.runs.state import TrainState
from tests.conftest import QUIET, launch, reseal
from tests.test_train import records

Arguments = Callable[..., list[str]]
Trained = Callable[..., Path]
LONGER = ("--train.max_steps", "16", "--checkpoint.allow_change", "train.max_steps")


@pytest.fixture
def newest(trained: Trained) -> Path:
    """The only checkpoint of a finished run."""
    run = trained(*QUIET, "--checkpoint.keep_last", "1")
    return run / "checkpoints" / "step_00000012"


def edit(path: Path, change: Callable[[Any], None]) -> None:
    """Change the content of a torch file of a checkpoint, and reseal the checkpoint."""
    content = torch.load(path, weights_only=False)
    change(content)
    torch.save(content, path)
    reseal(path.parent)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s["state"].pop(3), "has nothing of blocks.0"),
        (
            lambda s: s["state"][2].update(momentum_buffer=torch.zeros(96, 32)),
            "momentum_buffer, step of blocks.0.attn.qkv.weight; expected exp_avg, exp_avg_sq, step",
        ),
        (
            lambda s: s["state"][2].update(exp_avg=torch.zeros(3, 3)),
            "with shape (3, 3); expected (96, 32)",
        ),
        (lambda s: s["param_groups"].pop(), "does not fit this run: loaded state dict has a diff"),
    ],
)
def test_an_optimizer_with_gaps_is_refused(
    newest: Path,
    small_run: Arguments,
    capsys: pytest.CaptureFixture[str],
    change: Callable[[Any], None],
    message: str,
) -> None:
    edit(newest / "optimizer.bin", change)
    assert launch(small_run(*QUIET, *LONGER)) == 4
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("content", [None, b"not torch's", {"step": 0}])
def test_random_states_that_are_missing_or_unreadable_are_refused(
    newest: Path, small_run: Arguments, capsys: pytest.CaptureFixture[str], content: Any
) -> None:
    """`load_state` ignores all of these."""
    file = newest / "random_states_0.pkl"
    file.unlink()
    if isinstance(content, dict):
        torch.save(content, file)
    elif content is not None:
        file.write_bytes(content)
    reseal(newest)
    assert launch(small_run(*QUIET, *LONGER)) == 4
    said = capsys.readouterr().err
    assert "random_states_0.pkl" in said
    assert "Traceback" not in said


def test_another_number_of_processes_is_stated(
    newest: Path, small_run: Arguments, capsys: pytest.CaptureFixture[str]
) -> None:
    state = json.loads((newest / "trainer_state.json").read_text())
    (newest / "trainer_state.json").write_text(json.dumps(state | {"world_size": 2}))
    (newest / "random_states_0.pkl").unlink()
    reseal(newest)
    assert launch(small_run(*QUIET, *LONGER)) == 0
    said = capsys.readouterr().err
    assert "was trained by 2 processes; this run has 1" in said


def test_another_tokenizer_is_refused() -> None:
    """Keys and data are equal; the tokenizer's file differs."""
    before, now = (TrainState(tokenizer_fingerprint=mark * 64) for mark in "ab")
    with pytest.raises(CheckpointError, match="tokenizer was aaaaaaaaaaaa, is bbbbbbbbbbbb"):
        check_same_run(Path("step"), before, now, ("tokenizer",))


# --------------------------------------------------------------------------- what may change


def test_every_key_is_of_one_class() -> None:
    """The class of each key stands in docs/reference/keys.md."""
    now, path = TrainState(config=to_flat(Config())), Path("step")
    options = all_options(Config)
    for key in leaves(Config).keys() - {"stages"}:  # of both: tests/training/test_stages.py
        before = TrainState(config={**now.config, key: "other"})
        # of the file of --code, the hash is compared, not the path
        if options[key].resume in ("free", "start") or options[key].command_line_only:
            check_same_run(path, before, now, ())
        elif options[key].resume == "refuse" or options[key].null_is_another_run:
            with pytest.raises(CheckpointError, match=f"{key} was other, is "):
                check_same_run(path, before, now, (key,))
        else:
            told = f"{key} was other, is .*allow_change {key}"
            with pytest.raises(UserError, match=told) as caught:
                check_same_run(path, before, now, ())
            assert caught.value.exit_code == 2
            check_same_run(path, before, now, (key,))


def test_a_rate_of_its_own_may_change_but_not_come_or_go() -> None:
    """Without a learning rate of their own, embeddings are not a group of the optimizer."""
    now = TrainState(config=to_flat(Config()) | {"optim.embedding_lr": 0.1})
    before = TrainState(config={**now.config, "optim.embedding_lr": 0.2})
    check_same_run(Path("step"), before, now, ("optim.embedding_lr",))
    with pytest.raises(UserError, match=r"allow_change optim.embedding_lr"):
        check_same_run(Path("step"), before, now, ())
    none = TrainState(config={**now.config, "optim.embedding_lr": None})
    with pytest.raises(CheckpointError, match=r"optim.embedding_lr was null, is 0.1"):
        check_same_run(Path("step"), none, now, ("optim.embedding_lr",))


@pytest.mark.parametrize("value", [0.5, None])
def test_an_option_of_another_version_is_never_dropped(
    small_run: Arguments, tmp_path: Path, value: float | None
) -> None:
    now = TrainState(config=to_flat(Config()))
    before = TrainState(config={**now.config, "train.z_loss": value})
    with pytest.raises(NewerFormatError, match=r"trainer_state\.json: config\.train\.z_loss is an"):
        check_same_run(Path("step"), before, now, ())
    config = load_config(small_run(), "test")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(to_yaml(config) + f"later: {{key: {value}}}\n")
    with pytest.raises(NewerFormatError, match=r"run/config\.yaml: later\.key is an unknown key"):
        check_same_config(config, ())


@pytest.mark.parametrize("content", ["seed: [", "a note", ""])
def test_a_config_of_a_run_that_cannot_be_read_is_not_replaced(
    content: str, tmp_path: Path
) -> None:
    (tmp_path / "config.yaml").write_text(content)
    with pytest.raises(UserError, match=r"config\.yaml cannot be read"):
        check_same_config(Config(out_dir=str(tmp_path)), ())


def test_the_best_step_is_forgotten_if_an_evaluation_reads_another_text(tmp_path: Path) -> None:
    path = tmp_path / "checkpoints" / "step_00000004"
    (tmp_path / "best").write_text("2\n")
    saved = TrainState(step=4, best_step=2, config=to_flat(Config(out_dir=str(tmp_path))))
    assert best_step_is_valid(path, saved, saved)
    assert not best_step_is_valid(tmp_path / "other" / "checkpoints" / path.name, saved, saved)
    for changes, valid in (
        ({"train.max_steps": 7}, True),
        ({"eval.tokens": 64}, False),
        ({"data.val": "other"}, False),
        ({"checkpoint.keep_best": True}, True),
    ):
        now = replace(saved, config={**saved.config, **changes})
        assert best_step_is_valid(path, saved, now) == valid, changes
    (tmp_path / "best").unlink()
    assert best_step_is_valid(path, saved, saved) == (not saved.config["checkpoint.keep_best"])


def test_no_advice_to_load_what_executes_code_is_passed_on(tmp_path: Path) -> None:
    torch.save(print, tmp_path / "optimizer.bin")
    with pytest.raises(Exception, match="weights_only") as caught:
        torch.load(tmp_path / "optimizer.bin", weights_only=True)
    assert describe_load_error(caught.value) == (
        "it holds objects other than tensors and plain values"
    )


@pytest.mark.slow
def test_a_longer_run_needs_no_permission_where_no_step_changes(
    small_run: Arguments, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    constant = [*QUIET, "--schedule.name", "constant", "--train.max_steps"]
    whole = tmp_path / "whole"
    assert launch(small_run(*constant, "6", "--out_dir", str(whole))) == 0
    assert launch(small_run(*constant, "4")) == 0
    assert launch(small_run(*constant, "6")) == 0
    assert records(tmp_path / "run")[-1]["eval/val_loss"] == records(whole)[-1]["eval/val_loss"]
    assert launch(small_run(*constant, "5")) == 2
    assert "is at step 6 but the config ends at step 5" in capsys.readouterr().err
    cosine = [*QUIET, "--out_dir", str(tmp_path / "cosine"), "--train.max_steps"]
    assert launch(small_run(*cosine, "4")) == 0
    assert launch(small_run(*cosine, "6")) == 2
    assert "--checkpoint.allow_change train.max_steps\n" in capsys.readouterr().err


@pytest.mark.parametrize(("steps", "allowed"), [(2, ()), (4, LENGTH_KEYS)])
def test_another_length_needs_permission_where_it_cut_the_warm_up(
    steps: int, allowed: tuple[str, ...]
) -> None:
    """No run has lowered its rate yet, so that the warm-up alone decides."""
    config = build(
        Config,
        {
            "train.max_steps": 100,
            "train.micro_batch_size": 8,
            "schedule.name": "wsd",
            "schedule.warmup_steps": 3,
        },
    )
    saved = TrainState(step=steps, config={"train.max_steps": steps})
    assert length_keys(config, saved) == allowed


def test_a_path_to_resume_from_is_used_by_a_run_without_checkpoints_alone(
    trained: Trained, small_run: Arguments, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With checkpoints at 8 and 12, a return to 8 would lose 12, so it needs another folder."""
    run = trained()
    older = run / "checkpoints" / "step_00000008"
    back = ("--checkpoint.resume", str(older), *LONGER)
    assert launch(small_run(*back)) == 2
    assert f"{run} has newer checkpoints, up to step 12" in capsys.readouterr().err
    assert checkpoint_steps(run / "checkpoints") == [8, 12]
    branch = small_run(*back, "--out_dir", str(tmp_path / "branch"))
    assert launch(branch) == 0
    assert f"from step 8 ({older})" in capsys.readouterr().err
    assert launch(branch) == 0  # repeated: it resumes its own checkpoint
    said = capsys.readouterr().err
    assert f"{tmp_path / 'branch'} has checkpoints, so checkpoint.resume {older} is ignored" in said
    assert "from step 16" in said


def test_a_change_that_is_allowed_is_named_and_in_force(
    trained: Trained, small_run: Arguments, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained(*QUIET)
    assert launch(small_run(*QUIET)) == 0  # it is finished
    assert len(records(run)) == 12
    longer = [*QUIET, "--train.max_steps", "14", "--optim.lr", "0.1", "--optim.beta2", "0.9"]
    longer += ["--optim.weight_decay", "0.3"]
    assert launch(small_run(*longer)) == 2
    assert "optim.lr was 0.01, is 0.1, " in capsys.readouterr().err
    allow = "[train.max_steps, optim.lr, optim.beta2, optim.weight_decay]"
    assert launch(small_run(*longer, "--checkpoint.allow_change", allow)) == 0
    shown = capsys.readouterr().err
    assert "from step 12 on optim.beta2 is 0.9; it was 0.95" in shown
    assert "from step 12 on train.max_steps is 14; it was 12" in shown
    plan = make_plan(load_config(small_run(*longer), ""), 1)
    rates = [record["train/lr"] for record in records(run)[12:]]
    expected = [0.1 * lr_fraction(step, "cosine", plan, 0.0) for step in (12, 13)]
    assert rates == pytest.approx(expected)
    file = run / "checkpoints" / "step_00000014" / "optimizer.bin"
    groups = torch.load(file, weights_only=True)["param_groups"]
    assert [group["lr"] for group in groups] == [pytest.approx(rates[-1])] * 2
    assert [(g["weight_decay"], g["betas"][1]) for g in groups] == [(0.3, 0.9), (0.0, 0.9)]
