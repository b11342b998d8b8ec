"""Each file in examples/, and each recipe of docs/how-to/experiment.md, trains as it says.

A slow test proves that killed and resumed runs with an own optimizer and evaluated weights equal an
undisturbed run bit for bit on changing numbers of processes. With ACCEL_GPT_THOROUGH=1, it does so
with each file, and with runs of one process without train.reproducible.
"""

import ast
import json
import re
import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import torch.nn.functional as F
from torch import nn

from accel_gpt import train
from accel_gpt.cli import dispatch
from accel_gpt.commands.resolve import load_config
from accel_gpt.commands.verify_resume import differing_values, run_values
from accel_gpt.config.experiment import Config, SampleConfig
from accel_gpt.config.model import ModelConfig
from accel_gpt.config.optim import OptimConfig
from accel_gpt.data.corpus import open_corpus
from accel_gpt.data.tokenizer import BytesTokenizer, load_tokenizer
from accel_gpt.evals.validation import ignore_progress
from accel_gpt.model.generate import stream
from accel_gpt.model.gpt import GPT
from accel_gpt.model.loss import IGNORE
from accel_gpt.own_code import OwnFunction, load_own_code
from accel_gpt.runs.folder import RunFolder
from tests.conftest import THOROUGH, launch, run_here, tiny
from tests.prepare.test_counts import write_tokenizer
from tests.test_matrix import work
from tests.test_train import records

Arguments = Callable[..., list[str]]
Printed = pytest.CaptureFixture[str]
ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.py"))
SCRIPTS = ("own_loop.py",)  # not files for --code
CODES = [name for name in EXAMPLES if name not in SCRIPTS]
ALWAYS = ("own_model.py",)  # the others are slow
KILLED = CODES if THOROUGH else ["schedule_free.py"]
FEW_STEPS = ("--train.max_steps", "4", "--eval.every", "2", "--sample.every", "0")
# what an example needs beside the config of the small run
NEEDS = {
    "answers_only.py": ("--model.extra.answer", "king", "--model.extra.end", "war"),
    "distillation.py": ("--model.extra.teacher", "{teacher}"),
    "moe.py": ("--model.extra.experts", "4", "--model.extra.top_k", "2"),
    "own_shards.py": ("--data.train", "{mine}", "--data.tokenizer", "bytes"),
}
TOKENS = torch.arange(16)[None]  # (1, T)


def call(function: OwnFunction | None, **given: Any) -> Any:
    """Call a function of an example with the arguments that it names; the others are None."""
    assert function is not None
    return function(**{**dict.fromkeys(function.names), **given})


def read_recipes() -> dict[str, str]:
    """Return the recipes of docs/how-to/experiment.md as files, by title."""
    page = (ROOT / "docs" / "how-to" / "experiment.md").read_text(encoding="utf-8")
    code = page.partition("\n## Recipes\n")[2].partition("```python\n")[2].partition("```")[0]
    imports, *recipes = re.split(r"^# ", code, flags=re.M)
    return {re.split("[:,]", recipe)[0]: f"{imports}# {recipe}" for recipe in recipes}


RECIPES = read_recipes()


@dataclass
class Example:
    """The functions of a file in examples/, or of another one, and its other names."""

    name: str

    def __post_init__(self) -> None:
        self.own = load_own_code(str(ROOT / "examples" / self.name))  # an absolute path stays
        functions = [getattr(self.own, name) for name in self.own.functions]
        self.names: dict[str, Any] = functions[0].function.__globals__

    def model(self, config: ModelConfig, vocab_size: int, **changes: Any) -> nn.Module:
        """Return the model of the example, with weights from a fixed seed."""
        assert self.own.model is not None
        torch.manual_seed(1)
        made: nn.Module = self.own.model(
            config=Config(model=config, **changes), vocab_size=vocab_size
        )
        if isinstance(made, GPT):
            made.init_weights()
        return made


@pytest.fixture
def own_ids(corpus: Path, tmp_path: Path) -> Path:
    """A folder of raw uint32 ids in two files for train and one for val."""
    mine = tmp_path / "mine"
    mine.mkdir()
    text = (tmp_path / "text.txt").read_bytes()
    ids = np.frombuffer(text, dtype=np.uint8).astype(np.uint32)
    for name, part in (("train_0", ids[:9000]), ("train_1", ids[9000:18_000])):
        part.tofile(mine / f"{name}.bin")
    ids[18_000:].tofile(mine / "val_0.bin")
    return mine


