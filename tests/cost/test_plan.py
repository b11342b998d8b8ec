"""`accel-gpt plan`: every shipped config, the arithmetic, one sentence for a mistake."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from accel_gpt.cli import dispatch
from accel_gpt.commands.resolve import load_config
from accel_gpt.config.experiment import Config
from accel_gpt.config.model import PRESETS, ModelConfig
from accel_gpt.console import run_main
from accel_gpt.cost.forecast import evaluated_tokens
from accel_gpt.data.shards import open_split
from accel_gpt.data.tokenizer import CharsTokenizer
from accel_gpt.launch.devices import DEVICES
from accel_gpt.model.gpt import GPT
from accel_gpt.model.sizes import flops_per_token, padded_vocab_size, parameter_counts
from tests.conftest import tiny

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
GPT2 = str(next(path for path in CONFIGS if path.stem == "gpt2_124m"))
OPTIONS = {"llama_7b": ("--gpus", "8", "--distribution", "fsdp")}  # from its comments


def plan(capsys: pytest.CaptureFixture[str], *words: Any) -> Any:
    """Return the report as JSON."""
    code = run_main(dispatch, ["plan", *map(str, words), "--json"])
    report = json.loads(capsys.readouterr().out)
    assert code == (report["memory"]["fits"] is False)
    return report


def mistake(capsys: pytest.CaptureFixture[str], *words: Any) -> str:
    """Return the one sentence on stderr."""
    assert run_main(dispatch, ["plan", *map(str, words)]) == 2
    return capsys.readouterr().err


# --------------------------------------------------------------------------- size and FLOPs

SHAPES = {
    "gpt2": tiny(),
    "no bias": tiny(bias=False),
    "untied, grouped": tiny(tie_embeddings=False, n_kv_head=2),
    "rmsnorm with biases": tiny(norm="rmsnorm", mlp="swiglu", mlp_hidden=48),
    "llama grouped, tied": tiny("llama", n_kv_head=1, tie_embeddings=True),
    "qwen3 grouped, wide heads": tiny("qwen3", n_kv_head=2, head_dim=12),
    "fast": tiny("fast"),
}


@pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES.keys())
def test_counts_and_flops_equal_those_of_the_model(config: ModelConfig) -> None:
    model = GPT(config, 65)
    counts = parameter_counts(config, 65)
    padded = [p for name, p in model.named_parameters() if name.startswith(("wte", "head"))]
    assert counts["total"] == model.parameter_count()
    assert counts["total"] - counts["total_unpadded"] == sum(p[65:].numel() for p in padded)
    assert flops_per_token(config, 65) == model.flops_per_token()


@pytest.mark.parametrize(
    ("n_layer", "n_head", "n_embd", "expected"),
    [(12, 12, 768, 124_439_808), (48, 25, 1600, 1_557_611_200)],
)
def test_counts_of_gpt2_are_the_published_ones(
    n_layer: int, n_head: int, n_embd: int, expected: int
) -> None:
    config = ModelConfig(n_layer=n_layer, n_head=n_head, n_embd=n_embd)
    assert parameter_counts(config, 50257)["total_unpadded"] == expected


@pytest.mark.parametrize("preset", PRESETS)
def test_flops_equal_those_that_torch_counts(preset: str) -> None:
    """On the meta device, with a vocabulary that needs no padding."""
    shape = {"n_layer": 2, "n_head": 12, "n_kv_head": 4, "n_embd": 768, "block_size": 1024}
    config = ModelConfig(**{**shape, **PRESETS[preset]})  # type: ignore[arg-type]  # mixed
    vocab_size = padded_vocab_size(50257)
    with torch.device("meta"):
        model = GPT(config, vocab_size)
        tokens = torch.empty(1, config.block_size, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        # per sequence, so that the loss is not computed in chunks, which the counter does not see
        model(tokens, tokens, per_sequence=True).sum().backward()
    counted = counter.get_total_flops() / config.block_size
    assert model.flops_per_token() == pytest.approx(counted, rel=0.02)
    padding = 6 * (vocab_size - 50257) * config.n_embd
    assert model.flops_per_token() - flops_per_token(config, 50257) == padding


# --------------------------------------------------------------------------- the command


@pytest.mark.usefixtures("gpt2_shapes")
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_that_is_shipped(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (str(path), *OPTIONS.get(path.stem, ()))
    report = plan(capsys, *words, "--gpu", "h200", "--train.mixed_precision", "bf16")
    assert report["memory"]["fits"] is True
    assert run_main(dispatch, ["plan", str(path)]) == 0
    text = capsys.readouterr().out
    assert re.search(rf"^  total +{report['parameters']['total']:,}$", text, re.MULTILINE)
    assert re.search("^  fits +null$", text, re.MULTILINE)


def test_the_arithmetic_of_gpt2(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--gpus", 8, "--gpu", "h100", "--price", 2)
    report = plan(capsys, GPT2, *options, "--train.mixed_precision=bf16")
    length, time, disk = report["length"], report["time"], report["disk"]
    assert (length["steps"], length["tokens"]) == (19_074, 19_074 * 524_288)
    rate = 0.4 * 989.5e12 * 8 / length["flops_per_token"]
    assert time["tokens_per_second"] == pytest.approx(rate)
    assert time["mfu"] == pytest.approx(0.4)
    # of val and train, every 250 of 19,074 steps and at the last; forward only
    evaluated = 77 * (10_485_760 + 524_288) / 3
    assert time["hours"] == pytest.approx((length["tokens"] + evaluated) / rate / 3600)
    assert time["cost"] == pytest.approx(time["hours"] * 8 * 2)
    assert disk["data_read_gb"] == 19_074 * 512 * 1025 * 2 / 1e9
    assert disk["checkpoint_gb"] == 12 * report["parameters"]["total"] / 1e9
    assert disk["checkpoints_kept"] == 3


def held(capsys: pytest.CaptureFixture[str], *words: Any, precision: str = "no") -> dict[str, int]:
    """Return the bytes of each part of the memory."""
    asked = (GPT2, "--train.mixed_precision", precision, *words)
    parts: dict[str, float] = plan(capsys, *asked)["memory"]["parts_gb"]
    return {part: round(size * 1e9) for part, size in parts.items()}


def test_each_setting_changes_the_part_that_it_should(capsys: pytest.CaptureFixture[str]) -> None:
    counts = parameter_counts(Config().model, 50257)
    total = counts["total"]
    alone = held(capsys, "--gpu", "h100")
    assert (alone["weights"], alone["optimizer"]) == (4 * total, 8 * total)
    assert alone["gradients"] == 4 * total  # from earlier micro-steps
    assert "gradient buckets of ddp" not in alone
    ddp = held(capsys, "--gpu", "h100", "--gpus", 8)
    assert ddp["gradient buckets of ddp"] == ddp["gradients"] == 4 * total
    # one micro-step: gradients lie in the buckets
    assert "gradients" not in held(capsys, "--gpu", "h100", "--gpus", 16)
    sharded = ("--gpu", "h100", "--gpus", 8, "--distribution", "fsdp")
    fsdp = held(capsys, *sharded)
    assert fsdp["weights"] == fsdp["gradients"] == 4 * total // 8
    two_blocks = 2 * (counts["attention"] + counts["mlp"]) // 12
    assert 4 * two_blocks < fsdp["gathered by fsdp"] < 4 * total
    bf16 = held(capsys, "--gpu", "h100", precision="bf16")
    assert bf16["weights in half precision"] == 2 * total
    assert alone["activations"] / 2 < bf16["activations"] < alone["activations"]
    hidden = 2 * 32 * 1024 * 768  # their gradient is as wide as what the head takes
    assert bf16["logits and loss"] == alone["logits and loss"] - hidden  # chunks of equal size
    blocks = held(capsys, "--gpu", "h100", "--train.activation_checkpointing", "blocks")
    kept = 4 * 32 * 1024 * 768
    assert 12 * kept < blocks["activations"] < 16 * kept < alone["activations"] / 9
    exact = held(capsys, "--train.reproducible", "true", "--train.compile", "false")
    assert exact["exact gradients"] == 8 * total
    assert "gradients" not in exact
    saved = held(capsys, "--checkpoint.async_save", "true")
    assert saved["snapshot of async_save"] == 12 * total


@pytest.mark.parametrize(
    ("words", "fits_with"),
    [
        ("gpt2_350m --gpu t4", 8),
        ("gpt2_1558m --gpu t4", None),
        ("gpt2_124m --gpu t4 --memory_gb 6 --train.mixed_precision no", 2),
    ],
)
def test_a_run_that_does_not_fit_is_told_what_fits(
    words: str, fits_with: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    memory = plan(capsys, *words.split())["memory"]
    assert memory["fits"] is False
    assert memory["largest_micro_batch_size"] == fits_with
    if fits_with is not None:
        setting = ("--train.micro_batch_size", fits_with)
        assert plan(capsys, *words.split(), *setting)["memory"]["fits"] is True


def test_a_run_that_fits_is_told_how_far_it_may_grow(capsys: pytest.CaptureFixture[str]) -> None:
    asked = (GPT2, "--gpu", "h100", "--train.micro_batch_size")
    largest = plan(capsys, *asked, 1)["memory"]["largest_micro_batch_size"]
    assert plan(capsys, *asked, largest)["memory"]["fits"] is True
    assert plan(capsys, *asked, 2 * largest)["memory"]["fits"] is False
    assert plan(capsys, *asked, "auto")["length"]["micro_batch_size"] == largest


def test_a_budget_is_filled_at_the_expected_speed(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"data: {{train: {corpus}}}\ntrain: {{tokens_per_step: 4096}}\n")
    often = ("--eval.every", 1, "--eval.tokens", 1024)
    words = (path, "--model.block_size", 64, *often, "--train.budget", "1m")
    found = plan(capsys, *words, "--gpu", "h100")
    assert 56 < 3600 * found["time"]["hours"] <= 57  # 0.95 of the budget, less than a step
    assert found["length"]["budget"] == "1m"


@pytest.mark.parametrize(("depth", "gpu"), [(4, "rtx 4060"), (12, "rtx 3060"), (32, "h100")])
def test_the_table_of_sizes_holds_what_plan_says_of_each_size(
    depth: int, gpu: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--gpu", gpu, "--gpus", "2", "--price", "3", "--json"]
    assert run_main(dispatch, ["plan", *words]) == 0
    row = next(row for row in json.loads(capsys.readouterr().out) if row["depth"] == depth)
    found = row["gpus"][gpu]
    words = ["fast_124m", "--model.depth", depth, "--train.max_tokens", "null"]
    machine = ["--gpu", gpu, "--gpus", 2, "--price", 3]
    size = ["--train.micro_batch_size", found["micro_batch_size"]]
    alone = plan(capsys, *words, *machine, *size)
    assert alone["memory"]["fits"] is True
    assert alone["time"]["hours"] == found["hours"]
    assert alone["time"]["cost"] == found["cost"]
    assert alone["length"]["tokens"] == row["tokens"]
    assert alone["parameters"]["total_unpadded"] == row["parameters"]
    assert row["text_mb"] == pytest.approx(row["tokens"] / 4 * 4.4 / 1e6)  # four epochs


def test_the_table_of_sizes_fits_into_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main(dispatch, ["plan"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert next(line for line in lines if line.startswith("   32")).split()[-6:-2] == ["-"] * 4
    assert run_main(dispatch, ["plan", "--gpu", "t4", "--memory_gb", "2"]) == 0
    assert capsys.readouterr().out.count(" -\n") == 9  # no size fits into 2 GB
    assert "multiple of" in mistake(capsys, "--gpus", 3)
    assert "--price needs --gpu" in mistake(capsys, "--price", 1)
    assert "needs CONFIG" in mistake(capsys, "--model.depth", 3)
    assert "not in the table of devices" in mistake(capsys, "--gpu", "rtx 9")


# --------------------------------------------------------------------------- data


def test_the_vocabulary_is_that_of_data_tokenizer_or_option(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"data: {{train: {corpus}}}\ntrain: {{max_steps: 9, tokens_per_step: 16384}}\n")
    assert plan(capsys, path)["vocabulary"] == {"tokens": 257, "source": str(corpus)}
    away = ("--data.train", tmp_path / "away")
    assert "away is not prepared; set model.vocab_size" in mistake(capsys, path, *away)
    assert plan(capsys, path, *away, "--model.vocab_size", 99)["vocabulary"]["tokens"] == 99
    assert plan(capsys, path, *away, "--data.tokenizer", "gpt2")["vocabulary"]["tokens"] == 50257
    bpe = ("--data.prepare.source=stdlib", "--data.prepare.tokenizer=bpe")
    assert plan(capsys, path, *away, *bpe)["vocabulary"]["tokens"] == 4096
    CharsTokenizer("abcde").save(tmp_path)
    file = tmp_path / "tokenizer.json"
    assert plan(capsys, path, *away, "--data.tokenizer", file)["vocabulary"]["tokens"] == 5


def test_every_split_that_is_evaluated_counts(corpus: Path, tmp_path: Path) -> None:
    """Each named val set has its own budget."""
    path = tmp_path / "config.yaml"
    path.write_text(f"data: {{train: {corpus}}}\neval: {{every: 4, tokens: 512}}\n")

    def tokens(*words: str) -> int | None:
        return evaluated_tokens(load_config([str(path), *words], "test"))

    train, val = (open_split(corpus, name).tokens for name in ("train", "val"))
    sets = ("--data.val", f"{{web: {corpus}, code: {corpus}}}")
    assert tokens() == 512 + 512
    assert tokens(*sets) == 512 + 2 * 512
    assert tokens("--eval.tokens", "10000") == 10_000 + val
    assert tokens(*sets, "--eval.tokens", "null") == train + 2 * val
    away = ("--data.val", str(tmp_path / "away"))
    assert tokens(*away) == 512 + 512
    added = ("--stages", "[{from: 0.5, data.train: data/added}]")  # followed from the start
    assert tokens(*added) == 512 + 2 * 512
    assert tokens(*added, *sets) == 512 + 2 * 512
    assert tokens(*away, "--eval.tokens", "null") is None


# --------------------------------------------------------------------------- stages

STAGED = """
data: {{train: {data}}}
model: {{n_layer: 2, n_head: 2, n_embd: 64, block_size: 32, position: rope}}
train: {{max_steps: 40, tokens_per_step: 1024, micro_batch_size: 4}}
eval: {{every: 40, tokens: 512}}
stages:
  - {{from: 10, train.tokens_per_step: 4096}}
  - {{from: 0.5, model.block_size: 128, data.train: [{{path: {data}, weight: 3}}, {{path: away}}]}}
