"""Weights of transformers' classes -> ours, and back.

`weight_table` lists which of their tensors make up each of ours. It is read in both directions, so
a model that was loaded is exported under the same names.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from accel_gpt.config.model import ModelConfig
from accel_gpt.errors import UserError
from accel_gpt.hub.hf_config import CLASSES
from accel_gpt.model.gpt import GPT

Tensors = Mapping[str, Callable[[], Tensor]]
"""Name -> what reads the tensor: one at a time, for files larger than the memory."""

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# masks and tables that old versions stored with the weights
BUFFERS = re.compile(r".*\.attn\.(bias|masked_bias)|.*rotary_emb\.inv_freq")


@dataclass(frozen=True)
class HFTensor:
    """A tensor of transformers: its name, and how many rows of ours it holds."""

    name: str
    rows: int
    mirrored: bool = False
    """Its rotary positions turn the other way: see `mirror`."""


@dataclass(frozen=True)
class Weight:
    """A tensor of ours, and the tensors of transformers that make it up, from the first row on."""

    name: str
    parts: tuple[HFTensor, ...]
    transposed: bool = False
    """GPT-2's Conv1D stores (in, out)."""


def weight_table(config: ModelConfig, preset: str, vocab_size: int) -> list[Weight]:
    """Return the tensors of a model of this shape, and where the class of `preset` has them."""
    weights = gpt2_weights if preset == "gpt2" else rope_weights
    table = list(weights(config, preset, vocab_size))
    if not config.tie_embeddings:
        table.append(Weight("head.weight", (HFTensor("lm_head.weight", vocab_size),)))
    return table


def gpt2_weights(config: ModelConfig, _preset: str, vocab_size: int) -> Iterator[Weight]:
    """Yield the weights of GPT2LMHeadModel, which has biases whatever `config.bias` is."""
    C = config.n_embd
    yield Weight("wte.weight", (HFTensor("transformer.wte.weight", vocab_size),))
    yield Weight("wpe.weight", (HFTensor("transformer.wpe.weight", config.block_size),))
    linears = {
        "attn.qkv": ("attn.c_attn", 3 * C),
        "attn.proj": ("attn.c_proj", C),
        "mlp.up": ("mlp.c_fc", config.hidden_size),
        "mlp.down": ("mlp.c_proj", C),
    }
    norms = [("norm_f", "ln_f")]
    for i in range(config.n_layer):
        norms += [(f"blocks.{i}.norm_{n}", f"h.{i}.ln_{n}") for n in (1, 2)]
        for ours, (theirs, rows) in linears.items():
            for kind in ("weight", "bias"):
                part = HFTensor(f"transformer.h.{i}.{theirs}.{kind}", rows)
                yield Weight(f"blocks.{i}.{ours}.{kind}", (part,), transposed=kind == "weight")
    for ours, theirs in norms:
        for kind in ("weight", "bias"):
            yield Weight(f"{ours}.{kind}", (HFTensor(f"transformer.{theirs}.{kind}", C),))


def rope_weights(config: ModelConfig, preset: str, vocab_size: int) -> Iterator[Weight]:
    """Yield the weights of LlamaForCausalLM, Qwen3ForCausalLM or NanoChatForCausalLM."""
    C, D, hidden, fast = config.n_embd, config.head_size, config.hidden_size, preset == "fast"
    Q, K = config.n_head * D, config.kv_heads * D
    yield Weight("wte.weight", (HFTensor("model.embed_tokens.weight", vocab_size),))
    linears = {
        "attn.qkv": (
            HFTensor("self_attn.q_proj", Q, mirrored=fast),
            HFTensor("self_attn.k_proj", K, mirrored=fast),
            HFTensor("self_attn.v_proj", K),
        ),
        "attn.proj": (HFTensor("self_attn.o_proj", C),),
        "mlp.up": (HFTensor("mlp.fc1", hidden),)
        if fast
        else (HFTensor("mlp.gate_proj", hidden), HFTensor("mlp.up_proj", hidden)),
        "mlp.down": (HFTensor("mlp.fc2" if fast else "mlp.down_proj", C),),
    }
    norms = {"norm_1": "input_layernorm", "norm_2": "post_attention_layernorm"} if not fast else {}
    if preset == "qwen3":
        norms |= {"attn.qk_norm.q": "self_attn.q_norm", "attn.qk_norm.k": "self_attn.k_norm"}
    for i in range(config.n_layer):
        for ours, parts in linears.items():
            for kind in ("weight", "bias") if config.bias else ("weight",):
                named = (
                    HFTensor(f"model.layers.{i}.{p.name}.{kind}", p.rows, p.mirrored) for p in parts
                )
                yield Weight(f"blocks.{i}.{ours}.{kind}", tuple(named))
        for ours, theirs in norms.items():
            part = HFTensor(f"model.layers.{i}.{theirs}.weight", D if "qk_norm" in ours else C)
            yield Weight(f"blocks.{i}.{ours}.weight", (part,))
    if not fast:
        yield Weight("norm_f.weight", (HFTensor("model.norm.weight", C),))


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
    table = weight_table(config, preset, model.vocab_size)
    prefix = "transformer." if preset == "gpt2" else "model."
    # a model that was saved without its head lacks the prefix
    found = {
        key if key.startswith((prefix, "lm_head.")) else prefix + key: read
        for key, read in tensors.items()
        if not BUFFERS.fullmatch(key)
    }
    if config.tie_embeddings:
        drop_tied_head(found, table[0].parts[0].name, name)
    expected = {part.name for weight in table for part in weight.parts}
    kind = f"tensors of a {CLASSES[preset]} with its config.json"
    if missing := sorted(expected - found.keys()):
        raise UserError(f"{name} lacks {len(missing)} of the {kind}: {', '.join(missing[:3])}")
    if extra := sorted(found.keys() - expected):
        raise UserError(f"{name} has {len(extra)} that are no {kind}: {', '.join(extra[:3])}")
    for weight in table:
        ours = own[weight.name]
        ours.zero_()  # the rows that pad the vocabulary
        start = 0
        for part in weight.parts:
            tensor = found[part.name]()
            if weight.transposed:
                tensor = tensor.T
            if weight.name == "wpe.weight":
                tensor = tensor[: part.rows]
            target = ours[start : start + part.rows]
            if tensor.dtype not in FLOATS:
                raise UserError(f"{name} has {part.name} as {tensor.dtype}; expected floats")
            if tensor.shape != target.shape:
                raise UserError(
                    f"{name} does not fit its config.json: {part.name} has shape "
                    f"{tuple(tensor.shape)}, expected {tuple(target.shape)}"
                )
            target.copy_(mirror(tensor, config.head_size) if part.mirrored else tensor)
            start += part.rows


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
    for weight in weight_table(model.config, preset, model.vocab_size):
        start = 0
        for part in weight.parts:
            if weight.name in own:
                tensor = own[weight.name][start : start + part.rows].to(dtype)
            else:  # GPT2LMHeadModel cannot be without biases
                tensor = torch.zeros(part.rows, dtype=dtype)
            if part.mirrored:
                tensor = mirror(tensor, model.config.head_size)
            # a copy, also of a slice: storage of its own, as the file will have
            found[part.name] = (tensor.T if weight.transposed else tensor).clone().contiguous()
            start += part.rows
    return found
