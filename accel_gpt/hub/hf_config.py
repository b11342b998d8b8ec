"""Model shapes as transformers has them: config.json -> `ModelConfig` fields, and back.

Four classes of transformers compute what our model computes, one for each preset; a Mistral model
is a Llama model in all but its name. Needs no torch.
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from accel_gpt.config.model import PRESETS, ModelConfig
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
# what a preset determines, besides `bias` and `logit_softcap`, which some classes can vary
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
ROPE_LINEAR = (("rope_theta", "rope_theta"), ("rope_factor", "factor"))  # likewise
ROPE_LONG = (*ROPE_LINEAR, ("rope_original_block_size", "original_max_position_embeddings"))
ROPE_TYPES = MappingProxyType(
    {
        "default": ROPE_LINEAR[:1],
        "linear": ROPE_LINEAR,
        "llama3": (
            *ROPE_LONG,
            ("rope_low_freq_factor", "low_freq_factor"),
            ("rope_high_freq_factor", "high_freq_factor"),
        ),
        "yarn": (
            *ROPE_LONG,
            ("rope_beta_fast", "beta_fast"),
            ("rope_beta_slow", "beta_slow"),
            ("rope_attention_factor", "attention_factor"),
        ),
    }
)


def field_names(preset: str) -> Iterator[tuple[str, str]]:
    """Yield our fields that the class of `preset` has, each with its name in config.json."""
    for ours, of_gpt2, of_others in FIELDS:
        if theirs := of_gpt2 if preset == "gpt2" else of_others:
            yield ours, theirs


def structure(preset: str) -> dict[str, Any]:
    """Return the fields of a preset that `STRUCTURE` names, with `bias` and `logit_softcap`."""
    config = ModelConfig(**PRESETS[preset])
    return {key: getattr(config, key) for key in (*STRUCTURE, "bias", "logit_softcap")}


def last_line(error: Exception) -> str:
    """Return the reason that an error of transformers' strict dataclasses ends with."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()


# --------------------------------------------------------------------------- transformers -> ours


