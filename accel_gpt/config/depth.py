"""Derive options from `model.depth`, if the config does not set them. No torch.

A depth is a size of one family of models: its layers, and 64 channels in one head for each layer.
The learning rates, the initial weights and the weight decay follow from width, depth, batch and
length by rules that keep the size of activations and of their changes the same. A value that is
good for a small model is then good for a large one. docs/explanation/fast.md has the rules as a
table, with their sources.

The reference is modded-nanogpt's track 3 (Jordan and others 2026, start 36): 12 layers of 768
channels, 3,250 steps of 2^19 tokens. There, the rules give its values with Muon.

Legend: C width, L layers, B tokens of a step, D tokens of the run, N parameters of blocks and head.
"""

import contextlib
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from accel_gpt.config.data import PrepareConfig, Weighted
from accel_gpt.config.model import PRESETS, ModelConfig
from accel_gpt.config.optim import OptimConfig
from accel_gpt.config.plan import in_steps
from accel_gpt.config.values import build, of_section
from accel_gpt.errors import require
from accel_gpt.files import read_json

HEAD_SIZE = 64  # channels of a head, and of the width for each layer; GPT-2
REFERENCE_DEPTH = 12  # the run at which the values below were found
REFERENCE_WIDTH = 768  # channels
REFERENCE_BATCH = 2**19  # tokens
REFERENCE_STEPS = 3250  # modded-nanogpt, track 3
TOKENS_PER_PARAMETER = 10.5  # D / N; nanochat dev/LOG.md, January 2026
BATCH_EXPONENT = 0.383  # Bergsma et al. 2025, arXiv 2505.13738: the best batch grows as D^0.383
LENGTH_EXPONENT = 1 / 3  # Bjorck et al. 2024, arXiv 2409.19913: the best rate falls as D^-0.32
MUON_LR = 0.025  # modded-nanogpt, track 3
MUON_DECAY = 0.05  # modded-nanogpt, track 3
MUON_HEAD_LR = 0.004  # modded-nanogpt, track 3
ADAMW_LR = 0.0012  # matrices of the blocks; benchmarks/notes/transfer.md
ADAMW_WIDTH_EXPONENT = 0.7  # their best rate falls as C^-0.7; benchmarks/notes/transfer.md
ADAMW_HEAD_LR = 0.002  # benchmarks/notes/transfer.md
EMBEDDING_LR = 0.7  # modded-nanogpt, track 3: for an initial standard deviation of 1
MOMENTUM_WARMUP = 300  # steps; at most a tenth of the run (assumption)
WARMUP = 40  # steps
COOLDOWN = 0.65  # share of the run
FLOOR = 0.05  # share of the peak learning rate
MICRO_BATCH = 16  # sequences, or the largest power of two below that divides the batch
KNOWN_VOCABULARIES: Mapping[str, int] = MappingProxyType({"gpt2": 50257, "bytes": 257})
KINDS: Mapping[str, Any] = MappingProxyType(
    {"model.preset": "fast", "optim.name": "muon", "schedule.name": "wsd"}
)
# Options of the optimizer that are the same at every depth
RECIPE: Mapping[str, Any] = MappingProxyType(
    {
        "optim.beta1": 0.8,
        "optim.beta2": 0.95,
        "optim.eps": 1e-10,
        "optim.weight_decay": 0.0,
        "optim.grad_clip": 0.0,
    }
)
MUON_RECIPE: Mapping[str, Any] = MappingProxyType(
    {
        "optim.muon_scale": "original",
        "optim.muon_cautious_decay": True,
    }
)


