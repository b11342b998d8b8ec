"""`accel-gpt evaluate RUN`: losses and benchmark scores of a model.

Reads the model, the data and the questions. Writes no files.
"""

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from accelerate import Accelerator

from accel_gpt.commands.options import EvaluateCommand
from accel_gpt.commands.printing import write_report
from accel_gpt.commands.resolve import load_code, load_config, with_code
from accel_gpt.commands.tasks import open_tasks, score_tasks
from accel_gpt.config.data import Weighted
from accel_gpt.config.experiment import Config
from accel_gpt.config.plan import reference_steps
from accel_gpt.config.stages import longest_stage, span_at, stage_configs
from accel_gpt.console import print_line
from accel_gpt.data.corpus import Corpus, document_end, eval_splits, open_corpus
from accel_gpt.data.sources import open_sources
from accel_gpt.data.tokenizer import Tokenizer
from accel_gpt.errors import require
from accel_gpt.evals.evaluation import (
    Evaluation,
    evaluate,
    open_hellaswag,
    open_losses,
    open_own_evaluations,
)
from accel_gpt.evals.validation import OnProgress, score_source
from accel_gpt.launch.precision import requested_precision
from accel_gpt.launch.process import keep_freed_memory
from accel_gpt.launch.ranks import explain_lost_rank, on_main, require_all
from accel_gpt.launch.resolve import read_done, with_commits, with_precision
from accel_gpt.launch.setup import join_same_ranks, meeting_watchdog
from accel_gpt.launch.stopping import (
    Watchdog,
    exiting_on_signals,
)
from accel_gpt.launcher import die_with_launcher, is_main, world_size
from accel_gpt.model.gpt import GPT
from accel_gpt.model.language_model import LanguageModel
from accel_gpt.model.targets import TargetMask
from accel_gpt.runs.checkpoint import check_code, read_state
from accel_gpt.runs.folder import RunFolder
from accel_gpt.training.display import Progress
from accel_gpt.transformers_io.export import write_model
from accel_gpt.transformers_io.hf_weights import exportable_preset
from accel_gpt.transformers_io.load import load_found
from accel_gpt.transformers_io.pretrained import Pretrained, find_pretrained

# precision of training -> precision of evaluation; fp8 is only for training
EVALUATED_IN: Mapping[str, Literal["no", "bf16", "fp16"]] = MappingProxyType(
    {"no": "no", "bf16": "bf16", "fp16": "fp16", "fp8": "bf16"}
)
DTYPES = MappingProxyType({"no": "float32", "bf16": "bf16", "fp16": "fp16"})
BATCH_SIZE = 8  # sequences, if train.micro_batch_size is auto; assumption


# --------------------------------------------------------------------------- the command


def run(options: EvaluateCommand) -> int:
    """Print the metrics of a model."""
    die_with_launcher()
    keep_freed_memory()
    with exiting_on_signals():
        report = evaluate_named(options)
    if is_main():
        write_report(report, options.json)
    return 0


def evaluate_named(options: EvaluateCommand) -> dict[str, Any]:
    """Find, load and evaluate the model that the options name; all ranks must call it."""
    with explain_lost_rank(world_size()):
        source = find_pretrained(options.run, options.checkpoint, options.weights)
        run = run_of(source)
        config = evaluated_config(options, source, run)
        if source.is_checkpoint:  # without these functions, it would differ from the run's
            needed = {"model", "targets"} if options.data else {"model", "targets", "shards"}
            check_code(source.folder, config.own, needed)
        accelerator = start_evaluation(config, run)
        with Watchdog(config.train.step_timeout, "has not opened the model"):
            model, tokenizer = load_found(source, accelerator.device, config.own)
        tasks = open_tasks_of(options, model, tokenizer)
        stage = trained_stage(config, source) if run else replace(config, model=model.config)
        metrics = evaluate_model(options, config, model, tokenizer, accelerator, stage)
        if tasks:
            with tempfile.TemporaryDirectory() as folder:
                exported = Path(folder, "model")
                exported.mkdir()
                # remove the autocast that the evaluation put around forward()
                plain = accelerator.unwrap_model(model, keep_fp32_wrapper=False).cpu()
                write_model(plain, tokenizer, exported, dtype="fp32")
                metrics |= score_tasks(
                    folder=exported,
                    tasks=tasks,
                    limit=options.limit,
                    batch_size=config.train.micro_batch_sequences,
                    device=str(accelerator.device),
                    precision=accelerator.mixed_precision,
                )
        accelerator.end_training()
        return {
            "model": options.run,
            "step": read_state(source.folder).step if source.is_checkpoint else None,
            "precision": DTYPES[accelerator.mixed_precision],
            "metrics": metrics,
        }


# --------------------------------------------------------------------------- options


def run_of(source: Pretrained) -> Path | None:
    """Return the folder of the run that a checkpoint belongs to; None for other models."""
    checkpoints = source.folder.parent
    run = checkpoints.parent
    in_run = checkpoints.name == "checkpoints" and (run / "config.yaml").is_file()
    if source.is_checkpoint and in_run:
        return run
    return None


