"""All metrics of an evaluation: the loss of both splits, HellaSwag, tasks."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from accelerate import Accelerator

from accel_gpt.config.experiment import Config
from accel_gpt.data.corpus import Corpus
from accel_gpt.data.sources import is_url, train_paths, val_paths
from accel_gpt.errors import require
from accel_gpt.evals.validation import Beat, check_evaluated, evaluate_splits, no_beat
from accel_gpt.launcher import world_size
from accel_gpt.model.gpt import GPT

if TYPE_CHECKING:
    from accel_gpt.evals.hellaswag import Questions
    from accel_gpt.evals.tasks import Tasks


@dataclass(frozen=True)
class Evaluation:
    """The data on which a model is evaluated."""

    corpus: Corpus
    batch_size: int  # sequences of block_size tokens per rank and forward pass
    questions: "Questions" = ()  # of HellaSwag
    tasks: "Tasks | None" = None  # of lm-evaluation-harness
    tasks_every: int = 0  # steps

    def metrics(
        self,
        model: GPT,
        accelerator: Accelerator,
        beat: Beat = no_beat,
        step: int = 0,
        last: bool = False,
    ) -> dict[str, float]:
        """The eval/ metrics of the record of a step; a collective.

        `beat` is called before each batch; `last`: the step is the last one.
        """
        found = evaluate_splits(model, self.corpus, accelerator, self.batch_size, beat)
        if self.questions:
            from accel_gpt.evals.hellaswag import score_questions

            found |= score_questions(model, self.questions, accelerator, self.batch_size, beat)
        due = last or bool(self.tasks_every and step % self.tasks_every == 0)
        if self.tasks and due:
            tokenizer = self.corpus.tokenizer
            found |= self.tasks.score_weights(model, tokenizer, accelerator, self.batch_size, beat)
        return found

    def whole_val(
        self, model: GPT, accelerator: Accelerator, beat: Beat = no_beat
    ) -> dict[str, float]:
        """The eval/whole_val metrics, over all tokens of the val split; a collective."""
        val = tuple(replace(part, tokens=None) for part in self.corpus.evaluated["val"])
        whole = replace(self.corpus, evaluated={"whole_val": val})
        return evaluate_splits(model, whole, accelerator, self.batch_size, beat)


def open_evaluation(config: Config, corpus: Corpus) -> Evaluation:
    """Open what the config evaluates on; raises now for bad data or questions, not when due."""
    if config.eval.whole_at_end:
        val = val_paths(config.data) or train_paths(config.data)
        require(
            not any(is_url(source.path) for source in val),
            "eval.whole_at_end is true but the val split is remote, and eval.tokens tokens of it "
            "are held; leave eval.whole_at_end out",
        )
    check_evaluated(corpus, config.model.block_size)
    questions: Questions = ()
    if config.eval.hellaswag is not None:
        from accel_gpt.evals.hellaswag import read_questions

        path, limit = config.eval.hellaswag, config.eval.hellaswag_limit
        questions = read_questions(path, corpus.tokenizer, config.model.block_size, limit)
    tasks: Tasks | None = None
    if config.eval.tasks:
        from accel_gpt.evals.tasks import open_tasks
        from accel_gpt.hub.hf_config import matching_preset

        matching_preset(config.model)  # raises if transformers has no such model
        evals = config.eval
        tasks = open_tasks(evals.tasks, evals.tasks_path, evals.tasks_limit, world_size())
    return Evaluation(corpus, config.train.sequences, questions, tasks, config.eval.tasks_every)
