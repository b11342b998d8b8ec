"""The depth dial: its rules at the reference, their scaling, and overrides."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from accel_gpt.commands.resolve import load_config
from accel_gpt.config.experiment import Config
from accel_gpt.config.model import ModelConfig
from accel_gpt.config.optim import OptimConfig
from accel_gpt.config.plan import make_plan
from accel_gpt.model.sizes import parameter_counts
from tests.conftest import tiny

GPT2 = ("--data.prepare.source", "stdlib", "--data.prepare.tokenizer", "gpt2")
# a run of the same batch and length at every size
FIXED = ("--model.vocab_size", 257, "--train.tokens_per_step", 4096, "--train.max_steps", 400)
Load = Callable[..., Config]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Return the config of an empty file with these options."""

    def loaded(*options: Any, text: str = "model: {depth: 12}") -> Config:
        path = tmp_path / "mine.yaml"
        path.write_text(text)
        return load_config([str(path), *map(str, options)], "train.py")

    return loaded


def test_depth_12_is_the_reference(load: Load) -> None:
    config = load(*GPT2)
    model, optim = config.model, config.optim
    assert (model.preset, model.n_layer, model.n_embd, model.n_head) == ("fast", 12, 768, 12)
    assert model.logit_softcap == 15
    assert model.zero_init
    assert model.init_std == ModelConfig().init_std
    assert config.train.tokens_per_step == 2**19
    assert make_plan(config, 1).max_steps == round(10.5 * 768 * (12 * 12 * 768 + 50257) / 2**19)
    assert optim.name == "muon"
    assert optim.muon_momentum_warmup == make_plan(config, 1).max_steps // 10
    assert make_plan(config, 1).decay_steps == math.ceil(0.65 * make_plan(config, 1).max_steps)
    assert config.schedule.min_lr == pytest.approx(0.05 * optim.lr, rel=1e-3)
    published = load(*GPT2, "--train.max_steps", 3250).optim
    assert (published.muon_lr, published.lr) == (0.025, 0.004)
    assert (published.embedding_lr, published.muon_weight_decay) == (0.014, 0.05)


@pytest.mark.parametrize("block_size", [192, 1000, 65_536])
def test_a_step_has_whole_micro_batches(load: Load, block_size: int) -> None:
    shape = ("--model.vocab_size", 257, "--model.depth", 2, "--model.block_size", block_size)
    for more in ((), ("--train.micro_batch_size", 6), ("--train.micro_batch_size", "auto")):
        config = load(*shape, *more)
        assert make_plan(config, 1).tokens_per_step == config.train.tokens_per_step
    assert load(*shape, "--train.micro_batch_size", 6).train.tokens_per_step % 6 == 0


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_rates_follow_from_width_depth_batch_and_length(load: Load, optimizer: str) -> None:
    def optim(*options: object) -> OptimConfig:
        return load("--optim.name", optimizer, *FIXED, *options).optim

    base = optim("--model.depth", 4, "--model.n_embd", 256)
    wide = optim("--model.depth", 4, "--model.n_embd", 512)
    deep = optim("--model.depth", 16, "--model.n_embd", 256)
    batch = optim("--model.depth", 4, "--train.tokens_per_step", 4 * 4096)
    long = optim("--model.depth", 4, "--train.max_steps", 8 * 400)
    factor = optim("--model.depth", 4, "--optim.lr_factor", 2)

    # the embedding is relative to its initial values, which fall with the root of the width
    assert embedding_over_init(load, optimizer, 512) == pytest.approx(
        embedding_over_init(load, optimizer, 256), rel=1e-3
    )
    assert wide.lr == pytest.approx(base.lr / (2 if optimizer == "muon" else 2**0.7), rel=1e-3)
    if optimizer == "adamw":
        assert wide.head_lr == pytest.approx(base.head_lr / 2, rel=1e-3)
    assert wide.muon_lr == base.muon_lr
    assert wide.residual_lr_factor == base.residual_lr_factor
    assert deep.lr == base.lr
    assert deep.residual_lr_factor == pytest.approx(base.residual_lr_factor / 2, rel=1e-3)
    for one, ratio in ((batch, 2 / 4 ** (1 / 3)), (long, 1 / 2), (factor, 2)):
        assert one.lr == pytest.approx(base.lr * ratio, rel=1e-3)
        assert one.embedding_lr == pytest.approx(base.embedding_lr * ratio, rel=1e-3)
        if optimizer == "muon":
            assert one.muon_lr == pytest.approx(base.muon_lr * ratio, rel=1e-3)
        else:
            assert one.head_lr == pytest.approx(base.head_lr * ratio, rel=1e-3)


