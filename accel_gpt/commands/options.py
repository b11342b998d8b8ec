"""The options of every command, and the check of its command line.

`cli.py` parses the command line with these classes and imports the command afterwards, so that
`--help` and mistakes need no torch. The fields of a class are its options. Fields made with
`internal` hold results of `parse`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import ClassVar, Literal, Self

from accel_gpt.commands.resolve import load_config
from accel_gpt.commands.sweep_settings import Grid, read_grid
from accel_gpt.config.data import DataConfig, PrepareConfig
from accel_gpt.config.experiment import Config, HubConfig, SampleConfig, check_repo
from accel_gpt.config.options import (
    REQUIRED,
    Section,
    internal,
    option,
    same_option,
)
from accel_gpt.config.parse import (
    parse_command,
    parse_with_keys,
    read_options,
)
from accel_gpt.config.values import build
from accel_gpt.config.yardstick import parse_yardstick
from accel_gpt.errors import require


class Command(Section, prefix="--"):
    """Base of the options of a command; `accel_gpt.commands.MODULE.run` takes them."""

    name: ClassVar[str]
    summary: ClassVar[str]  # in `accel-gpt --help`

    def module(self) -> str:
        """Return the name of the module in `accel_gpt.commands` that runs the command."""
        return self.name.replace("-", "_")

    @classmethod
    def parse(cls, argv: Sequence[str]) -> Self:
        """Parse and check a command line; print the help and exit if it asks for it."""
        return parse_command(cls, argv, f"accel-gpt {cls.name}")


@dataclass(frozen=True)
class ConfigCommand(Command):
    """Base of commands that load CONFIG and set any of its keys, as `--section.key value`."""

    config: str = option(
        REQUIRED,
        "YAML file, or name of a shipped config, as for train.",
        positional=True,
        path=True,
    )
    loaded: Config = internal(Config())

    @classmethod
    def parse(cls, argv: Sequence[str]) -> Self:
        """Parse the options and load the config; all other arguments set its keys."""
        prog = f"accel-gpt {cls.name}"
        options, keys = parse_with_keys(cls, argv, prog)
        if not options.config:
            require(not keys, f"{' '.join(keys)} needs CONFIG, whose keys it sets")
            return options
        loaded = load_config([options.config, *keys], prog)
        return replace(options, loaded=loaded)


@dataclass(frozen=True)
class TrainCommand(Command):
    """Train as a config says; its options are the keys of `Config`."""

    name: ClassVar[str] = "train"
    summary: ClassVar[str] = "train a GPT from a config, or resume its run"

    config: str = internal("")
    loaded: Config = internal(Config())

    @classmethod
    def parse(cls, argv: Sequence[str]) -> "TrainCommand":
        """Load the config."""
        loaded = load_config(argv, "accel-gpt train")
        return TrainCommand(config=argv[0], loaded=loaded)


@dataclass(frozen=True)
class PrepareCommand(PrepareConfig, Command, prefix="--"):
    """Turn text into token shards; if it is stopped, the same command resumes.

    Examples:
      accel-gpt prepare 'notes/**/*.md' --tokenizer bpe --out data/notes
      accel-gpt prepare HuggingFaceFW/fineweb-edu --subset sample-10BT --out data/edu
      accel-gpt prepare train.jsonl --val val.jsonl --tokenizer gpt2 --out data/crawl
    """

    name: ClassVar[str] = "prepare"
    summary: ClassVar[str] = "turn text into token shards"

    source: str | None = option(
        "stdlib",
        "Text to prepare: a file, folder, glob or http(s) URL, a data set of the Hub (user/name), "
        "or stdlib, the source code of Python's standard library.",
        positional=True,
        path=True,
    )
    out: str = option(
        "",
        "Folder to create, or its URL, such as s3://bucket/notes. empty: data/NAME_TOKENIZER, "
        "where NAME is the last part of the source.",
        path=True,
    )


@dataclass(frozen=True)
class SampleCommand(Command):
    """Write text with the model of a run, a checkpoint, an exported folder or the Hub.

    On a terminal, ┃ ends the prompt. Examples:
      accel-gpt sample runs/quickstart --prompt "def read(" --num 3
      accel-gpt sample runs/quickstart --checkpoint last --temperature 0
    """

    name: ClassVar[str] = "sample"
    summary: ClassVar[str] = "write text with a run, an exported folder or a Hub model"

    run: str = option(
        REQUIRED,
        "Folder of a run, of one checkpoint or of a model in transformers format; or a Hub id, "
        "such as gpt2.",
        positional=True,
        path=True,
    )
    prompt: str = option(
        "",
        "Text to continue. If it contains the text of a special token, that token is used. empty: "
        "start a new document.",
    )
    num: int = option(
        1,
        "Number of samples.",
    )
    max_new_tokens: int = option(
        200,
        "Number of tokens to generate per sample.",
    )
    temperature: float = same_option(SampleConfig, "temperature")
    top_k: int | None = same_option(SampleConfig, "top_k")
    seed: int = option(
        1337,
        "Seed of the sampled tokens.",
    )
    checkpoint: str | None = option(
        None,
        "Checkpoint of a run: last, best, or a step. null: the best one, or the newest if the run "
        "keeps no best one.",
    )
    weights: Literal["evaluated", "trained"] = option(
        "evaluated",
        "Weights of a checkpoint. evaluated: those that evaluated() of --code returned, such as an "
        "average; the val loss of the run is theirs. Without that function they are the trained "
        "ones. trained: the weights that the optimizer updates.",
    )
    code: str | None = option(
        None,
        "Your Python file, if the run was trained with --code and the file has a model(). The "
        "file is executed. null: none.",
        path=True,
    )


@dataclass(frozen=True)
class EvaluateCommand(Command):
    """Evaluate a model on held-out data and on benchmarks, and print the metrics.

    Changes no file. On several processes: accelerate launch --no_python accel-gpt evaluate RUN ...
    Examples:
      accel-gpt evaluate runs/quickstart
      accel-gpt evaluate runs/quickstart --checkpoint last --tokens null
      accel-gpt evaluate gpt2 --data data/web --hellaswag hellaswag_val.jsonl
    """

    name: ClassVar[str] = "evaluate"
    summary: ClassVar[str] = "measure loss, bits per byte and benchmarks, with standard errors"

    run: str = same_option(SampleCommand, "run")
    checkpoint: str | None = same_option(SampleCommand, "checkpoint")
    weights: Literal["evaluated", "trained"] = same_option(SampleCommand, "weights")
    code: str | None = option(
        None,
        "Your Python file, if the run was trained with --code and the file has a model(), "
        "targets(), shards() or evaluate(); also for an exported folder. The file is executed. "
        "null: none.",
        path=True,
    )
    data: str | None = option(
        None,
        "Data folder or its URL; the val split is evaluated. null: the data of the run.",
        path=True,
    )
    tokens: int | Literal["run"] | None = option(
        "run",
        "Number of tokens to evaluate in each split, at most 524,288 in the train split. null: "
        "all tokens of the val split. run: eval.tokens of the run.",
        above=0,
    )
    hellaswag: str | None = option(
        None,
        "HellaSwag questions: a JSONL file in the original format, or a Hub id such as "
        "Rowan/hellaswag. null: the run's eval.hellaswag.",
        path=True,
    )
    tasks: tuple[str, ...] = option(
        (),
        "Task of lm-evaluation-harness, such as arc_easy, or a YAML file that defines one. Needs "
        "lm-eval and a single process. Repeat the option for several tasks.",
        path=True,
    )
    limit: int | None = option(
        None,
        "Number of questions of HellaSwag and of each task, from the first. null: all.",
        above=0,
    )
    json: bool = option(
        False,
        "Print one JSON object instead of a table.",
    )


@dataclass(frozen=True)
class ExportCommand(Command):
    """Write a model for transformers or llama.cpp, and verify that it computes the same there.

    Examples:
      accel-gpt export runs/quickstart --to exported --checkpoint 560
      accel-gpt export runs/quickstart --to exported --as qwen3 --dtype bf16
      accel-gpt export runs/quickstart --gguf quickstart.gguf --dtype q8_0
    """

    name: ClassVar[str] = "export"
    summary: ClassVar[str] = "write a model for transformers or llama.cpp, and verify it"

    run: str = same_option(SampleCommand, "run")
    to: str = option(
        "",
        "Folder to create, for transformers.",
        path=True,
    )
    gguf: str = option(
        "",
        "File to create, for llama.cpp, Ollama and LM Studio. A Modelfile is written next to it.",
        path=True,
    )
    checkpoint: str | None = same_option(SampleCommand, "checkpoint")
    weights: Literal["evaluated", "trained"] = same_option(SampleCommand, "weights")
    dtype: Literal["fp32", "bf16", "fp16", "q8_0"] = option(
        "fp32",
        "Data type of the weights. q8_0 (GGUF files only) takes 8.5 bits per weight.",
    )
    as_: Literal["qwen3"] | None = option(
        None,
        "qwen3: write a model of the preset fast as Qwen3, for programs that do not know its "
        "class. A GGUF file always holds it as Qwen3.",
    )

    def _check(self) -> None:
        require(
            bool(self.to) != bool(self.gguf),
            "expected either --to, the folder to create, or --gguf, the file",
        )
        require(
            self.dtype != "q8_0" or not self.to,
            "--dtype is q8_0, but --to takes fp32, bf16 or fp16; give --gguf instead of --to",
        )


@dataclass(frozen=True)
class PushCommand(Command):
    """Export a run and upload it to the Hub with a model card, metrics and curves.

    Examples:
      accel-gpt push runs/quickstart --repo user/quickstart
      accel-gpt push runs/quickstart --repo user/quickstart --private
      accel-gpt push runs/quickstart --repo user/quickstart --license mit
    """

    name: ClassVar[str] = "push"
    summary: ClassVar[str] = "upload a run to the Hub, with a model card"

    run: str = option(
        REQUIRED,
        "Folder of a run, or of one checkpoint.",
        positional=True,
        path=True,
    )
    repo: str = option(
        "",
        "Repository as user/name. It is created if it is missing.",
    )
    checkpoint: str | None = same_option(SampleCommand, "checkpoint")
    private: bool = same_option(HubConfig, "private")
    dtype: Literal["fp32", "bf16", "fp16"] = option(
        "fp32",
        "Data type of the exported weights.",
    )
    license: str | None = option(
        None,
        "Licence of the weights, as the Hub names it: apache-2.0, mit, cc-by-4.0, ...",
    )

    def _check(self) -> None:
        check_repo("--repo", self.repo)


@dataclass(frozen=True)
class InspectCommand(Command):
    """Show and verify the content of data, a run or a checkpoint.

    If data is damaged, the exit code is 3. If a checkpoint is damaged, it is 4. For shards of other
    projects, you can set data.tokenizer as in a config. Examples:
      accel-gpt inspect data/stdlib_bpe4096
      accel-gpt inspect shards_of_nanogpt --data.tokenizer gpt2
      accel-gpt inspect runs/quickstart/checkpoints/step_00001000 --json
    """

    name: ClassVar[str] = "inspect"
    summary: ClassVar[str] = "verify data or a checkpoint"

    path: str = option(
        REQUIRED,
        "Data folder in any supported format, or its URL; or the folder of a run or a checkpoint.",
        positional=True,
        path=True,
    )
    json: bool = option(
        False,
        "Print one JSON object instead of text.",
    )
    data: DataConfig = internal(DataConfig())

    @classmethod
    def parse(cls, argv: Sequence[str]) -> Self:
        """Parse the options, and the keys of `data`."""
        options, keys = parse_with_keys(cls, argv, f"accel-gpt {cls.name}")
        given = read_options(Config, keys)
        other = sorted(given.keys() - {"data.tokenizer"})
        require(not other, f"unknown option --{', --'.join(other)}; --help shows all options")
        return replace(options, data=build(Config, given).data)


@dataclass(frozen=True)
class PlanCommand(ConfigCommand):
    """Compute what a config needs: size, FLOPs, memory, steps, hours, disk, and whether it fits.

    It trains nothing and needs no GPU. You can also set any --section.key of the config. Examples:
      accel-gpt plan                                    # sizes for a text and a GPU
      accel-gpt plan --gpu 'rtx 4090' --price 0.5
      accel-gpt plan gpt2_124m --gpus 8 --gpu h100 --price 2.5
      accel-gpt plan gpt2_124m --gpus 8 --price h100=2.5,l40s=0.8    # each kind of GPU
      accel-gpt plan llama_7b --gpus 64 --gpu h100 --distribution fsdp
    """

    name: ClassVar[str] = "plan"
    summary: ClassVar[str] = "compute size, memory, hours and cost of a config, and whether it fits"

    config: str = option(
        "",
        "YAML file, or name of a shipped config, as for train. empty: a table of the sizes that a "
        "text is enough for and a GPU trains.",
        positional=True,
        path=True,
    )
    gpus: int | None = option(
        None,
        "Number of devices of all nodes together. Each has one process. With CONFIG and without "
        "--gpu: a table of all kinds of GPUs, the cheapest first, or the fastest. null: 1.",
        above=0,
    )
    gpu: str | None = option(
        None,
        "Kind of the devices: h100, h200, b200, a100-80gb, l40s, 'rtx 4090', ... null: CPUs, or "
        "all kinds, see --gpus.",
    )
    memory_gb: float | None = option(
        None,
        "Memory of a device in GB (1e9 bytes). null: the memory of --gpu.",
        above=0,
    )
    distribution: Literal["ddp", "fsdp"] = option(
        "ddp",
        "ddp: each device holds the whole model. fsdp: all devices share the model.",
    )
    price: str | None = option(
        None,
        "Price per device hour, in any currency: of --gpu, or of kinds, as h100=2.5,l40s=0.8, "
        "which also prints the table.",
    )
    json: bool = same_option(InspectCommand, "json")

    @property
    def devices(self) -> int:
        """Return the number of devices."""
        return self.gpus or 1

    def module(self) -> str:
        """Return the name of the module that runs the command."""
        return "plan" if self.config else "sizes"


@dataclass(frozen=True)
class SweepCommand(Command):
    """Compare configs, or values of keys, over several seeds.

    Set any --section.key of the configs; a list with commas compares its values. Each setting is
    compared with the first one, by runs with the same seed. If the answer is clear, a setting is
    trained with no further seeds. The same command resumes a stopped sweep; you can add seeds and
    values. Examples:
      accel-gpt sweep quickstart --optim.lr 1e-2,3e-2 --seed 1,2,3,4,5 --train.max_steps 60
      accel-gpt sweep fast_shakespeare_cpu shakespeare_char_cpu --seed 1,2,3 --train.max_steps 120
      accel-gpt sweep quickstart --model.depth 1,2 --seed 1,2,3 --train.max_steps 60
    """

    name: ClassVar[str] = "sweep"
    summary: ClassVar[str] = "compare configs or values over seeds: better, worse or no difference"

    config: tuple[str, ...] = option(
        REQUIRED,
        "YAML files, or names of shipped configs, as for train. Options apply to all of them.",
        positional=True,
        path=True,
    )
    seed: tuple[int, ...] = option(
        (),
        "Seeds of each setting, separated by commas. []: the seed of the first config.",
    )
    out_dir: str | None = option(
        None,
        "Folder of the sweep. null: out_dir of the first config, with _sweep.",
        path=True,
    )
    metric: str | None = option(
        None,
        "Metric of the last step to compare, such as eval/val_loss/NAME or a metric of --code. "
        "null: eval.best, which is the val loss unless you set it.",
    )
    goal: Literal["min", "max"] | None = option(
        None,
        "Whether a low or a high value of the metric is better. null: what is known of losses and "
        "HellaSwag.",
    )
    grid: Grid = internal(None)

    @classmethod
    def parse(cls, argv: Sequence[str]) -> Self:
        """Parse the options and the settings to compare."""
        options, keys = parse_with_keys(cls, argv, f"accel-gpt {cls.name}")
        if options.metric is not None:
            best = f"{options.goal or ''} {options.metric}".strip()
            parse_yardstick("--metric", best)
            keys.append(f"--eval.best={best}")
        require(
            options.goal is None or options.metric is not None,
            f"--goal is {options.goal}, but --metric is missing",
        )
        grid = read_grid(options.config, keys, options.seed, options.out_dir)
        return replace(options, grid=grid)


@dataclass(frozen=True)
class BenchCommand(ConfigCommand):
    """Measure the training step of a config: tokens/s, hours of the whole run, MFU, memory.

    It trains on random tokens, so it needs no data, and it writes no run. You can also set any
    --section.key of the config. On several processes:
    accelerate launch --no_python accel-gpt bench CONFIG ... Examples:
      accel-gpt bench quickstart
      accel-gpt bench quickstart --train.mixed_precision bf16 --train.compile true
      accel-gpt bench gpt2_124m --steps 50
    """

    name: ClassVar[str] = "bench"
    summary: ClassVar[str] = "measure tokens/s, MFU and memory of a config"

    steps: int = option(
        20,
        "Number of measured steps.",
        at_least=2,
    )
    json: bool = same_option(InspectCommand, "json")


@dataclass(frozen=True)
class ReportCommand(Command):
    """Write curves, samples and configs of runs as one HTML file that needs no network.

    You can write it while a run is training. All texts of a run are escaped, so you can open the
    report of someone else's run. Examples:
      accel-gpt report runs/quickstart
      accel-gpt report runs/a runs/b --out compared.html
      accel-gpt report runs/quickstart --out quickstart.html
    """

    name: ClassVar[str] = "report"
    summary: ClassVar[str] = "write curves and samples of runs as one HTML file"

    run: tuple[str, ...] = option(
        REQUIRED,
        "Folders of runs.",
        positional=True,
        path=True,
    )
    out: str | None = option(
        None,
        "HTML file to write. null: report.html in the run's folder; for several runs, in the "
        "current folder.",
        path=True,
    )


@dataclass(frozen=True)
class DoctorCommand(Command):
    """Answer nine questions about a run, each with a figure, a comparison and a verdict.

    It compares the loss with models that count, looks for leaks, overfitting, a curve or rates that
    are unusual, faults of the data, wasted time, lost work and missing records. A verdict is fine,
    look or wrong. It needs no GPU and also examines a run that trains. Examples:
      accel-gpt doctor runs/quickstart
      accel-gpt doctor runs/quickstart --json
    """

    name: ClassVar[str] = "doctor"
    summary: ClassVar[str] = "tell whether a run is healthy, and what to do if not"

    run: str = option(
        REQUIRED,
        "Folder of a run.",
        positional=True,
        path=True,
    )
    json: bool = same_option(InspectCommand, "json")


@dataclass(frozen=True)
class VerifyResumeCommand(ConfigCommand):
    """Verify that a killed and resumed run of a config equals a run that was never stopped.

    If something differs, the exit code is 1. You can also set any --section.key of the config,
    except out_dir and the number of steps. Examples:
      accel-gpt verify-resume shakespeare_char_cpu
      accel-gpt verify-resume quickstart --steps 40 --kills 20
      accel-gpt verify-resume quickstart --processes 1,2 --train.reproducible true
    """

    name: ClassVar[str] = "verify-resume"
    summary: ClassVar[str] = "kill and resume runs, and compare them with an undisturbed run"

    steps: int = option(
        20,
        "Number of steps of each run.",
        at_least=2,
    )
    kills: int = option(
        5,
        "Number of launches to kill at a random moment, with SIGKILL to all processes. 0: compare "
        "two undisturbed runs, to see whether the machine is deterministic.",
        at_least=0,
    )
    processes: tuple[int, ...] = option(
        (1,),
        "Numbers of processes, separated by commas; the launches use them in turn. Several "
        "numbers need train.reproducible.",
    )

    def _check(self) -> None:
        require(
            bool(self.processes) and min(self.processes) > 0,
            f"--processes is {','.join(map(str, self.processes))}; expected numbers above 0",
        )


COMMANDS: Mapping[str, type[Command]] = MappingProxyType(
    {
        command.name: command
        for command in (
            TrainCommand,
            PrepareCommand,
            SampleCommand,
            EvaluateCommand,
            ExportCommand,
            PushCommand,
            InspectCommand,
            PlanCommand,
            SweepCommand,
            BenchCommand,
            DoctorCommand,
            ReportCommand,
            VerifyResumeCommand,
        )
    }
)
