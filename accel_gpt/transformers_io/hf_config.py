"""Convert the shape of a model between transformers' config.json and the fields of `ModelConfig`.

For each preset there is a class of transformers that computes the same. A Mistral model is read as
a Llama model. Needs no torch.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import msgspec

from accel_gpt.config.model import LLAMA3_TURNS, PRESETS, ModelConfig
from accel_gpt.errors import UserError, require

HF_CLASSES = MappingProxyType(
    {
        "gpt2": "GPT2LMHeadModel",
        "llama": "LlamaForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
        "fast": "NanoChatForCausalLM",
    }
)
MODEL_TYPES = MappingProxyType(
    {"gpt2": "gpt2", "llama": "llama", "mistral": "llama", "qwen3": "qwen3", "nanochat": "fast"}
)
ACTIVATIONS = MappingProxyType(
    {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu": "gelu_erf", "relu2": "relu2"}
)
# fields that a preset determines, besides `bias` and `logit_softcap`, which some classes can vary
STRUCTURE = ("position", "norm", "norm_weight", "qk_norm", "embedding_norm", "mlp")
FIELDS = (  # our field; its name in the config.json of GPT-2 ("": it has none), and of the others
    ("n_layer", "n_layer", "num_hidden_layers"),
    ("n_head", "n_head", "num_attention_heads"),
    ("n_kv_head", "", "num_key_value_heads"),
    ("n_embd", "n_embd", "hidden_size"),
    ("block_size", "n_positions", "max_position_embeddings"),
    ("vocab_size", "vocab_size", "vocab_size"),
    ("mlp_hidden", "n_inner", "intermediate_size"),
    ("norm_eps", "layer_norm_epsilon", "rms_norm_eps"),
    ("tie_embeddings", "tie_word_embeddings", "tie_word_embeddings"),
    ("init_std", "initializer_range", "initializer_range"),
)
ROPE_BASE = ("rope_theta", "rope_theta")  # ours, theirs
ROPE_TYPES = MappingProxyType(
    {
        "default": (ROPE_BASE,),
        "llama3": (
            ROPE_BASE,
            ("rope_factor", "factor"),
            ("rope_original_block_size", "original_max_position_embeddings"),
        ),
    }
)
ROPE_FIXED = MappingProxyType(  # what our model computes, and no other value
    {"llama3": {"low_freq_factor": LLAMA3_TURNS[0], "high_freq_factor": LLAMA3_TURNS[1]}}
)


@dataclass(frozen=True)
class GPT2Settings:
    """The fields of a GPT2Config that are read."""

    n_layer: int
    n_head: int
    n_embd: int
    n_positions: int
    vocab_size: int
    n_inner: int | None
    layer_norm_epsilon: float
    tie_word_embeddings: bool
    initializer_range: float
    activation_function: str
    add_cross_attention: bool
    scale_attn_weights: bool
    scale_attn_by_inverse_layer_idx: bool


@dataclass(frozen=True)
class RopeParameters:
    """The rotary embedding in a config of transformers."""

    rope_type: str = "default"
    rope_theta: float = 10000.0
    factor: float | None = None
    original_max_position_embeddings: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    partial_rotary_factor: float | None = None


@dataclass(frozen=True)
class RopeSettings:
    """The fields of a LlamaConfig, MistralConfig, Qwen3Config or NanoChatConfig that are read."""

    num_hidden_layers: int
    num_attention_heads: int
    hidden_size: int
    max_position_embeddings: int
    vocab_size: int
    intermediate_size: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    initializer_range: float
    hidden_act: str
    num_key_value_heads: int | None = None
    rope_parameters: RopeParameters = field(default_factory=RopeParameters)
    head_dim: int | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = None
    final_logit_softcapping: float | None = None


def field_names(preset: str) -> Iterator[tuple[str, str]]:
    """Yield our fields that the class of `preset` has, each with its name in config.json."""
    for ours, of_gpt2, of_others in FIELDS:
        theirs = of_gpt2 if preset == "gpt2" else of_others
        if theirs:
            yield ours, theirs


def structure(preset: str) -> dict[str, Any]:
    """Return the fields of a preset that `STRUCTURE` names, with `bias` and `logit_softcap`."""
    config = ModelConfig(**PRESETS[preset])
    return {key: getattr(config, key) for key in (*STRUCTURE, "bias", "logit_softcap")}


def last_line(error: Exception) -> str:
    """Return the last line of an error of transformers: the reason."""
    lines = str(error).strip().splitlines()
    return lines[-1].strip() if lines else type(error).__name__


# --------------------------------------------------------------------------- transformers -> ours


def read_hf_config(content: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Convert the content of a config.json to fields of `ModelConfig`, with `vocab_size`.

    `name` is the name of the model in errors. Raises `UserError` for a damaged config, and for a
    class or setting that our model does not compute.
    """
    model_type = str(content.get("model_type"))
    if model_type not in MODEL_TYPES:
        found = (content.get("architectures") or [f"model of type {model_type}"])[0]
        raise UserError(
            f"{name} is a {found}; the supported classes are "
            f"{', '.join(HF_CLASSES.values())} and MistralForCausalLM"
        )
    require(
        not content.get("quantization_config"),
        f"{name} is quantized; give a model with weights in float32, bfloat16 or float16",
    )
    preset = MODEL_TYPES[model_type]
    settings = read_settings(content, model_type, name)
    fields = structure(preset) | {"preset": preset}
    for ours, theirs in field_names(preset):
        fields[ours] = getattr(settings, theirs)
    fields["init_std"] = fields["init_std"] or ModelConfig.init_std
    if isinstance(settings, GPT2Settings):
        return fields | read_gpt2(settings, name)
    return fields | read_rope(settings, name, preset)


