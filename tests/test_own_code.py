"""`--code FILE`: what is wrong in the file is one sentence with its place, and costs no step."""

import contextlib
import json
import shutil
from collections.abc import Sequence
from itertools import dropwhile
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn

import accel_gpt
from accel_gpt import train as train_module
from accel_gpt.commands import sweep
from accel_gpt.commands.resolve import load_config
from accel_gpt.commands.series import SeriesRun
from accel_gpt.config.plan import Finish
from accel_gpt.errors import UserError
from accel_gpt.launch import auto_batch
from accel_gpt.launch import compile as compilation
from accel_gpt.own_code import load_own_code
from accel_gpt.report.runs import open_runs
from accel_gpt.runs.checkpoint import read_state
from accel_gpt.runs.folder import RunFolder
from tests.conftest import QUIET, launch, small_config
from tests.test_golden import call
from tests.test_train import records

# the smallest model: 257 x 16 weights in, 16 x 257 out
NET = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, vocab_size, channels=16):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, channels)
        self.head = nn.Linear(channels, vocab_size)

    def forward(self, tokens):
        return self.head(self.embedding(tokens))

"""
MODEL = f"{NET}def model(config, vocab_size):\n    return Net(vocab_size)\n"
ADAMW = ("--optim.name", "adamw")
BYTES = ("--data.tokenizer", "bytes")
EVALUATED = ("--eval.every", "2")
LOSS = "def loss(model, tokens, targets, documents):\n"
SGD = "import torch\ndef optimizer(model, config):\n    return torch.optim.SGD("
SHARDS = "import numpy as np\ndef shards(folder, split):\n    return "
GPT = (
    "from accel_gpt.model.gpt import GPT\ndef model(config, vocab_size):\n"
    "    gpt = GPT(config.model, vocab_size, init=False)\n"
)


def net(forward: str) -> str:
    """Return a file whose model has another forward; `forward` begins in line 14."""
    own = f"class Own(Net):\n    def forward(self, tokens):\n        {forward}\n"
    return f"{NET}{own}def model(config, vocab_size):\n    return Own(vocab_size)\n"


def step(body: str) -> str:
    """Return a file whose optimizer has another step; `body` is line 4."""
    return (
        f"import torch\nclass Own(torch.optim.SGD):\n    def step(self, closure=None):\n"
        f"        {body}\ndef optimizer(model, config):\n"
        "    return Own(model.parameters(), lr=0.1)\n"
    )


def function(name: str, arguments: str, body: str) -> str:
    return f"def {name}({arguments}):\n    {body}\n"


# what is wrong: the file, and what the error says
BAD: dict[str, tuple[str, str]] = {
    "a missing module": ("import nothing_here\n", "my.py, line 1: ModuleNotFoundError: No mod"),
    "a syntax error": ("def lr(step, config, plan)\n", "my.py, line 1: expected ':'"),
    "no Python": ("x\0y\n", "my.py: source code string cannot contain null bytes"),
    "only a misspelled function": (
        function("optimiser", "model, config", "pass"),
        "after_evaluation; nothing calls optimiser(); did you mean optimizer?",
    ),
    "other arguments": (
        function("lr", "rate", "return 1.0"),
        "my.py, line 1: lr(): missing a required argument: 'rate'; it may take step, config, plan",
    ),
    "no module": (
        function("model", "config, vocab_size", "return 3"),
        "my.py, line 1: model() returned int; return a torch.nn.Module with trainable parameters",
    ),
    "logits of another shape": (
        net("return super().forward(tokens)[:, 1:]"),
        "model() returned Tensor of shape (1, 31, 257); return logits of shape (1, 32, 257)",
    ),
    "logits of later tokens": (net("return super().forward(tokens.flip(1))"), "on later tokens"),
    "a tensor that is no buffer": (
        MODEL.replace(
            "        self.head", "        self.pos = torch.ones(2)\n        self.head", 1
        ),
        "pos of Net is a tensor, but neither a parameter nor a buffer",
    ),
    "blocks that share a cache": (
        f"{GPT}    gpt.blocks[1] = gpt.blocks[0]\n    return gpt\n",
        "the GPT of my.py, line 2: model() computes other logits with its cache",
    ),
    "checkpointing of an own model": (MODEL, "but my.py, line 15: model() returned another class"),
    "documents for a model of tokens": (
        MODEL,
        "data.document_mask is true, but the forward of my.py, line 15: model() takes no documents",
    ),
    "a push of an own model": (MODEL, "the model() of my.py cannot be exported"),
    "a loss that is no tensor": (
        f"{LOSS}    return model(tokens, targets).item()\n",
        "my.py, line 1: loss() returned float; return a real scalar tensor with a gradient, or",
    ),
    "a loss without a gradient": (
        f"{LOSS}    return model(tokens, targets).detach()\n",
        "my.py, line 1: loss() returned Tensor of shape (); return a real scalar tensor with a gr",
    ),
    "a part that is no tensor": (
        f"{LOSS}    return model(tokens, targets), {{'z': 'a'}}\n",
        "my.py, line 1: loss(): z returned str; return a real scalar tensor or a number",
    ),
    "no optimizer": (
        function("optimizer", "model, config", "pass"),
        "my.py, line 1: optimizer() returned NoneType; return a torch.optim.Optimizer",
    ),
    "an optimizer that lacks parameters": (
        f"{SGD}[p for p in model.parameters() if p.ndim > 1], lr=0.1)\n",
        "the optimizer of my.py, line 2: optimizer() lacks blocks.0.norm_1.weight, which would",
    ),
    "no function": ("lr = 3\n", "my.py: lr is 3, not a function"),
    "a coroutine": (
        "async def lr(step):\n    return 1.0\n",
        "my.py, line 1: lr() is a coroutine or a generator; write a plain function",
    ),
    "a generator": (
        "def after_evaluation(run):\n    yield 1\n",
        "my.py, line 1: after_evaluation() is a coroutine or a generator",
    ),
    "a callable from elsewhere": (
        "import torch\nloss = torch.nn.CrossEntropyLoss()\n",
        "my.py: loss(): CrossEntropyLoss.forward() got an unexpected keyword argument 'model'",
    ),
    "a rate that is no number": (
        function("lr", "step", "return 'a'"),
        "my.py, line 1: lr() returned str; return a finite number",
    ),
    "a rate that is not finite": (
        function("lr", "step", "return float('nan')"),
        "my.py, line 1: lr() returned float; return a finite number",
    ),
    "evaluated() that changes the weights": (
        "def evaluated(model):\n    model.wpe.weight.mul_(1.01)\n    return {}\n",
        "my.py, line 1: evaluated() changes wpe.weight of the model; return new tensors",
    ),
    "evaluated weights of another shape": (
        "def evaluated(model):\n    return {'wpe.weight': model.wpe.weight[:3]}\n",
        "my.py, line 1: evaluated(): wpe.weight returned Tensor of shape (3, 32); return a Tensor",
    ),
    "evaluated weights of another name": (
        "def evaluated(model):\n    return {'wpe.weights': model.wpe.weight}\n",
        "evaluated() returned wpe.weights, which is no weight; did you mean wpe.weight or",
    ),
    "evaluated weights that are none": (
        "def evaluated(model):\n    pass\n",
        "my.py, line 1: evaluated() returned NoneType; return {name: tensor}",
    ),
    "an optimizer that keeps an object": (
        step("self.state[self.param_groups[0]['params'][0]]['x'] = object()"),
        "the optimizer of my.py, line 5: optimizer() keeps a object in its state or its groups",
    ),
    "shards of two dimensions": (f"{SHARDS}[np.ones((50, 100), int)]\n", "my.py, line 2: shards()"),
    "no shards for val": (
        f"{SHARDS}[np.arange(5000) % 200] if split == 'train' else []\n",
        "my.py, line 2: shards()",
    ),
    "ids beyond the vocabulary": (
        f"{SHARDS}[np.arange(5000) % 400]\n",
        "my.py, line 2: shards() holds token 257",
    ),
}
# what some of them need beside the file
OPTIONS = {
    "documents for a model of tokens": ("--data.document_mask", "true"),
    "checkpointing of an own model": ("--train.activation_checkpointing", "blocks"),
    "a push of an own model": ("--hub.push", "end", "--hub.repo_id", "me/mine"),
    "shards of two dimensions": BYTES,
    "no shards for val": BYTES,
    "ids beyond the vocabulary": BYTES,
}
# errors of a completed step: what is wrong, as above, with the step that must be saved
AFTER_A_STEP: dict[str, tuple[str, str, int]] = {
    "a part with the name of a metric": (
        f"{LOSS}    a = model(tokens, targets)\n    return a, {{'loss': a}}\n",
        "my.py, line 1: loss() returned 'train/loss', the name of another metric",
        1,
    ),
    "a part that is sometimes missing": (
        f"calls = []\n{LOSS}    a = model(tokens, targets)\n    calls.append(a)\n"
        "    return a, {'z': a} if len(calls) % 2 else {'z': a, 'y': a}\n",
        "my.py, line 2: loss() returned the parts",
        1,
    ),
    "metrics that are no dictionary": (
        function("metrics", "run", "pass"),
        "my.py, line 1: metrics() returned NoneType",
        1,
    ),
    "an evaluation with our name": (
        function("evaluate", "run", "return {'eval/val_loss': 1}"),
        "my.py, line 1: evaluate() returned 'eval/val_loss', the name of another metric",
        2,
    ),
    "a metric with the name of a launch's": (
        function("metrics", "run", "return {'launch/number': 1}"),
        "my.py, line 1: metrics() returned 'launch/number', the name of another metric",
        1,
    ),
    "an error in after_evaluation": (
        function("after_evaluation", "run, record", "raise KeyError('gone')"),
        "my.py, line 2, in after_evaluation: KeyError: 'gone'",
        2,
    ),
}
# each raises an error in line "gone"
RAISES = {
    "lr": function("lr", "step, config, plan", "raise KeyError('gone')"),
    "Own.forward": net("raise KeyError('gone')"),
    "Own.step": step("raise KeyError('gone')"),
}


@pytest.fixture
def folder(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a folder with a corpus and small.yaml the current one."""
    small_config(corpus.parent)
    monkeypatch.chdir(corpus.parent)
    return corpus.parent


