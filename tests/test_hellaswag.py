"""HellaSwag: the texts and figures of lm-evaluation-harness, at any number of processes."""

import copy
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
from accelerate.utils import DistributedType

from accel_gpt.config.model import ModelConfig
from accel_gpt.data.tokenizer import BytesTokenizer, CharsTokenizer, Tokenizer, train_bpe
from accel_gpt.errors import DataError, UserError
from accel_gpt.evals.hellaswag import (
    Questions,
    choose,
    encode_rows,
    ending_losses,
    parse,
    plan_batches,
    read_questions,
    score_questions,
)
from accel_gpt.model.gpt import GPT
from tests.conftest import launch, text_of
from tests.processes import Member, together
from tests.test_train import assert_same_weights, records, weights

Arguments = Callable[..., list[str]]
BLOCK = 64


def question(i: int) -> dict[str, Any]:
    """One in the original format, some with what WikiHow's pages left in them."""
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
    """Query and choices by lm-evaluation-harness's recipe, spelled out once more."""

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
    """Log-likelihood of each ending of each question, one after the other."""
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


@pytest.mark.parametrize("i", range(9))
def test_texts_are_those_of_the_harness(i: int) -> None:
    query, endings, label = parse(question(i), "here")
    assert (query, endings) == prepared(question(i))
    assert label == i % 4
    assert "[" not in query
    assert ("The king" in query) == bool(i % 3)


def test_ctx_stands_in_for_the_parts_that_are_missing() -> None:
    record = {"ctx": "A man [title] runs.", "endings": ["on", "off"], "label": 1}
    assert parse(record, "here") == ("A man.  runs.".replace("  ", " "), ["on", "off"], 1)


def test_a_limit_takes_the_first(file: Path, bpe: Tokenizer) -> None:
    every = read_questions(str(file), bpe, BLOCK)
    assert len(every) == 9
    assert read_questions(str(file), bpe, BLOCK, 2) == every[:2]


def test_the_boundary_is_where_the_tokens_of_the_text_alone_end(bpe: Tokenizer) -> None:
    """Spaces belong to the ending, and a token over the boundary as well."""
    row = encode_rows(bpe, "the king", [" went to war"], BLOCK)[0]
    assert bpe.decode(row.tokens[-row.count :]) == " went to war"
    row = encode_rows(bpe, "the king  ", [" went"], BLOCK)[0]
    assert row.tokens == tuple(bpe.encode("the king   went"))
    assert bpe.decode(row.tokens[-row.count :]) == "   went"
    assert len(encode_rows(bpe, text_of(200), [" went to war"], BLOCK)[0].tokens) == BLOCK + 1


