"""`accel-gpt evaluate` and `eval.only`: metrics of a model that is not being trained.

Reads a run, a checkpoint or a transformers model; adds the metrics of a run to its metrics.jsonl.
"""

import contextlib
import json
import math
import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from accelerate import Accelerator

from accel_gpt.commands.evaluate import EvaluateCommand
from accel_gpt.config.data import Weighted
from accel_gpt.config.experiment import Config
from accel_gpt.config.parse import load_config
from accel_gpt.console import write_out
from accel_gpt.data.corpus import document_end, eval_splits
from accel_gpt.data.sources import open_sources
from accel_gpt.data.tokenizer import Tokenizer
from accel_gpt.errors import AccelGPTError, require
from accel_gpt.evals.evaluation import Evaluation, open_evaluation
from accel_gpt.evals.hellaswag import read_questions, score_questions
from accel_gpt.evals.tasks import open_tasks, run_tasks
from accel_gpt.evals.validation import evaluate_part, named_metrics
from accel_gpt.hub.export import export
from accel_gpt.hub.hf_config import matching_preset
from accel_gpt.hub.load import load_initial_model, load_pretrained
from accel_gpt.hub.pretrained import Pretrained, find_pretrained
from accel_gpt.launcher import world_size
from accel_gpt.model.gpt import GPT
from accel_gpt.training.accelerator import requested_precision, set_up_model, start_processes
from accel_gpt.training.checkpoint import find_checkpoint, read_state
from accel_gpt.training.metrics import Record, merge_record, without_inf
from accel_gpt.training.ranks import all_gather, all_ranks, peers
from accel_gpt.training.run_folder import RunFolder, checkpoint_steps, locked
from accel_gpt.training.setup import open_corpus
from accel_gpt.training.state import TrainState

# by the precision of training; fp8 is for training alone
EVALUATED_IN: Mapping[str, Literal["no", "bf16", "fp16"]] = MappingProxyType(
    {"no": "no", "bf16": "bf16", "fp16": "fp16", "fp8": "bf16"}
)
BATCH_SIZE = 8  # sequences, where no run says how many fit; assumption
LOSS = re.compile(r"eval/(train|val)_loss(/.+)?")
OF_LOSSES = re.compile(r"eval/(train|val)_(loss|perplexity|bits_per_byte)(_se)?(/.+)?")


def evaluate(options: EvaluateCommand) -> str:
    """Evaluate a model; returns the text for the main process to print, "" on the others."""
    with peers(world_size()):
        source = find_pretrained(options.run, options.checkpoint)
        run = run_of(source)
        require(
            bool(run or options.data or options.hellaswag or options.tasks),
            f"{options.run} is no run, so its val data is not known; give --data, --hellaswag or "
            "--tasks",
        )
        config = with_launched_precision(run_config(source, run), run)
        accelerator = start_accelerator(config)
        name = str(source.folder) if source.is_checkpoint else options.run
        model, tokenizer = load_pretrained(name, "last", options.allow_pickle, accelerator.device)
        model = accelerator.prepare_model(model, evaluation_mode=True)
        as_run, others = measure(options, name, config, model, tokenizer, accelerator)
        accelerator.end_training()
        if not accelerator.is_main_process:
            return ""
        state = read_state(source.folder) if source.is_checkpoint else None
        kept = "not kept: this is no run of ours"
        if run and state:
            kept = keep(run, state, as_run, others, accelerator.mixed_precision)
        step, format_metrics = state.step if state else None, as_json if options.json else as_table
        metrics = as_run | others
        return format_metrics(options.run, step, metrics, kept, accelerator.mixed_precision)


