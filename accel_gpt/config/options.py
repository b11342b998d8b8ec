"""What each command of `accel-gpt` can be told: options with types, defaults, units. No torch."""

import math
import re
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from accel_gpt.config.data import PrepareConfig, Source
from accel_gpt.errors import not_negative, positive, require


@dataclass(frozen=True)
class PrepareCommand(PrepareConfig):
    """Turn text, or shards of another project, into token shards; stopped, it continues.

    RECIPE, a YAML file or the name of a shipped one, holds any of these options as `key: value`;
    those of the command line go first.
    """

    source: Source | None = None
    """What path or dataset holds; null: what the endings of path's files tell, dataset with
    --dataset, else stdlib, the library of this Python."""
    out: str = ""
    """Folder to make; empty: data/<source>_<tokenizer>."""
    rank: int = 0
    """Which part of out this machine makes, from 0; of the --world parts."""
    world: int = 1
    """Machines that make a part of out each."""
    merge: bool = False
    """Join the parts of out that --rank and --world made."""


@dataclass(frozen=True)
class SampleCommand:
    """Write text with a model: a run's, a checkpoint's, an exported one or one of the Hub."""

    run: Annotated[str, tyro.conf.Positional]
    """Folder of a run, of one checkpoint, or in transformers format; or a Hub id, as gpt2."""
    prompt: str = ""
    """Text to continue; empty: the start of a document."""
    num: int = 1
    """Samples."""
    max_new_tokens: int = 200
    """Tokens per sample."""
    temperature: float = 0.8
    """0: greedy."""
    top_k: int | None = 50
    """Tokens to choose from; null: all."""
    top_p: float = 1.0
    """Probability mass to choose from."""
    seed: int = 1337
    """Of the draws."""
    checkpoint: str = "last"
    """Of a run: last, best, or a step."""
    interactive: bool = False
    """Prompts from standard input, a line each; \\n in one is a line end; texts as they come."""
    allow_pickle: bool = False
    """Also read weights in pickle files (.bin), without running what they hold."""

    def __post_init__(self) -> None:
        require(
            not (self.interactive and self.prompt),
            f"--interactive asks for prompts, so --prompt {self.prompt!r} is one too many",
        )


@dataclass(frozen=True)
class EvaluateCommand:
    """Measure a model on held-out data and on questions; a run's figures are kept in its metrics.

    On several processes: accelerate launch -m accel_gpt.cli evaluate RUN ...
    """

    run: Annotated[str, tyro.conf.Positional]
    """Folder of a run, of one checkpoint, or in transformers format; or a Hub id, as gpt2."""
    checkpoint: str = "last"
    """Of a run: last, best, or a step."""
    data: str | None = None
    """Data folder, or its URL, whose val split is measured; null: the data of the run."""
    tokens: str = "run"
    """Tokens of each split, spread over it; null: all; run: as many as the run's eval.tokens."""
    hellaswag: str | None = None
    """JSONL file in the original format, or Hub id, as Rowan/hellaswag; null: the run's, if any."""
    tasks: tuple[str, ...] = ()
    """Tasks of lm-evaluation-harness, separated by commas, as arc_easy,piqa; needs lm-eval."""
    include_path: str | None = None
    """Folder with more tasks for lm-evaluation-harness."""
    limit: int | None = None
    """First questions of hellaswag and of each task; null: as many as in the run, else all."""
    batch_size: int | None = None
    """Windows per process and forward; null: the run's train.micro_batch_size, else 8."""
    json: bool = False
    """One JSON object in place of a table."""
    allow_pickle: bool = False
    """Also read weights in pickle files (.bin), without running what they hold."""

    def __post_init__(self) -> None:
        positive("evaluate", self, "limit", "batch_size")
        require(
            self.tokens in ("run", "null") or bool(re.fullmatch("0*[1-9][0-9]{0,15}", self.tokens)),
            f"--tokens is {self.tokens}; expected a whole number above 0, null for all, or run",
        )


