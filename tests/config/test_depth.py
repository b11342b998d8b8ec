"""The depth dial: its rules at the reference, their scaling, and overrides."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from accel_gpt.config.depth import describe_depth, scaling_parameters
from accel_gpt.config.experiment import Config
from accel_gpt.config.model import ModelConfig
from accel_gpt.config.parse import load_config, to_flat, to_yaml
from accel_gpt.config.plan import make_plan
from accel_gpt.cost.flops import parameter_counts
from accel_gpt.errors import UserError
from tests.conftest import tiny

GPT2 = ("--data.prepare.source", "stdlib", "--data.prepare.tokenizer", "gpt2")
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
    assert (model.preset, model.n_layer, model.n_embd, model.n_head) == ("fast", 12, 768, 6)
    assert model.logit_softcap == 15
    assert model.zero_init
    assert config.train.tokens_per_step == 2**19
    assert make_plan(config, 1).max_steps == round(10.5 * 768 * (12 * 12 * 768 + 50257) / 2**19)
    assert (optim.name, optim.muon_lr, optim.lr) == ("muon", 0.025, 0.004)
    assert (optim.embedding_lr, optim.muon_weight_decay) == (0.014, 0.05)
    assert optim.muon_momentum_warmup == make_plan(config, 1).max_steps // 10
    assert make_plan(config, 1).decay_steps == math.ceil(0.65 * make_plan(config, 1).max_steps)
    assert config.schedule.min_lr == pytest.approx(0.05 * 0.004)


def test_depth_24_follows_the_stated_exponents(load: Load) -> None:
    config = load("--model.depth", 24, *GPT2)
    assert (config.model.n_embd, config.model.n_head) == (1536, 12)
    tokens = [d * 64 * (d * 12 * d * 64 + 50257) for d in (12, 24)]  # of each parameter 10.5
    ratio = tokens[1] / tokens[0]
    assert config.train.tokens_per_step == 2**20  # 2^19 x 5.96^0.383 = 2^19.99
    assert 0.95 < ratio**0.383 / 2 < 1.05
    assert config.optim.muon_lr == pytest.approx(0.025 * 2**0.5, rel=1e-3)
    assert config.optim.lr == pytest.approx(0.004 * 2**0.5 / 2**0.5, rel=1e-3)
    assert config.optim.muon_weight_decay == pytest.approx(0.05 * 2**0.5 / ratio, rel=1e-3)


def test_scaling_parameters_are_those_of_blocks_and_head() -> None:
    for config in (tiny("fast"), tiny("llama", n_kv_head=2), tiny("gpt2", bias=False)):
        counts = parameter_counts(config, 64)
        head = 64 * config.n_embd
        wanted = counts["attention"] + counts["mlp"] + head
        assert scaling_parameters(config, 64) == wanted


def test_what_is_set_goes_before_what_follows_and_the_rest_follows_from_it(load: Load) -> None:
    free, batch = load(*GPT2), load(*GPT2, "--train.tokens_per_step", 2**17)
    assert batch.train.tokens_per_step == 2**17
    assert batch.optim.muon_lr == pytest.approx(free.optim.muon_lr / 2)  # type: ignore[operator]
    own = load(
        *GPT2,
        *("--train.max_steps", 77, "--optim.muon_lr", 0.5, "--model.n_embd", 512),
        text="model: {depth: 12, logit_softcap: null}\nschedule: {decay_steps: 7}",
    )
    assert (own.model.n_embd, own.model.n_head, own.model.logit_softcap) == (512, 4, None)
    assert (own.train.max_steps, own.train.max_tokens) == (77, None)
    assert (own.schedule.decay_steps, own.schedule.decay_share) == (7, None)
    assert own.optim.muon_lr == 0.5
    text = "model: {depth: 12}\ntrain: {max_tokens: 1_000_000}"
    assert load(*GPT2, "--train.max_tokens", "null", text=text) == free


@pytest.mark.parametrize("depth", [1, 2, 3, 6, 20, 32])
def test_every_depth_loads_and_plans(load: Load, depth: int) -> None:
    config = load("--model.depth", depth, *GPT2)
    plan = make_plan(config, 1)
    assert config.model.head_size == 128
    assert plan.warmup_steps + plan.decay_steps <= plan.max_steps
    assert plan.tokens_per_step == config.train.tokens_per_step


def test_other_presets_and_optimizers_keep_their_learning_rates(load: Load) -> None:
    llama = load(*GPT2, "--model.preset", "llama", "--optim.name", "adamw")
    assert (llama.model.mlp, llama.model.n_layer, llama.model.n_embd) == ("swiglu", 12, 768)
    assert llama.optim.lr == Config().optim.lr
    assert llama.optim.muon_lr is None


def test_a_resolved_config_reads_back_to_an_equal_one(load: Load) -> None:
    config = load(*GPT2, "--optim.lr", 0.02)
    assert load(text=to_yaml(config)) == config


def test_the_lines_say_what_followed_and_what_was_set(load: Load) -> None:
    assert describe_depth(to_flat(Config())) == []
    lines = describe_depth(to_flat(load(*GPT2, "--model.n_head", 12)))
    assert lines[0] == (
        "depth 12 sets model: n_embd 768, n_layer 12, preset fast; overridden: n_head 12"
    )
    assert "muon_lr 0.025" in lines[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--data.tokenizer", "mine.json"], "tokenizer mine.json is unknown"),
        ([], "but its size is unknown"),
        (["--model.init_from", "gpt2"], "the weights of model.init_from gpt2 set the shape"),
        (["--model.depth", "0"], "model.depth is 0"),
    ],
)
def test_what_the_dial_cannot_do_is_said(load: Load, options: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load(*options)


def test_the_vocabulary_is_that_of_the_prepared_folder(load: Load, corpus: Path) -> None:
    config = load("--data.train", corpus, "--model.depth", 2)
    assert config.train == load("--model.depth", 2, "--model.vocab_size", 257).train
    mixture = f"[{{path: {corpus}, weight: 1}}]"
    mixed = to_flat(load("--data.train", mixture, "--model.depth", 2))
    assert describe_depth(mixed)


def test_a_depth_on_the_command_line_goes_before_the_shape_in_the_file(load: Load) -> None:
    text = "model: {n_layer: 3, n_head: 2, n_embd: 192, vocab_size: 257}\noptim: {lr: 0.5}"
    config = load("--model.depth", 4, "--model.n_head", 1, text=text)
    assert (config.model.n_layer, config.model.n_embd, config.model.n_head) == (4, 256, 1)
    assert config.optim.lr == 0.5
    assert load(text="model: {depth: 4, n_layer: 3, vocab_size: 257}").model.n_layer == 3


def test_without_a_depth_nothing_follows(load: Load) -> None:
    assert load(text="model: {preset: fast}").model.n_embd == ModelConfig().n_embd
