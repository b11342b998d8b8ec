"""`accel-gpt evaluate` and `eval.only`: the figures of a model that is not being trained.

Reads a run, a checkpoint or a model of transformers; adds the figures of a run to its metrics.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from accelerate import Accelerator

from accel_gpt.commands.evaluate import EvaluateCommand
from accel_gpt.config.data import Weighted
from accel_gpt.config.experiment import Config
from accel_gpt.config.parse import load_config
from accel_gpt.console import visible
from accel_gpt.data.corpus import document_end, eval_splits
from accel_gpt.data.sources import open_sources
from accel_gpt.data.tokenizer import Tokenizer
from accel_gpt.errors import UserError, require
from accel_gpt.evals.evaluation import Evaluation, open_evaluation
from accel_gpt.evals.hellaswag import read_questions, score_questions
from accel_gpt.evals.table import as_json, as_table, spelled
from accel_gpt.evals.tasks import open_tasks, run_tasks
from accel_gpt.evals.validation import evaluate_part, named_figures
from accel_gpt.hub.load import load_initial_model, load_pretrained
from accel_gpt.hub.pretrained import Pretrained, find_pretrained
from accel_gpt.launcher import world_size
from accel_gpt.model.gpt import GPT
from accel_gpt.training.accelerator import start_processes
from accel_gpt.training.checkpoint import find_checkpoint, read_state
from accel_gpt.training.engine import requested_precision
from accel_gpt.training.metrics import Record, merge_record
from accel_gpt.training.precision import resolve_precision
from accel_gpt.training.ranks import peers
from accel_gpt.training.run_folder import RunFolder, checkpoint_steps, locked
from accel_gpt.training.setup import open_corpus, set_up_model
from accel_gpt.training.state import TrainState

# by the precision of a training; fp8 is for training alone
EVALUATED_IN: Mapping[str, Literal["no", "bf16", "fp16"]] = MappingProxyType(
    {"no": "no", "bf16": "bf16", "fp16": "fp16", "fp8": "bf16"}
)
BATCH_SIZE = 8  # windows, where no run says how many fit; assumption


@dataclass
class Findings:
    """The figures of a model, and those of them that its run keeps."""

    kept: Record = field(default_factory=dict)
    passing: Record = field(default_factory=dict)  # not measured as the run measures them

    def note(self, figures: Record, as_run: bool) -> None:
        """Take figures down."""
        (self.kept if as_run else self.passing).update(figures)


def evaluate(asked: EvaluateCommand) -> str:
    """Measure what is asked; what the main process shall print, nothing on the others."""
    with peers(world_size()):
        source = find_pretrained(asked.run, asked.checkpoint)
        run = run_of(source)
        require(
            bool(run or asked.data or asked.hellaswag or asked.tasks),
            f"{asked.run} is no run, so its val data is not known; give --data, --hellaswag or "
            "--tasks",
        )
        config = as_launched(run_config(source, run), run)
        accelerator = start_accelerator(config)
        place = str(source.folder) if source.is_checkpoint else asked.run
        model, tokenizer = load_pretrained(place, "last", asked.allow_pickle, accelerator.device)
        model = accelerator.prepare_model(model, evaluation_mode=True)
        findings = measure(asked, config, model, tokenizer, accelerator)
        accelerator.end_training()
        if not accelerator.is_main_process:
            return ""
        state = read_state(source.folder) if source.is_checkpoint else None
        fate = keep(run, state, findings, accelerator.mixed_precision)
        step, figures = state.step if state else None, findings.kept | findings.passing
        tell = as_json if asked.json else as_table
        return tell(asked.run, step, figures, fate, accelerator.mixed_precision)


def evaluate_only(config: Config) -> int:
    """Measure the newest checkpoint of a run, or what it would start from; the lock is held."""
    if config.train.micro_batch_size == "auto":
        config = with_batch_size(config)
    out = Path(config.out_dir)
    accelerator = start_accelerator(as_launched(config, out))
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
    figures = evaluation.figures(model, accelerator)
    if config.eval.whole_at_end:
        figures |= evaluation.whole_val(model, accelerator)
    accelerator.end_training()
    if accelerator.is_main_process:
        fate = other_precision(out, accelerator.mixed_precision)
        if not fate:
            merge_record(out, record_of(state, figures))
            fate = f"kept in {out / 'metrics.jsonl'}"
        table = as_table(str(out), state.step, figures, fate, accelerator.mixed_precision)
        sys.stdout.write(visible(table, sys.stdout))
    return 0


# --------------------------------------------------------------------------- what is evaluated


def run_of(source: Pretrained) -> Path | None:
    """The folder of the run that a checkpoint belongs to."""
    root = source.folder.parent
    known = root.name == "checkpoints" and (root.parent / "config.yaml").is_file()
    return root.parent if source.is_checkpoint and known else None


def with_batch_size(config: Config) -> Config:
    """`config` with a number of windows where it knows none."""
    return replace(config, train=replace(config.train, micro_batch_size=BATCH_SIZE))


def run_config(source: Pretrained, run: Path | None) -> Config:
    """The config that a run was last launched with, or one that knows the tokenizer alone.

    Data that does not say its tokenizer is taken to have the model's.
    """
    config = Config()
    if run:
        config = load_config([str(run / "config.yaml")], "accel-gpt evaluate")
    else:
        config = with_batch_size(config)
    own = source.folder / "tokenizer.json"
    if config.data.tokenizer is None and own.is_file():
        config = replace(config, data=replace(config.data, tokenizer=str(own)))
    return config


def launched_precision(run: Path | None) -> Literal["no", "bf16", "fp16"] | None:
    """The precision in which the last launch of a run evaluates; None where it does not say."""
    found = RunFolder(run).last_launch("mixed_precision") if run else None
    return EVALUATED_IN.get(str(found))


def as_launched(config: Config, run: Path | None) -> Config:
    """`config` in the precision of the run's last launch, where it does not name one itself.

    `accelerate launch --mixed_precision` told that launch, and tells this one nothing.
    """
    precision = config.train.mixed_precision or launched_precision(run)
    return replace(config, train=replace(config.train, mixed_precision=precision))


def start_accelerator(config: Config) -> Accelerator:
    """Processes, device and precision as for training; all cores of a CPU, which has no fp16."""
    train = replace(config.train, reproducible=False)  # whose one thread training alone needs
    state = start_processes(replace(config, train=train))
    config = resolve_precision(config)
    cpu, precision = state.device.type == "cpu", EVALUATED_IN.get(requested_precision(config))
    return Accelerator(cpu=cpu, mixed_precision="no" if cpu and precision == "fp16" else precision)


# --------------------------------------------------------------------------- measuring


def measure(
    asked: EvaluateCommand,
    config: Config,
    model: GPT,
    tokenizer: Tokenizer,
    accelerator: Accelerator,
) -> Findings:
    """All that is asked; a collective. Faults in the questions are told before losses are taken."""
    findings, batch_size = Findings(), asked.batch_size or config.train.sequences
    place, limit = asked.hellaswag or config.eval.hellaswag, asked.limit
    manager = open_tasks(asked.tasks, asked.include_path) if asked.tasks else None
    limit = limit or config.eval.hellaswag_limit
    questions = read_questions(place, tokenizer, model.config.block_size, limit) if place else ()
    tokens = config.eval.tokens
    if asked.tokens != "run":
        tokens = None if asked.tokens == "null" else int(asked.tokens)
    budgeted = replace(config, eval=replace(config.eval, tokens=tokens))
    as_run = tokens == config.eval.tokens
    if asked.data:
        found = data_figures(asked, budgeted, model, tokenizer, accelerator)
        findings.note(found, as_run)
    elif config.data.train:
        corpus = open_corpus(budgeted)
        corpus.tokenizer.require_same(tokenizer, "the data", asked.run)
        evaluation = Evaluation(corpus, batch_size)
        found = evaluation.figures(model, accelerator)
        if config.eval.whole_at_end and asked.tokens == "run":
            found |= evaluation.whole_val(model, accelerator)
        findings.note(found, as_run)
    if questions:
        as_run = config.eval.hellaswag in (None, place) and limit == config.eval.hellaswag_limit
        findings.note(score_questions(model, questions, accelerator, batch_size), as_run)
    if asked.tasks:
        settings = (asked.tasks, asked.limit, batch_size, asked.include_path, manager)
        findings.note(run_tasks(model, tokenizer, accelerator, *settings), asked.limit is None)
    return findings


def data_figures(
    asked: EvaluateCommand,
    config: Config,
    model: GPT,
    tokenizer: Tokenizer,
    accelerator: Accelerator,
) -> Record:
    """The loss on the val split of `--data`, by the name of the folder; a collective."""
    place = str(asked.data)
    (source,) = open_sources([Weighted(place)], "val", config.data)
    source.tokenizer.require_same(tokenizer, "the data", asked.run)
    (part,) = eval_splits([source], config.eval.tokens, named=True)
    batch_size = asked.batch_size or config.train.sequences
    end = document_end(config.data, tokenizer)
    found = evaluate_part(model, part, accelerator, batch_size, tokenizer, end)
    return named_figures(found, source.name)


# --------------------------------------------------------------------------- keeping


def record_of(state: TrainState, figures: Record) -> Record:
    """Figures as the record of a checkpoint's step."""
    return {"step": state.step, "tokens": state.tokens, "time": state.seconds} | figures


def other_precision(run: Path, precision: str) -> str:
    """Why figures computed in `precision` are not kept; nothing where the run's are, too."""
    theirs = launched_precision(run)
    if theirs in (None, precision):
        return ""
    return f"not kept: computed in {spelled(precision)}, those of the run in {spelled(str(theirs))}"


def keep(run: Path | None, state: TrainState | None, findings: Findings, precision: str) -> str:
    """Put figures into the metrics of a run in which nobody trains; what became of them."""
    if run is None or state is None:
        return "not kept: this is no run of ours"
    if other := other_precision(run, precision):
        return other
    fate = "not kept: --tokens, --limit or --hellaswag differ from the run's"
    try:
        if findings.kept:
            with locked(run):
                merge_record(run, record_of(state, findings.kept))
            also = f"; {fate}: {', '.join(findings.passing)}" if findings.passing else ""
            fate = f"kept in {run / 'metrics.jsonl'}{also}"
    except (UserError, OSError) as error:  # a run at work, or a folder that cannot be written
        fate = f"not kept: {error}"
    return fate
