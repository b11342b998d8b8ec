"""How fast a run will be: as told, as an earlier run was, or by an assumed share of the peak."""

import contextlib
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel_gpt.commands.plan import PlanCommand
from accel_gpt.commands.plan_vocabulary import folders, inherit_known, vocabulary
from accel_gpt.config.experiment import Config
from accel_gpt.config.parse import load_config
from accel_gpt.cost.flops import flops_per_token, mfu
from accel_gpt.cost.machine import Machine
from accel_gpt.errors import UserError, require
from accel_gpt.files import load_json, read_json, read_text

ASSUMED_MFU = 0.4  # assumption: llm.c and nanoGPT report 0.4 to 0.5 for GPT-2 on A100 and H100
FORWARD_SHARE = 1 / 3  # of the FLOPs of a training step: the backward pass takes two


@dataclass(frozen=True)
class Pace:
    """Tokens per second of all devices together; None: nothing says how many."""

    tokens_per_second: float | None
    source: str
    mfu: float | None = None  # where the peak is known


def pace(asked: PlanCommand, config: Config, vocab_size: int, machine: Machine) -> Pace:
    """The speed of a run on `machine`."""
    work = flops_per_token(config.model, vocab_size)
    peak = machine.peak(config.train.matmul_precision)
    if asked.tokens_per_second:
        rate, source = asked.tokens_per_second, "--tokens_per_second"
    elif asked.measured:
        rate, source = like(asked.measured, work, vocab_size, machine.devices)
    else:
        require(
            not asked.mfu or peak is not None,
            f"--mfu {asked.mfu} is a share of a peak, and none is known for {machine.spoken()}; "
            "give --tokens_per_second",
        )
        if peak is None:
            return Pace(None, "not known; give --tokens_per_second or --measured RUN")
        reached = asked.mfu or ASSUMED_MFU
        rate, source = (
            reached * peak * machine.devices / work,
            "--mfu" if asked.mfu else "by an assumed MFU",
        )
    share = mfu(rate, work, peak, machine.devices) if peak else None
    return Pace(rate, source, share)


def like(run: str, work: float, vocab_size: int, devices: int) -> tuple[float, str]:
    """Tokens per second at the FLOP/s for each process that a run reached."""
    folder = Path(run)
    rates = measured_rates(folder)
    config = load_config([str(folder / "config.yaml")], "accel-gpt plan --measured", inherit_known)
    with contextlib.suppress(UserError):  # its data has gone: ours is as good a guess
        vocab_size = vocabulary(config, None)[0]
    try:
        launches = read_json(folder / "run.json")["launches"]
        processes = int(launches[-1]["processes"])
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        raise UserError(f"run.json of {run} does not say how many processes it had") from None
    theirs = flops_per_token(config.model, vocab_size)
    return statistics.median(rates) * theirs / work * devices / processes, f"median of {run}"


def measured_rates(folder: Path) -> list[float]:
    """perf/tokens_per_second of each line of metrics that has it; `UserError` where none has."""
    try:
        lines = read_text(folder / "metrics.jsonl").splitlines()
    except (OSError, ValueError):
        raise UserError(
            f"--measured {folder} has no metrics.jsonl that can be read; give the folder of a run"
        ) from None
    found: list[float] = []
    for line in lines:
        try:
            record: Any = load_json(line)
            found.append(float(record["perf/tokens_per_second"]))
        except (ValueError, KeyError, TypeError):
            continue  # a line of an evaluation alone, or one that is being written
    require(bool(found), f"{folder}/metrics.jsonl has no perf/tokens_per_second yet")
    return found[1:] or found  # the first counts what only happens once


def evaluation_tokens(config: Config, steps: int) -> int | None:
    """Tokens that all evaluations read; None where they are whole splits that are not there yet."""
    each, train = config.eval.tokens, [str(folder) for folder in folders(config)]
    val = config.data.val
    held = list(val.values()) if isinstance(val, Mapping) else [val] if val else train
    sets = [[place] for place in held] if isinstance(val, Mapping) else [held]
    read = [tokens_read(train, "train", each), *(tokens_read(s, "val", each) for s in sets)]
    last = tokens_read(held, "val", None) if config.eval.whole_at_end else 0
    if last is None or None in read:
        return None
    times = -(-steps // config.eval.every) if config.eval.every else 1
    return times * sum(tokens or 0 for tokens in read) + last


def tokens_read(places: list[str], split: str, budget: int | None) -> int | None:
    """Tokens of a split of all `places` together, at most `budget`; None: not known."""
    indexes = [Path(place) for place in places if (Path(place) / "dataset.json").is_file()]
    if not places or len(indexes) < len(places):
        return budget
    from accel_gpt.data.shards import read_index

    shards = [shard for folder in indexes for shard in read_index(folder)["splits"][split]]
    whole = sum(int(shard["tokens"]) for shard in shards)
    return whole if budget is None else min(budget, whole)
