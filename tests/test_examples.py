"""Each file in examples/ trains and shows its own property.

A slow test proves that killed and resumed runs with Lion equal an undisturbed run bit for bit on
changing numbers of processes. With ACCEL_GPT_THOROUGH=1, it does so with each file, and with runs
of one process without train.reproducible.
"""

import ast
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import accel_gpt
from accel_gpt.cli import dispatch
from accel_gpt.commands.resolve import load_config
from accel_gpt.commands.verify_resume import differing_values, run_values
from accel_gpt.config.experiment import Config, SampleConfig
from accel_gpt.config.model import ModelConfig
from accel_gpt.data.corpus import open_corpus
from accel_gpt.evals.validation import ignore_progress
from accel_gpt.model.generate import stream
from accel_gpt.model.gpt import GPT
from accel_gpt.model.loss import IGNORE
from accel_gpt.own_code import load_own_code
from tests.conftest import QUIET, THOROUGH, launch, run_here, tiny
from tests.test_train import records

Arguments = Callable[..., list[str]]
Printed = pytest.CaptureFixture[str]
ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.py"))
SCRIPTS = ("own_loop.py",)  # not files for --code
CODES = [name for name in EXAMPLES if name not in SCRIPTS]
ALWAYS = ("own_model.py",)  # the others are slow
KILLED = CODES if THOROUGH else ["lion.py"]
FEW_STEPS = ("--train.max_steps", "4", "--eval.every", "2", "--sample.every", "0")
# what an example needs beside the config of the small run
NEEDS = {
    "own_shards.py": ("--data.train", "{mine}", "--data.tokenizer", "bytes"),
    "sliding_window.py": ("--model.extra.window", "8"),
}


@dataclass
class Example:
    """The functions of a file in examples/, and its other names."""

    name: str

    def __post_init__(self) -> None:
        self.own = load_own_code(str(ROOT / "examples" / self.name))
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
def example_run(small_run: Arguments, own_ids: Path) -> Callable[..., list[str]]:
    """Arguments of a tiny run with an example; more options may follow."""

    def arguments(name: str, *options: str) -> list[str]:
        needs = [word.replace("{mine}", str(own_ids)) for word in NEEDS.get(name, ())]
        return small_run("--code", str(ROOT / "examples" / name), *needs, *options)

    return arguments


# --------------------------------------------------------------------------- all examples


@pytest.mark.parametrize("name", CODES)
def test_the_command_of_an_example_is_accepted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    docstring = ast.get_docstring(ast.parse((ROOT / "examples" / name).read_text())) or ""
    lines = docstring.replace("\\\n", " ").splitlines()
    commands = [line.split() for line in lines if line.strip().startswith("accel-gpt train ")]
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
    """The records cover the metrics of the example too, which verify-resume does not compare."""
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    assert launch(example_run(name, *FEW_STEPS, "--out_dir", str(whole))) == 0
    own = example_run(name, *FEW_STEPS, "--out_dir", str(parted))
    assert launch([*own, "--train.stop_at", "2"]) == 0
    assert launch(own) == 0
    assert records(parted) == records(whole)
    assert not differing_values(run_values(whole, 4), run_values(parted, 4))
    capsys.readouterr()
    code = str(ROOT / "examples" / name)
    words = ["sample", str(parted), "--code", code, "--prompt", "the king", "--max_new_tokens", "4"]
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


# --------------------------------------------------------------------------- sliding_window.py


@pytest.mark.parametrize("layers", [1, 2])
def test_a_token_beyond_the_window_does_not_change_the_logits(layers: int) -> None:
    config = tiny(n_layer=layers, extra={"window": 3})
    model = Example("sliding_window.py").model(config, 20)
    tokens = torch.arange(16)[None]
    other = tokens.clone()
    other[0, 4] = 17
    model.eval()
    with torch.no_grad():
        difference = (model(tokens) - model(other)).abs().amax(-1)[0]
    # a layer carries a token on by two positions
    assert difference.nonzero()[:, 0].tolist() == list(range(4, 5 + 2 * layers))


# --------------------------------------------------------------------------- moe.py


