"""A model of a file of --code: its weights, buffers and random numbers, on any processes."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from accel_gpt.commands.resolve import load_config
from accel_gpt.config.experiment import SampleConfig
from accel_gpt.data.order import derive_seed
from accel_gpt.evals.samples import write_text
from accel_gpt.model.make import OwnModel
from accel_gpt.own_code import load_own_code
from accel_gpt.transformers_io.load import load_pretrained
from tests.conftest import QUIET, launch, tiny
from tests.test_matrix import work
from tests.test_train import assert_same_weights, records

Arguments = Callable[..., list[str]]
# tied weights, dropout, a buffer in checkpoints and one that is not, blocks that FSDP shards,
# a loss with a part
NET = """
import torch
from torch import nn
from torch.nn import functional as F


class Layer(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.inner = nn.Linear(channels, channels)
        self.dropout = nn.Dropout(0.2)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("decay", 0.5 ** torch.arange(channels), persistent=False)

    def forward(self, x):
        if self.training:
            self.seen += 1
        before = torch.cumsum(x, dim=1) / torch.arange(1, 1 + x.shape[1])[:, None]
        return x + self.dropout(torch.tanh(self.inner(before * self.decay)))


class Net(nn.Module):
    def __init__(self, vocab_size, channels):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, channels)
        self.layers = nn.ModuleList(Layer(channels) for _ in range(2))
        self.head = nn.Linear(channels, vocab_size, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def model(config, vocab_size):
    return Net(vocab_size, config.model.n_embd)


def loss(model, tokens, targets, documents):
    logits = model(tokens)[..., : model.vocab_size]
    entropy = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    z_loss = 1e-3 * logits.logsumexp(-1).square().mean()
    return entropy + z_loss, {"z_loss": z_loss, "first_token": tokens[:, 0].float().mean()}
"""
LION = """

class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99)})

    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["updates"] = state.get("updates", 0) + 1
                mean = state.setdefault("mean", torch.zeros_like(p))
                first, second = group["betas"]
                p -= group["lr"] * torch.sign(first * mean + (1 - first) * p.grad)
                mean.mul_(second).add_((1 - second) * p.grad)


def optimizer(model, config):
    return Lion(model.parameters(), 1e-3)
"""
LARGER = """
from dataclasses import replace
from accel_gpt.model.gpt import GPT


class Larger(GPT):
    pass


def model(config, vocab_size):
    shape = replace(config.model, n_layer=2 * config.model.n_layer)
    return Larger(shape, vocab_size, init=False)
"""
DECAY = """

def metrics(run):
    return {"own/decay": run.gpt.inner.layers[0].decay[0]}
"""
OPTIONS = (*QUIET, "--optim.name", "adamw", "--model.extra.x", "1")


def write(folder: Path, source: str = NET) -> str:
    """Write a file of --code; return its path."""
    path = folder / "net.py"
    path.write_text(source)
    return str(path)


def tensors(run: Path, step: int) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint's model."""
    return load_file(run / "checkpoints" / f"step_{step:08d}" / "model.safetensors")


def test_dropout_buffers_and_tied_weights_survive_a_resume(
    small_run: Arguments, tmp_path: Path
) -> None:
    """No checkpoint holds a buffer that is not persistent, and the seed draws it again."""
    code = write(tmp_path, NET.replace("0.5 ** torch.arange", "torch.randn") + DECAY)
    options = (*OPTIONS, "--train.max_steps", "4", "--eval.every", "2", "--code", code)
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    assert launch(small_run(*options, "--out_dir", str(whole))) == 0
    assert launch(small_run(*options, "--out_dir", str(parted), "--train.stop_at", "2")) == 0
    assert launch(small_run(*options, "--out_dir", str(parted))) == 0
    assert records(whole) == records(parted)
    first, second = tensors(whole, 4), tensors(parted, 4)
    assert_same_weights(first, second)
    assert first["inner.layers.0.seen"] == 4
    assert "inner.layers.0.decay" not in first
    assert ("inner.head.weight" in first) + ("inner.embedding.weight" in first) == 1
    model, tokenizer = load_pretrained(str(parted), own=load_own_code(code))
    assert model.inner.layers[0].decay[0].item() == records(whole)[-1]["own/decay"]
    config = SampleConfig(num=1, max_new_tokens=40)
    text = write_text(model, tokenizer, "the", config, torch.Generator())
    assert len(text[0]) > 20


