"""Compute all metrics of an evaluation: the loss of both splits, and HellaSwag."""

from dataclasses import dataclass, replace

from accelerate import Accelerator

from accel_gpt.config.experiment import Config
from accel_gpt.data.corpus import Corpus
from accel_gpt.data.remote import is_url
from accel_gpt.data.sources import train_paths, val_paths
from accel_gpt.errors import require
from accel_gpt.evals.hellaswag import Questions, read_questions, score_questions
from accel_gpt.evals.validation import OnProgress, check_evaluated, evaluate_splits, ignore_progress
from accel_gpt.model.gpt import GPT


@dataclass(frozen=True)
class Evaluation:
    """The data to evaluate a model on."""

    corpus: Corpus
    batch_size: int  # sequences of block_size tokens per rank and forward pass
    questions: Questions = ()  # of HellaSwag

    def metrics(
        self, model: GPT, accelerator: Accelerator, on_progress: OnProgress = ignore_progress
    ) -> dict[str, float]:
        """Compute the eval/ metrics of a model; a collective. Call `on_progress` at each batch."""
        metrics = evaluate_splits(model, self.corpus, accelerator, self.batch_size, on_progress)
        if self.questions:
            metrics |= score_questions(
                model, self.questions, accelerator, self.batch_size, on_progress
            )
        return metrics

    def whole_val_metrics(
        self, model: GPT, accelerator: Accelerator, on_progress: OnProgress = ignore_progress
    ) -> dict[str, float]:
        """Compute the eval/whole_val metrics over all tokens of the val split; a collective."""
        val = tuple(replace(part, tokens=None) for part in self.corpus.evaluated["val"])
        whole = replace(self.corpus, evaluated={"whole_val": val})
        return evaluate_splits(model, whole, accelerator, self.batch_size, on_progress)


def open_evaluation(config: Config, corpus: Corpus) -> Evaluation:
    """Check the splits and read the questions that the config evaluates on.

    Raises `UserError` or `DataError` if the data or questions cannot be evaluated.
    """
    if config.eval.whole_at_end:
        val = val_paths(config.data) or train_paths(config.data)
        require(
            not any(is_url(source.path) for source in val),
            "eval.whole_at_end is true but the val split is remote, and only eval.tokens tokens of "
            "it are downloaded; set eval.whole_at_end to false",
        )
    check_evaluated(corpus, config.model.block_size)
    questions: Questions = ()
    if config.eval.hellaswag is not None:
        questions = read_questions(
            path=config.eval.hellaswag,
            tokenizer=corpus.tokenizer,
            block_size=config.model.block_size,
            limit=config.eval.hellaswag_limit,
            vocab_size=corpus.vocab_size,
        )
    return Evaluation(
        corpus=corpus, batch_size=config.train.micro_batch_sequences, questions=questions
    )
