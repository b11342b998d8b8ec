"""Every option of an experiment with its unit and its checks, as frozen dataclasses. No torch.

`parse.py` fills them from a YAML file and the command line.
"""

import re
from dataclasses import dataclass, field
from typing import Annotated, Literal

from accel_gpt.config.checks import NotNegative, Positive, Section, Share, at_most, duration
from accel_gpt.config.data import DataConfig, TextStream
from accel_gpt.config.model import ModelConfig
from accel_gpt.config.optim import OptimConfig
from accel_gpt.errors import require

# keys that `accel-gpt train --help` shows; --help-all shows every key
ESSENTIAL = (
    *("out_dir", "data.train", "data.text", "data.prepare.source"),
    *("data.prepare.tokenizer", "data.prepare.vocab_size"),
    *("model.preset", "model.depth", "model.init_from", "model.n_layer", "model.n_head"),
    *("model.n_embd", "model.block_size", "train.tokens_per_step", "train.micro_batch_size"),
    *("train.max_steps", "train.mixed_precision", "train.compile", "optim.lr", "eval.every"),
)


@dataclass(frozen=True)
class TrainConfig(Section, prefix="train.", exclusive=(("max_steps", "max_tokens"),)):
    """Batch size, length and numerics of the run."""

    tokens_per_step: Positive[int] = 524_288
    """Tokens per optimizer step, summed over all processes. The number of accumulated micro-batches
    follows from it."""
    micro_batch_size: Annotated[Positive[int | Literal["auto"]], at_most(2**24)] = 16
    """Sequences per process in one micro-batch. auto: the largest that fits in memory, found at the
    start."""
    max_steps: Positive[int | None] = None
    """Number of optimizer steps in the run. Set this or max_tokens."""
    max_tokens: Positive[int | None] = None
    """Number of tokens in the run. Set this or max_steps. For N epochs: N times the train tokens,
    which the first lines of a run print."""
    stop_at: Positive[int | None] = None
    """Step after which this launch evaluates, saves and stops; a later launch without it continues
    to the end of the run, on the same schedule. null: the last step of the run."""
    mixed_precision: Literal["auto", "no", "bf16", "fp16", "fp8"] | None = None
    """null: the value in the config file of `accelerate launch`, or no without one. no: float32.
    auto: bf16 where the device is faster in it, else no. fp8: matrix products in torchao's float8,
    the rest in bf16; needs compute capability 8.9 and torchao."""
    matmul_precision: Literal["auto", "highest", "high", "medium"] = "auto"
    """How float32 matrix products are computed: highest is IEEE float32, high is TF32, medium is
    bfloat16, where the device has it. auto: high on CUDA, highest elsewhere."""
    compile: bool | Literal["auto"] = False
    """Compile the model with torch.compile. Compiled code is cached in ~/.cache/accel_gpt/compiled.
    auto: compile where a compiler works and the run is long enough to gain from it."""
    activation_checkpointing: Literal["none", "blocks"] = "none"
    """blocks: store only the input of each block and recompute the rest in the backward pass. Takes
    a quarter to a third more computation and a fraction of the memory."""
    sync_each_batch: bool = False
    """Reduce gradients after every micro-batch. Under FSDP no rank then holds those of the whole
    model, 4 bytes a parameter; costs a reduce-scatter more per micro-batch."""
    cpu_threads: Annotated[Positive[int | None], at_most(4096)] = None
    """Threads per process on a CPU. null: OMP_NUM_THREADS if you set it, else all cores, divided
    among the processes of the machine. With reproducible 1, since kernels split their sums by
    threads."""
    reproducible: bool = False
    """Make weights and losses bit-identical at any number of processes, on CPUs of one kind, by
    summing gradients in float64. Costs 8 bytes of memory per parameter and twice the all-reduce
    traffic. Not with fp16, FSDP or train.compile."""
    max_skipped: Positive[int] = 20
    """Number of steps in a row that may be skipped because the loss or gradient is not finite.
    After that the run rolls back to the checkpoint before them and leaves those batches out. The
    second time at the same place, the run ends."""
    spike_sigma: NotNegative[float] = 6.0
    """A loss this many standard deviations above the mean of the last 128 losses is reported as a
    spike. 0: never."""
    skip_spikes: bool = False
    """Skip the update of a step whose loss is a spike."""
    time_limit: str | None = None
    """Wall-clock limit of one launch, as 3h50m. The run saves and stops before it is reached."""
    profile: NotNegative[int] = 0
    """Number of steps of each launch that PyTorch's profiler records, after the first three. The
    trace of each process goes to profile/ in the run's folder, on CUDA with a snapshot of the
    memory. 0: none."""
    step_timeout: str | None = "30m"
    """End a process that completes nothing for this long, and print the stacks of its threads. The
    time that all processes are paused does not count, up to a day."""
    init_timeout: str | None = "15m"
    """The same for each stage before the first step: meeting the other processes, starting the
    device, opening data, model and checkpoint. Preparing the data may take any time."""

    @property
    def sequences(self) -> int:
        """micro_batch_size as a number: 1 where it is auto and not found yet."""
        return 1 if self.micro_batch_size == "auto" else self.micro_batch_size

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("time_limit", "step_timeout", "init_timeout"):
            duration(f"train.{name}", getattr(self, name))
        require(
            not (self.reproducible and self.compile is True),
            "train.reproducible and train.compile are both true, but each number of processes "
            "compiles other kernels; set one of the two",
        )


