"""Evaluate a model without training, for `accel-gpt evaluate` and `eval.only`.

Reads the data that a config names. Writes no files.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from accelerate import Accelerator

from accel_gpt.config.data import Weighted
from accel_gpt.config.experiment import Config
from accel_gpt.console import write_err, write_out
from accel_gpt.data.corpus import Corpus, EvalSplit, document_end, eval_splits, open_corpus
from accel_gpt.data.sources import Source, open_sources
from accel_gpt.data.tokenizer import Tokenizer
from accel_gpt.errors import require
from accel_gpt.evals.evaluation import Evaluation, open_evaluation
from accel_gpt.evals.hellaswag import Questions, read_questions, score_questions
from accel_gpt.evals.validation import evaluate_source
from accel_gpt.files import strict_json
from accel_gpt.launcher import is_main
from accel_gpt.model.gpt import GPT
from accel_gpt.training.accelerator import join_ranks, set_up_model
from accel_gpt.training.checkpoint import find_checkpoint, read_state
from accel_gpt.training.display import Progress
from accel_gpt.training.precision import requested_precision, resolve_precision
from accel_gpt.training.run_folder import RunFolder, checkpoint_steps
from accel_gpt.training.setup import meeting_ranks, pin_data
from accel_gpt.training.stopping import INIT, Watchdog

# Types of `load_pretrained` and `open_initial_weights`; this folder may not import their file
LoadCheckpoint = Callable[[str], tuple[GPT, Tokenizer]]
OpenWeights = Callable[[Config, Corpus, Callable[[str], None]], Callable[[GPT], None]]
# precision of training -> precision of evaluation; fp8 is only for training
EVALUATED_IN: Mapping[str, Literal["no", "bf16", "fp16"]] = MappingProxyType(
    {"no": "no", "bf16": "bf16", "fp16": "fp16", "fp8": "bf16"}
)
DTYPES = MappingProxyType({"no": "float32", "bf16": "bf16", "fp16": "fp16"})
BATCH_SIZE = 8  # sequences, if train.micro_batch_size is auto; assumption
LARGEST_EXPONENT = 700.0  # exp() of more overflows float64

LOSS = re.compile(r"eval/(train|val)_loss(/.+)?")
OF_LOSSES = re.compile(r"eval/(train|val)_(loss|perplexity|bits_per_byte)(_se)?(/.+)?")


# --------------------------------------------------------------------------- evaluating


def start_evaluation(config: Config, run: Path | None) -> Accelerator:
    """Join the ranks, with the device and precision of training but not its single thread.

    If `train.mixed_precision` is not set, uses the recorded precision of the last launch of `run`,
    as `accelerate launch` may have set it. On a CPU, uses float32 instead of fp16.
    """
    precision = config.train.mixed_precision or launched_precision(run)
    train = replace(config.train, mixed_precision=precision)
    # train.reproducible sets one thread, which only training needs
    with meeting_ranks(config):
        state = join_ranks(replace(config, train=replace(train, reproducible=False)))
    config = resolve_precision(replace(config, train=train))
    on_cpu = state.device.type == "cpu"
    evaluated_in = EVALUATED_IN.get(requested_precision(config))
    if on_cpu and evaluated_in == "fp16":
        evaluated_in = "no"
    return Accelerator(cpu=on_cpu, mixed_precision=evaluated_in)


def launched_precision(run: Path | None) -> Literal["no", "bf16", "fp16"] | None:
    """Return the precision for evaluation from the last launch of a run; None if not recorded."""
    if run is None:
        return None
    return EVALUATED_IN.get(str(RunFolder(run).last_launch("mixed_precision")))


def with_batch_size(config: Config) -> Config:
    """Replace `train.micro_batch_size: auto` by `BATCH_SIZE`: only training resolves auto."""
    if config.train.micro_batch_size != "auto":
        return config
    return replace(config, train=replace(config.train, micro_batch_size=BATCH_SIZE))


def evaluate_only(
    config: Config,
    accelerator: Accelerator,
    load_checkpoint: LoadCheckpoint,
    open_weights: OpenWeights,
) -> int:
    """Print the metrics of a run's newest checkpoint, or of the model in `model.init_from`.

    For `eval.only`. Call `start_evaluation` first. Returns the exit code.
    """
    config = with_batch_size(config)
    out = Path(config.out_dir)
    step = 0
    if checkpoint_steps(out / "checkpoints"):
        checkpoint = find_checkpoint(out)
        step = read_state(checkpoint).step
        model, tokenizer = load_checkpoint(str(checkpoint))
        model = model.to(accelerator.device)
    else:
        require(
            config.model.init_from != "scratch",
            f"eval.only is true but {out} holds no checkpoint and model.init_from is scratch; set "
            "out_dir to a run with a checkpoint, or model.init_from to other weights",
        )
        corpus = open_corpus(pin_data(config))
        tokenizer = corpus.tokenizer
        load_weights = open_weights(config, corpus, write_err)
        model = GPT.allocate(config.model, corpus.vocab_size, accelerator.device)
        load_weights(model)
    set_up_model(model, config.train)
    metrics = evaluate_model(
        model=model,
        tokenizer=tokenizer,
        config=config,
        accelerator=accelerator,
        name=str(out),
    )
    accelerator.end_training()
    if is_main():
        report = Report(
            name=str(out),
            step=step,
            precision=accelerator.mixed_precision,
            metrics=metrics,
        )
        write_out(report.as_table())
    return 0


def evaluate_model(
    model: GPT,
    tokenizer: Tokenizer,
    config: Config,
    accelerator: Accelerator,
    name: str,
    data: str | None = None,
) -> dict[str, float]:
    """Compute the losses and the HellaSwag scores of a model; a collective.

    `config` sets the data, the evaluation, the batch size and the residual stream in `data`,
    `eval`, `train.micro_batch_size` and `train.bf16_residual`. If `data` is set, evaluates the val
    split of this folder or URL instead. `name`: name of the model in messages. Raises `DataError`
    if the data has another tokenizer.
    """
    model.bf16_residual = config.train.bf16_residual  # as in the run
    questions: Questions = ()
    sources: Sequence[Source] = ()  # of `data`
    splits: Sequence[EvalSplit] = ()
    evaluation: Evaluation | None = None
    with Watchdog(config.train.init_timeout, INIT, "has not opened data and model"):
        model = accelerator.prepare_model(model.eval(), evaluation_mode=True)
        if config.eval.hellaswag is not None:
            questions = read_questions(
                path=config.eval.hellaswag,
                tokenizer=tokenizer,
                block_size=model.config.block_size,
                limit=config.eval.hellaswag_limit,
                vocab_size=model.vocab_size,
            )
        if data is not None:
            sources = open_sources([Weighted(data)], "val", config.data)
            sources[0].tokenizer.require_same(tokenizer, "the data", name)
            splits = eval_splits(sources, config.eval.tokens, named=True)
        elif config.data.train:
            losses_only = replace(config, eval=replace(config.eval, hellaswag=None))
            corpus = open_corpus(pin_data(losses_only))
            corpus.tokenizer.require_same(tokenizer, "the data", name)
            evaluation = open_evaluation(losses_only, corpus)
    metrics: dict[str, float] = {}
    with (
        Watchdog(config.train.step_timeout) as watchdog,
        Progress("evaluating", "batches", active=accelerator.is_main_process) as progress,
    ):

        def on_progress(done: int, total: int) -> None:
            progress.update(done, total)
            watchdog.heartbeat()

        for split in splits:
            score = evaluate_source(
                model=model,
                source=split,
                accelerator=accelerator,
                batch_size=config.train.micro_batch_sequences,
                tokenizer=tokenizer,
                document_end=document_end(config.data, sources),
                on_progress=on_progress,
            )
            metrics |= score.metrics("val", split.name)
        if evaluation is not None:
            metrics |= evaluation.metrics(model, accelerator, on_progress)
            if config.eval.whole_at_end:
                metrics |= evaluation.whole_val_metrics(model, accelerator, on_progress)
        if questions:
            batch_size = config.train.micro_batch_sequences
            metrics |= score_questions(model, questions, accelerator, batch_size, on_progress)
    return metrics


# --------------------------------------------------------------------------- showing


@dataclass(frozen=True)
class Report:
    """The metrics of an evaluated model."""

    name: str
    step: int | None  # of the checkpoint; None: not a checkpoint
    precision: str  # of `Accelerator.mixed_precision`
    metrics: Mapping[str, float]

    def as_json(self) -> str:
        """Return one JSON object; values that are not finite become null."""
        content = {
            "model": self.name,
            "step": self.step,
            "precision": DTYPES[self.precision],
            "metrics": self.metrics,
        }
        return strict_json(content) + "\n"

    def as_table(self) -> str:
        """Return a table of the losses with standard errors, followed by all other metrics."""
        title = self.name if self.step is None else f"{self.name}, step {self.step:,}"
        lines = [f"{title}, in {DTYPES[self.precision]}"]
        losses = self.loss_lines()
        if losses:
            header = f"{'':<20}{'loss':>16}  {'perplexity':>12}  {'bits per byte':>16}"
            lines += ["", header, *losses]
        rest = [key for key in self.metrics if not OF_LOSSES.fullmatch(key)]
        if rest:
            lines.append("")
        for key in rest:
            if not (key.endswith("_se") and key.removesuffix("_se") in rest):
                lines.append(f"{key.removeprefix('eval/'):<32}{self.with_error(key):>20}")
        return "\n".join([*lines, ""])

    def loss_lines(self) -> list[str]:
        """Return a line for each split and source: loss, perplexity and bits per byte."""
        lines = []
        for key, value in self.metrics.items():
            match = LOSS.fullmatch(key)
            if match is None:
                continue
            split = match[1]
            source = match[2] or ""
            loss = self.with_error(f"eval/{split}_loss", source)
            perplexity = f"{math.exp(value):,.2f}" if value < LARGEST_EXPONENT else "inf"
            bits = self.with_error(f"eval/{split}_bits_per_byte", source)
            lines.append(f"{split + source:<20}{loss:>16}  {perplexity:>12}  {bits:>16}")
        return lines

    def with_error(self, key: str, source: str = "") -> str:
        """Return a metric with its standard error, as `3.1416 ±0.0123`; "" if it is missing."""
        value = self.metrics.get(key + source)
        if value is None:
            return ""
        error = self.metrics.get(f"{key}_se{source}", math.nan)
        return f"{value:.4f}" + (f" ±{error:.4f}" if math.isfinite(error) else "")
