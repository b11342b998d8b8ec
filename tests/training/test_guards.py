"""The lock of a run's folder, ranks that differ, the error after a peer is gone."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

from accel_gpt.config.data import DataConfig
from accel_gpt.config.experiment import Config
from accel_gpt.config.values import to_flat
from accel_gpt.errors import BusyError, PeerError, UserError
from accel_gpt.launch import machine
from accel_gpt.launch.ranks import explain_lost_rank
from accel_gpt.runs.folder import locked
from tests.conftest import QUIET
from tests.helpers.ports import free_port
from tests.test_launch import PLAIN


def test_a_folder_has_one_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with locked(run):
        with pytest.raises(BusyError, match=f"is in use by process {os.getpid()} on "), locked(run):
            pass
        assert BusyError.exit_code == 6
    with locked(run):
        pass  # the lock is free again
    (tmp_path / "file").touch()
    message = r"out_dir .*file/run cannot be written: Not a directory"
    with pytest.raises(UserError, match=message), locked(tmp_path / "file" / "run"):
        pass


def test_lost_ranks_are_told_and_other_errors_are_left_alone() -> None:
    with (
        pytest.raises(PeerError, match=r"has ended or does not answer .*closed by peer"),
        explain_lost_rank(2),
    ):
        raise RuntimeError("[gloo/pair.cc:5] Connection closed by peer [127.0.0.1]")
    with pytest.raises(PeerError), explain_lost_rank(2):
        raise dist.DistNetworkError("the store is gone")
    with pytest.raises(RuntimeError, match="shapes"), explain_lost_rank(2):
        raise RuntimeError("shapes do not match")
    with pytest.raises(RuntimeError, match="gloo"), explain_lost_rank(1):
        raise RuntimeError("gloo")
    assert PeerError.exit_code == 70


# --------------------------------------------------------------------------- ranks that differ


def test_ranks_compare_config_code_and_versions(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """They do not compare where each machine has its data."""
    config = Config()
    own = machine.rank_identity(to_flat(config))
    elsewhere = DataConfig(train="/scratch/a", tokenizer="/scratch/b")
    assert machine.rank_identity(to_flat(replace(config, data=elsewhere))) == own
    assert machine.rank_identity(to_flat(replace(config, seed=2)))["seed"] == 2
    with monkeypatch.context() as patch:
        patch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")  # of one machine's accelerate config
        assert machine.rank_identity(to_flat(config))["mixed_precision"] == "bf16"
    package = Path(machine.__file__).parents[1]
    copy = tmp_path / "accel_gpt"
    shutil.copytree(package, copy, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(machine, "__file__", str(copy / "run" / "machine.py"))
    assert machine.rank_identity(to_flat(config)) == own
    with (copy / "model" / "loss.py").open("a") as file:
        file.write("\n")
    versions = dict(machine.package_versions()) | {"torch": "2.0", "accelerate": "1.0"}
    monkeypatch.setattr(machine, "package_versions", lambda: versions)
    monkeypatch.setattr(machine.platform, "python_version_tuple", lambda: ("3", "9", "1"))
    changed = machine.rank_identity(to_flat(config))
    names = {"the code of accel_gpt (SHA-256)", "Python", "torch", "accelerate"}
    assert {key for key in own if own[key] != changed[key]} == names


SECOND = """
import os, sys
from accel_gpt import train
from accel_gpt.commands import train as command
from accel_gpt.console import run_main
from accel_gpt.launch import machine
plain_update = train.update
def update(run):
    plain_update(run)
    if run.state.step == 6:
        run.gpt.wte.weight.data[0] += 1
if os.environ["RANK"] == "1":
    exec(os.environ["CHANGE"])
sys.exit(run_main(command.main, sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        ("sys.argv += ['--optim.lr', '0.02']", 2, "optim.lr is 0.01 on rank 0 and 0.02 on rank 1"),
        ("sys.argv += ['--data.train', 'other']", 3, "the fingerprint of the training data is"),
        ("train.update = update", 5, "after step 8 the weights of rank 1 differ from rank 0"),
    ],
    ids=["config", "data", "weights"],
)
def test_two_gloo_processes_that_differ_do_not_train_apart(
    change: str,
    code: int,
    message: str,
    corpus: Path,
    small_run: Callable[..., list[str]],
    tmp_path: Path,
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for split in ("train", "val"):
        np.save(other / f"{split}_000000.npy", np.full(2000, 65, dtype=np.uint16))
    codes, told = train_pair(change, small_run("--data.tokenizer", "bytes"), tmp_path)
    assert codes == [code, code], told
    assert message in told[0]
    assert "Traceback" not in told[0] + told[1]
    saved = [path.name for path in (tmp_path / "run").glob("checkpoints/step_*")]
    assert saved == (["step_00000004"] if code == 5 else [])


def train_pair(change: str, run: list[str], folder: Path) -> tuple[list[int], list[str]]:
    """Train with two gloo processes, the second changed by `change`; return codes and stderr."""
    options = ["--train.mixed_precision", "no", "--train.micro_batch_size", "4"]
    script = [sys.executable, "-c", SECOND, *run, *QUIET, *options]
    group = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    group |= {"MASTER_PORT": str(free_port()), "CHANGE": change}
    started = [
        subprocess.Popen(
            script, cwd=folder, env={**PLAIN, **group, "RANK": rank, "LOCAL_RANK": rank},
            stderr=subprocess.PIPE, text=True,
        )
        for rank in ("0", "1")
    ]  # fmt: skip
    told = [process.communicate(timeout=120)[1] for process in started]
    return [process.returncode for process in started], told
