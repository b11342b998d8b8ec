"""Derive options from `model.depth`, if the config does not set them. No torch.

The rules and reference values come from nanochat (Karpathy 2025-26, scripts/base_train.py) and
modded-nanogpt's track 3 (Jordan and others 2026, start 36). docs/explanation/fast.md shows them as
a table. They were found at the reference: depth 12 and batches of 2^19 tokens.

Legend: N parameters of blocks and head, D tokens of the run, B tokens of a step.
"""

import contextlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from accel_gpt.config.data import PrepareConfig, Weighted
from accel_gpt.config.model import PRESETS, ModelConfig
from accel_gpt.errors import require
from accel_gpt.files import read_json

HEAD_DIM = 128  # channels of a head; nanochat
CHANNELS_PER_LAYER = 64  # nanochat
REFERENCE_DEPTH = 12  # the size at which nanochat and modded-nanogpt found these values
REFERENCE_WIDTH = 768  # channels
REFERENCE_BATCH = 2**19  # tokens
TOKENS_PER_PARAMETER = 10.5  # D / N; nanochat dev/LOG.md, January 2026
BATCH_EXPONENT = 0.383  # Bergsma et al. 2025, arXiv 2505.13738: the best batch grows as D^0.383
MUON_LR = 0.025  # modded-nanogpt, track 3
MUON_DECAY = 0.05  # modded-nanogpt, track 3
EMBEDDING_LR = 0.7  # modded-nanogpt, track 3: for an initial standard deviation of 1
HEAD_LR = 0.004  # modded-nanogpt, track 3
MOMENTUM_WARMUP = 300  # steps; at most a tenth of the run (assumption)
WARMUP = 40  # steps
COOLDOWN = 0.65  # share of the run
FLOOR = 0.05  # share of the peak learning rate
MICRO_BATCH = 16  # sequences, unless a step has fewer
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
        "optim.muon_scale": "original",
        "optim.muon_cautious_decay": True,
    }
)
KNOWN_VOCABULARIES: Mapping[str, int] = MappingProxyType({"gpt2": 50257, "bytes": 257})


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
    depth = int(given["model.depth"])
    found: dict[str, Any] = dict(KINDS)

    def value(key: str) -> Any:
        return given.get(key, found.get(key))

    found["model.n_layer"] = depth
    found["model.n_embd"] = width(depth)
    found["model.n_head"] = max(1, value("model.n_embd") // HEAD_DIM)
    shape = {}
    for key, item in (found | dict(given)).items():
        section, _, name = key.partition(".")
        if section == "model":
            shape[name] = item
    model = ModelConfig(**shape)
    reference = ModelConfig(
        mlp=model.mlp,
        n_embd=REFERENCE_WIDTH,
        n_head=REFERENCE_WIDTH // HEAD_DIM,
        n_layer=REFERENCE_DEPTH,
    )
    vocab_size = vocabulary(given)
    N = scaling_parameters(model, vocab_size)
    ratio = N / scaling_parameters(reference, vocab_size)
    tokens = TOKENS_PER_PARAMETER * N
    found["train.tokens_per_step"] = 2 ** round(math.log2(REFERENCE_BATCH * ratio**BATCH_EXPONENT))
    B = value("train.tokens_per_step")
    block_size = value("model.block_size") or ModelConfig.block_size
    found["train.micro_batch_size"] = max(1, min(MICRO_BATCH, B // block_size))
    steps = value("train.max_steps") or max(1, round(tokens / B))
    if not value("train.max_steps"):
        found["train.max_tokens"] = steps * B
        steps = max(1, -(-value("train.max_tokens") // B))
    decay_is_set = value("schedule.decay_steps") or value("schedule.decay_tokens")
    if value("schedule.name") == "wsd" and not decay_is_set:
        found["schedule.decay_share"] = COOLDOWN
    if not value("schedule.warmup_tokens"):
        found["schedule.warmup_steps"] = min(WARMUP, steps // 10)
    if value("model.preset") == "fast" and value("optim.name") == "muon":
        found |= learning_rates(value, B, ratio, steps)
    return found


def width(depth: int) -> int:
    """Compute the channels (n_embd) at a depth, rounded up to whole heads."""
    return -(-depth * CHANNELS_PER_LAYER // HEAD_DIM) * HEAD_DIM


def learning_rates(value: Any, B: int, ratio: float, steps: int) -> dict[str, Any]:
    """Compute the options of the optimizer in the `fast` recipe.

    `ratio` is N divided by N of the reference. It is also the ratio of D, as D / N is constant.

    All learning rates grow with the square root of B (Malladi et al. 2022 for Adam; for Muon,
    nanochat assumes it). The learning rates of AdamW also shrink with the square root of the width.
    The weight decay of Muon keeps B / (lr decay D) constant. This is the number of epochs over
    which weights average their updates (Wang & Aitchison 2024, arXiv 2405.13698). The model
    normalizes the embedding, so its learning rate is relative to its initial standard deviation.
    """
    by_batch = math.sqrt(B / REFERENCE_BATCH)
    by_width = math.sqrt(REFERENCE_WIDTH / value("model.n_embd"))
    found = dict(RECIPE)
    found["optim.lr"] = rounded(HEAD_LR * by_batch * by_width)
    init_std = value("model.init_std") or ModelConfig.init_std
    found["optim.embedding_lr"] = rounded(EMBEDDING_LR * init_std * by_batch * by_width)
    if (value("optim.muon_scale") or RECIPE["optim.muon_scale"]) == "original":
        found["optim.muon_lr"] = rounded(MUON_LR * by_batch)
    found["optim.muon_weight_decay"] = rounded(MUON_DECAY * by_batch / ratio)
    found["optim.muon_momentum_warmup"] = min(MOMENTUM_WARMUP, steps // 10)
    found["schedule.min_lr"] = rounded(FLOOR * (value("optim.lr") or found["optim.lr"]))
    return found


def rounded(number: float) -> float:
    """Round `number` to four significant digits."""
    return float(f"{number:.4g}")


def scaling_parameters(model: ModelConfig, vocab_size: int) -> int:
    """Compute N: the parameters of the matrices of the blocks, and of the head, tied or not.

    Scaling laws fit best in this count (nanochat dev/LOG.md, January 2026).
    """
    heads = (2 * model.n_head + 2 * model.kv_heads) * model.head_size
    mlp = (3 if model.mlp == "swiglu" else 2) * model.hidden_size
    return model.n_embd * (model.n_layer * (heads + mlp) + vocab_size)


def vocabulary(given: Mapping[str, Any]) -> int:
    """Return the vocabulary size that the config sets or implies.

    Raises `UserError` if the size is unknown.
    """
    tokenizer = given.get("data.tokenizer")
    if tokenizer is None and given.get("data.prepare.source"):
        tokenizer = given.get("data.prepare.tokenizer", PrepareConfig.tokenizer)
    trained = given.get("data.prepare.vocab_size", PrepareConfig.vocab_size)
    size = (
        given.get("model.vocab_size")
        or tokenizer_vocabulary(tokenizer, trained)
        or prepared_vocabulary(given.get("data.train"))
        or file_vocabulary(str(tokenizer))
    )
    subject = f"the size of tokenizer {tokenizer}" if tokenizer else "its size"
    require(
        size is not None,
        f"the batch size follows from model.depth {given['model.depth']} and the vocabulary, but "
        f"{subject} is unknown; set model.vocab_size",
    )
    return int(size or 0)


def tokenizer_vocabulary(name: str | None, trained: int) -> int | None:
    """Return the vocabulary size of the tokenizer `name`; None if the name is not enough.

    `trained` is the size of a bpe trained on the text.
    """
    if name == "bpe":
        return trained
    return KNOWN_VOCABULARIES.get(str(name))


def file_vocabulary(name: str) -> int | None:
    """Return the vocabulary size of a tokenizer.json; None if there is none.

    `name` is a file, a folder, or a Hub id that is in the local cache.
    """
    path: Any = Path(name, "tokenizer.json") if Path(name).is_dir() else name
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
        if not Path(name).exists() and "/" in name:
            from huggingface_hub import try_to_load_from_cache

            repo, _, revision = name.removeprefix("hf://").partition("@")
            path = try_to_load_from_cache(repo, "tokenizer.json", revision=revision or None)
        content = read_json(Path(path))
        known = content["model"]["vocab"]
        ids = known.values() if isinstance(known, dict) else range(len(known))
        return int(max([*ids, *(token["id"] for token in content["added_tokens"])])) + 1
    return None


def prepared_vocabulary(train: Any) -> int | None:
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


def describe_depth(flat: Mapping[str, Any]) -> Sequence[str]:
    """List which options follow from the depth and which are overridden, one line a section.

    `flat` is a resolved config by dotted keys. Returns no lines if `model.depth` is null.
    """
    if flat.get("model.depth") is None:
        return []
    derived = rules(flat)
    followed: dict[str, list[str]] = {}  # section -> options with the derived value
    overridden: dict[str, list[str]] = {}  # section -> options with another value
    for key in sorted(derived):
        section, _, name = key.partition(".")
        followed.setdefault(section, [])
        overridden.setdefault(section, [])
        found = followed if flat[key] == derived[key] else overridden
        found[section].append(f"{name} {format_value(flat[key])}")
    lines = []
    for section, settings in followed.items():
        line = f"depth {flat['model.depth']} sets {section}: {', '.join(settings) or 'nothing'}"
        if overridden[section]:
            line += f"; overridden: {', '.join(overridden[section])}"
        lines.append(line)
    return lines


def format_value(value: Any) -> str:
    """Format a value as in YAML, and a float with six digits."""
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)
