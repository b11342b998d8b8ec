"""`--code FILE`: what is wrong in the file is one sentence with its place, and costs no step."""

import textwrap
from pathlib import Path

import pytest

from tests.conftest import QUIET, launch, small_config

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
NET_LINES = NET.count("\n")
MODEL = f"{NET}def model(config, vocab_size):\n    return Net(vocab_size)\n"
ADAMW = ("--optim.name", "adamw")
BYTES = ("--data.tokenizer", "bytes")
EVALUATED = ("--eval.every", "2")
LOSS = "def loss(model, tokens, targets, documents):\n"
SGD = "import torch\ndef optimizer(model, config):\n    return torch.optim.SGD("
SHARDS = "import numpy as np\ndef shards(folder, split):\n"


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


OF_NET = f"my.py, line {NET_LINES + 4}: model()"

# what is wrong: the file, options, and what the error says
BAD: dict[str, tuple[str, tuple[str, ...], str]] = {
    # ----------------------------------------------------------------- the file
    "a missing module": ("import nothing_here\n", (), "my.py, line 1: ModuleNotFoundError: No mod"),
    "a syntax error": ("def lr(step, config, plan)\n", (), "my.py, line 1: expected ':'"),
    "an error at import": ("x = 1\nraise ValueError('no')\n", (), "my.py, line 2: ValueError: no"),
    "no function": ("x = 1\n", (), "--code my.py defines none of the functions model, optimizer,"),
    "only a misspelled one": (
        "def optimiser(model, config):\n    pass\n",
        (),
        "nothing calls optimiser(); did you mean optimizer?",
    ),
    "other arguments": (
        "def lr(step):\n    return 1.0\n",
        (),
        "my.py, line 1: lr() is called as lr(step, config, plan), but takes (step); give it these",
    ),
    "a number": ("lr = 3\n", (), "--code my.py: lr is no function; define lr(step, config, plan)"),
    # ----------------------------------------------------------------- model
    "logits of another shape": (
        net("return super().forward(tokens)[:, 1:]"),
        ADAMW,
        f"{OF_NET} returns (8, 31, 257), but must return the logits (8, 32, 257)",
    ),
    "logits in a tuple": (
        net("return super().forward(tokens), None"),
        ADAMW,
        f"the module of {OF_NET} returns tuple, but must return the logits (8, 32, 257)",
    ),
    "logits of whole numbers": (
        net("return super().forward(tokens).long()"),
        ADAMW,
        f"the module of {OF_NET} returns torch.int64, but logits are floating-point numbers",
    ),
    "logits without a gradient": (
        net("return super().forward(tokens).detach()"),
        ADAMW,
        f"the logits of the module of {OF_NET} have no gradient",
    ),
    "no module": (
        function("model", "config, vocab_size", "return 3"),
        ADAMW,
        "my.py, line 1: model() returned int; return a torch.nn.Module with parameters",
    ),
    "a module without weights": (
        "from torch import nn\n" + function("model", "config, vocab_size", "return nn.Identity()"),
        ADAMW,
        "my.py, line 2: model() returned Identity; return a torch.nn.Module with parameters",
    ),
    "only frozen weights": (
        MODEL.replace("Net(vocab_size)\n", "Net(vocab_size).requires_grad_(False)\n"),
        ADAMW,
        "model() returned a module without trainable parameters",
    ),
    "a GPT of another vocabulary": (
        "from accel_gpt.model.gpt import GPT\n"
        + function("model", "config, vocab_size", "return GPT(config.model, 300, init=False)"),
        (),
        "my.py, line 2: model() returned a GPT of 300 tokens; give it vocab_size, 257",
    ),
    "a GPT with a shorter context": (
        "from dataclasses import replace\nfrom accel_gpt.model.gpt import GPT\n"
        "def model(config, vocab_size):\n"
        "    return GPT(replace(config.model, block_size=16), vocab_size, init=False)\n",
        (),
        "my.py, line 3: model() returned a GPT with a block_size of 16, but model.block_size is 32",
    ),
    "a wrong value for our classes": (
        "from dataclasses import replace\n"
        + function("model", "config, vocab_size", "return replace(config.model, n_head=3)"),
        (),
        "my.py, line 3, in model: model.n_embd (32) must be divisible by model.n_head (3)",
    ),
    "documents for a model of tokens": (
        MODEL,
        (*ADAMW, "--data.document_mask", "true"),
        f"the module of my.py, line {NET_LINES + 1}: model() takes the tokens alone; give its "
        "forward a second argument, documents, or set data.document_mask to false",
    ),
    "checkpointing of a model without blocks": (
        MODEL,
        (*ADAMW, "--train.activation_checkpointing", "blocks"),
        "train.activation_checkpointing is blocks, but my.py, line",
    ),
    "a push of an own model": (
        MODEL,
        (*ADAMW, "--hub.push", "end", "--hub.repo_id", "me/mine"),
        "hub.push is end, but the model() of my.py cannot be exported; set hub.push to never",
    ),
    "Muon without matrices": (
        MODEL,
        ("--optim.name", "muon"),
        "no layer of the model has the attribute muon_rows",
    ),
    # ----------------------------------------------------------------- loss
    "a loss of two numbers": (
        f"{LOSS}    return model(tokens, targets).repeat(2)\n",
        (),
        "my.py, line 1: loss(): the loss must be a tensor without dimensions, but is (2,); take a",
    ),
    "a loss that is no tensor": (
        f"{LOSS}    return model(tokens, targets).item()\n",
        (),
        "my.py, line 1: loss() returned float; return the loss, a tensor without dimensions, or",
    ),
    "a loss without a gradient": (
        f"{LOSS}    return model(tokens, targets).detach()\n",
        (),
        "my.py, line 1: loss() returned a loss without a gradient; compute it from model(tokens)",
    ),
    "a complex loss": (
        f"{LOSS}    return model(tokens, targets) * 1j\n",
        (),
        "my.py, line 1: loss(): the loss is a complex number",
    ),
    "something else beside the loss": (
        f"{LOSS}    return model(tokens, targets), 3\n",
        (),
        "my.py, line 1: loss() returned int beside the loss; return the loss, or (loss, {name:",
    ),
    "a part that is no tensor": (
        f"{LOSS}    return model(tokens, targets), {{'z': 1.5}}\n",
        (),
        "my.py, line 1: loss(): 'z' must be a tensor without dimensions, but is float",
    ),
    "a part with a number for a name": (
        f"{LOSS}    a = model(tokens, targets)\n    return a, {{3: a}}\n",
        (),
        "my.py, line 1: loss() named a part of the loss 3; use a text",
    ),
    # ----------------------------------------------------------------- optimizer
    "no optimizer": (
        function("optimizer", "model, config", "pass"),
        (),
        "my.py, line 1: optimizer() returned NoneType; return a torch.optim.Optimizer, whose",
    ),
    "an optimizer that lacks parameters": (
        f"{SGD}[p for p in model.parameters() if p.ndim > 1], lr=0.1)\n",
        (),
        "the optimizer of my.py, line 2: optimizer() lacks blocks.0.norm_1.weight, which would",
    ),
    "an optimizer of other parameters": (
        f"{SGD}[*model.parameters(), torch.nn.Parameter(torch.ones(3))], lr=0.1)\n",
        (),
        "the optimizer of my.py, line 2: optimizer() holds 1 parameter that the model lacks",
    ),
    "an optimizer without a rate": (
        "import torch\nclass Own(torch.optim.Optimizer):\n    def step(self):\n        pass\n"
        "def optimizer(model, config):\n    return Own(model.parameters(), {})\n",
        (),
        "the optimizer of my.py, line 5: optimizer() has a group without lr",
    ),
    "an optimizer that needs a closure": (
        "import torch\ndef optimizer(model, config):\n"
        "    return torch.optim.LBFGS(model.parameters())\n",
        (),
        "the step() of LBFGS, the optimizer of my.py, line 2: optimizer(), needs arguments",
    ),
    "an optimizer that keeps an object": (
        step("self.state[self.param_groups[0]['params'][0]]['x'] = object()"),
        (),
        "the optimizer of my.py, line 5: optimizer() keeps a object in its state or its groups",
    ),
    "an optimizer whose state cannot be read": (
        "import torch\nclass Own(torch.optim.SGD):\n    def state_dict(self):\n"
        "        raise NotImplementedError\ndef optimizer(model, config):\n"
        "    return Own(model.parameters(), lr=0.1)\n",
        (),
        "my.py, line 4, in Own.state_dict: NotImplementedError: NotImplementedError",
    ),
    # ----------------------------------------------------------------- lr
    "a rate that is NaN": (
        function("lr", "step, config, plan", "return float('nan')"),
        (),
        "my.py, line 1: lr() returned nan after 0 steps; return the share of the peak as a number",
    ),
    "no rate": (
        function("lr", "step, config, plan", "pass"),
        (),
        "my.py, line 1: lr() returned None after 0 steps",
    ),
    "a rate that is a tensor": (
        "import torch\n" + function("lr", "step, config, plan", "return torch.tensor(0.5)"),
        (),
        "my.py, line 2: lr() returned tensor(0.5000) after 0 steps",
    ),
    "a negative rate": (
        function("lr", "step, config, plan", "return -0.5"),
        (),
        "my.py, line 1: lr() returned -0.5 after 0 steps",
    ),
    # ----------------------------------------------------------------- shards
    "shards that are a number": (
        f"{SHARDS}    return 3\n",
        BYTES,
        "my.py, line 2: shards() returned int for the train split; return a list of arrays of tok",
    ),
    "shards of floats": (
        f"{SHARDS}    return [np.ones(5000)]\n",
        BYTES,
        "my.py, line 2: shards() returned for the train split, as array 0, float64 of shape",
    ),
    "shards of two dimensions": (
        f"{SHARDS}    return [np.ones((50, 100), int)]\n",
        BYTES,
        "as array 0, int64 of shape (50, 100); return one-dimensional arrays of token ids",
    ),
    "shards of unequal lists": (
        f"{SHARDS}    return [[1, 2, [3, 4]]]\n",
        BYTES,
        "my.py, line 2: shards() returned for the train split, as array 0, a list of lists",
    ),
    "no shards for val": (
        f"{SHARDS}    return [np.arange(5000) % 200] if split == 'train' else []\n",
        BYTES,
        "my.py, line 2: shards() returned no tokens for the val split of",
    ),
    "negative ids": (
        f"{SHARDS}    return [np.arange(5000) % 200 - 100]\n",
        BYTES,
        "array 0 of my.py, line 2: shards() holds token -100; return ids of 0 and more",
    ),
    "negative ids of two types": (
        f"{SHARDS}    return [np.arange(5000) % 200 - 100, np.ones(9, np.uint64)]\n",
        BYTES,
        "array 0 of my.py, line 2: shards() holds token -100; return ids of 0 and more",
    ),
    "ids beyond the vocabulary": (
        f"{SHARDS}    return [np.arange(5000) % 400]\n",
        BYTES,
        "array 0 of my.py, line 2: shards() holds token 257 at index",
    ),
}
# errors of a completed step: what is wrong, as above, with the step that must be saved
AFTER_A_STEP: dict[str, tuple[str, tuple[str, ...], str, int]] = {
    "a part with the name of a metric": (
        f"{LOSS}    a = model(tokens, targets)\n    return a, {{'loss': a}}\n",
        (),
        "my.py, line 1: loss() returned 'train/loss', the name of another metric; choose another",
        1,
    ),
    "a part that is sometimes missing": (
        f"calls = []\n{LOSS}    a = model(tokens, targets)\n    calls.append(a)\n"
        "    return a, {'z': a} if len(calls) % 2 else {'z': a, 'y': a}\n",
        ("--train.micro_batch_size", "4"),
        "my.py, line 2: loss() returned the part ['y'] for some micro-batches only",
        1,
    ),
    "metrics that are no dictionary": (
        function("metrics", "run", "pass"),
        (),
        "my.py, line 1: metrics() returned NoneType; return {name: number}",
        1,
    ),
    "metrics that are texts": (
        function("metrics", "run", "return {'a': 'b'}"),
        (),
        "my.py, line 1: metrics() returned a as 'b'; return a number",
        1,
    ),
    "metrics with a number for a name": (
        function("metrics", "run", "return {1: 2}"),
        (),
        "my.py, line 1: metrics() returned the metric 1; its name must be a text",
        1,
    ),
    "metrics with our name": (
        function("metrics", "run", "return {'train/loss': 1}"),
        (),
        "my.py, line 1: metrics() returned 'train/loss', the name of another metric",
        1,
    ),
    "metrics with the name of a part": (
        f"{LOSS}    a = model(tokens, targets)\n    return a, {{'z': a}}\n"
        + function("metrics", "run", "return {'train/z': 1}"),
        (),
        "my.py, line 4: metrics() returned 'train/z', the name of another metric",
        1,
    ),
    "an evaluation that is no dictionary": (
        function("evaluate", "run", "return 'good'"),
        EVALUATED,
        "my.py, line 1: evaluate() returned str; return {name: number}",
        2,
    ),
    "an evaluation with our name": (
        function("evaluate", "run", "return {'eval/val_loss': 1}"),
        EVALUATED,
        "my.py, line 1: evaluate() returned 'eval/val_loss', the name of another metric",
        2,
    ),
    "an error in metrics": (
        function("metrics", "run", "raise KeyError('gone')"),
        (),
        "my.py, line 2, in metrics: KeyError: 'gone'",
        1,
    ),
    "an error in evaluate": (
        function("evaluate", "run", "raise KeyError('gone')"),
        EVALUATED,
        "my.py, line 2, in evaluate: KeyError: 'gone'",
        2,
    ),
    "an error in after_evaluation": (
        function("after_evaluation", "run, record", "raise KeyError('gone')"),
        EVALUATED,
        "my.py, line 2, in after_evaluation: KeyError: 'gone'",
        2,
    ),
}
# functions that a step calls: a run that has checkpoints keeps them
RAISES = {
    "model": function("model", "config, vocab_size", "raise KeyError('gone')"),
    "optimizer": function("optimizer", "model, config", "raise KeyError('gone')"),
    "lr": function("lr", "step, config, plan", "raise KeyError('gone')"),
    "loss": function("loss", "model, tokens, targets, documents", "raise KeyError('gone')"),
    "shards": function("shards", "folder, split", "raise KeyError('gone')"),
    "Own.forward": net("raise KeyError('gone')"),
    "Backward.backward": NET
    + textwrap.dedent(
        """
        class Backward(torch.autograd.Function):
            @staticmethod
            def forward(ctx, logits):
                return logits.clone()

            @staticmethod
            def backward(ctx, gradient):
                raise KeyError('gone')

        class Own(Net):
            def forward(self, tokens):
                return Backward.apply(super().forward(tokens))

        def model(config, vocab_size):
            return Own(vocab_size)
        """
    ),
    "Own.step": step("raise KeyError('gone')"),
}


