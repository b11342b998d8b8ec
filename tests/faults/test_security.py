"""Attacks: nothing in a checkpoint or a config is executed, whoever wrote it.

An attacker who can write the manifest may change the trained model, but cannot run code.
"""

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import accel_gpt
from accel_gpt import cli
from accel_gpt.commands.resolve import load_config
from accel_gpt.errors import CheckpointError, UserError
from accel_gpt.runs.checkpoint import (
    find_checkpoint,
    read_shape,
    verify_checkpoint,
)
from tests.conftest import launch, run_here
from tests.faults.attack import fit, pickled, plant, zipped

Arguments = Callable[..., list[str]]
SHORT = ["--train.max_steps", "2", "--eval.every", "0", "--sample.every", "0"]
SHORT += ["--schedule.warmup_steps", "0", "--log.trackers", "[]"]
OURS = ("optimizer.bin", "random_states_0.pkl", "model.safetensors")
TEXTS = ("trainer_state.json", "model.json", "tokenizer.json", "manifest.json")
# files that Accelerate, DCP or torch would read, and that our checkpoints never hold
FOREIGN = (
    *("scheduler.bin", "sampler.bin", "dl_state_dict.bin", "custom_checkpoint_0.pkl"),
    *("pytorch_model.bin", "pytorch_model_fsdp_0/.metadata", "optimizer_0/.metadata"),
    *("pytorch_model_fsdp_0/__0_0.distcp", "pytorch_model_fsdp_rank0.bin", "__0_0.distcp"),
)
# files of other processes or FSDP: this run does not open them
UNREAD = ("random_states_1.pkl", "scaler.pt")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the run that the first test makes."""
    return tmp_path_factory.mktemp("trained") / "run"


@pytest.fixture
def checkpoint(trained: Path, small_run: Arguments, tmp_path: Path) -> Path:
    """The one checkpoint of a run of 2 steps."""
    if not trained.exists():
        assert launch(small_run(*SHORT)) == 0
        (tmp_path / "run").rename(trained)
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run" / "checkpoints" / "step_00000002"


def attack(
    command: Callable[[], int], name: str, capsys: pytest.CaptureFixture[str], refused: bool
) -> None:
    """Run `command`; assert that it succeeds, or names the file or its checkpoint."""
    capsys.readouterr()
    code = command()  # any exception other than `UserError` fails the test
    told = capsys.readouterr().err
    assert code == 4 if refused else code in (0, 3, 4), (name, code, told)
    named = name in told or "step_00000002 does not fit this run" in told
    assert code == 0 or named, (name, told)
    assert "Traceback" not in told


@pytest.mark.parametrize(
    "fitting",
    [pytest.param(False, marks=pytest.mark.slow), True],
    ids=["manifest_left", "manifest_fits"],
)
def test_planted_pickles_are_never_executed_by_a_resume(
    checkpoint: Path,
    fitting: bool,
    small_run: Arguments,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    canary, files = tmp_path / "executed", {p: p.read_bytes() for p in checkpoint.iterdir()}
    planted = [(name, pickled) for name in (*OURS, *TEXTS, *FOREIGN, *UNREAD)]
    for name, content in [*planted, *((name, zipped) for name in OURS)]:
        plant(checkpoint, name, content(canary), fitting)
        unread = name in UNREAD
        if fitting:
            unread |= name in ("model.json", "tokenizer.json")
        else:
            unread |= name in FOREIGN  # no file of ours: nothing reads it

        def resume() -> int:
            return launch(small_run(*SHORT))

        attack(resume, name, capsys, refused=not unread)
        assert not canary.exists(), name
        (checkpoint / name).unlink()
        for path, before in files.items():
            path.write_bytes(before)
    assert not canary.exists()
    pickle.loads(pickled(canary))
    assert canary.exists(), "the payload would have worked"
    canary.unlink()
    torch.load(checkpoint_of(zipped(canary), tmp_path), weights_only=False)
    assert canary.exists()


def checkpoint_of(content: bytes, folder: Path) -> Path:
    (folder / "x.bin").write_bytes(content)
    return folder / "x.bin"


def test_no_file_names_code_that_is_executed(
    checkpoint: Path, small_run: Arguments, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run from someone else, whose files name its code.py: commands that open the run."""
    run, canary = tmp_path / "run", tmp_path / "executed"
    code = run / "code.py"
    code.write_text(
        f"open({str(canary)!r}, 'w').close()\ndef lr(step, config, plan):\n    return 1.0\n"
    )
    content = json.loads((checkpoint / "trainer_state.json").read_text())
    content["config"]["code"] = str(code)
    plant(checkpoint, "trainer_state.json", json.dumps(content).encode(), fitting=True)
    with (run / "config.yaml").open("a") as file:
        file.write(f"code: {code}\n")
    longer = ["--train.max_steps", "3", "--checkpoint.allow_change", "train.max_steps"]
    start = ["--model.init_from", str(run), "--out_dir", str(tmp_path / "new")]
    for words, expected in (
        (["train", str(run / "config.yaml")], 2),
        (["evaluate", str(run)], 2),
        (["sample", str(run), "--max_new_tokens", "2"], 0),
        (["inspect", str(run)], 0),
        (["doctor", str(run)], 2),
        (["report", str(run)], 0),  # without the part of the doctor
        (["train", *small_run(*SHORT, *start)], 0),
        (["train", *small_run(*SHORT, *longer)], 0),
    ):
        assert run_here(cli.dispatch, words) == expected, words
        refused = "config.yaml would execute a file" in capsys.readouterr().err
        assert refused == (expected == 2 or words[0] == "report"), words
        assert not canary.exists(), words
    accel_gpt.load(run)
    assert not canary.exists()
    run_here(cli.dispatch, ["sample", str(run), "--code", str(code), "--max_new_tokens", "2"])
    assert canary.exists(), "the payload would have worked"


