"""`accel-gpt evaluate`: print the metrics of a model, and change no file."""

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from accelerate.state import AcceleratorState

from accel_gpt.cli import dispatch
from accel_gpt.config.data import PrepareConfig
from accel_gpt.prepare.prepare import prepare
from accel_gpt.runs.folder import locked
from tests.conftest import launch, run_here
from tests.evals.test_hellaswag import write
from tests.test_launch import ACCELERATE, PLAIN
from tests.test_train import records

Arguments = Callable[..., list[str]]
FOUR = ("--train.max_steps", "4", "--sample.every", "0")


def call(*words: object) -> int:
    return run_here(dispatch, ["evaluate", *map(str, words)])


@pytest.fixture
def evaluate(capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Return what `accel-gpt evaluate ... --json` prints."""

    def run(*words: object) -> Any:
        capsys.readouterr()
        assert call(*words, "--json") == 0
        return json.loads(capsys.readouterr().out)

    return run


@pytest.fixture
def trained(train_once: Callable[..., Path], tmp_path: Path) -> Path:
    """A run of four steps with checkpoints of the second and the last, evaluated at its end."""
    batch = ("--train.micro_batch_size", "4", "--checkpoint.every", "2")
    return Path(shutil.copytree(train_once(*FOUR, *batch) / "run", tmp_path / "run"))


def short(path: Path) -> Path:
    """Questions that fit a window of 32 bytes."""
    made = [{"ctx": f"the king of {i}", "endings": ["a sea", "war"], "label": 0} for i in range(5)]
    return write(path, made)


def contents(folder: Path) -> dict[Path, bytes]:
    """Every file of a folder with its bytes."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_command_prints_the_metrics_of_the_run_and_changes_no_file(
    trained: Path, tmp_path: Path, evaluate: Callable[..., Any]
) -> None:
    before = contents(trained)
    last = records(trained)[-1]
    with locked(trained):  # as during training
        found = evaluate(trained)
    assert found["metrics"] == {k: v for k, v in last.items() if k.startswith("eval/")}
    assert found["step"] == 4

    questions = short(tmp_path / "h.jsonl")
    few = evaluate(trained, "--checkpoint", "2", "--hellaswag", questions, "--limit", "2")
    assert few["step"] == 2
    assert few["metrics"]["eval/hellaswag_acc"] in (0, 0.5, 1)
    after = contents(trained)
    after.pop(trained / ".lock", None)
    before.pop(trained / ".lock", None)
    assert after == before


def test_a_run_is_measured_in_the_precision_of_its_launch(
    small_run: Arguments,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    evaluate: Callable[..., Any],
) -> None:
    """`accelerate launch --mixed_precision` sets it; the config does not."""
    run = tmp_path / "run"
    with monkeypatch.context() as launcher:
        launcher.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
        assert launch(small_run(*FOUR)) == 0
    before = records(run)
    AcceleratorState._reset_state(reset_partial_state=True)
    found = evaluate(run)
    assert found["precision"] == "bf16"
    assert found["metrics"]["eval/val_loss"] == before[-1]["eval/val_loss"]
    AcceleratorState._reset_state(reset_partial_state=True)
    text = (run / "run.json").read_text()
    (run / "run.json").write_text(text.replace('"bf16"', '"fp16"'))  # launched on a GPU
    assert evaluate(run)["precision"] == "float32"


def test_other_data_is_named(
    trained: Path,
    tmp_path: Path,
    corpus: Path,
    evaluate: Callable[..., Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copytree(corpus, tmp_path / "copy")
    own, names = records(trained)[-1], ("val_loss", "val_loss_se", "val_bits_per_byte")
    found = evaluate(trained, "--data", tmp_path / "copy")["metrics"]
    assert found == {f"eval/{name}/copy": own[f"eval/{name}"] for name in names}
    recipe = {"source": str(tmp_path / "text.txt"), "tokenizer": "chars"}
    prepare(PrepareConfig(**recipe), tmp_path / "chars")
    assert call(trained, "--data", tmp_path / "chars") == 3
    assert "the data has a different tokenizer (chars" in capsys.readouterr().err


# --------------------------------------------------------------------------- slow


@pytest.mark.slow
def test_real_processes_give_the_same_bits(
    trained: Path, tmp_path: Path, evaluate: Callable[..., Any]
) -> None:
    words = [str(trained), "--tokens", "null", "--hellaswag", str(short(tmp_path / "h.jsonl"))]
    launcher = [*ACCELERATE, "--multi_gpu", "--num_processes", "2"]
    launcher += ["--main_process_port", "0", "-m", "accel_gpt", "evaluate"]
    done = subprocess.run(
        [*launcher, *words, "--json"],
        cwd=tmp_path, env=PLAIN, capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == evaluate(*words)  # rank 0 prints
