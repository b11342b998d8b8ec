"""Convert the weights of transformers' classes to ours, and back.

`weight_table` lists the tensors of transformers that make up each of ours. It is read in both
directions, so a model that was loaded is exported under the same names.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor

from accel_gpt.config.model import ModelConfig
from accel_gpt.errors import UserError
from accel_gpt.model.gpt import GPT
from accel_gpt.model.language_model import is_new
from accel_gpt.model.sharding import load_full
from accel_gpt.transformers_io.hf_config import HF_CLASSES, matching_preset

Tensors = Mapping[str, Callable[[], Tensor]]
"""Name -> function that reads the tensor: one at a time, for files larger than the memory."""

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# masks and tables that old versions stored with the weights
BUFFERS = re.compile(r".*\.attn\.(bias|masked_bias)|.*rotary_emb\.inv_freq")


class HFTensor(NamedTuple):
    """A tensor of transformers, and the rows of our tensor that it holds."""

    name: str
    ours: str
    rows: slice = slice(None)
    transposed: bool = False
    """GPT-2's Conv1D stores (in, out)."""
    mirrored: bool = False
    """NanoChat rotates positions in the opposite direction; see `mirror`."""
    rotated: bool = False
    """The rows are queries or keys with rotary positions."""
    positions: bool = False
    """The rows are learned positions: a model may have fewer of them."""


def weight_table(model: GPT, preset: str) -> Iterator[HFTensor]:
    """Yield the tensors that the class of `preset` has for a model of this shape."""
    config = model.config
    tokens = slice(model.vocab_size)
    if preset == "gpt2":
        yield HFTensor("transformer.wte.weight", "wte.weight", tokens)
        yield from gpt2_weights(config)
    else:
        yield HFTensor("model.embed_tokens.weight", "wte.weight", tokens)
        yield from rope_weights(config, preset)
    if not config.tie_embeddings:
        yield HFTensor("lm_head.weight", "head.weight", tokens)


def exportable_preset(model: GPT) -> str:
    """Return the preset whose class of transformers computes a model.

    Raises `UserError` if no class has its shape or its weights.
    """
    preset = matching_preset(model.config)
    check_names(model, preset)
    return preset


def check_names(model: GPT, preset: str, new: Sequence[str] | None = None) -> None:
    """Raise `UserError` unless the weights of a model are those in `weight_table`.

    `new`: the patterns of `model.new_weights`; the weights that match them may differ. None: it
    cannot be set here.
    """
    weights = {name for name, _ in model.named_parameters()}
    listed = {part.ours for part in weight_table(model, preset)}
    if preset == "gpt2" and not model.config.bias:  # GPT2LMHeadModel has biases, then of zeros
        listed = {name for name in listed if not name.endswith(".bias")}
    different = sorted(name for name in weights ^ listed if not is_new(name, new))
    if different:
        advice = "" if new is None else "; model.new_weights may list them"
        raise UserError(
            f"the weights of this model are not those of {HF_CLASSES[preset]}, which "
            f"weight_table in accel_gpt/transformers_io/hf_weights.py lists: "
            f"{', '.join(different[:3])}{advice}"
        )


def gpt2_weights(config: ModelConfig) -> Iterator[HFTensor]:
    """Yield the tensors of GPT2LMHeadModel, which always has biases."""
    linears = {
        "attn.qkv": "attn.c_attn",
        "attn.proj": "attn.c_proj",
        "mlp.up": "mlp.c_fc",
        "mlp.down": "mlp.c_proj",
    }
    yield HFTensor("transformer.wpe.weight", "wpe.weight", positions=True)
    for kind in ("weight", "bias"):
        transposed = kind == "weight"
        for i in range(config.n_layer):
            theirs, ours = f"transformer.h.{i}", f"blocks.{i}"
            for name, conv in linears.items():
                yield HFTensor(
                    f"{theirs}.{conv}.{kind}", f"{ours}.{name}.{kind}", transposed=transposed
                )
            for n in (1, 2):
                yield HFTensor(f"{theirs}.ln_{n}.{kind}", f"{ours}.norm_{n}.{kind}")
        yield HFTensor(f"transformer.ln_f.{kind}", f"norm_f.{kind}")


def rope_weights(config: ModelConfig, preset: str) -> Iterator[HFTensor]:
    """Yield the tensors of LlamaForCausalLM, Qwen3ForCausalLM or NanoChatForCausalLM."""
    Q = config.n_head * config.head_size
    K = config.kv_heads * config.head_size
    hidden = config.hidden_size
    fast = preset == "fast"
    linears = [
        HFTensor("self_attn.q_proj", "attn.qkv", slice(Q), mirrored=fast, rotated=True),
        HFTensor("self_attn.k_proj", "attn.qkv", slice(Q, Q + K), mirrored=fast, rotated=True),
        HFTensor("self_attn.v_proj", "attn.qkv", slice(Q + K, None)),
        HFTensor("self_attn.o_proj", "attn.proj"),
    ]
    norms = []
    if fast:  # its norms have no weights
        linears.append(HFTensor("mlp.fc1", "mlp.up"))
        linears.append(HFTensor("mlp.fc2", "mlp.down"))
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
    yield from in_each_block(config, [*linears, *norms], "weight")
    if config.bias:
        yield from in_each_block(config, linears, "bias")