@pytest.mark.slow
def test_the_first_weights_depend_on_the_seed_alone(small_run: Arguments, tmp_path: Path) -> None:
    """They are those of the constructor after seeding, whatever drew before."""
    source = f"{NET}\ntorch.rand(7)\n"
    options = (*OPTIONS, "--code", write(tmp_path, source), "--optim.lr", "1e-12")
    for seed in (1, 2):
        own = small_run(*options, "--seed", str(seed), "--out_dir", str(tmp_path / str(seed)))
        assert launch([*own, "--train.max_steps", "3", "--schedule.min_lr", "0"]) == 0
        config = load_config([*own, "--train.max_steps", "3"], "test")
        torch.manual_seed(seed)
        assert config.own.model is not None
        drawn = config.own.model(config=config, vocab_size=257)
        found = tensors(tmp_path / str(seed), 3)
        weight = found["inner.layers.0.inner.weight"]
        torch.testing.assert_close(weight, drawn.layers[0].inner.weight, atol=1e-9, rtol=0)


def test_attributes_of_an_own_module_are_read_through_the_model() -> None:
    module = nn.Linear(4, 4)
    model = OwnModel(module, "my.py: model()", tiny(), 4)
    assert model.in_features == 4
    with pytest.raises(AttributeError, match="'Linear' object has no attribute 'nothing'"):
        _ = model.nothing


def test_a_part_of_the_loss_is_a_mean_over_micro_batches(
    small_run: Arguments, tmp_path: Path
) -> None:
    code = write(tmp_path)
    for size in ("8", "2"):
        own = small_run(*OPTIONS, "--code", code, "--out_dir", str(tmp_path / size))
        assert launch([*own, "--train.micro_batch_size", size, "--train.max_steps", "3"]) == 0
    for one, four in zip(records(tmp_path / "8"), records(tmp_path / "2"), strict=True):
        assert one["train/first_token"] == four["train/first_token"]
        assert 0 < one["train/z_loss"] < one["train/loss"]


def test_a_changed_gpt_keeps_muon_flops_and_its_cache(small_run: Arguments, tmp_path: Path) -> None:
    code = write(tmp_path, LARGER)
    run = tmp_path / "run"
    options = (*QUIET, "--train.max_steps", "4", "--optim.name", "muon", "--code", code)
    assert launch(small_run(*options)) == 0
    four = tmp_path / "four"
    assert launch(small_run(*options[:-2], "--model.n_layer", "4", "--out_dir", str(four))) == 0
    assert records(run) == records(four)
    models = [
        json.loads((one / "run.json").read_text())["launches"][0]["model"] for one in (run, four)
    ]
    assert models[0] == models[1]
    # opened again, it is as large as it was
    model, tokenizer = load_pretrained(str(run), own=load_own_code(code))
    assert type(model).__name__ == "Larger"
    assert model.make_cache(8) is not None
    plain = load_pretrained(str(four))[0]
    config = SampleConfig(num=1, max_new_tokens=20)
    texts = [
        write_text(one, tokenizer, "the", config, torch.Generator().manual_seed(derive_seed(1)))
        for one in (model, plain)
    ]
    assert texts[0] == texts[1]


# --------------------------------------------------------------------------- several processes

SEEN = """

def metrics(run):
    norm = run.gpt.inner.embedding.weight.norm()  # FSDP shards it
    return {"own/seen": float(run.gpt.inner.layers[0].seen), "own/norm": norm}
"""