@dataclass(frozen=True)
class ExportCommand:
    """Write a model as a folder that `transformers` opens, and prove that it computes the same."""

    run: Annotated[str, tyro.conf.Positional]
    """Folder of a run, of one checkpoint, or in transformers format; or a Hub id."""
    to: str = ""
    """Folder to make."""
    checkpoint: str = "last"
    """Of a run: last, best, or a step."""
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Of the weights."""
    overwrite: bool = False
    """Replace an exported model that is at `to`."""
    allow_pickle: bool = False
    """Also read weights in pickle files (.bin), without running what they hold."""

    def __post_init__(self) -> None:
        require(bool(self.to), "--to is missing; give the folder to make")


@dataclass(frozen=True)
class PushCommand:
    """Export a run and upload it to the Hub with a model card, its figures and its curves."""

    run: Annotated[str, tyro.conf.Positional]
    """Folder of a run, or of one checkpoint."""
    repo: str = ""
    """Repository, user/name; made if it is missing."""
    checkpoint: str | None = None
    """last, best, or a step; null: the one that --revision step-N names, else last."""
    revision: str | None = None
    """Branch to upload to, made if it is missing; null: main, with a tag step-N."""
    private: bool = False
    """Make the repository a private one."""
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Of the weights."""
    include_state: bool = False
    """Upload the whole checkpoint too, so that training goes on from hf://user/name@step-N."""
    license: str | None = None
    """Of the weights, as the Hub spells it: apache-2.0, mit, cc-by-4.0, ..."""
    data_license: str | None = None
    """Of the data, for the model card."""

    def __post_init__(self) -> None:
        require(bool(self.repo), "--repo is missing; give the repository as user/name")


@dataclass(frozen=True)
class VerifyResumeCommand:
    """Prove that a config's runs, killed and launched again, equal one that was never stopped.

    Any --section.key of the config may be set as well, but the length of the run and where it
    writes. Exit code 1 when something differs.
    """

    config: Annotated[str, tyro.conf.Positional]
    """YAML file, or name of a shipped config, as for train."""
    steps: int = 20
    """Steps of each run."""
    kills: int = 5
    """Launches that end with SIGKILL to all their processes at a random moment; 0: one run more,
    not stopped, tells whether the machine repeats itself."""
    processes: tuple[int, ...] = (1,)
    """Numbers of processes, separated by commas, of which each launch has one at random; the run
    that is never stopped has the first."""
    seed: int = 0
    """Of the moments and of the numbers of processes; that of the run stays the config's."""
    keep: bool = False
    """Keep the temporary folder of the runs also when all is equal."""

    def __post_init__(self) -> None:
        require(self.steps >= 2, f"steps is {self.steps}; it must be 2 or more, to stop between")
        not_negative("verify-resume", self, "kills")
        require(
            bool(self.processes) and min(self.processes) > 0,
            f"processes is {','.join(map(str, self.processes))}; expected numbers above 0",
        )


@dataclass(frozen=True)
class InspectCommand:
    """Tell what data, a run or a checkpoint holds and verify it, or compare tokenizers on a text.

    Exit code 3 when data is damaged, 4 when a checkpoint is.
    """

    place: Annotated[str, tyro.conf.Positional] = ""
    """Data folder, of any project, or its URL; or folder of a run or of a checkpoint."""
    json: bool = False
    """One JSON object in place of text."""
    quick: bool = False
    """Read no shard and hash no checkpoint."""
    tokenizer: str | None = None
    """gpt2, bytes or the path of a tokenizer.json, for shards that do not say it."""
    windows: int = 2
    """First windows of each split that are shown as text."""
    block_size: int = 64
    """Tokens in a window."""
    text: str | None = None
    """File of UTF-8 text on which tokenizers are compared."""
    tokenizers: tuple[str, ...] = ()
    """For text: gpt2, bytes, tokenizer.json files, data folders; none: gpt2, bytes, PLACE's."""

    def __post_init__(self) -> None:
        require(bool(self.place or self.text), "PLACE or --text FILE missing; see --help")
        require(bool(self.text or not self.tokenizers), "--tokenizers needs --text FILE")
        not_negative("inspect", self, "windows")
        positive("inspect", self, "block_size")


