"""HellaSwag: the texts and figures of lm-evaluation-harness, at any number of processes."""

import copy
import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from accel_gpt.config.model import ModelConfig
from accel_gpt.data.tokenizer import BytesTokenizer, CharsTokenizer, Tokenizer
from accel_gpt.errors import DataError, UserError
from accel_gpt.evals import hellaswag
from accel_gpt.evals.hellaswag import (
    encode_question,
    ending_losses,
    parse_question,
    read_questions,
    score_questions,
)
from accel_gpt.model.gpt import GPT
from accel_gpt.prepare.bpe import train_bpe
from tests.conftest import text_of
from tests.helpers.processes import together

BLOCK = 64


def question(i: int) -> dict[str, Any]:
    """Return a question in the original format, some with markup of WikiHow's pages."""
    words = text_of(60, seed=i).split()
    a = " ".join(words[: 4 + 3 * i])
    return {
        "ind": i,
        "activity_label": "Going to war [step]" if i % 2 else "Sailing",
        "ctx_a": f"[header] {a} [title] {words[20]}.",
        "ctx_b": "the King" if i % 3 else "",
        "ctx": f"{a} {words[20]}.",
        "endings": [
            " ".join(words[40 + k : 43 + 2 * k]) + " [substeps]" * (k == 1) for k in range(4)
        ],
        "split": "val",
        "label": str(i % 4) if i % 2 else i % 4,
        "source_id": f"made~up_{i}",
    }


