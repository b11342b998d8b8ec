"""What `accel-gpt evaluate` and `eval.only` do: measure a model that is not being trained.

Reads a run, a checkpoint or a transformers model; adds the metrics of a run to its metrics.jsonl.
"""

import contextlib
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from accelerate import Accelerator

from accel_gpt.commands.evaluate import EvaluateCommand, as_json, as_table
from accel_gpt.config.data import TextStream, Weighted
from accel_gpt.config.experiment import Config
from accel_gpt.config.parse import load_config, to_flat
from accel_gpt.console import EvaluationProgress, ProgressLine, write_out
from accel_gpt.data.corpus import document_end, eval_splits
from accel_gpt.data.sources import is_url, open_sources, train_paths
from accel_gpt.data.tokenizer import Tokenizer
from accel_gpt.errors import AccelGPTError, require
from accel_gpt.evals.evaluation import open_evaluation
from accel_gpt.evals.hellaswag import read_questions, score_questions
from accel_gpt.evals.tasks import open_tasks, score_tasks
from accel_gpt.evals.validation import evaluate_source
from accel_gpt.hub.export import export
from accel_gpt.hub.hf_config import matching_preset
from accel_gpt.hub.load import load_pretrained, open_initial_weights
from accel_gpt.hub.pretrained import Pretrained, find_pretrained
from accel_gpt.launcher import world_size
from accel_gpt.model.gpt import GPT
from accel_gpt.training.accelerator import requested_precision, set_up_model, start_processes
from accel_gpt.training.checkpoint import find_checkpoint, read_state
from accel_gpt.training.metrics import Record, merge_record
from accel_gpt.training.ranks import peers
from accel_gpt.training.run_folder import RunFolder, checkpoint_steps, locked
from accel_gpt.training.setup import open_corpus
from accel_gpt.training.state import TrainState

# by the precision of training; fp8 is for training alone
EVALUATED_IN: Mapping[str, Literal["no", "bf16", "fp16"]] = MappingProxyType(
    {"no": "no", "bf16": "bf16", "fp16": "fp16", "fp8": "bf16"}
)
DTYPES = MappingProxyType({"no": "float32", "bf16": "bf16", "fp16": "fp16"})
ADDED = ("eval.hellaswag",)  # what a run need not have had
MEASURED = (*ADDED, "data.val", "eval.tokens", "eval.hellaswag_limit")
BATCH_SIZE = 8  # sequences, where no run says how many fit; assumption


def evaluate(options: EvaluateCommand) -> str:
    """Evaluate a model; returns the text for rank 0 to print, "" on the others."""
    with peers(world_size()):
        source = find_pretrained(options.run, options.checkpoint)
        run = run_of(source)
        require(
            bool(run or options.data or options.hellaswag or options.tasks),
            f"{options.run} is no run, so its val data is not known; give --data, --hellaswag or "
            "--tasks",
        )
        config = run_config(source, run)
        if not options.data:
            require_data(config)
        accelerator = start_evaluation(config, run)
        name = str(source.folder) if source.is_checkpoint else options.run
        model, tokenizer = load_pretrained(name, "last", options.allow_pickle, accelerator.device)
        state = read_state(source.folder) if source.is_checkpoint else None
        trained_on = state.data_fingerprint if state else None
        as_run, others = evaluate_model(
            options, name, config, model, tokenizer, accelerator, trained_on
        )
        if not accelerator.is_main_process:
            return ""
        precision, kept = accelerator.mixed_precision, "not kept: this is no run of ours"
        if run and state:
            kept = keep(run, state, as_run, others, precision, locked)
        step, format_metrics = state.step if state else None, as_json if options.json else as_table
        return format_metrics(options.run, step, as_run | others, kept, DTYPES[precision])


