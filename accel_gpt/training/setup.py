"""How a model is run, the speedometer of a run, and the record of each launch."""

import gc
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType
from torch import nn

from accel_gpt.config.data import TextStream
from accel_gpt.config.depth import describe
from accel_gpt.config.experiment import Config, TrainConfig
from accel_gpt.config.parse import to_flat, to_plain, to_yaml
from accel_gpt.config.plan import Plan
from accel_gpt.cost.flops import flops_per_token, mfu, parameter_counts, peak_flops
from accel_gpt.data.corpus import Corpus, open_shards
from accel_gpt.files import write_file
from accel_gpt.model.gpt import GPT
from accel_gpt.optim.groups import make_optimizer
from accel_gpt.redact import command_line, redact
from accel_gpt.training.accelerator import (
    code_versions,
    describe_machine,
    device_name,
    memory_gb,
)
from accel_gpt.training.compiler import keep_compiled
from accel_gpt.training.engine import check_optimizer
from accel_gpt.training.run_folder import RunFolder
from accel_gpt.training.state import TrainState


class Speed:
    """Tokens per second, and MFU where the peak of the device is known."""

    def __init__(self, gpt: GPT, plan: Plan, accelerator: Accelerator) -> None:
        self.plan, self.device = plan, accelerator.device
        self.flops_per_token = flops_per_token(gpt.config, gpt.vocab_size)
        precision = accelerator.mixed_precision
        tf32 = self.device.type == "cuda" and torch.get_float32_matmul_precision() != "highest"
        full = "tf32" if tf32 else "fp32"
        self.dtype = full if precision == "no" else precision
        self.peak = peak_flops(device_name(self.device), self.dtype)

    def figures(self, seconds_per_step: float) -> dict[str, float]:
        """The perf/ keys of a record; MFU as a fraction of the peak of all devices."""
        rate = self.plan.tokens_per_step / seconds_per_step
        figures = {
            "perf/tokens_per_second": rate,
            "perf/step_ms": 1000 * seconds_per_step,
            "perf/memory_gb": memory_gb(self.device),
        }
        if self.peak:
            figures["perf/mfu"] = mfu(rate, self.flops_per_token, self.peak, self.plan.world_size)
        return figures


def set_up_model(gpt: GPT, train: TrainConfig) -> None:
    """Have `gpt` compiled and its activations recomputed, as `train` asks; before Accelerate."""
    gpt.recompute = train.activation_checkpointing == "blocks"
    if train.compile is True:
        keep_compiled()
        gpt.compile()  # in place: no wrapper, the names of the weights stay


def prepared(
    config: Config, accelerator: Accelerator, gpt: GPT
) -> tuple[nn.Module, AcceleratedOptimizer]:
    """The model, set up as `config` asks, and its optimizer, as Accelerate wraps them."""
    set_up_model(gpt, config.train)
    optimizer = make_optimizer(gpt, config.optim, config.train.compile is True)
    # told where to put them it does not look for FSDP's tensors, whose import takes 0.6 s
    alone = accelerator.distributed_type == DistributedType.NO
    placement = [True, True] if alone else None
    model, wrapped = accelerator.prepare(gpt, optimizer, device_placement=placement)
    check_optimizer(gpt, wrapped)
    return model, wrapped


def open_corpus(config: Config) -> Corpus:
    """Open what `data.train` names: prepared shards, or text that is tokenized while training."""
    if isinstance(config.data.train, TextStream):
        from accel_gpt.text.streaming import open_text

        return open_text(config)
    return open_shards(config)


def new_state(config: Config, corpus: Corpus, world_size: int) -> TrainState:
    """The state of a run that has not begun."""
    return TrainState(
        world_size=world_size,
        tokenizer_fingerprint=corpus.tokenizer.fingerprint,
        config=to_flat(to_plain(config)),
        versions=code_versions(),
        **corpus.state_dict(),
    )


def freeze() -> None:
    """Spare the search for garbage what is there now, and lives until the end."""
    gc.collect()
    gc.freeze()


def describe_run(config: Config, plan: Plan, corpus: Corpus, speed: Speed, machine: Any) -> str:
    """The first lines of a run."""
    parameters = parameter_counts(config.model, corpus.vocab_size)["total"]
    unknown = "" if speed.peak else f"; its {speed.dtype} peak is not known: no MFU"
    return "\n".join(
        [
            f"model    {config.model.preset}, {parameters:,} parameters, "
            f"{speed.flops_per_token / 1e6:,.1f} MFLOP a token",
            *corpus.lines(plan),
            *corpus.lines_on_bytes(),
            *(f"plan     {line}" for line in plan.describe().splitlines()),
            *(f"plan     {line}" for line in describe(to_flat(to_plain(config)))),
            f"device   {machine['processes']} x {machine['device']}, precision "
            f"{machine['mixed_precision']}, {machine['threads_per_process']} threads{unknown}",
        ]
    )


def identity(config: Config, plan: Plan, corpus: Corpus, speed: Speed) -> dict[str, Any]:
    """What is trained and on what, as JSON: figures that two runs can be compared by."""
    tokenizer = corpus.tokenizer
    return {
        "model": {
            "parameters": parameter_counts(config.model, corpus.vocab_size)["total"],
            "vocab_size": corpus.vocab_size,
            "flops_per_token": speed.flops_per_token,
        },
        "data": {
            "fingerprint": corpus.fingerprint,
            "tokenizer": tokenizer.kind,
            "tokenizer_fingerprint": tokenizer.fingerprint,
            "lines": [redact(line.removeprefix("data").strip()) for line in corpus.lines(plan)],
        },
    }


def record_run(
    config: Config, plan: Plan, accelerator: Accelerator, corpus: Corpus, speed: Speed, step: int
) -> str:
    """Save `config.yaml` and add this launch to `run.json`; returns the first lines of the run.

    Only for the main process.
    """
    out = Path(config.out_dir)
    machine = describe_machine(accelerator)
    write_file(out / "config.yaml", [to_yaml(config).encode()])
    this = {
        "step": step,
        "command": command_line(sys.argv),
        "plan": asdict(plan),
        **machine,
        **identity(config, plan, corpus, speed),
    }
    content = {"launches": [*RunFolder(out).launches, this]}
    write_file(out / "run.json", [json.dumps(content, indent=1).encode()])
    return describe_run(config, plan, corpus, speed, machine)
