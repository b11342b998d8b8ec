"""Validation: the whole split exactly once, the same figure at any batch or number of processes."""

import copy
import json
import math
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import DistributedType
from tokenizers import decoders, models, normalizers, pre_tokenizers

from accel_gpt.commands.resolve import load_config
from accel_gpt.config.data import DataConfig, PrepareConfig
from accel_gpt.config.model import ModelConfig
from accel_gpt.data.corpus import EvalSplit, open_corpus
from accel_gpt.data.shards import Split, open_split
from accel_gpt.data.sources import open_data
from accel_gpt.data.tokenizer import BytesTokenizer
from accel_gpt.errors import DataError
from accel_gpt.evals.validation import (
    Score,
    eval_sequences,
    score_source,
    score_splits,
    weighted_mean,
)
from accel_gpt.model.gpt import GPT
from accel_gpt.model.targets import TargetMask
from accel_gpt.prepare.prepare import prepare
from tests.conftest import WORDS, launch, text_of
from tests.helpers.processes import Member, together

Arguments = Callable[..., list[str]]
MODEL = ModelConfig(n_layer=2, n_head=2, n_embd=32, block_size=32, dropout=0.5)


def score(
    model: GPT, split: Split, accelerator: Any = None, batch: int = 8, **options: Any
) -> Score:
    accelerator, part = accelerator or Accelerator(cpu=True), EvalSplit(None, 1.0, split, None)
    return score_source(
        model, part, accelerator, batch, 32, BytesTokenizer(), TargetMask(), **options
    )


@pytest.fixture
def model() -> GPT:
    torch.manual_seed(0)
    return GPT(MODEL, 257)


def test_loss_and_standard_error_are_those_of_all_targets(corpus: Path, model: GPT) -> None:
    """Each target counts once; the error is the standard error over sequences."""
    split = open_split(corpus, "val")
    found = score(model, split)
    assert found.tokens == sum(length - 1 for length in split.lengths)
    losses, sizes, in_bytes = [], [], []
    model.eval()
    for shard, length in enumerate(split.lengths.tolist()):
        tokens = torch.from_numpy(split.read(shard, 0, length).astype(np.int64))
        for start in range(0, length - 1, 32):
            row = tokens[start : start + 33]
            logits = model(row[None, :-1])[0].double()
            losses.append(F.cross_entropy(logits, row[1:], reduction="sum").item())
            sizes.append(len(row) - 1)
            in_bytes.append(int((row[1:] != 256).sum()))  # end-of-text has none
    assert len(set(sizes)) > 1  # uneven tails
    assert found.loss_sum == pytest.approx(sum(losses), rel=1e-6)
    for error, weights in (
        (found.loss_se, sizes),
        (found.bits_per_byte_se * math.log(2), in_bytes),
    ):
        mean, count = sum(losses) / sum(weights), len(losses)
        rest = [loss - mean * weight for loss, weight in zip(losses, weights, strict=True)]
        expected = math.sqrt(count / (count - 1) * sum(r * r for r in rest)) / sum(weights)
        assert error == pytest.approx(expected, rel=1e-4)


def test_with_a_document_mask_each_document_is_evaluated_by_itself(
    small_run: Arguments, tmp_path: Path, model: GPT
) -> None:
    """Two documents in each sequence."""
    documents = torch.randint(256, (6, 16), generator=torch.Generator().manual_seed(1))
    documents[:, -1] = 256
    for name in ("train", "val"):
        np.save(tmp_path / f"x_{name}_000000.npy", documents.flatten().numpy().astype(np.uint16))
    words = ["--data.train", str(tmp_path), "--data.tokenizer", "bytes", "--data.document_mask"]
    shards = open_corpus(load_config(small_run(*words, "--eval.tokens", "null"), "test"))
    found = score_splits(model, shards, Accelerator(cpu=True), 8, 32)
    logits = model.eval()(documents[:, :-1])
    expected = F.cross_entropy(logits.flatten(0, 1), documents[:, 1:].flatten())
    assert found["eval/val_loss"] == pytest.approx(expected.item(), rel=1e-5)


