"""YAML and command line: precedence, conversion, and the sentences that users read."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest

from accel_gpt.commands.options import (
    COMMANDS,
    BenchCommand,
    EvaluateCommand,
    PrepareCommand,
    ReportCommand,
    VerifyResumeCommand,
)
from accel_gpt.commands.resolve import load_config
from accel_gpt.commands.sweep_settings import read_grid
from accel_gpt.config.data import Weighted
from accel_gpt.config.experiment import Config
from accel_gpt.config.options import all_options
from accel_gpt.config.parse import merge
from accel_gpt.config.values import leaves, sections, to_yaml
from accel_gpt.errors import UserError

CONFIG = """
out_dir: runs/x
model: {n_layer: 2, n_head: 4, n_embd: 64}
train: {max_steps: 1e3}
optim: {lr: 3e-4}
"""


@pytest.fixture
def config_file(tmp_path: Path) -> str:
    path = tmp_path / "small.yaml"
    path.write_text(CONFIG)
    return str(path)


def load(path: str, *options: str) -> Config:
    return load_config([path, *options], "train.py")


def test_command_line_beats_yaml_beats_preset_beats_default(config_file: str) -> None:
    config = load(config_file, "--optim.lr", "1e-2", "--model.preset=llama", "--model.bias", "true")
    assert config.optim.lr == 1e-2
    assert config.model.n_layer == 2
    assert config.model.norm == "rmsnorm"  # from the preset
    assert config.model.bias is True  # overrides the preset
    assert config.optim.beta1 == 0.9
    assert config.train.max_steps == 1000  # 1e3


IN_HOME = """
out_dir: ~/run
data: {train: [{path: ~/a, weight: 1}, {path: "hf://~/b"}], val: {web: ~/web}, tokenizer: ~nobody/x}
sample: {prompts: [~/prompt]}
"""


def test_a_leading_tilde_of_a_path_is_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No shell replaces it in a YAML file, behind an = or in the second item of a list."""
    home = str(tmp_path)
    monkeypatch.setenv("HOME", home)
    (tmp_path / "c.yaml").write_text(IN_HOME)
    config = load("~/c.yaml", "--checkpoint.copy_to=~/copies", "--eval.hellaswag", "user/~")
    assert (config.out_dir, config.checkpoint.copy_to) == (f"{home}/run", f"{home}/copies")
    assert [one.path for one in config.data.train] == [f"{home}/a", "hf://~/b"]
    assert config.data.val == {"web": f"{home}/web"}
    assert (config.eval.hellaswag, config.sample.prompts) == ("user/~", ("~/prompt",))
    assert config.data.tokenizer == os.path.expanduser("~nobody/x")
    (tmp_path / "text.txt").write_text("text")
    prepared = PrepareCommand.parse(["~/text.txt", "--out=~/data"])
    assert (prepared.source, prepared.out) == (f"{home}/text.txt", f"{home}/data")
    assert ReportCommand.parse(["~/a", "b"]).run == (f"{home}/a", "b")
    grid = read_grid(["~/c.yaml"], ["--model.init_from=scratch", "--data.val=~/a,~/b"])
    assert grid.folder == Path(home, "run_sweep")
    assert [setting.config.data.val for setting in grid.settings] == [f"{home}/a", f"{home}/b"]


def test_options_that_name_files_are_declared_as_paths() -> None:
    names_a_file = re.compile(r"\b(folder|file|path|URL)s?\b", re.IGNORECASE)
    missing = set()
    for section in (Config, Weighted, *COMMANDS.values()):
        kinds = leaves(section)
        for key, described in all_options(section).items():
            is_text = str in (kinds.get(key), *get_args(kinds.get(key)))
            if is_text and not described.path and names_a_file.search(described.description):
                missing.add(key.rpartition(".")[2])
    assert missing <= {"license"}  # this is about a file


