"""Every option of an experiment with its unit and its checks, as frozen dataclasses. No torch.

`parse.py` fills them from a YAML file and the command line.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from accel_gpt.config.data import DataConfig, TextStream
from accel_gpt.config.model import ModelConfig
from accel_gpt.config.optim import OptimConfig
from accel_gpt.errors import at_most, duration, not_negative, positive, require

# names of nanoGPT and llm.c -> keys here, for the hint after an unknown key
NANOGPT_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "always_save_checkpoint": "checkpoint.every",
        "batch_size": "train.micro_batch_size",
        "dataset": "data.train",
        "dtype": "train.mixed_precision",
        "eval_interval": "eval.every",
        "eval_iters": "eval.tokens",
        "gradient_accumulation_steps": "train.tokens_per_step",
        "learning_rate": "optim.lr",
        "log_interval": "log.every",
        "lr_decay_iters": "schedule.decay_steps",
        "max_iters": "train.max_steps",
        "warmup_iters": "schedule.warmup_steps",
    }
)


@dataclass(frozen=True)
class TrainConfig:
    """Batch, length and numerics of the run."""

    tokens_per_step: int = 524_288
    """Tokens per optimizer update over all processes; accumulation is derived from it."""
    micro_batch_size: int | Literal["auto"] = 16
    """Sequences per process per micro-step; auto: the most that fit the memory, found at start."""
    max_steps: int | None = None
    """Optimizer updates in the run; set this or max_tokens."""
    max_tokens: int | None = None
    """Tokens in the run; set this or max_steps."""
    mixed_precision: Literal["auto", "no", "bf16", "fp16", "fp8"] | None = None
    """null: what the accelerate config of `accelerate launch` says, and no without one. auto: bf16
    where the device computes it faster, else no. fp8: products in torchao's float8, the rest in
    bf16; needs compute capability 8.9 and torchao."""
    matmul_precision: Literal["auto", "highest", "high", "medium"] = "auto"
    """float32 products: highest = IEEE, high = TF32, medium = bfloat16, where the device has it;
    auto: high on CUDA, highest elsewhere."""
    compile: bool | Literal["auto"] = False
    """torch.compile the model in place; what it makes is kept in ~/.cache/accel_gpt/compiled.
    auto: where a compiler works and the run is long enough to gain from it."""
    activation_checkpointing: Literal["none", "blocks"] = "none"
    """blocks: keep only what goes into each block and compute the rest again in the backward pass;
    by arithmetic a quarter to a third more work, for a fraction of the memory."""
    cpu_threads: int | None = None
    """Threads per process on a CPU; null: all cores, shared by the processes of the machine, or 1
    with reproducible, as kernels split their sums by threads."""
    reproducible: bool = False
    """Weights and losses the same to the last bit at any number of processes, on CPUs of one kind:
    sums in float64. Costs 8 bytes of memory per parameter and twice the all-reduce; without
    fp16, FSDP and train.compile."""
    max_skipped: int = 20
    """Updates in a row that may be skipped, loss or gradient not finite, before the run rolls back
    to the checkpoint before them and leaves those batches out; the second time there it ends."""
    spike_sigma: float = 6.0
    """Standard deviations above the mean of the last 128 losses that make a spike; 0: none."""
    skip_spikes: bool = False
    """Skip the update of a spike, as one that is not finite."""
    time_limit: str | None = None
    """Save and stop before a launch has taken so long, as 3h50m: the wall clock of a job."""
    profile: int = 0
    """Steps of each launch that PyTorch's profiler records, after three: traces and a table of
    operations in profile/ of the run; 0: none."""
    step_timeout: str | None = "30m"
    """End a process that completes nothing for so long, with the stacks of its threads; limit of
    each collective, too."""

    @property
    def known_size(self) -> tuple[str, ...]:
        """The name of micro_batch_size where it is a number."""
        return () if self.micro_batch_size == "auto" else ("micro_batch_size",)

    @property
    def sequences(self) -> int:
        """micro_batch_size as a number: 1 where it is auto and not found yet."""
        return 1 if self.micro_batch_size == "auto" else self.micro_batch_size

    def __post_init__(self) -> None:
        positive("train", self, "max_skipped")
        not_negative("train", self, "spike_sigma", "profile")
        for name in ("time_limit", "step_timeout"):
            duration(f"train.{name}", getattr(self, name))
        positive("train", self, "tokens_per_step", *self.known_size)
        positive("train", self, "max_steps", "max_tokens", "cpu_threads")
        at_most("train", self, 4096, "cpu_threads")
        at_most("train", self, 2**24, "micro_batch_size")
        require(
            self.max_steps is None or self.max_tokens is None,
            f"train.max_steps is {self.max_steps} and train.max_tokens is {self.max_tokens}; "
            "set one of the two",
        )
        require(
            not (self.reproducible and self.compile is True),
            "train.reproducible and train.compile are both true, but each number of processes "
            "compiles other kernels; set one of the two",
        )


@dataclass(frozen=True)
class ScheduleConfig:
    """The learning rate as a function of the step."""

    name: Literal["cosine", "wsd", "linear", "constant"] = "cosine"
    """wsd: warm-up, stable, then a linear decay at the end."""
    warmup_steps: int = 0
    """Steps from 0 to the peak."""
    warmup_tokens: int | None = None
    """The same in tokens, in place of warmup_steps."""
    decay_steps: int | None = None
    """Steps of the decay to min_lr; null: all that follow the warm-up (wsd: a fifth)."""
    decay_tokens: int | None = None
    """The same in tokens, in place of decay_steps."""
    decay_share: float | None = None
    """The same as a share of all steps, 0 to 1, in place of decay_steps."""
    min_lr: float = 0.0
    """Learning rate at the end of the decay."""

    def __post_init__(self) -> None:
        not_negative("schedule", self, "warmup_steps", "min_lr")
        positive("schedule", self, "warmup_tokens", "decay_steps", "decay_tokens")
        positive("schedule", self, "decay_share")
        require(
            (self.decay_share or 0) <= 1,
            f"schedule.decay_share is {self.decay_share}; it is a share of the run, at most 1",
        )
        require(
            not (self.decay_share and (self.decay_steps or self.decay_tokens)),
            f"schedule.decay_share is {self.decay_share} and schedule.decay_steps or decay_tokens "
            "is set, too; set one of them",
        )
        for what in ("warmup", "decay"):
            steps, tokens = getattr(self, f"{what}_steps"), getattr(self, f"{what}_tokens")
            require(
                not (steps and tokens),
                f"schedule.{what}_steps is {steps} and schedule.{what}_tokens is {tokens}; "
                "set one of the two",
            )


@dataclass(frozen=True)
class EvalConfig:
    """Loss on fixed tokens of both splits, and questions."""

    every: int = 500
    """Steps between evaluations; 0: only at the end."""
    tokens: int | None = 1_048_576
    """Tokens of each split, and of each named val set, the same ones every time; null: all."""
    whole_at_end: bool = False
    """At the last step also log eval/whole_val_loss, over the whole val split."""
    only: bool = False
    """Train nothing: evaluate the newest checkpoint of out_dir, else model.init_from, and end."""
    hellaswag: str | None = None
    """HellaSwag in the loop: a JSONL file in the original format, or a Hub data set, as
    Rowan/hellaswag; null: not."""
    hellaswag_limit: int | None = None
    """Its first questions alone; null: all."""

    def __post_init__(self) -> None:
        not_negative("eval", self, "every")
        positive("eval", self, "tokens", "hellaswag_limit")
        require(
            not self.whole_at_end or self.tokens is not None,
            "eval.whole_at_end is true but eval.tokens is null, which evaluates the whole split "
            "every time; set one of the two",
        )


@dataclass(frozen=True)
class SampleConfig:
    """Text written during training."""

    every: int = 1000
    """Steps until the first samples; 0: never."""
    growth: float = 1.0
    """Factor on the interval after each sampling, at least 1."""
    prompts: tuple[str, ...] = ("",)
    """Texts to continue; an empty one starts a new document."""
    num: int = 1
    """Samples per prompt and process."""
    max_new_tokens: int = 128
    """Tokens per sample."""
    temperature: float = 0.8
    """0: greedy."""
    top_k: int | None = 50
    """Tokens to choose from; null: all."""
    top_p: float = 1.0
    """Probability mass to choose from."""

    def __post_init__(self) -> None:
        not_negative("sample", self, "every", "temperature")
        positive("sample", self, "num", "max_new_tokens", "top_k")
        at_most("sample", self, 2**16, "num")
        at_most("sample", self, 2**24, "max_new_tokens")
        require(0 < self.top_p <= 1, f"sample.top_p is {self.top_p}; it must lie in (0, 1]")
        require(self.growth >= 1, f"sample.growth is {self.growth}; it must be 1 (regular) or more")


@dataclass(frozen=True)
class CheckpointConfig:
    """What is kept, and how a run continues."""

    every: int = 1000
    """Steps between checkpoints; 0: by tokens or at the end only."""
    every_tokens: int | None = None
    """Tokens between checkpoints, besides every."""
    keep_last: int = 2
    """Newest checkpoints to keep; of one alone nothing is left when it is damaged."""
    async_save: bool = False
    """Training goes on while files are written, too, from a copy in memory (pinned on CUDA)."""
    keep_best: bool = True
    """Also save and keep the checkpoint with the lowest val loss."""
    resume: str = "auto"
    """auto: resume from the newest checkpoint of out_dir; never; or a checkpoint to resume from if
    out_dir has none: its folder, or hf://user/name@step-1000, pushed with hub.include_state."""
    allow_change: tuple[str, ...] = ()
    """Keys that may differ from the checkpoint's config, separated by commas."""

    def __post_init__(self) -> None:
        not_negative("checkpoint", self, "every")
        positive("checkpoint", self, "every_tokens", "keep_last")