@pytest.fixture
def made_runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Train the runs of a sweep in this process; return the names of those that were trained."""
    trained = []

    class Series:
        def __init__(self, runs: Sequence[SeriesRun]) -> None:
            self.runs = runs

        def train(self) -> dict[str, str]:
            for run in self.runs:
                if run.finished:
                    continue
                run.folder.mkdir(exist_ok=True)
                words = [str(run.config), "--out_dir", str(run.folder)]
                words += ["--code", run.own.file] if run.own.file else []
                assert launch(words) == 0
                trained.append(run.name)
            return {}

    monkeypatch.setattr(sweep, "Series", Series)
    return trained


def train(*options: str, steps: int = 3) -> int:
    """Train a few steps with my.py; return the exit code."""
    words = ["small.yaml", *QUIET, "--checkpoint.every", "0"]
    return launch([*words, "--train.max_steps", str(steps), "--code", "my.py", *options])


def problems(capfd: pytest.CaptureFixture[str]) -> list[str]:
    """Return the lines on standard error from the first warning or error on."""
    lines = capfd.readouterr().err.splitlines()
    return list(dropwhile(lambda line: not line.startswith(("WARNING", "error")), lines))


def saved(folder: Path) -> list[int]:
    """Return the steps of the checkpoints."""
    return sorted(int(path.name[5:]) for path in folder.glob("run/checkpoints/step_*"))


@pytest.mark.parametrize("what", BAD)
def test_a_mistake_is_one_sentence_with_its_place(
    what: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source, expected = BAD[what]
    (folder / "my.py").write_text(source)
    code = train(*ADAMW, *OPTIONS.get(what, ()))
    (error,) = problems(capfd)
    assert expected in error
    assert error.startswith("error: ")
    assert f"{folder}/my.py" not in error  # the path as given
    assert code == (3 if "ids" in what else 2)


@pytest.mark.parametrize("what", AFTER_A_STEP)
def test_a_mistake_after_a_step_loses_nothing(
    what: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source, expected, step_saved = AFTER_A_STEP[what]
    (folder / "my.py").write_text(source)
    assert train(*EVALUATED, "--train.micro_batch_size", "4") == 2
    (error,) = problems(capfd)
    assert error.startswith(f"error: {expected}")
    assert saved(folder) == [step_saved]


def test_metrics_that_fail_leave_the_evaluation_due(folder: Path) -> None:
    code = folder / "my.py"
    code.write_text(function("metrics", "run", "return {'x': 1 // (run.state.step - 4)}"))
    assert train(*EVALUATED, steps=4) == 2
    code.write_text(function("metrics", "run", "return {'x': 1}"))
    assert train(*EVALUATED, "--checkpoint.allow_change", "code", steps=4) == 0
    evaluated = [one["step"] for one in records(folder / "run") if "eval/val_loss" in one]
    assert evaluated == [2, 4]


def test_a_file_that_exits_is_no_finished_run(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code = folder / "my.py"
    for source in ("import sys\nsys.exit()\n", "def metrics(run):\n    exit(0)\n"):
        code.write_text(source)
        assert train() == 2
        assert "my.py, line 2" in capfd.readouterr().err


@pytest.mark.parametrize("where", RAISES)
def test_an_error_inside_the_file_names_its_line(
    where: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source = RAISES[where]
    (folder / "my.py").write_text(source)
    assert train(*ADAMW) == 2
    line = 1 + next(n for n, text in enumerate(source.splitlines()) if "gone" in text)
    assert problems(capfd) == [f"error: my.py, line {line}, in {where}: KeyError: 'gone'"]


def test_a_misspelled_function_is_a_warning(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rate = function("lr", "step, config, plan", "return 1.0")
    (folder / "my.py").write_text(rate + function("evaluat", "run", "return {}"))
    assert train(steps=3) == 0
    assert problems(capfd)[:1] == [
        "WARNING: my.py: nothing calls evaluat(); did you mean evaluate or evaluated?"
    ]


# --------------------------------------------------------------------------- a run and its file

RATE = function("lr", "step, config, plan", "return 1.0")


def test_a_resume_without_the_file_or_with_another_asks(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    own = folder / "my.py"
    own.write_text(RATE)
    assert train("--train.stop_at", "2", steps=4) == 0
    capfd.readouterr()
    words = ["small.yaml", *QUIET, "--checkpoint.every", "0"]
    words += ["--train.max_steps", "4"]
    assert launch(words) == 2
    error = capfd.readouterr().err
    assert "code was my.py (" in error
    assert "), is null; set another out_dir" in error
    own.write_text(f"{RATE}# edited\n")
    assert train(steps=4) == 2
    error = capfd.readouterr().err
    assert error.endswith("or accept it with --checkpoint.allow_change code\n")
    assert saved(folder) == [2]
    assert train("--checkpoint.allow_change", "code", steps=4) == 0  # its advice
    assert train(steps=4) == 0  # the new file is the run's from now on


def test_commands_that_open_a_run_with_an_own_model_ask_for_its_file(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    own = folder / "my.py"
    own.write_text(MODEL)
    assert train(*ADAMW) == 0
    capfd.readouterr()
    other = folder / "rate.py"
    other.write_text(RATE)
    ask = "error: run/checkpoints/step_00000003 was made with model() of my.py; add --code my.py\n"
    for words in (
        ["sample", "run"],
        ["sample", "run/checkpoints/step_00000003"],
        ["evaluate", "run"],
        ["train", "small.yaml", "--out_dir", "tuned", "--model.init_from", "run"],
    ):
        assert call(*words) == 2, words
        assert capfd.readouterr().err == ask
        assert call(*words, "--code", "rate.py") == 2, words
        assert capfd.readouterr().err.splitlines()[-1] == ask.strip()
    refused = "run has the model() of my.py, which neither transformers nor llama.cpp has"
    for words in (
        ["export", "run", "--to", "exported"],
        ["export", "run", "--gguf", "model.gguf"],
        ["push", "run", "--repo", "me/mine"],
    ):
        assert call(*words) == 2, words
        assert refused in capfd.readouterr().err
    assert not (folder / "exported").exists()
    assert call("sample", "run", "--code", "my.py", "--num", "1", "--max_new_tokens", "3") == 0
    assert capfd.readouterr().err == ""
    own.write_text(f"{MODEL}# edited\n")
    assert call("sample", "run", "--code", "my.py", "--num", "1", "--max_new_tokens", "3") == 0
    assert "but --code is my.py as it is now" in capfd.readouterr().err


@pytest.mark.slow
def test_the_python_interface_takes_the_file(folder: Path) -> None:
    own = folder / "my.py"
    options = {"code": "my.py", "train.max_steps": 3, "optim.name": "adamw", "eval.every": 0}
    options |= {"sample.every": 0}
    own.write_text(MODEL + function("metrics", "run", "return {'own/number': 1}"))
    run = accel_gpt.run("small.yaml", options)
    assert [record["own/number"] for record in records(run.path)] == [1, 1, 1]
    assert len(run.sample("the", code="my.py", num=2, max_new_tokens=4)) == 2
    model, tokenizer = accel_gpt.load("run", code="my.py")
    assert tokenizer.vocab_size == 257
    assert sum(p.numel() for p in model.parameters()) == 257 * 16 + 17 * 257
    with pytest.raises(UserError, match=r"add --code my\.py"):
        accel_gpt.load("run")


def test_bench_counts_an_own_model(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    own = folder / "my.py"
    own.write_text(
        f"{MODEL}\n\ndef _flops(net):\n    return 123\n\n\nNet.flops_per_token = _flops\n"
    )
    assert call("plan", "small.yaml", "--code", "my.py") == 2
    assert "plan does not know the model() of my.py" in capfd.readouterr().err
    assert call("bench", "small.yaml", "--code", "my.py", "--steps", "2", "--json", *ADAMW) == 0
    found = json.loads(capfd.readouterr().out)
    assert (found["parameters"], found["flops_per_token"]) == (8481, 123)


@pytest.mark.slow
def test_a_sweep_over_files_reuses_the_runs_of_those_that_did_not_change(
    folder: Path, made_runs: list[str]
) -> None:
    (folder / "a.py").write_text(RATE)
    (folder / "sub").mkdir()
    (folder / "sub" / "b.py").write_text(RATE.replace("1.0", "0.5"))
    sweep = ["sweep", "small.yaml", "--code", "null,a.py,sub/b.py", "--out_dir", "swept"]
    sweep += ["--train.max_steps", "3", "--eval.every", "0", "--sample.every", "0"]
    assert call(*sweep) == 0
    assert made_runs == ["code=null,seed=1337", "code=a.py,seed=1337", "code=b.py,seed=1337"]
    made_runs.clear()
    (folder / "a.py").write_text(f"{RATE}# edited\n")
    assert call(*sweep) == 0
    assert made_runs == ["code=a.py,seed=1337"]
    assert len([path for path in (folder / "swept").iterdir() if path.is_dir()]) == 4


def test_auto_tries_a_step_with_the_own_model_loss_and_optimizer(folder: Path) -> None:
    """This is what train.micro_batch_size auto measures on a GPU."""
    called = "\n\ndef _note(name):\n    with open('called', 'a') as file:\n"
    called += "        file.write(f'{name} ')\n"
    model = MODEL.replace("    return Net(", "    _note('model')\n    return Net(")
    loss = f"{LOSS}    _note('loss')\n    return model(tokens, targets)\n"
    made = SGD.replace("    return", "    _note('optimizer')\n    return")
    (folder / "my.py").write_text(f"{called}{model}{loss}{made}model.parameters(), lr=0.1)\n")
    config = load_config(["small.yaml", *ADAMW, "--code", "my.py"], "test")
    auto_batch.try_step(config, 257, Accelerator(cpu=True))
    assert (folder / "called").read_text() == "model optimizer loss loss "


@pytest.mark.slow
def test_an_own_model_and_loss_compile_without_a_graph_break(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The model is traced as one graph; no kernel is compiled. Errors keep their place."""
    plain = nn.Module.compile
    monkeypatch.setattr(compilation, "compiler_error", lambda device: None)
    options = {"backend": "eager", "fullgraph": True}
    monkeypatch.setattr(nn.Module, "compile", lambda module, **_: plain(module, **options))
    part = f"{LOSS}    loss = model(tokens, targets)\n    return loss, {{'z': loss}}\n"
    (folder / "my.py").write_text(MODEL + part)
    torch._dynamo.reset()
    assert train(*ADAMW, "--train.compile", "true") == 0
    assert problems(capfd) == []
    (folder / "my.py").write_text(RAISES["Own.forward"])
    options["fullgraph"] = False
    torch._dynamo.reset()
    assert train(*ADAMW, "--train.compile", "true", "--out_dir", "second") == 2
    line = RAISES["Own.forward"].splitlines().index("        raise KeyError('gone')") + 1
    assert problems(capfd) == [f"error: my.py, line {line}, in Own.forward: KeyError: 'gone'"]