@pytest.fixture
def example_run(
    small_run: Arguments, own_ids: Path, train_once: Callable[..., Path]
) -> Callable[..., list[str]]:
    """Arguments of a tiny run with an example; more options may follow."""

    def arguments(name: str, *options: str) -> list[str]:
        needs = [word.replace("{mine}", str(own_ids)) for word in NEEDS.get(name, ())]
        if "{teacher}" in needs:
            needs[-1] = str(train_once() / "run")
        return small_run("--code", str(ROOT / "examples" / name), *needs, *options)

    return arguments


# --------------------------------------------------------------------------- all examples


@pytest.mark.parametrize("name", CODES)
def test_the_command_of_an_example_is_accepted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    docstring = ast.get_docstring(ast.parse((ROOT / "examples" / name).read_text())) or ""
    lines = docstring.replace("\\\n", " ").splitlines()
    commands = [shlex.split(line) for line in lines if line.strip().startswith("accel-gpt train ")]
    assert commands
    for words in commands:
        config = load_config(words[2:], "test")
        assert config.own.name == name


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in ALWAYS else [pytest.mark.slow]) for name in CODES],
)
def test_an_example_trains_stops_resumes_and_is_sampled(
    name: str, example_run: Arguments, tmp_path: Path, capsys: Printed
) -> None:
    check_run(example_run(name, *FEW_STEPS), ROOT / "examples" / name, tmp_path, capsys)


@pytest.mark.slow
@pytest.mark.parametrize("title", RECIPES)
def test_a_recipe_trains_stops_resumes_and_is_sampled(
    title: str, small_run: Arguments, tmp_path: Path, capsys: Printed
) -> None:
    code = tmp_path / "recipe.py"
    code.write_text(RECIPES[title])
    check_run(small_run("--code", str(code), *FEW_STEPS), code, tmp_path, capsys)


def check_run(arguments: list[str], code: Path, tmp_path: Path, capsys: Printed) -> None:
    """The records cover the metrics of the file too, which verify-resume does not compare."""
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    assert launch([*arguments, "--out_dir", str(whole)]) == 0
    own = [*arguments, "--out_dir", str(parted)]
    assert launch([*own, "--train.stop_at", "2"]) == 0
    assert launch(own) == 0
    assert records(parted) == records(whole)
    assert not differing_values(run_values(whole), run_values(parted))
    capsys.readouterr()
    words = ["sample", str(parted), "--code", str(code)]
    words += ["--prompt", "the king", "--max_new_tokens", "4"]
    assert run_here(dispatch, words) == 0
    assert capsys.readouterr().out.startswith("the king")


@pytest.mark.slow
@pytest.mark.parametrize("processes", ["1", "1,2"] if THOROUGH else ["1,2"])
@pytest.mark.parametrize("name", KILLED)
def test_an_example_that_is_killed_and_resumed_equals_never_stopped(
    name: str, processes: str, example_run: Arguments, tmp_path: Path, capsys: Printed
) -> None:
    """With `1,2`, two processes are killed, and one goes on: so two processes also equal one."""
    options = ["--steps", "120", "--kills", "1", "--processes", processes]
    options += ["--train.reproducible", str(processes != "1").lower()]
    options += ["--train.micro_batch_size", "4", "--checkpoint.every", "10", "--sample.every", "0"]
    options += ["--eval.every", "60", "--eval.tokens", "256"]
    assert run_here(dispatch, ["verify-resume", *example_run(name, *options)]) == 0
    shown = capsys.readouterr()
    assert "with 1 kill" in shown.out
    assert "equals never stopping, bit for bit" in shown.out
    for count in processes.split(","):
        assert f"on {count} process" in shown.err


# --------------------------------------------------------------------------- own_model.py