@dataclass(frozen=True)
class LogConfig:
    """Where metrics go."""

    every: int = 10
    """Steps between lines of metrics."""
    trackers: tuple[str, ...] = ("tensorboard",)
    """Accelerate's names, separated by commas: tensorboard, wandb, trackio, ..."""
    level: Literal["info", "warning"] = "info"
    """warning: print warnings and errors only; files and trackers get all metrics."""
    dashboard: bool = False
    """Serve the curves with TensorBoard on this machine while training, and print the address."""
    dashboard_port: int | None = None
    """Port of the dashboard; null: a free one."""
    batch_hash: bool = False
    """Also log data/batch_hash: a fingerprint of the tokens of each step, the same at any number of
    processes."""
    layer_stats_every: int = 0
    """Steps between statistics of each layer (norms, activations, entropy of attention, dead
    units), which go to the trackers alone; 0: never. That step holds a second copy of the weights
    for a moment, and one more forward pass."""

    def __post_init__(self) -> None:
        positive("log", self, "every")
        not_negative("log", self, "layer_stats_every")
        require(
            not self.layer_stats_every or bool(self.trackers),
            f"log.layer_stats_every is {self.layer_stats_every} but log.trackers is empty, where "
            "its metrics would go; add tensorboard, or set it to 0",
        )
        require(
            not self.dashboard or "tensorboard" in self.trackers,
            f"log.dashboard is true but log.trackers has {', '.join(self.trackers) or 'nothing'}; "
            "add tensorboard, whose curves it shows",
        )
        require(
            self.dashboard_port is None or 0 < self.dashboard_port < 2**16,
            f"log.dashboard_port is {self.dashboard_port}; it must lie between 1 and 65535",
        )