@dataclass(frozen=True)
class ScheduleConfig(
    Section,
    prefix="schedule.",
    exclusive=(("warmup_steps", "warmup_tokens"), ("decay_steps", "decay_tokens", "decay_share")),
):
    """The learning rate as a function of the step."""

    name: Literal["cosine", "wsd", "linear", "constant"] = "cosine"
    """Shape of the decay. wsd: warm-up, stable, then a linear decay at the end."""
    warmup_steps: NotNegative[int] = 0
    """Number of steps in which the learning rate rises linearly from 0 to its peak."""
    warmup_tokens: Positive[int | None] = None
    """Length of the warm-up in tokens, in place of warmup_steps."""
    decay_steps: Positive[int | None] = None
    """Number of steps of the decay, after which the learning rate is min_lr. null: all steps after
    the warm-up (wsd: the last fifth of the run)."""
    decay_tokens: Positive[int | None] = None
    """Length of the decay in tokens, in place of decay_steps."""
    decay_share: Share[float | None] = None
    """Length of the decay as a share of all steps, 0 to 1, in place of decay_steps."""
    min_lr: NotNegative[float] = 0.0
    """Learning rate after the last step of the decay. That step itself has a little more, as the
    first step of the decay has the peak."""


@dataclass(frozen=True)
class EvalConfig(Section, prefix="eval."):
    """Validation loss on fixed tokens, HellaSwag, tasks of lm-evaluation-harness."""

    every: NotNegative[int] = 500
    """Number of steps between evaluations. 0: only at the end."""
    tokens: Positive[int | None] = 1_048_576
    """Number of tokens to evaluate in each split and each named val set, the same ones every time.
    null: all."""
    whole_at_end: bool = False
    """Also compute eval/whole_val_loss over the whole val split at the last step."""
    only: bool = False
    """Do not train: evaluate the newest checkpoint of out_dir, or model.init_from if there is none,
    and exit."""
    hellaswag: str | None = None
    """Evaluate HellaSwag during training, from a JSONL file in the original format or a Hub dataset
    such as Rowan/hellaswag. null: do not."""
    hellaswag_limit: Positive[int | None] = None
    """Number of HellaSwag questions to use, from the first. null: all."""
    tasks: tuple[str, ...] = ()
    """Evaluate tasks of lm-evaluation-harness during training, such as arc_easy; needs lm-eval."""
    tasks_every: NotNegative[int] = 0
    """Number of steps between evaluations of tasks, a multiple of every. 0: only at the end."""
    tasks_limit: Positive[int | None] = None
    """Number of questions of each task to use, from the first. null: all."""
    tasks_path: str | None = None
    """Folder with YAML files of more tasks."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            not self.tasks_every or (bool(self.every) and self.tasks_every % self.every == 0),
            f"eval.tasks_every is {self.tasks_every} and eval.every {self.every}; tasks are "
            "evaluated with the val loss, so set the first to a multiple of the second",
        )
        require(
            not self.whole_at_end or self.tokens is not None,
            "eval.whole_at_end is true but eval.tokens is null, which evaluates the whole split "
            "every time; set one of the two",
        )


@dataclass(frozen=True)
class SampleConfig(Section, prefix="sample."):
    """Samples generated during training."""

    every: NotNegative[int] = 1000
    """Number of steps before the first samples are generated. 0: never."""
    growth: float = 1.0
    """Factor by which the interval grows after each sampling, at least 1."""
    prompts: tuple[str, ...] = ("",)
    """Prompts to complete. An empty prompt starts a new document."""
    num: Annotated[Positive[int], at_most(2**16)] = 1
    """Number of samples per prompt and process."""
    max_new_tokens: Annotated[Positive[int], at_most(2**24)] = 128
    """Number of tokens to generate per sample."""
    temperature: NotNegative[float] = 0.8
    """Softmax temperature. 0: greedy decoding."""
    top_k: Positive[int | None] = 50
    """Sample from the k most likely tokens. null: from all."""
    top_p: Share[float] = 1.0
    """Sample from the most likely tokens whose probabilities sum to top_p."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.growth >= 1, "growth", "it must be 1 (regular) or more")


