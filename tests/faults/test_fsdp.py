"""Real FSDP2 on two gloo processes: stopped and resumed, poisoned, and resumed by one process."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from accel_gpt.commands import train as command
from accel_gpt.commands.resolve import load_config
from accel_gpt.cost.flops import parameter_counts
from accel_gpt.model.gpt import GPT
from accel_gpt.training.tensor_files import weights_of
from tests.conftest import THOROUGH, run_here
from tests.faults.harness import FSDP
from tests.test_train import assert_same_weights, records, signal_after, weights

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


# peak memory in bytes of a process while it starts, loads, steps and saves
MEASURED = """
import json, re, threading, time
from pathlib import Path
from accel_gpt import train
from accel_gpt.commands import train as command
from accel_gpt.training import accelerator
train.keep_freed_memory = lambda: None
phase, peaks = ["start"], {}
def watch():
    while True:
        held = re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())
        peaks[phase[0]] = max(peaks.get(phase[0], 0), 1024 * int(held[1]))
        written = Path(f"peaks_{os.environ['RANK']}.json.new")
        written.write_text(json.dumps(peaks))
        written.replace(written.with_suffix(""))  # the end of the process may cut a write short
        time.sleep(0.05)
threading.Thread(target=watch, daemon=True).start()
def within(name):
    inner = getattr(train, name)
    def outer(*arguments):
        phase[0] = name
        try:
            return inner(*arguments)
        finally:
            phase[0] = "between"
    setattr(train, name, outer)
for name in ("restore", "update", "save"):
    within(name)
"""


def launch(
    world: int,
    folder: Path,
    arguments: list[str],
    code: int = 0,
    changes: str = FAULTY,
    **given: int,
) -> None:
    """Train under FSDP2 in `world` processes; assert that all end with `code`."""
    script = folder / "sharded.py"
    script.write_text(SHARDED.replace("sys.exit(", f"{changes}\nsys.exit("))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {
        **{"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, **given},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **FSDP, "ACCELERATE_USE_CPU": "true"},
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
    assert "".join(told).count("FSDP on CPUs is slow") == 1


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
    launch(2, tmp_path, own)
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
    (parted / "checkpoints" / "step_00000006" / "weights_1.safetensors").unlink()
    launch(2, tmp_path, own)  # falls back to the checkpoint before
    assert (parted / "checkpoints" / ".corrupt_step_00000006_0").is_dir()
    assert_same_weights(weights(whole, 6), weights(parted, 6))


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_any_number_of_processes_takes_up_the_shards_of_any_other(
    optimizer: str, small_run: Arguments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sharded over 2, 3 and 4, not sharded, sharded over 2: the losses of one process."""
    alike = [*ALIKE, "--model.dropout", "0", "--optim.name", optimizer]
    alike += ["--train.tokens_per_step", "768"]  # 2, 3 and 4 divide it
    assert run_here(command.main, small_run(*alike, "--out_dir", str(tmp_path / "one"))) == 0
    parted = tmp_path / "parted"
    own = small_run(*alike, "--out_dir", str(parted))
    for step, world in enumerate((2, 3, 4), 1):
        launch(world, tmp_path, own, 75, STOP_AT=step)
        files = (parted / "checkpoints" / f"step_{step:08d}").iterdir()
        kinds = Counter(file.stem.rpartition("_")[0] for file in files if file.stem[-1].isdigit())
        assert kinds == dict.fromkeys(("weights", "optimizer", "random_states"), world)
    signal_after(monkeypatch, 4, signal.SIGTERM)
    assert run_here(command.main, own) == 75
    launch(2, tmp_path, own)
    for here, there in zip(records(tmp_path / "one"), records(parted), strict=True):
        assert here["train/loss"] == pytest.approx(there["train/loss"], abs=1e-5)
    expected, found = weights(tmp_path / "one", 6), weights(parted, 6)
    for name, weight in found.items():
        torch.testing.assert_close(weight, expected[name], atol=1e-5, rtol=1e-4)


@pytest.mark.slow
def test_no_rank_holds_more_than_its_share(corpus: Path, tmp_path: Path) -> None:
    """350M parameters on four ranks; the C library returns freed memory, else it would count."""
    if not THOROUGH:
        pytest.skip("takes four minutes; ACCEL_GPT_THOROUGH=1 runs it")
    if psutil.virtual_memory().available < 12e9:
        pytest.skip("needs 12 GB of memory")
    config, checkpoints = tmp_path / "350m.yaml", "{every: 2, keep_best: false, keep_last: 1}"
    config.write_text(
        f"""
out_dir: {tmp_path / "run"}
data: {{train: {corpus}}}
model: {{n_layer: 24, n_head: 16, n_embd: 1024, block_size: 64, vocab_size: 50257}}
train: {{tokens_per_step: 256, micro_batch_size: 1, max_steps: 2}}
eval: {{every: 0, tokens: 256}}
sample: {{every: 0}}
checkpoint: {checkpoints}
"""
    )
    returned = {"MALLOC_MMAP_THRESHOLD_": 2**16, "MALLOC_ARENA_MAX": 2}
    launch(4, tmp_path, [str(config)], changes=MEASURED, **returned)
    first = [json.loads((tmp_path / f"peaks_{rank}.json").read_text()) for rank in range(4)]
    more = ["--train.max_steps", "3", "--checkpoint.allow_change", "train.max_steps"]
    launch(4, tmp_path, [str(config), *more], changes=MEASURED, **returned)
    second = [json.loads((tmp_path / f"peaks_{rank}.json").read_text()) for rank in range(4)]
    rest = 600e6  # bytes of libraries and activations
    # four ranks share values of four bytes
    share = parameter_counts(load_config([str(config)], "test").model, 50257)["total"]
    embedding = 4 * 50304 * 1024  # the largest weight; a rank initializes all of it
    step = 4 * share + 3 * embedding  # a step gathers it, and reduces its gradient
    bounds = {"start": share + 2 * embedding, "save": 3 * share, "restore": 3 * share}
    bounds |= {"update": step, "between": step}
    for peaks in (*first, *second):
        assert not {name: held for name, held in peaks.items() if held > bounds[name] + rest}
