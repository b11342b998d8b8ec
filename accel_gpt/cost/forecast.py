"""Forecast the vocabulary, the speed of a machine, and the hours of a run at a speed. No torch.

docs/explanation/cost.md derives the formulas.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from accel_gpt.config.budget import PLANNED_SHARE, fit, with_budget
from accel_gpt.config.depth import tokenizer_vocab_size
from accel_gpt.config.experiment import Config
from accel_gpt.config.options import duration
from accel_gpt.config.plan import Costs
from accel_gpt.config.stages import spans, stage_configs, steps_of_stages
from accel_gpt.cost.memory import Machine
from accel_gpt.data.index import INDEX, read_index
from accel_gpt.data.sources import all_train_paths, open_data, train_paths, val_paths
from accel_gpt.data.tokenizer import named_tokenizer
from accel_gpt.errors import UserError
from accel_gpt.files import is_url
from accel_gpt.model.sizes import flops_per_token

FORWARD_SHARE = 1 / 3  # of the FLOPs of a training step
ASSUMED_MFU = 0.4  # assumption: llm.c and nanoGPT report 0.4 to 0.5 for GPT-2 on A100 and H100
# Activation checkpointing adds a forward pass, a third of the FLOPs, and reduces the MFU to 3 / 4.
SHARE_WITH_RECOMPUTATION = 3 / 4
PRINTABLE = 96  # printable ASCII and the line end; assumption for `chars` before the text is read


def vocabulary_size(config: Config) -> tuple[int, str]:
    """Return the vocabulary size, and the option or file that it comes from.

    Raises `UserError` if the size is not known.
    """
    data = config.data
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
        return PRINTABLE, "assumption for chars, before the text is read"
    if name.endswith(".json") and not Path(name).exists():
        return prepare.vocab_size, f"data.prepare.vocab_size: {name} does not exist yet"
    return named_tokenizer(name).vocab_size, name


# --------------------------------------------------------------------------- numbers of tokens


def evaluated_tokens(config: Config) -> int | None:
    """Count the tokens that an evaluation reads; None if a whole split is not prepared yet.

    The sources of the first stage share the tokens. Each source of a later stage evaluates all.
    """
    train = [source.path for source in train_paths(stage_configs(config)[0].data)]
    val_sets = [[source.path] for source in val_paths(config.data)]
    if not val_sets:
        later = [one.path for one in all_train_paths(config) if one.path not in train]
        val_sets = [train, *([path] for path in later)]
    splits = [split_tokens(train, "train", config.eval.train_tokens)]
    splits += [split_tokens(folders, "val", config.eval.tokens) for folders in val_sets]
    known = [tokens for tokens in splits if tokens is not None]
    return sum(known) if len(known) == len(splits) else None


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


# --------------------------------------------------------------------------- speed and hours


class StageWork(NamedTuple):
    """What a stage of a run computes."""

    config: Config  # of the stage
    first_step: int  # steps that are complete when it begins
    steps: int
    flops_per_token: int

    @property
    def tokens(self) -> int:
        """Return the tokens that the stage trains on."""
        return self.steps * self.config.train.tokens_per_step

    @property
    def flops(self) -> int:
        """Return the FLOPs of the stage."""
        return self.tokens * self.flops_per_token


def stage_work(config: Config, steps: int, vocab_size: int) -> list[StageWork]:
    """Return what each stage of a run of `steps` steps computes; one if there are no stages."""
    found = []
    for stage, count in zip(spans(config, steps), steps_of_stages(config, steps), strict=True):
        flops = flops_per_token(stage.config.model, vocab_size)
        found.append(StageWork(stage.config, stage.first_step, count, flops))
    return found


def relative_steps(config: Config) -> tuple[float, ...]:
    """Return the FLOPs of a step in each stage, as multiples of those in the first stage."""
    if not config.stages:
        return (1.0,)
    vocab_size = vocabulary_size(config)[0]
    flops = [
        stage.train.tokens_per_step * flops_per_token(stage.model, vocab_size)
        for stage in stage_configs(config)
    ]
    return tuple(one / flops[0] for one in flops)


def assumed_mfu(config: Config) -> float:
    """Return the MFU that the forecasts assume."""
    if config.train.activation_checkpointing == "blocks":
        return ASSUMED_MFU * SHARE_WITH_RECOMPUTATION
    return ASSUMED_MFU


def expected_speed(config: Config, flops_per_token: int, machine: Machine) -> float | None:
    """Return the tokens per second of all devices at the assumed MFU; None if it is unknown."""
    peak_flops = machine.peak(config.train.matmul_precision)
    if peak_flops is None:
        return None
    return assumed_mfu(config) * peak_flops * machine.devices / flops_per_token


def expected_costs(config: Config, tokens_per_second: float) -> Costs:
    """Return the seconds of a step and of the evaluations at the speed of the first stage.

    Leaves out the start, saves, samples and HellaSwag, and evaluations whose length is unknown.
    Steps of later stages take as much longer as they have more FLOPs.
    """
    first = stage_configs(config)[0]
    return Costs(
        step=first.train.tokens_per_step / tokens_per_second,
        evaluation=FORWARD_SHARE * (evaluated_tokens(config) or 0) / tokens_per_second,
        relative=relative_steps(config),
    )


def run_hours(config: Config, steps: int, tokens_per_second: float) -> tuple[float, float | None]:
    """Return the hours of a run of `steps` steps, and how many of them evaluations take.

    Evaluations whose length is unknown are left out. Their hours are then None.
    """
    costs = expected_costs(config, tokens_per_second)
    known = evaluated_tokens(config) is not None
    evaluations = costs.pauses(config, steps) / 3600 if known else None
    return costs.total(config, steps) / 3600, evaluations


def with_expected_length(config: Config, tokens_per_second: float | None) -> Config:
    """Return `config` with the steps that its `train.budget` comes to at a speed.

    Returns `config` unchanged if it has no budget, or if the speed is unknown.
    """
    seconds = duration("train.budget", config.train.budget)
    if seconds is None or not tokens_per_second:
        return config
    costs = expected_costs(config, tokens_per_second)
    return with_budget(config, fit(config, costs, PLANNED_SHARE * seconds))