def test_each_token_is_the_gated_sum_of_its_likeliest_experts() -> None:
    example = Example("moe.py")
    config = tiny(n_layer=1, extra={"experts": 4, "top_k": 2})
    layer = example.model(config, 20).blocks[0].mlp
    nn.init.normal_(layer.router.weight)
    rows: list[int] = []
    for expert in layer.experts:
        expert.register_forward_hook(lambda _, given, out: rows.append(len(given[0])))
    x = torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(0))
    found = layer(x)
    assert sum(rows) == 2 * 7 * 2  # each token is in two experts
    assert len(set(rows)) > 1
    probabilities, chosen, gates = layer.route(x.flatten(0, 1))
    torch.testing.assert_close(gates.sum(-1), torch.ones(14))
    for token, out in zip(range(14), found.flatten(0, 1), strict=True):
        likeliest = probabilities[token].argsort(descending=True)[:2].tolist()
        assert chosen[token].tolist() == likeliest
        share = probabilities[token, likeliest]
        outs = [layer.experts[e](x.flatten(0, 1)[token, None])[0] for e in likeliest]
        expected = sum(s * o for s, o in zip(share / share.sum(), outs, strict=True))
        torch.testing.assert_close(out, expected)


def test_flops_count_the_chosen_experts_only() -> None:
    example = Example("moe.py")
    config = tiny(n_layer=1, extra={"experts": 4, "top_k": 1})
    router = 32 * 4
    plain = GPT(config, 20).flops_per_token()
    assert example.model(config, 20).flops_per_token() == plain + 6 * router


def test_the_loss_of_moe_is_cross_entropy_and_balance() -> None:
    example = Example("moe.py")
    assert example.own.loss is not None
    model = example.model(tiny(n_layer=1), 20)
    tokens = torch.arange(16)[None]
    total, parts = example.own.loss(
        model=model, tokens=tokens, targets=tokens, documents=None, step=0, config=None, plan=None
    )
    assert parts["cross_entropy"] == model(tokens, tokens)
    assert parts["balance"] > 0.9
    assert total.item() == pytest.approx((parts["cross_entropy"] + 0.01 * parts["balance"]).item())


# --------------------------------------------------------------------------- optimizer, rate, loss


def test_lion_updates_as_in_the_paper() -> None:
    """Chen et al. 2023, algorithm 2, number by number."""
    lr, beta1, beta2, decay = 0.1, 0.9, 0.99, 0.5
    start = [1.0, -2.0, 0.5, 3.0]
    gradients = [[0.3, -0.1, 0.0, 2.0], [-0.01, 4.0, 1.0, -0.2]]
    weight = nn.Parameter(torch.tensor([start]))
    optimizer = Example("lion.py").names["Lion"]([weight], lr, (beta1, beta2), decay)
    expected = list(start)
    momentum = [0.0] * 4
    for gradient in gradients:
        weight.grad = torch.tensor([gradient])
        optimizer.step()
        for i, g in enumerate(gradient):
            c = beta1 * momentum[i] + (1 - beta1) * g
            sign = (c > 0) - (c < 0)
            expected[i] -= lr * (sign + decay * expected[i])
            momentum[i] = beta2 * momentum[i] + (1 - beta2) * g
        torch.testing.assert_close(weight.data[0], torch.tensor(expected))
        torch.testing.assert_close(optimizer.state[weight]["exp_avg"][0], torch.tensor(momentum))


def test_z_loss_by_hand() -> None:
    """Logits of 0 and log 3: Z is 4. The ignored target counts in neither part."""
    own = Example("z_loss.py").own
    assert own.loss is not None
    logits = torch.tensor([[[0.0, math.log(3)], [50.0, 7.0]]])
    targets = torch.tensor([[0, IGNORE]])
    total, parts = own.loss(
        model=lambda tokens, documents: logits,
        tokens=targets,
        targets=targets,
        documents=None,
        step=0,
        config=None,
        plan=None,
    )
    assert parts["cross_entropy"].item() == pytest.approx(math.log(4))
    assert parts["z_loss"].item() == pytest.approx(1e-4 * math.log(4) ** 2)
    assert total.item() == pytest.approx(math.log(4) + 1e-4 * math.log(4) ** 2)


def test_the_rate_falls_with_the_root_of_the_step() -> None:
    own = Example("inverse_sqrt.py").own
    assert own.lr is not None
    found = [
        own.lr(step=step, config=None, plan=SimpleNamespace(warmup_steps=2)) for step in range(8)
    ]
    assert found == pytest.approx([0.5, 1.0, *(math.sqrt(2 / step) for step in range(3, 9))])