# --------------------------------------------------------------------------- manifests


@pytest.mark.parametrize(
    "name",
    ["../../x", "/etc/passwd", ".hidden"],
)
def test_names_of_a_manifest_stay_in_its_folder(checkpoint: Path, name: str) -> None:
    fit(checkpoint, name, b"x")
    with pytest.raises(CheckpointError, match="but it is not a file name"):
        verify_checkpoint(checkpoint)
    assert run_here(cli.dispatch, ["inspect", str(checkpoint)]) == 4


# --------------------------------------------------------------------------- texts


@pytest.mark.parametrize(
    "change",
    [{"n_layer": 10**9}, {"norm": "__import__('os')"}],
)
def test_a_damaged_shape_is_one_sentence_and_takes_no_memory(
    checkpoint: Path, change: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    content = json.loads((checkpoint / "model.json").read_text())
    content["config"] |= change
    plant(checkpoint, "model.json", json.dumps(content).encode(), fitting=True)
    assert run_here(cli.dispatch, ["sample", str(checkpoint)]) == 4
    assert "model.json" in capsys.readouterr().err
    content["vocab_size"] = float("inf")
    (checkpoint / "model.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"model\.json"):
        read_shape(checkpoint)


@pytest.mark.parametrize("content", [b"../../etc", b"\xff\xfe"])
def test_a_damaged_best_leads_nowhere(
    checkpoint: Path, content: bytes, small_run: Arguments, capsys: pytest.CaptureFixture[str]
) -> None:
    run = checkpoint.parents[1]
    (run / "best").write_bytes(content)
    with pytest.raises(UserError, match="has no checkpoint"):
        find_checkpoint(run, "best")
    assert launch(small_run(*SHORT)) == 0  # and writes a new name
    assert (run / "best").read_text() == "2\n"


# --------------------------------------------------------------------------- configs


@pytest.mark.parametrize(
    "content",
    ["out_dir: !!python/object/apply:os.system ['touch executed']", "seed: ["],
    ids=["python", "cut"],
)
def test_a_hostile_config_is_one_sentence(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "evil.yaml"
    path.write_text(content)
    assert launch([str(path)]) == 2
    told = capsys.readouterr().err
    assert "evil.yaml is not valid YAML" in told
    assert len(told) < 500
    assert not Path("executed").exists()


def test_a_config_that_is_a_pickle_or_asks_for_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    canary, path = tmp_path / "executed", tmp_path / "evil.yaml"
    for content in (pickled(canary), zipped(canary)):
        path.write_bytes(content)
        assert launch([str(path)]) == 2
        assert "evil.yaml" in capsys.readouterr().err
    assert not canary.exists()
    monkeypatch.setenv("HF_TOKEN", "hf_CANARY")
    path.write_text("out_dir: ${oc.env:HF_TOKEN}/$HF_TOKEN\ndata: {train: '${HF_TOKEN}'}\n")
    config = load_config([str(path), "--train.max_steps", "3000"], "test")
    assert (config.out_dir, config.data.train) == ("${oc.env:HF_TOKEN}/$HF_TOKEN", "${HF_TOKEN}")
