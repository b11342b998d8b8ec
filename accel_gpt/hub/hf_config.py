"""Model shapes as transformers has them: config.json -> `ModelConfig` fields, and back.

Four classes of transformers compute what our model computes, one for each preset; a Mistral model
is a Llama model in all but its name. Needs no torch.
"""

import types
from collections.abc import Mapping
from typing import Any

from accel_gpt.config.model import PRESETS, ModelConfig
from accel_gpt.errors import AccelGPTError, UserError, require

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
# what a preset determines, besides `bias` and `logit_softcap`, which some classes can vary
STRUCTURE = ("position", "norm", "norm_weight", "qk_norm", "embedding_norm", "mlp")
# our field -> the name in config.json
GPT2_FIELDS: Mapping[str, str] = types.MappingProxyType(
    {
        "n_layer": "n_layer",
        "n_head": "n_head",
        "n_embd": "n_embd",
        "block_size": "n_positions",
        "vocab_size": "vocab_size",
        "mlp_hidden": "n_inner",
        "norm_eps": "layer_norm_epsilon",
        "tie_embeddings": "tie_word_embeddings",
    }
)
ROPE_FIELDS: Mapping[str, str] = types.MappingProxyType(
    {
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_kv_head": "num_key_value_heads",
        "n_embd": "hidden_size",
        "block_size": "max_position_embeddings",
        "vocab_size": "vocab_size",
        "mlp_hidden": "intermediate_size",
        "norm_eps": "rms_norm_eps",
        "tie_embeddings": "tie_word_embeddings",
    }
)


def structure(preset: str) -> dict[str, Any]:
    """Return the fields of a preset that `STRUCTURE` names, with `bias` and `logit_softcap`."""
    config = ModelConfig(**PRESETS[preset])
    return {key: getattr(config, key) for key in (*STRUCTURE, "bias", "logit_softcap")}


# --------------------------------------------------------------------------- transformers -> ours


