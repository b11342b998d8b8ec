"""HellaSwag (Zellers et al. 2019): which of four endings does the model find likeliest?

Texts, token boundaries and both metrics are those of lm-evaluation-harness 0.4.13, task
hellaswag version 1.0. Reads a JSONL file in the original format, or a data set of the Hub.

Shapes: B batch, T tokens, R rows: an ending of a question each.
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor

from accel_gpt.config.data import PrepareConfig
from accel_gpt.data.tokenizer import Tokenizer
from accel_gpt.errors import AccelGPTError, DataError, UserError
from accel_gpt.evals.validation import all_reduce_rows
from accel_gpt.files import load_json
from accel_gpt.model.gpt import GPT, evaluating
from accel_gpt.model.loss import IGNORE
from accel_gpt.text.hub import hub_sentence

SHORTEST = 32  # tokens, to which a row is padded at least; assumption: shorter is no faster


@dataclass(frozen=True)
class Row:
    """A question with one of its endings, as the model reads it."""

    tokens: tuple[int, ...]  # at most block_size + 1: the ending, and what fits of the text before
    count: int  # of them that are the ending's


@dataclass(frozen=True)
class Question:
    """A text, its endings and which is right."""

    rows: tuple[Row, ...]
    lengths: tuple[int, ...]  # characters of each ending
    label: int


Questions = tuple[Question, ...]


# --------------------------------------------------------------------------- reading


def read_questions(
    place: str, tokenizer: Tokenizer, block_size: int, limit: int | None = None
) -> Questions:
    """The questions of a JSONL file or a Hub data set (its validation split), or its first.

    Raises `DataError` naming the line that is no question, or does not fit the model.
    """
    found = []
    for where, record in islice(records(place), limit):
        found.append(encode_question(*parse(record, where), tokenizer, block_size, where))
    if not found:
        raise DataError(f"eval.hellaswag {place} holds no questions")
    return tuple(found)


def records(place: str) -> Iterator[tuple[str, Any]]:
    """Where each question stands, and what stands there."""
    path = Path(place).expanduser()
    if not path.exists() and not place.endswith((".jsonl", ".json")):
        yield from hub_records(place)
        return
    number = 0
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                where = f"{place} line {number}"
                if line.strip():
                    yield where, json_of(line, where)
    except UnicodeDecodeError:
        raise DataError(f"{place} is no UTF-8 text after line {number}") from None
    except OSError as error:
        raise UserError(f"eval.hellaswag {place} cannot be read: {error.strerror}") from None


def json_of(line: str, where: str) -> Any:
    """The value of a line."""
    try:
        return load_json(line)
    except ValueError as error:
        raise DataError(f"{where} is not JSON: {error}") from None


def hub_records(place: str) -> Iterator[tuple[str, Any]]:
    """The rows of a Hub data set's validation split."""
    import datasets

    try:
        rows = datasets.load_dataset(place, split="validation")
    except Exception as error:  # of datasets, pyarrow, fsspec, huggingface_hub, httpx
        asked = PrepareConfig(source="dataset", dataset=place, dataset_split="validation")
        raise UserError(f"eval.hellaswag is no file; {hub_sentence(asked, error)}") from None
    for number, row in enumerate(rows):
        yield f"{place} row {number}", row


def parse(record: Any, where: str) -> tuple[str, list[str], int]:
    """Text, endings and label of a question, cleaned as lm-evaluation-harness does.

    `ctx` stands in for ctx_a, ctx_b and activity_label where these are missing.
    """
    if not isinstance(record, dict):
        raise DataError(f"{where} is no object; expected keys ctx, endings and label")
    endings: Any = record.get("endings")
    texts = isinstance(endings, list) and all(isinstance(e, str) and e for e in endings)
    if not texts or len(endings) < 2:
        raise DataError(f"{where} has endings {endings!r:.100}; expected a list of texts")
    label = record.get("label")
    if not re.fullmatch("[0-9]{1,9}", str(label)) or not int(str(label)) < len(endings):
        raise DataError(
            f"{where} has label {label!r:.100}; expected 0 to {len(endings) - 1}, the right ending"
        )
    named, a, b = (record.get(key) for key in ("activity_label", "ctx_a", "ctx_b"))
    if isinstance(named, str) and isinstance(a, str) and isinstance(b, str):
        query = clean(f"{named}: {a} {b.capitalize()}")
    elif isinstance(record.get("ctx"), str):
        query = clean(record["ctx"])
    else:
        raise DataError(f"{where} has no ctx, nor activity_label, ctx_a and ctx_b; expected texts")
    if not query.strip():
        raise DataError(f"{where} has an empty ctx; expected the text that the endings continue")
    return query, [clean(ending) for ending in endings], int(str(label))