def read_settings(
    content: Mapping[str, Any], model_type: str, name: str
) -> GPT2Settings | RopeSettings:
    """Read the fields of a config.json, with the defaults of its class in transformers.

    Raises `UserError` if transformers rejects the config, or if a field has the wrong type.
    """
    from transformers import CONFIG_MAPPING

    kind: Any = GPT2Settings if model_type == "gpt2" else RopeSettings
    try:
        settings = CONFIG_MAPPING[model_type].from_dict(dict(content)).to_dict()
        settings["rope_parameters"] = settings.get("rope_parameters") or {}
        found: GPT2Settings | RopeSettings = msgspec.convert(settings, kind)
    except Exception as error:  # validators of transformers raise any class
        raise UserError(f"config.json of {name} is not valid: {last_line(error)}") from None
    return found


def require_one_of(name: str, key: str, value: Any, *allowed: Any) -> None:
    """Raise `UserError` if a setting has a value that our model does not compute."""
    choices = " or ".join(map(str, allowed))
    require(value in allowed, f"{name} has {key} {value}; only {choices} is supported")


def read_gpt2(settings: GPT2Settings, name: str) -> dict[str, Any]:
    """Return the fields that differ from the preset."""
    scaled = settings.scale_attn_by_inverse_layer_idx
    require_one_of(name, "add_cross_attention", settings.add_cross_attention, False)
    require_one_of(name, "scale_attn_weights", settings.scale_attn_weights, True)
    require_one_of(name, "scale_attn_by_inverse_layer_idx", scaled, False)
    require_one_of(name, "activation_function", settings.activation_function, *ACTIVATIONS)
    return {"mlp": ACTIVATIONS[settings.activation_function]}


def read_rope(settings: RopeSettings, name: str, preset: str) -> dict[str, Any]:
    """Return the fields that differ from the preset."""
    rope = settings.rope_parameters
    require_one_of(name, "hidden_act", settings.hidden_act, "relu2" if preset == "fast" else "silu")
    # Qwen3 and NanoChat never have biases in the MLP
    require_one_of(name, "attention_bias", settings.attention_bias, settings.mlp_bias)
    require_one_of(name, "rope_type", rope.rope_type, *ROPE_TYPES)
    require_one_of(name, "partial_rotary_factor", rope.partial_rotary_factor, None, 1.0)
    for key, value in ROPE_FIXED.get(rope.rope_type, {}).items():
        require_one_of(name, key, getattr(rope, key), None, value)
    kind = "default" if rope.factor == 1 else rope.rope_type  # a factor of 1 scales nothing
    head_dim = settings.head_dim
    if head_dim and head_dim * settings.num_attention_heads == settings.hidden_size:
        head_dim = None  # as n_embd / n_head
    fields: dict[str, Any] = {
        "bias": settings.attention_bias,
        "head_dim": head_dim,
        "logit_softcap": settings.final_logit_softcapping,
        "rope_scaling": "none" if kind == "default" else kind,
    }
    if settings.sliding_window:  # within the window, attention is full attention
        fields["block_size"] = min(settings.max_position_embeddings, settings.sliding_window)
    for ours, theirs in ROPE_TYPES[kind]:
        value = getattr(rope, theirs)
        if value is not None:
            fields[ours] = value if ours == "rope_original_block_size" else float(value)
    return fields