# --------------------------------------------------------------------------- arguments by name

NAMES = """
import json
def _note(name, **values):
    with open("called", "a") as file:
        file.write(json.dumps({"name": name, **values}) + "\\n")
import functools
from accel_gpt.optim.groups import make_optimizer
def _rate(plan, step, config):
    return config / (step + plan.max_steps)
lr = functools.partial(_rate, config=1.0)
def optimizer(model, config, plan):
    _note("optimizer", steps=plan.max_steps)
    return make_optimizer(model, config.optim)
def loss(config, targets, step, model, plan, tokens):
    _note("loss", step=step, lr=config.optim.lr, steps=plan.max_steps)
    return model(tokens, targets), {"weight": 1 - step / plan.max_steps}
def targets(config, targets):
    _note("targets", lr=config.optim.lr)
    return targets
def metrics(batch, step, record):
    _note("metrics", step=step, shape=batch.tokens.shape, next=batch.targets.shape)
    assert record["train/grad_norm"] > 0 and record["train/weight"] == 1 - (step - 1) / 4
    return {}
def evaluated(optimizer, model, **others):
    _note("evaluated", step=others["step"], kind=type(optimizer).__name__)
    return {}
def evaluate(config, run):
    return {"eval/lr": config.optim.lr}
def after_evaluation(step, *, record, plan):
    _note("after", step=step, loss=record["eval/val_loss"], steps=plan.max_steps)
"""