@dataclass(frozen=True)
class CheckpointConfig(Section, prefix="checkpoint."):
    """When checkpoints are saved, which are kept, and how a run resumes."""

    every: NotNegative[int] = 1000
    """Number of steps between checkpoints. 0: only by every_tokens and at the end."""
    every_tokens: Positive[int | None] = None
    """Number of tokens between checkpoints, in addition to every."""
    keep_last: Positive[int] = 2
    """Number of newest checkpoints to keep. With only one, nothing is left to resume from if it is
    damaged. A disk that has no room for so many keeps fewer."""
    async_save: bool = False
    """Write checkpoints in the background, from a copy in memory (pinned on CUDA), while training
    continues."""
    keep_best: bool = True
    """Also save and keep the checkpoint with the lowest val loss."""
    resume: str = "auto"
    """auto: resume from the newest checkpoint in out_dir. never: start anew. Or a checkpoint to
    resume from if out_dir has none: its folder, or hf://user/name@step-1000, pushed with
    hub.include_state. An older checkpoint of out_dir itself is refused: set another out_dir."""
    copy_to: str | None = None
    """Folder on another disk, or URL that fsspec writes to, such as s3://bucket/run or
    hf://user/name. Each new checkpoint is copied there while training continues. A run without
    checkpoints of its own resumes from there."""
    allow_change: tuple[str, ...] = ()
    """Config keys that may differ from those of the checkpoint, separated by commas."""


@dataclass(frozen=True)
class LogConfig(Section, prefix="log."):
    """Where metrics go."""

    every: Positive[int] = 10
    """Number of steps between logged metrics."""
    trackers: tuple[str, ...] = ("tensorboard",)
    """Trackers of Accelerate, separated by commas: tensorboard, wandb, trackio, ..."""
    level: Literal["info", "warning"] = "info"
    """warning: print only warnings and errors. Files and trackers still get all metrics."""
    dashboard: bool = False
    """Run TensorBoard on this machine while training, and print its address."""
    batch_hash: bool = False
    """Also log data/batch_hash, a hash of the tokens of each step, the same at any number of
    processes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            not self.dashboard or "tensorboard" in self.trackers,
            f"log.dashboard is true but log.trackers has {', '.join(self.trackers) or 'nothing'}; "
            "add tensorboard, whose curves it shows",
        )


@dataclass(frozen=True)
class HubConfig(Section, prefix="hub."):
    """Uploads to the Hugging Face Hub during training; `accel-gpt push` uploads afterwards."""

    repo_id: str | None = None
    """Repository on the Hub, user/name, created if it does not exist. Log in with `hf auth
    login`."""
    push: Literal["never", "end", "every_checkpoint"] = "never"
    """When to upload the exported model, its card, metrics and curves, as one commit."""
    private: bool = False
    """Create the repository as private."""
    include_state: bool = False
    """Also upload the whole checkpoint, so that the run can be resumed elsewhere from
    hf://user/name@step-1000."""
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Data type of the exported weights."""
    license: str | None = None
    """Licence of the weights, by its identifier on the Hub: apache-2.0, mit, cc-by-4.0, ..."""
    data_license: str | None = None
    """Licence of the data, for the model card."""

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
class Config(Section):
    """Train a GPT as CONFIG says: a YAML file, or the name of a shipped config, as quickstart.

    Any key can be set over it as --section.key value. --help-all lists all keys;
    --dump_config writes them all as a YAML file. --smoke tries the config: four steps, with
    evaluation, samples, checkpoints and resuming, in a temporary folder. Examples:
      accel-gpt train quickstart
      accel-gpt train configs/gpt2_124m.yaml --out_dir runs/small --train.max_steps 1000
      accelerate launch accel_gpt/train.py gpt2_124m --train.mixed_precision bf16
    """

    out_dir: str = "runs/gpt"
    """Folder of the run: its config, metrics, samples and checkpoints."""
    seed: int = 1337
    """Seed of the initial weights, the data order and dropout."""
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
            not self.out_dir.startswith("-"),
            f"out_dir is {self.out_dir}, which commands read as an option; choose a name that does "
            "not begin with -",
        )
        require(
            self.schedule.min_lr <= self.optim.lr,
            f"schedule.min_lr is {self.schedule.min_lr}, above the peak optim.lr {self.optim.lr}",
        )
        require(
            not (self.train.reproducible and isinstance(self.data.train, TextStream)),
            "train.reproducible is true but data.train streams text, which each number of "
            "processes divides in another way; prepare the text once with accel-gpt prepare",
        )
