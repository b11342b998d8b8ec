"""List the options that earlier versions had, with advice on what to use instead.

A `config.yaml` that an earlier version wrote still holds them. The old default is ignored there.
Any other value raises an error with the advice, and so does the option on the command line.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from accel_gpt.errors import UserError


class Removed(NamedTuple):
    """An option that no longer exists."""

    default: Any
    advice: str


FINETUNE_WITH_TRL = (
    "export the model with accel-gpt export, then finetune it with TRL's SFTTrainer; "
    "docs/how-to/finetune.md has an example"
)
SAVE_AS_SAFETENSORS = (
    "open the model with transformers and save it as safetensors with save_pretrained"
)
DEDUPLICATE_FIRST = "drop duplicates with datatrove before you prepare the text"
PREPARE_SHARES = (
    "prepare a share of the files on each machine, into a separate folder, and list the folders in "
    "data.train"
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
            advice="run tensorboard --logdir RUN --port N during training",
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
        "halve_at": "list seeds with --seed; a setting whose answer is clear takes no more",
        "random": "list the values to compare",
        "limit": "use --hellaswag_limit or --tasks_limit",
        "include_path": "use --tasks_path",
        "dedupe": DEDUPLICATE_FIRST,
        "loss_on": FINETUNE_WITH_TRL,
        "measure": "measure the speed of this machine with accel-gpt bench CONFIG",
        "merge": "list the folders in data.train to train on a mixture of them",
        "rank": PREPARE_SHARES,
        "world": PREPARE_SHARES,
        "csv": "metrics.csv in the folder of each run has the metrics",
        "png": "take a screenshot of the page",
        "text": COMPARE_BITS_PER_BYTE,
        "tokenizers": COMPARE_BITS_PER_BYTE,
    }
)

# Values that no longer exist: the key maps the last part of an option's key and the value
REMOVED_VALUES: Mapping[tuple[str, str], str] = MappingProxyType(
    {
        ("source", "shards"): "set data.train to the folder of shards and leave "
        "data.prepare.source out; formats of other projects are read directly",
    }
)
# Earlier versions tokenized text while training if data.train was a mapping with one of these keys.
STREAMED_KEYS = frozenset({"streaming", "dataset"})
STREAMED_TEXT = (
    "data.train streams text, but text is no longer tokenized while training; prepare it with "
    "data.prepare (source dataset streams from the Hub), or set data.train to remote token shards "
    "(hf://, s3://, https://)"
)
REMOVED_COMMANDS: Mapping[str, str] = MappingProxyType(
    {"config": "write both configs with accel-gpt train --dump_config and compare them with diff"}
)


def removed_value(key: str, value: object) -> str | None:
    """Return an error message if only earlier versions had this value of `key`, else None."""
    if key == "data.train" and isinstance(value, Mapping) and value.keys() & STREAMED_KEYS:
        return STREAMED_TEXT
    advice = REMOVED_VALUES.get((key.rpartition(".")[2], str(value)))
    return f"{key} is {value}, but this value no longer exists; {advice}" if advice else None


def is_removed(key: str, value: object, where: str) -> bool:
    """Return whether `key` is a removed option with its old default.

    Raises `UserError` with advice if a removed option has another value.
    """
    removed = REMOVED.get(key)
    if removed is None:
        return False
    if value != removed.default:
        raise UserError(f"{key} {where} no longer exists; {removed.advice}")
    return True


def check_not_removed(option: str) -> None:
    """Raise `UserError` with advice if only earlier versions had the option."""
    if option in REMOVED:
        raise UserError(f"--{option} no longer exists; {REMOVED[option].advice}")
    if option in REMOVED_OPTIONS:
        raise UserError(f"--{option} no longer exists; {REMOVED_OPTIONS[option]}")