@pytest.mark.slow
def test_two_processes_train_bit_for_bit_as_one(small_run: Arguments, tmp_path: Path) -> None:
    """With dropout, an own optimizer and train.reproducible; stopped on two, resumed on one."""
    code = write(tmp_path, (NET + LION).replace("self.seen += 1", "pass"))
    options = (*OPTIONS, "--code", code, "--train.reproducible", "true", "--train.max_steps", "5")
    options += (
        "--model.dropout",
        "0",
        "--train.micro_batch_size",
        "2",
        "--eval.every",
        "3",
        "--checkpoint.keep_last",
        "9",
    )
    whole, parted = (
        small_run(*options, "--out_dir", str(tmp_path / part)) for part in ("whole", "parted")
    )
    work("ddp", 2, [["parted", parted, 3, None]], tmp_path)
    work("one", 1, [["whole", whole, 0, None], ["parted", parted, 0, None]], tmp_path)
    assert_same_weights(tensors(tmp_path / "whole", 5), tensors(tmp_path / "parted", 5))
    for one, two in zip(records(tmp_path / "whole"), records(tmp_path / "parted"), strict=True):
        for name, value in one.items():
            if name in ("train/z_loss", "train/first_token"):  # a mean of means
                assert two[name] == pytest.approx(value, rel=1e-6)
            else:
                assert two[name] == value, name


@pytest.mark.slow
def test_a_sharded_own_run_continues_on_one_process_and_back(
    small_run: Arguments, tmp_path: Path
) -> None:
    code = write(tmp_path, (NET + LION + SEEN).replace("Dropout(0.2)", "Dropout(0.0)"))
    options = (*OPTIONS, "--code", code, "--train.max_steps", "6", "--checkpoint.keep_last", "9")
    names = ("whole", "to_one", "to_two", "bf16")
    run = {name: small_run(*options, "--out_dir", str(tmp_path / name)) for name in names}
    two = ("--train.micro_batch_size", "4", "--train.mixed_precision", "no")
    bf16 = (*two[:2], "--train.mixed_precision", "bf16")
    work("one", 1, [["whole", run["whole"], 0, None], ["to_two", run["to_two"], 3, None]], tmp_path)
    work(
        "fsdp2",
        2,
        [
            ["to_one", [*run["to_one"], *two], 3, None],
            ["to_two", [*run["to_two"], *two], 0, None],
            ["bf16", [*run["bf16"], *bf16], 0, None],
        ],
        tmp_path,
    )
    work("one", 1, [["to_one", run["to_one"], 0, None]], tmp_path)
    shards = (tmp_path / "to_one" / "checkpoints" / "step_00000003").glob("weights_*.safetensors")
    held = [name for file in shards for name in load_file(file)]
    assert "inner.layers.0.seen" in held
    assert "inner.layers.0.decay" not in held
    assert not {"inner.embedding.weight", "inner.head.weight"} <= set(held)  # tied: held once
    whole = records(tmp_path / "whole")
    for one, other in zip(whole, records(tmp_path / "bf16"), strict=True):
        assert other["train/loss"] == pytest.approx(one["train/loss"], abs=0.05)
    for name in ("to_one", "to_two"):
        for one, other in zip(whole, records(tmp_path / name), strict=True):
            assert other["train/loss"] == pytest.approx(one["train/loss"], abs=1e-5)
            assert other["train/z_loss"] == pytest.approx(one["train/z_loss"], abs=1e-6)
            assert other["train/first_token"] == pytest.approx(one["train/first_token"])
            assert other["own/seen"] == one["own/seen"] == one["step"]
            assert other["own/norm"] == pytest.approx(one["own/norm"], rel=1e-4)


@pytest.mark.slow
def test_ranks_with_other_parts_of_the_loss_end_with_one_sentence(
    small_run: Arguments, tmp_path: Path
) -> None:
    """They would wait for each other in the sum of the parts."""
    own = NET.replace('{"z_loss": z_loss, ', '{"z_loss" + "s" * int(os.environ["RANK"]): z_loss, ')
    code = write(tmp_path, f"import os\n{own}")
    run = small_run(*OPTIONS, "--code", code, "--train.micro_batch_size", "4")
    with pytest.raises(AssertionError, match="return the same names in each micro-batch"):
        work("ddp", 2, [["run", run, 0, None]], tmp_path)


@pytest.mark.slow
def test_a_weight_that_no_loss_uses_is_one_sentence_on_two_processes(
    small_run: Arguments, tmp_path: Path
) -> None:
    own = NET.replace("self.layers =", "self.spare = nn.Linear(3, 3)\n        self.layers =")
    run = small_run(*OPTIONS, "--code", write(tmp_path, own), "--train.micro_batch_size", "4")
    with pytest.raises(AssertionError, match="error: a step did not use all parameters of the mod"):
        work("ddp", 2, [["run", run, 0, None]], tmp_path)