def test_a_function_gets_what_its_parameters_name(folder: Path) -> None:
    (folder / "my.py").write_text(NAMES)
    assert train(*EVALUATED, "--train.micro_batch_size", "4", steps=4) == 0
    called: dict[str, list[dict[str, Any]]] = {}
    for line in (folder / "called").read_text().splitlines():
        values = json.loads(line)
        called.setdefault(values.pop("name"), []).append(values)
    at_step = [values for values in called["loss"] if values["step"]]  # step 0 is checked, too
    assert at_step == [{"step": n, "lr": 1e-2, "steps": 4} for n in (1, 1, 2, 2, 3, 3)]
    shape = [4, 32]  # of a micro-batch
    expected = [{"step": n, "shape": shape, "next": shape} for n in (1, 2, 3, 4)]
    assert called["metrics"] == expected
    assert {values["lr"] for values in called["targets"]} == {1e-2}
    assert {values["steps"] for values in called["optimizer"]} == {4}
    assert {values["kind"] for values in called["evaluated"]} == {"GuardedAdamW"}
    losses = [record for record in records(folder / "run") if "eval/val_loss" in record]
    assert called["after"] == [
        {"step": n, "loss": record["eval/val_loss"], "steps": 4}
        for n, record in zip((2, 4), losses, strict=True)
    ]
    assert [record["eval/lr"] for record in losses] == [1e-2, 1e-2]
    rates = [record["train/lr"] for record in records(folder / "run")]
    assert rates == pytest.approx([1e-2 / n for n in (4, 5, 6, 7)])