def read_hf_config(content: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Convert the content of a config.json to fields of `ModelConfig`, `vocab_size` among them.

    `name`: of the model, for errors. Raises `UserError` for a class or setting that our model does
    not compute.
    """
    model_type = str(content.get("model_type"))
    if model_type not in MODEL_TYPES:
        found = (content.get("architectures") or [f"model of type {model_type}"])[0]
        raise UserError(
            f"{name} is a {found}; the classes that can be loaded are "
            f"{', '.join(HF_CLASSES.values())} and MistralForCausalLM"
        )
    require(
        not content.get("quantization_config"),
        f"{name} is quantized; weights in float32, bfloat16 or float16 can be loaded",
    )
    from transformers import CONFIG_MAPPING

    preset = MODEL_TYPES[model_type]
    try:
        settings = CONFIG_MAPPING[model_type].from_dict(dict(content)).to_dict()
        fields = structure(preset) | {"preset": preset}
        fields |= {ours: settings[theirs] for ours, theirs in field_names(preset)}
        fields["init_std"] = fields["init_std"] or ModelConfig.init_std
        return fields | (read_gpt2 if preset == "gpt2" else read_rope)(settings, name)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"config.json of {name} is not valid: {last_line(error)}") from None


def require_one_of(name: str, settings: Mapping[str, Any], key: str, *allowed: Any) -> None:
    """Raise `UserError` if a setting has a value that our model does not compute."""
    value = settings.get(key, allowed[0])
    choices = " or ".join(map(str, allowed))
    require(value in allowed, f"{name} has {key} {value}, which is not implemented; only {choices}")


def read_gpt2(settings: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the fields of a GPT2Config that differ from those of the preset."""
    require_one_of(name, settings, "add_cross_attention", False)
    require_one_of(name, settings, "scale_attn_weights", True)
    require_one_of(name, settings, "scale_attn_by_inverse_layer_idx", False)
    require_one_of(name, settings, "activation_function", *ACTIVATIONS)
    return {"mlp": ACTIVATIONS[settings["activation_function"]]}


def read_rope(settings: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the fields of a LlamaConfig, MistralConfig, Qwen3Config or NanoChatConfig that differ
    from those of the preset.
    """
    fast = settings["model_type"] == "nanochat"
    require_one_of(name, settings, "hidden_act", "relu2" if fast else "silu")
    # Qwen3 and NanoChat never have biases in the MLP
    require_one_of(name, settings, "attention_bias", bool(settings.get("mlp_bias")))
    rope = {"rope_type": "default", "rope_theta": 10000.0} | (settings["rope_parameters"] or {})
    require_one_of(name, rope, "rope_type", *ROPE_TYPES)
    require_one_of(name, rope, "partial_rotary_factor", None, 1.0)
    require_one_of(name, rope, "truncate", True)
    require_one_of(name, rope, "mscale_all_dim", None)
    kind, head_dim = rope["rope_type"], settings.get("head_dim")
    if head_dim and head_dim * settings["num_attention_heads"] == settings["hidden_size"]:
        head_dim = None
    positions = settings["max_position_embeddings"]
    return {
        # within a sliding window, attention is full attention
        "block_size": min(positions, settings.get("sliding_window") or positions),
        "head_dim": head_dim,
        "bias": bool(settings.get("attention_bias")),
        "logit_softcap": settings["final_logit_softcapping"] if fast else None,
        "rope_scaling": "none" if kind == "default" else kind,
        **{
            ours: (int if ours == "rope_original_block_size" else float)(rope[theirs])
            for ours, theirs in ROPE_TYPES[kind]
            if rope.get(theirs) is not None
        },
    }


# --------------------------------------------------------------------------- ours -> transformers


def matching_preset(config: ModelConfig) -> str:
    """Return the preset whose class in `HF_CLASSES` computes a model of this shape.

    Raises `UserError` if there is none, with what the nearest class needs.
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
    fields = {t: resolved.get(ours, getattr(config, ours)) for ours, t in field_names(preset)}
    fields |= write_gpt2(config) if preset == "gpt2" else write_rope(config, preset)
    fields |= {"architectures": [HF_CLASSES[preset]], "dtype": dtype}
    fields |= {"bos_token_id": eot_id, "eos_token_id": eot_id, "pad_token_id": None}
    try:
        hf_config = CONFIG_MAPPING["nanochat" if preset == "fast" else preset](**fields)
    except Exception as error:
        raise UserError(f"{HF_CLASSES[preset]} refuses this shape: {last_line(error)}") from None
    content: dict[str, Any] = hf_config.to_diff_dict()
    content["torch_dtype"] = dtype  # transformers 4 reads this name, and the two of rope below
    if rope := content.get("rope_parameters"):
        content["rope_theta"] = rope["rope_theta"]
        if rope["rope_type"] != "default":
            content["rope_scaling"] = rope
    return content


def write_gpt2(config: ModelConfig) -> dict[str, Any]:
    """Return the arguments of GPT2Config that have no field of the same meaning in ours."""
    return {
        "n_ctx": config.block_size,  # an old name; the converter of llama.cpp needs it
        "activation_function": next(k for k, v in ACTIVATIONS.items() if v == config.mlp),
        "resid_pdrop": config.dropout,
        "embd_pdrop": config.dropout,
        "attn_pdrop": config.dropout,
    }


def write_rope(config: ModelConfig, preset: str) -> dict[str, Any]:
    """Return those arguments of LlamaConfig, Qwen3Config or NanoChatConfig."""
    kind = "default" if config.rope_scaling == "none" else config.rope_scaling
    rope = {theirs: getattr(config, ours) for ours, theirs in ROPE_TYPES[kind]}
    arguments: dict[str, Any] = {
        "hidden_act": "relu2" if preset == "fast" else "silu",
        "attention_dropout": config.dropout,
        "attention_bias": config.bias,
        "head_dim": config.head_size,
        "rope_parameters": {"rope_type": kind, **{k: v for k, v in rope.items() if v is not None}},
    }
    if preset == "llama":
        arguments["mlp_bias"] = config.bias
    if preset == "fast":
        arguments["final_logit_softcapping"] = config.logit_softcap
    return arguments
