"""What a run is built from: its data, its initial state, its model and optimizer."""

import gc

from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType
from torch import nn

from accel_gpt.config.data import TextStream
from accel_gpt.config.experiment import Config, TrainConfig
from accel_gpt.config.parse import to_flat, to_plain
from accel_gpt.data.corpus import Corpus, open_shards
from accel_gpt.model.gpt import GPT
from accel_gpt.optim.groups import make_optimizer
from accel_gpt.training.accelerator import code_versions
from accel_gpt.training.compiler import use_compile_cache
from accel_gpt.training.engine import check_optimizer
from accel_gpt.training.state import TrainState


def open_corpus(config: Config) -> Corpus:
    """Open what `data.train` names: prepared shards, or text that is tokenized while training."""
    if isinstance(config.data.train, TextStream):
        from accel_gpt.text.streaming import open_text

        return open_text(config)
    return open_shards(config)


def new_state(config: Config, corpus: Corpus, world_size: int) -> TrainState:
    """The state of a run before its first step."""
    return TrainState(
        world_size=world_size,
        tokenizer_fingerprint=corpus.tokenizer.fingerprint,
        config=to_flat(to_plain(config)),
        versions=code_versions(),
        **corpus.state_dict(),
    )


def set_up_model(gpt: GPT, train: TrainConfig) -> None:
    """Set activation checkpointing and torch.compile of `gpt`, before Accelerate wraps it."""
    gpt.recompute = train.activation_checkpointing == "blocks"
    if train.compile is True:
        use_compile_cache()
        gpt.compile()  # in place: no wrapper, the names of the weights stay


def wrap(
    config: Config, accelerator: Accelerator, gpt: GPT
) -> tuple[nn.Module, AcceleratedOptimizer]:
    """The model, set up as in `config`, and its optimizer, as Accelerate wraps them."""
    set_up_model(gpt, config.train)
    optimizer = make_optimizer(gpt, config.optim, config.train.compile is True)
    # with a device_placement Accelerate does not look for FSDP's tensors: 0.6 s of start-up
    alone = accelerator.distributed_type == DistributedType.NO
    placement = [True, True] if alone else None
    model, wrapped = accelerator.prepare(gpt, optimizer, device_placement=placement)
    check_optimizer(gpt, wrapped)
    gc.collect()  # what there is now lives to the end: the garbage collector need not search it
    gc.freeze()
    return model, wrapped
