"""Define every option of an experiment as frozen dataclasses, with units and checks. No torch.

`parse.py` builds them from a YAML file and the command line.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from accel_gpt.config.data import DataConfig
from accel_gpt.config.model import ModelConfig
from accel_gpt.config.optim import OptimConfig
from accel_gpt.config.options import Section, duration, internal, option
from accel_gpt.config.yardstick import Yardstick, parse_yardstick
from accel_gpt.errors import require
from accel_gpt.own_code import OwnCode

# Most tokens of the train split in an evaluation. Its loss only shows overfitting; assumption
TRAIN_TOKENS = 524_288


@dataclass(frozen=True)
class TrainConfig(Section, prefix="train."):
    """Batch size, length and numerics of the run."""

    tokens_per_step: int = option(
        524_288,
        "Tokens per optimizer step, summed over all processes. The number of accumulated "
        "micro-batches follows from it.",
        above=0,
        essential=True,
        resume="refuse",
    )
    micro_batch_size: int | Literal["auto"] = option(
        16,
        "Sequences per process in one micro-batch. auto: the largest that fits in memory, found at "
        "the start.",
        above=0,
        at_most=2**24,
        essential=True,
        resume="free",
        exact=True,
    )
    max_steps: int | None = option(
        None,
        "Number of optimizer steps in the run. Set this, max_tokens or budget. On the command "
        "line, it replaces budget and max_tokens of the file.",
        replaces=("train.max_tokens", "train.budget"),
        above=0,
        essential=True,
    )
    max_tokens: int | None = option(
        None,
        "Number of tokens in the run. Set this or max_steps. On the command line, it replaces "
        "budget and max_steps of the file. For N epochs, set N times the number of train tokens; "
        "the first lines of a run print this number.",
        replaces=("train.max_steps", "train.budget"),
        above=0,
    )
    budget: str | None = option(
        None,
        "Time that the run takes on this machine, such as 5m, from the prepared data to the last "
        "checkpoint. The first launch measures a few steps, an evaluation, samples and a save, and "
        "sets max_steps. After a tenth of the steps, it sets them once more if the learning rate "
        "is still constant. If a config also has max_steps or max_tokens, its warm-up and "
        "intervals belong to that length, and are scaled to the new one.",
        essential=True,
    )
    stop_at: int | None = option(
        None,
        "Step after which this launch evaluates, saves and stops. A later launch without stop_at "
        "continues on the same schedule. null: the last step of the run.",
        above=0,
        resume="free",
    )
    mixed_precision: Literal["auto", "no", "bf16", "fp16", "fp8"] | None = option(
        None,
        "Precision of the computation. no: float32. fp8: matrix products in torchao's "
        "float8, the rest in bf16; needs torchao and compute capability 8.9. null: the precision "
        "that `accelerate launch` sets, or no. auto: the precision of an earlier launch of this "
        "run; else the one that `accelerate launch` sets; else bf16 if the device is faster in it, "
        "fp16 on GPUs that have only that, or no.",
        essential=True,
        resume="free",
        exact=True,
    )
    matmul_precision: Literal["auto", "highest", "high", "medium"] = option(
        "auto",
        "Precision of float32 matrix products. highest: IEEE float32. high: TF32. medium: bfloat16 "
        "if the device supports it; on CUDA the same as high. auto: high on CUDA, highest "
        "elsewhere.",
        resume="free",
        exact=True,
    )
    compile: bool | Literal["auto", "graphs"] = option(
        False,
        "Compile the model with torch.compile. Compiled code is cached in "
        "~/.cache/accel_gpt/compiled. auto: on CUDA, if a compiler works. graphs: compile, and "
        "replay each step as CUDA graphs. "
        "graphs is faster for small models and needs one GPU without gradient accumulation.",
        essential=True,
        resume="free",
    )
    activation_checkpointing: Literal["none", "blocks"] = option(
        "none",
        "none: store all activations for the backward pass. blocks: store only the input of each "
        "block and recompute the rest. blocks needs a fraction of the memory, but a quarter to a "
        "third more computation.",
        resume="free",
    )
    reproducible: bool = option(
        False,
        "Make weights and losses bit-identical for any number of processes on the same kind of "
        "CPU. Gradients are summed in float64, which costs 8 bytes of memory per parameter and "
        "twice the all-reduce traffic. This does not work with fp16, fp8, FSDP, MPS or "
        "train.compile.",
    )
    profile: int = option(
        0,
        "Number of steps of each launch that PyTorch's profiler records, after the first three. "
        "Each process writes a trace to profile/ in the run's folder. 0: none.",
        at_least=0,
        resume="free",
    )
    step_timeout: str = option(
        "30m",
        "Longest time without progress: in each stage before the first step, for a remote shard, "
        "or in a step. If a shard does not come, the run saves the last step and ends with exit "
        "code 3. In all other cases, the process prints the stacks of its threads and ends. Data "
        "preparation has no limit. If all processes are paused together, a pause of up to a day "
        "does not count.",
        resume="free",
    )

    @property
    def compiled(self) -> bool:
        """Whether the model is compiled; false if compile is auto and not resolved yet."""
        return self.compile in (True, "graphs")

    @property
    def timeout_seconds(self) -> float:
        """Return step_timeout in seconds."""
        return duration("train.step_timeout", self.step_timeout) or 0.0

    @property
    def micro_batch_sequences(self) -> int:
        """micro_batch_size as a number; 1 if it is auto and not resolved yet."""
        if self.micro_batch_size == "auto":
            return 1
        return self.micro_batch_size

    def _check(self) -> None:
        for name in ("budget", "step_timeout"):
            duration(f"train.{name}", getattr(self, name))
        require(
            not (self.max_steps and self.max_tokens),
            f"train.max_steps is {self.max_steps} and train.max_tokens is {self.max_tokens}; set "
            "one of them",
        )
        require(
            not (self.reproducible and self.compiled),
            f"train.reproducible is true and train.compile is {str(self.compile).lower()}, but "
            "compiled kernels differ with the number of processes; set one of them to false",
        )


DECAYING = ("cosine", "wsd", "linear")  # schedules


@dataclass(frozen=True)
class ScheduleConfig(Section, prefix="schedule."):
    """The learning rate as a function of the step."""

    name: Literal["cosine", "wsd", "linear", "constant"] = option(
        "cosine",
        "Shape of the decay. wsd: warm-up, then constant, then a linear decay at the end.",
    )
    warmup_steps: int = option(
        0,
        "Number of steps in which the learning rate rises linearly from peak / warmup_steps to "
        "its peak. A shorter run warms up until its last step.",
        at_least=0,
        essential=True,
    )
    decay_share: float | None = option(
        None,
        "Share of all steps, 0 to 1, in which the learning rate falls to min_lr. null: all steps "
        "after the warm-up (wsd: the last fifth of the run).",
        above=0,
        at_most=1,
        used_with=("name", DECAYING),
    )
    min_lr: float = option(
        0.0,
        "Learning rate after the decay. The first step of the decay still has the peak, so the "
        "last step has slightly more than min_lr.",
        at_least=0,
        essential=True,
        used_with=("name", DECAYING),
    )


@dataclass(frozen=True)
class EvalConfig(Section, prefix="eval."):
    """Validation loss on fixed tokens, and HellaSwag."""

    every: int = option(
        500,
        "Number of steps between evaluations. 0: only at the end. A run with model.init_from is "
        "also evaluated before its first step.",
        at_least=0,
        essential=True,
        resume="free",
    )
    tokens: int | None = option(
        1_048_576,
        "Number of tokens to evaluate in each split and each named val set; at most "
        f"{TRAIN_TOKENS:,} in the train split. Every evaluation uses the same tokens. null: the "
        "whole val split.",
        above=0,
        validation=True,
    )
    best: str = option(
        "eval/val_loss",
        "Metric by which an evaluation is the best: eval/val_loss, eval/val_loss/NAME of a named "
        "val set, or a metric of --code, with min or max before it: 'max eval/exact_match'. For "
        "losses and HellaSwag you can leave min and max out.",
        resume="free",
    )
    hellaswag: str | None = option(
        None,
        "HellaSwag questions to ask during training: a JSONL file in the original format, or a "
        "Hub dataset such as Rowan/hellaswag. null: none.",
        resume="free",
        per_machine=True,
        path=True,
    )

    def _check(self) -> None:
        _ = self.yardstick

    @property
    def yardstick(self) -> Yardstick:
        """Return the metric by which evaluations are compared."""
        return parse_yardstick("eval.best", self.best)

    @property
    def train_tokens(self) -> int:
        """Return the number of tokens to evaluate in the train split."""
        return min(self.tokens or TRAIN_TOKENS, TRAIN_TOKENS)


@dataclass(frozen=True)
class SampleConfig(Section, prefix="sample.", resume="free"):
    """Samples generated during training."""

    every: int = option(
        1000,
        "Number of steps before the first samples are generated; if growth is 1, also between "
        "samples. 0: never.",
        at_least=0,
    )
    growth: float = option(
        1.0,
        "Factor by which the number of steps between samples grows each time, at least 1.",
        at_least=1,
    )
    prompts: tuple[str, ...] = option(
        ("",),
        "Prompts to complete. An empty prompt starts a new document. If a prompt contains the "
        "text of a special token, that token is used. On the command line, repeat the option for "
        "several prompts.",
    )
    num: int = option(
        1,
        "Number of samples per prompt and process.",
        above=0,
        at_most=2**16,
    )
    max_new_tokens: int = option(
        128,
        "Number of tokens to generate per sample.",
        above=0,
        at_most=2**24,
    )
    temperature: float = option(
        0.8,
        "Softmax temperature. 0: greedy decoding.",
        at_least=0,
    )
    top_k: int | None = option(
        50,
        "Sample from the k most likely tokens. null: from all.",
        above=0,
    )


@dataclass(frozen=True)
class CheckpointConfig(Section, prefix="checkpoint.", resume="free"):
    """When checkpoints are saved, which are kept, and how a run resumes."""

    every: int = option(
        1000,
        "Number of steps between checkpoints. 0: only by every_tokens and at the end.",
        at_least=0,
        essential=True,
    )
    every_tokens: int | None = option(
        None,
        "Number of tokens between checkpoints, in addition to every.",
        above=0,
    )
    keep_last: int = option(
        2,
        "Number of newest checkpoints to keep. If you keep only 1 and it is damaged, the run "
        "cannot resume. If the disk is full, fewer are kept.",
        above=0,
    )
    async_save: bool = option(
        False,
        "true: write weights and optimizer in the background, from a copy in memory (pinned on "
        "CUDA). false: training waits until they are written. In both cases, hashing and "
        "publishing run in the background, and only the next save waits for them.",
    )
    keep_best: bool = option(
        True,
        "Keep the checkpoint with the best eval.best. A new best value saves a checkpoint even if "
        "none is due.",
    )
    resume: str = option(
        "auto",
        "auto: resume from the newest checkpoint in out_dir. never: start a new run; if out_dir "
        "has checkpoints, this is an error. Folder of a checkpoint: resume from it if out_dir has "
        "no checkpoints. To resume from an older checkpoint of a run, also set another out_dir.",
        per_machine=True,
        path=True,
    )
    copy_to: str | None = option(
        None,
        "Folder on another disk, or URL that fsspec writes to, such as s3://bucket/run or "
        "hf://user/name. Each new checkpoint is copied there while training continues. If out_dir "
        "has no checkpoints, or the run went on elsewhere, it resumes from the newest copy. One "
        "launch at a time uses the folder. null: no copies, or the folder of CONFIG if that is a "
        "URL.",
        path=True,
    )
    allow_change: tuple[str, ...] = option(
        (),
        "Keys whose values may differ from the checkpoint's config when the run resumes. On the "
        "command line, repeat the option for several keys.",
    )


@dataclass(frozen=True)
class LogConfig(Section, prefix="log.", resume="free", per_machine=True):
    """Where metrics go."""

    every: int = option(
        10,
        "Number of steps between logged metrics.",
        above=0,
    )
    trackers: tuple[str, ...] = option(
        ("tensorboard",),
        "Trackers of Accelerate: tensorboard, wandb, trackio, ... On the command line, repeat the "
        "option for several trackers.",
        essential=True,
    )
    dashboard: bool = option(
        False,
        "Run TensorBoard on this machine while training, and print its address.",
    )
    price: float | None = option(
        None,
        "Price of a device hour on this machine, in any currency, for the report. null: unknown.",
        at_least=0,
    )

    def _check(self) -> None:
        require(
            not self.dashboard or "tensorboard" in self.trackers,
            f"log.dashboard is true but log.trackers has {', '.join(self.trackers) or 'nothing'}; "
            "add tensorboard to log.trackers",
        )


def check_repo(name: str, repo: str) -> None:
    """Raise `UserError` unless the option `name` is a repository user/name."""
    require(
        re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", repo, re.ASCII) is not None,
        f"{name} is {repo!r}; expected user/name",
    )


@dataclass(frozen=True)
class HubConfig(Section, prefix="hub.", resume="free"):
    """Uploads to the Hugging Face Hub during training; `accel-gpt push` uploads afterwards."""

    repo_id: str | None = option(
        None,
        "Repository on the Hub, as user/name. If it does not exist, it is created. Log in with "
        "`hf auth login`.",
    )
    push: Literal["never", "end", "every_checkpoint"] = option(
        "never",
        "When to upload the exported model, its card, metrics and curves, as one commit. end: at "
        "the end of the run. every_checkpoint: the newest checkpoint, whenever no other upload "
        "runs.",
    )
    private: bool = option(
        False,
        "Create the repository as private.",
    )

    def _check(self) -> None:
        require(
            self.push == "never" or self.repo_id is not None,
            f"hub.push is {self.push} but hub.repo_id is not set; set it to user/name",
        )
        if self.repo_id is not None:
            check_repo("hub.repo_id", self.repo_id)


# what a stage may change: what is read, the length of a sequence, and the batch
STAGE_KEYS = (
    "data.train",
    "model.block_size",
    "train.micro_batch_size",
    "train.tokens_per_step",
)


@dataclass(frozen=True)
class Stage:
    """Options that change while a run trains."""

    from_: int | float
    """The first step of the stage: a share of all steps below 1, or a number of completed steps."""
    options: Mapping[str, Any]
    """Dotted keys of `STAGE_KEYS`. They stay in force in later stages."""


@dataclass(frozen=True)
class Config(Section):
    """Train a GPT as CONFIG says: a YAML file, its URL, or the name of a shipped config.

    Each --section.key overrides a key of CONFIG. --help-all lists all keys. If CONFIG is a URL,
    such as s3://bucket/run/config.yaml, the run moves to any machine with it:
    checkpoint.copy_to is s3://bucket/run by default (docs/how-to/move.md).

    Examples:
      accel-gpt train quickstart
      accel-gpt train configs/gpt2_124m.yaml --out_dir runs/small --train.max_steps 1000
      accelerate launch accel_gpt/train.py gpt2_124m --train.micro_batch_size auto
    """

    out_dir: str = option(
        "runs/gpt",
        "Folder of the run: its config, metrics, samples and checkpoints.",
        essential=True,
        resume="free",
        per_machine=True,
        path=True,
    )
    seed: int = option(
        1337,
        "Seed of the initial weights, the data order and dropout.",
        essential=True,
        resume="refuse",
    )
    code: str | None = option(
        None,
        "Path of your Python file. Its functions replace parts of the run: model, optimizer, lr, "
        "loss, targets, shards, metrics, evaluated, evaluate, after_evaluation "
        "(docs/how-to/own-code.md). The file is executed, so no config file can set it. null: "
        "none.",
        essential=True,
        resume="ask",
        per_machine=True,
        command_line_only=True,
        path=True,
    )
    stages: tuple[Stage, ...] = option(
        (),
        "Stages of the run, a list of {from, key: value, ...}. from: a share of all steps below 1, "
        "such as 0.9, or a step. From there on, a stage sets data.train, model.block_size (the "
        "length of a sequence), train.micro_batch_size or train.tokens_per_step. At a resume, the "
        "stages that have made steps must be the same; others need checkpoint.allow_change "
        "(docs/how-to/stages.md).",
        resume="free",
    )
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    sample: SampleConfig = field(default_factory=SampleConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    hub: HubConfig = field(default_factory=HubConfig)
    own: OwnCode = internal(OwnCode())
    """The functions of the file `code`."""

    def _check(self) -> None:
        require(
            bool(self.out_dir.strip()),
            f"out_dir is {self.out_dir!r}; set it to the folder of the run",
        )
        follows = self.model.depth is not None and self.model.preset == "fast"
        require(
            follows or self.optim.lr_factor == 1,
            f"optim.lr_factor is {self.optim.lr_factor}, but no learning rate follows from it "
            "without model.depth and model.preset fast; set the learning rates instead",
        )
        require(
            self.schedule.min_lr <= self.optim.lr,
            f"schedule.min_lr is {self.schedule.min_lr}, above the peak optim.lr {self.optim.lr}; "
            "lower schedule.min_lr",
        )
        require(
            self.own.model is None or self.hub.push == "never",
            f"hub.push is {self.hub.push}, but the model() of {self.own.file} cannot be exported; "
            "set hub.push to never",
        )
