"""The shapes of transformers' classes: config.json -> `ModelConfig` fields, and back. No weights.

Four classes compute what a shape of ours computes, one for each preset; Mistral's files are
Llama's in all but name.
"""

import types
from collections.abc import Mapping
from typing import Any

from accel_gpt.config.model import ModelConfig
from accel_gpt.errors import UserError, require

CLASSES: Mapping[str, str] = types.MappingProxyType(
    {
        "gpt2": "GPT2LMHeadModel",
        "llama": "LlamaForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
        "fast": "NanoChatForCausalLM",
    }
)
MODEL_TYPES: Mapping[str, str] = types.MappingProxyType(
    {"gpt2": "gpt2", "llama": "llama", "mistral": "llama", "qwen3": "qwen3", "nanochat": "fast"}
)
ACTIVATIONS: Mapping[str, str] = types.MappingProxyType(
    {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu": "gelu_erf", "relu2": "relu2"}
)
# what a shape must have for the class of a preset to compute the same
NEEDS: Mapping[str, Mapping[str, Any]] = types.MappingProxyType(
    {
        "gpt2": {
            "position": "learned",
            "norm": "layernorm",
            "norm_weight": True,
            "qk_norm": False,
            "embedding_norm": False,
            "logit_softcap": None,
            "mlp": ("gelu", "gelu_erf", "relu2"),
        },
        "llama": {
            "position": "rope",
            "norm": "rmsnorm",
            "norm_weight": True,
            "qk_norm": False,
            "embedding_norm": False,
            "logit_softcap": None,
            "mlp": "swiglu",
        },
        "qwen3": {
            "position": "rope",
            "norm": "rmsnorm",
            "norm_weight": True,
            "qk_norm": True,
            "embedding_norm": False,
            "logit_softcap": None,
            "mlp": "swiglu",
            "bias": False,
        },
        "fast": {
            "position": "rope",
            "norm": "rmsnorm",
            "norm_weight": False,
            "qk_norm": True,
            "embedding_norm": True,
            "mlp": "relu2",
            "bias": False,
        },
    }
)


# --------------------------------------------------------------------------- theirs -> ours


def read_shape(content: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The fields of `ModelConfig`, `vocab_size` among them, of a config.json.

    Raises `UserError` for a class or a setting that our model does not compute, by its name.
    """
    kind = str(content.get("model_type"))
    if kind not in MODEL_TYPES:
        found = (content.get("architectures") or [f"model of type {kind}"])[0]
        raise UserError(
            f"{where} is a {found}; the classes that can be loaded are "
            f"{', '.join(CLASSES.values())} and MistralForCausalLM"
        )
    require(
        not content.get("quantization_config"),
        f"{where} is quantized; weights in float32, bfloat16 or float16 can be loaded",
    )
    from transformers import CONFIG_MAPPING

    try:
        theirs = CONFIG_MAPPING[kind].from_dict(dict(content))
        preset = MODEL_TYPES[kind]
        fields = gpt2_fields(theirs, where) if preset == "gpt2" else rope_fields(theirs, where)
    except UserError:
        raise
    except Exception as error:  # the strict dataclasses of transformers have errors of their own
        said = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(f"config.json of {where} is not valid: {said[-1].strip()}") from None
    return {"preset": preset, **fields}


def need(where: str, theirs: Any, key: str, *allowed: Any) -> None:
    """Refuse a setting of theirs that has a value which our model does not compute."""
    value = getattr(theirs, key, allowed[0])
    spoken = " or ".join(map(str, allowed))
    require(value in allowed, f"{where} has {key} {value}, which is not implemented; only {spoken}")


def gpt2_fields(theirs: Any, where: str) -> dict[str, Any]:
    """The shape of a GPT2Config."""
    need(where, theirs, "add_cross_attention", False)
    need(where, theirs, "scale_attn_weights", True)
    need(where, theirs, "scale_attn_by_inverse_layer_idx", False)
    need(where, theirs, "activation_function", *ACTIVATIONS)
    return {
        "n_layer": theirs.n_layer,
        "n_head": theirs.n_head,
        "n_embd": theirs.n_embd,
        "block_size": theirs.n_positions,
        "vocab_size": theirs.vocab_size,
        "bias": True,
        "position": "learned",
        "norm": "layernorm",
        "norm_eps": theirs.layer_norm_epsilon,
        "mlp": ACTIVATIONS[theirs.activation_function],
        "mlp_hidden": theirs.n_inner,
        "tie_embeddings": theirs.tie_word_embeddings,
        "init_std": theirs.initializer_range or 0.02,
    }


def rope_fields(theirs: Any, where: str) -> dict[str, Any]:
    """The shape of a LlamaConfig, MistralConfig, Qwen3Config or NanoChatConfig."""
    fast = theirs.model_type == "nanochat"
    need(where, theirs, "hidden_act", "relu2" if fast else "silu")
    bias = bool(getattr(theirs, "attention_bias", False))
    # Qwen3 and NanoChat never have biases in the MLP
    need(where, theirs, "attention_bias", bool(getattr(theirs, "mlp_bias", False)))
    heads, channels = theirs.num_attention_heads, theirs.hidden_size
    head_dim = getattr(theirs, "head_dim", None)
    window = getattr(theirs, "sliding_window", None)  # no longer context than it: full attention
    return {
        "n_layer": theirs.num_hidden_layers,
        "n_head": heads,
        "n_kv_head": theirs.num_key_value_heads,
        "n_embd": channels,
        "head_dim": None if head_dim is None or head_dim * heads == channels else head_dim,
        "block_size": min(theirs.max_position_embeddings, window or theirs.max_position_embeddings),
        "vocab_size": theirs.vocab_size,
        "bias": bias,
        "position": "rope",
        "norm": "rmsnorm",
        "norm_weight": not fast,
        "norm_eps": theirs.rms_norm_eps,
        "qk_norm": theirs.model_type in ("qwen3", "nanochat"),
        "embedding_norm": fast,
        "mlp": "relu2" if fast else "swiglu",
        "mlp_hidden": theirs.intermediate_size,
        "tie_embeddings": theirs.tie_word_embeddings,
        "logit_softcap": theirs.final_logit_softcapping if fast else None,
        "init_std": theirs.initializer_range or 0.02,
        **rotary_fields(theirs.rope_parameters or {}, where),
    }


def rotary_fields(rope: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The `rope_` fields of `rope_parameters` as transformers 5 holds them."""
    kind = rope.get("rope_type", "default")
    require(
        kind in ("default", "linear", "llama3"),
        f"{where} scales its rotary positions by {kind!r}, which is not implemented; default, "
        "linear and llama3 are",
    )
    partial = rope.get("partial_rotary_factor")
    require(
        partial in (None, 1.0),
        f"{where} turns only a part of each head (partial_rotary_factor {partial}), which is not "
        "implemented",
    )
    fields = {"rope_theta": float(rope.get("rope_theta", 10000.0))}
    if kind == "default":
        return fields
    fields |= {"rope_scaling": kind, "rope_factor": float(rope["factor"])}
    if kind == "llama3":
        fields["rope_low_freq_factor"] = float(rope["low_freq_factor"])
        fields["rope_high_freq_factor"] = float(rope["high_freq_factor"])
        fields["rope_original_block_size"] = int(rope["original_max_position_embeddings"])
    return fields


# --------------------------------------------------------------------------- ours -> theirs


def preset_of(config: ModelConfig) -> str:
    """The preset whose class computes what this shape computes.

    Raises `UserError` where there is none, with what the nearest class would need.
    """
    missing = {preset: lacks(config, preset) for preset in NEEDS}
    nearest = min(missing, key=lambda preset: len(missing[preset]))
    require(
        not missing[nearest],
        f"no class of transformers computes this shape; the nearest, {CLASSES[nearest]}, needs "
        + ", ".join(missing[nearest]),
    )
    return nearest


def lacks(config: ModelConfig, preset: str) -> list[str]:
    """What a shape must change for the class of a preset to compute it."""
    found = []
    for key, value in NEEDS[preset].items():
        allowed = value if isinstance(value, tuple) else (value,)
        if getattr(config, key) not in allowed:
            found.append(f"model.{key} {' or '.join(map(str, allowed))}")
    if preset == "gpt2" and config.kv_heads != config.n_head:
        found.append("model.n_kv_head null")
    if preset == "gpt2" and config.head_size * config.n_head != config.n_embd:
        found.append("model.head_dim null")
    return found


def write_shape(
    config: ModelConfig, vocab_size: int, eot_id: int | None, dtype: str
) -> dict[str, Any]:
    """The content of config.json for a model of this shape over `vocab_size` tokens.

    Raises `UserError` where no class of transformers computes it.
    """
    from transformers import CONFIG_MAPPING

    preset = preset_of(config)
    kind = "nanochat" if preset == "fast" else preset
    fields = gpt2_settings(config) if preset == "gpt2" else rope_settings(config, preset)
    fields |= {
        "architectures": [CLASSES[preset]],
        "dtype": dtype,
        "vocab_size": vocab_size,
        "tie_word_embeddings": config.tie_embeddings,
        "initializer_range": config.init_std,
        "bos_token_id": eot_id,
        "eos_token_id": eot_id,
        "pad_token_id": None,
    }
    try:
        theirs = CONFIG_MAPPING[kind](**fields)
    except Exception as error:  # the strict dataclasses of transformers have errors of their own
        said = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(f"{CLASSES[preset]} refuses this shape: {said[-1].strip()}") from None
    content: dict[str, Any] = theirs.to_diff_dict()
    content["torch_dtype"] = dtype  # this name, and those of rope, are what transformers 4 reads
    if rope := content.get("rope_parameters"):
        content["rope_theta"] = rope["rope_theta"]
        if rope["rope_type"] != "default":
            content["rope_scaling"] = rope
    return content


def gpt2_settings(config: ModelConfig) -> dict[str, Any]:
    """Arguments of GPT2Config."""
    return {
        "n_layer": config.n_layer,
        "n_head": config.n_head,
        "n_embd": config.n_embd,
        "n_positions": config.block_size,
        "n_ctx": config.block_size,  # of old; the converter of llama.cpp asks for it
        "n_inner": config.hidden_size,
        "activation_function": next(k for k, v in ACTIVATIONS.items() if v == config.mlp),
        "layer_norm_epsilon": config.norm_eps,
        "resid_pdrop": config.dropout,
        "embd_pdrop": config.dropout,
        "attn_pdrop": config.dropout,
    }


def rope_settings(config: ModelConfig, preset: str) -> dict[str, Any]:
    """Arguments of LlamaConfig, Qwen3Config or NanoChatConfig."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling != "none":
        rope |= {"rope_type": config.rope_scaling, "factor": config.rope_factor}
    if config.rope_scaling == "llama3":
        rope["low_freq_factor"] = config.rope_low_freq_factor
        rope["high_freq_factor"] = config.rope_high_freq_factor
        rope["original_max_position_embeddings"] = config.rope_original_block_size
    settings: dict[str, Any] = {
        "num_hidden_layers": config.n_layer,
        "num_attention_heads": config.n_head,
        "num_key_value_heads": config.kv_heads,
        "hidden_size": config.n_embd,
        "intermediate_size": config.hidden_size,
        "max_position_embeddings": config.block_size,
        "hidden_act": "relu2" if preset == "fast" else "silu",
        "rms_norm_eps": config.norm_eps,
        "attention_dropout": config.dropout,
        "rope_parameters": rope,
        "attention_bias": config.bias,
        "head_dim": config.head_size,
    }
    if preset == "llama":
        settings["mlp_bias"] = config.bias
    if preset == "fast":
        settings["final_logit_softcapping"] = config.logit_softcap
    return settings