good = question(0)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"ctx": "a", "label": 0}', "has endings None; expected a list of texts"),
        (json.dumps({**good, "endings": "abcd"}), "has endings 'abcd'; expected a list of texts"),
        (json.dumps({**good, "endings": ["one"]}), "expected a list of texts"),
        (json.dumps({**good, "endings": ["one", 2]}), "expected a list of texts"),
        (json.dumps({**good, "label": 4}), "has label 4; expected 0 to 3"),
        (json.dumps({**good, "label": ""}), "has label ''; expected 0 to 3"),
        (json.dumps({**good, "label": None}), "has label None; expected 0 to 3"),
        (json.dumps({"endings": ["a", "b"], "label": 0}), "has no ctx"),
        (json.dumps({"ctx": " ", "endings": ["a", "b"], "label": 0}), "has an empty ctx"),
        ("[1, 2]", "is no object"),
        ('{"ctx": "a', "is not JSON"),
        (json.dumps({**good, "endings": ["x" * 99, "y"]}), "has an ending of 100 tokens"),
    ],
)
def test_a_line_that_is_no_question_is_named(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(f"{json.dumps(good)}\n\n{line}\n")
    with pytest.raises(DataError, match="line 3 ") as caught:
        read_questions(str(path), BytesTokenizer(), BLOCK)
    assert message in str(caught.value)
    assert caught.value.exit_code == 3


def test_other_files_that_cannot_be_asked(tmp_path: Path, file: Path) -> None:
    tokenizer = BytesTokenizer()
    with pytest.raises(UserError, match=r"eval.hellaswag nowhere.jsonl cannot be read: No such"):
        read_questions("nowhere.jsonl", tokenizer, BLOCK)
    empty = write(tmp_path / "empty.jsonl", [])
    with pytest.raises(DataError, match="holds no questions"):
        read_questions(str(empty), tokenizer, BLOCK)
    with pytest.raises(DataError, match="line 1 cannot be encoded: character"):
        read_questions(str(file), CharsTokenizer("abc"), BLOCK)
    (tmp_path / "latin.jsonl").write_bytes(b'{"ctx": "\xe9"}\n')
    with pytest.raises(DataError, match="is no UTF-8 text after line 0"):
        read_questions(str(tmp_path / "latin.jsonl"), tokenizer, BLOCK)


def test_a_hub_data_set_is_read_as_the_file(
    file: Path, bpe: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    asked = []

    def load_dataset(name: str, split: str) -> list[Any]:
        asked.append((name, split))
        return rows

    library = SimpleNamespace(load_dataset=load_dataset)  # the real one takes seconds to import
    monkeypatch.setitem(sys.modules, "datasets", library)
    assert read_questions("Rowan/hellaswag", bpe, BLOCK) == read_questions(str(file), bpe, BLOCK)
    assert asked == [("Rowan/hellaswag", "validation")]


# --------------------------------------------------------------------------- scoring


def test_every_row_is_in_one_batch_and_shapes_are_few() -> None:
    lengths = np.random.default_rng(0).integers(1, 1025, 500).tolist()
    planned = plan_batches(lengths, 4, 1024)
    assert sorted(i for rows, _, _ in planned for i in rows) == list(range(500))
    for rows, B, T in planned:
        assert len(rows) <= B
        assert max(lengths[i] for i in rows) <= T
        assert B * T == 4 * 1024
    assert len({shape for _, *shape in map(tuple, planned) for shape in [tuple(shape)]}) <= 6


@pytest.mark.parametrize("world", [1, 2, 3])
def test_equal_to_one_ending_after_the_other(
    world: int, file: Path, bpe: Tokenizer, model: GPT
) -> None:
    questions = read_questions(str(file), bpe, BLOCK)
    copies = [copy.deepcopy(model) for _ in range(world)]

    def work(member: Any) -> tuple[Any, dict[str, float]]:
        own = copies[member.process_index]
        losses = ending_losses(own, questions, member, 2)
        return losses, score_questions(own, questions, member, 2)

    reference = copy.deepcopy(model).eval()
    with torch.no_grad():
        expected = by_hand([question(i) for i in range(9)], bpe.encode, reference)
    answers = together(world, work)
    alone = ending_losses(model, questions, Accelerator(cpu=True), 2)
    for losses, figures in answers:
        assert losses.tolist() == alone.tolist()  # the same bits
        assert (-losses).tolist() == pytest.approx(np.concatenate(expected).tolist(), abs=1e-4)
        check_figures(figures, expected)
    assert model.training


def check_figures(figures: dict[str, float], expected: list[list[float]]) -> None:
    """acc and acc_norm from log-likelihoods, as the harness takes them."""
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


def test_under_fsdp_every_process_does_as_many_batches(
    file: Path, bpe: Tokenizer, model: GPT
) -> None:
    questions = read_questions(str(file), bpe, BLOCK)
    alone = ending_losses(model, questions, Accelerator(cpu=True), 1)
    total, counts = np.zeros_like(alone), []
    for rank in range(4):
        beats: list[int] = []
        part: Any = Member(rank, 4, [], None)  # type: ignore[arg-type]
        part.distributed_type, part.reduce = DistributedType.FSDP, lambda value, _: value
        total += ending_losses(model, questions, part, 1, lambda beats=beats: beats.append(1))
        counts.append(len(beats))
    assert len(set(counts)) == 1
    assert total.tolist() == alone.tolist()


def test_the_first_of_equals_is_chosen_and_an_empty_ending_never() -> None:
    assert choose(np.array([2.0, 1.0, 1.0])) == 1
    assert choose(np.array([2.0, 1.0, 4.0]), [4, 1, 8]) == 0
    assert choose(np.array([0.0, 1.0]), [0, 3]) == 1


def test_the_length_of_an_ending_is_its_characters(tmp_path: Path, bpe: Tokenizer) -> None:
    """As lm-evaluation-harness's acc_norm; bytes would be its acc_bytes."""
    asked = {"ctx": "the king", "endings": ["à là sé", "a sea", "海海"], "label": 0}
    (read,) = read_questions(str(write(tmp_path / "h.jsonl", [asked])), bpe, BLOCK)
    assert read.lengths == (7, 5, 2)
    assert choose(np.array([6.5, 5.0, 3.0]), read.lengths) == 0  # per byte it is the last


def test_a_tokenizer_larger_than_the_model_is_told(file: Path, bpe: Tokenizer) -> None:
    small = GPT(ModelConfig(n_layer=1, n_head=1, n_embd=8, block_size=BLOCK), 200)
    questions: Questions = read_questions(str(file), bpe, BLOCK)
    with pytest.raises(DataError, match="beyond the vocabulary of 200"):
        score_questions(small, questions, Accelerator(cpu=True), 2)


# --------------------------------------------------------------------------- in the loop


def short(path: Path) -> Path:
    """Questions that fit a window of 32 bytes."""
    made = [{"ctx": f"the king of {i}", "endings": ["a sea", "war"], "label": 0} for i in range(5)]
    return write(path, made)


def test_questions_in_the_loop_leave_no_trace(small_run: Arguments, tmp_path: Path) -> None:
    asked = ["--eval.hellaswag", str(short(tmp_path / "h.jsonl")), "--eval.hellaswag_limit", "4"]
    alike = ["--train.max_steps", "6", "--sample.every", "0"]
    with_it, without = tmp_path / "with", tmp_path / "without"
    often = ["--out_dir", str(with_it), "--eval.every", "2", *asked]
    assert launch(small_run(*often, *alike)) == 0
    assert launch(small_run("--out_dir", str(without), "--eval.every", "0", *alike)) == 0
    assert_same_weights(weights(with_it, 6), weights(without, 6))
    told = [line for line in records(with_it) if "eval/hellaswag_acc" in line]
    assert [line["step"] for line in told] == [2, 4, 6]
    assert told[-1]["eval/hellaswag_acc_norm"] in (0, 0.25, 0.5, 0.75, 1)
    for a, b in zip(records(with_it), records(without), strict=True):
        assert a["train/loss"] == b["train/loss"]


def test_a_fault_is_told_before_anything_is_trained(
    small_run: Arguments, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "h.jsonl"
    path.write_text('{"ctx": "a", "endings": ["b", "c"], "label": 0}\n{"ctx": "a", "label": 1}\n')
    assert launch(small_run("--eval.hellaswag", str(path))) == 3
    error = capsys.readouterr().err
    assert f"error: {path} line 2 has endings None" in error
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


# --------------------------------------------------------------------------- slow


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile uses torch.jit
def test_compiled_equals_eager_and_compiles_little(file: Path, bpe: Tokenizer, model: GPT) -> None:
    from torch._dynamo.utils import counters

    questions = read_questions(str(file), bpe, BLOCK)
    eager = ending_losses(model, questions, Accelerator(cpu=True), 2)
    assert len({T for _, _, T in plan_batches([20, 40], 2, BLOCK)}) == 2
    compiled = copy.deepcopy(model)
    torch._dynamo.reset()
    counters.clear()
    compiled.compile()
    for _ in range(2):
        losses = ending_losses(compiled, questions, Accelerator(cpu=True), 2)
        assert losses.tolist() == pytest.approx(eager.tolist(), rel=1e-4)
    assert counters["stats"]["unique_graphs"] <= 3
