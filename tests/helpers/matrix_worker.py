"""One process of tests/test_matrix.py: trains the given runs on one engine.

    python tests/helpers/matrix_worker.py fsdp2 cpu tasks.json

A task is a name, the arguments of a run, the step at which a signal stops it (0: none), and a file
that rank 0 writes (null: none). A .json file gets the numbers of collectives of the third step.
Any other file gets the first gradient, with all values that it was computed from. On a CPU
fp8 is emulated, and `torch.compile` uses the backend aot_eager.
"""

import contextlib
import dataclasses
import functools
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import AORecipeKwargs, DistributedType
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from accel_gpt import train
from accel_gpt.commands import train as command
from accel_gpt.console import run_main
from accel_gpt.launch import accelerator as environment
from accel_gpt.launch import compile as compilation
from accel_gpt.model.sharding import is_sharded
from accel_gpt.training import gradients

FSDP = ("fsdp2", "hsdp")


def emulate_fp8() -> None:
    """Use our recipe with products that a CPU can compute."""
    recipe = environment.fp8_recipe

    def emulated(config: Any) -> list[AORecipeKwargs]:
        return [
            AORecipeKwargs(config=dataclasses.replace(given.config, emulate=True))
            for given in recipe(config)
        ]

    environment.fp8_recipe = emulated
    environment.check_fp8 = lambda _: None


class Collectives(TorchDispatchMode):
    """Counts collectives by name, whoever calls them."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:  # its dispatch calls this again with the collectives
            return NotImplemented
        namespace, _, name = func.name().partition("::")
        if "c10d" in namespace and not name.startswith(("wait", "_wrap")):
            kinds = [kind for kind in ("scatter", "gather", "reduce") if kind in name]
            self.counts[(kinds or [name])[0]] += 1
        return func(*args, **(kwargs or {}))


class Witness:
    """Stops a run at a step, and saves its first gradient."""

    def __init__(self) -> None:
        self.stop, self.kept, self.file, self.counts = 0, {}, None, None
        self.update = train.update
        self.micro_batches = train.micro_batches
        train.update = self.watched_update
        train.micro_batches = self.watched_batches
        for kind in (gradients.Gradients, gradients.ExactGradients):
            kind.finish = watched(self, kind.finish)

    def watched_update(self, run: train.Training) -> None:
        if run.state.step + 1 == self.stop and run.accelerator.is_main_process:
            os.kill(os.getpid(), signal.SIGTERM)
        if self.file and not self.kept:
            weights = run.gpt.named_parameters()
            before = {name: whole(w.detach()).cpu() for name, w in weights}
            self.kept = {"before": before, "batches": []}
        self.gpt = run.gpt
        counting = self.counts and run.state.step == 2
        with Collectives() if counting else contextlib.nullcontext() as seen:
            self.update(run)
        if counting and run.accelerator.is_main_process:
            Path(self.counts).write_text(json.dumps(seen.counts))

    def watched_batches(self, *arguments: Any) -> Iterator[Any]:
        for batch in self.micro_batches(*arguments):
            if self.file:
                self.kept["batches"].append([t if t is None else t.cpu() for t in batch[:3]])
            yield batch

    def keep(self, own: Any, loss: Tensor) -> None:
        """Write the gradient of the step, and all values that it was computed from."""
        scaler = own.accelerator.scaler  # of fp16
        scale = scaler.get_scale() if scaler else 1.0
        found = {n: whole(w.grad).cpu() / scale for n, w in self.gpt.named_parameters()}
        everyone: list[Any] = [self.kept["batches"]]
        if own.accelerator.num_processes > 1:
            everyone = [None] * own.accelerator.num_processes
            dist.all_gather_object(everyone, self.kept["batches"])
        if own.accelerator.is_main_process:
            batches = [batch for part in everyone for batch in part]
            content = {"gradient": found, "before": self.kept["before"], "batches": batches}
            torch.save({**content, "loss": loss.cpu()}, self.file)
        self.file = None


def watched(witness: Witness, finish: Any) -> Any:
    """Wrap `finish` of a class of gradients, so that `witness` saves the first result."""

    def finish_and_keep(own: Any) -> Tensor:
        loss: Tensor = finish(own)
        if witness.file:
            witness.keep(own, loss)
        return loss

    return finish_and_keep


def whole(tensor: Tensor) -> Tensor:
    """Return a whole copy of a tensor that FSDP may have sharded; all ranks must call it."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor.clone()


def main(engine: str, device: str, tasks: Path) -> None:
    """Train each of `tasks` on `engine`; exit with the first unexpected code."""
    if device == "cpu":
        emulate_fp8()
        torch.compile = functools.partial(torch.compile, backend="aot_eager")
    compilation.compiler_error = lambda device: None
    PartialState.destroy_process_group = lambda self, group=None: None  # for the next task
    witness = Witness()
    before = None
    for name, arguments, stop, file in json.loads(tasks.read_text()):
        if name != before:
            torch._dynamo.reset()
        before = name
        witness.stop, witness.file, witness.counts, witness.kept = stop, None, None, {}
        if file:
            setattr(witness, "counts" if file.endswith(".json") else "file", file)
        code = run_main(command.main, arguments)
        AcceleratorState._reset_state()
        GradientState._reset_state()
        if engine in FSDP:  # Accelerate starts them on top of plain processes
            PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        if code != (75 if stop else 0):
            sys.exit(f"{arguments} ended with {code}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
