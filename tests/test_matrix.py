"""Every precision on every engine: weights move, gradients are right, a stop changes nothing.

`ACCEL_GPT_THOROUGH=1 pytest -n 0 -m slow tests/test_matrix.py` trains all combinations; without it
each engine meets each value of each dimension at least once.
"""

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from accel_gpt.config.model import ModelConfig
from accel_gpt.launch.unsupported import FP8_CAPABILITY
from accel_gpt.model.gpt import GPT
from accel_gpt.model.loss import IGNORE
from tests.conftest import THOROUGH, thorough
from tests.helpers.ports import free_port
from tests.launch.test_accelerate_configs import FOLDER, environment_of
from tests.test_launch import TRAIN
from tests.test_train import assert_same_weights, records, weights

Arguments = Callable[..., list[str]]
Case = dict[str, str]
STEPS, STOP = 5, 3
DIMENSIONS = {
    "engine": ("one", "ddp", "fsdp2", "elastic"),
    "precision": ("no", "bf16", "fp8"),
    "optimizer": ("adamw", "muon"),
    "compiled": ("false", "true"),
    "checkpointing": ("none", "blocks"),
    "document_mask": ("false", "true"),
}
# error of the whole gradient relative to float64; measured on one CPU: 1e-7, 2e-3, 2e-2
BOUNDS = {"no": 1e-6, "bf16": 1e-2, "fp16": 1e-2, "fp8": 1e-1}
SHAPE = {"n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 32, "dropout": 0.0}
WORLD = {"one": 1, "ddp": 2, "fsdp2": 2, "elastic": 2, "hsdp": 4}

PORT = ("--main_process_port", "0")
# the shipped files, on fewer processes
FSDP2 = (str(FOLDER / "fsdp2_8.yaml"), "--num_processes", "2", *PORT)
ACCELERATE_CONFIGS = {
    "fsdp2": (*FSDP2, TRAIN),
    "hsdp": (
        *(str(FOLDER / "hsdp_2x8.yaml"), "--num_processes", "4", "--num_machines", "1"),
        *("--parallelism_config_dp_shard_size", "2", *PORT, TRAIN),
    ),
}


def refused(case: Case) -> str | None:
    """Return the error of an unsupported combination; None for a supported one."""
    if case["engine"] != "elastic":
        return None
    if case["compiled"] == "true":
        return "train.reproducible is true and train.compile is true"
    if case["precision"] == "fp8":
        return "cannot sum the scaled gradients of fp8"
    return None


def all_cases(dimensions: Mapping[str, Sequence[str]] = DIMENSIONS) -> list[Case]:
    return [
        dict(zip(dimensions, values, strict=True))
        for values in itertools.product(*dimensions.values())
    ]


def covering(cases: list[Case], size: int) -> list[Case]:
    """Choose some of `cases` with every combination of `size` values that occurs in any case."""

    def combinations(case: Case) -> set[Any]:
        return set(itertools.combinations(case.items(), size))

    missing = set().union(*map(combinations, cases))
    chosen = []
    while missing:
        best = max(cases, key=lambda case: len(combinations(case) & missing))
        chosen.append(best)
        missing -= combinations(best)
    return chosen


def cases() -> list[Case]:
    possible = [case for case in all_cases() if refused(case) is None]
    if find_spec("torchao") is None:
        possible = [case for case in possible if case["precision"] != "fp8"]
    if THOROUGH:
        return possible
    engines = dict.fromkeys(case["engine"] for case in possible)
    return [
        chosen
        for engine in engines
        for chosen in covering([case for case in possible if case["engine"] == engine], 1)
    ]


def name(case: Case) -> str:
    return "-".join(case.values())


def options(case: Case) -> list[str]:
    """Return the arguments that a case adds to the small run."""
    muon = case["optimizer"] == "muon"
    shape = SHAPE | ({"n_kv_head": 1} if muon else {})
    given = {
        "model.preset": "llama" if muon else "gpt2",
        **{f"model.{key}": value for key, value in shape.items()},
        "data.document_mask": case["document_mask"],
        "optim.name": case["optimizer"],
        "train.mixed_precision": case["precision"],
        "train.matmul_precision": "highest",
        "train.compile": case["compiled"],
        "train.activation_checkpointing": case["checkpointing"],
        "train.reproducible": str(case["engine"] == "elastic").lower(),
        "train.max_steps": STEPS,
        "train.micro_batch_size": 1 if case["engine"] == "hsdp" else 2,
        "eval.every": 0,
        "eval.tokens": 128,
        "sample.every": 0,
        "checkpoint.keep_last": 9,
        "log.trackers": "[]",
    }
    return [word for key, value in given.items() for word in (f"--{key}", str(value))]


def work(engine: str, world: int, tasks: list[Any], folder: Path, device: str = "cpu") -> str:
    """Run `tasks` in `world` processes of tests/helpers/matrix_worker.py; return their output."""
    file = folder / f"{engine}_{time.monotonic_ns()}.json"
    file.write_text(json.dumps(tasks))
    shared: dict[str, Any] = {"PYTHONPATH": str(Path(__file__).parents[1])}
    if world > 1:
        shared |= {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    if engine in ACCELERATE_CONFIGS:
        shared |= environment_of("--config_file", *ACCELERATE_CONFIGS[engine])
        shared |= {"WORLD_SIZE": world}
    worker = Path(__file__).parent / "helpers" / "matrix_worker.py"
    command = [sys.executable, str(worker), engine, device, str(file)]
    processes = []
    for rank in range(world):
        ranks = {"RANK": rank, "LOCAL_RANK": rank} if world > 1 else {}
        environment = {**os.environ, **{k: str(v) for k, v in (shared | ranks).items()}}
        with file.with_suffix(f".{rank}.log").open("w") as log:
            processes.append(
                subprocess.Popen(command, env=environment, cwd=folder, stdout=log, stderr=log)
            )
    codes = [process.wait(timeout=1200) for process in processes]
    printed = "\n".join(file.with_suffix(f".{rank}.log").read_text() for rank in range(world))
    assert codes == [0] * world, printed[-4000:]
    return printed


def gradient_error(kept: dict[str, Any], shape: dict[str, Any]) -> float:
    """Return the error of the saved gradient relative to float64 and a plain loss."""
    model = GPT(ModelConfig(**shape["config"]), shape["vocab_size"])
    model.load_state_dict(kept["before"], strict=False)
    model = model.double()
    if model.rotary is not None:
        model.rotary = model.rotary.double()
    count = sum(int((targets != IGNORE).sum()) for _, targets, _ in kept["batches"])
    for tokens, targets, documents in kept["batches"]:
        logits = model(tokens, documents=documents)
        loss = F.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="sum"
        )
        (loss / count).backward()
    pairs = [(kept["gradient"][n].double(), w.grad) for n, w in model.named_parameters()]
    wrong = sum(float(((found - exact) ** 2).sum()) for found, exact in pairs)
    return float((wrong / sum(float((exact**2).sum()) for _, exact in pairs)) ** 0.5)


@pytest.mark.slow
@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize("engine", DIMENSIONS["engine"])
def test_every_precision_on_every_engine(engine: str, small_run: Arguments, tmp_path: Path) -> None:
    train_and_check([case for case in cases() if case["engine"] == engine], small_run, tmp_path)


@thorough
@pytest.mark.slow
@pytest.mark.usefixtures("in_this_process")
def test_two_replicas_of_two_shards(small_run: Arguments, tmp_path: Path) -> None:
    """FSDP version 2 with replicas, HSDP."""
    values = ("hsdp", "bf16", "adamw", "false", "none", "false")
    train_and_check([dict(zip(DIMENSIONS, values, strict=True))], small_run, tmp_path)


def collectives(engine: str, optimizer: str, micro_steps: int) -> dict[str, int]:
    """Return the collectives of a step of two blocks: one is the all-reduce of the loss.

    DDP all-reduces one bucket of gradients at the last micro-step; FSDP2 reduces those of four
    groups at each, and all-reduces the norm. Each micro-step gathers the groups, then
    the two blocks again, and the head if it is not the embedding. For each of Muon's four stacks
    DDP gathers once; FSDP2 has two all-to-alls, on a CPU gathers.
    """
    muon = optimizer == "muon"
    if engine == "ddp":
        return {"reduce": 2, **({"gather": 4} if muon else {})}
    scatter, gather = 4 * micro_steps, (6 + muon) * micro_steps + 8 * muon
    return {"reduce": 2, "scatter": scatter, "gather": gather}


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_losses_are_those_of_one_process_and_collectives_are_counted(
    engine: str, small_run: Arguments, tmp_path: Path
) -> None:
    sequences, steps = 16, 50 if THOROUGH else 5

    def task(world: int, optimizer: str, micro_steps: int) -> tuple[Path, list[Any]]:
        case = dict.fromkeys(("compiled", "document_mask"), "false")
        case |= {"engine": engine, "precision": "no", "checkpointing": "none"}
        out = tmp_path / f"{optimizer}-{world}-{micro_steps}"
        own = [*options({**case, "optimizer": optimizer}), "--out_dir", str(out)]
        own += ["--train.tokens_per_step", str(sequences * SHAPE["block_size"])]
        own += ["--train.micro_batch_size", str(sequences // (world * micro_steps))]
        own += ["--train.max_steps", str(steps), "--checkpoint.every", str(steps)]
        return out, [out.name, small_run(*own), 0, str(out.with_suffix(".json"))]

    single = {name: task(1, name, 1) for name in DIMENSIONS["optimizer"]}
    work("one", 1, [words for _, words in single.values()], tmp_path)
    cases = [("adamw", 1), ("muon", 4)]
    shared = [task(2, *case) for case in cases]
    work(engine, 2, [words for _, words in shared], tmp_path)
    for (optimizer, *case), (out, _) in zip(cases, shared, strict=True):
        expected = [line["train/loss"] for line in records(single[optimizer][0])]
        found = [line["train/loss"] for line in records(out)]
        assert len(found) == steps
        assert found == pytest.approx(expected, abs=1e-5), out.name
        counts = collectives(engine, optimizer, *case)
        assert json.loads(out.with_suffix(".json").read_text()) == counts, out.name


def gpu_cases(engine: str, fp8: bool) -> list[Case]:
    """Choose cases of an engine that cover every pair of values that GPUs support."""
    precisions = ["no", "bf16", *(["fp16"] * (engine != "fsdp2")), *(["fp8"] * fp8)]
    return covering(all_cases({**DIMENSIONS, "engine": [engine], "precision": precisions}), 2)


@pytest.mark.gpu
@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize("precision", ["no", "bf16", "fp16", "fp8"])
@pytest.mark.parametrize("engine", ["one", "ddp", "fsdp2"])
def test_every_precision_on_gpus(
    engine: str, precision: str, small_run: Arguments, tmp_path: Path
) -> None:
    if torch.cuda.device_count() < WORLD[engine]:
        pytest.skip(f"needs {WORLD[engine]} GPUs")
    fp8 = find_spec("torchao") and torch.cuda.get_device_capability() >= FP8_CAPABILITY
    cases = [case for case in gpu_cases(engine, bool(fp8)) if case["precision"] == precision]
    if not cases:
        pytest.skip(f"{precision} with {engine} is not supported here")
    train_and_check(cases, small_run, tmp_path, "cuda")


def train_and_check(
    chosen: list[Case], small_run: Arguments, folder: Path, device: str = "cpu"
) -> None:
    """Train each case of an engine without and with a stop, and check the results."""
    engine = chosen[0]["engine"]
    stopped, rest, all_runs = [], [], []
    for case in chosen:
        own = small_run(*options(case))
        whole, parted = (
            [*own, "--out_dir", str(folder / name(case) / part)] for part in ("whole", "parted")
        )
        stopped.append([name(case), parted, STOP, str(folder / f"{name(case)}.pt")])
        rest += [[name(case), whole, 0, None], [name(case), parted, 0, None]]
        all_runs += [stopped[-1], *rest[-2:]]
    if engine == "elastic":  # stopped with two processes, resumed and never stopped with one
        work("ddp", 2, stopped, folder)
        work("one", 1, rest, folder)
    else:
        work(engine, WORLD[engine], all_runs, folder, device)
    for case in chosen:
        check(case, folder, device)


def check(case: Case, folder: Path, device: str) -> None:
    """Check the two runs of a case."""
    whole, parted = (folder / name(case) / part for part in ("whole", "parted"))
    kept = torch.load(folder / f"{name(case)}.pt", weights_only=True)
    after = weights(whole, STEPS)
    still = [n for n in after if torch.equal(after[n], kept["before"][n])]
    assert not still, f"{name(case)}: {still} did not move"
    assert (parted / "checkpoints" / f"step_{STOP:08d}").is_dir()
    if device == "cpu":
        assert_same_weights(after, weights(parted, STEPS))
    else:  # kernels add in their own order; Muon makes small directions as large as others
        for weight, found in weights(parted, STEPS).items():
            moved = torch.dist(after[weight], kept["before"][weight])
            assert torch.dist(after[weight], found) < 0.1 * moved, f"{name(case)}: {weight}"
    shape = json.loads((parted / "checkpoints" / "step_00000003" / "model.json").read_text())
    error = gradient_error(kept, shape)
    sys.stdout.write(f"{name(case)}: {error:.1e}\n")
    assert kept["loss"].dtype == torch.float32
    assert error < BOUNDS[case["precision"]] * (1 if device == "cpu" else 10), name(case)