def test_under_fsdp_every_rank_does_as_many_batches(corpus: Path, model: GPT) -> None:
    """All ranks take part in each forward: an extra batch on one of them would hang."""
    split = open_split(corpus, "val")
    alone, parts, counts = score(model, split), [], []
    for rank in range(3):
        part, beats = Member(rank, 3, [], None), list[int]()  # type: ignore[arg-type]
        part.distributed_type, part.reduce = DistributedType.FSDP, lambda value, _: value  # type: ignore[method-assign]
        parts.append(score(model, split, part, on_progress=lambda *_, beats=beats: beats.append(1)))
        counts.append(len(beats))
    assert len(set(counts)) == 1
    assert sum(p.tokens for p in parts) == alone.tokens
    assert sum(p.loss_sum for p in parts) == pytest.approx(alone.loss_sum, rel=1e-12)


def test_budget_takes_sequences_spread_over_the_split(corpus: Path) -> None:
    split = open_split(corpus, "train")
    some = eval_sequences(split, 32, 320)
    assert len(some) == 10
    assert {0, len(split.lengths) - 1} <= set(some[:, 0].tolist())
    every = {tuple(w) for w in eval_sequences(split, 32, None).tolist()}
    assert {tuple(w) for w in some.tolist()} <= every


def test_token_beyond_the_vocabulary_is_refused(corpus: Path) -> None:
    with pytest.raises(DataError, match="beyond the vocabulary of 90"):
        score(GPT(MODEL, 90), open_split(corpus, "val"))


DECOMPOSED = ["\u1112\u1161\u11ab", "de\u0301ja\u0300", "Vie\u0323\u0302t", "\uff21\uff22", "x{y}"]
NORMALIZERS = {
    "NFC": normalizers.NFC(),
    "typewriter quotes": normalizers.Replace("king", "k"),
    "lacks bytes": None,
}


def tokenizer_json(kind: str, path: Path) -> Path:
    """A tokenizer.json whose tokens do not add up to the bytes of the text."""
    tokens = ["<|endoftext|>", "[UNK]", *sorted({*WORDS[:15], *map("\u2581".__add__, WORDS)})]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    model: Any = models.WordLevel(vocabulary, unk_token="[UNK]")
    if kind == "WordPiece":
        model = models.WordPiece(vocabulary, unk_token="[UNK]")
    if kind in NORMALIZERS:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        if kind == "lacks bytes":
            alphabet = [character for character in alphabet if character not in "{}"]
        model = models.BPE({token: i for i, token in enumerate([*tokens[:2], *alphabet])}, [])
    tokenizer = tokenizers.Tokenizer(model)
    if kind == "space before a text":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Metaspace()
    elif kind in NORMALIZERS:
        tokenizer.normalizer = NORMALIZERS[kind]
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(tokens[:2])
    tokenizer.save(str(path))
    return path


