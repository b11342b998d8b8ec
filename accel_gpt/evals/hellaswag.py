"""Score HellaSwag (Zellers et al. 2019): which of four endings is the most likely for the model?

Texts, token boundaries and both metrics equal task hellaswag version 1.0 of lm-evaluation-harness
0.4.13. Reads a JSONL file in the original format, or a data set on the Hub.

Shapes: B batch, T tokens, R sequences. A sequence is a question with one of its endings.
"""

import contextlib
import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from accelerate import Accelerator

from accel_gpt.data.shards import token_beyond
from accel_gpt.data.tokenizer import Tokenizer
from accel_gpt.errors import DataError, UserError, one_line, require
from accel_gpt.evals.validation import OnProgress, ValidationBatch, ignore_progress, score_sequences
from accel_gpt.model.language_model import LanguageModel

SHORTEST = 32  # smallest padded length in tokens; assumption: shorter is not faster


@dataclass(frozen=True)
class Question:
    """A text, its endings and the number of the correct ending."""

    # for each ending: the tokens of text and ending, at most block_size + 1, and how many of them
    # belong to the ending
    sequences: tuple[tuple[list[int], int], ...]
    lengths: tuple[int, ...]  # characters of each ending
    label: int  # number of the correct ending, from 0


Questions = tuple[Question, ...]


# --------------------------------------------------------------------------- reading


def read_questions(
    path: str,
    tokenizer: Tokenizer,
    block_size: int,
    vocab_size: int,
    limit: int | None = None,
) -> Questions:
    """Read the questions of a JSONL file or a Hub data set, at most the first `limit`.

    `vocab_size`: tokens of the model. Raises `DataError` naming the line if an entry is not a
    question or does not fit the model.
    """
    questions = []
    for where, entry in islice(read_entries(path), limit):
        try:
            query, endings, label = parse_question(entry)
            question = encode_question(query, endings, label, tokenizer, block_size)
        except ValueError as error:
            raise DataError(f"{where}: {error}") from None
        for tokens, _ in question.sequences:
            if max(tokens) >= vocab_size:
                raise token_beyond(where, max(tokens), tokens.index(max(tokens)), vocab_size)
        questions.append(question)
    if not questions:
        raise DataError(f"eval.hellaswag {path} holds no questions")
    return tuple(questions)


def read_entries(path: str) -> Iterator[tuple[str, Any]]:
    """Yield each line of a file as (name, JSON text), or each row of a data set as (name, object).

    Reads the validation split of a data set on the Hub.
    """
    if Path(path).exists() or path.endswith((".jsonl", ".json")):
        try:
            with open(path, "rb") as lines:
                for number, line in enumerate(lines, start=1):
                    if line.strip():
                        yield f"{path} line {number}", line
        except OSError as error:
            raise UserError(f"eval.hellaswag {path} cannot be read: {error.strerror}") from None
        return
    import datasets

    try:
        rows = datasets.load_dataset(path, split="validation")
    except Exception as error:  # from datasets, pyarrow, fsspec, huggingface_hub, httpx
        raise UserError(
            f"eval.hellaswag {path} is not a file, and cannot be read from the Hub: "
            f"{one_line(error)}"
        ) from None
    for number, row in enumerate(rows):
        yield f"{path} row {number}", row


def parse_question(entry: Any) -> tuple[str, list[str], int]:
    """Return text, endings and label of a question, cleaned as lm-evaluation-harness does.

    If ctx_a, ctx_b or activity_label is missing, reads the text from ctx. Raises `ValueError` if
    the entry is not a question.
    """
    if isinstance(entry, bytes):
        entry = json.loads(entry)
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
        query = entry.get("ctx")
        parts = [entry.get(name) for name in ("activity_label", "ctx_a", "ctx_b")]
        if all(isinstance(part, str) for part in parts):
            activity, first, second = parts
            query = f"{activity}: {first} {second.capitalize()}"
        query = remove_artifacts(query)
        endings = entry["endings"]
        label = int(str(entry["label"]))
        has_endings = isinstance(endings, list) and len(endings) > 1 and all(endings)
        if has_endings and query.strip() and 0 <= label < len(endings):
            return query, [remove_artifacts(ending) for ending in endings], label
    raise ValueError(
        "not a question; expected an object with the texts ctx_a, ctx_b and activity_label (or "
        "ctx), the list of texts `endings`, and `label`, the correct ending's number from 0"
    )


