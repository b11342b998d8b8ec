"""Convert the shape of a model between transformers' config.json and the fields of `ModelConfig`.

For each preset there is a class of transformers that computes the same. A Mistral model is read as
a Llama model. A shape is converted if nothing that matters differs after it was converted to the
other side and back. Needs no torch.
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from accel_gpt.config.model import LLAMA3_CONTEXT, LLAMA3_TURNS, PRESETS, ModelConfig
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
ACTIVATIONS = MappingProxyType(  # of GPT-2
    {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu": "gelu_erf", "relu2": "relu2"}
)
# fields that a preset determines
STRUCTURE = ("position", "norm", "qk_norm", "mlp", "bias")
FIELDS = (  # our field; its name in the config.json of GPT-2 ("": it has none), and of the others
    ("n_layer", "n_layer", "num_hidden_layers"),
    ("n_head", "n_head", "num_attention_heads"),
    ("n_kv_head", "", "num_key_value_heads"),
    ("n_embd", "n_embd", "hidden_size"),
    ("head_dim", "", "head_dim"),
    ("block_size", "n_positions", "max_position_embeddings"),
    ("vocab_size", "vocab_size", "vocab_size"),
    ("mlp_hidden", "n_inner", "intermediate_size"),
    ("norm_eps", "layer_norm_epsilon", "rms_norm_eps"),
    ("tie_embeddings", "tie_word_embeddings", "tie_word_embeddings"),
    ("init_std", "initializer_range", "initializer_range"),
)
# settings of transformers that may differ from those that our model is converted to: they change no
# logits, or `fields_of` limits the context so that they change none
FREE = (
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "use_cache",
    "pretraining_tp",
    "resid_pdrop",
    "embd_pdrop",
    "attn_pdrop",
    "attention_dropout",
    "initializer_range",
    "summary_type",
    "summary_use_proj",
    "summary_activation",
    "summary_proj_to_labels",
    "summary_first_dropout",
    "reorder_and_upcast_attn",
    "max_position_embeddings",
    "sliding_window",
    "use_sliding_window",
    "max_window_layers",
    "layer_types",
)


def field_names(preset: str) -> Iterator[tuple[str, str]]:
    """Yield our fields that the class of `preset` has, each with its name in config.json."""
    for ours, of_gpt2, of_others in FIELDS:
        theirs = of_gpt2 if preset == "gpt2" else of_others
        if theirs:
            yield ours, theirs


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
    from transformers import CONFIG_MAPPING

    model_type = str(content.get("model_type"))
    if model_type not in MODEL_TYPES:
        found = (content.get("architectures") or [f"model of type {model_type}"])[0]
        raise UserError(
            f"{name} is a {found}; the supported classes are "
            f"{', '.join(HF_CLASSES.values())} and MistralForCausalLM"
        )
    preset = MODEL_TYPES[model_type]
    try:
        theirs = CONFIG_MAPPING[model_type].from_dict(dict(content))
        fields = fields_of(theirs, preset)
        again = to_hf_config(msgspec.convert(fields, ModelConfig), preset)
    except Exception as error:  # validators of transformers raise any class
        raise UserError(f"config.json of {name} is not valid: {last_line(error)}") from None
    computed = dict(settings_of(again))
    for key, value in settings_of(theirs):
        ours = computed.get(key)
        if value != ours and value is not None:
            raise UserError(f"{name} has {key} {value}; only {ours} is supported")
    return fields


def fields_of(theirs: Any, preset: str) -> dict[str, Any]:
    """Return the fields of `ModelConfig` for a config of the class of `preset`.

    A setting that our model lacks is left out.
    """
    ours = ModelConfig(**PRESETS[preset])
    fields = {"preset": preset, **{key: getattr(ours, key) for key in STRUCTURE}}
    for field, key in field_names(preset):
        fields[field] = getattr(theirs, key, None)  # NanoChat may have no head_dim
    fields["init_std"] = fields["init_std"] or ModelConfig.init_std
    fields["logit_softcap"] = getattr(theirs, "final_logit_softcapping", None)
    if preset == "gpt2":
        return fields | {"mlp": ACTIVATIONS.get(theirs.activation_function, "gelu")}
    if preset == "llama":
        fields["bias"] = getattr(theirs, "attention_bias", False)  # Mistral has none
    if (fields["head_dim"] or 0) * theirs.num_attention_heads == theirs.hidden_size:
        fields["head_dim"] = None  # as n_embd / n_head
    window = getattr(theirs, "sliding_window", None)
    if window:  # within the window, attention is full attention
        fields["block_size"] = min(theirs.max_position_embeddings, window)
    rope = theirs.rope_parameters
    factor = float(rope["factor"]) if rope["rope_type"] == "llama3" else 1.0
    return fields | {"rope_theta": float(rope["rope_theta"]), "rope_factor": factor}


def settings_of(theirs: Any) -> Iterator[tuple[str, Any]]:
    """Yield the settings of a config of transformers that change what its class computes."""
    from transformers import PretrainedConfig

    free = {*PretrainedConfig().to_dict(), *FREE}
    for key, value in type(theirs)().to_dict().items():
        if key in free:
            continue
        value = getattr(theirs, key)
        if key == "rope_parameters":  # `type` is an old name of `rope_type`
            yield from ((name, item) for name, item in value.items() if name != "type")
        elif key in ("activation_function", "hidden_act"):
            yield key, ACTIVATIONS.get(value, value)  # two names of the same function
        else:
            yield key, value


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
    shape = vars(config) | {
        "n_kv_head": config.kv_heads,
        "head_dim": config.head_size,
        "mlp_hidden": config.hidden_size,
        "preset": preset,
    }
    try:
        fields = fields_of(to_hf_config(config, preset), preset)
    except Exception as error:  # validators of transformers raise any class
        return [f"another shape ({last_line(error)})"]
    fields["n_kv_head"] = fields.get("n_kv_head") or config.n_head
    fields["head_dim"] = fields.get("head_dim") or config.n_embd / config.n_head
    if preset == "gpt2":
        fields["bias"] = config.bias  # an export has biases of zero
    del fields["vocab_size"]
    return [f"model.{key} {value}" for key, value in fields.items() if value != shape[key]]


def write_hf_config(
    config: ModelConfig, vocab_size: int, eot_id: int | None, dtype: str
) -> dict[str, Any]:
    """Return the content of config.json for a model of this shape over `vocab_size` tokens.

    Raises `UserError` if no class of transformers computes it.
    """
    preset = matching_preset(config)
    hf_config = to_hf_config(
        config,
        preset,
        architectures=[HF_CLASSES[preset]],
        dtype=dtype,
        bos_token_id=eot_id,
        eos_token_id=eot_id,
        pad_token_id=None,
        vocab_size=vocab_size,
    )
    content: dict[str, Any] = hf_config.to_diff_dict()
    content["torch_dtype"] = dtype  # for transformers 4, as rope_theta and rope_scaling are
    if rope := content.get("rope_parameters"):
        content["rope_theta"] = rope["rope_theta"]
        if rope["rope_type"] != "default":
            content["rope_scaling"] = rope
    return content


def to_hf_config(config: ModelConfig, preset: str, **more: Any) -> Any:
    """Return the config of the class of `preset` that is nearest to a shape.

    `more`: further arguments of the class.
    """
    from transformers import CONFIG_MAPPING

    given = {theirs: getattr(config, ours) for ours, theirs in field_names(preset)}
    fields = {key: value for key, value in given.items() if value is not None}
    if preset == "gpt2":
        fields |= gpt2_arguments(config)
    else:
        fields |= rope_arguments(config, preset)
    return CONFIG_MAPPING["nanochat" if preset == "fast" else preset](**fields | more)


def gpt2_arguments(config: ModelConfig) -> dict[str, Any]:
    """Return the arguments of GPT2Config that `FIELDS` does not list or leaves to be derived."""
    names = {mlp: name for name, mlp in reversed(tuple(ACTIVATIONS.items()))}
    return {
        "n_ctx": config.block_size,  # an old name; the converter of llama.cpp needs it
        "n_inner": config.hidden_size,
        "activation_function": names.get(config.mlp, "gelu_new"),
        "resid_pdrop": config.dropout,
        "embd_pdrop": config.dropout,
        "attn_pdrop": config.dropout,
    }


def rope_arguments(config: ModelConfig, preset: str) -> dict[str, Any]:
    """Return the arguments of the other classes that `FIELDS` does not list or leaves open."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_factor != 1:
        rope["rope_type"] = "llama3"
        rope["factor"] = config.rope_factor
        rope["original_max_position_embeddings"] = LLAMA3_CONTEXT
        rope["low_freq_factor"], rope["high_freq_factor"] = LLAMA3_TURNS
    arguments: dict[str, Any] = {
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_size,
        "intermediate_size": config.hidden_size,
        "hidden_act": "relu2" if preset == "fast" else "silu",
        "attention_dropout": config.dropout,
        "rope_parameters": rope,
    }
    if preset == "llama":
        arguments["attention_bias"] = config.bias
        arguments["mlp_bias"] = config.bias
    if preset == "fast":
        arguments["final_logit_softcapping"] = config.logit_softcap
    return arguments