def write(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(tmp_path / "hellaswag_val.jsonl", [question(i) for i in range(9)])


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    return train_bpe([text_of(3000)], 300)


@pytest.fixture(scope="module")
def model() -> GPT:
    torch.manual_seed(0)
    return GPT(ModelConfig(n_layer=2, n_head=2, n_embd=32, block_size=BLOCK, dropout=0.5), 300)


def prepared(record: dict[str, Any]) -> tuple[str, list[str]]:
    """Return query and choices by lm-evaluation-harness's recipe, implemented again."""

    def without_artifacts(text: str) -> str:
        text = text.strip().replace(" [title]", ". ")
        while "[" in text and "]" in text[text.index("[") :]:
            start = text.index("[")
            text = text[:start] + text[text.index("]", start) + 1 :]
        return text.replace("  ", " ")

    context = record["ctx_a"] + " " + record["ctx_b"].capitalize()
    query = without_artifacts(record["activity_label"] + ": " + context)
    return query, [without_artifacts(ending) for ending in record["endings"]]


def by_hand(
    records: list[dict[str, Any]],
    encode: Callable[[str], list[int]],
    logits_of: Callable[[torch.Tensor], torch.Tensor],
) -> list[list[float]]:
    """Return the log-likelihood of each ending, computed one after the other."""
    found = []
    for record in records:
        query, endings = prepared(record)
        row = []
        for ending in endings:
            stripped = query.rstrip()
            whole, before = encode(f"{query} {ending}"), len(encode(stripped))
            window = whole[-(BLOCK + 1) :]
            count = len(whole) - before
            logits = logits_of(torch.tensor([window[:-1]]))[0].double().log_softmax(-1)
            likely = [logits[i, window[i + 1]].item() for i in range(len(window) - 1)]
            row.append(sum(likely[-count:]))
        found.append(row)
    return found


# --------------------------------------------------------------------------- reading


def test_texts_are_those_of_the_harness() -> None:
    for i in range(9):
        query, endings, label = parse_question(question(i))
        assert (query, endings) == prepared(question(i))
        assert label == i % 4
        assert "[" not in query
        assert ("The king" in query) == bool(i % 3)
    record = {"ctx": "A man [title] runs.", "endings": ["on", "off"], "label": 1}
    assert parse_question(record) == (
        "A man. runs.",
        ["on", "off"],
        1,
    )  # ctx, if its parts are missing


def test_the_boundary_is_where_the_tokens_of_the_text_alone_end(bpe: Tokenizer) -> None:
    """Spaces belong to the ending, and so does a token across the boundary."""
    for query, ending in (("the king", " went to war"), ("the king  ", "   went")):
        ((tokens, count),) = encode_question(query, [ending.strip()], 0, bpe, BLOCK).sequences
        assert bpe.decode(tokens) == "the king" + ending
        assert bpe.decode(tokens[-count:]) == ending
    long = text_of(200).strip()
    ((tokens, count),) = encode_question(long, ["went to war"], 0, bpe, BLOCK).sequences
    assert tokens == bpe.encode(f"{long} went to war")[-(BLOCK + 1) :]  # its beginning is cut
    assert bpe.decode(tokens[-count:]) == " went to war"


good = question(0)
NOT_QUESTIONS = (
    *({**good, "endings": "abcd"}, {**good, "endings": ["one"]}, {**good, "endings": ["one", ""]}),
    *({**good, "endings": ["one", 2]}, {**good, "label": 4}, {**good, "label": -1}, [1, 2]),
    *({"endings": ["a", "b"], "label": 0}, {"ctx": " ", "endings": ["a", "b"], "label": 0}),
)


def test_a_line_that_is_not_a_question_is_named(tmp_path: Path, file: Path) -> None:
    path = tmp_path / "bad.jsonl"
    lines = {json.dumps(content): "not a question; expected" for content in NOT_QUESTIONS}
    lines |= {
        '{"ctx": "a': "Invalid control character",
        '{"ctx": "\xe9"}': "can't decode byte 0xe9",
    }
    lines[json.dumps({**good, "endings": ["x" * 99, "y"]})] = "an ending has 100 tokens"
    for line, message in lines.items():
        path.write_text(f"{json.dumps(good)}\n\n{line}\n", encoding="latin-1")
        with pytest.raises(DataError, match=f"bad.jsonl line 3: .*{message}"):
            read_questions(str(path), BytesTokenizer(), BLOCK, vocab_size=257)
    with pytest.raises(DataError, match="line 1: the chars tokenizer has no token"):
        read_questions(str(file), CharsTokenizer("abc"), BLOCK, vocab_size=3)
    path.write_text("")
    with pytest.raises(DataError, match="holds no questions"):
        read_questions(str(path), BytesTokenizer(), BLOCK, vocab_size=257)
    with pytest.raises(UserError, match=r"eval.hellaswag nowhere.jsonl cannot be read: No such"):
        read_questions("nowhere.jsonl", BytesTokenizer(), BLOCK, vocab_size=257)


def test_a_hub_data_set_is_read_as_the_file(
    file: Path, bpe: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    names = []

    def load_dataset(name: str, split: str) -> list[Any]:
        names.append((name, split))
        return rows

    library = SimpleNamespace(load_dataset=load_dataset)  # the real one takes seconds to import
    monkeypatch.setitem(sys.modules, "datasets", library)
    questions = read_questions("Rowan/hellaswag", bpe, BLOCK, bpe.vocab_size)
    assert questions == read_questions(str(file), bpe, BLOCK, bpe.vocab_size)
    assert names == [("Rowan/hellaswag", "validation")]
    assert read_questions("Rowan/hellaswag", bpe, BLOCK, bpe.vocab_size, limit=2) == questions[:2]


# --------------------------------------------------------------------------- scoring


def test_equal_to_one_ending_after_the_other(file: Path, bpe: Tokenizer, model: GPT) -> None:
    """Also on three processes."""
    questions = read_questions(str(file), bpe, BLOCK, bpe.vocab_size)
    copies = [copy.deepcopy(model) for _ in range(3)]

    def work(member: Any) -> tuple[Any, dict[str, float]]:
        own = copies[member.process_index]
        losses = ending_losses(own, questions, member, 2)
        return losses, score_questions(own, questions, member, 2)

    reference = copy.deepcopy(model).eval()
    with torch.no_grad():
        expected = by_hand([question(i) for i in range(9)], bpe.encode, reference)
    answers = together(3, work)
    alone = ending_losses(model, questions, Accelerator(cpu=True), 2)
    for losses, figures in answers:
        assert losses.tolist() == alone.tolist()  # the same bits
        assert (-losses).tolist() == pytest.approx(np.concatenate(expected).tolist(), abs=1e-4)
        check_figures(figures, expected)
    assert model.training


def check_figures(figures: dict[str, float], expected: list[list[float]]) -> None:
    """Compare acc and acc_norm with the harness's rules on log-likelihoods."""
    right = {"acc": 0, "acc_norm": 0}
    for i, likely in enumerate(expected):
        _, endings = prepared(question(i))
        right["acc"] += int(np.argmax(likely)) == i % 4
        per_char = np.array(likely) / np.array([float(len(e)) for e in endings])
        right["acc_norm"] += int(np.argmax(per_char)) == i % 4
    for name, count in right.items():
        p = count / len(expected)
        assert figures[f"eval/hellaswag_{name}"] == p
        assert figures[f"eval/hellaswag_{name}_se"] == pytest.approx(
            np.std([1] * count + [0] * (9 - count), ddof=1) / 3
        )


def test_acc_takes_the_least_loss_and_acc_norm_the_least_per_character(
    bpe: Tokenizer, model: GPT, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ties give the first, and never an empty ending; by bytes it would be acc_bytes."""
    endings = ["à là sé", "a sea", "海海"]
    questions = [encode_question("the king", endings, label, bpe, BLOCK) for label in (0, 1, 0, 1)]
    questions[3] = dataclasses.replace(questions[3], lengths=(0, 5, 5))
    losses = [[6.5, 5.0, 3.0], [7.0, 5.0, 5.0], [6.5, 5.0, 3.0], [0.0, 1.0, 1.0]]
    monkeypatch.setattr(hellaswag, "ending_losses", lambda *_: np.concatenate(losses))
    found = score_questions(model, tuple(questions), Accelerator(cpu=True), 2)
    assert found["eval/hellaswag_acc"] == 1 / 4  # 2, 1, 2, 0
    assert found["eval/hellaswag_acc_norm"] == 3 / 4  # 0, 0, 0, 1


def test_tokens_are_checked_when_they_are_read(file: Path, bpe: Tokenizer) -> None:
    with pytest.raises(DataError, match=r"jsonl line 1 holds token .* the vocabulary of 200;"):
        read_questions(str(file), bpe, BLOCK, vocab_size=200)