def read_shape(content: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Convert the content of a config.json to fields of `ModelConfig`, `vocab_size` among them.

    `name`: of the model, for errors. Raises `UserError` for a class or setting that our model does
    not compute.
    """
    model_type = str(content.get("model_type"))
    if model_type not in MODEL_TYPES:
        found = (content.get("architectures") or [f"model of type {model_type}"])[0]
        raise UserError(
            f"{name} is a {found}; the classes that can be loaded are "
            f"{', '.join(CLASSES.values())} and MistralForCausalLM"
        )
    require(
        not content.get("quantization_config"),
        f"{name} is quantized; weights in float32, bfloat16 or float16 can be loaded",
    )
    from transformers import CONFIG_MAPPING

    preset = MODEL_TYPES[model_type]
    read = read_gpt2 if preset == "gpt2" else read_rope
    names = GPT2_FIELDS if preset == "gpt2" else ROPE_FIELDS
    try:
        hf_config = CONFIG_MAPPING[model_type].from_dict(dict(content))
        fields = {ours: getattr(hf_config, theirs) for ours, theirs in names.items()}
        init_std = hf_config.initializer_range or 0.02
        fields |= structure(preset) | {"preset": preset, "init_std": init_std}
        return fields | read(hf_config, name)
    except AccelGPTError:
        raise
    except Exception as error:  # the strict dataclasses of transformers have errors of their own
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(f"config.json of {name} is not valid: {reason[-1].strip()}") from None


def require_one_of(name: str, hf_config: Any, key: str, *allowed: Any) -> None:
    """Raise `UserError` if a setting has a value that our model does not compute."""
    value = getattr(hf_config, key, allowed[0])
    choices = " or ".join(map(str, allowed))
    require(value in allowed, f"{name} has {key} {value}, which is not implemented; only {choices}")


def read_gpt2(hf_config: Any, name: str) -> dict[str, Any]:
    """Return the fields of a GPT2Config that differ from those of the preset."""
    require_one_of(name, hf_config, "add_cross_attention", False)
    require_one_of(name, hf_config, "scale_attn_weights", True)
    require_one_of(name, hf_config, "scale_attn_by_inverse_layer_idx", False)
    require_one_of(name, hf_config, "activation_function", *ACTIVATIONS)
    return {"mlp": ACTIVATIONS[hf_config.activation_function]}


def read_rope(hf_config: Any, name: str) -> dict[str, Any]:
    """Return the fields of a LlamaConfig, MistralConfig, Qwen3Config or NanoChatConfig that differ
    from those of the preset.
    """
    fast = hf_config.model_type == "nanochat"
    require_one_of(name, hf_config, "hidden_act", "relu2" if fast else "silu")
    # Qwen3 and NanoChat never have biases in the MLP
    require_one_of(name, hf_config, "attention_bias", bool(getattr(hf_config, "mlp_bias", False)))
    block_size = hf_config.max_position_embeddings
    window = getattr(hf_config, "sliding_window", None)  # within it, attention is full attention
    head_dim = getattr(hf_config, "head_dim", None)
    if head_dim and head_dim * hf_config.num_attention_heads == hf_config.hidden_size:
        head_dim = None
    return {
        "block_size": min(block_size, window or block_size),
        "head_dim": head_dim,
        "bias": bool(getattr(hf_config, "attention_bias", False)),
        "logit_softcap": hf_config.final_logit_softcapping if fast else None,
        **read_rope_parameters(hf_config.rope_parameters or {}, name),
    }


def read_rope_parameters(rope: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the `rope_` fields of `rope_parameters` as transformers 5 holds them."""
    kind, partial = rope.get("rope_type", "default"), rope.get("partial_rotary_factor")
    require(
        kind in ("default", "linear", "llama3"),
        f"{name} scales its rotary positions by {kind!r}, which is not implemented; default, "
        "linear and llama3 are",
    )
    require(
        partial in (None, 1.0),
        f"{name} rotates only a part of each head (partial_rotary_factor {partial}), which is not "
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


# --------------------------------------------------------------------------- ours -> transformers


def matching_preset(config: ModelConfig) -> str:
    """Return the preset whose class in `CLASSES` computes a model of this shape.

    Raises `UserError` if there is none, with what the nearest class needs.
    """
    unmet = {preset: unmet_needs(config, preset) for preset in CLASSES}
    nearest = min(unmet, key=lambda preset: len(unmet[preset]))
    require(
        not unmet[nearest],
        f"no class of transformers computes this shape; the nearest, {CLASSES[nearest]}, needs "
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


def write_shape(
    config: ModelConfig, vocab_size: int, eot_id: int | None, dtype: str
) -> dict[str, Any]:
    """Return the content of config.json for a model of this shape over `vocab_size` tokens.

    Raises `UserError` if no class of transformers computes it.
    """
    from transformers import CONFIG_MAPPING

    preset = matching_preset(config)
    names, write = (GPT2_FIELDS, write_gpt2) if preset == "gpt2" else (ROPE_FIELDS, write_rope)
    resolved = {
        "n_kv_head": config.kv_heads,
        "mlp_hidden": config.hidden_size,
        "vocab_size": vocab_size,
    }
    fields = {theirs: resolved.get(ours, getattr(config, ours)) for ours, theirs in names.items()}
    fields |= write(config, preset) | {
        "architectures": [CLASSES[preset]],
        "dtype": dtype,
        "initializer_range": config.init_std,
        "bos_token_id": eot_id,
        "eos_token_id": eot_id,
        "pad_token_id": None,
    }
    try:
        hf_config = CONFIG_MAPPING["nanochat" if preset == "fast" else preset](**fields)
    except Exception as error:  # the strict dataclasses of transformers have errors of their own
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(f"{CLASSES[preset]} refuses this shape: {reason[-1].strip()}") from None
    content: dict[str, Any] = hf_config.to_diff_dict()
    content["torch_dtype"] = dtype  # transformers 4 reads this name, and the two of rope below
    if rope := content.get("rope_parameters"):
        content["rope_theta"] = rope["rope_theta"]
        if rope["rope_type"] != "default":
            content["rope_scaling"] = rope
    return content


def write_gpt2(config: ModelConfig, _preset: str) -> dict[str, Any]:
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
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling != "none":
        rope |= {"rope_type": config.rope_scaling, "factor": config.rope_factor}
    if config.rope_scaling == "llama3":
        rope["low_freq_factor"] = config.rope_low_freq_factor
        rope["high_freq_factor"] = config.rope_high_freq_factor
        rope["original_max_position_embeddings"] = config.rope_original_block_size
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
