"""Guards that no other test covers of properties that a change must keep; see GUARDS.md."""

import ast
import json
import multiprocessing
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState

from accel_gpt import train
from accel_gpt.config.experiment import TrainConfig
from accel_gpt.config.plan import Plan
from accel_gpt.errors import BusyError, DataError
from accel_gpt.launch.process import join_ranks
from accel_gpt.launch.ranks import RankError, all_ranks, explain_lost_rank, on_main
from tests.conftest import QUIET, launch
from tests.helpers.ports import free_port

Arguments = Callable[..., list[str]]
fork = multiprocessing.get_context("fork")
PACKAGE = Path(__file__).resolve().parents[2] / "accel_gpt"
# files whose constants decide what a model computes, or what a command predicts
NUMERIC = ("config/depth.py", "cost", "model", "optim", "training/gradients.py")
NUMERIC += (
    "training/guard.py",
    "launch/accelerator.py",
    "launch/process.py",
    "launch/compile.py",
)
NUMERIC += ("launch/precision.py", "launch/unsupported.py", "data/order.py", "data/mixture.py")
MEASURE_FAULTS = """
import resource, sys
import torch
from accel_gpt import train
from accel_gpt.commands import train as command

command.tell_health = lambda out_dir: None  # it leaves other free blocks than the training
assert command.main(sys.argv[1:]) == 0

def faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def work() -> None:
    torch.empty(20 * 2**20).fill_(1)  # 80 MiB: beyond every threshold of glibc, which would map it

each = []
for _ in range(10):
    before = faults()
    work()
    each.append(faults() - before)
print(sorted(each)[5])
"""


