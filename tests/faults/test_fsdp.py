"""Real FSDP2 on gloo processes: first weights, a poisoned step, shards for any number of them."""

import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from accel_gpt.commands.resolve import load_config
from accel_gpt.model.gpt import GPT
from accel_gpt.runs.tensor_files import weights_of
from tests.conftest import QUIET
from tests.faults.harness import FSDP, Server, Tiny, finish
from tests.faults.launches import TWO
from tests.test_launch import PLAIN
from tests.test_train import assert_same_weights, records, weights

Arguments = Callable[..., list[str]]
# a loss of NaN on one of the processes in the first step
POISONED = """
import os, sys
from accel_gpt import train
from accel_gpt.commands import train as command
micro_batches, calls = train.micro_batches, []
def batches(*arguments):
    calls.append(arguments)
    poison = float("nan") if len(calls) == 1 and os.environ["RANK"] == "1" else 1.0
    for *rest, weight in micro_batches(*arguments):
        yield *rest, weight * poison
train.micro_batches = batches
sys.exit(command.main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_two_processes_start_from_the_weights_of_one_and_skip_a_poisoned_step(
    small_run: Arguments, tmp_path: Path
) -> None:
    own = small_run("--train.max_steps", "2", "--train.micro_batch_size", "2", *QUIET)
    own += ["--checkpoint.every", "1", "--schedule.warmup_steps", "1"]
    (tmp_path / "poisoned.py").write_text(POISONED)
    command = [*TWO, str(tmp_path / "poisoned.py"), *own]
    environment = {**PLAIN, **FSDP, "ACCELERATE_USE_CPU": "true"}
    subprocess.run(command, cwd=tmp_path, env=environment, check=True)
    run = tmp_path / "run"
    assert [record["train/skipped"] for record in records(run)] == [1, 1]
    # both skipped the update, including moments and count
    files = [*(run / "checkpoints" / "step_00000001").glob("optimizer_*.safetensors")]
    assert len(files) == 2
    assert not any(part.any() for file in files for part in load_file(file).values())
    torch.manual_seed(1337)
    first = weights_of(GPT(load_config(own, "test").model, 257))
    assert_same_weights(weights(run, 1), first)
    assert not torch.equal(weights(run, 2)["wte.weight"], first["wte.weight"])


@pytest.mark.slow
def test_any_number_of_processes_takes_up_the_shards_of_any_other(
    server: Server, tiny: Tiny, tmp_path: Path
) -> None:
    """Sharded over 2, 3 and 4, not sharded, sharded over 2: the losses of one process."""
    alike = ["--model.dropout", "0", "--optim.name", "muon", "--train.micro_batch_size", "1"]
    alike += ["--train.tokens_per_step", "192", "--train.max_steps", "6"]  # 2, 3 and 4 divide it
    alike += ["--checkpoint.every", "1", "--checkpoint.keep_last", "9", "--eval.every", "0"]
    finish(server, tiny.arguments(tmp_path / "one", *alike))
    parted = tmp_path / "parted"
    own = tiny.arguments(parted, *alike)
    for step, world in enumerate((2, 3, 4, 1, 2), 1):
        given = [FSDP] * world if world > 1 else [{}]
        last = ["--train.stop_at", str(step)] if step < 5 else []
        finish(server, [*own, *last], world, environment=given)
        files = (parted / "checkpoints" / f"step_{step:08d}").iterdir()
        kinds = Counter(file.stem.rpartition("_")[0] for file in files if file.stem[-1].isdigit())
        if world > 1:
            assert kinds == dict.fromkeys(("weights", "optimizer", "random_states"), world)
    for here, there in zip(records(tmp_path / "one"), records(parted), strict=True):
        assert here["train/loss"] == pytest.approx(there["train/loss"], abs=1e-5)
    expected, found = weights(tmp_path / "one", 6), weights(parted, 6)
    for name, weight in found.items():
        torch.testing.assert_close(weight, expected[name], atol=1e-5, rtol=1e-4)