def evaluate_only(config: Config) -> int:
    """Evaluate the newest checkpoint of a run, or its initial weights; its lock is held."""
    if config.train.micro_batch_size == "auto":
        config = with_batch_size(config)
    out = Path(config.out_dir)
    accelerator = start_accelerator(with_launched_precision(config, out))
    corpus = open_corpus(config)
    evaluation = open_evaluation(config, corpus)
    if checkpoint_steps(out / "checkpoints"):
        folder = find_checkpoint(out)
        state = read_state(folder)
        model, tokenizer = load_pretrained(str(folder), device=accelerator.device)
        corpus.tokenizer.require_same(tokenizer, "the data", str(folder))
    else:
        require(
            config.model.init_from != "scratch",
            f"eval.only is true but {out} holds no checkpoint and model.init_from is scratch, so "
            "there is nothing to evaluate; name a run that has one, or other weights",
        )
        state = TrainState()
        model = load_initial_model(config, corpus, lambda _: None)
        model = model.to(accelerator.device).eval()
    set_up_model(model, config.train)
    model = accelerator.prepare_model(model, evaluation_mode=True)
    metrics = evaluation.metrics(model, accelerator)
    if config.eval.whole_at_end:
        metrics |= evaluation.whole_val(model, accelerator)
    accelerator.end_training()
    if accelerator.is_main_process:
        kept = other_precision(out, accelerator.mixed_precision)
        if not kept:
            merge_record(out, record_of(state, metrics))
            kept = f"kept in {out / 'metrics.jsonl'}"
        write_out(as_table(str(out), state.step, metrics, kept, accelerator.mixed_precision))
    return 0


# --------------------------------------------------------------------------- what is evaluated


def run_of(source: Pretrained) -> Path | None:
    """The folder of the run that a checkpoint belongs to."""
    root = source.folder.parent
    known = root.name == "checkpoints" and (root.parent / "config.yaml").is_file()
    return root.parent if source.is_checkpoint and known else None


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
    """The precision in which the last launch of a run evaluates; None if it is not recorded."""
    found = RunFolder(run).last_launch("mixed_precision") if run else None
    return EVALUATED_IN.get(str(found))


def with_launched_precision(config: Config, run: Path | None) -> Config:
    """`config` in the precision of the run's last launch, unless it sets one.

    `accelerate launch --mixed_precision` set it for that launch alone.
    """
    precision = config.train.mixed_precision or launched_precision(run)
    return replace(config, train=replace(config.train, mixed_precision=precision))


def start_accelerator(config: Config) -> Accelerator:
    """Ranks, device and precision as in training; all cores of a CPU, which has no fp16."""
    train = replace(config.train, reproducible=False)  # whose one thread training alone needs
    state = start_processes(replace(config, train=train))
    if config.train.mixed_precision == "auto":
        from accel_gpt.training.auto import resolve_precision

        config = resolve_precision(config)
    cpu, precision = state.device.type == "cpu", EVALUATED_IN.get(requested_precision(config))
    return Accelerator(cpu=cpu, mixed_precision="no" if cpu and precision == "fp16" else precision)


# --------------------------------------------------------------------------- measuring


def measure(
    options: EvaluateCommand,
    name: str,
    config: Config,
    model: GPT,
    tokenizer: Tokenizer,
    accelerator: Accelerator,
) -> tuple[Record, Record]:
    """Metrics measured as in the run, and others; a collective.

    Tasks and questions are checked before losses are computed.
    """
    as_run: Record = {}
    others: Record = {}
    batch_size = options.batch_size or config.train.sequences
    manager = None
    if options.tasks:
        manager = open_tasks(options.tasks, options.include_path)
        matching_preset(model.config)  # raises if transformers has no such model
    path = options.hellaswag or config.eval.hellaswag
    limit = options.limit or config.eval.hellaswag_limit
    questions = read_questions(path, tokenizer, model.config.block_size, limit) if path else ()
    tokens = config.eval.tokens
    if options.tokens != "run":
        tokens = None if options.tokens == "null" else int(options.tokens)
    losses = as_run if tokens == config.eval.tokens else others
    config = replace(config, eval=replace(config.eval, tokens=tokens))
    if options.data:
        (source,) = open_sources([Weighted(options.data)], "val", config.data)
        source.tokenizer.require_same(tokenizer, "the data", options.run)
        (part,) = eval_splits([source], tokens, named=True)
        end = document_end(config.data, tokenizer)
        score = evaluate_part(model, part, accelerator, batch_size, tokenizer, end)
        losses |= named_metrics(score, source.name)
    elif config.data.train:
        corpus = open_corpus(config)
        corpus.tokenizer.require_same(tokenizer, "the data", options.run)
        evaluation = Evaluation(corpus, batch_size)
        losses |= evaluation.metrics(model, accelerator)
        if config.eval.whole_at_end and options.tokens == "run":
            losses |= evaluation.whole_val(model, accelerator)
    if questions:
        same = config.eval.hellaswag in (None, path) and limit == config.eval.hellaswag_limit
        scores = as_run if same else others
        scores |= score_questions(model, questions, accelerator, batch_size)
    if options.tasks:
        with exported(name, options.allow_pickle, accelerator) as folder:
            settings = (accelerator, options.tasks, manager, options.limit, batch_size)
            scores = as_run if options.limit is None else others
            scores |= run_tasks(folder, tokenizer, *settings)
    return as_run, others