def evaluated_config(options: EvaluateCommand, source: Pretrained, run: Path | None) -> Config:
    """Return the config of the run's last launch, or a default config, overridden by the options.

    Data without a tokenizer uses the tokenizer of the model. Raises `UserError` if the options and
    the run name nothing to evaluate on.
    """
    require(
        bool(run or options.data or options.hellaswag or options.tasks),
        f"{options.run} is not the folder of a run, so its val data is unknown; give --data, "
        "--hellaswag or --tasks",
    )
    config = Config()
    if run:
        config = load_config([str(run / "config.yaml")], "accel-gpt evaluate")
    tokenizer = source.folder / "tokenizer.json"
    if config.data.tokenizer is None and tokenizer.is_file():
        config = replace(config, data=replace(config.data, tokenizer=str(tokenizer)))
    evals = config.eval
    if options.tokens != "run":
        evals = replace(evals, tokens=options.tokens)
    evals = replace(evals, hellaswag=options.hellaswag or evals.hellaswag)
    batch_size = config.train.micro_batch_size if run else BATCH_SIZE
    if batch_size == "auto":
        batch_size = BATCH_SIZE
    train = replace(config.train, micro_batch_size=batch_size)
    config = replace(config, eval=evals, train=train)
    return with_code(config, load_code(options.code))


def trained_stage(config: Config, source: Pretrained) -> Config:
    """Return the config of the stage that made the step of a checkpoint of a run."""
    steps = reference_steps(config)
    step = min(read_state(source.folder).step, steps)
    return span_at(config, steps, max(step - 1, 0)).config


def open_tasks_of(
    options: EvaluateCommand, model: LanguageModel, tokenizer: Tokenizer
) -> list[Any]:
    """Open the tasks that the options name, if any.

    Raises `UserError` if lm-evaluation-harness cannot evaluate the model on them.
    """
    if not options.tasks:
        return []
    require_all(world_size() == 1, f"--tasks need one process, but there are {world_size()}")
    require(
        tokenizer.eot_id is not None,
        f"--tasks need an end-of-text token; the tokenizer {tokenizer.kind} has none",
    )
    require(
        isinstance(model, GPT) and options.code is None,
        "--tasks need a model of transformers, so they cannot be used with --code",
    )
    assert isinstance(model, GPT)
    exportable_preset(model)  # raises if transformers has no such model
    return open_tasks(options.tasks)


# --------------------------------------------------------------------------- evaluating


def start_evaluation(config: Config, run: Path | None) -> Accelerator:
    """Join the ranks, with the device and precision of training but not its single thread.

    If `train.mixed_precision` is not set, uses the recorded precision of the last launch of `run`,
    as `accelerate launch` may have set it. On a CPU, uses float32 instead of fp16.
    """
    precision = config.train.mixed_precision
    if precision is None and run is not None:
        precision = EVALUATED_IN.get(str(RunFolder(run).last_launch("mixed_precision")))
    train = replace(config.train, mixed_precision=precision)
    # train.reproducible sets one thread, which only training needs
    with meeting_watchdog(config):
        state = join_same_ranks(replace(config, train=replace(train, reproducible=False)))
    done = on_main(lambda: read_done(config.out_dir, config.checkpoint.resume))
    config = with_precision(replace(config, train=train), done, print_line)
    on_cpu = state.device.type == "cpu"
    evaluated_in = EVALUATED_IN.get(requested_precision(config.train))
    if on_cpu and evaluated_in == "fp16":
        evaluated_in = "no"
    return Accelerator(cpu=on_cpu, mixed_precision=evaluated_in)


def evaluate_model(
    options: EvaluateCommand,
    config: Config,
    model: LanguageModel,
    tokenizer: Tokenizer,
    accelerator: Accelerator,
    stage: Config,
) -> dict[str, float]:
    """Compute the losses, in sequences of a stage, and the benchmark scores; a collective."""
    model.bf16_residual = True  # as in the run
    with Watchdog(config.train.step_timeout, "has not opened data and model"):
        model = accelerator.prepare_model(model.eval(), evaluation_mode=True)
        evaluations = open_all(options, config, model, tokenizer, stage)
    with (
        Watchdog(config.train.step_timeout) as watchdog,
        Progress("evaluating", "batches", active=accelerator.is_main_process) as progress,
    ):

        def on_progress(done: int, total: int) -> None:
            progress.update(done, total)
            watchdog.heartbeat()

        return evaluate(evaluations, model, accelerator, on_progress)


def open_all(
    options: EvaluateCommand,
    config: Config,
    model: LanguageModel,
    tokenizer: Tokenizer,
    stage: Config,
) -> list[Evaluation]:
    """Open all evaluations except tasks; raises `DataError` if the data has another tokenizer.

    `stage`: has the micro-batch and the length of the sequences for losses.
    """
    evaluations: list[Evaluation] = []
    corpus: Corpus | None = None
    if options.data is not None:
        sources = open_sources([Weighted(options.data)], "val", config.data)
        sources[0].tokenizer.require_same(tokenizer, "the data", options.run)
        (split,) = eval_splits(sources, config.eval.tokens, named=True)
        target_mask = TargetMask(document_end(config.data, sources), config)

        def named_split_losses(
            model: LanguageModel, accelerator: Accelerator, on_progress: OnProgress
        ) -> dict[str, float]:
            score = score_source(
                model=model,
                source=split,
                accelerator=accelerator,
                batch_size=stage.train.micro_batch_sequences,
                block_size=stage.model.block_size,
                tokenizer=tokenizer,
                target_mask=target_mask,
                on_progress=on_progress,
            )
            return score.metrics("val", split.name)

        evaluations.append(named_split_losses)
    elif config.data.train:
        done = on_main(lambda: read_done(config.out_dir, config.checkpoint.resume))
        corpus = open_corpus(with_commits(config, done))
        corpus.tokenizer.require_same(tokenizer, "the data", options.run)
        evaluations.append(open_losses(stage, corpus))
    if config.eval.hellaswag is not None:
        context = model.config.block_size
        whole = stage_configs(config)[longest_stage(config)]
        evaluations.append(
            open_hellaswag(whole, tokenizer, context, model.vocab_size, limit=options.limit)
        )
    return [*evaluations, *open_own_evaluations(config, tokenizer, corpus)]