def test_the_scan_of_own_model_is_the_recurrence() -> None:
    scan = Example("own_model.py").names["scan"]
    generator = torch.Generator().manual_seed(0)
    a = torch.rand(2, 11, 3, generator=generator)
    b = torch.randn(2, 11, 3, generator=generator)
    h = torch.zeros(2, 3)
    expected = []
    for t in range(11):
        h = a[:, t] * h + b[:, t]
        expected.append(h)
    torch.testing.assert_close(scan(a, b), torch.stack(expected, dim=1))


# --------------------------------------------------------------------------- moe.py


def test_each_token_is_the_gated_sum_of_its_likeliest_experts() -> None:
    config = tiny(n_layer=1, extra={"experts": 4, "top_k": 2})
    layer = Example("moe.py").model(config, 20).blocks[0].mlp
    nn.init.normal_(layer.router.weight)
    rows: list[int] = []
    for expert in layer.experts:
        expert.register_forward_hook(lambda _, given, out: rows.append(len(given[0])))
    x = torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(0))
    found = layer(x)
    assert sum(rows) == 2 * 7 * 2  # each token is in two experts
    assert len(set(rows)) > 1
    for token, out in zip(x.flatten(0, 1), found.flatten(0, 1), strict=True):
        share, likeliest = layer.router(token).softmax(-1).sort(descending=True)
        outs = [layer.experts[e](token[None])[0] for e in likeliest[:2].tolist()]
        expected = (share[0] * outs[0] + share[1] * outs[1]) / (share[0] + share[1])
        torch.testing.assert_close(out, expected)


def test_flops_count_the_chosen_experts_only() -> None:
    config = tiny(n_layer=1, extra={"experts": 4, "top_k": 1})
    router = 32 * 4
    plain = GPT(config, 20).flops_per_token()
    assert Example("moe.py").model(config, 20).flops_per_token() == plain + 6 * router


def test_the_loss_of_moe_is_cross_entropy_and_balance() -> None:
    example = Example("moe.py")
    model = example.model(tiny(n_layer=1, extra={"experts": 4, "top_k": 2}), 20)
    total, parts = call(example.own.loss, model=model, tokens=TOKENS, targets=TOKENS)
    assert parts["cross_entropy"] == model(TOKENS, TOKENS)
    assert parts["balance"] > 0.9
    assert total.item() == pytest.approx((parts["cross_entropy"] + 0.01 * parts["balance"]).item())


# --------------------------------------------------------------------------- own_shards.py


def test_the_ids_that_are_trained_on_are_those_of_the_files(
    example_run: Arguments, own_ids: Path
) -> None:
    config = load_config(example_run("own_shards.py"), "test")
    corpus = open_corpus(config)
    files = sorted(own_ids.glob("train_*.bin"))
    assert len(files) == 2
    (source,) = corpus.sources
    arrays = source.split.arrays
    for file, array in zip(files, arrays, strict=True):
        assert isinstance(array, np.memmap)
        assert array.tobytes() == file.read_bytes()
    text = (own_ids.parent / "text.txt").read_text()
    assert corpus.tokenizer.decode(arrays[1][:8].tolist()) == text[9000:9008]


# --------------------------------------------------------------------------- answers_only.py

CHAT = (("user", "the king"), ("assistant", "went"), ("user", "and"), ("assistant", "a war"))
# what is written before and after a turn
MARKERS = {
    "a token each": ("<|{}|>", "<|end|>"),
    "several tokens": ("### {}:", "##"),
    "one ends as the other": ("{}\n", "\n"),
}


