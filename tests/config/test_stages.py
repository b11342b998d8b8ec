"""Stages in a config: what they mean, and how each mistake is told."""

from collections.abc import Callable
from pathlib import Path

import pytest

from accel_gpt.commands.resolve import load_config
from accel_gpt.config.data import PrepareConfig
from accel_gpt.config.experiment import Stage
from accel_gpt.config.plan import make_plan
from accel_gpt.config.stages import first_steps, stage_configs
from accel_gpt.config.values import to_yaml
from accel_gpt.prepare.prepare import prepare
from tests.conftest import launch

Arguments = Callable[..., list[str]]
# exit code, words that the message names, stages
MISTAKES = [
    (2, "from in stages is missing", "[{model.block_size: 16}]"),
    (2, "from in stages is 1.5", "[{from: 1.5, model.block_size: 16}]"),
    (2, "from in stages is 1.0", "[{from: 1.0, model.block_size: 16}]"),
    (2, "from in stages is True", "[{from: true, model.block_size: 16}]"),
    (2, "from in stages is -1", "[{from: -1, model.block_size: 16}]"),
    (2, "from in stages is '3'", "[{from: '3', model.block_size: 16}]"),
    (2, "from in stages is nan", "[{from: .nan, model.block_size: 16}]"),
    (
        2,
        "the stage from 4 begins at step 4, but the stage from 6 at step 6",
        "[{from: 6, model.block_size: 16}, {from: 4, model.block_size: 8}]",
    ),
    (
        2,
        "the stage from 6 begins at step 6, but the stage from 0.5 at step 6",
        "[{from: 0.5, model.block_size: 16}, {from: 6, model.block_size: 8}]",
    ),
    (2, "the stage from 0.01 begins at step 0", "[{from: 0.01, model.block_size: 16}]"),
    (2, "optim.lr in stages cannot change while a run trains", "[{from: 6, optim.lr: 1.0}]"),
    (
        2,
        "unknown key train.microbatch_size in stages; did you mean train.micro_batch_size?",
        "[{from: 6, train.microbatch_size: 4}]",
    ),
    (2, "stages set model.block_size to 64", "[{from: 6, model.block_size: 64}]"),
    (
        2,
        "the stage from 6: model.block_size is 12, but must divide the longest, 32",
        "[{from: 6, model.block_size: 12}]",
    ),
    (
        2,
        "the stage from 6: train.tokens_per_step is 240, but must be a multiple of the longest",
        "[{from: 6, model.block_size: 16, train.tokens_per_step: 240}]",
    ),
    (
        2,
        "train.tokens_per_step (320) must be a multiple of 8 sequences x 32 tokens",
        "[{from: 6, train.tokens_per_step: 320}]",
    ),
    (2, "the stage from 12 begins at step 12, but", "[{from: 12, model.block_size: 16}]"),
    (2, "the stage from 99 begins at step 99, but", "[{from: 99, model.block_size: 16}]"),
    (2, "the stage from 0.99 begins at step 12, but", "[{from: 0.99, model.block_size: 16}]"),
    (2, "from 6 in stages sets nothing", "[{from: 6}]"),
    (2, "model.block_size is None", "[{from: 6, model.block_size: null}]"),
    (2, "stages is ", "5"),
    (2, "stages is {", "{from: 6, model.block_size: 16}"),
    (2, "stages is [", "[6]"),
    (2, "nowhere", "[{from: 6, data.train: nowhere}]"),
    (2, "data.train is empty", "[{from: 6, data.train: ''}]"),
    (3, "other_tokenizer", "[{from: 6, data.train: other_tokenizer}]"),
    (3, "the longest shard has 18 tokens", "[{from: 6, data.train: short}]"),
    (2, "train.micro_batch_size is 0", "[{from: 6, train.micro_batch_size: 0}]"),
    (2, "train.micro_batch_size is 'many'", "[{from: 6, train.micro_batch_size: many}]"),
    (2, "model.block_size is 0", "[{from: 6, model.block_size: 0}]"),
    (2, "train.tokens_per_step is -256", "[{from: 6, train.tokens_per_step: -256}]"),
]


