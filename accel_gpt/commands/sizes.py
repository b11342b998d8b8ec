"""`accel-gpt plan` without a config: which size of model a text is enough for, and a GPU trains.

Each row is the config `fast_124m` at another depth, from which the length of the run follows. All
values are computed; docs/get-started/what-can-i-train.md has measured ones beside them. No torch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import log
from typing import Any

from accel_gpt.commands.options import PlanCommand
from accel_gpt.commands.plan import NEEDS_GPU, has_one_price, make_machine, price_of
from accel_gpt.commands.resolve import load_config
from accel_gpt.config.experiment import Config
from accel_gpt.config.plan import USEFUL_EPOCHS, make_plan, with_size
from accel_gpt.console import table, write_out
from accel_gpt.cost.forecast import expected_speed, run_hours, vocabulary_size
from accel_gpt.cost.memory import largest_size
from accel_gpt.errors import require
from accel_gpt.files import strict_json
from accel_gpt.model.sizes import flops_per_token, parameter_counts

DEPTHS = (4, 6, 8, 10, 12, 16, 20, 24, 32)
GPUS = ("rtx 4060", "rtx 3060", "rtx 4080", "rtx 4090", "h100")  # 8, 12, 16, 24 and 80 GB
# OpenWebText with GPT-2's tokenizer: 39.8 GB (its card on the Hub), 9.04 billion tokens (nanoGPT)
BYTES_PER_TOKEN = 4.4
LARGEST_MICRO_BATCH = 32  # a larger one gains little on the GPUs that were measured


def run(options: PlanCommand) -> int:
    """Print the table, or its rows as JSON."""
    require(options.gpu is not None or not has_one_price(options), NEEDS_GPU)
    gpus = [options.gpu] if options.gpu else list(GPUS)
    rows = [row_of(options, depth, gpus) for depth in DEPTHS]
    write_out(
        strict_json(rows, indent=1) + "\n" if options.json else text_of(rows, options.devices)
    )
    return 0


def row_of(options: PlanCommand, depth: int, gpus: Sequence[str]) -> dict[str, Any]:
    """Compute a row as JSON values."""
    words = ["fast_124m", "--model.depth", str(depth), "--train.max_tokens", "null"]
    config = load_config(words, "accel-gpt plan")
    vocab_size, _ = vocabulary_size(config)
    plan = make_plan(config, 1)
    tokens = plan.max_steps * plan.tokens_per_step
    return {
        "depth": depth,
        "parameters": parameter_counts(config.model, vocab_size)["total_unpadded"],
        "tokens": tokens,
        "text_mb": tokens / USEFUL_EPOCHS * BYTES_PER_TOKEN / 1e6,
        "bits_per_byte": bits_per_byte(config.model.matrix_parameters(vocab_size), tokens),
        "gpus": {gpu: on_gpu(replace(options, gpu=gpu), config, vocab_size) for gpu in gpus},
    }


def on_gpu(options: PlanCommand, config: Config, vocab_size: int) -> dict[str, Any] | None:
    """Compute micro-batch, hours and cost on the devices of `options`; None if it does not fit."""
    machine = make_machine(options, config)
    make_plan(with_size(config, 1), machine.devices)  # raises if they cannot share the batch
    size = largest_size(config, vocab_size, machine)
    if size is None:
        return None
    config = with_size(config, min(size, LARGEST_MICRO_BATCH))
    speed = expected_speed(config, flops_per_token(config.model, vocab_size), machine)
    if speed is None:
        return None
    hours, _ = run_hours(config, make_plan(config, machine.devices).max_steps, speed)
    price = price_of(options)
    return {
        "micro_batch_size": config.train.micro_batch_size,
        "hours": hours,
        "cost": price and price * machine.devices * hours,
    }


def bits_per_byte(parameters: int, tokens: int) -> float:
    """Compute the loss of English web text after one epoch of `tokens` new tokens.

    Hoffmann et al. 2022, equation 10: GPTs trained with AdamW. The fast recipe should be lower.
    """
    nats: float = 1.69 + 406.4 / parameters**0.34 + 410.7 / tokens**0.28
    return nats / log(2) / BYTES_PER_TOKEN


def text_of(rows: Sequence[dict[str, Any]], devices: int) -> str:
    """Format the table for a number of GPUs; it fits into 80 columns."""
    command = "accel-gpt train"
    if devices > 1:
        command = f"accelerate launch --num_processes {devices} accel_gpt/train.py"
    head = ["depth", "size", "tokens", "text", "bits/byte", *rows[0]["gpus"]]
    return (
        f"{command} \\\n    fast_124m --model.depth DEPTH --train.max_tokens null \\\n"
        "    --train.micro_batch_size auto --data.train DATA\n\n"
        + table([head, *([*cells_of(row)] for row in rows)], *">" * len(head), gap=1)
        + f"\nGPUs: {devices}. text: enough if it is read {USEFUL_EPOCHS} times. bits/byte: on "
        "English web text,\nor lower. -: does not fit. Computed, times for an MFU of 40%.\n"
        "On a CPU, train quickstart (minutes) or laptop (hours).\n"
    )


def cells_of(row: dict[str, Any]) -> Iterator[str]:
    """Yield the cells of a row."""
    yield str(row["depth"])
    yield with_unit(row["parameters"] / 1e6, 1000, "M", "B")
    yield with_unit(row["tokens"] / 1e6, 1000, "M", "B")
    yield with_unit(row["text_mb"], 1000, "MB", "GB")
    yield f"{row['bits_per_byte']:.2f}"
    for found in row["gpus"].values():
        if found is None:
            yield "-"
        else:
            cost = "" if found["cost"] is None else f", {found['cost']:,.2f}"
            minutes, hours = 60 * found["hours"], found["hours"]
            short = with_unit(minutes, 60, " min", " h")
            yield (short if hours < 48 else f"{hours / 24:.1f} d") + cost


def with_unit(value: float, factor: int, unit: str, larger: str) -> str:
    """Format a value in `unit`, or in the `larger` unit, which is `factor` times as large."""
    if value < factor:
        return f"{value:.0f}{unit}"
    return f"{value / factor:.1f}{larger}"