# --------------------------------------------------------------------------- ours -> transformers


def matching_preset(config: ModelConfig) -> str:
    """Return the preset whose class in `HF_CLASSES` computes a model of this shape.

    If there is none, raises `UserError`, which says what the nearest class needs.
    """
    unmet = {preset: unmet_needs(config, preset) for preset in HF_CLASSES}
    nearest = min(unmet, key=lambda preset: len(unmet[preset]))
    require(
        not unmet[nearest],
        f"no class of transformers computes this shape; the nearest, {HF_CLASSES[nearest]}, needs "
        + ", ".join(unmet[nearest]),
    )
    return nearest


def unmet_needs(config: ModelConfig, preset: str) -> list[str]:
    """Return what must change in a shape for the class of a preset to compute it."""
    found = structure(preset)
    needs: dict[str, tuple[Any, ...]] = {key: (found[key],) for key in STRUCTURE}
    if preset == "gpt2":
        needs["mlp"] = tuple(dict.fromkeys(ACTIVATIONS.values()))
    if preset in ("qwen3", "fast"):
        needs["bias"] = (False,)
    if preset != "fast":
        needs["logit_softcap"] = (None,)
    unmet = [
        f"model.{key} {' or '.join(map(str, allowed))}"
        for key, allowed in needs.items()
        if getattr(config, key) not in allowed
    ]
    if preset == "gpt2" and config.kv_heads != config.n_head:
        unmet.append("model.n_kv_head null")
    if preset == "gpt2" and config.head_size * config.n_head != config.n_embd:
        unmet.append("model.head_dim null")
    return unmet


def write_hf_config(
    config: ModelConfig, vocab_size: int, eot_id: int | None, dtype: str
) -> dict[str, Any]:
    """Return the content of config.json for a model of this shape over `vocab_size` tokens.

    Raises `UserError` if no class of transformers computes it.
    """
    from transformers import CONFIG_MAPPING

    preset = matching_preset(config)
    resolved = {
        "n_kv_head": config.kv_heads,
        "mlp_hidden": config.hidden_size,
        "vocab_size": vocab_size,
    }
    fields: dict[str, Any] = {
        "architectures": [HF_CLASSES[preset]],
        "dtype": dtype,
        "bos_token_id": eot_id,
        "eos_token_id": eot_id,
        "pad_token_id": None,
    }
    for ours, theirs in field_names(preset):
        fields[theirs] = resolved.get(ours, getattr(config, ours))
    fields |= gpt2_arguments(config) if preset == "gpt2" else rope_arguments(config, preset)
    hf_config = CONFIG_MAPPING["nanochat" if preset == "fast" else preset](**fields)
    content: dict[str, Any] = hf_config.to_diff_dict()
    content["torch_dtype"] = dtype  # for transformers 4, as rope_theta and rope_scaling are
    if rope := content.get("rope_parameters"):
        content["rope_theta"] = rope["rope_theta"]
        if rope["rope_type"] != "default":
            content["rope_scaling"] = rope
    return content


def gpt2_arguments(config: ModelConfig) -> dict[str, Any]:
    """Return the arguments of GPT2Config that `FIELDS` does not list."""
    activation = next(name for name, mlp in ACTIVATIONS.items() if mlp == config.mlp)
    return {
        "n_ctx": config.block_size,  # an old name; the converter of llama.cpp needs it
        "activation_function": activation,
        "resid_pdrop": config.dropout,
        "embd_pdrop": config.dropout,
        "attn_pdrop": config.dropout,
    }


def rope_arguments(config: ModelConfig, preset: str) -> dict[str, Any]:
    """Return the arguments of the class of `preset` that `FIELDS` does not list."""
    kind = "default" if config.rope_scaling == "none" else config.rope_scaling
    rope: dict[str, Any] = {"rope_type": kind, **ROPE_FIXED.get(kind, {})}
    for ours, theirs in ROPE_TYPES[kind]:
        value = getattr(config, ours)
        if value is not None:
            rope[theirs] = value
    arguments: dict[str, Any] = {
        "hidden_act": "relu2" if preset == "fast" else "silu",
        "attention_dropout": config.dropout,
        "attention_bias": config.bias,
        "head_dim": config.head_size,
        "rope_parameters": rope,
    }
    if preset == "llama":
        arguments["mlp_bias"] = config.bias
    if preset == "fast":
        arguments["final_logit_softcapping"] = config.logit_softcap
    return arguments
