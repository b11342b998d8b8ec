"""`accel-gpt bench CONFIG`: measure tokens/s, MFU and memory of a config, and the hours of its run.

Runs `train.update` on random tokens in a temporary folder, without evaluations, samples,
checkpoints or trackers. If the config has stages, it measures the one with the longest sequences.
"""

import math
import statistics
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from accel_gpt.commands.clock import discarded, set_up_unseen, stage_alone, time_steps
from accel_gpt.commands.options import BenchCommand
from accel_gpt.commands.printing import write_report
from accel_gpt.config.data import PrepareConfig
from accel_gpt.config.experiment import Config
from accel_gpt.config.plan import make_plan
from accel_gpt.config.stages import longest_stage, stage_configs
from accel_gpt.cost.forecast import run_hours, vocabulary_size, with_expected_length
from accel_gpt.data.shards import token_dtype
from accel_gpt.data.tokenizer import BytesTokenizer, CharsTokenizer, Tokenizer
from accel_gpt.launch.machine import describe_machine, memory_gb
from accel_gpt.launch.process import keep_freed_memory
from accel_gpt.launch.ranks import explain_lost_rank
from accel_gpt.launch.resolve import resolve
from accel_gpt.launch.setup import join_same_ranks, meeting_watchdog
from accel_gpt.launch.stopping import (
    exiting_on_signals,
)
from accel_gpt.launcher import die_with_launcher, is_main, world_size
from accel_gpt.model.sizes import flops_per_token
from accel_gpt.prepare.shards import ShardWriter, write_index
from accel_gpt.train import Training

RANDOM_TOKENS = 2**22  # of a split, read again and again; 2 or 4 bytes each
DOCUMENT_TOKENS = 500  # between ends of documents; assumption
# Steps right after the start were up to 5 % slower in one run on a CPU, and equal in another; a
# long run has few of them. Assumption: they have ended after these seconds
WARM_UP_SECONDS = 3.0
Report = dict[str, Any]


def run(options: BenchCommand) -> int:
    """Measure the training step of a config on this machine."""
    keep_freed_memory()
    with exiting_on_signals():
        report = bench(options)
    if report is not None:
        write_report(report, options.json)
    return 0


def bench(options: BenchCommand) -> Report | None:
    """Measure the training step; returns None on all ranks but 0."""
    config = options.loaded
    die_with_launcher()
    vocab_size, source = vocabulary_size(config)
    steps = make_plan(config, world_size()).max_steps  # raises
    with explain_lost_rank(world_size()), tempfile.TemporaryDirectory() as out:
        measured = replace(
            discarded(config, out),
            train=replace(config.train, max_steps=steps, max_tokens=None, budget=None, profile=0),
            eval=replace(config.eval, hellaswag=None),
        )
        measured = with_random_tokens(measured, vocab_size, Path(out, "data"))
        with meeting_watchdog(measured):
            join_same_ranks(measured)
        context = resolve(measured)
        accelerator = context.accelerator
        longest = longest_stage(context.config)
        measured, plan = stage_alone(context.config, context.plan, longest)
        training = set_up_unseen(measured, plan, accelerator)
        with training.watched():
            report = measure(options, training)
        speed = report["tokens_per_second"]
        if config.stages:  # the forecast takes the speed of the first stage
            first = stage_configs(config)[0].model
            ratio = flops_per_token(config.model, vocab_size) / flops_per_token(first, vocab_size)
            speed *= ratio
        expected = with_expected_length(config, speed)
        run_steps = make_plan(expected, world_size()).max_steps
        hours, evaluation_hours = run_hours(expected, run_steps, speed)
        report["run"] = {
            "budget": config.train.budget,
            "steps": run_steps,
            "hours": hours,
            "evaluation_hours": evaluation_hours,
        }
        report["vocabulary"] = {"tokens": vocab_size, "source": source}
        accelerator.end_training()
    return report if is_main() else None


def with_random_tokens(config: Config, vocab_size: int, folder: Path) -> Config:
    """Return `config` with new weights and a folder of random tokens, which are written here.

    The speed of a step does not depend on the weights. It depends on the text only with
    `data.document_mask`, by the lengths of documents.
    """
    tokenizer: Tokenizer = BytesTokenizer()  # decodes nothing, but has an end-of-text token
    if vocab_size < tokenizer.vocab_size:
        tokenizer = CharsTokenizer("a")
    folder.mkdir()
    tokenizer.save(folder)
    dtype = token_dtype(vocab_size)
    count = max(RANDOM_TOKENS, config.model.block_size + 1)
    tokens = np.random.default_rng(0).integers(vocab_size, size=count, dtype=dtype)
    documents = config.data.document_mask and tokenizer.eot_id is not None
    if documents:
        tokens[::DOCUMENT_TOKENS] = tokenizer.eot_id
    splits = {}
    for split in ("train", "val"):
        writer = ShardWriter(folder, split, dtype, count)
        writer.add(tokens, documents=1, utf8_bytes=count)
        splits[split] = writer.finish()
    write_index(folder, tokenizer, splits, prepared={}, vocab_size=vocab_size)
    data = replace(
        config.data,
        train=str(folder),
        val=None,
        tokenizer=None,
        document_mask=documents,
        prepare=PrepareConfig(),
        commits=None,
        own_shards=None,
    )
    model = replace(config.model, vocab_size=vocab_size, init_from="scratch", new_weights=())
    stages = []
    for stage in config.stages:
        options = {key: stage.options[key] for key in stage.options if key != "data.train"}
        stages.append(replace(stage, options=options))
    return replace(config, data=data, model=model, stages=tuple(stages))


def measure(options: BenchCommand, run: Training) -> Report:
    """Time steps, and describe what they computed."""
    first, seconds = time_steps(
        run, lambda second: math.ceil(WARM_UP_SECONDS / second) + options.steps
    )
    fast, median, slow = statistics.quantiles(seconds[-options.steps :], n=4)
    tokens = run.plan.tokens_per_step
    device = run.accelerator.device
    speed = run.reporter.speed
    return {
        "tokens_per_second": tokens / median,
        "tokens_per_second_quartiles": [tokens / slow, tokens / fast],
        "step_ms": 1000 * median,
        "steps": options.steps,
        "first_step_seconds": first,
        "mfu": speed.metrics(median, 1).get("perf/mfu"),
        "flops_per_token": speed.flops_per_token,
        "peak_flops": speed.peak,
        "dtype": speed.dtype,
        "memory_gb": memory_gb(device),
        "memory_of": "device" if device.type == "cuda" else "process",
        "parameters": run.gpt.parameter_count(),
        "compiled": run.config.train.compiled,
        "plan": asdict(run.plan) | {"tokens_per_step": tokens},
        **describe_machine(run.accelerator),
    }