@pytest.mark.parametrize("markers", MARKERS)
def test_the_answers_of_a_chat_are_kept_and_nothing_else(markers: str, tmp_path: Path) -> None:
    """In each sequence of a text of chats: those answers that begin within the sequence."""
    begin, end = MARKERS[markers]
    if markers == "a token each":
        path = write_tokenizer("bytes", tmp_path)
        made = tokenizers.Tokenizer.from_file(str(path))
        made.add_special_tokens([begin.format("user"), begin.format("assistant"), end])
        made.save(str(path))
    else:
        BytesTokenizer().save(tmp_path)
    encode = load_tokenizer(tmp_path).encode_prompt
    text: list[int] = []
    begins: list[int] = []  # of each token of an answer: where its marker begins; else -1
    for role, content in 3 * CHAT:
        start = len(text)
        text += encode(begin.format(role))
        begins += [-1] * (len(text) - start)
        text += encode(content) + encode(end)
        begins += [start if role == "assistant" else -1] * (len(text) - len(begins))
    size = 16
    starts = range(len(text) - size)
    ids = torch.tensor([text[start : start + size + 1] for start in starts])
    of_answers = torch.tensor([begins[start + 1 : start + size + 1] for start in starts])
    expected = ids[:, 1:].masked_fill(of_answers < torch.tensor(starts)[:, None], IGNORE)
    extra = {"answer": begin.format("assistant"), "end": end}
    config = SimpleNamespace(
        data=SimpleNamespace(train=str(tmp_path)), model=SimpleNamespace(extra=extra)
    )
    own = Example("answers_only.py").own
    kept = call(own.targets, tokens=ids[:, :-1], targets=ids[:, 1:], config=config)
    assert torch.equal(kept, expected)
    assert (kept != IGNORE).any(1).sum() > size


# --------------------------------------------------------------------------- evaluated weights


def drawn_gradients(weights: Iterable[nn.Parameter], generator: torch.Generator) -> None:
    for weight in weights:
        weight.grad = torch.randn(weight.shape, generator=generator)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_ema_evaluates_the_moving_average(name: str) -> None:
    own = Example("ema.py").own
    model = GPT(tiny(), 20)
    config = Config(optim=OptimConfig(name=name))
    optimizer = call(own.optimizer, model=model, config=config)
    generator = torch.Generator().manual_seed(0)
    averages = {}
    for step in range(1, 13):
        drawn_gradients(model.parameters(), generator)
        optimizer.step()
        decay = min(0.99, step / (step + 9))
        for key, weight in model.named_parameters():
            exact = weight.detach().double().numpy()
            averages[key] = decay * averages.get(key, exact) + (1 - decay) * exact
    found = call(own.evaluated, model=model, optimizer=optimizer)
    assert found.keys() == averages.keys()
    for key, average in averages.items():
        np.testing.assert_allclose(found[key].numpy(), average, atol=1e-6)
        assert not np.allclose(model.get_parameter(key).detach().numpy(), average, atol=1e-4)


def test_schedule_free_is_algorithm_1() -> None:
    """Defazio et al. 2024, in float64: warm-up, its smaller weights, decay of matrices only."""
    own = Example("schedule_free.py").own
    rate, beta1, beta2, eps, warmup = 0.1, 0.9, 0.95, 1e-8, 4
    config = Config(optim=OptimConfig(lr=rate, beta2=beta2, eps=eps, weight_decay=0.5))
    model = nn.Linear(3, 2)
    optimizer = call(own.optimizer, model=model, config=config)
    generator = torch.Generator().manual_seed(0)
    x = {key: weight.detach().double().numpy() for key, weight in model.named_parameters()}
    y, z, v = dict(x), dict(x), dict.fromkeys(x, 0.0)
    total = 0.0
    for t in range(1, 11):
        share = call(own.lr, step=t - 1, plan=SimpleNamespace(warmup_steps=warmup))
        for group in optimizer.param_groups:
            group["lr"] = rate * share
        drawn_gradients(model.parameters(), generator)
        optimizer.step()
        gamma = rate * (1 - beta2**t) ** 0.5 * min(1, t / warmup)
        total += gamma**2
        for key, weight in model.named_parameters():
            g = weight.grad.double().numpy()
            v[key] = beta2 * v[key] + (1 - beta2) * g**2
            decay = 0.5 if key == "weight" else 0.0
            z[key] = z[key] - gamma * g / (np.sqrt(v[key]) + eps) - gamma * decay * y[key]
            c = gamma**2 / total
            x[key] = (1 - c) * x[key] + c * z[key]
            y[key] = (1 - beta1) * z[key] + beta1 * x[key]
    found = call(own.evaluated, model=model, optimizer=optimizer)
    for key, weight in model.named_parameters():
        np.testing.assert_allclose(weight.detach().numpy(), y[key], atol=1e-6)
        np.testing.assert_allclose(found[key].detach().numpy(), x[key], atol=1e-6)


# --------------------------------------------------------------------------- changed GPTs


