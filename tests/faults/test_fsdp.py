"""Real FSDP2 on two gloo processes: stopped and resumed, poisoned, and taken up by one process."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from accel_gpt import train
from tests.conftest import run_here
from tests.test_train import assert_same_weights, records, weights

Arguments = Callable[..., list[str]]
SHARDED = """
import os, sys
os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.utils import DistributedType
def backend(self, cpu=False, sagemaker_dp=False, backend=None):
    return "gloo", DistributedType.MULTI_GPU
PartialState._prepare_backend = backend  # Accelerate offers FSDP on GPUs alone
import accel_gpt.training.accelerator
accel_gpt.training.accelerator.Accelerator = lambda cpu, **given: Accelerator(**given)
accel_gpt.training.accelerator.PartialState = lambda cpu=None, **given: PartialState(**given)
from accel_gpt import train
sys.exit(train.main(sys.argv[1:]))
"""
ALIKE = ["--train.max_steps", "6", "--sample.every", "0", "--train.micro_batch_size", "2"]
ALIKE += ["--eval.every", "3", "--checkpoint.every", "1", "--checkpoint.keep_last", "9"]
# a signal to one process while step STOP_AT is under way; a loss that is no number on the other
FAULTY = """
import os, signal
from accel_gpt import train
stop, poison = (int(os.environ.get(name, 0)) for name in ("STOP_AT", "POISON_AT"))
update, micro_batches = train.update, train.micro_batches
step = 0
def faulty(run):
    global step
    step = run.state.step + 1
    if step == stop and run.accelerator.is_main_process:
        os.kill(os.getpid(), signal.SIGTERM)
    return update(run)
def batches(*arguments):
    bad = step == poison and os.environ["RANK"] == "1"
    for *rest, weight in micro_batches(*arguments):
        yield *rest, weight * float("nan") if bad else weight
train.update, train.micro_batches = faulty, batches
"""


def launch(world: int, folder: Path, arguments: list[str], code: int = 0, **given: int) -> None:
    """Train under FSDP2 in `world` processes, all of which end with `code`."""
    script = folder / "sharded.py"
    script.write_text(SHARDED.replace("sys.exit(", f"{FAULTY}\nsys.exit("))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {
        **{"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, **given},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
        **{"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": 2, "FSDP_RESHARD_AFTER_FORWARD": "true"},
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "FSDP_TRANSFORMER_CLS_TO_WRAP": "Block",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), *arguments],
            env={**os.environ, **{k: str(v) for k, v in (shared | ranks).items()}},
            cwd=folder,
            stderr=subprocess.PIPE,
            text=True,
        )
        for ranks in ({"RANK": rank, "LOCAL_RANK": rank} for rank in range(world))
    ]
    told = [process.communicate(timeout=300)[1] for process in processes]
    assert [process.returncode for process in processes] == [code] * world, "\n".join(told)


def moments(run: Path, step: int) -> dict[str, Tensor]:
    """The optimizer's state of a sharded run: its parts, by file and name."""
    files = (run / "checkpoints" / f"step_{step:08d}").glob("optimizer_*.safetensors")
    return {f"{file.name}/{name}": part for file in files for name, part in load_file(file).items()}


@pytest.mark.slow
def test_a_sharded_run_stops_skips_and_resumes_as_if_it_never_stopped(
    small_run: Arguments, tmp_path: Path
) -> None:
    whole, parted = (tmp_path / name for name in ("whole", "parted"))
    launch(2, tmp_path, small_run(*ALIKE, "--out_dir", str(whole)), POISON_AT=2)
    own = small_run(*ALIKE, "--out_dir", str(parted))
    launch(2, tmp_path, own, 75, POISON_AT=2, STOP_AT=4)
    assert not (parted / "checkpoints" / "step_00000005").exists()
    for path in parted.rglob("*"):
        assert not path.name.endswith((".metadata", ".distcp")), path
    launch(2, tmp_path, own)
    assert records(whole) == records(parted)
    assert_same_weights(weights(whole, 6), weights(parted, 6))
    first, second = moments(whole, 6), moments(parted, 6)
    assert_same_weights(first, second)
    # the poisoned update was left out on both processes, moments and count included
    assert_same_weights(weights(whole, 1), weights(whole, 2))
    assert not torch.equal(weights(whole, 2)["wte.weight"], weights(whole, 3)["wte.weight"])
    assert_same_weights(moments(whole, 1), moments(whole, 2))
    assert [record["train/skipped"] for record in records(whole)] == [0, 1, 1, 1, 1, 1]


@pytest.mark.slow
@pytest.mark.long
def test_a_sharded_checkpoint_is_taken_up_by_one_process_with_and_without_fsdp(
    small_run: Arguments, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alike = [*ALIKE, "--model.dropout", "0"]
    launch(2, tmp_path, small_run(*alike, "--out_dir", "two"))
    stopped = small_run(*alike, "--out_dir", "sharded")
    launch(2, tmp_path, stopped, 75, STOP_AT=3)
    checkpoint = tmp_path / "sharded" / "checkpoints" / "step_00000003"
    start = ["--checkpoint.resume", str(checkpoint), "--out_dir"]
    launch(1, tmp_path, small_run(*alike, *start, "fsdp"))
    assert run_here(train.main, small_run(*alike, *start, str(tmp_path / "plain"))) == 0
    assert "was trained by 2 processes, this is 1" in capsys.readouterr().err
    expected = weights(tmp_path / "two", 6)
    for name in ("fsdp", "plain"):
        found = weights(tmp_path / name, 6)
        assert found.keys() == expected.keys()
        for key, tensor in found.items():
            torch.testing.assert_close(tensor, expected[key], atol=1e-5, rtol=1e-4)
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    assert "model.safetensors" in manifest["files"]
    assert load_file(checkpoint / "model.safetensors").keys() == expected.keys()


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_checkpoint_without_fsdp_is_taken_up_with_it(
    optimizer: str, small_run: Arguments, tmp_path: Path
) -> None:
    alike = [*ALIKE, "--model.dropout", "0", "--optim.name", optimizer]
    assert run_here(train.main, small_run(*alike, "--out_dir", str(tmp_path / "one"))) == 0
    checkpoint = tmp_path / "one" / "checkpoints" / "step_00000003"
    start = ["--checkpoint.resume", str(checkpoint), "--out_dir"]
    launch(2, tmp_path, small_run(*alike, *start, "fsdp"))
    expected, found = (weights(tmp_path / name, 6) for name in ("one", "fsdp"))
    assert found.keys() == expected.keys()
    for key, tensor in found.items():
        torch.testing.assert_close(tensor, expected[key], atol=1e-5, rtol=1e-4)