def evaluate_only(config: Config) -> int:
    """Evaluate the newest checkpoint of a run, whose lock is held, or its initial weights."""
    if config.train.micro_batch_size == "auto":
        config = with_batch_size(config)
    out = Path(config.out_dir)
    accelerator = start_evaluation(config, out)
    name, state = str(out), TrainState()
    if checkpoint_steps(out / "checkpoints"):
        name = str(find_checkpoint(out))
        state = read_state(Path(name))
        model, tokenizer = load_pretrained(name, device=accelerator.device)
    else:
        require(
            config.model.init_from != "scratch",
            f"eval.only is true but {out} holds no checkpoint and model.init_from is scratch, so "
            "there is nothing to evaluate; name a run that has one, or other weights",
        )
        corpus = open_corpus(config)
        tokenizer = corpus.tokenizer
        load = open_initial_weights(config, corpus, lambda _: None)
        model = GPT.allocate(config.model, corpus.vocab_size, accelerator.device)
        load(model)
    set_up_model(model, config.train)
    as_run, others = evaluate_model(
        *(EvaluateCommand(name), name, config, model, tokenizer, accelerator),
        state.data_fingerprint or None,
    )
    if measured_otherwise(config, RunFolder(out).config):
        as_run, others = {}, as_run | others
    if accelerator.is_main_process:
        precision = accelerator.mixed_precision
        kept = keep(out, state, as_run, others, precision, contextlib.nullcontext)
        write_out(as_table(str(out), state.step, as_run | others, kept, DTYPES[precision]))
    return 0


def measured_otherwise(config: Config, run: Mapping[str, Any]) -> bool:
    """Whether `config` sets other val data, tokens, questions or tasks than the keys of a run."""
    flat = {k: list(v) if isinstance(v, tuple) else v for k, v in to_flat(config).items()}
    known = [key for key in MEASURED if key in run and (run[key] or key not in ADDED)]
    return any(run[key] != flat[key] for key in known)


def run_of(source: Pretrained) -> Path | None:
    """The folder of the run that a checkpoint belongs to."""
    root = source.folder.parent
    known = root.name == "checkpoints" and (root.parent / "config.yaml").is_file()
    return root.parent if source.is_checkpoint and known else None


def require_data(config: Config) -> None:
    """Raise `UserError` if a data folder of a run is not there, with the option that names it."""
    if not config.data.train or isinstance(config.data.train, TextStream):
        return
    for source in train_paths(config.data):
        require(
            is_url(source.path) or Path(source.path).exists(),
            f"data.train {source.path} of the run does not exist; name the data with --data "
            "FOLDER, or start the command in the folder in which the run was launched",
        )


def with_batch_size(config: Config) -> Config:
    """`config` with the default number of sequences in a forward pass."""
    return replace(config, train=replace(config.train, micro_batch_size=BATCH_SIZE))


def run_config(source: Pretrained, run: Path | None) -> Config:
    """The config of a run's last launch; without a run, a config with the tokenizer alone.

    Data without a tokenizer of its own is taken to have the model's.
    """
    if run:
        config = load_config([str(run / "config.yaml")], "accel-gpt evaluate")
    else:
        config = with_batch_size(Config())
    tokenizer = source.folder / "tokenizer.json"
    if config.data.tokenizer is None and tokenizer.is_file():
        config = replace(config, data=replace(config.data, tokenizer=str(tokenizer)))
    return config


def launched_precision(run: Path | None) -> Literal["no", "bf16", "fp16"] | None:
    """The precision in which the last launch of a run evaluates; None if it is not recorded.

    `accelerate launch --mixed_precision` may have set it for that launch alone.
    """
    found = RunFolder(run).last_launch("mixed_precision") if run else None
    return EVALUATED_IN.get(str(found))


def start_evaluation(config: Config, run: Path | None) -> Accelerator:
    """Ranks, device and precision as in training; all cores of a CPU, which has no fp16.

    Without `train.mixed_precision` the precision is that of the run's last launch.
    """
    precision = config.train.mixed_precision or launched_precision(run)
    config = replace(config, train=replace(config.train, mixed_precision=precision))
    train = replace(config.train, reproducible=False)  # whose one thread training alone needs
    state = start_processes(replace(config, train=train))
    if config.train.mixed_precision == "auto":
        from accel_gpt.training.precision import resolve_precision

        config = resolve_precision(config)
    cpu, evaluated_in = state.device.type == "cpu", EVALUATED_IN.get(requested_precision(config))
    no_fp16 = cpu and evaluated_in == "fp16"
    return Accelerator(cpu=cpu, mixed_precision="no" if no_fp16 else evaluated_in)