class Gates(nn.Module):
    """Give each channel the same gate for all tokens: open or closed."""

    def __init__(self, is_open: torch.Tensor) -> None:
        super().__init__()
        self.is_open = is_open

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (2.0 * self.is_open - 1) * torch.full_like(x, 1e4)


def test_a_closed_gate_removes_its_channel_of_a_head_and_an_open_one_changes_nothing() -> None:
    gated = Example("gated_attention.py").model(tiny(), 20).eval()
    plain = GPT(gated.config, 20).eval()
    renamed = {name.replace("attn.out", "attn.proj"): w for name, w in gated.state_dict().items()}
    channels = torch.arange(32)
    for is_open in (channels >= 0, channels % 3 > 0):
        plain.load_state_dict({name: renamed[name].clone() for name in plain.state_dict()})
        for block, other in zip(gated.blocks, plain.blocks, strict=True):
            block.attn.gate = Gates(is_open)
            other.attn.proj.weight.data[:, ~is_open] = 0.0
        torch.testing.assert_close(gated(TOKENS), plain(TOKENS))


def test_value_embeddings_add_the_row_of_each_token_to_its_value() -> None:
    model = Example("value_embeddings.py").model(tiny("llama", n_kv_head=2), 20).eval()
    plain = GPT(model.config, 20).eval()
    plain.load_state_dict({name: model.state_dict()[name] for name in plain.state_dict()})
    assert not torch.equal(model(TOKENS), plain(TOKENS))
    x = torch.randn(1, 16, 32)
    for block, other in zip(model.blocks, plain.blocks, strict=True):
        q, k, v = block.attn.project(x, None)
        plain_q, plain_k, plain_v = other.attn.project(x, None)
        assert torch.equal(q, plain_q)
        assert torch.equal(k, plain_k)
        rows = block.attn.values.weight[TOKENS[0]].view(16, 2, 8)  # (T, K, D)
        torch.testing.assert_close(v[0].transpose(0, 1), plain_v[0].transpose(0, 1) + rows / 2)
        nn.init.zeros_(block.attn.values.weight)
    assert torch.equal(model(TOKENS), plain(TOKENS))


def test_the_second_head_learns_the_token_after_the_next() -> None:
    example = Example("multi_token.py")
    model = example.model(tiny(n_layer=3), 20)
    text = torch.randint(20, (2, 18), generator=torch.Generator().manual_seed(0))
    tokens, targets = text[:, :16], text[:, 1:17].clone()
    targets[0, 5] = IGNORE  # the sixth token ends a document
    trunk = []
    model.blocks[-1].register_forward_pre_hook(lambda _, inputs: trunk.append(inputs[0]))
    total, parts = call(example.own.loss, model=model, tokens=tokens, targets=targets)
    logits = model.head(model.norm_f(model.blocks[-1].second(trunk[0])))
    later = text[:, 2:].clone()
    later[:, 15] = IGNORE  # no target of the sequence
    later[0, 4:6] = IGNORE  # the end of the document has none, and the one before it has no second
    expected = F.cross_entropy(logits.flatten(0, 1), later.flatten(), ignore_index=IGNORE)
    torch.testing.assert_close(parts["second"], expected)
    torch.testing.assert_close(parts["first"], model(tokens, targets))
    torch.testing.assert_close(total, parts["first"] + parts["second"])


# --------------------------------------------------------------------------- distillation.py


def test_the_loss_is_the_divergence_from_the_teacher(train_once: Callable[..., Path]) -> None:
    example = Example("distillation.py")
    own = example.own
    path = str(train_once() / "run")
    teacher = example.names["_teacher"](path, torch.device("cpu"))
    torch.manual_seed(0)
    student = GPT(teacher.config, teacher.vocab_size).eval()
    targets = TOKENS.masked_fill(TOKENS % 3 == 0, IGNORE)
    config = Config(model=tiny(extra={"teacher": path}))
    given = {"tokens": TOKENS, "targets": targets, "config": config}
    loss = call(own.loss, model=student, **given)
    wanted, found = (
        model(TOKENS).detach().double().log_softmax(-1).numpy() for model in (teacher, student)
    )
    divergences = (np.exp(wanted) * (wanted - found)).sum(-1)
    counts = (targets != IGNORE).numpy()
    assert loss.item() == pytest.approx(divergences[counts].mean(), rel=1e-5)
    loss.backward()
    assert all(p.grad is not None for p in student.parameters())
    assert all(p.grad is None for p in teacher.parameters())
    assert call(own.loss, model=teacher, **given).item() == pytest.approx(0, abs=1e-6)


