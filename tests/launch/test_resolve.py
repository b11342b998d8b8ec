"""A config is resolved once: what the first launch did, each later one does."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator

from accel_gpt import train
from accel_gpt.commands.resolve import load_config
from accel_gpt.config.experiment import Config
from accel_gpt.config.values import to_flat
from accel_gpt.launch.resolve import Done, read_done, with_micro_batch_size
from accel_gpt.runs.folder import RunFolder
from tests.conftest import QUIET, launch

Arguments = Callable[..., list[str]]
AUTO = ("--train.micro_batch_size", "auto", "--train.mixed_precision", "auto")


def test_what_a_run_did_is_in_its_config_and_in_each_of_its_checkpoints(
    small_run: Arguments, tmp_path: Path
) -> None:
    """The newest checkpoint that can be read counts, and `checkpoint.resume` without any."""
    assert launch(small_run(*AUTO, *QUIET)) == 0
    run = tmp_path / "run"
    older, newest = [*RunFolder(run).checkpoints.values()][-2:]

    def done(out_dir: Path = run, resume: str | Path = "auto") -> tuple[str, object, str | None]:
        found = read_done(str(out_dir), str(resume))
        return found.file, found.config.get("train.micro_batch_size"), found.precision

    _, size, precision = done()
    assert isinstance(size, int)
    assert precision in ("no", "bf16")
    assert done() == (str(run / "config.yaml"), size, precision)
    assert done(tmp_path / "new", newest) == (str(newest), size, precision)
    assert read_done(str(tmp_path / "new"), "auto") == Done()
    (run / "config.yaml").unlink()
    assert done() == (str(newest), size, precision)
    (newest / "trainer_state.json").write_text("{")
    assert done() == (str(older), size, precision)
    shutil.rmtree(run / "checkpoints")
    assert not read_done(str(run), "auto").file


def test_a_later_launch_keeps_the_micro_batch_of_the_run(small_run: Arguments) -> None:
    """A new run would take eight sequences on this device."""
    config = load_config(small_run(*AUTO), "test")
    done = Done("a/config.yaml", {"train.micro_batch_size": 2})
    told: list[str] = []
    kept = with_micro_batch_size(config, Accelerator(cpu=True), done, told.append)
    assert kept.train.micro_batch_size == 2
    assert told == ["auto     2 sequences per process and micro-step: as in a/config.yaml"]


def test_a_run_trains_with_the_config_that_was_resolved_before_it(
    small_run: Arguments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And its folder has both what was asked for and what is done."""
    seen: list[Config] = []
    started = train.train
    update = train.update

    def watched(context: Any, *args: Any, **options: Any) -> bool:
        seen.append(context.config)
        return started(context, *args, **options)

    def step(run: Any) -> None:
        seen.append(run.config)
        update(run)

    monkeypatch.setattr("accel_gpt.commands.train.train", watched)
    monkeypatch.setattr(train, "update", step)
    assert launch(small_run(*AUTO, *QUIET, "--train.max_steps", "3")) == 0
    assert len(seen) == 4
    assert all(config is seen[0] for config in seen)
    assert to_flat(seen[0]) == RunFolder(tmp_path / "run").config
    (launched,) = json.loads((tmp_path / "run" / "run.json").read_text())["launches"]
    keys = ("train.micro_batch_size", "train.mixed_precision")
    assert launched["asked"] == dict.fromkeys(keys, "auto")
