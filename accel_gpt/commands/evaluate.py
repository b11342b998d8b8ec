"""`accel-gpt evaluate RUN`: losses and benchmark scores of a model."""

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from accel_gpt.commands.options import EvaluateCommand
from accel_gpt.config.experiment import Config
from accel_gpt.config.parse import load_config
from accel_gpt.console import write_out
from accel_gpt.data.remote import is_url
from accel_gpt.data.sources import train_paths
from accel_gpt.data.tokenizer import Tokenizer
from accel_gpt.errors import require
from accel_gpt.evals.standalone import (
    BATCH_SIZE,
    Report,
    evaluate_model,
    start_evaluation,
    with_batch_size,
)
from accel_gpt.evals.tasks import open_tasks, score_tasks
from accel_gpt.launcher import is_main, world_size
from accel_gpt.model.gpt import GPT
from accel_gpt.training.accelerator import keep_freed_memory
from accel_gpt.training.checkpoint import read_state
from accel_gpt.training.ranks import peers, require_all
from accel_gpt.training.stopping import INIT, Watchdog, die_with_launcher, exiting_on_signals
from accel_gpt.transformers_io.export import write_model
from accel_gpt.transformers_io.hf_weights import exportable_preset
from accel_gpt.transformers_io.load import load_pretrained
from accel_gpt.transformers_io.pretrained import Pretrained, find_on_main


def run(options: EvaluateCommand) -> int:
    """Print the metrics of a model."""
    die_with_launcher()
    keep_freed_memory()
    with exiting_on_signals("stopped"):
        report = evaluate_named(options)
    if is_main():
        write_out(report.as_json() if options.json else report.as_table())
    return 0


def evaluate_named(options: EvaluateCommand) -> Report:
    """Find, load and evaluate the model that the options name; all ranks must call it."""
    with peers(world_size()):
        source = find_on_main(options.run, options.checkpoint)
        run = run_of(source)
        config = evaluated_config(options, source, run)
        accelerator = start_evaluation(config, run)
        name = str(source.folder) if source.is_checkpoint else options.run
        with Watchdog(config.train.init_timeout, INIT, "has not opened the model"):
            model, tokenizer = load_pretrained(name, device=accelerator.device)
        tasks = open_tasks_of(options, model, tokenizer)
        metrics = evaluate_model(
            model=model,
            tokenizer=tokenizer,
            config=config,
            accelerator=accelerator,
            name=options.run,
            data=options.data,
        )
        if tasks:
            with tempfile.TemporaryDirectory() as folder:
                exported = Path(folder, "model")
                exported.mkdir()
                # remove the autocast that the evaluation put around forward()
                own = accelerator.unwrap_model(model, keep_fp32_wrapper=False).cpu()
                write_model(own, tokenizer, source, exported, dtype="fp32")
                metrics |= score_tasks(
                    folder=exported,
                    tasks=tasks,
                    limit=options.tasks_limit,
                    batch_size=config.train.micro_batch_sequences,
                    device=str(accelerator.device),
                    precision=accelerator.mixed_precision,
                )
        accelerator.end_training()
        step = read_state(source.folder).step if source.is_checkpoint else None
        return Report(options.run, step, accelerator.mixed_precision, metrics)


def open_tasks_of(options: EvaluateCommand, model: GPT, tokenizer: Tokenizer) -> list[Any]:
    """Open the tasks that the options name, if any.

    Raises `UserError` if lm-evaluation-harness cannot evaluate the model on them.
    """
    if not options.tasks:
        return []
    require_all(
        world_size() == 1,
        f"tasks need a single process, but there are {world_size()}; start without a launcher, or "
        "export the model and run accelerate launch -m lm_eval --model hf on the folder",
    )
    require(
        tokenizer.eot_id is not None,
        f"the {tokenizer.kind} tokenizer of the model has no end-of-text token, but tasks need "
        "one; train with another tokenizer",
    )
    exportable_preset(model)  # raises if transformers has no such model
    return open_tasks(options.tasks, options.tasks_path)


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
    if run:
        config = with_batch_size(load_config([str(run / "config.yaml")], "accel-gpt evaluate"))
    else:
        config = Config()
        config = replace(config, train=replace(config.train, micro_batch_size=BATCH_SIZE))
    tokenizer = source.folder / "tokenizer.json"
    if config.data.tokenizer is None and tokenizer.is_file():
        config = replace(config, data=replace(config.data, tokenizer=str(tokenizer)))
    evals = config.eval
    if options.tokens != "run":
        evals = replace(evals, tokens=options.tokens, whole_at_end=False)
    evals = replace(
        evals,
        hellaswag=options.hellaswag or evals.hellaswag,
        hellaswag_limit=options.hellaswag_limit or evals.hellaswag_limit,
    )
    batch_size = options.batch_size or config.train.micro_batch_size
    train = replace(config.train, micro_batch_size=batch_size)
    config = replace(config, eval=evals, train=train)
    if not options.data:
        require_data(config)
    return config


def require_data(config: Config) -> None:
    """Raise `UserError` if a data folder of the run is missing."""
    if not config.data.train:
        return
    for source in train_paths(config.data):
        require(
            is_url(source.path) or Path(source.path).exists(),
            f"data.train {source.path} of the run does not exist; name the data with --data "
            "FOLDER, or run the command in the folder where the run was launched",
        )
