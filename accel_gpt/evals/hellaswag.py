"""HellaSwag (Zellers et al. 2019): which of four endings does the model find likeliest?

Texts, token boundaries and both metrics are those of lm-evaluation-harness 0.4.13, task
hellaswag version 1.0. Reads a JSONL file in the original format, or a data set of the Hub.

Shapes: B batch, T tokens, R sequences: a question with one of its endings each.
"""

import contextlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from accelerate import Accelerator

from accel_gpt.data.hub_client import describe_dataset_error
from accel_gpt.data.loader import check_tokens
from accel_gpt.data.tokenizer import Tokenizer
from accel_gpt.errors import DataError, UserError, needs_package, require
from accel_gpt.evals.validation import Beat, ValidationBatch, no_beat, score_sequences
from accel_gpt.model.gpt import GPT

SHORTEST = 32  # tokens to which a sequence is padded at least; assumption: shorter is no faster


@dataclass(frozen=True)
class Question:
    """A text, its endings and the number of the right one."""

    # text and ending as at most block_size + 1 tokens, and how many of these are the ending's
    sequences: tuple[tuple[list[int], int], ...]
    lengths: tuple[int, ...]  # characters of each ending
    label: int  # from 0


Questions = tuple[Question, ...]


# --------------------------------------------------------------------------- reading


def read_questions(
    path: str, tokenizer: Tokenizer, block_size: int, limit: int | None = None
) -> Questions:
    """Read the questions of a JSONL file or of a Hub data set, or the first `limit` of them.

    Of a data set the validation split is read. Raises `DataError`, with the line, for a record that
    is not a question or does not fit the model.
    """
    found = []
    for where, record in islice(read_records(path), limit):
        try:
            query, endings, label = parse_question(record)
            found.append(encode_question(query, endings, label, tokenizer, block_size))
        except ValueError as error:
            raise DataError(f"{where}: {error}") from None
    if not found:
        raise DataError(f"eval.hellaswag {path} holds no questions")
    return tuple(found)


def read_records(path: str) -> Iterator[tuple[str, Any]]:
    """Yield the name of each line or row, and its content: a JSON text or an object."""
    file = Path(path).expanduser()
    if file.exists() or path.endswith((".jsonl", ".json")):
        return read_jsonl_lines(path, file)
    return read_hub_rows(path)


