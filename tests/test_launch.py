"""Real processes: `accelerate launch`, `torchrun`, two gloo processes, signals to the launcher."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from accel_gpt.launcher import available_cores
from tests.conftest import launch, thorough
from tests.helpers.ports import free_port
from tests.test_train import assert_same_weights, records, weights

ROOT = Path(__file__).resolve().parents[1]
TRAIN = str(ROOT / "accel_gpt" / "train.py")
ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch"]
CONFIGURED = [*ACCELERATE, "--config_file", str(ROOT / "accelerate_config.yaml")]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
MARK = "ACCEL_GPT_TEST_MARK"  # in the environment of all processes that a launcher starts
PLAIN = {key: value for key, value in os.environ.items() if not key.startswith("ACCELERATE_")}

Arguments = Callable[..., list[str]]


def finish(command: list[str], cwd: Path, timeout: float = 120) -> str:
    """Run a command; assert that it succeeds, and return its stderr."""
    done = subprocess.run(
        command, cwd=cwd, env=PLAIN, capture_output=True, text=True, timeout=timeout, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.slow
def test_two_nodes_reach_the_losses_of_one_process_and_one_goes_on(
    small_run: Arguments, tmp_path: Path
) -> None:
    """Each node is a launcher of its own, with one process."""
    alike = ["--train.micro_batch_size", "2"]
    one, two = tmp_path / "one", tmp_path / "two"
    assert launch(small_run(*alike, "--out_dir", str(one))) == 0
    pair = [*ACCELERATE, "--config_file", str(ROOT / "configs/accelerate/multinode_ddp.yaml")]
    pair += ["--num_processes", "2", "--mixed_precision", "no"]
    pair += ["--main_process_ip", "127.0.0.1", "--main_process_port", str(free_port())]
    shared = small_run(*alike, "--out_dir", str(two))
    with ThreadPoolExecutor(2) as pool:
        nodes = [[*pair, "--machine_rank", str(rank), TRAIN, *shared] for rank in range(2)]
        shown = "".join(pool.map(lambda node: finish(node, tmp_path), nodes))
    assert "x 2 micro-steps x 2 processes" in shown
    assert shown.count("tokens per step") == 1  # only one process prints
    assert_close_records(one, two)
    assert (two / "checkpoints" / "step_00000008" / "random_states_1.pkl").is_file()
    samples = (two / "samples" / "step_00000012.txt").read_text()
    assert "--- sample 2" in samples  # one sample from each process
    shutil.rmtree(two / "checkpoints" / "step_00000012")
    assert "from step 8" in finish([*CONFIGURED, TRAIN, *shared], tmp_path)
    assert_close_records(one, two)


def assert_close_records(one: Path, two: Path) -> None:
    """Assert metrics that differ by rounding only."""
    for alone, together in zip(records(one), records(two), strict=True):
        assert alone.keys() == together.keys()
        assert list(together.values()) == pytest.approx(list(alone.values()), abs=1e-5)


def marked(mark: str) -> dict[int, dict[str, str]]:
    """Return the live processes with the mark, and their environment.

    torch starts workers in new sessions, so a session id cannot find them.
    """
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            text = (folder / "environ").read_bytes().decode("utf-8", "replace")
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        environment = dict(part.partition("=")[::2] for part in text.split("\0") if part)
        if environment.get(MARK) == mark and state != "Z":
            found[int(folder.name)] = environment
    return found


@pytest.mark.slow
@pytest.mark.skipif(
    not [*Path(torch.__file__).parent.glob("lib/libgomp*")], reason="torch without libgomp"
)
@pytest.mark.parametrize(
    ("variable", "value", "spins"),
    [("", "", "1000"), ("OMP_WAIT_POLICY", "active", "30000000000")],
)
def test_threads_do_not_wait_awake_for_milliseconds(variable: str, value: str, spins: str) -> None:
    environment = {**os.environ, "OMP_DISPLAY_ENV": "verbose"}
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        environment.pop(name, None)
    if variable:
        environment[variable] = value
    command = [sys.executable, TRAIN, "missing.yaml"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert "there is no file missing.yaml" in done.stderr
    assert f"GOMP_SPINCOUNT = '{spins}'" in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is a GPU")
def test_a_config_for_a_gpu_trains_on_a_cpu_with_all_cores(
    small_run: Arguments, tmp_path: Path
) -> None:
    """Though the launcher sets one thread."""
    config = str(ROOT / "configs" / "accelerate" / "one_gpu.yaml")
    short = ("--train.max_steps", "2", "--schedule.warmup_steps", "0")
    options = small_run(*short)
    shown = finish([*ACCELERATE, "--config_file", config, TRAIN, *options], tmp_path)
    assert f"{available_cores()} threads" in shown


@pytest.mark.slow
def test_processes_that_form_no_group_are_refused(small_run: Arguments, tmp_path: Path) -> None:
    """If Accelerate ignored WORLD_SIZE, two trainers would share a folder silently."""
    lost = {**PLAIN, "WORLD_SIZE": "2", "RANK": "0"}
    done = subprocess.run(
        [sys.executable, TRAIN, *small_run("--train.micro_batch_size", "2")],
        cwd=tmp_path, env=lost, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "WORLD_SIZE is 2 but LOCAL_RANK, MASTER_ADDR, MASTER_PORT are not set" in done.stderr


@thorough
@pytest.mark.slow
def test_compiled_run_equals_the_eager_one(small_run: Arguments, tmp_path: Path) -> None:
    alike = ["--model.dropout", "0", "--eval.every", "6"]
    eager, compiled = tmp_path / "eager", tmp_path / "compiled"
    assert launch(small_run(*alike, "--out_dir", str(eager))) == 0
    options = small_run(*alike, "--out_dir", str(compiled), "--train.compile")
    finish([sys.executable, TRAIN, *options], tmp_path, timeout=400)
    for a, b in zip(records(eager), records(compiled), strict=True):
        assert list(b.values()) == pytest.approx(list(a.values()), rel=1e-3)
    names = load_file(compiled / "checkpoints" / "step_00000012" / "model.safetensors").keys()
    assert not any(name.startswith(("module.", "_orig_mod.")) for name in names)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_trains_and_resumes_on_cuda(precision: str, small_run: Arguments, tmp_path: Path) -> None:
    assert torch.cuda.is_available()
    options = small_run("--train.mixed_precision", precision, "--schedule.name", "constant")
    finish([sys.executable, TRAIN, *options, "--train.max_steps", "8"], tmp_path)
    assert "from step 8" in finish([sys.executable, TRAIN, *options], tmp_path)
    lines = records(tmp_path / "run")
    assert lines[-1]["train/loss"] < lines[0]["train/loss"] - 1


@pytest.mark.gpu
@pytest.mark.parametrize("preset", ["gpt2", "llama"])
def test_a_reproducible_run_on_cuda_resumes_with_the_same_bits(
    preset: str, small_run: Arguments, tmp_path: Path
) -> None:
    """In bf16, and with sequences that the backward pass of attention divides among blocks."""
    shape = ["--model.block_size", "512", "--model.n_embd", "128", "--train.micro_batch_size", "2"]
    options = small_run(*shape, "--train.tokens_per_step", "4096", "--train.reproducible")
    options += ["--train.mixed_precision", "bf16", "--schedule.name", "constant"]
    options += ["--model.preset", preset]
    one, two = tmp_path / "one", tmp_path / "two"
    finish([sys.executable, TRAIN, *options, "--out_dir", str(one)], tmp_path)
    finish(
        [sys.executable, TRAIN, *options, "--out_dir", str(two), "--train.max_steps", "6"], tmp_path
    )
    finish([sys.executable, TRAIN, *options, "--out_dir", str(two)], tmp_path)
    losses, resumed = ({r["step"]: r["train/loss"] for r in records(run)} for run in (one, two))
    assert losses == {step: resumed[step] for step in losses}
    assert_same_weights(weights(one), weights(two))
