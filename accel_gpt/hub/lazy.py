"""What training takes from `hub/`, imported only if the config requests it."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from accel_gpt.config.experiment import Config
from accel_gpt.data.corpus import Corpus
from accel_gpt.model.gpt import GPT

if TYPE_CHECKING:
    from accel_gpt.hub.background_push import BackgroundPush


def inherit(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """The options that `model.init_from` adds."""
    from accel_gpt.hub import pretrained

    return pretrained.inherit(options)


def download_checkpoint(config: Config) -> Config:
    """`config` with the local folder of a checkpoint that `checkpoint.resume` names on the Hub."""
    if not config.checkpoint.resume.startswith("hf://"):
        return config
    from accel_gpt.hub import load

    return load.download_checkpoint(config)


def load_initial_model(
    config: Config, corpus: Corpus, resuming: bool, log: Callable[[str], None]
) -> GPT:
    """A new model, or the one that `model.init_from` names unless its weights are restored next."""
    if resuming or config.model.init_from == "scratch":
        return GPT(config.model, corpus.vocab_size)
    from accel_gpt.hub import load

    return load.load_initial_model(config, corpus, log)


def start_push(
    config: Config, max_steps: int, log: Callable[[str], None]
) -> "BackgroundPush | None":
    """Push the checkpoints of a run to the Hub while it trains, if `hub.push` requests it."""
    if config.hub.push == "never":
        return None
    from accel_gpt.hub import background_push

    return background_push.BackgroundPush(config, max_steps, log)