def evaluate_model(
    options: EvaluateCommand,
    name: str,
    config: Config,
    model: GPT,
    tokenizer: Tokenizer,
    accelerator: Accelerator,
    trained_on: str | None,
) -> tuple[Record, Record]:
    """Metrics of the model that `name` names, those measured as in its run, and others; a
    collective, which ends the training of `accelerator`.

    `trained_on`: the fingerprint of the run's training data, where it is known. Tasks and questions
    are checked before losses are computed.
    """
    as_run: Record = {}
    others: Record = {}
    model = accelerator.prepare_model(model.eval(), evaluation_mode=True)
    batch_size = options.batch_size or config.train.sequences
    line, progress = ProgressLine(), EvaluationProgress()

    def beat(done: int, total: int) -> None:
        if accelerator.is_main_process:
            line.show(progress.words(done, total))

    tasks = []
    if options.tasks:
        check_tasks(model, tokenizer, accelerator)
        tasks = open_tasks(options.tasks, options.tasks_path)
    path = options.hellaswag or config.eval.hellaswag
    limit = options.hellaswag_limit or config.eval.hellaswag_limit
    questions = read_questions(path, tokenizer, model.config.block_size, limit) if path else ()
    tokens = config.eval.tokens if options.tokens == "run" else options.tokens
    if options.data:
        (source,) = open_sources([Weighted(options.data)], "val", config.data)
        source.tokenizer.require_same(tokenizer, "the data", options.run)
        (part,) = eval_splits([source], tokens, named=True)
        end = document_end(config.data, tokenizer)
        score = evaluate_source(model, part, accelerator, batch_size, tokenizer, end, beat)
        others |= score.metrics("val", source.name)
    elif config.data.train:
        whole = config.eval.whole_at_end and options.tokens == "run"
        evals = replace(config.eval, tokens=tokens, whole_at_end=whole, hellaswag=None)
        config_here = replace(config, eval=evals)
        corpus = open_corpus(config_here)
        corpus.tokenizer.require_same(tokenizer, "the data", options.run)
        evaluation = replace(open_evaluation(config_here, corpus), batch_size=batch_size)
        same = tokens == config.eval.tokens and trained_on in (None, corpus.fingerprint)
        losses = as_run if same else others
        losses |= evaluation.metrics(model, accelerator, beat)
        if whole:
            losses |= evaluation.whole_val(model, accelerator, beat)
    if questions:
        same = config.eval.hellaswag in (None, path) and limit == config.eval.hellaswag_limit
        scores = as_run if same else others
        scores |= score_questions(model, questions, accelerator, batch_size, beat)
    if tasks:
        with tempfile.TemporaryDirectory() as folder:
            exported = Path(folder, "model")
            export(name, exported, allow_pickle=options.allow_pickle)
            others |= score_tasks(
                folder=exported,
                tasks=tasks,
                limit=options.tasks_limit,
                batch_size=batch_size,
                device=str(accelerator.device),
                precision=accelerator.mixed_precision,
            )
    line.clear()
    accelerator.end_training()
    return as_run, others


def check_tasks(model: GPT, tokenizer: Tokenizer, accelerator: Accelerator) -> None:
    """Raise `UserError` if lm-evaluation-harness cannot evaluate the model."""
    require(
        accelerator.num_processes == 1,
        f"tasks run in one process, not in {accelerator.num_processes}; start without a launcher, "
        "or export the model and run accelerate launch -m lm_eval --model hf on the folder",
    )
    require(
        tokenizer.eot_id is not None,
        f"the {tokenizer.kind} tokenizer of the model has no end-of-text token, which tasks need; "
        "train with another tokenizer",
    )
    matching_preset(model.config)  # raises if transformers has no such model


def keep(
    run: Path,
    state: TrainState,
    as_run: Record,
    others: Record,
    precision: str,
    lock: Callable[[Path], contextlib.AbstractContextManager[object]],
) -> str:
    """Merge metrics into the record of a checkpoint's step; returns what was kept, or why not."""
    launched = launched_precision(run)
    if launched not in (None, precision):
        found, expected = DTYPES[precision], DTYPES[str(launched)]
        return f"not kept: computed in {found}, those of the run in {expected}"
    reason = "not kept: data, tokens, questions or tasks are not those of the run"
    if not as_run:
        return reason
    clock = {"step": state.step, "tokens": state.tokens, "time": state.seconds}
    try:
        with lock(run):
            merge_record(run, clock | as_run)
    except (AccelGPTError, OSError) as error:  # a run that is training, or a read-only folder
        return f"not kept: {error}"
    rest = f"; {reason}: {', '.join(others)}" if others else ""
    return f"kept in {run / 'metrics.jsonl'}{rest}"
