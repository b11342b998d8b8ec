"""Weights of transformers' classes, to ours and back.

`pieces` lists how their tensors lie in ours: one table, read in both directions, so that what was
imported is exported under the same names.
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
class Part:
    """One tensor of theirs: its name, and how many rows of ours it holds."""

    name: str
    rows: int
    mirrored: bool = False
    """Turns with the other sign: see `mirror`."""


@dataclass(frozen=True)
class Piece:
    """One tensor of ours, and those of theirs that make it, one below the other."""

    ours: str
    parts: tuple[Part, ...]
    transposed: bool = False
    """Conv1D of GPT-2 keeps (in, out)."""


def pieces(config: ModelConfig, preset: str, vocab_size: int) -> list[Piece]:
    """The tensors of a model of this shape, and where the class of `preset` keeps them."""
    listed = gpt2_pieces if preset == "gpt2" else rope_pieces
    found = list(listed(config, preset, vocab_size))
    if not config.tie_embeddings:
        found.append(Piece("head.weight", (Part("lm_head.weight", vocab_size),)))
    return found


def gpt2_pieces(config: ModelConfig, _preset: str, vocab_size: int) -> Iterator[Piece]:
    """GPT2LMHeadModel; it has biases whatever `config.bias` says."""
    C = config.n_embd
    yield Piece("wte.weight", (Part("transformer.wte.weight", vocab_size),))
    yield Piece("wpe.weight", (Part("transformer.wpe.weight", config.block_size),))
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
                part = Part(f"transformer.h.{i}.{theirs}.{kind}", rows)
                yield Piece(f"blocks.{i}.{ours}.{kind}", (part,), transposed=kind == "weight")
    for ours, theirs in norms:
        for kind in ("weight", "bias"):
            yield Piece(f"{ours}.{kind}", (Part(f"transformer.{theirs}.{kind}", C),))


def rope_pieces(config: ModelConfig, preset: str, vocab_size: int) -> Iterator[Piece]:
    """LlamaForCausalLM, Qwen3ForCausalLM and NanoChatForCausalLM."""
    C, D, hidden, fast = config.n_embd, config.head_size, config.hidden_size, preset == "fast"
    Q, K = config.n_head * D, config.kv_heads * D
    yield Piece("wte.weight", (Part("model.embed_tokens.weight", vocab_size),))
    linears = {
        "attn.qkv": (
            Part("self_attn.q_proj", Q, mirrored=fast),
            Part("self_attn.k_proj", K, mirrored=fast),
            Part("self_attn.v_proj", K),
        ),
        "attn.proj": (Part("self_attn.o_proj", C),),
        "mlp.up": (Part("mlp.fc1", hidden),)
        if fast
        else (Part("mlp.gate_proj", hidden), Part("mlp.up_proj", hidden)),
        "mlp.down": (Part("mlp.fc2" if fast else "mlp.down_proj", C),),
    }
    norms = {"norm_1": "input_layernorm", "norm_2": "post_attention_layernorm"} if not fast else {}
    if preset == "qwen3":
        norms |= {"attn.qk_norm.q": "self_attn.q_norm", "attn.qk_norm.k": "self_attn.k_norm"}
    for i in range(config.n_layer):
        for ours, parts in linears.items():
            for kind in ("weight", "bias") if config.bias else ("weight",):
                named = (
                    Part(f"model.layers.{i}.{p.name}.{kind}", p.rows, p.mirrored) for p in parts
                )
                yield Piece(f"blocks.{i}.{ours}.{kind}", tuple(named))
        for ours, theirs in norms.items():
            part = Part(f"model.layers.{i}.{theirs}.weight", D if "qk_norm" in ours else C)
            yield Piece(f"blocks.{i}.{ours}.weight", (part,))
    if not fast:
        yield Piece("norm_f.weight", (Part("model.norm.weight", C),))


def mirror(tensor: Tensor, head_size: int) -> Tensor:
    """Rows (heads * D, C) of queries or keys with the second half of each head negated.

    NanoChat turns positions the other way round: its rotation of (a, b) by an angle is ours of
    (a, -b), with the second half negated again. Products of queries and keys, and norms without
    weights, see none of it.
    """
    mirrored = tensor.clone()
    mirrored.view(-1, head_size, *tensor.shape[1:])[:, head_size // 2 :].neg_()
    return mirrored


# --------------------------------------------------------------------------- theirs -> ours


@torch.no_grad()
def fill(model: GPT, preset: str, tensors: Tensors, where: str) -> None:
    """Give `model` the weights of a class of transformers; positions beyond its block are left out.

    Raises `UserError` naming what is missing, left over or of another shape.
    """
    config, own = model.config, model.state_dict()
    table = pieces(config, preset, model.vocab_size)
    prefix = "transformer." if preset == "gpt2" else "model."
    # a model without its head is stored without the prefix
    named = {
        name if name.startswith((prefix, "lm_head.")) else prefix + name: read
        for name, read in tensors.items()
        if not BUFFERS.fullmatch(name)
    }
    if config.tie_embeddings:
        settle_head(named, table[0].parts[0].name, where)
    expected = {part.name for piece in table for part in piece.parts}
    check_names(expected, set(named), preset, where)
    for piece in table:
        ours = own[piece.ours]
        ours.zero_()  # the rows that pad the vocabulary
        start = 0
        for part in piece.parts:
            tensor = named[part.name]()
            if piece.transposed:
                tensor = tensor.T
            target = ours[start : start + part.rows]
            if piece.ours == "wpe.weight":
                tensor = tensor[: part.rows]
            if tensor.dtype not in FLOATS:
                raise UserError(f"{where} holds {part.name} as {tensor.dtype}; expected floats")
            if tensor.shape != target.shape:
                raise UserError(
                    f"{where} does not fit its config.json: {part.name} has shape "
                    f"{tuple(tensor.shape)}, expected {tuple(target.shape)}"
                )
            target.copy_(mirror(tensor, config.head_size) if part.mirrored else tensor)
            start += part.rows


def settle_head(named: dict[str, Callable[[], Tensor]], embedding: str, where: str) -> None:
    """Leave one of the two names under which tied weights may be stored.

    Raises `UserError` where the file has both and they differ, whatever its config.json says.
    """
    head = named.pop("lm_head.weight", None)
    if head is None:
        return
    if embedding not in named:
        named[embedding] = head
    elif not torch.equal(named[embedding](), head()):
        raise UserError(
            f"{where} has tie_word_embeddings true in its config.json, but a head of its own among "
            "its weights; set it to false there"
        )


def check_names(expected: set[str], found: set[str], preset: str, where: str) -> None:
    """Raise `UserError` unless the tensors are exactly those of the class."""
    told = f"tensors of a {CLASSES[preset]} with its config.json"
    if missing := sorted(expected - found):
        raise UserError(f"{where} lacks {len(missing)} of the {told}: {', '.join(missing[:3])}")
    if extra := sorted(found - expected):
        raise UserError(f"{where} has {len(extra)} that are no {told}: {', '.join(extra[:3])}")


# --------------------------------------------------------------------------- ours -> theirs


@torch.no_grad()
def export_tensors(model: GPT, preset: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """The weights under the names of the class of `preset`, without the rows that pad."""
    own, found = model.state_dict(), {}
    for piece in pieces(model.config, preset, model.vocab_size):
        start = 0
        for part in piece.parts:
            if piece.ours in own:
                tensor = own[piece.ours][start : start + part.rows].to(dtype)
            else:  # GPT2LMHeadModel cannot be without biases
                tensor = torch.zeros(part.rows, dtype=dtype)
            if part.mirrored:
                tensor = mirror(tensor, model.config.head_size)
            # a copy, also of a slice: storage of its own, as the file will have
            found[part.name] = (tensor.T if piece.transposed else tensor).clone().contiguous()
            start += part.rows
    return found