@pytest.fixture
def others(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data that a stage cannot read, in the current folder."""
    folder = corpus.parent
    monkeypatch.chdir(folder)
    asked = PrepareConfig(source="text.txt", tokenizer="chars")
    prepare(asked, folder / "other_tokenizer")
    (folder / "short.txt").write_text("the king of a land\n")
    prepare(PrepareConfig(source="short.txt", tokenizer="bytes"), folder / "short")


@pytest.mark.usefixtures("others")
@pytest.mark.parametrize(("code", "named", "stages"), MISTAKES)
def test_a_mistake_is_one_line_that_names_it(
    code: int,
    named: str,
    stages: str,
    small_run: Arguments,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The same in a file and on the command line; nothing is written."""
    config = small_run()[0]
    capsys.readouterr()
    assert launch([config, "--stages", stages]) == code
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert named in line
    with Path(config).open("a") as file:
        file.write(f"stages: {stages}\n")
    assert launch([config]) == code
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert named in line
    assert not [*tmp_path.glob("run/*")]


# --------------------------------------------------------------------------- what they mean


def test_stages_are_the_same_after_a_round_trip(small_run: Arguments, corpus: Path) -> None:
    """Through config.yaml of a run: shares stay shares, and steps stay steps."""
    listed = f"[{{path: {corpus}, weight: 2}}, {{path: {corpus.parent / 'other'}, weight: 0.5}}]"
    stages = (
        f"[{{from: 0, train.micro_batch_size: auto}}, {{from: 1, data.train: {listed}}}, "
        "{from: 0.25, model.block_size: 16, train.tokens_per_step: 512}, "
        f"{{from: 0.5, data: {{train: {corpus}}}, train: {{micro_batch_size: 2}}}}]"
    )
    config = load_config(small_run("--stages", stages), "test")
    assert [(type(stage.from_), stage.from_) for stage in config.stages] == [
        (int, 0), (int, 1), (float, 0.25), (float, 0.5),
    ]  # fmt: skip
    assert config.stages[3] == Stage(0.5, {"data.train": str(corpus), "train.micro_batch_size": 2})
    file = corpus.parent / "config.yaml"
    file.write_text(to_yaml(config))
    again = load_config([str(file)], "test")
    assert again == config
    assert [type(stage.from_) for stage in again.stages] == [int, int, float, float]
    settings = [
        (one.train.micro_batch_size, one.train.tokens_per_step, one.model.block_size)
        for one in stage_configs(again)
    ]
    assert settings == [("auto", 256, 32), ("auto", 256, 32), ("auto", 512, 16), (2, 512, 16)]
    mixed = [isinstance(one.data.train, tuple) for one in stage_configs(again)]
    assert mixed == [False, True, True, False]
    assert first_steps(again, 12) == [0, 1, 3, 6]
    assert first_steps(again, 100) == [0, 1, 25, 50]


def test_a_longer_stage_with_rotary_positions_makes_the_model_longer(
    small_run: Arguments, corpus: Path
) -> None:
    """The length of the config becomes one of the first stage, also if that has settings."""
    llama = ("--model.preset", "llama")
    stages = "[{from: 6, model.block_size: 64, train.micro_batch_size: 4}]"
    config = load_config(small_run(*llama, "--stages", stages), "test")
    assert config.model.block_size == 64
    assert config.stages[0] == Stage(0, {"model.block_size": 32})
    plan = make_plan(config, 1)
    assert [plan.at(step).block_size for step in (0, 5, 6, 11)] == [32, 32, 64, 64]
    assert [plan.at(step).pieces for step in (0, 6)] == [2, 1]
    first = "[{from: 0, train.tokens_per_step: 512}, "
    config = load_config(small_run(*llama, "--stages", stages.replace("[", first)), "test")
    assert config.stages[0] == Stage(0, {"model.block_size": 32, "train.tokens_per_step": 512})
    file = corpus.parent / "config.yaml"
    file.write_text(to_yaml(config))
    assert load_config([str(file)], "test") == config