# --------------------------------------------------------------------------- an end for good

FINISHES = {
    "metrics": "def metrics(run, step):\n    if step == 5:\n        run.finish('enough')\n"
    "    return {}\n",
    "after_evaluation": "def after_evaluation(run, record, step):\n    if step == 3:\n"
    "        run.finish('enough')\n",
}


@pytest.mark.parametrize("where", FINISHES)
def test_a_run_that_is_finished_ends_for_good(
    where: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / "my.py").write_text(FINISHES[where])
    end = 5 if where == "metrics" else 3
    options = ("--eval.every", "3", "--sample.every", "100", "--sample.max_new_tokens", "2")
    options += ("--checkpoint.every", "2")
    said = f"finished by my.py: enough\n{end} steps, "
    for _ in range(2):  # the same command says so and ends
        assert train(*options, steps=20) == 0
        assert said in capfd.readouterr().err
        assert (folder / "run" / "samples" / f"step_{end:08d}.txt").exists()
        assert saved(folder)[-1] == end
    run = folder / "run"
    own = load_own_code("my.py")
    assert RunFolder(run).finish == Finish(end, "enough", "my.py", own.sha256)
    (run / "config.yaml").unlink()  # as in a run that was restored from a copy
    assert train(*options, steps=20) == 0
    assert saved(folder)[-1] == end
    assert RunFolder(run).end == end
    assert [record["step"] for record in records(run)] == [*range(1, end + 1)]
    assert "eval/val_loss" in records(run)[-1]
    assert open_runs([str(run)])[0].status == "finished"
    whole = (run / "metrics.jsonl").read_text()
    # killed before the last save, or before the last evaluation
    shutil.rmtree(run / "checkpoints" / f"step_{end:08d}")
    assert train(*options, steps=20) == 0
    assert saved(folder)[-1] == end
    assert [*map(without_clock, whole.splitlines())] == [
        *map(without_clock, (run / "metrics.jsonl").read_text().splitlines())
    ]