@pytest.fixture
def folder(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a folder with a corpus and small.yaml the current one."""
    small_config(corpus.parent)
    monkeypatch.chdir(corpus.parent)
    return corpus.parent


def train(*options: str, steps: int = 3) -> int:
    """Train a few steps quietly with my.py; return the exit code."""
    words = ["small.yaml", *QUIET, "--log.level", "warning", "--checkpoint.every", "0"]
    return launch([*words, "--train.max_steps", str(steps), "--code", "my.py", *options])


def saved(folder: Path) -> list[int]:
    """Return the steps of the checkpoints."""
    return sorted(int(path.name[5:]) for path in folder.glob("run/checkpoints/step_*"))


@pytest.mark.parametrize("what", BAD)
def test_a_mistake_is_one_sentence_with_its_place(
    what: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source, options, expected = BAD[what]
    (folder / "my.py").write_text(source)
    code = train(*options)
    error = capfd.readouterr().err
    assert expected in error
    assert error.count("\n") == 1
    assert error.startswith("error: ")
    assert f"{folder}/my.py" not in error  # the path as given
    assert code == (3 if "ids" in what else 2)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"\x89PNG\r\n\x1a\n\x00", "--code my.py holds zero bytes, so it is no Python file"),
        ("# caf\xe9\n".encode("latin-1"), "--code my.py is no UTF-8 text; save it as UTF-8: inv"),
        (
            b"# x\n\n\n# caf\xe9\n",
            "--code my.py is no UTF-8 text; save it as UTF-8: 'utf-8' codec c",
        ),
    ],
)
def test_a_file_that_is_no_text_is_refused(
    content: bytes, expected: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / "my.py").write_bytes(content)
    assert train() == 2
    assert capfd.readouterr().err.startswith(f"error: {expected}")


@pytest.mark.parametrize("what", AFTER_A_STEP)
def test_a_mistake_after_a_step_loses_nothing(
    what: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source, options, expected, step_saved = AFTER_A_STEP[what]
    (folder / "my.py").write_text(source)
    assert train(*options) == 2
    error = capfd.readouterr().err
    assert error.startswith(f"error: {expected}")
    assert error.count("\n") == 1
    assert saved(folder) == [step_saved]


def test_an_error_inside_each_function_is_named_and_keeps_the_checkpoints(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    good = folder / "my.py"
    good.write_text(function("lr", "step, config, plan", "return 1.0"))
    assert train() == 0
    before = {path: path.read_bytes() for path in folder.rglob("run/checkpoints/**/*.*")}
    # the same run from here on, with a file that fails
    allow = ("--checkpoint.allow_change", "code", "--checkpoint.allow_change", "train.max_steps")
    for where in ("lr", "loss", "optimizer", "model"):
        source = RAISES[where]
        good.write_text(source)
        assert train(*allow, steps=6) == 2, where
        error = capfd.readouterr().err.splitlines()[-1]
        line = 1 + source.splitlines().index(next(s for s in source.splitlines() if "gone" in s))
        assert error == f"error: my.py, line {line}, in {where}: KeyError: 'gone'"
        assert {p: p.read_bytes() for p in folder.rglob("run/checkpoints/**/*.*")} == before


@pytest.mark.parametrize("where", ["shards", "Own.forward", "Backward.backward", "Own.step"])
def test_an_error_inside_the_file_names_its_line(
    where: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source = RAISES[where]
    (folder / "my.py").write_text(source)
    assert train(*ADAMW) == 2
    line = 1 + source.splitlines().index(next(s for s in source.splitlines() if "gone" in s))
    error = capfd.readouterr().err
    assert error == f"error: my.py, line {line}, in {where}: KeyError: 'gone'\n"


def test_a_misspelled_function_is_a_warning(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rate = function("lr", "step, config, plan", "return 1.0")
    (folder / "my.py").write_text(rate + function("evaluat", "run", "return {}"))
    assert train(steps=3) == 0
    assert capfd.readouterr().err == (
        "WARNING: my.py: nothing calls evaluat(); did you mean evaluate? Name a helper _evaluat\n"
    )