"""


@pytest.fixture
def staged(corpus: Path, tmp_path: Path) -> Path:
    path = tmp_path / "staged.yaml"
    path.write_text(STAGED.format(data=corpus))
    return path


def test_each_stage_has_a_part_and_the_run_is_their_sum(
    staged: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = plan(capsys, staged, "--gpu", "h100")
    stages = [*report["stages"].values()]
    assert [stage["first_step"] for stage in stages] == [0, 10, 20]
    assert [stage["steps"] for stage in stages] == [10, 10, 20]
    assert [stage["tokens"] for stage in stages] == [10 * 1024, 10 * 4096, 20 * 4096]
    assert [stage["sequences"] for stage in stages] == [10 * 32, 10 * 128, 20 * 32]
    train = open_split(corpus, "train").tokens
    assert stages[2]["epochs"] == {corpus.name: 20 * 4096 * 3 / 4 / train, "away": None}
    # 12 L H D more FLOPs for each token further
    assert stages[2]["flops_per_token"] == stages[0]["flops_per_token"] + 12 * 2 * 64 * 96
    length = report["length"]
    assert length["tokens"] == sum(stage["tokens"] for stage in stages)
    assert length["flops"] == sum(one["tokens"] * one["flops_per_token"] for one in stages)
    hours = report["time"]["hours"] - report["time"]["evaluation_hours"]
    assert hours == pytest.approx(sum(stage["hours"] for stage in stages))
    assert report["time"]["tokens_per_second"] == pytest.approx(
        length["tokens"] / 3600 / hours, rel=1e-5
    )
    assert report["disk"]["data_read_gb"] == length["tokens"] // 128 * 129 * 2 / 1e9
    assert "stages" not in plan(capsys, staged, "--stages", "[]")


def test_memory_is_that_of_the_most_demanding_stage(
    staged: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = plan(capsys, staged, "--gpu", "h100")
    alone = plan(capsys, staged, "--gpu", "h100", "--stages", "[]", "--model.block_size", "128")
    assert found["memory"]["stage"] == 3
    assert found["memory"]["total_gb"] == pytest.approx(alone["memory"]["total_gb"], rel=1e-2)
    first = "[{from: 0.5, train.micro_batch_size: 1}]"
    assert plan(capsys, staged, "--gpu", "h100", "--stages", first)["memory"]["stage"] == 1
    auto = plan(capsys, staged, "--gpu", "h100", "--train.micro_batch_size", "auto")
    sizes = [stage["micro_batch_size"] for stage in auto["stages"].values()]
    assert sizes == [32, 128, 32]  # each step is one micro-step


def test_a_budget_is_spent_on_all_stages(staged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    budget = ("--train.max_steps", "null", "--train.budget", "10m")
    report = plan(capsys, staged, "--gpu", "t4", *budget)
    steps = sum(stage["hours"] for stage in report["stages"].values())
    assert 0.9 * 600 < 3600 * (steps + report["time"]["evaluation_hours"]) <= 600


# --------------------------------------------------------------------------- all kinds


def compare(capsys: pytest.CaptureFixture[str], *words: Any) -> tuple[int, list[dict[str, Any]]]:
    """Return the exit code and the rows of the table of all kinds."""
    code = run_main(dispatch, ["plan", *map(str, words), "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_each_kind_has_what_its_own_plan_says(capsys: pytest.CaptureFixture[str]) -> None:
    prices = ("--price", "h100=2.5,l40s=0.8,a100-80gb=1.6")
    code, rows = compare(capsys, GPT2, "--gpus", 8, *prices)
    assert code == 0
    kinds = [row["gpu"] for row in rows]
    assert kinds[:4] == ["l40s", "h100", "a100-80gb", "b200"]  # by cost, then by time
    assert {*kinds} == {*DEVICES, "a100-80gb", "v100-32gb", "v100 sxm2-32gb"}
    fits = [row["fits"] for row in rows]
    assert fits == sorted(fits, reverse=True)
    assert not fits[-1]
    for row in (rows[0], rows[3], rows[-1]):
        alone = run_main(
            dispatch, ["plan", GPT2, "--gpus=8", "--gpu", row["gpu"], *prices, "--json"]
        )
        report = json.loads(capsys.readouterr().out)
        assert alone == (not row["fits"])
        found = report["memory"] | report["time"] | report["length"]
        assert row == {"gpu": row["gpu"], **{key: found[key] for key in row if key != "gpu"}}
    assert rows[1]["cost"] == pytest.approx(2.5 * rows[1]["device_hours"])
    assert rows[3]["cost"] is None
    run_main(dispatch, ["plan", GPT2, "--gpus=8", *prices])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:3]] == ["l40s", "h100"]
    assert max(map(len, lines)) <= 80


def test_a_kind_that_does_not_compute_in_the_precision_is_left_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Unless the command gives its price."""
    words = (GPT2, "--gpus", 1, "--train.mixed_precision")
    kinds = [row["gpu"] for row in compare(capsys, *words, "fp8")[1]]
    assert "h100" in kinds
    assert not {"a100", "t4"} & {*kinds}
    rows = compare(capsys, *words, "fp8", "--price", "t4=0.2")[1]
    (row,) = [row for row in rows if row["gpu"] in ("a100", "t4")]
    assert (row["gpu"], row["hours"], row["cost"]) == ("t4", None, None)


def test_if_no_kind_holds_the_run_the_exit_code_is_1(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("llama_7b", "--train.micro_batch_size", 16, "--price", "h100=2")
    code, rows = compare(capsys, *words)
    assert (code, {row["fits"] for row in rows}) == (1, {False})


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--gpus", 8, "--price", 2], "--price needs --gpu"),
        (["--gpus", 8, "--memory_gb", 2], "--memory_gb needs --gpu"),
        (["--gpus", 8, "--price", "h100=2,cheap"], "--price is h100=2,cheap; expected a number"),
        (["--gpu", "h100", "--price", "-1"], "--price is -1; expected a number above 0"),
        (["--gpu", "h100", "--price", "2,5"], "--price is 2,5; expected a number above 0"),
        (["--gpu", "h100", "--price", "=2"], "--price is =2; expected a number above 0"),
        (["--gpu", "h100", "--price", "h10=1"], "--price h10 is not in the table of devices"),
    ],
)
def test_a_price_that_belongs_to_nothing(
    words: list[Any], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert expected in mistake(capsys, GPT2, *words)