def test_an_engine_that_replaces_parameters_is_refused(
    small_run: Arguments, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """torchao's all-gather in fp8 does this; a part of the model would never train."""
    prepare = Accelerator.prepare

    def replacing(self: Accelerator, model: Any, *others: Any, **options: Any) -> Any:
        prepared = prepare(self, model, *others, **options)
        layer = model.blocks[0].attn.qkv
        layer.weight = torch.nn.Parameter(layer.weight.detach().clone())
        return prepared

    monkeypatch.setattr(Accelerator, "prepare", replacing)
    assert launch(small_run(*QUIET)) == 2
    assert "blocks.0.attn.qkv.weight would never train" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's allocator is set up")
def test_memory_that_a_step_frees_is_used_again_without_page_faults(small_run: Arguments) -> None:
    command = [sys.executable, "-c", MEASURE_FAULTS, *small_run(*QUIET)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    # median of ten blocks; if each block is mapped again: 40 with huge pages, else 20,480
    assert int(done.stdout.splitlines()[-1]) < 10


# --------------------------------------------------------------------------- two ranks


def decide_on_two_ranks(rank: int, folder: Path) -> None:
    """Write the results of `on_main` and `all_ranks` on one of two ranks."""
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    found: dict[str, Any] = {"decision": on_main(lambda: f"of rank {rank}")}

    def fail_on(failing: int) -> None:
        if rank == failing:
            raise BusyError(f"rank {rank} cannot")

    for failing in (0, 1):
        try:
            with all_ranks():
                fail_on(failing)
        except (BusyError, RankError) as error:
            found[f"error of {failing}"] = [type(error).__name__, str(error), error.exit_code]
    try:
        with all_ranks():  # both fail: the error of the first one counts
            raise BusyError("rank 0 cannot") if rank == 0 else ValueError("rank 1 cannot")
    except (ValueError, BusyError, RankError) as error:
        found["error of both"] = [type(error).__name__, str(error), getattr(error, "exit_code", 0)]
    try:
        on_main(lambda: fail_on(0))
    except (BusyError, RankError) as error:
        found["error of the decision"] = [type(error).__name__, str(error), error.exit_code]
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def finish_two_ranks(run: Callable[[int, Path], None], folder: Path) -> None:
    """Call `run` on two ranks and assert that both succeed."""
    processes = [fork.Process(target=run, args=(rank, folder)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        process.kill()  # a rank that waits for the other in vain
    assert [process.exitcode for process in processes] == [0, 0]


def test_two_ranks_share_decisions_and_errors(tmp_path: Path) -> None:
    finish_two_ranks(decide_on_two_ranks, tmp_path)
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found["decision"] == "of rank 0"
        for failing in (0, 1):
            kind = "BusyError" if rank == failing else "RankError"
            expected = [kind, f"rank {failing} cannot", BusyError.exit_code]
            assert found[f"error of {failing}"] == expected
        kind = "BusyError" if rank == 0 else "RankError"
        assert found["error of both"] == [kind, "rank 0 cannot", BusyError.exit_code]
        assert found["error of the decision"] == [kind, "rank 0 cannot", BusyError.exit_code]


def wait_for_data_on_two_ranks(rank: int, folder: Path) -> None:
    """Wait for the data of a step, which fails on one of two ranks."""
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)

    def fetch(count: int) -> bool:
        if rank == 0:
            raise DataError("the shard does not come")
        return True

    run: Any = SimpleNamespace(
        state=SimpleNamespace(step=0),
        plan=Plan(1, 1, 8, 1, 9, 0, 9),
        loader=SimpleNamespace(fetch=fetch),
        accelerator=SimpleNamespace(num_processes=2),
        writer=SimpleNamespace(seconds=0.0),
    )
    stop: Any = SimpleNamespace(group=None, agree_to_stop=lambda waits: (False, waits))
    with pytest.raises(DataError if rank == 0 else RankError, match="the shard does not come"):
        train.wait_for_data(run, stop)
    dist.destroy_process_group()


def test_data_that_does_not_come_on_one_rank_ends_all(tmp_path: Path) -> None:
    finish_two_ranks(wait_for_data_on_two_ranks, tmp_path)


def end_while_gloo_frees_tensors(rank: int, folder: Path) -> None:
    """Start and end training on one of two ranks, twice: torch itself owns the first group."""
    ranks = {"WORLD_SIZE": "2", "RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ.update(ranks, ACCELERATE_USE_CPU="true", MASTER_ADDR="127.0.0.1")

    def train() -> None:
        _model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
        tensors = [torch.ones(1) for _ in range(3000)]
        dist.group.WORLD.allreduce_coalesced(tensors).wait()
        del tensors
        dist.destroy_process_group()

    for port in json.loads((folder / "ports").read_text()):
        os.environ["MASTER_PORT"] = str(port)
        PartialState._reset_state()
        with explain_lost_rank(2):
            join_ranks(TrainConfig())
            train()


def test_the_reducer_of_ddp_does_not_delete_the_process_group(tmp_path: Path) -> None:
    """It would hang: it does not release the GIL, which a thread of gloo needs to free tensors."""
    (tmp_path / "ports").write_text(json.dumps([free_port(), free_port()]))
    finish_two_ranks(end_while_gloo_frees_tensors, tmp_path)


# --------------------------------------------------------------------------- constants


def is_number(node: ast.AST) -> bool:
    """Return whether an expression consists only of numbers."""
    allowed = (ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.Tuple, ast.expr_context)
    constants = [part for part in ast.walk(node) if isinstance(part, ast.Constant)]
    others = [part for part in ast.walk(node) if not isinstance(part, ast.Constant)]
    return (
        bool(constants)
        and all(type(constant.value) in (int, float) for constant in constants)
        and all(isinstance(part, allowed) for part in others)
    )


def unsourced(path: Path) -> list[str]:
    """Return the numeric constants of a module without a comment beside, above or below."""
    text = path.read_text(encoding="utf-8")
    lines, body = text.splitlines(), ast.parse(text).body
    found = []
    for number, node in enumerate(body):
        if not isinstance(node, ast.Assign) or not is_number(node.value):
            continue
        following = body[number + 1] if number + 1 < len(body) else None
        documented = isinstance(following, ast.Expr)
        first = node.lineno - 1
        while first and lines[first - 1].strip():  # a comment may stand above a group
            first -= 1
        group = lines[first : node.lineno - 1]
        commented = any(line.lstrip().startswith("#") for line in group)
        commented |= "#" in "".join(lines[node.lineno - 1 : node.end_lineno])
        if not (documented or commented):
            found.append(f"{path.name}: {lines[node.lineno - 1]}")
    return found


def test_numbers_that_decide_results_have_a_source_beside_them() -> None:
    paths = []
    for name in NUMERIC:
        place = PACKAGE / name
        paths += [place] if place.suffix else sorted(place.rglob("*.py"))
    assert [line for path in paths for line in unsourced(path)] == []