def embedding_over_init(load: Load, optimizer: str, width: int) -> float:
    """Return the learning rate of the embedding over its initial standard deviation."""
    options = ("--model.depth", 4, "--model.n_embd", width)
    config = load("--optim.name", optimizer, *FIXED, *options)
    assert config.optim.embedding_lr is not None
    return config.optim.embedding_lr / config.model.init_std


def test_weights_are_averaged_over_one_share_of_every_run(load: Load) -> None:
    shares = []
    for options in (("--model.depth", 12), ("--model.depth", 24), ("--train.max_steps", 500)):
        config = load(*options, *GPT2)
        optim = config.optim
        assert optim.muon_lr is not None
        assert optim.muon_weight_decay is not None
        shares.append(optim.muon_lr * optim.muon_weight_decay * make_plan(config, 1).max_steps)
    assert shares == pytest.approx([0.025 * 0.05 * 3250] * 3, rel=1e-3)


def test_scaling_parameters_are_those_of_blocks_and_head() -> None:
    for config in (tiny("fast"), tiny("llama", n_kv_head=2), tiny("gpt2", bias=False)):
        counts = parameter_counts(config, 64)
        head = 64 * config.n_embd
        wanted = counts["attention"] + counts["mlp"] + head
        assert config.matrix_parameters(64) == wanted


def test_what_is_set_goes_before_what_follows_and_the_rest_follows_from_it(load: Load) -> None:
    free, batch = load(*GPT2), load(*GPT2, "--train.tokens_per_step", 2**17)
    assert batch.train.tokens_per_step == 2**17
    assert free.optim.muon_lr is not None
    half = free.optim.muon_lr / 2
    assert batch.optim.muon_lr == pytest.approx(half, rel=1e-3)  # lengths differ by rounding
    own = load(
        *GPT2,
        *("--train.max_steps", 77, "--optim.muon_lr", 0.5, "--model.n_embd", 512),
        text="model: {depth: 12, logit_softcap: null}\nschedule: {decay_share: 0.1}",
    )
    assert (own.model.n_embd, own.model.n_head, own.model.logit_softcap) == (512, 8, None)
    assert (own.train.max_steps, own.train.max_tokens) == (77, None)
    assert own.schedule.decay_share == 0.1
    assert own.optim.muon_lr == 0.5
    text = "model: {depth: 12}\ntrain: {max_tokens: 1_000_000}"
    assert load(*GPT2, "--train.max_tokens", "null", text=text) == free


@pytest.mark.parametrize("depth", [1, 3, 32])
def test_every_depth_loads_and_plans(load: Load, depth: int) -> None:
    config = load("--model.depth", depth, *GPT2)
    plan = make_plan(config, 1)
    assert config.model.head_size == 64
    assert config.model.n_embd == 64 * depth
    assert plan.warmup_steps + plan.decay_steps <= plan.max_steps
    assert plan.tokens_per_step == config.train.tokens_per_step


def test_the_vocabulary_is_that_of_the_prepared_folder(load: Load, corpus: Path) -> None:
    config = load("--data.train", corpus, "--model.depth", 2)
    assert config.train == load("--model.depth", 2, "--model.vocab_size", 257).train
    mixture = f"[{{path: {corpus}, weight: 1}}]"
    assert load("--data.train", mixture, "--model.depth", 2).train == config.train