def test_words_of_yaml_and_of_a_flag(config_file: str, tmp_path: Path) -> None:
    config = load(config_file, "--train.compile", "--eval.tokens", "null")
    assert (config.train.compile, config.eval.tokens) == (True, None)
    path = tmp_path / "c.yaml"
    path.write_text("train: {mixed_precision: no, max_steps: 1}")
    assert load(str(path)).train.mixed_precision == "no"


def test_resolved_config_reads_back_equal(config_file: str, tmp_path: Path) -> None:
    config = load(config_file, "--model.preset", "llama", "--sample.prompts", '["a, b", "c"]')
    assert config.sample.prompts == ("a, b", "c")
    again = tmp_path / "again.yaml"
    again.write_text(to_yaml(config))
    assert load(str(again)) == config


PROMPT = "Hello, I'm a language model,"


@pytest.mark.parametrize(
    ("words", "prompts"),
    [
        ([PROMPT], (PROMPT,)),
        ([PROMPT, "", "a,b"], (PROMPT, "", "a,b")),
        (["[a, 'b, c']"], ("a", "b, c")),
        (["[a]", "b,"], ("a", "b,")),
    ],
)
def test_a_text_is_not_split_at_commas(
    words: list[str], prompts: tuple[str, ...], config_file: str
) -> None:
    options = [f"--sample.prompts={word}" for word in words]
    assert load(config_file, *options).sample.prompts == prompts
    (setting, _) = read_grid([config_file], [*options, "--optim.lr", "1e-3,1e-2"]).settings
    assert setting.config.sample.prompts == prompts