@dataclass(frozen=True)
class PlanCommand:
    """Tell what a config will take: size, FLOPs, memory, steps, hours, disk, and whether it fits.

    Any --section.key of the config may be set as well. Nothing is trained; a GPU is not needed.
    """

    config: Annotated[str, tyro.conf.Positional]
    """YAML file, or name of a shipped config, as for train."""
    gpus: int | None = None
    """Devices, one process each; null: those of --config_file, else 1."""
    gpu: str | None = None
    """Their kind: h100, h200, b200, a100-80gb, l40s, 'rtx 4090', ...; null: CPUs."""
    memory_gb: float | None = None
    """Memory of a device in 1e9 bytes; null: that of its kind."""
    distribution: Literal["ddp", "fsdp"] | None = None
    """ddp: each device holds all; fsdp: its share; null: what --config_file says, else ddp."""
    config_file: str | None = None
    """What `accelerate config` wrote: number of processes, precision, FSDP."""
    mfu: float | None = None
    """Share of the peak FLOP/s that is reached, 0 to 1, for the hours."""
    tokens_per_second: float | None = None
    """Of all devices together, in place of mfu."""
    measured: str | None = None
    """Folder of a run whose speed is taken, in place of mfu."""
    price: float | None = None
    """Of a device for an hour, in any currency."""
    vocab_size: int | None = None
    """Tokens in the vocabulary, where neither data nor tokenizer tell."""
    json: bool = False
    """One JSON object in place of text."""

    def __post_init__(self) -> None:
        for name in ("gpus", "memory_gb", "mfu", "tokens_per_second", "price", "vocab_size"):
            value = getattr(self, name)
            ok = value is None or 0 < value < math.inf
            require(ok, f"--{name} is {value}; it must be above 0 and finite")
        require(self.mfu is None or self.mfu <= 1, f"--mfu is {self.mfu}; it is a share, 0 to 1")
        speeds = ("mfu", "tokens_per_second", "measured")
        given = [f"--{name}" for name in speeds if getattr(self, name) is not None]
        require(len(given) < 2, f"{' and '.join(given)} each tell the speed; give one of them")


@dataclass(frozen=True)
class BenchCommand:
    """Measure the training step of a config: tokens a second, MFU, memory, where its time goes.

    Any --section.key of the config may be set as well. Nothing is kept. On several processes:
    accelerate launch -m accel_gpt.cli bench CONFIG ...
    """

    config: Annotated[str, tyro.conf.Positional]
    """YAML file, or name of a shipped config, as for train."""
    warmup: int = 5
    """Steps before those that are measured."""
    steps: int = 20
    """Steps that are measured."""
    parts: int = 5
    """Further steps, in which each part is waited for and timed by itself; 0: none."""
    compare: bool = False
    """Measure float32 and bf16, compiled or not, side by side: what auto chooses between."""
    json: bool = False
    """One JSON object in place of text."""

    def __post_init__(self) -> None:
        positive("bench", self, "warmup", "steps")
        not_negative("bench", self, "parts")


@dataclass(frozen=True)
class ReportCommand:
    """Write curves, samples and configs of runs as one HTML file, which needs no network.

    Works while a run is writing. What lies in the runs may be of anybody: it is shown as text.
    """

    run: Annotated[tuple[str, ...], tyro.conf.Positional]
    """Folders of runs."""
    out: str | None = None
    """HTML file; null: report.html in the run, of several runs in the current folder."""
    reference: str = "auto"
    """Curve drawn grey behind: a name in configs/references, a .json file, or none; auto: the one
    for the same model and vocabulary, and the same data or config name."""
    png: str | None = None
    """Folder for each plot as a picture."""
    csv: str | None = None
    """File for all figures of all runs."""
    as_reference: str | None = None
    """JSON file for the val losses of the run, which must be finished, as a reference."""

    def __post_init__(self) -> None:
        require(bool(self.run), "RUN missing; see --help")
        require(len(self.run) == 1 or not self.as_reference, "--as_reference takes one run alone")