# --------------------------------------------------------------------------- exact_match.py


class Numbers:
    """A tokenizer of texts such as `3 14 2`."""

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]


def exact_match(model: nn.Module, config: ModelConfig) -> float:
    """Return the score of a model on the questions in the file of `config.extra`."""
    run = SimpleNamespace(
        config=Config(model=config),
        gpt=model,
        tokenizer=Numbers(),
        accelerator=SimpleNamespace(device=torch.device("cpu")),
        on_progress=ignore_progress,
    )
    with torch.no_grad():
        found: float = call(Example("exact_match.py").own.evaluate, run=run, config=run.config)[
            "eval/exact_match"
        ]
    return found


def test_a_model_that_always_answers_right_scores_one(tmp_path: Path) -> None:
    """The right answers are what the model generates; the others differ in the last token."""
    file = tmp_path / "questions.jsonl"
    config = tiny(extra={"questions": str(file)})
    torch.manual_seed(2)
    model = GPT(config, 20).eval()
    nn.init.normal_(model.wte.weight)
    sampling = SampleConfig(max_new_tokens=3, temperature=0)
    right, wrong = [], []
    for question in ([1, 2, 3], [7], [4] * 12, [5, 9] * 10):  # the last is longer than the context
        prompt = torch.tensor([question])
        answer = torch.cat(list(stream(model, prompt, sampling, torch.Generator()))).tolist()
        for rows, last in ((right, answer[-1]), (wrong, (answer[-1] + 1) % 20)):
            texts = [" ".join(map(str, ids)) for ids in (question, [*answer[:-1], last])]
            rows.append({"question": texts[0], "answer": texts[1]})
    likely, unlikely = (
        [{**a, "choices": [b["answer"], a["answer"]]} for a, b in zip(these, those, strict=True)]
        for these, those in ((right, wrong), (wrong, right))
    )
    cases = ((right, 1.0), (wrong, 0.0), (right[:3] + wrong[:1], 0.75))
    for questions, score in (*cases, (likely, 1.0), (unlikely, 0.0)):
        file.write_text("\n".join(map(json.dumps, questions)) + "\n")
        assert exact_match(model, config) == score


def test_the_likeliest_choice_is_that_of_the_whole_text(tmp_path: Path) -> None:
    """The second token of one choice is so unlikely that the other choice wins."""
    file = tmp_path / "questions.jsonl"
    table = torch.full((20, 20), -10.0)  # from a token to the logits of the next one
    table[1, 2], table[1, 3] = 2.0, 1.0
    table[2, 4], table[3, 5] = 0.0, 5.0
    table[2, 6] = 5.0
    rows = [{"question": "1", "choices": ["2 4", "3 5"], "answer": "3 5"}]
    file.write_text(json.dumps(rows[0]))
    config = tiny(extra={"questions": str(file)})
    assert exact_match(nn.Embedding.from_pretrained(table), config) == 1.0


# --------------------------------------------------------------------------- early_stop.py

LOSSES = (3.0, 2.0, 2.1, 2.0, 2.1, 2.2, 1.0, 1.0)  # at steps 2, 4, ...; they rise until step 12


