"""Options that earlier versions had, with what to use in their place.

A `config.yaml` written by an earlier version still holds them. There the old default is ignored;
any other value, and the option on the command line, is an error that gives the advice.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from accel_gpt.errors import UserError


class Removed(NamedTuple):
    """An option that is gone."""

    default: Any
    advice: str


FINETUNE_WITH_TRL = (
    "export the model with accel-gpt export, then finetune it with TRL's SFTTrainer; "
    "docs/how-to/finetune.md has an example"
)
SAVE_AS_SAFETENSORS = (
    "open the model with transformers and write it with save_pretrained, which writes safetensors"
)
DEDUPLICATE_FIRST = "drop duplicates with datatrove before you prepare the text"
PREPARE_SHARES = (
    "prepare a share of the files on each machine, each into another folder, and list the "
    "folders in data.train"
)
COMPARE_BITS_PER_BYTE = "tokenize the text with accel-gpt prepare and compare bits per byte"
AFTER_TRAINING = "run accel-gpt evaluate RUN --tasks TASK,... after the training"

REMOVED: Mapping[str, Removed] = MappingProxyType(
    {
        "data.allow_change": Removed(
            default=False,
            advice="list data.train in checkpoint.allow_change",
        ),
        "data.prepare.dedupe": Removed(default=False, advice=DEDUPLICATE_FIRST),
        "data.prepare.loss_on": Removed(default="text", advice=FINETUNE_WITH_TRL),
        "eval.tasks": Removed(default=[], advice=AFTER_TRAINING),
        "eval.tasks_every": Removed(default=0, advice=AFTER_TRAINING),
        "eval.tasks_limit": Removed(default=None, advice=AFTER_TRAINING),
        "eval.tasks_path": Removed(default=None, advice=AFTER_TRAINING),
        "log.dashboard_port": Removed(
            default=None,
            advice="run tensorboard --logdir RUN --port N beside the training",
        ),
        "log.layer_stats_every": Removed(
            default=0,
            advice="log norms from a forward hook in a script of your own",
        ),
        "model.allow_pickle": Removed(default=False, advice=SAVE_AS_SAFETENSORS),
    }
)

# Options of commands, by name
REMOVED_OPTIONS: Mapping[str, str] = MappingProxyType(
    {
        "allow_pickle": SAVE_AS_SAFETENSORS,
        "limit": "use --hellaswag_limit or --tasks_limit",
        "include_path": "use --tasks_path",
        "dedupe": DEDUPLICATE_FIRST,
        "loss_on": FINETUNE_WITH_TRL,
        "measure": "measure the speed of this machine with accel-gpt bench CONFIG",
        "merge": "list the folders in data.train, which trains on a mixture of them",
        "rank": PREPARE_SHARES,
        "world": PREPARE_SHARES,
        "csv": "metrics.csv in the folder of each run has the metrics",
        "png": "take a screenshot of the page",
        "text": COMPARE_BITS_PER_BYTE,
        "tokenizers": COMPARE_BITS_PER_BYTE,
    }
)

# Values of options, by the last part of the key and the value
REMOVED_VALUES: Mapping[tuple[str, str], str] = MappingProxyType(
    {
        ("source", "shards"): "name the folder of shards in data.train, which reads the formats of "
        "other projects as they are; a folder that was made from shards needs no source",
    }
)
# A mapping in data.train with one of these keys named text to tokenize while training.
STREAMED_KEYS = frozenset({"streaming", "dataset"})
STREAMED_TEXT = (
    "data.train streams text, but text is no longer tokenized while training; prepare it with "
    "data.prepare (its source dataset streams the Hub), or name remote token shards in data.train "
    "(hf://, s3://, https://)"
)
REMOVED_COMMANDS: Mapping[str, str] = MappingProxyType(
    {"config": "compare files that accel-gpt train --dump_config CONFIG writes with diff"}
)


def removed_value(key: str, value: object) -> str | None:
    """Return the sentence about a value of `key` that earlier versions had, None for others."""
    if key == "data.train" and isinstance(value, Mapping) and value.keys() & STREAMED_KEYS:
        return STREAMED_TEXT
    advice = REMOVED_VALUES.get((key.rpartition(".")[2], str(value)))
    return f"{key} is {value}, which no longer exists; {advice}" if advice else None


def is_removed(key: str, value: object, where: str) -> bool:
    """Return whether `key` is a removed option that still has its old default.

    Raises `UserError` with what to use instead if it has another value.
    """
    removed = REMOVED.get(key)
    if removed is None:
        return False
    if value != removed.default:
        raise UserError(f"{key} {where} no longer exists; {removed.advice}")
    return True


def check_not_removed(option: str) -> None:
    """Raise `UserError` with what to use instead if earlier versions had an option."""
    if option in REMOVED:
        raise UserError(f"--{option} no longer exists; {REMOVED[option].advice}")
    if option in REMOVED_OPTIONS:
        raise UserError(f"--{option} no longer exists; {REMOVED_OPTIONS[option]}")