def clean(text: str) -> str:
    """`text` without what WikiHow's pages left in it."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")


def encode_question(
    query: str,
    endings: Sequence[str],
    label: int,
    tokenizer: Tokenizer,
    block_size: int,
    where: str,
) -> Question:
    """A question as tokens; `DataError` where an ending does not fit the model."""
    try:
        rows = encode_rows(tokenizer, query, [f" {ending}" for ending in endings], block_size)
    except AccelGPTError as error:  # a character that the tokenizer lacks
        raise DataError(f"{where} cannot be encoded: {error}") from None
    for ending, row in zip(endings, rows, strict=True):
        if not 0 < row.count <= block_size:
            raise DataError(
                f"{where} has an ending of {row.count:,} tokens ({ending[:40]!r}); the model reads "
                f"1 to {block_size:,}, model.block_size"
            )
    return Question(tuple(rows), tuple(map(len, endings)), label)


def encode_rows(
    tokenizer: Tokenizer, context: str, endings: Sequence[str], block_size: int
) -> list[Row]:
    """Tokens of context and ending as one text; those beyond as many as the context alone has are
    the ending's.

    Spaces at the end of `context` belong to the ending. What is too long loses its beginning.
    """
    before = len(tokenizer.encode(context.rstrip()))
    wholes = [tokenizer.encode(context + ending) for ending in endings]
    return [Row(tuple(whole[-(block_size + 1) :]), len(whole) - before) for whole in wholes]


# --------------------------------------------------------------------------- scoring


def score_questions(
    model: GPT,
    questions: Questions,
    accelerator: Accelerator,
    batch_size: int,
    beat: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """`acc` and `acc_norm` with their standard errors; a collective, with no random draw.

    acc: the right ending has the largest log-likelihood; acc_norm: the largest per character.
    `batch_size`: rows of block_size tokens per process and forward, of shorter ones more.
    """
    nats = ending_losses(model, questions, accelerator, batch_size, beat)
    ends = np.cumsum([len(question.rows) for question in questions])[:-1]
    right, right_norm = 0, 0
    for question, losses in zip(questions, np.split(nats, ends), strict=True):
        right += choose(losses) == question.label
        right_norm += choose(losses, question.lengths) == question.label
    return {
        **share("eval/hellaswag_acc", right, len(questions)),
        **share("eval/hellaswag_acc_norm", right_norm, len(questions)),
    }


def choose(losses: npt.NDArray[np.float64], lengths: Sequence[int] | None = None) -> int:
    """The ending with the least loss in nats, or loss per character; the first of equals."""
    if lengths is None:
        return int(losses.argmin())
    sizes = np.array(lengths)
    return int(np.where(sizes > 0, losses / np.maximum(sizes, 1), math.inf).argmin())


def share(name: str, right: int, of: int) -> dict[str, float]:
    """A share and its standard error, that of a mean of zeros and ones; none of a single one."""
    p = right / of
    return {name: p, f"{name}_se": math.sqrt(p * (1 - p) / (of - 1)) if of > 1 else math.nan}


def ending_losses(
    model: GPT,
    questions: Questions,
    accelerator: Accelerator,
    batch_size: int,
    beat: Callable[[], None] = lambda: None,
) -> npt.NDArray[np.float64]:
    """(R,) -log-likelihood of each ending of each question in nats; a collective."""
    rows = [row for question in questions for row in question.rows]
    largest = max(max(row.tokens) for row in rows)
    if largest >= model.vocab_size:
        raise DataError(
            f"eval.hellaswag has token {largest}, beyond the vocabulary of {model.vocab_size:,} of "
            "the model; its tokenizer has more than it was trained with"
        )
    rank, world, device = accelerator.process_index, accelerator.num_processes, accelerator.device
    lengths = [len(row.tokens) - 1 for row in rows]
    planned = plan_batches(lengths, batch_size, model.config.block_size)
    mine = planned[rank::world]
    if accelerator.distributed_type == DistributedType.FSDP:  # all take part in each forward
        mine += [([], *planned[0][1:])] * (-(-len(planned) // world) - len(mine))
    losses = []
    with evaluating(model):
        for chosen, B, T in mine:
            beat()
            tokens, targets = fill([rows[i] for i in chosen], B, T)
            found = model(tokens.to(device), targets.to(device), per_sequence=True)
            losses.append(found[: len(chosen)])
    table = np.zeros(len(rows))
    if losses:
        numbers = [i for chosen, _, _ in mine for i in chosen]
        table[numbers] = torch.cat(losses).float().cpu().double().numpy()
    return all_reduce_rows(table, accelerator)


Batch = tuple[list[int], int, int]  # numbers of rows, B, T


def plan_batches(lengths: Sequence[int], batch_size: int, block_size: int) -> list[Batch]:
    """Rows of about equal length together, all batches of one length in one shape.

    Lengths are block_size halved and halved again, so that a compiled model sees few shapes; a
    batch holds as many tokens at each.
    """
    found = []
    order = sorted(range(len(lengths)), key=lambda i: lengths[i])
    sizes = {i: padded(lengths[i], block_size) for i in order}
    for T in sorted(set(sizes.values())):
        B = max(1, batch_size * block_size // T)
        same = [i for i in order if sizes[i] == T]
        found += [(same[first : first + B], B, T) for first in range(0, len(same), B)]
    return found


def padded(length: int, block_size: int) -> int:
    """Tokens that a row of `length` tokens is filled up to."""
    size = block_size
    while size % 2 == 0 and size // 2 >= max(length, SHORTEST):
        size //= 2
    return size


def fill(rows: Sequence[Row], B: int, T: int) -> tuple[Tensor, Tensor]:
    """`(tokens, targets)`, each (B, T) int64; only the endings' targets count."""
    tokens = np.zeros((B, T), dtype=np.int64)
    targets = np.full((B, T), IGNORE, dtype=np.int64)
    for i, row in enumerate(rows):
        size = len(row.tokens) - 1
        tokens[i, :size] = row.tokens[:-1]
        targets[i, size - row.count : size] = row.tokens[-row.count :]
    return torch.from_numpy(tokens), torch.from_numpy(targets)
