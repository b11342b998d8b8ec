"""Weights of transformers' classes -> ours, and back.

`weight_table` lists which of their tensors make up each of ours. It is read in both directions, so
a model that was loaded is exported under the same names.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from accel_gpt.config.model import ModelConfig
from accel_gpt.errors import UserError
from accel_gpt.hub.hf_config import HF_CLASSES
from accel_gpt.model.gpt import GPT
from accel_gpt.model.sharding import load_full

Tensors = Mapping[str, Callable[[], Tensor]]
"""Name -> what reads the tensor: one at a time, for files larger than the memory."""

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# masks and tables that old versions stored with the weights
BUFFERS = re.compile(r".*\.attn\.(bias|masked_bias)|.*rotary_emb\.inv_freq")


class HFTensor(NamedTuple):
    """A tensor of transformers, and the rows of a tensor of ours that it holds."""

    name: str
    ours: str
    rows: slice = slice(None)
    transposed: bool = False
    """GPT-2's Conv1D stores (in, out)."""
    mirrored: bool = False
    """Its rotary positions turn the other way: see `mirror`."""


def weight_table(model: GPT, preset: str) -> Iterator[HFTensor]:
    """Yield the tensors that the class of `preset` has for a model of this shape."""
    config, tokens = model.config, slice(model.vocab_size)
    gpt2 = preset == "gpt2"
    embedding = "transformer.wte.weight" if gpt2 else "model.embed_tokens.weight"
    yield HFTensor(embedding, "wte.weight", tokens)
    yield from gpt2_weights(config) if gpt2 else rope_weights(config, preset)
    if not config.tie_embeddings:
        yield HFTensor("lm_head.weight", "head.weight", tokens)


def gpt2_weights(config: ModelConfig) -> Iterator[HFTensor]:
    """Yield those of GPT2LMHeadModel, which has biases whatever `config.bias` is."""
    linears = {"attn.qkv": "attn.c_attn", "attn.proj": "attn.c_proj"}
    linears |= {"mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"}
    yield HFTensor("transformer.wpe.weight", "wpe.weight")
    for kind in ("weight", "bias"):
        for i in range(config.n_layer):
            block, theirs = f"blocks.{i}", f"transformer.h.{i}"
            for name, conv in linears.items():
                names = f"{theirs}.{conv}.{kind}", f"{block}.{name}.{kind}"
                yield HFTensor(*names, transposed=kind == "weight")
            for n in (1, 2):
                yield HFTensor(f"{theirs}.ln_{n}.{kind}", f"{block}.norm_{n}.{kind}")
        yield HFTensor(f"transformer.ln_f.{kind}", f"norm_f.{kind}")


def rope_weights(config: ModelConfig, preset: str) -> Iterator[HFTensor]:
    """Yield those of LlamaForCausalLM, Qwen3ForCausalLM or NanoChatForCausalLM."""
    Q, K = config.n_head * config.head_size, config.kv_heads * config.head_size
    fast, hidden = preset == "fast", config.hidden_size
    linears = [
        HFTensor("self_attn.q_proj", "attn.qkv", slice(Q), mirrored=fast),
        HFTensor("self_attn.k_proj", "attn.qkv", slice(Q, Q + K), mirrored=fast),
        HFTensor("self_attn.v_proj", "attn.qkv", slice(Q + K, None)),
        HFTensor("self_attn.o_proj", "attn.proj"),
    ]
    norms = []
    if fast:  # norms without weights
        linears += [HFTensor("mlp.fc1", "mlp.up"), HFTensor("mlp.fc2", "mlp.down")]
    else:
        linears.append(HFTensor("mlp.gate_proj", "mlp.up", slice(hidden)))
        linears.append(HFTensor("mlp.up_proj", "mlp.up", slice(hidden, None)))
        linears.append(HFTensor("mlp.down_proj", "mlp.down"))
        norms.append(HFTensor("input_layernorm", "norm_1"))
        norms.append(HFTensor("post_attention_layernorm", "norm_2"))
        yield HFTensor("model.norm.weight", "norm_f.weight")
    if preset == "qwen3":
        norms.append(HFTensor("self_attn.q_norm", "attn.qk_norm.q"))
        norms.append(HFTensor("self_attn.k_norm", "attn.qk_norm.k"))
    for kind in ("weight", "bias") if config.bias else ("weight",):
        for i in range(config.n_layer):
            for part in linears + norms if kind == "weight" else linears:
                theirs, ours = f"model.layers.{i}.{part.name}", f"blocks.{i}.{part.ours}"
                yield part._replace(name=f"{theirs}.{kind}", ours=f"{ours}.{kind}")