def remove_artifacts(text: str) -> str:
    """Return `text` without the markup of WikiHow."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")


def encode_question(
    query: str, endings: Sequence[str], label: int, tokenizer: Tokenizer, block_size: int
) -> Question:
    """Encode a question as tokens; raise `UserError` if an ending does not fit the model.

    Encodes query and ending as one text. If the stripped query has n tokens, the ending begins
    after the first n tokens of that text. If a text is too long, its beginning is cut.
    """
    query_tokens = len(tokenizer.encode(query.rstrip()))
    sequences = []
    for ending in endings:
        tokens = tokenizer.encode(f"{query} {ending}")
        count = len(tokens) - query_tokens
        require(
            0 < count <= block_size,
            f"an ending has {count:,} tokens ({ending[:40]!r}), but it must have 1 to "
            f"{block_size:,} (model.block_size)",
        )
        sequences.append((tokens[-(block_size + 1) :], count))
    lengths = tuple(len(ending) for ending in endings)
    return Question(sequences=tuple(sequences), lengths=lengths, label=label)


# --------------------------------------------------------------------------- scoring


def score_questions(
    model: LanguageModel,
    questions: Questions,
    accelerator: Accelerator,
    batch_size: int,
    on_progress: OnProgress = ignore_progress,
) -> dict[str, float]:
    """Compute `acc` and `acc_norm` with their standard errors; a collective.

    acc: share of questions whose correct ending has the largest log-likelihood. acc_norm: the same
    with the log-likelihood per character. `batch_size`: sequences of block_size tokens per rank and
    forward pass; batches of shorter sequences are larger. Uses no random numbers.
    """
    nats = ending_losses(model, questions, accelerator, batch_size, on_progress)
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
    model: LanguageModel,
    questions: Questions,
    accelerator: Accelerator,
    batch_size: int,
    on_progress: OnProgress = ignore_progress,
) -> npt.NDArray[np.float64]:
    """Return the negative log-likelihood of each ending in nats, (R,); a collective."""
    sequences = [sequence for question in questions for sequence in question.sequences]
    lengths = [len(tokens) - 1 for tokens, _ in sequences]
    table = score_sequences(
        model=model,
        batches=plan_batches(lengths, batch_size, model.config.block_size),
        read=sequences.__getitem__,
        accelerator=accelerator,
        token_bytes=np.zeros(model.vocab_size),
        on_progress=on_progress,
    )
    return table[:, 0]


def plan_batches(lengths: Sequence[int], batch_size: int, block_size: int) -> list[ValidationBatch]:
    """Group sequences of similar length into batches of few shapes, for a compiled model.

    Padded lengths are block_size, a half, a quarter, and so on. All batches have about the same
    number of tokens, padding included.
    """
    padded_lengths = [block_size]
    while padded_lengths[0] % 2 == 0 and padded_lengths[0] // 2 >= SHORTEST:
        padded_lengths.insert(0, padded_lengths[0] // 2)
    batches: list[ValidationBatch] = []
    shortest_first = sorted(range(len(lengths)), key=lambda number: lengths[number])
    shorter = -1  # the next smaller padded length
    for T in padded_lengths:
        numbers = [number for number in shortest_first if shorter < lengths[number] <= T]
        B = max(1, batch_size * block_size // T)
        for first in range(0, len(numbers), B):
            batches.append((numbers[first : first + B], B, T))
        shorter = T
    return batches