def depth_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that follow from `model.depth`, unless `config` sets them.

    Keys are dotted; null counts as not set. Raises `UserError` if `model.init_from` sets the shape.
    """
    start = config.get("model.init_from", "scratch")
    require(
        start == "scratch",
        f"model.depth is {config['model.depth']} but the weights of model.init_from {start} set "
        "the shape; leave model.depth out",
    )
    full = {**KINDS, **config}
    for key, value in PRESETS[full["model.preset"]].items():
        full.setdefault(f"model.{key}", value)
    given = {key: value for key, value in full.items() if value is not None}
    return {key: value for key, value in rules(given).items() if config.get(key) is None}


def rules(given: Mapping[str, Any]) -> dict[str, Any]:
    """Compute all options that follow from the depth and from the other options in `given`."""
    found: dict[str, Any] = dict(KINDS)

    def value(key: str) -> Any:
        return given.get(key, found.get(key))

    found |= shape_options(value)
    found |= batch_options(value, parameters(found | dict(given)))
    found |= schedule_options(value)
    if value("model.preset") == "fast":
        # sums over C channels are then of one size at every width (Yang et al. 2023, arXiv
        # 2310.17813, the spectral condition)
        spread = ModelConfig.init_std * math.sqrt(REFERENCE_WIDTH / value("model.n_embd"))
        found["model.init_std"] = rounded(spread)
        found |= optimizer_options(value)
    return found


def shape_options(value: Callable[[str], Any]) -> dict[str, Any]:
    """Compute the options of the shape."""
    depth = int(value("model.depth"))
    width = depth * HEAD_SIZE
    n_embd = value("model.n_embd") or width
    require(
        n_embd % HEAD_SIZE == 0,
        f"model.n_embd is {n_embd}, but with model.depth it is a multiple of {HEAD_SIZE}; leave it "
        "out, or leave model.depth out",
    )
    return {
        "model.n_layer": depth,
        "model.n_embd": width,
        "model.n_head": n_embd // HEAD_SIZE,
    }


class Parameters(NamedTuple):
    """N of a run, and of the reference with the same vocabulary and MLP."""

    run: int
    reference: int


def parameters(options: Mapping[str, Any]) -> Parameters:
    """Count the parameters N, from dotted options with the shape."""
    model = build(ModelConfig, of_section("model", options))
    reference = ModelConfig(
        mlp=model.mlp,
        n_embd=REFERENCE_WIDTH,
        n_head=REFERENCE_WIDTH // HEAD_SIZE,
        n_layer=REFERENCE_DEPTH,
    )
    vocab_size = implied_vocab_size(options)
    return Parameters(
        run=model.matrix_parameters(vocab_size),
        reference=reference.matrix_parameters(vocab_size),
    )


def batch_options(value: Callable[[str], Any], N: Parameters) -> dict[str, Any]:
    """Compute the options of batch and length."""
    block_size = value("model.block_size") or ModelConfig.block_size
    given = value("train.micro_batch_size")
    sequences = given if isinstance(given, int) else 1
    best = REFERENCE_BATCH * (N.run / N.reference) ** BATCH_EXPONENT
    doublings = max(0, round(math.log2(best / (block_size * sequences))))
    found: dict[str, Any] = {"train.tokens_per_step": block_size * sequences * 2**doublings}
    B = value("train.tokens_per_step") or found["train.tokens_per_step"]
    found["train.micro_batch_size"] = math.gcd(MICRO_BATCH, max(1, B // block_size))
    if not value("train.max_steps"):
        found["train.max_tokens"] = max(1, round(TOKENS_PER_PARAMETER * N.run / B)) * B
    return found


def schedule_options(value: Callable[[str], Any]) -> dict[str, Any]:
    """Compute the options of the schedule."""
    found: dict[str, Any] = {"schedule.warmup_steps": min(WARMUP, run_steps(value) // 10)}
    if value("schedule.name") == "wsd":
        found["schedule.decay_share"] = COOLDOWN
    return found


def run_steps(value: Callable[[str], Any]) -> int:
    """Compute the steps of a run from its options."""
    from_tokens = in_steps(value("train.max_tokens"), value("train.tokens_per_step"))
    return int(value("train.max_steps") or max(1, from_tokens))


class Factors(NamedTuple):
    """Factors on the learning rates and weight decay of the reference, by their causes."""

    batch: float
    length: float
    width: float
    depth: float
    chosen: float  # optim.lr_factor

    @property
    def run(self) -> float:
        """Factor on every learning rate."""
        return self.batch * self.length * self.chosen


def factors(value: Callable[[str], Any]) -> Factors:
    """Compute the factors on the learning rates of the reference, from the options of a run.

    - batch: sqrt(B) (Malladi et al. 2022, arXiv 2205.10287, for Adam; for Muon, nanochat assumes
      it).
    - length: 1 / D^(1/3) (Bjorck et al. 2024, arXiv 2409.19913).
    - width, for the head: 1 / C, as its updates add up over C channels (Yang et al. 2022, arXiv
      2203.03466, table 8). For the matrices of the blocks under AdamW: 1 / C^0.7, as measured
      (benchmarks/notes/transfer.md). It lies between 1 / C, for updates that add up, and
      1 / sqrt(C), for updates that add up like random numbers (Everett et al. 2024, arXiv
      2407.05872, "full alignment" and "no alignment"). The rates of Muon and of the embedding do
      not depend on C: they set the size of the update of a whole matrix or row (Yang et al. 2023,
      arXiv 2310.17813).
    - depth, for the projections onto the residual stream: 1 / sqrt(L), so that the sum of L blocks
      does not grow (Yang et al. 2023, arXiv 2310.02244).
    """
    B = value("train.tokens_per_step")
    return Factors(
        batch=math.sqrt(B / REFERENCE_BATCH),
        length=(REFERENCE_STEPS * REFERENCE_BATCH / (run_steps(value) * B)) ** LENGTH_EXPONENT,
        width=REFERENCE_WIDTH / value("model.n_embd"),
        depth=math.sqrt(REFERENCE_DEPTH / value("model.n_layer")),
        chosen=value("optim.lr_factor") or OptimConfig.lr_factor,
    )


def optimizer_options(value: Callable[[str], Any]) -> dict[str, Any]:
    """Compute the options of the optimizer in the `fast` recipe.

    The model normalizes the embedding, so its learning rate is relative to its initial standard
    deviation. The weight decay keeps the product of learning rate, weight decay and steps constant.
    Its inverse is the share of the run over which weights average their updates (Wang & Aitchison
    2024, arXiv 2405.13698).
    """
    by = factors(value)
    steps = run_steps(value)
    found = dict(RECIPE)
    found["optim.embedding_lr"] = rounded(EMBEDDING_LR * value("model.init_std") * by.run)
    found["optim.residual_lr_factor"] = rounded(by.depth)
    if value("optim.name") == "muon":
        found |= MUON_RECIPE
        found["optim.lr"] = rounded(MUON_HEAD_LR * by.run * by.width)
        scale = value("optim.muon_scale") or MUON_RECIPE["optim.muon_scale"]
        if scale == "original":
            found["optim.muon_lr"] = rounded(MUON_LR * by.run)
        decay = MUON_DECAY * REFERENCE_STEPS / steps / by.run
        found["optim.muon_weight_decay"] = rounded(decay)
        found["optim.muon_momentum_warmup"] = min(MOMENTUM_WARMUP, steps // 10)
    else:
        found["optim.lr"] = rounded(ADAMW_LR * by.run * by.width**ADAMW_WIDTH_EXPONENT)
        found["optim.head_lr"] = rounded(ADAMW_HEAD_LR * by.run * by.width)
    if value("schedule.name") != "constant":
        found["schedule.min_lr"] = rounded(FLOOR * (value("optim.lr") or found["optim.lr"]))
    return found


def rounded(number: float) -> float:
    """Round `number` to four significant digits."""
    return float(f"{number:.4g}")


def at_length(flat: Mapping[str, Any], steps: int) -> dict[str, Any]:
    """Compute the options of `optim` and `schedule` that follow from depth and length.

    `flat` is a resolved config by dotted keys, for a run of another length. Leaves out the options
    with another value than the rules give.
    """
    followed = set()
    for key, value in rules(flat).items():
        if key.startswith(("optim.", "schedule.")) and flat[key] == value:
            followed.add(key)
    given = {k: value for k, value in flat.items() if value is not None and k not in followed}
    given["train.max_steps"] = steps
    found = rules(given)
    return {key: found[key] for key in followed}


# --------------------------------------------------------------------------- the vocabulary


def implied_vocab_size(given: Mapping[str, Any]) -> int:
    """Return the vocabulary size that the config sets or implies.

    Raises `UserError` if the size is unknown.
    """
    tokenizer = given.get("data.tokenizer")
    if tokenizer is None and given.get("data.prepare.source"):
        tokenizer = given.get("data.prepare.tokenizer", PrepareConfig.tokenizer)
    trained = given.get("data.prepare.vocab_size", PrepareConfig.vocab_size)
    size = (
        given.get("model.vocab_size")
        or tokenizer_vocab_size(tokenizer, trained)
        or prepared_vocab_size(given.get("data.train"))
    )
    subject = f"the size of tokenizer {tokenizer}" if tokenizer else "its size"
    require(
        size is not None,
        f"the batch size follows from model.depth {given['model.depth']} and the vocabulary, but "
        f"{subject} is unknown; set model.vocab_size, or prepare the data first",
    )
    assert size is not None
    return int(size)


def tokenizer_vocab_size(name: str | None, trained: int) -> int | None:
    """Return the vocabulary size of the tokenizer `name`; None if the name is not enough.

    `trained` is the size of a bpe trained on the text.
    """
    if name == "bpe":
        return trained
    return KNOWN_VOCABULARIES.get(str(name))


def prepared_vocab_size(train: Any) -> int | None:
    """Return the vocabulary size of the first folder in `data.train`; None if unknown."""
    folder: Any = train
    if isinstance(train, tuple | list) and train:
        folder = train[0]
    if isinstance(folder, Mapping):
        folder = folder.get("path")
    elif isinstance(folder, Weighted):
        folder = folder.path
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        size = read_json(Path(folder) / "dataset.json")["vocab_size"]
        return size if type(size) is int and size > 0 else None
    return None
