"""List and make the evaluations of a run: each computes metrics of a model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from accelerate import Accelerator

from accel_gpt.config.experiment import Config
from accel_gpt.config.stages import longest_stage, stage_configs
from accel_gpt.data.corpus import Corpus
from accel_gpt.data.tokenizer import Tokenizer
from accel_gpt.evals.hellaswag import read_questions, score_questions
from accel_gpt.evals.validation import OnProgress, check_evaluated, ignore_progress, score_splits
from accel_gpt.model.gpt import evaluating
from accel_gpt.model.language_model import LanguageModel
from accel_gpt.training.metrics import checked_record

# Computes metrics, called with model, accelerator and on_progress; a collective. It calls
# `on_progress` before each batch, and leaves no trace in the model.
Evaluation = Callable[..., dict[str, float]]


def evaluate(
    evaluations: Sequence[Evaluation],
    model: LanguageModel,
    accelerator: Accelerator,
    on_progress: OnProgress = ignore_progress,
) -> dict[str, float]:
    """Return the metrics of all evaluations; a collective."""
    metrics: dict[str, float] = {}
    for evaluation in evaluations:
        metrics |= evaluation(model=model, accelerator=accelerator, on_progress=on_progress)
    return metrics


def open_evaluations(config: Config, corpus: Corpus) -> list[Evaluation]:
    """Open the evaluations that a config asks for.

    Raises `UserError` or `DataError` if their data cannot be evaluated.
    """
    check_yardstick(config, corpus)
    evaluations = [open_losses(stage_configs(config)[0], corpus)]
    if config.eval.hellaswag is not None:
        block_size = config.model.block_size
        whole = stage_configs(config)[longest_stage(config)]
        evaluations.append(
            open_hellaswag(whole, corpus.tokenizer, block_size, vocab_size=corpus.vocab_size)
        )
    return [*evaluations, *open_own_evaluations(config, corpus.tokenizer, corpus)]


def check_yardstick(config: Config, corpus: Corpus) -> None:
    """Raise `UserError` if no evaluation has the metric `eval.best`; --code may bring any."""
    if config.own.evaluate is not None:
        return
    names = ["eval/val_loss", "eval/val_perplexity", "eval/val_bits_per_byte"]
    names += ["eval/train_loss", "eval/train_perplexity", "eval/train_bits_per_byte"]
    for source in corpus.evaluated["val"]:
        if source.name:
            names += [f"eval/val_loss/{source.name}", f"eval/val_bits_per_byte/{source.name}"]
    if config.eval.hellaswag is not None:
        names += ["eval/hellaswag_acc", "eval/hellaswag_acc_norm"]
    config.eval.yardstick.value(dict.fromkeys(names, 0.0))


@dataclass(frozen=True)
class Evaluated:
    """What `evaluate(run)` in the file of --code gets, in training and from `accel-gpt evaluate`.

    `gpt` is in evaluation mode, without gradients, and computes in the precision of the run. Call
    `on_progress(done, total)` in a long evaluation, equally often on all ranks.
    """

    config: Config
    accelerator: Accelerator
    gpt: LanguageModel
    tokenizer: Tokenizer
    corpus: Corpus | None  # None: accel-gpt evaluate reads other data than the run's
    on_progress: OnProgress


def open_own_evaluations(
    config: Config, tokenizer: Tokenizer, corpus: Corpus | None
) -> list[Evaluation]:
    """Return the evaluation in the file of --code in a list; the list is empty without one."""
    own = config.own
    if own.evaluate is None:
        return []
    function = own.evaluate

    def metrics(
        model: LanguageModel, accelerator: Accelerator, on_progress: OnProgress
    ) -> dict[str, float]:
        run = Evaluated(
            config=config,
            accelerator=accelerator,
            gpt=model,
            tokenizer=tokenizer,
            corpus=corpus,
            on_progress=on_progress,
        )
        with evaluating(model):
            return checked_record(function(run=run, config=config), own.place("evaluate"))

    return [metrics]


def open_losses(config: Config, corpus: Corpus) -> Evaluation:
    """Return the evaluation that computes the losses of both splits, for the config of a stage."""
    block_size = config.model.block_size
    check_evaluated(corpus, block_size)
    batch_size = config.train.micro_batch_sequences
    return partial(score_splits, corpus=corpus, batch_size=batch_size, block_size=block_size)


def open_hellaswag(
    config: Config,
    tokenizer: Tokenizer,
    block_size: int,
    vocab_size: int,
    limit: int | None = None,
) -> Evaluation:
    """Read the questions of `eval.hellaswag` for a model with this context and vocabulary.

    `limit`: read only the first questions; None: all.
    """
    assert config.eval.hellaswag is not None
    questions = read_questions(
        path=config.eval.hellaswag,
        tokenizer=tokenizer,
        block_size=block_size,
        limit=limit,
        vocab_size=vocab_size,
    )
    batch_size = config.train.micro_batch_sequences
    return partial(score_questions, questions=questions, batch_size=batch_size)
