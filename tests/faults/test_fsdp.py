"""Real FSDP2 on two gloo processes: stopped and resumed, poisoned, and resumed by one process."""

import itertools
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from accel_gpt.commands.resolve import load_config
from accel_gpt.config.experiment import SampleConfig
from accel_gpt.data.order import derive_seed
from accel_gpt.evals.samples import write_text
from accel_gpt.model.gpt import GPT
from accel_gpt.runs.tensor_files import weights_of
from accel_gpt.transformers_io.load import load_pretrained
from tests.conftest import thorough
from tests.faults import test_fsdp
from tests.faults.harness import FSDP, Server, Tiny, finish
from tests.helpers.ports import free_port
from tests.test_train import assert_same_weights, records, weights

Arguments = Callable[..., list[str]]
SHARDED = """
import sys
from accel_gpt import train
from accel_gpt.commands import train as command
sys.exit(command.main(sys.argv[1:]))
"""
ALIKE = ["--train.max_steps", "6", "--sample.every", "0", "--train.micro_batch_size", "2"]
ALIKE += ["--eval.every", "3", "--checkpoint.every", "1", "--checkpoint.keep_last", "9"]
# a signal to one process during step STOP_AT; a NaN loss on the other
FAULTY = """
import os, signal
from accel_gpt import train
from accel_gpt.commands import train as command
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
EAGER = """
from torch import nn
from accel_gpt.launch import compile as compilation
compilation.compiler_error = lambda device: None
compile_module = nn.Module.compile
nn.Module.compile = lambda module, **_: compile_module(module, backend="eager")
"""


def launch(
    world: int,
    folder: Path,
    arguments: list[str],
    code: int = 0,
    **given: int,
) -> None:
    """Train under FSDP2 in `world` processes; assert that all end with `code`."""
    script = folder / "sharded.py"
    script.write_text(SHARDED.replace("sys.exit(", f"{FAULTY}\nsys.exit("))
    shared = {
        **{"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, **given},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()},
        **{**FSDP, "ACCELERATE_USE_CPU": "true"},
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
    told = [process.communicate(timeout=900)[1] for process in processes]
    assert [process.returncode for process in processes] == [code] * world, "\n".join(told)


def moments(run: Path, step: int) -> dict[str, Tensor]:
    """Return the optimizer's state of a sharded run, by file and name."""
    files = (run / "checkpoints" / f"step_{step:08d}").glob("optimizer_*.safetensors")
    return {f"{file.name}/{name}": part for file in files for name, part in load_file(file).items()}


@pytest.mark.slow
def test_a_sharded_run_stops_skips_and_resumes_as_if_it_never_stopped(
    small_run: Arguments, tmp_path: Path
) -> None:
    whole, parted = (tmp_path / name for name in ("whole", "parted"))
    launch(2, tmp_path, small_run(*ALIKE, "--out_dir", str(whole)), POISON_AT=1)
    own = small_run(*ALIKE, "--out_dir", str(parted))
    launch(2, tmp_path, own, 75, POISON_AT=1, STOP_AT=4)
    assert not (parted / "checkpoints" / "step_00000005").exists()
    for path in parted.rglob("*"):
        assert not path.name.endswith((".metadata", ".distcp")), path
    (parted / "checkpoints" / "step_00000004" / "weights_1.safetensors").unlink()
    launch(2, tmp_path, own)  # falls back to the checkpoint before
    assert (parted / "checkpoints" / ".corrupt_step_00000004_0").is_dir()
    assert records(whole) == records(parted)
    assert_same_weights(weights(whole, 6), weights(parted, 6))
    first, second = moments(whole, 6), moments(parted, 6)
    assert_same_weights(first, second)
    # both processes skipped the poisoned update, including moments and count
    assert not any(moment.any() for moment in moments(whole, 1).values())
    assert [record["train/skipped"] for record in records(whole)] == [1, 1, 1, 1, 1, 1]
    config = load_config(own, "test")
    # two processes start from the weights that one process starts from
    torch.manual_seed(config.seed)
    assert_same_weights(weights(whole, 1), weights_of(GPT(config.model, 257)))
    assert not torch.equal(weights(whole, 1)["wte.weight"], weights(whole, 2)["wte.weight"])


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


@thorough
@pytest.mark.slow
def test_sharded_processes_of_a_compiled_model_write_what_each_would_write_alone(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is traced; no kernel is compiled."""
    monkeypatch.setattr(test_fsdp, "FAULTY", f"{FAULTY}\n{EAGER}")
    run, prompts = tmp_path / "run", ("a", "b", "")
    writing = ["--sample.every", "3", "--sample.num", "2", "--sample.prompts", json.dumps(prompts)]
    writing += ["--sample.max_new_tokens", "50", "--sample.temperature", "1.5"]
    writing += ["--train.max_steps", "3", "--train.compile", "true"]
    launch(2, tmp_path, tiny.arguments(run, *writing))
    told = (run / "samples" / "step_00000003.txt").read_bytes().decode()
    model, tokenizer = load_pretrained(str(run), "3", torch.device("cpu"))
    config, expected = SampleConfig(num=2, max_new_tokens=50, temperature=1.5), []
    for rank, (number, prompt) in itertools.product(range(2), enumerate(prompts)):
        generator = torch.Generator().manual_seed(derive_seed(1337, "sample", 3, rank, number))
        expected += write_text(model, tokenizer, prompt, config, generator)
    assert re.split(r"(?:\A|\n\n)--- sample \d+\n", told.removesuffix("\n"))[1:] == expected