@pytest.mark.parametrize(
    "kind", ["space before a text", "WordPiece", "unknown words", *NORMALIZERS]
)
def test_bytes_are_those_of_the_text_whatever_the_tokenizer_does_to_it(
    kind: str, small_run: Arguments, tmp_path: Path, model: GPT
) -> None:
    path, folder = tokenizer_json(kind, tmp_path / "tokenizer.json"), tmp_path / "data"
    draw = random.Random(0)
    texts = [" ".join(draw.choices([*WORDS, *DECOMPOSED], k=8)) for _ in range(200)]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    recipe = {"source": str(tmp_path / "t.jsonl"), "tokenizer": str(path)}
    prepare(PrepareConfig(**recipe, val_fraction=0.5), folder)  # type: ignore[arg-type]
    split, tokenizer = open_data(str(folder), "val", DataConfig())
    encoded = {tuple(tokenizer.encode(text)): text for text in texts}
    ids = split.read(0, 0, split.tokens)
    documents = np.split(ids, np.flatnonzero(ids == tokenizer.eot_id) + 1)[:-1]
    of_text = sum(len(encoded[tuple(document[:-1].tolist())].encode()) for document in documents)
    part = EvalSplit(None, 1.0, split, None)
    found = score_source(model, part, Accelerator(cpu=True), 8, 32, tokenizer, TargetMask())
    assert found.bytes == pytest.approx(of_text, rel=0.002)  # all but the first token
    assert found.bits_per_byte == pytest.approx(found.loss_sum / math.log(2) / of_text, rel=0.002)

    foreign = tmp_path / "foreign"  # nanoGPT's files do not hold the bytes of their text
    foreign.mkdir()
    shutil.copy(path, foreign)
    for name in ("train", "val"):
        held = open_split(folder, name)
        held.read(0, 0, held.tokens).tofile(foreign / f"{name}.bin")
    unknown = open_corpus(load_config(small_run("--data.train", str(foreign)), "test"))
    metrics = score_splits(model, unknown, Accelerator(cpu=True), 8, 32)
    assert "eval/val_loss" in metrics
    assert not any("bits_per_byte" in key for key in metrics)


def test_sources_share_the_mean_and_its_error() -> None:
    parts = [Score(20.0, 10, 40, 0.3), Score(8.0, 8, 16, 0.4)]
    both = weighted_mean(parts, [0.5, 0.5])
    assert both.loss == pytest.approx(1.5)
    assert both.loss_se == pytest.approx(0.25)
    assert both.bits_per_byte == pytest.approx(1.5 / math.log(2) / 3)


# --------------------------------------------------------------------------- several sets


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A second, smaller data folder of bytes."""
    text = tmp_path / "other.txt"
    text.write_text(text_of(900, seed=7))
    recipe = PrepareConfig(source=str(text), tokenizer="bytes")
    prepare(recipe, tmp_path / "other")
    return tmp_path / "other"


def test_every_figure_has_the_same_bits_on_1_2_and_3_processes(
    small_run: Arguments, corpus: Path, other: Path, model: GPT
) -> None:
    options = ["--data.val", f"{{web: {corpus}, code: {other}}}", "--eval.tokens", "null"]
    shards = open_corpus(load_config(small_run(*options), "test"))
    copies = [copy.deepcopy(model) for _ in range(6)]

    def work(member: Any) -> dict[str, float]:
        own = copies[member.num_processes * (member.num_processes - 1) // 2 + member.process_index]
        return score_splits(own, shards, member, 16, 32)

    answers = [figures for world in (1, 2, 3) for figures in together(world, work)]
    assert all(figures == answers[0] for figures in answers)
    first = answers[0]
    assert first["eval/val_loss"] == pytest.approx(
        (first["eval/val_loss/web"] + first["eval/val_loss/code"]) / 2, abs=1e-12
    )
    assert {"eval/val_bits_per_byte/web", "eval/val_loss_se/code"} <= first.keys()
    assert {"eval/train_loss_se", "eval/val_loss_se", "eval/train_bits_per_byte"} <= first.keys()


@pytest.mark.parametrize(
    ("tokens", "sentence"),
    [([5], "the val split of {} cannot be evaluated"), (None, "{} has no")],
    ids=["one token", "no file"],
)
def test_a_val_split_that_cannot_be_evaluated_is_found_before_the_first_step(
    tokens: list[int] | None,
    sentence: str,
    small_run: Callable[..., list[str]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    draw = np.random.default_rng(0)
    draw.integers(1, 257, 20_000).astype("<u2").tofile(data / "train.bin")
    if tokens is not None:
        np.array(tokens, "<u2").tofile(data / "val.bin")
    source = ["--data.train", str(data), "--data.tokenizer", "bytes"]
    assert launch(small_run(*source)) == 3
    assert sentence.format(data) in capsys.readouterr().err
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
