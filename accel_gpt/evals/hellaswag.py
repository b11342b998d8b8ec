"""HellaSwag (Zellers et al. 2019): which of four endings does the model find likeliest?

Texts, token boundaries and both metrics are those of lm-evaluation-harness 0.4.13, task
hellaswag version 1.0. Reads a JSONL file in the original format, or a data set of the Hub.

Shapes: B batch, T tokens, R sequences: a question with one of its endings each.
"""

import contextlib
import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from accelerate import Accelerator

from accel_gpt.data.loader import check_tokens
from accel_gpt.data.tokenizer import Tokenizer
from accel_gpt.errors import DataError, UserError, require
from accel_gpt.evals.validation import Batch, Beat, no_beat, score_sequences
from accel_gpt.model.gpt import GPT

SHORTEST = 32  # tokens to which a sequence is padded at least; assumption: shorter is no faster


@dataclass(frozen=True)
class Question:
    """A text, its endings and which is right."""

    # with each ending at most block_size + 1 tokens, and how many of them are the ending's
    sequences: tuple[tuple[list[int], int], ...]
    lengths: tuple[int, ...]  # characters of each ending
    label: int


Questions = tuple[Question, ...]


# --------------------------------------------------------------------------- reading


def read_questions(
    path: str, tokenizer: Tokenizer, block_size: int, limit: int | None = None
) -> Questions:
    """The questions of a JSONL file or a Hub data set (its validation split), or its first.

    Raises `DataError` naming the line that is not a question, or does not fit the model.
    """
    found = []
    for where, record in islice(read_records(path), limit):
        try:
            found.append(encode_question(*parse(record), tokenizer, block_size))
        except ValueError as error:
            raise DataError(f"{where}: {error}") from None
    if not found:
        raise DataError(f"eval.hellaswag {path} holds no questions")
    return tuple(found)


def read_records(path: str) -> Iterator[tuple[str, Any]]:
    """The name of each line or row, and its content: a JSON text or an object."""
    file = Path(path).expanduser()
    if file.exists() or path.endswith((".jsonl", ".json")):
        try:
            with file.open("rb") as lines:
                for number, line in enumerate(lines, start=1):
                    if line.strip():
                        yield f"{path} line {number}", line
        except OSError as error:
            raise UserError(f"eval.hellaswag {path} cannot be read: {error.strerror}") from None
        return
    try:
        import datasets
    except ImportError:
        raise UserError(
            f"eval.hellaswag {path} is no file, and to read it from the Hub takes the package "
            "datasets; pip install datasets"
        ) from None
    from accel_gpt.config.data import PrepareConfig
    from accel_gpt.text.hub import hub_sentence

    try:
        rows = datasets.load_dataset(path, split="validation")
    except Exception as error:  # of datasets, pyarrow, fsspec, huggingface_hub, httpx
        source = PrepareConfig(source="dataset", dataset=path, dataset_split="validation")
        raise UserError(f"eval.hellaswag is no file; {hub_sentence(source, error)}") from None
    for number, row in enumerate(rows):
        yield f"{path} row {number}", row


def parse(record: Any) -> tuple[str, list[str], int]:
    """Text, endings and label of a question, cleaned as lm-evaluation-harness does.

    `ctx` stands in for ctx_a, ctx_b and activity_label where these are missing.
    """
    if isinstance(record, bytes):
        record = json.loads(record)
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
        named, a, b = (record.get(key) for key in ("activity_label", "ctx_a", "ctx_b"))
        whole = all(isinstance(text, str) for text in (named, a, b))
        query = remove_artifacts(f"{named}: {a} {b.capitalize()}" if whole else record["ctx"])
        texts, label = record["endings"], int(str(record["label"]))
        enough = isinstance(texts, list) and len(texts) > 1 and all(texts)
        if enough and query.strip() and 0 <= label < len(texts):
            return query, [remove_artifacts(text) for text in texts], label
    raise ValueError(
        "not a question; expected an object with the texts ctx_a, ctx_b and activity_label, or "
        "ctx, a list of texts `endings`, and `label`, the number of the right one, from 0"
    )


