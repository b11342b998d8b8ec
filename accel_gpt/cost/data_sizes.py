"""Estimate vocabulary size and numbers of tokens from a config, before training opens its data.

Needs no torch.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from accel_gpt.config.budget import PLANNED_SHARE, fit, with_budget
from accel_gpt.config.costs import Costs, due_steps
from accel_gpt.config.experiment import Config
from accel_gpt.config.options import duration
from accel_gpt.config.vocabulary import tokenizer_vocab_size
from accel_gpt.cost.forecast import FORWARD_SHARE
from accel_gpt.data.index import INDEX, read_index
from accel_gpt.data.remote import is_url
from accel_gpt.data.sources import open_data, train_paths, val_paths
from accel_gpt.data.tokenizer import named_tokenizer
from accel_gpt.errors import UserError

PRINTABLE = 96  # printable ASCII and the line end; assumption for `chars` before the text is read


def vocabulary_size(config: Config, given: int | None) -> tuple[int, str]:
    """Return the vocabulary size, and the option or file that it comes from.

    `given`: the value of --vocab_size. Raises `UserError` if the size is not known.
    """
    data = config.data
    if given:
        return given, "--vocab_size"
    if config.model.vocab_size:
        return config.model.vocab_size, "model.vocab_size"
    for source in train_paths(data) if data.train else ():
        if Path(source.path, INDEX).is_file():
            return read_index(Path(source.path)).vocab_size, source.path
    name = data.tokenizer
    if name is None and data.prepare.source:
        name = data.prepare.tokenizer
    if name is not None:
        return tokenizer_size(config, name)
    for source in train_paths(data):
        if is_url(source.path) or Path(source.path).is_dir():
            _, tokenizer = open_data(source.path, "train", data)
            return tokenizer.vocab_size, source.path
    raise UserError(
        f"the vocabulary size is not known, because {data.train} is not prepared; set "
        "model.vocab_size or data.tokenizer"
    )


def tokenizer_size(config: Config, name: str) -> tuple[int, str]:
    """Return the vocabulary size of the tokenizer `name`, and where it comes from."""
    prepare = config.data.prepare
    known = tokenizer_vocab_size(name, prepare.vocab_size)
    if known:
        return known, f"tokenizer {name}"
    if name == "chars":
        return PRINTABLE, "assumption for chars; prepare the data, or set --vocab_size"
    if name.endswith(".json") and not Path(name).exists():
        return prepare.vocab_size, f"data.prepare.vocab_size: {name} does not exist yet"
    return named_tokenizer(name).vocab_size, name


# --------------------------------------------------------------------------- numbers of tokens


def evaluation_tokens(config: Config, steps: int) -> int | None:
    """Count the tokens that all evaluations of a run of `steps` steps read.

    Returns None if they read whole splits that are not prepared yet.
    """
    train = [source.path for source in train_paths(config.data)]
    val_sets = [[source.path] for source in val_paths(config.data)] or [train]
    each = split_tokens(train, "train", config.eval.train_tokens)
    if each is None:
        return None
    for folders in val_sets:
        tokens = split_tokens(folders, "val", config.eval.tokens)
        if tokens is None:
            return None
        each += tokens
    total = len(due_steps(config.eval.every, steps)) * each
    if config.eval.whole_at_end:
        every_folder = [folder for folders in val_sets for folder in folders]
        whole = split_tokens(every_folder, "val", limit=None)
        if whole is None:
            return None
        total += whole
    return total


def with_expected_length(config: Config, tokens_per_second: float | None) -> Config:
    """Return `config` with the steps that its `train.budget` comes to at a speed.

    Leaves out the start, saves, samples and HellaSwag. Returns `config` unchanged if it has no
    budget, or if the speed is unknown.
    """
    seconds = duration("train.budget", config.train.budget)
    if seconds is None or not tokens_per_second:
        return config
    once = replace(config, eval=replace(config.eval, whole_at_end=False))
    each = evaluation_tokens(once, 1) or 0
    of_whole = (evaluation_tokens(config, 1) or each) - each
    costs = Costs(
        step=config.train.tokens_per_step / tokens_per_second,
        evaluation=FORWARD_SHARE * each / tokens_per_second,
        last_evaluation=FORWARD_SHARE * of_whole / tokens_per_second,
    )
    return with_budget(config, fit(config, costs, PLANNED_SHARE * seconds))


def split_tokens(folders: Sequence[str], split: str, limit: int | None) -> int | None:
    """Count the tokens in a split of all `folders` together, up to `limit`.

    Returns `limit` if a folder is not prepared yet.
    """
    if not folders:
        return limit
    for folder in folders:
        if not Path(folder, INDEX).is_file():
            return limit
    whole = 0
    for folder in folders:
        for shard in read_index(Path(folder)).splits.get(split, ()):
            whole += shard.tokens
    return whole if limit is None else min(limit, whole)