def test_several_texts_are_repeated_or_a_list(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(f'sample: {{prompts: "{PROMPT}"}}')
    words = ["--log.trackers", "a", "--optim.lr", "1", "--log.trackers=b"]
    config = load(str(path), *words, "--checkpoint.allow_change", "[optim.lr, seed]")
    assert config.sample.prompts == (PROMPT,)
    assert config.log.trackers == ("a", "b")
    assert config.checkpoint.allow_change == ("optim.lr", "seed")
    tasks = ["--tasks", "piqa", "--tasks", "mmlu,x"]
    assert EvaluateCommand.parse(["runs/x", *tasks]).tasks == ("piqa", "mmlu,x")
    processes = VerifyResumeCommand.parse([str(path), "--processes", "1, 2"]).processes
    assert processes == (1, 2)  # numbers may be separated by commas


def test_an_emoji_that_yaml_escapes_is_text_and_a_single_surrogate_is_not(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text('sample: {prompts: ["\\ud83d\\udc80"]}')
    assert load_config([str(path)], "test").sample.prompts == ("\ud83d\udc80",)
    path.write_text('out_dir: "runs/caf\\udce9"')
    with pytest.raises(UserError, match=r"out_dir is runs/caf.xe9, but must be UTF-8"):
        load_config([str(path)], "test")


def test_a_command_takes_its_options_and_the_keys_of_its_config(config_file: str) -> None:
    words = "--steps=9 --optim.lr 1e-3 --train.compile --model.dropout=0 --json"
    options = BenchCommand.parse([config_file, *words.split()])
    assert (options.steps, options.json) == (9, True)
    keys = ("--optim.lr", "1e-3", "--train.compile", "--model.dropout=0")
    assert options.loaded == load(config_file, *keys)
    assert BenchCommand.parse(["--steps", "9", config_file]).steps == 9


def test_an_option_replaces_options_of_the_layers_before_it() -> None:
    lower = {"model.n_layer": 3, "model.n_embd": 192, "data.prepare.source": "stdlib", "seed": 1}
    upper = {"model.depth": 4, "model.n_embd": 256, "data.train": "mine"}
    assert merge(Config, [lower, upper]) == {**upper, "seed": 1}
    assert merge(Config, [upper, lower]) == {**upper, **lower}
    without = {"model.depth": None, "data.train": None}
    assert merge(Config, [lower, without]) == {**lower, **without}
    muon = {"optim.name": "muon", "optim.muon_momentum": 0.9, "optim.lr": 1e-2}
    assert merge(Config, [muon, {"optim.name": "adamw"}]) == {
        "optim.name": "adamw",
        "optim.lr": 1e-2,
    }
    assert merge(Config, [muon, {"optim.name": "muon"}]) == muon
    lengths: list[dict[str, Any]] = [{"train.max_steps": 3}, {"train.max_tokens": 4096}]
    for layers in (lengths, lengths[::-1]):
        assert merge(Config, layers) == layers[1]
    for key, one in all_options(Config).items():
        assert {*one.replaces} <= {*leaves(Config), *sections(Config)}, key


MUON = """
model: {position: rope, rope_factor: 2}
optim: {name: muon, lr: 1e-2, muon_lr: 2e-2, muon_momentum: 0.95, muon_cautious_decay: true}
schedule: {name: cosine, min_lr: 1e-4}
train: {max_steps: 9, micro_batch_size: 8}
"""


def test_keys_of_the_file_that_a_value_does_not_use_are_told_once_on_rank_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A key with its default is not told."""
    path = tmp_path / "muon.yaml"
    path.write_text(MUON)
    told = {
        "optim.name": "optim.name adamw does not use optim.muon_lr, optim.muon_cautious_decay",
        "model.position": "model.position learned does not use model.rope_factor",
        "schedule.name": "schedule.name constant does not use schedule.min_lr",
    }
    values = {key: text.split()[1] for key, text in told.items()}
    load(str(path), *(f"--{key}={value}" for key, value in values.items()))
    assert capsys.readouterr().err.splitlines() == [f"{text}: left out" for text in told.values()]
    read_grid([str(path)], ["--optim.name=muon,adamw", "--optim.lr=1e-2,2e-2,3e-2"])
    assert capsys.readouterr().err == f"{told['optim.name']}: left out\n"
    load(str(path), "--optim.name", "muon", "--optim.muon_lr", "0.1")
    with pytest.raises(SystemExit):
        load(str(path), "--optim.name=adamw", "--help")
    monkeypatch.setenv("RANK", "1")
    load(str(path), "--optim.name=adamw")
    assert capsys.readouterr().err == ""


IMPORTED = """
import sys
from accel_gpt import cli, console
code = console.run_main(cli.dispatch, sys.argv[1:])
print(*{"torch", "accelerate", "transformers", "datasets", "pandas"} & sys.modules.keys())
sys.exit(code)
"""


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (["--help"], 0),
        (["train", "quickstart", "--optim.lr", "fast"], 2),
    ],
)
def test_help_and_a_mistake_import_no_large_library(options: list[str], code: int) -> None:
    words = [sys.executable, "-c", IMPORTED, *options]
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    assert done.returncode == code
    assert done.stdout.splitlines()[-1] == ""


NUMBERS = [key for key, hint in leaves(Config).items() if {int, float} & {hint, *get_args(hint)}]
FLOATS = {key for key, hint in leaves(Config).items() if float in {hint, *get_args(hint)}}
LONG = "9" * 30
WHOLE = ("model.n_layer", "model.vocab_size", "sample.max_new_tokens", "train.step_timeout")


@pytest.mark.parametrize("value", [LONG, "1e400", "nan", "\u00b2", "9" * 5000])
def test_no_number_is_beyond_what_can_be_counted(config_file: str, value: str) -> None:
    assert len(NUMBERS) > 40
    for key in NUMBERS:
        if value == LONG and key in FLOATS:
            continue  # it is finite
        with pytest.raises(UserError, match=rf"{key.rpartition('.')[2]}.{{0,400}}$"):
            load(config_file, f"--{key}={value}")


@pytest.mark.parametrize("key", WHOLE)
def test_what_takes_memory_or_time_by_its_number_is_bounded(config_file: str, key: str) -> None:
    with pytest.raises(UserError, match=rf"{key} is '?{10**12}'?; .*at most"):
        load(config_file, f"--{key}", str(10**12))