def without_clock(line: str) -> dict[str, Any]:
    record = json.loads(line)
    return {
        k: v for k, v in record.items() if k != "time" and not k.startswith(("perf/", "launch/"))
    }


def test_a_run_that_is_killed_before_its_end_is_recorded_ends_at_the_same_step(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """after_evaluation is called again, since the evaluation is published after it."""
    (folder / "my.py").write_text(FINISHES["after_evaluation"])

    def killed(run: train_module.Training) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(train_module, "is_finished", killed)
        with contextlib.suppress(KeyboardInterrupt):
            train("--eval.every", "3", "--checkpoint.every", "2", steps=20)
    assert RunFolder(folder / "run").finish is None
    assert train("--eval.every", "3", "--checkpoint.every", "2", steps=20) == 0
    finish = RunFolder(folder / "run").finish
    assert finish is not None
    assert (finish.step, finish.why) == (3, "enough")
    assert [record["step"] for record in records(folder / "run")] == [1, 2, 3]


def test_another_file_decides_anew(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code = folder / "my.py"
    code.write_text(FINISHES["metrics"])
    assert train(steps=8) == 0
    assert saved(folder)[-1] == 5
    code.write_text(RATE)
    assert train("--checkpoint.allow_change", "code", steps=8) == 0
    assert saved(folder)[-1] == 8
    assert "finished by" not in capfd.readouterr().err.splitlines()[-1]


def test_a_sweep_takes_a_run_that_is_finished(
    folder: Path, made_runs: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "my.py").write_text(FINISHES["after_evaluation"])
    sweep = ["sweep", "small.yaml", "--code", "null,my.py", "--out_dir", "swept"]
    sweep += ["--train.max_steps", "6", "--eval.every", "3", "--sample.every", "0"]
    for _ in range(2):
        assert call(*sweep) == 0
    assert made_runs == ["code=null,seed=1337", "code=my.py,seed=1337"]  # each once
    assert "equal tokens took" not in capsys.readouterr().out
    settings = json.loads((folder / "swept/sweep.json").read_text())["settings"]
    assert {setting["name"]: setting["steps"] for setting in settings} == {
        "code=null": [6],
        "code=my.py": [3],
    }
    assert all(setting["losses"]["1337"] < 6 for setting in settings)


def test_evaluated_weights_are_looked_at_in_the_first_step(folder: Path) -> None:
    (folder / "my.py").write_text("def evaluated(model):\n    return {'x': 1}\n")
    assert train() == 2
    assert records(folder / "run") == []


# --------------------------------------------------------------------------- a yardstick

BUMP = "def evaluate(run):\n    return {'eval/bump': BUMP.pop(0)}\nBUMP = [1.0, 3.0, 2.0, 3.0]\n"


def test_the_best_checkpoint_is_that_of_eval_best(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / "my.py").write_text(BUMP)
    best = ("--eval.best", "max eval/bump", "--checkpoint.keep_best", "true")
    assert train(*EVALUATED, *best, "--checkpoint.keep_last", "1", steps=8) == 0
    assert RunFolder(folder / "run").best == "4"
    assert saved(folder) == [4, 8]
    capfd.readouterr()
    (folder / "my.py").write_text(RATE)
    for value, problem in (
        ("eval/bump", "eval.best is eval/bump; expected min eval/bump or max eval/bump"),
        (
            "max eval/bump",
            "eval.best: the evaluation has no metric eval/bump; expected one of eval/",
        ),
        ("min eval/val_los", "has no metric eval/val_los; did you mean eval/val_loss"),
        ("val_loss", "eval.best is 'val_loss'; expected a metric such as eval/val_loss"),
    ):
        assert train("--eval.best", value, "--out_dir", "other") == 2
        (error,) = problems(capfd)
        assert problem in error


def test_another_yardstick_forgets_the_best(folder: Path) -> None:
    (folder / "my.py").write_text(RATE)
    best = ("--checkpoint.keep_best", "true", "--checkpoint.keep_last", "9")
    higher = ("--eval.best", "max eval/val_perplexity")
    assert train(*EVALUATED, *best, *higher, "--train.stop_at", "4", steps=8) == 0
    now = ("--eval.best", "max eval/val_loss")
    assert train(*EVALUATED, *best, *now, steps=8) == 0
    state = read_state(folder / "run/checkpoints/step_00000008")  # before its evaluation
    assert state.best_value == records(folder / "run")[5]["eval/val_loss"]


# --------------------------------------------------------------------------- exports


@pytest.mark.usefixtures("in_this_process")
def test_the_model_of_a_file_is_not_exported(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / "my.py").write_text(GPT + "    return gpt\n")
    assert train() == 0
    assert call("export", "run", "--to", "out") == 2
    assert "run has the model() of my.py" in capfd.readouterr().err.splitlines()[-1]
    assert not (folder / "out").exists()