def in_each_block(config: ModelConfig, parts: list[HFTensor], kind: str) -> Iterator[HFTensor]:
    """Yield the weight or bias of each part of a block, for all blocks."""
    for i in range(config.n_layer):
        for part in parts:
            yield part._replace(
                name=f"model.layers.{i}.{part.name}.{kind}", ours=f"blocks.{i}.{part.ours}.{kind}"
            )


def mirror(tensor: Tensor, head_size: int) -> Tensor:
    """Negate the second half of each head in the rows (heads * D, C) of queries or keys.

    NanoChat rotates positions in the opposite direction: its rotation of (a, b) by an angle equals
    ours of (a, -b), with the second half negated again. This changes neither the products of
    queries and keys nor norms without weights.
    """
    mirrored = tensor.clone()
    mirrored.view(-1, head_size, *tensor.shape[1:])[:, head_size // 2 :].neg_()
    return mirrored


# --------------------------------------------------------------------------- transformers -> ours


@torch.no_grad()
def load_weights(
    model: GPT, preset: str, tensors: Tensors, name: str, new: Sequence[str] | None = None
) -> None:
    """Copy the weights of a class of transformers into `model`, whose context may be shorter.

    `name` is the name of the model in errors. `new`: the patterns of `model.new_weights`; the
    weights of `model` that match them stay as they are. None: it cannot be set here.

    Raises `UserError` if a tensor is missing, left over or of another shape, or if `model` has
    other weights than the class.
    """
    check_names(model, preset, new)
    weights = model.state_dict()
    table = [part for part in weight_table(model, preset) if not is_new(part.ours, new)]
    readers = matching_tensors(model, preset, tensors, name, new)
    for ours, parts in groupby(table, attrgetter("ours")):
        full = torch.zeros(weights[ours].shape)  # the rows that pad the vocabulary stay zero
        for part in parts:
            tensor = readers[part.name]()
            if part.transposed:
                tensor = tensor.T
            if part.positions:
                tensor = tensor[: model.config.block_size]
            target = full[part.rows]
            if tensor.dtype not in FLOATS or tensor.shape != target.shape:
                raise UserError(
                    f"{name} does not fit its config.json: {part.name} is {tensor.dtype} of shape "
                    f"{tuple(tensor.shape)}, expected floats of shape {tuple(target.shape)}"
                )
            if part.mirrored:
                tensor = mirror(tensor, model.config.head_size)
            target.copy_(tensor)
        load_full(weights[ours], full)


def matching_tensors(
    model: GPT, preset: str, tensors: Tensors, name: str, new: Sequence[str] | None = None
) -> dict[str, Callable[[], Tensor]]:
    """Return `tensors` under the names in `weight_table`, without buffers and without a tied head.

    Raises `UserError` if one is missing, unless it is `new`, or left over, or if tied weights
    differ.
    """
    # a model that was saved without its head lacks the prefix
    prefix = "transformer." if preset == "gpt2" else "model."
    found: dict[str, Callable[[], Tensor]] = {}
    for key, read in tensors.items():
        if not BUFFERS.fullmatch(key):
            found[key if key.startswith((prefix, "lm_head.")) else prefix + key] = read
    table = list(weight_table(model, preset))
    expected = [part.name for part in table]
    if model.config.tie_embeddings and "lm_head.weight" in found:  # stored under either name
        head = found.pop("lm_head.weight")
        if not torch.equal(found.setdefault(expected[0], head)(), head()):
            raise UserError(
                f"{name} has tie_word_embeddings true in its config.json, but its weights hold a "
                "separate head; set it to false"
            )
    kind = f"a {HF_CLASSES[preset]} with its config.json"
    needed = [part for part in table if not is_new(part.ours, new)]
    missing = [part for part in needed if part.name not in found]
    if missing:
        names = ", ".join(sorted(part.name for part in missing)[:3])
        ours = ", ".join(sorted({part.ours for part in missing})[:3])
        advice = "" if new is None else f"; model.new_weights may list {ours}"
        raise UserError(f"{name} lacks {len(missing)} tensors of {kind}: {names}{advice}")
    if extra := sorted(found.keys() - set(expected)):
        raise UserError(f"{name} has {len(extra)} tensors more than {kind}: {', '.join(extra[:3])}")
    return found


# --------------------------------------------------------------------------- ours -> transformers


@torch.no_grad()
def export_tensors(model: GPT, preset: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the weights under the names of the class of `preset`, without the rows that pad."""
    weights = model.state_dict()
    return {
        part.name: export_tensor(weights, part, model.config.head_size, dtype)
        for part in weight_table(model, preset)
    }


@torch.no_grad()
def export_tensor(
    weights: Mapping[str, Tensor], part: HFTensor, head_size: int, dtype: torch.dtype
) -> Tensor:
    """Return a copy of one of our `weights` as `part` describes it."""
    if part.ours in weights:
        tensor = weights[part.ours][part.rows].to(dtype)
    else:  # GPT2LMHeadModel always has biases
        weight = weights[part.ours.removesuffix("bias") + "weight"]
        tensor = torch.zeros(len(weight), dtype=dtype)
    if part.mirrored:
        tensor = mirror(tensor, head_size)
    if part.transposed:
        tensor = tensor.T
    # a copy, also of a slice, because the file stores each tensor on its own
    copy: Tensor = tensor.clone(memory_format=torch.contiguous_format)
    return copy