@dataclass(frozen=True)
class HubConfig:
    """What goes to the Hugging Face Hub during training; `accel-gpt push` does it afterwards."""

    repo_id: str | None = None
    """Repository, user/name; made if it is missing. Log in with hf auth login."""
    push: Literal["never", "end", "every_checkpoint"] = "never"
    """When to upload: the exported model, its card, metrics and curves, as one commit."""
    private: bool = False
    """Make the repository a private one."""
    include_state: bool = False
    """Upload whole checkpoints, so that a run goes on from hf://user/name@step-1000 elsewhere."""
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Of the exported weights."""
    license: str | None = None
    """Of the weights, as the Hub spells it: apache-2.0, mit, cc-by-4.0, ..."""
    data_license: str | None = None
    """Of the data, for the model card."""

    def __post_init__(self) -> None:
        require(
            self.push == "never" or self.repo_id is not None,
            f"hub.push is {self.push} but hub.repo_id is not set; set it to user/name",
        )
        require(
            self.repo_id is None or bool(re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", self.repo_id)),
            f"hub.repo_id is {self.repo_id!r}; expected user/name",
        )


@dataclass(frozen=True)
class Config:
    """One experiment: a YAML file of sections, each key settable as --section.key value."""

    out_dir: str = "runs/gpt"
    """Folder of the run: config, metrics, samples, checkpoints."""
    seed: int = 1337
    """Of the initial weights, the data order and dropout."""
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

    def __post_init__(self) -> None:
        require(bool(self.out_dir.strip()), f"out_dir is {self.out_dir!r}; name the run's folder")
        require(
            self.schedule.min_lr <= self.optim.lr,
            f"schedule.min_lr is {self.schedule.min_lr}, above the peak optim.lr {self.optim.lr}",
        )
        require(
            not (self.train.reproducible and isinstance(self.data.train, TextStream)),
            "train.reproducible is true but data.train streams text, which each number of "
            "processes divides in another way; prepare the text once with accel-gpt prepare",
        )
