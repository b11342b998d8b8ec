"""What a run is built from: its corpus, its model, its speedometer, and the record of both."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from accelerate import Accelerator

from accel_gpt.config import Config
from accel_gpt.data.loader import Loader
from accel_gpt.data.order import Order
from accel_gpt.data.shards import Split, open_split, write_file
from accel_gpt.data.tokenizer import Tokenizer, load_tokenizer
from accel_gpt.errors import DataError, UserError
from accel_gpt.model.cost import flops_per_token, mfu, parameter_counts, peak_flops
from accel_gpt.model.gpt import GPT
from accel_gpt.parse import to_flat, to_plain, to_yaml
from accel_gpt.plan import Plan
from accel_gpt.run.checkpoint import TrainState, find_checkpoint, load_model
from accel_gpt.run.environment import describe_machine, device_name, memory_gb


@dataclass(frozen=True)
class Corpus:
    """Tokenized text, its tokenizer and the order in which it is read."""

    tokenizer: Tokenizer
    train: Split
    val: Split
    order: Order
    vocab_size: int  # of the model: the tokenizer's, or more
    token_bytes: npt.NDArray[np.int64]  # (V,) UTF-8 bytes that each token stands for

    def new_state(self, config: Config, world_size: int) -> TrainState:
        """The state of a run that has not begun."""
        return TrainState(
            world_size=world_size,
            data_fingerprint=self.train.fingerprint,
            tokenizer_fingerprint=self.tokenizer.fingerprint,
            config=to_flat(to_plain(config)),
        )

    def loader(self, plan: Plan, accelerator: Accelerator, position: int) -> Loader:
        """This process's micro-batches from `position`, a number of windows."""
        rank, device = accelerator.process_index, accelerator.device
        return Loader(self.train, self.order, plan, self.vocab_size, rank, device, position)


def open_corpus(config: Config) -> Corpus:
    """Open `data.train` and `data.val`; `DataError` where they do not fit each other."""
    train = open_split(Path(config.data.train), "train")
    val = open_split(Path(config.data.val or config.data.train), "val")
    tokenizer = load_tokenizer(train.folder)
    for split in (train, val):
        if split.tokenizer_fingerprint != tokenizer.fingerprint:
            raise DataError(
                f"the {split.name} shards of {split.folder} were made with another tokenizer "
                f"({split.tokenizer_kind}, {split.tokenizer_fingerprint[:12]}) than the run's "
                f"({tokenizer.kind}, {tokenizer.fingerprint[:12]}); prepare them again"
            )
    vocab_size = config.model.vocab_size or tokenizer.vocab_size
    if vocab_size < tokenizer.vocab_size:
        raise UserError(
            f"model.vocab_size is {vocab_size:,} but the tokenizer of {train.folder} has "
            f"{tokenizer.vocab_size:,} tokens; leave model.vocab_size unset or raise it"
        )
    token_bytes = np.zeros(vocab_size, dtype=np.int64)
    token_bytes[: tokenizer.vocab_size] = tokenizer.token_bytes()
    order = Order(
        train.lengths,
        config.model.block_size,
        config.data.shuffle,
        config.seed,
        train.fingerprint,
    )
    return Corpus(tokenizer, train, val, order, vocab_size, token_bytes)


def build_model(config: Config, corpus: Corpus, resuming: bool) -> GPT:
    """A new model; unless its weights are about to be restored, maybe started from another's."""
    model = GPT(config.model, corpus.vocab_size)
    source = config.model.init_from
    if resuming or source == "scratch":
        return model
    other, tokenizer = load_model(find_checkpoint(Path(source)))
    if tokenizer.fingerprint != corpus.tokenizer.fingerprint:
        raise UserError(
            f"model.init_from {source} has another tokenizer ({tokenizer.kind}) than the data "
            f"({corpus.tokenizer.kind}); prepare the data with --tokenizer of its tokenizer.json"
        )
    wanted, found = model.state_dict(), other.state_dict()
    for name in sorted(wanted.keys() | found.keys()):
        shapes = [tuple(s[name].shape) if name in s else None for s in (found, wanted)]
        if shapes[0] != shapes[1]:
            raise UserError(
                f"model.init_from {source} is another model: its {name} has shape "
                f"{shapes[0]}, this config asks for {shapes[1]}"
            )
    model.load_state_dict(found)
    return model


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


def describe_run(config: Config, plan: Plan, corpus: Corpus, speed: Speed, machine: Any) -> str:
    """The first lines of a run."""
    parameters = parameter_counts(config.model, corpus.vocab_size)["total"]
    epochs = plan.max_steps * plan.sequences_per_step / corpus.order.windows_per_epoch
    unknown = "" if speed.peak else f"; its {speed.dtype} peak is not known: no MFU"
    return "\n".join(
        [
            f"model    {config.model.preset}, {parameters:,} parameters, "
            f"{speed.flops_per_token / 1e6:,.1f} MFLOP a token",
            f"data     {config.data.train}: {corpus.train.tokens:,} train and "
            f"{corpus.val.tokens:,} val tokens, tokenizer {corpus.tokenizer.kind} of "
            f"{corpus.tokenizer.vocab_size:,}; {epochs:.2f} epochs",
            *(f"plan     {line}" for line in plan.describe().splitlines()),
            f"device   {machine['processes']} x {machine['device']}, precision "
            f"{machine['mixed_precision']}, {machine['threads_per_process']} threads{unknown}",
        ]
    )


def record_run(
    config: Config, plan: Plan, accelerator: Accelerator, corpus: Corpus, speed: Speed, step: int
) -> str:
    """Save `config.yaml` and add this launch to `run.json`; returns the first lines of the run.

    Only for the main process.
    """
    out = Path(config.out_dir)
    machine = describe_machine(accelerator)
    write_file(out / "config.yaml", [to_yaml(config).encode()])
    record = out / "run.json"
    launches = json.loads(record.read_text(encoding="utf-8")) if record.is_file() else {}
    launches.setdefault("launches", []).append({"step": step, "plan": asdict(plan), **machine})
    write_file(record, [json.dumps(launches, indent=1).encode()])
    return describe_run(config, plan, corpus, speed, machine)