@contextlib.contextmanager
def exported(name: str, allow_pickle: bool, accelerator: Accelerator) -> Iterator[Path]:
    """Export a model to a temporary folder, once on each machine, proven equal; a collective."""
    with tempfile.TemporaryDirectory() as folder:
        with all_ranks():
            if accelerator.is_local_main_process:
                export(name, Path(folder, "model"), "last", "fp32", False, allow_pickle)
        folders = all_gather(folder)
        yield Path(folders[accelerator.process_index - accelerator.local_process_index], "model")
        accelerator.wait_for_everyone()


# --------------------------------------------------------------------------- keeping


def record_of(state: TrainState, metrics: Record) -> Record:
    """Metrics as the record of a checkpoint's step."""
    return {"step": state.step, "tokens": state.tokens, "time": state.seconds} | metrics


def other_precision(run: Path, precision: str) -> str:
    """Why metrics computed in `precision` are not kept; "" if those of the run are, too."""
    theirs = launched_precision(run)
    if theirs in (None, precision):
        return ""
    ours, theirs_name = dtype_name(precision), dtype_name(str(theirs))
    return f"not kept: computed in {ours}, those of the run in {theirs_name}"


def keep(run: Path, state: TrainState, as_run: Record, others: Record, precision: str) -> str:
    """Merge metrics into those of a run that is not training; returns what was kept."""
    if reason := other_precision(run, precision):
        return reason
    reason = "not kept: --tokens, --limit or --hellaswag differ from the run's"
    if not as_run:
        return reason
    try:
        with locked(run):
            merge_record(run, record_of(state, as_run))
    except (AccelGPTError, OSError) as error:  # a run that is training, or a read-only folder
        return f"not kept: {error}"
    rest = f"; {reason}: {', '.join(others)}" if others else ""
    return f"kept in {run / 'metrics.jsonl'}{rest}"


# --------------------------------------------------------------------------- printing


def as_table(name: str, step: int | None, metrics: Record, kept: str, precision: str) -> str:
    """Losses as a table with their standard errors, then all other metrics, then what was kept.

    `precision`: no, bf16 or fp16, in which they were computed.
    """
    model = name if step is None else f"{name}, step {step:,}"
    lines = [f"{model}, in {dtype_name(precision)}"]
    losses = [match for key in metrics if (match := LOSS.fullmatch(key))]
    if losses:
        lines += ["", f"{'':<20}{'loss':>16}  {'perplexity':>12}  {'bits per byte':>16}"]
    for match in losses:
        split, source = match[1], match[2] or ""
        value = metrics[match[0]]
        loss = with_error(metrics, f"eval/{split}_loss", source)
        perplexity = f"{math.exp(value):,.2f}" if value < 700 else "inf"
        bits = with_error(metrics, f"eval/{split}_bits_per_byte", source)
        lines.append(f"{split + source:<20}{loss:>16}  {perplexity:>12}  {bits:>16}")
    rest = [key for key in metrics if not OF_LOSSES.fullmatch(key)]
    if rest:
        lines.append("")
    for key in rest:
        if not (key.endswith("_se") and key.removesuffix("_se") in rest):
            lines.append(f"{key.removeprefix('eval/'):<32}{with_error(metrics, key, ''):>20}")
    return "\n".join([*lines, "", kept, ""])


def as_json(name: str, step: int | None, metrics: Record, kept: str, precision: str) -> str:
    """One JSON object; null for what is not finite."""
    model = {"place": name, "step": step, "precision": dtype_name(precision)}
    content = model | {"figures": without_inf(metrics), "kept": kept}
    return json.dumps(content, ensure_ascii=False) + "\n"


def dtype_name(precision: str) -> str:
    """The data type of a mixed precision."""
    return "float32" if precision == "no" else precision


def with_error(metrics: Record, key: str, source: str) -> str:
    """`3.1416 ±0.0123`; "" if there is no such metric."""
    value = metrics.get(key + source)
    if value is None:
        return ""
    error = metrics.get(f"{key}_se{source}", math.nan)
    return f"{value:.4f}" + (f" ±{error:.4f}" if math.isfinite(error) else "")