def mirror(tensor: Tensor, head_size: int) -> Tensor:
    """Negate the second half of each head in the rows (heads * D, C) of queries or keys.

    NanoChat rotates positions the other way round: its rotation of (a, b) by an angle equals ours
    of (a, -b), with the second half negated again. Products of queries and keys, and norms without
    weights, do not change by it.
    """
    mirrored = tensor.clone()
    mirrored.view(-1, head_size, *tensor.shape[1:])[:, head_size // 2 :].neg_()
    return mirrored


# --------------------------------------------------------------------------- transformers -> ours


@torch.no_grad()
def load_weights(model: GPT, preset: str, tensors: Tensors, name: str) -> None:
    """Copy the weights of a class of transformers into `model`, whose context may be shorter.

    `name`: of the model, for errors. Raises `UserError` if a tensor is missing, left over or of
    another shape.
    """
    config, own = model.config, model.state_dict()
    table = list(weight_table(model, preset))
    prefix = "transformer." if preset == "gpt2" else "model."
    # a model that was saved without its head lacks the prefix
    found = {
        key if key.startswith((prefix, "lm_head.")) else prefix + key: read
        for key, read in tensors.items()
        if not BUFFERS.fullmatch(key)
    }
    if config.tie_embeddings:
        drop_tied_head(found, table[0].name, name)
    expected = {part.name for part in table}
    kind = f"tensors of a {HF_CLASSES[preset]} with its config.json"
    if missing := sorted(expected - found.keys()):
        raise UserError(f"{name} lacks {len(missing)} of the {kind}: {', '.join(missing[:3])}")
    if extra := sorted(found.keys() - expected):
        raise UserError(f"{name} has {len(extra)} that are no {kind}: {', '.join(extra[:3])}")
    for ours, parts in groupby(table, lambda part: part.ours):
        full = torch.zeros(own[ours].shape)  # the rows that pad the vocabulary stay zero
        for part in parts:
            tensor, target = found[part.name](), full[part.rows]
            if part.transposed:
                tensor = tensor.T
            if ours == "wpe.weight":
                tensor = tensor[: config.block_size]
            if tensor.dtype not in FLOATS:
                raise UserError(f"{name} has {part.name} as {tensor.dtype}; expected floats")
            if tensor.shape != target.shape:
                raise UserError(
                    f"{name} does not fit its config.json: {part.name} has shape "
                    f"{tuple(tensor.shape)}, expected {tuple(target.shape)}"
                )
            target.copy_(mirror(tensor, config.head_size) if part.mirrored else tensor)
        load_full(own[ours], full)


def drop_tied_head(found: dict[str, Callable[[], Tensor]], embedding: str, name: str) -> None:
    """Keep one of the two names under which tied weights may be stored.

    Raises `UserError` if both are there and differ, whatever config.json says.
    """
    head = found.pop("lm_head.weight", None)
    if head is None:
        return
    if embedding not in found:
        found[embedding] = head
    elif not torch.equal(found[embedding](), head()):
        raise UserError(
            f"{name} has tie_word_embeddings true in its config.json, but a head of its own among "
            "its weights; set it to false there"
        )


# --------------------------------------------------------------------------- ours -> transformers


@torch.no_grad()
def export_tensors(model: GPT, preset: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the weights under the names of the class of `preset`, without the rows that pad."""
    own, found = model.state_dict(), {}
    for part in weight_table(model, preset):
        if part.ours in own:
            tensor = own[part.ours][part.rows].to(dtype)
        else:  # GPT2LMHeadModel cannot be without biases
            weight = own[part.ours.removesuffix("bias") + "weight"]
            tensor = torch.zeros(len(weight), dtype=dtype)
        if part.mirrored:
            tensor = mirror(tensor, model.config.head_size)
        # a copy, also of a slice: storage of its own, as the file will have
        found[part.name] = (tensor.T if part.transposed else tensor).clone().contiguous()
    return found
