"""Lay out the stages of a run: config, first step and position in the data of each. No torch.

    stages:
      - {from: 0.5, model.block_size: 512}
      - {from: 0.9, data.train: [{path: data/best, weight: 0.7}, {path: data/web, weight: 0.3}]}

Positions in the data count whole sequences of `model.block_size` + 1 tokens. A stage with shorter
sequences cuts each of them into equal pieces, so that a step reads the same tokens at any length.
"""

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

from accel_gpt.config.experiment import Config, Stage
from accel_gpt.errors import require


class Span(NamedTuple):
    """A stage of a run of a known length."""

    config: Config  # without `stages`
    first_step: int  # steps that are complete when it begins
    sequences: int  # whole sequences that are read before it
    tokens: int  # that are read before it


def stage_configs(config: Config) -> list[Config]:
    """Return the config of each stage, without `stages`; the first begins the run."""
    present = replace(config, stages=())
    found = [] if begins_at_once(config) else [present]
    for stage in config.stages:
        present = with_options(present, stage.options)
        found.append(present)
    return found


def longest_stage(config: Config) -> int:
    """Return the number of the first stage with the longest sequences, from 0."""
    lengths = [stage.model.block_size for stage in stage_configs(config)]
    return lengths.index(max(lengths))


def begins_at_once(config: Config) -> bool:
    """Return whether the first of the stages begins the run."""
    return bool(config.stages) and config.stages[0].from_ == 0


def with_options(config: Config, options: Mapping[str, Any]) -> Config:
    """Return `config` with other values of dotted keys."""
    for key, value in options.items():
        section, _, name = key.partition(".")
        config = replace(config, **{section: replace(getattr(config, section), **{name: value})})
    return config


def first_steps(config: Config, steps: int) -> list[int]:
    """Return the completed steps at which each stage of a run of `steps` steps begins."""
    found = [] if begins_at_once(config) else [0]
    for stage in config.stages:
        share = isinstance(stage.from_, float)
        found.append(round(stage.from_ * steps) if share else int(stage.from_))
    return found


def spans(config: Config, steps: int) -> list[Span]:
    """Return the stages of a run of `steps` steps.

    Raises `UserError` unless each has a step, and reads whole sequences. If the config has a
    `train.budget`, the length of the run is not known yet, and a stage may have no step.
    """
    firsts = first_steps(config, steps)
    is_known = config.train.budget is None
    texts = [f"the stage from {stage.from_}" for stage in config.stages]
    if begins_at_once(config):
        texts.pop(0)
    texts.insert(0, "the start of the run")
    for number, (before, first) in enumerate(pairwise(firsts), start=1):
        require(
            before < first or not is_known,
            f"{texts[number]} begins at step {first:,}, but {texts[number - 1]} at step "
            f"{before:,}; each must begin after the one before it",
        )
    require(
        firsts[-1] < steps or not is_known,
        f"{texts[-1]} begins at step {firsts[-1]:,}, but the run has {steps:,} steps",
    )
    longest = config.model.block_size
    found: list[Span] = []
    for text, first, one in zip(texts, firsts, stage_configs(config), strict=True):
        block_size = one.model.block_size
        require(
            longest % block_size == 0,
            f"{text}: model.block_size is {block_size:,}, but must divide the longest, {longest:,}",
        )
        tokens = one.train.tokens_per_step
        require(
            not config.stages or tokens % longest == 0,
            f"{text}: train.tokens_per_step is {tokens:,}, but must be a multiple of the longest "
            f"model.block_size, {longest:,}",
        )
        read = 0
        if found:
            last = found[-1]
            read = last.tokens + (first - last.first_step) * last.config.train.tokens_per_step
        found.append(Span(one, first, read // longest, read))
    return found


def with_longest(config: Config) -> Config:
    """Return `config` with the longest sequence of all stages as `model.block_size`.

    The length that it had becomes an option of the first stage. Raises `UserError` if the table of
    positions has no rows for it.
    """
    own = config.model.block_size
    longest = max(stage.model.block_size for stage in stage_configs(config))
    if longest <= own:
        return config
    require(
        config.model.position == "rope",
        f"stages set model.block_size to {longest:,}, but the table of model.position learned has "
        f"{own:,} positions; set model.block_size to {longest:,}, and shorter ones in stages",
    )
    stages = config.stages
    first = Stage(0, {"model.block_size": own})
    if begins_at_once(config):
        first = Stage(0, {**first.options, **stages[0].options})
        stages = stages[1:]
    model = replace(config.model, block_size=longest)
    return replace(config, model=model, stages=(first, *stages))


def span_at(config: Config, steps: int, step: int) -> Span:
    """Return the stage that makes the update after `step` completed updates."""
    return [one for one in spans(config, steps) if one.first_step <= step][-1]


def steps_of_stages(
    config: Config, steps: int, first: int = 0, last: int | None = None
) -> list[int]:
    """Count the steps of each stage in a run of `steps` steps, from `first` to before `last`.

    Takes any length: a stage that would begin too late has none.
    """
    last = steps if last is None else last
    edges = [min(max(edge, first), last) for edge in (*first_steps(config, steps), steps)]
    return [max(end - start, 0) for start, end in pairwise(edges)]


def total_tokens(config: Config, steps: int, last: int | None = None) -> int:
    """Return the tokens of a run of `steps` steps, or of its steps before `last`."""
    sizes = [one.train.tokens_per_step for one in stage_configs(config)]
    counts = steps_of_stages(config, steps, last=last)
    return sum(count * size for count, size in zip(counts, sizes, strict=True))
