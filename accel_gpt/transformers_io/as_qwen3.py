"""Convert a model of the preset fast into a qwen3 model that computes the same.

NanoChat's class is rare; `Qwen3ForCausalLM` is known to vLLM, llama.cpp and others. The conversion
adds half of the weights of the MLP.
"""

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor

from accel_gpt.errors import CheckpointError, require
from accel_gpt.model.gpt import GPT
from accel_gpt.transformers_io.compare_export import EXPORT_TOLERANCE, largest_difference
from accel_gpt.transformers_io.hf_config import matching_preset

# C in relu(x)^2 = silu(C x) x / C, which errs by at most 0.5 / C^2. Powers of two need no rounding
STEEPNESS = 2.0**8
# Weight of the norm before the MLP. The gate is multiplied by C / NORM and the other half by
# 1 / (C NORM), so that both fit in float16 if the weights are below 16.
NORM = 2.0**-4


@torch.no_grad()
def convert_to_qwen3(model: GPT, tokens: Tensor) -> GPT:
    """Return a qwen3 model that computes the logits of `model`, proven on `tokens` (B, T).

    Raises `UserError` if `model` is not of the preset fast, `CheckpointError` if the logits differ.
    A soft cap stays; `matching_preset` refuses it.
    """
    config = model.config
    require(
        matching_preset(config) == "fast",
        "--as qwen3 converts a model of the preset fast; this model needs no conversion, so leave "
        "it out",
    )
    converted = GPT.allocate(
        dataclasses.replace(
            config,
            preset="qwen3",
            norm="rmsnorm",
            mlp="swiglu",
            mlp_hidden=config.hidden_size,
            tie_embeddings=False,
            zero_init=False,
        ),
        vocab_size=model.vocab_size,
    )
    weights = {
        **model.state_dict(),
        "head.weight": model.head.weight,
        "wte.weight": F.rms_norm(  # the norm of the embeddings, which has no weights
            model.wte.weight.double(), (config.n_embd,), eps=config.norm_eps
        ).float(),
        "norm_f.weight": torch.ones(config.n_embd),
    }
    for i in range(config.n_layer):
        block = f"blocks.{i}"
        up = weights[f"{block}.mlp.up.weight"]
        gate = up * (STEEPNESS / NORM)
        weights[f"{block}.mlp.up.weight"] = torch.cat((gate, up / (STEEPNESS * NORM)))
        weights[f"{block}.norm_1.weight"] = torch.ones(config.n_embd)
        weights[f"{block}.norm_2.weight"] = torch.full((config.n_embd,), NORM)
        weights[f"{block}.attn.qk_norm.q.weight"] = torch.ones(config.head_size)
        weights[f"{block}.attn.qk_norm.k.weight"] = torch.ones(config.head_size)
    converted.load_state_dict(weights)
    converted.eval()
    logits = model(tokens)
    difference = largest_difference(logits, converted(tokens))
    if difference > EXPORT_TOLERANCE * max(1.0, logits.abs().max().item()):
        raise CheckpointError(
            f"the logits of the qwen3 model differ from the trained model's by {difference:.1e}; "
            "nothing was exported"
        )
    return converted
