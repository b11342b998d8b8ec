"""Finetuning on prompts and completions: the loss is that of the completions alone."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from accel_gpt.commands import export, sample
from accel_gpt.config.data import DataConfig, PrepareConfig
from accel_gpt.config.experiment import Config
from accel_gpt.config.plan import Plan
from accel_gpt.data.corpus import ShardCorpus, open_shards
from accel_gpt.data.hf_tokenizer import HFTokenizer
from accel_gpt.data.shards import open_split
from accel_gpt.data.tokenizer import BytesTokenizer, load_tokenizer
from accel_gpt.errors import AccelGPTError, DataError, UserError
from accel_gpt.evals.validation import evaluate_source
from accel_gpt.files import write_file
from accel_gpt.model.gpt import GPT
from accel_gpt.model.loss import IGNORE
from accel_gpt.prepare.prepare import prepare
from accel_gpt.text.examples import encode_example
from accel_gpt.training.gradients import Gradients, micro_batches
from tests.conftest import QUIET, launch, run_here, tiny
from tests.test_gradients import accelerator

EOT = BytesTokenizer.eot_id
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def rows(count: int) -> list[dict[str, str]]:
    """A task that a tiny model learns: the answer is the last letter of the prompt, three times."""
    words = [f"{'xyz'[i % 3] * (1 + i % 7)}{'abcdefgh'[i % 8]}" for i in range(count)]
    return [{"prompt": f"{word} =", "completion": f" <{word[-1] * 3}>"} for word in words]


def prepared(folder: Path, examples: list[Any], **options: Any) -> Path:
    """A data folder of `examples`."""
    lines = "".join(f"{json.dumps(row)}\n" for row in examples)
    write_file(folder / "examples.jsonl", [lines.encode()])
    settings = {"source": "jsonl", "tokenizer": "bytes", "loss_on": "completions", "workers": 1}
    options = settings | {"path": str(folder / "examples.jsonl"), "val_fraction": 0.2} | options
    prepare(PrepareConfig(**options), folder / "data")
    return folder / "data"


def corpus(folder: Path, block_size: int = 32, **options: Any) -> ShardCorpus:
    data = DataConfig(train=str(folder), document_mask=True, **options)
    return open_shards(Config(data=data, model=replace(tiny("llama"), block_size=block_size)))


def text_of(ids: Any) -> str:
    return BytesTokenizer().decode([int(i) for i in ids])


# --------------------------------------------------------------------------- data


def test_a_prompt_is_stored_as_no_target() -> None:
    stored = encode_example(json.dumps(["ab", "cd"]), BytesTokenizer()).tolist()
    assert stored == [~ord("a"), ~ord("b"), ord("c"), ord("d"), EOT]


def test_the_folder_holds_both(tmp_path: Path) -> None:
    examples = rows(40)
    folder = prepared(tmp_path, examples)
    found = set()
    for name in ("train", "val"):
        split = open_split(folder, name)
        assert split.completions
        stored = split.read(0, 0, split.tokens)
        for one in np.split(stored, np.flatnonzero(stored == EOT) + 1)[:-1]:
            found.add((text_of(~one[one < 0]), text_of(one[one >= 0][:-1])))
        assert split.shards[0].max_token == EOT
    assert found == {(row["prompt"], row["completion"]) for row in examples}


@pytest.mark.parametrize("block_size", [9, 16, 33, 100])
def test_examples_are_packed_whole_each_once_an_epoch(tmp_path: Path, block_size: int) -> None:
    opened = corpus(prepared(tmp_path, rows(40), shard_tokens=150), block_size)
    split, T = opened.train.sources[0].split, block_size
    assert len(split.shards) > 1
    n = opened.train.orders[0].sequences_per_epoch
    plan = Plan(1, 1, T, 1, max_steps=n, warmup_steps=0, decay_steps=1)
    loader, seen = opened.loader(plan, 0, torch.device("cpu"), 0), []
    for _ in range(n):
        tokens, targets = (one[0] for one in next(loader))
        assert (tokens[1:][targets[:-1] != IGNORE] == targets[:-1][targets[:-1] != IGNORE]).all()
        *ended, rest = text_of(targets[targets != IGNORE]).split("<|endoftext|>")
        assert not (ended and rest)  # nothing of an example that does not fit beside others
        seen += ended
        assert chr(tokens[0]) in "xyz"  # a sequence begins with a prompt
    loader.close()
    stored = [split.read(i, 0, int(size)) for i, size in enumerate(split.lengths)]
    parts = np.split(np.concatenate(stored), np.flatnonzero(np.concatenate(stored) == EOT) + 1)
    ends = np.cumsum(split.lengths)
    spans = np.cumsum([len(part) for part in parts])
    whole = [  # those within a shard and a sequence
        text_of(part[part >= 0][:-1])
        for part, end in zip(parts, spans, strict=True)
        if len(part) and len(part) <= T + 1 and not ((end - len(part) < ends) & (ends < end)).any()
    ]
    assert sorted(seen) == sorted(whole)


def test_a_long_example_loses_its_end(tmp_path: Path) -> None:
    """It fills a sequence of its own."""
    long = [{"prompt": "p", "completion": f"{i}" * 50} for i in range(9)]
    opened = corpus(prepared(tmp_path, long, val_fraction=0.3))
    plan = Plan(1, 1, 32, 1, max_steps=1, warmup_steps=0, decay_steps=1)
    loader = opened.loader(plan, 0, torch.device("cpu"), 0)
    tokens, targets = (one[0] for one in next(loader))
    loader.close()
    assert text_of(tokens[:3]) in {f"p{i}{i}" for i in range(9)}
    assert len(set(targets.tolist())) == 1  # the digit alone


def test_an_example_of_which_the_prompt_alone_remains_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = [{"prompt": f"p{i}", "completion": "c" * 40} for i in range(9)]
    long = [{"prompt": "p" * 50, "completion": f"{i}"} for i in range(9)]
    folders = [tmp_path / name for name in ("some", "all")]
    for folder in folders:
        folder.mkdir()
    opened = corpus(prepared(folders[0], short + long, val_fraction=0.3))
    assert "examples whose prompt alone is longer than model.block_size, 32; they are left" in (
        capsys.readouterr().err
    )
    n = opened.train.orders[0].sequences_per_epoch
    loader = opened.loader(Plan(1, 1, 32, 1, n, 0, 0), 0, torch.device("cpu"), 0)
    for _ in range(n):
        assert (next(loader)[1] != IGNORE).any()
    loader.close()
    with pytest.raises(DataError, match=r"model.block_size, 32, and no other; raise it"):
        corpus(prepared(folders[1], long, val_fraction=0.3))


CHAT = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]


def chat_tokenizer(folder: Path) -> Path:
    """A byte-level tokenizer.json with the tokens of a chat, and its template beside it."""
    folder.mkdir(exist_ok=True)
    BytesTokenizer().save(folder)
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    like = next(one for one in content["added_tokens"] if one["content"] == "<|endoftext|>")
    for i, name in enumerate(("<|im_start|>", "<|im_end|>")):
        content["added_tokens"].append({**like, "id": EOT + 1 + i, "content": name})
    path.write_text(json.dumps(content))
    (folder / "chat_template.jinja").write_text(CHATML)
    return path


def test_messages_are_rendered_by_the_template_of_the_tokenizer(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(chat_tokenizer(tmp_path))
    assert isinstance(tokenizer, HFTokenizer)
    stored = encode_example(json.dumps(CHAT), tokenizer)
    start, end = EOT + 1, EOT + 2
    user = [start, *b"user\n2 + 2?", end, *b"\n", start, *b"assistant\n"]
    assert (~stored[: len(user)]).tolist() == user
    assert stored[len(user) :].tolist() == [*b"4", end, *b"\n", EOT]
    assert tokenizer.encode("<|im_end|>") == list(b"<|im_end|>")  # of a user it stays text


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"text": "a"}, "line 1 of .* has no texts prompt and completion, nor a list of messages"),
        ({"prompt": "a", "completion": None}, "has no texts prompt and completion"),
        ({"messages": CHAT}, "the rows have messages, but the tokenizer has no chat template"),
    ],
)
def test_rows_that_are_no_examples(tmp_path: Path, row: dict[str, Any], sentence: str) -> None:
    with pytest.raises(AccelGPTError, match=sentence):
        prepared(tmp_path, [row])


def test_templates_that_do_not_fit(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(chat_tokenizer(tmp_path))
    for template, sentence in (
        ("{{ messages[0].content }}{{ nothing.here }}", "the chat template fails"),
        ("{{ messages | length }}", "expected the last message to be the assistant's"),
        ("{% for m in messages %}{{ m.content }}<|endoftext|>{% endfor %}", "ends a document"),
    ):
        tokenizer.config = {"chat_template": template}
        with pytest.raises(DataError, match=sentence):
            encode_example(json.dumps(CHAT), tokenizer)


def test_settings_that_do_not_fit(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="loss_on is completions, but"):
        PrepareConfig(source="text", path="x", loss_on="completions", tokenizer="gpt2")
    folder = prepared(tmp_path, rows(40))
    with pytest.raises(UserError, match="prepared with other settings"):
        prepared(tmp_path, rows(40), loss_on="text", text_field="prompt")
    with pytest.raises(UserError, match="document_mask is false; set it"):
        open_shards(Config(data=DataConfig(train=str(folder)), model=tiny("llama")))


# --------------------------------------------------------------------------- loss


@pytest.mark.parametrize("micro", [1, 3, 6])
def test_the_gradient_is_the_mean_over_all_tokens_of_the_completions(
    tmp_path: Path, micro: int
) -> None:
    """Of sequences with uneven counts, however they are accumulated."""
    examples = [{"prompt": "p" * (i % 9), "completion": "c" * (i * i % 23)} for i in range(60)]
    opened, steps = corpus(prepared(tmp_path, examples)), 6 // micro
    torch.manual_seed(0)
    model = GPT(replace(tiny("llama"), block_size=32), opened.vocab_size)
    plan = Plan(1, micro, 32, steps, max_steps=1, warmup_steps=0, decay_steps=1)
    one = accelerator(steps)
    gradients = Gradients(one, model, 1, 0.0)
    loader = opened.loader(plan, 0, torch.device("cpu"), 0)
    parts, counts = [], []
    for first, (tokens, targets, documents, weight) in enumerate(
        micro_batches(loader, one, plan, opened.document_end)
    ):
        counts += (targets != IGNORE).sum(-1).tolist()
        parts.append(model(tokens, targets, documents=documents, per_sequence=True))
        with gradients.micro_step(first):
            gradients.backward(model(tokens, targets, documents=documents) * weight)
    loader.close()
    assert len(set(counts)) > 2
    whole = torch.cat(parts).sum() / sum(counts)
    right = torch.autograd.grad(whole, list(model.parameters()))
    assert gradients.finish().item() == pytest.approx(whole.item(), rel=1e-6)
    for parameter, expected in zip(model.parameters(), right, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-4, atol=1e-7)


def test_what_a_prompt_would_predict_costs_nothing(tmp_path: Path) -> None:
    """The val loss of whole examples, each computed by itself."""
    opened = corpus(prepared(tmp_path, rows(40)))
    model, total, count = GPT(replace(tiny("llama"), block_size=32), opened.vocab_size), 0.0, 0
    (val,) = opened.evaluated["val"]
    score = evaluate_source(model, val, accelerator(1), 3, opened.tokenizer, opened.document_end)
    stored = val.split.read(0, 0, val.split.tokens)
    for example in np.split(stored, np.flatnonzero(stored == EOT) + 1)[:-1]:
        ids = torch.tensor(np.maximum(example, ~example), dtype=torch.int64)[None]
        logs = model(ids)[0, :-1].log_softmax(-1)
        answer = torch.tensor(example[1:] >= 0)
        total -= logs.gather(1, ids[0, 1:, None])[answer].sum().item()
        count += int(answer.sum())
    assert score.tokens == count
    assert score.loss_sum == pytest.approx(total, rel=1e-5)


# --------------------------------------------------------------------------- the whole


@pytest.mark.slow
def test_a_model_answers_in_the_format_that_it_was_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The shipped config, from a tiny random model of transformers with a chat template."""
    base, run = tmp_path / "base", str(tmp_path / "run")
    make_base(base)
    lines = "".join(f"{json.dumps(row)}\n" for row in rows(300))
    write_file(tmp_path / "examples.jsonl", [lines.encode()])
    words = ["configs/finetune_prompts.yaml", "--out_dir", run, "--model.init_from", str(base)]
    words += ["--data.train", str(tmp_path / "data"), "--model.block_size", "64", *QUIET]
    words += ["--data.prepare.path", str(tmp_path / "examples.jsonl"), "--optim.lr", "1e-2"]
    words += ["--train.tokens_per_step", "512", "--train.micro_batch_size", "8"]
    assert launch([*words, "--train.max_steps", "50", "--checkpoint.every", "0"]) == 0
    assert run_here(export.main, [run, "--to", str(tmp_path / "exported")]) == 0
    capsys.readouterr()
    for prompt, answer in (("zzzg =", " <ggg>"), ("xb =", " <bbb>")):
        asked = [str(tmp_path / "exported"), "--prompt", prompt, "--temperature", "0"]
        assert run_here(sample.main, asked) == 0
        assert prompt + answer in capsys.readouterr().out.splitlines()
    template = AutoTokenizer.from_pretrained(tmp_path / "exported").chat_template
    assert template == CHATML


def make_base(folder: Path) -> None:
    """A tiny random Llama in transformers format, its tokenizer and a chat template beside it."""
    chat_tokenizer(folder)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=EOT + 3, **shape, **heads)).save_pretrained(folder)