# --------------------------------------------------------------------------- block_norms.py


def test_norms_of_blocks_are_those_of_the_checkpoint(
    example_run: Arguments, tmp_path: Path
) -> None:
    short = ("--train.max_steps", "3", "--optim.name", "adamw", *QUIET)
    assert launch(example_run("block_norms.py", *short)) == 0
    record = records(tmp_path / "run")[-1]
    model, _ = accel_gpt.load(tmp_path / "run")
    for number, block in enumerate(model.blocks):
        flat = torch.cat([p.flatten() for p in block.parameters()])
        assert record[f"train/weight_norm/{number}"] == pytest.approx(flat.norm().item())
        assert record[f"train/average_gradient_norm/{number}"] > 0
    file = tmp_path / "run" / "checkpoints" / "step_00000003" / "optimizer.bin"
    state = torch.load(file, weights_only=True)["state"].values()
    total = sum(one["exp_avg"].square().sum().item() for one in state)
    blocks = [record[f"train/average_gradient_norm/{number}"] for number in range(2)]
    assert 0 < sum(norm**2 for norm in blocks) < total  # the rest is of the embeddings


# --------------------------------------------------------------------------- own_shards.py


def test_the_ids_that_are_trained_on_are_those_of_the_files(
    example_run: Arguments, own_ids: Path
) -> None:
    config = load_config(example_run("own_shards.py"), "test")
    corpus = open_corpus(config)
    files = sorted(own_ids.glob("train_*.bin"))
    assert len(files) == 2
    (source,) = corpus.train.sources
    arrays = source.split.arrays
    for file, array in zip(files, arrays, strict=True):
        assert isinstance(array, np.memmap)
        assert array.tobytes() == file.read_bytes()
    text = (own_ids.parent / "text.txt").read_text()
    assert corpus.tokenizer.decode(arrays[1][:8].tolist()) == text[9000:9008]


# --------------------------------------------------------------------------- exact_match.py


class Numbers:
    """A tokenizer of texts such as `3 14 2`."""

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]


def exact_match(model: nn.Module, config: ModelConfig) -> float:
    """Return the score of a model on the questions in the file of `config.extra`."""
    own = Example("exact_match.py").own
    assert own.evaluate is not None
    run = SimpleNamespace(
        config=Config(model=config),
        gpt=model,
        tokenizer=Numbers(),
        accelerator=SimpleNamespace(device=torch.device("cpu")),
        on_progress=ignore_progress,
    )
    with torch.no_grad():
        found: float = own.evaluate(run=run, config=run.config)["eval/exact_match"]
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
            rows.append(json.dumps({"question": texts[0], "answer": texts[1]}))
    for rows, score in ((right, 1.0), (wrong, 0.0), (right[:3] + wrong[:1], 0.75)):
        file.write_text("\n".join(rows) + "\n")
        assert exact_match(model, config) == score


# --------------------------------------------------------------------------- callback.py


@pytest.mark.slow
def test_the_callback_stops_a_run_that_gets_worse_and_the_run_resumes(
    example_run: Arguments, tmp_path: Path, capsys: Printed
) -> None:
    config, _, code = example_run("callback.py")
    done = tmp_path / "done"  # a letter for each evaluation
    done.touch()
    copy = tmp_path / "callback.py"
    copy.write_text(
        Path(code).read_text()
        + "\n\nfrom accel_gpt import train as _train\n\n\ndef _evaluate(*_, **__):\n"
        f"    done = Path({str(done)!r})\n    done.write_text(done.read_text() + '.')\n"
        # at steps 2, 4, ..., 12
        "    losses = (3.0, 2.0, 2.1, 2.2, 1.9, 1.8)\n"
        "    return {'eval/val_loss': losses[len(done.read_text()) - 1]}\n\n\n"
        "_train.evaluate = _evaluate\n"
    )
    options = {"code": copy, "eval.every": 2, "sample.every": 0, "checkpoint.every": 100}
    run = accel_gpt.run(config, options)
    assert "has risen 2 times in a row" in capsys.readouterr().err
    (checkpoint,) = (run.path / "checkpoints").glob("step_*")
    assert checkpoint.name in ("step_00000008", "step_00000009")
    run = accel_gpt.run(config, options)
    assert run.metrics.index[-1] == 12
    assert "has risen" not in capsys.readouterr().err