def test_a_run_ends_for_good_once_its_loss_has_risen_twice(
    example_run: Arguments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Printed
) -> None:
    """The second launch sees the losses of the first one too."""
    calls: list[int] = []

    def evaluate(**_: Any) -> dict[str, float]:
        calls.append(1)
        loss = LOSSES[len(calls) - 1]
        return {"eval/train_loss": loss, "eval/val_loss": loss}

    monkeypatch.setattr(train, "evaluate", evaluate)
    own = example_run("early_stop.py", "--eval.every", "2", "--sample.every", "0")
    own += ["--train.max_steps", "16", "--checkpoint.keep_best", "true"]
    assert launch([*own, "--train.stop_at", "10"]) == 0
    assert launch(own) == 0
    assert len(calls) == 6
    plan = json.loads((tmp_path / "run" / "run.json").read_text())["launches"][-1]["plan"]
    told = "the validation loss has risen twice in a row"
    finish = plan["finish"]
    assert (finish["step"], finish["why"]) == (12, told)
    assert RunFolder(tmp_path / "run").checkpoints.keys() >= {4, 12}  # the best, and the last
    capfd.readouterr()
    assert launch(own) == 0
    assert f"finished by early_stop.py: {told}" in capfd.readouterr().err
    assert len(calls) == 6


@pytest.mark.slow
def test_two_processes_agree_to_end_beside_saves_in_the_background(
    example_run: Arguments, tmp_path: Path
) -> None:
    """Their agreement does not meet the messages of the threads that save."""
    own = example_run("early_stop.py", "--eval.every", "1", "--checkpoint.every", "1")
    own += ["--sample.every", "0", "--eval.tokens", "64", "--train.micro_batch_size", "2"]
    work("ddp", 2, [["early", own, 0, None]], tmp_path)
    assert records(tmp_path / "run")[-1]["step"] == 12


# --------------------------------------------------------------------------- recipes


@pytest.fixture
def recipe(tmp_path: Path) -> Callable[[str], Example]:
    """Load a recipe by its title."""

    def load(title: str) -> Example:
        file = tmp_path / "recipe.py"
        file.write_text(RECIPES[title])
        return Example(str(file))

    return load


def test_lion_updates_as_in_the_paper(recipe: Callable[[str], Example]) -> None:
    """Chen et al. 2023, algorithm 2, in float64, with decay of matrices only."""
    model = nn.Linear(3, 2)
    config = Config(optim=OptimConfig(lr=0.1, weight_decay=0.5))
    optimizer = call(recipe("Lion").own.optimizer, model=model, config=config)
    generator = torch.Generator().manual_seed(0)
    exact = {key: weight.detach().double().numpy() for key, weight in model.named_parameters()}
    momentum = dict.fromkeys(exact, 0.0)
    for _ in range(5):
        drawn_gradients(model.parameters(), generator)
        optimizer.step()
        for key, weight in model.named_parameters():
            g = weight.grad.double().numpy()
            direction = np.sign(0.9 * momentum[key] + 0.1 * g)
            decay = 0.5 if key == "weight" else 0.0
            exact[key] = exact[key] - 0.1 * (direction + decay * exact[key])
            momentum[key] = 0.99 * momentum[key] + 0.01 * g
            np.testing.assert_allclose(weight.detach().numpy(), exact[key], atol=1e-6)


def test_a_token_beyond_the_window_does_not_change_the_logits(
    recipe: Callable[[str], Example],
) -> None:
    """Nor with a cache that takes the text in parts of several tokens."""
    config = tiny(n_layer=1, block_size=64)
    model = recipe("sliding window of 32 tokens").model(config, 20).eval()
    tokens = torch.arange(64)[None] % 19
    other = tokens.clone()
    other[0, 4] = 19
    with torch.no_grad():
        logits = model(tokens)
        difference = (logits - model(other)).abs().amax(-1)[0]
        assert difference.nonzero()[:, 0].tolist() == list(range(4, 36))
        cache = model.make_cache(64)
        parts = [model(part, cache=cache) for part in tokens.split(24, dim=1)]
        torch.testing.assert_close(torch.cat(parts, dim=1), logits)


def test_a_z_loss_by_hand(recipe: Callable[[str], Example]) -> None:
    """Logits of 0 and log 3: Z is 4. The ignored target counts in neither part."""
    logits = torch.tensor([[[0.0, np.log(3.0)], [50.0, 7.0]]])
    loss = recipe("z-loss").own.loss
    targets = torch.tensor([[0, IGNORE]])
    total, parts = call(loss, model=lambda *_, **__: logits, tokens=targets, targets=targets)
    assert parts["z"].item() == pytest.approx(1e-4 * np.log(4) ** 2)
    assert total.item() == pytest.approx(np.log(4) + 1e-4 * np.log(4) ** 2)