def read_jsonl_lines(path: str, file: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the name and the JSON text of each line of a file; `path` is its name in messages."""
    try:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield f"{path} line {number}", line
    except OSError as error:
        raise UserError(f"eval.hellaswag {path} cannot be read: {error.strerror}") from None


def read_hub_rows(name: str) -> Iterator[tuple[str, Any]]:
    """Yield the name and the content of each row in the validation split of a Hub data set."""
    with needs_package("datasets"):
        import datasets
    try:
        rows = datasets.load_dataset(name, split="validation")
    except Exception as error:  # of datasets, pyarrow, fsspec, huggingface_hub, httpx
        problem = describe_dataset_error(name, None, "validation", error)
        raise UserError(f"eval.hellaswag {name} is no file, and {problem}") from None
    for number, row in enumerate(rows):
        yield f"{name} row {number}", row


def parse_question(record: Any) -> tuple[str, list[str], int]:
    """Return text, endings and label of a question, cleaned as lm-evaluation-harness does.

    `ctx` stands in for ctx_a, ctx_b and activity_label if these are missing. Raises `ValueError`
    for a record that is not a question.
    """
    if isinstance(record, bytes):
        record = json.loads(record)
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
        query = remove_artifacts(question_text(record))
        endings = record["endings"]
        label = int(str(record["label"]))
        has_endings = isinstance(endings, list) and len(endings) > 1 and all(endings)
        if has_endings and query.strip() and 0 <= label < len(endings):
            return query, [remove_artifacts(ending) for ending in endings], label
    raise ValueError(
        "not a question; expected an object with the texts ctx_a, ctx_b and activity_label, or "
        "ctx, a list of texts `endings`, and `label`, the number of the right one, from 0"
    )


def question_text(record: Mapping[str, Any]) -> str:
    """Return the text before the endings: activity, ctx_a and ctx_b, or else ctx."""
    activity = record.get("activity_label")
    first = record.get("ctx_a")
    second = record.get("ctx_b")
    if isinstance(activity, str) and isinstance(first, str) and isinstance(second, str):
        return f"{activity}: {first} {second.capitalize()}"
    text: str = record["ctx"]
    return text


def remove_artifacts(text: str) -> str:
    """Return `text` without the markup that WikiHow's pages left in it."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")


def encode_question(
    query: str, endings: Sequence[str], label: int, tokenizer: Tokenizer, block_size: int
) -> Question:
    """Encode a question as tokens; raises `UserError` if an ending does not fit the model.

    Query and ending are encoded as one text: the tokens beyond as many as the query alone has are
    the ending's, spaces at the end of the query among them. A text that is too long loses its
    beginning.
    """
    query_tokens = len(tokenizer.encode(query.rstrip()))
    sequences = []
    for ending in endings:
        tokens = tokenizer.encode(f"{query} {ending}")
        count = len(tokens) - query_tokens
        require(
            0 < count <= block_size,
            f"an ending of {count:,} tokens ({ending[:40]!r}); the model reads 1 to "
            f"{block_size:,}, model.block_size",
        )
        sequences.append((tokens[-(block_size + 1) :], count))
    lengths = tuple(len(ending) for ending in endings)
    return Question(sequences=tuple(sequences), lengths=lengths, label=label)


# --------------------------------------------------------------------------- scoring


def score_questions(
    model: GPT,
    questions: Questions,
    accelerator: Accelerator,
    batch_size: int,
    beat: Beat = no_beat,
) -> dict[str, float]:
    """Compute `acc` and `acc_norm` with their standard errors.

    A collective without random numbers. acc: the right ending has the largest log-likelihood;
    acc_norm: the largest per character. `batch_size`: sequences of block_size tokens per rank and
    forward pass, of shorter ones more.
    """
    nats = ending_losses(model, questions, accelerator, batch_size, beat)
    right = 0
    right_per_character = 0
    first = 0
    for question in questions:
        losses = nats[first : first + len(question.sequences)]
        first += len(question.sequences)
        lengths = np.array(question.lengths)
        per_character = np.where(lengths > 0, losses / np.maximum(lengths, 1), math.inf)
        right += int(losses.argmin() == question.label)
        right_per_character += int(per_character.argmin() == question.label)
    metrics = {}
    count = len(questions)
    for name, number in (("acc", right), ("acc_norm", right_per_character)):
        p = number / count
        error = math.sqrt(p * (1 - p) / (count - 1)) if count > 1 else math.nan
        metrics[f"eval/hellaswag_{name}"] = p
        metrics[f"eval/hellaswag_{name}_se"] = error
    return metrics


def ending_losses(
    model: GPT,
    questions: Questions,
    accelerator: Accelerator,
    batch_size: int,
    beat: Beat = no_beat,
) -> npt.NDArray[np.float64]:
    """Compute the -log-likelihood of each ending of each question in nats, (R,); a collective."""
    sequences = [sequence for question in questions for sequence in question.sequences]
    for tokens, _ in sequences:
        rows = np.array(tokens)[None]
        check_tokens(rows, model.vocab_size, lambda _: ("eval.hellaswag", 0))
    lengths = [len(tokens) - 1 for tokens, _ in sequences]

    def read(number: int) -> tuple[list[int], int]:
        return sequences[number]

    table = score_sequences(
        model=model,
        batches=plan_batches(lengths, batch_size, model.config.block_size),
        read=read,
        accelerator=accelerator,
        token_bytes=np.zeros(model.vocab_size),
        beat=beat,
    )
    return table[:, 0]


def plan_batches(lengths: Sequence[int], batch_size: int, block_size: int) -> list[ValidationBatch]:
    """Put sequences of about equal length together, all batches of one length in one shape.

    Lengths are block_size halved and halved again, so that a compiled model sees few shapes; a
    batch holds as many tokens at each.
    """
    padded_lengths = [block_size]
    while padded_lengths[0] % 2 == 0 and padded_lengths[0] // 2 >= SHORTEST:
        padded_lengths.insert(0, padded_lengths[0] // 2)
    batches: list[ValidationBatch] = []
    shortest_first = sorted(range(len(lengths)), key=lambda number: lengths[number])
    shorter = -1  # the padded length before T
    for T in padded_lengths:
        numbers = [number for number in shortest_first if shorter < lengths[number] <= T]
        B = max(1, batch_size * block_size // T)
        for first in range(0, len(numbers), B):
            batches.append((numbers[first : first + B], B, T))
        shorter = T
    return batches