def remove_artifacts(text: str) -> str:
    """`text` without what WikiHow's pages left in it."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")


def encode_question(
    query: str, endings: Sequence[str], label: int, tokenizer: Tokenizer, block_size: int
) -> Question:
    """A question as tokens; `UserError` where an ending does not fit the model.

    Query and ending are encoded as one text: the tokens beyond as many as the query alone has are
    the ending's, spaces at the end of the query among them. A text that is too long loses its
    beginning.
    """
    before = len(tokenizer.encode(query.rstrip()))
    sequences = []
    for ending in endings:
        tokens = tokenizer.encode(f"{query} {ending}")
        count = len(tokens) - before
        require(
            0 < count <= block_size,
            f"an ending of {count:,} tokens ({ending[:40]!r}); the model reads 1 to "
            f"{block_size:,}, model.block_size",
        )
        sequences.append((tokens[-(block_size + 1) :], count))
    return Question(tuple(sequences), tuple(map(len, endings)), label)


# --------------------------------------------------------------------------- scoring


def score_questions(
    model: GPT,
    questions: Questions,
    accelerator: Accelerator,
    batch_size: int,
    beat: Beat = no_beat,
) -> dict[str, float]:
    """`acc` and `acc_norm` with their standard errors; a collective without random numbers.

    acc: the right ending has the largest log-likelihood; acc_norm: the largest per character.
    `batch_size`: sequences of block_size tokens per rank and forward pass, of shorter ones more.
    """
    nats = ending_losses(model, questions, accelerator, batch_size, beat)
    ends = np.cumsum([len(question.sequences) for question in questions])[:-1]
    right = np.zeros(2)
    for question, losses in zip(questions, np.split(nats, ends), strict=True):
        lengths = np.array(question.lengths)
        per_character = np.where(lengths > 0, losses / np.maximum(lengths, 1), math.inf)
        right += [losses.argmin() == question.label, per_character.argmin() == question.label]
    metrics, count = {}, len(questions)
    for name, p in zip(("acc", "acc_norm"), (right / count).tolist(), strict=True):
        metrics[f"eval/hellaswag_{name}"] = p
        error = math.sqrt(p * (1 - p) / (count - 1)) if count > 1 else math.nan
        metrics[f"eval/hellaswag_{name}_se"] = error
    return metrics


def ending_losses(
    model: GPT,
    questions: Questions,
    accelerator: Accelerator,
    batch_size: int,
    beat: Beat = no_beat,
) -> npt.NDArray[np.float64]:
    """(R,) -log-likelihood of each ending of each question in nats; a collective."""
    sequences = [sequence for question in questions for sequence in question.sequences]
    for tokens, _ in sequences:
        rows = np.array(tokens)[None]
        check_tokens(rows, model.vocab_size, lambda _: ("eval.hellaswag", 0))
    lengths = [len(tokens) - 1 for tokens, _ in sequences]
    batches = plan_batches(lengths, batch_size, model.config.block_size)
    sizes = np.zeros(model.vocab_size)
    return score_sequences(model, batches, sequences.__getitem__, accelerator, sizes, beat=beat)[
        :, 0
    ]


def plan_batches(lengths: Sequence[int], batch_size: int, block_size: int) -> list[Batch]:
    """Sequences of about equal length together, all batches of one length in one shape.

    Lengths are block_size halved and halved again, so that a compiled model sees few shapes; a
    batch holds as many tokens at each.
    """
    sizes = [block_size]
    while sizes[0] % 2 == 0 and sizes[0] // 2 >= SHORTEST:
        sizes.insert(0, sizes[0] // 2)
    found: list[Batch] = []
    order = sorted(range(len(lengths)), key=lambda number: lengths[number])
    for T, group in groupby(order, lambda number: next(s for s in sizes if s >= lengths[number])):
        numbers, B = list(group), max(1, batch_size * block_size // T)
        found += [(numbers[i : i + B], B, T) for i in range(0, len(numbers), B)]
    return found
