"""Export a model as one GGUF file, for llama.cpp, Ollama and LM Studio.

    accel-gpt export RUN --gguf model.gguf

Writes the file, and beside it a Modelfile for `ollama create`. If llama.cpp is installed (the extra
gguf), `verify_gguf.py` opens the file in float32 in a new process, and must compute the same. For a
smaller type it then measures the difference.
"""

import importlib.util
import json
import math
import random
import string
import sys
import tempfile
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from accel_gpt.config.model import YARN_TURNS, ModelConfig
from accel_gpt.data.tokenizer import CharsTokenizer, Tokenizer
from accel_gpt.data.tokenizer_json import BYTE_CHARS, EOT, PATTERN
from accel_gpt.errors import UserError, install_extra, require
from accel_gpt.model.gpt import GPT
from accel_gpt.model.layers import rotary_frequencies, unscaled_frequencies
from accel_gpt.training.checkpoint import read_state
from accel_gpt.transformers_io.as_qwen3 import convert_to_qwen3
from accel_gpt.transformers_io.export import compare_in_child, compared_tokens, warn_of_template
from accel_gpt.transformers_io.hf_config import matching_preset
from accel_gpt.transformers_io.hf_weights import export_tensor, exportable_preset, weight_table
from accel_gpt.transformers_io.load import load_pretrained
from accel_gpt.transformers_io.pretrained import Pretrained, find_pretrained

if TYPE_CHECKING:
    from gguf import GGUFWriter

LLAMA_CPP = "xllamacpp"  # the Python package that holds llama.cpp
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4  # types of tokens in a GGUF file
# llama.cpp rejects a byte-level tokenizer without merges. It merges from single characters, so this
# pair never occurs.
NO_MERGES = (f"{EOT} {EOT}",)
BYTE_LEVEL, SINGLE_DIGITS = "ByteLevel with its regex", "Digits one by one"
# llama.cpp's name for the steps by which a tokenizer.json splits text: of Llama 3 and our BPE,
# Qwen 2 and 3, GPT-2, and SmolLM
PRE_TOKENIZERS = MappingProxyType(
    {
        (PATTERN,): "llama-bpe",
        (PATTERN.replace(r"\p{N}{1,3}", r"\p{N}"),): "qwen2",
        (BYTE_LEVEL,): "gpt-2",
        (SINGLE_DIGITS, BYTE_LEVEL): "smollm",
    }
)
# GGMLQuantizationType of matrices, and LlamaFileType of the file
QUANTIZATION = MappingProxyType(
    {
        "fp32": ("F32", "ALL_F32"),
        "fp16": ("F16", "MOSTLY_F16"),
        "bf16": ("BF16", "MOSTLY_BF16"),
        "q8_0": ("Q8_0", "MOSTLY_Q8_0"),
    }
)
COMPARED_TOKENS = 256  # of the first sequence
COMPARED_POSITIONS = 16  # at each, the logits of the whole vocabulary are compared
COMPARED_TEXTS = 500
GREEDY_TOKENS = 32
# Largest difference of a logit in float32, in standard deviations of the logits. Measured with
# random weights of std 0.02 to 0.1 in 2 to 24 layers: 2e-5. ggml computes GELU by a table of
# float16 (ggml/src/ggml-cpu/vec.h); measured with it: 2e-3.
TOLERANCE = 1e-3
GELU_TOLERANCE = 2e-2
# Kinds of characters that pre-tokenizers treat differently
CHARACTERS = (
    string.ascii_letters,
    string.digits,
    string.punctuation,
    " \t\n\r\u00a0\u3000",
    "'s 't 're 've 'm 'll 'd 'S 'T",
    "àéîõüßøñçÅ",
    "абвгдежзийклмн",
    "日本語中文字符한국어",
    "😀👍🏽👩‍💻🇩🇪✨",
    "αβγδ∑∫≤²½",
)
Q8_0_BLOCK = 32  # values that share a scale; other row lengths stay in float16


@dataclass(frozen=True)
class ExportedGGUF:
    """A GGUF file and the result of the comparison."""

    file: Path
    architecture: str  # in llama.cpp
    parameters: int
    dtype: str
    compared: str  # in words

    def describe(self) -> str:
        """Return the lines about the file, and how to run it."""
        model = self.file.stem.lower()
        create = f"ollama create {model} -f {modelfile_of(self.file)}"
        return (
            f"{self.file}: {self.architecture}, {self.parameters:,} parameters in {self.dtype}, "
            f"{self.file.stat().st_size / 1e6:,.1f} MB\n"
            f"{self.compared}\n"
            f'  llama.cpp   llama-completion -m {self.file} -p "..."\n'
            f"  Ollama      {create} && ollama run {model}\n"
        )


@dataclass(frozen=True)
class Compared:
    """What a float32 file was compared with, and the result in words."""

    reference: dict[str, Tensor]
    settings: dict[str, Any]
    description: str


def export_gguf(
    name: str,
    to: Path,
    checkpoint: str = "last",
    dtype: str = "fp32",
    overwrite: bool = False,
    license_id: str | None = None,
) -> ExportedGGUF:
    """Export the model `name`, as `load_pretrained` finds it, to the GGUF file `to`.

    The file appears when it is complete and compared, or not at all. `license_id`: None
    for `hub.license` of the run. Raises `UserError` if the file or its Modelfile exists, or if
    llama.cpp cannot compute the model or its tokenizer; `CheckpointError` if llama.cpp computes
    other values.
    """
    require(
        importlib.util.find_spec("gguf") is not None,
        f"--gguf needs the package gguf but it is not installed; {install_extra('gguf')}",
    )
    check_file(to, overwrite)
    pretrained = find_pretrained(name, checkpoint)
    model, tokenizer = load_pretrained(name, checkpoint)
    warn_of_template(pretrained)
    tokens, compared_on = compared_tokens(model, tokenizer, pretrained)
    architecture = llama_cpp_architecture(model.config)  # raises before anything is written
    vocabulary = llama_cpp_vocabulary(tokenizer)
    trained = model
    if exportable_preset(model) == "fast":
        model = convert_to_qwen3(model, tokens)

    def write(file: Path, dtype: str) -> int:
        return write_gguf(
            model=model,
            architecture=architecture,
            tokenizer=tokenizer,
            vocabulary=vocabulary,
            file=file,
            dtype=dtype,
            license_id=license_id or license_of(pretrained),
        )

    compared = f"not compared: llama.cpp is not installed; {install_extra('gguf')}"
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".tmp_gguf_", dir=to.parent) as folder:
            written = Path(folder) / to.name
            if importlib.util.find_spec(LLAMA_CPP) is None:
                parameters = write(written, dtype)
            else:
                parameters = write(written, "fp32")
                proof = prove_equal_gguf(trained, tokenizer, vocabulary, tokens, written)
                compared = f"{proof.description}, on the first of {compared_on}"
                if dtype != "fp32":
                    write(written, dtype)
                    difference = measure_difference(written, proof)
                    compared += f"\nin {dtype} its logits differ by at most {difference:.1e}"
            write_modelfile(tokenizer, written, model.config.block_size)
            modelfile_of(written).replace(modelfile_of(to))
            written.replace(to)
    except OSError as error:
        raise UserError(f"{to} cannot be written: {error.strerror or error}") from None
    return ExportedGGUF(
        file=to,
        architecture=architecture,
        parameters=parameters,
        dtype=dtype,
        compared=compared,
    )


def check_file(to: Path, overwrite: bool) -> None:
    """Raise `UserError` unless `to` and its Modelfile are new, or may be replaced."""
    require(to.suffix == ".gguf", f"--gguf is {to}; give a file that ends in .gguf")
    require(not to.is_dir(), f"{to} is a folder; give a file to write")
    for path in (to, modelfile_of(to)):
        require(
            overwrite or not path.exists(),
            f"{path} already exists; give another file, or --overwrite to replace it",
        )


def license_of(pretrained: Pretrained) -> str | None:
    """Return `hub.license` of the run of a checkpoint."""
    if not pretrained.is_checkpoint:
        return None
    found = read_state(pretrained.folder).config.get("hub.license")
    return found if isinstance(found, str) else None


# --------------------------------------------------------------------------- the file


def write_gguf(
    model: GPT,
    architecture: str,
    tokenizer: Tokenizer,
    vocabulary: "Vocabulary",
    file: Path,
    dtype: str,
    license_id: str | None = None,
) -> int:
    """Write a model and its tokenizer to `file`, a tensor at a time; return its parameters."""
    import gguf

    wanted, file_type = QUANTIZATION[dtype]
    kinds = gguf.GGMLQuantizationType
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_type("model")
    writer.add_name(file.stem)
    if license_id:
        writer.add_license(license_id)
    writer.add_file_type(gguf.LlamaFileType[file_type])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    add_shape(writer, model.config, model.vocab_size)
    add_tokenizer(writer, tokenizer, vocabulary, model.vocab_size)
    parameters = 0
    # the header holds their sizes
    for name, tensor, stored in gguf_tensors(model, architecture, wanted):
        parameters += tensor.numel()
        kind = kinds[stored]
        largest = tensor.abs().max().item()
        require(
            kind != kinds.F16 or largest <= torch.finfo(torch.float16).max,
            f"{name} has a value of {largest:.3g}, too large for float16; give --dtype bf16",
        )
        bytes_shape = gguf.quant_shape_to_byte_shape(tuple(tensor.shape), kind)
        writer.add_tensor_info(
            name,
            tensor_shape=bytes_shape,
            tensor_dtype=np.dtype(np.uint8),
            tensor_nbytes=math.prod(bytes_shape),
            raw_dtype=kind,
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for _, tensor, stored in gguf_tensors(model, architecture, wanted):
        writer.write_tensor_data(gguf.quantize(tensor.numpy(), kinds[stored]))
    writer.close()
    return parameters


def stored_as(tensor: Tensor, wanted: str) -> str:
    """Return how a tensor is stored: vectors in float32, as llama.cpp expects."""
    if tensor.dim() < 2:
        return "F32"
    if wanted == "Q8_0" and tensor.shape[-1] % Q8_0_BLOCK:
        return "F16"
    return wanted


def llama_cpp_architecture(config: ModelConfig) -> str:
    """Return the name of llama.cpp's architecture for a shape that transformers has a class for.

    Raises `UserError` if llama.cpp cannot compute the shape.
    """
    preset = matching_preset(config)
    require(
        config.mlp != "gelu_erf",
        "model.mlp is gelu_erf, but llama.cpp computes GELU in its tanh form; train with gelu",
    )
    require(
        config.logit_softcap is None,
        f"model.logit_softcap is {config.logit_softcap}, which llama.cpp cannot compute for this "
        "shape; train with null",
    )
    require(
        preset != "qwen3" or config.rope_scaling != "llama3",
        "model.rope_scaling is llama3, which llama.cpp cannot compute for qwen3; train with yarn "
        "or linear",
    )
    return "qwen3" if preset == "fast" else preset


def add_shape(writer: "GGUFWriter", config: ModelConfig, vocab_size: int) -> None:
    """Add the sizes and constants of the model to the metadata."""
    import gguf

    writer.add_vocab_size(vocab_size)
    writer.add_context_length(config.block_size)
    writer.add_embedding_length(config.n_embd)
    writer.add_block_count(config.n_layer)
    writer.add_feed_forward_length(config.hidden_size)
    writer.add_head_count(config.n_head)
    writer.add_head_count_kv(config.kv_heads)
    if config.norm == "layernorm":
        writer.add_layer_norm_eps(config.norm_eps)
        return
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_key_length(config.head_size)
    writer.add_value_length(config.head_size)
    writer.add_rope_dimension_count(config.head_size)
    writer.add_rope_freq_base(config.rope_theta)
    if config.rope_scaling in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(config.rope_scaling))
        writer.add_rope_scaling_factor(config.rope_factor)
    if config.rope_scaling == "yarn":
        writer.add_rope_scaling_orig_ctx_len(config.rope_original_block_size)
        writer.add_rope_scaling_yarn_beta_fast(YARN_TURNS[0])
        writer.add_rope_scaling_yarn_beta_slow(YARN_TURNS[1])


def gguf_tensors(model: GPT, architecture: str, wanted: str) -> Iterator[tuple[str, Tensor, str]]:
    """Yield llama.cpp's name of each tensor, the tensor in float32, and how the file stores it.

    Linears are (out, in). `gguf` translates the names of transformers. Two things differ: Conv1D is
    transposed back, and llama.cpp's llama rotates channel 2 i with 2 i + 1. llama.cpp expects
    learned positions in float32.
    """
    import gguf

    config = model.config
    weights = model.state_dict()
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], config.n_layer)
    for part in weight_table(model, matching_preset(config)):
        name = names.get_name(part.name, try_suffixes=(".weight", ".bias"))
        assert name is not None, part.name
        tensor = export_tensor(weights, part, config.head_size, torch.float32)
        if part.transposed:
            tensor = tensor.T
        if architecture == "llama" and part.rotated:
            tensor = interleave(tensor, config.head_size)
        yield name, tensor.contiguous(), "F32" if part.positions else stored_as(tensor, wanted)
    if config.rope_scaling == "llama3":  # llama.cpp divides its frequencies by this tensor
        cpu = torch.device("cpu")
        unscaled = unscaled_frequencies(config, cpu)
        yield "rope_freqs.weight", unscaled / rotary_frequencies(config, cpu), "F32"


def interleave(rows: Tensor, head_size: int) -> Tensor:
    """Order the rows of queries or keys as pairs: channel i, i + D/2, i + 1, i + 1 + D/2, ..."""
    halves = rows.reshape(-1, 2, head_size // 2, *rows.shape[1:])
    return halves.transpose(1, 2).reshape(rows.shape)


# --------------------------------------------------------------------------- tokenizer


@dataclass(frozen=True)
class Vocabulary:
    """The tokenizer as llama.cpp reads it."""

    tokens: Mapping[int, str]  # by id
    types: Mapping[int, int]  # of the tokens that are not NORMAL, by id
    model: str = "gpt2"  # byte-level BPE; rwkv takes the longest token that fits
    pre: str | None = None  # how text is split before merging
    merges: tuple[str, ...] = ()
    added: tuple[str, ...] = ()  # added tokens; special ones are plain text in a text
    needs_nfc: bool = False  # ours normalizes text to NFC, llama.cpp does not


def add_tokenizer(
    writer: "GGUFWriter", tokenizer: Tokenizer, vocabulary: Vocabulary, vocab_size: int
) -> None:
    """Add the tokenizer to the metadata; ids without a token are unused."""
    tokens = []
    types = []
    for i in range(vocab_size):
        known = i in vocabulary.tokens
        tokens.append(vocabulary.tokens[i] if known else f"[unused {i}]")
        types.append(vocabulary.types.get(i, NORMAL) if known else CONTROL)
    writer.add_tokenizer_model(vocabulary.model)
    if vocabulary.pre is not None:
        writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    if vocabulary.model == "gpt2":
        writer.add_token_merges(vocabulary.merges or NO_MERGES)
    if tokenizer.eot_id is not None:  # it also begins a document
        writer.add_bos_token_id(tokenizer.eot_id)
        writer.add_eos_token_id(tokenizer.eot_id)
    writer.add_add_bos_token(False)
    writer.add_add_eos_token(False)
    writer.add_add_space_prefix(False)
    template = tokenizer.config.get("chat_template")
    if isinstance(template, str):
        writer.add_chat_template(template)


def llama_cpp_vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    """Translate a tokenizer; raises `UserError` if llama.cpp splits text in another way."""
    if isinstance(tokenizer, CharsTokenizer):  # which has no end-of-text
        spelled = map(rwkv_spelling, tokenizer.chars)
        return Vocabulary(tokens=dict(enumerate(spelled)), types={}, model="rwkv")
    content = json.loads(tokenizer.file_text)
    ids = content["model"].get("vocab", {})
    added = tuple(token["content"] for token in content["added_tokens"])
    if tokenizer.kind == "bytes":
        tokens = dict(enumerate((*BYTE_CHARS, EOT)))
        return Vocabulary(tokens=tokens, types={256: CONTROL}, pre="gpt-2", added=added)
    require(
        content["model"].get("type", "BPE") == "BPE" and isinstance(ids, dict),
        f"the tokenizer is a {content['model'].get('type')}; only byte-level BPEs can be exported",
    )
    tokens = {i: token for token, i in ids.items()}
    types = {}
    for token in content["added_tokens"]:
        tokens[token["id"]] = token["content"]
        types[token["id"]] = CONTROL if token["special"] else USER_DEFINED
    merges = content["model"]["merges"]
    return Vocabulary(
        tokens=tokens,
        types=types,
        pre=pre_tokenizer_name(tokenizer, content),
        merges=tuple(pair if isinstance(pair, str) else " ".join(pair) for pair in merges),
        added=added,
        needs_nfc=normalizer_of(content) == "NFC",
    )


def normalizer_of(content: Mapping[str, Any]) -> str | None:
    """Return the type of the normalizer of a tokenizer.json."""
    normalizer: Mapping[str, str] = content.get("normalizer") or {}
    return normalizer.get("type")


def pre_tokenizer_name(tokenizer: Tokenizer, content: dict[str, Any]) -> str:
    """Return llama.cpp's name of the pre-tokenizer of a tokenizer.json.

    Raises `UserError` for one that is not in `PRE_TOKENIZERS`.
    """
    outer = content.get("pre_tokenizer") or {}
    steps = tuple(describe_step(step) for step in outer.get("pretokenizers", [outer]))
    found = PRE_TOKENIZERS.get(tuple(step for step in steps if step))
    normalizer = normalizer_of(content)
    if found is None or normalizer not in (None, "NFC"):
        raise UserError(
            f"the tokenizer splits text with the pre-tokenizer {' + '.join(steps) or 'none'}"
            f"{f' after the normalizer {normalizer}' if normalizer else ''}, which is "
            f"unknown to llama.cpp; it knows {', '.join(dict.fromkeys(PRE_TOKENIZERS.values()))}: "
            "export to transformers with --to"
        )
    if normalizer == "NFC":
        sys.stderr.write(
            "WARNING: the tokenizer normalizes text to NFC, which llama.cpp leaves out; it splits "
            "accents that are written as two characters into other tokens\n"
        )
    return found


def describe_step(step: dict[str, Any]) -> str:
    """Return what a step of a pre-tokenizer does, in the terms of `PRE_TOKENIZERS`."""
    kind = str(step.get("type"))
    if kind == "ByteLevel":
        return BYTE_LEVEL if step.get("use_regex", True) else ""
    if kind == "Split":
        return str(step["pattern"].get("Regex"))
    if kind == "Digits" and step.get("individual_digits"):
        return SINGLE_DIGITS
    return kind


def rwkv_spelling(char: str) -> str:
    """Spell a character as llama.cpp's rwkv vocabulary expects it."""
    escapes = {"\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t", "\0": "\\x00"}
    return escapes.get(char, char)


# --------------------------------------------------------------------------- proof and Modelfile


def prove_equal_gguf(
    model: GPT,
    tokenizer: Tokenizer,
    vocabulary: Vocabulary,
    tokens: Tensor,
    file: Path,
) -> Compared:
    """Open a float32 file with llama.cpp in a new process and compare it with `model`.

    Compares the logits after the beginnings of `tokens` (B, T), the ids of texts, and greedy
    tokens. Raises `CheckpointError` if they differ, `UserError` if llama.cpp cannot open the file.
    """
    texts = texts_to_compare(tokenizer, tokenizer.decode(tokens[0].tolist()), COMPARED_TEXTS)
    texts += [f"a {token} b{token}" for token in vocabulary.added]
    if vocabulary.needs_nfc:  # `pre_tokenizer_name` warned
        texts = [unicodedata.normalize("NFC", text) for text in texts]
    tolerance = GELU_TOLERANCE if model.config.mlp == "gelu" else TOLERANCE
    reference = gguf_reference(model, tokens, tolerance)
    settings = {
        "texts": texts,
        "ids": [tokenizer.encode(text) for text in texts],
        "block_size": model.config.block_size,
        "plain_token": plain_token(tokenizer),
        "tolerance": tolerance,
    }
    report = compare_gguf(file, reference, settings)
    return Compared(
        reference=reference,
        settings=settings,
        description=(
            f"opened by llama.cpp ({LLAMA_CPP} {report['version']}): its logits at "
            f"{len(reference['lengths'])} tokens differ by at most {report['difference']:.1e} from "
            f"ours in float32; the ids of {len(texts):,} texts and the greedy tokens are equal"
        ),
    )


def measure_difference(file: Path, compared: Compared) -> float:
    """Open a file of a smaller type with llama.cpp; return the largest difference of a logit."""
    report = compare_gguf(file, compared.reference, {**compared.settings, "tolerance": None})
    difference: float = report["difference"]
    return difference


def compare_gguf(
    file: Path, reference: dict[str, Tensor], settings: dict[str, Any]
) -> dict[str, Any]:
    """Run `verify_gguf.py` in a new process; return its report."""
    return compare_in_child(
        exported=file,
        name=file.name,
        reference=reference,
        metadata={"settings": json.dumps(settings)},
        module="accel_gpt.publish.verify_gguf",
        program="llama.cpp",
    )


@torch.no_grad()
def gguf_reference(model: GPT, tokens: Tensor, tolerance: float) -> dict[str, Tensor]:
    """Return the values that `verify_gguf.py` compares.

    They are `tokens` (T,), `lengths` (N,) of the beginnings after which the next token is
    predicted, `log_probabilities` (N, V), and the `greedy` tokens after `greedy_prompt`, the first
    half of `tokens`.
    """
    longest = min(COMPARED_TOKENS, model.config.block_size - 1)  # one more is predicted
    prompt = tokens[0, :longest]
    steps = min(COMPARED_POSITIONS, len(prompt))
    lengths = torch.linspace(1, len(prompt), steps=steps).long()
    logits = model(prompt.unsqueeze(0))[0]  # (T, V)
    start = prompt[: max(1, len(prompt) // 2)]
    reference = {
        "tokens": prompt,
        "lengths": lengths,
        "log_probabilities": logits[lengths - 1].float().log_softmax(-1),
        "greedy_prompt": start,
        "greedy": greedy_tokens(model, start, tolerance),
    }
    return {name: tensor.clone() for name, tensor in reference.items()}


def greedy_tokens(model: GPT, start: Tensor, tolerance: float) -> Tensor:
    """Return the most likely tokens after `start` (T,), until two are about as likely."""
    found = start
    for _ in range(min(GREEDY_TOKENS, model.config.block_size - len(start))):
        logits = model(found.unsqueeze(0), last_only=True)[0, -1]
        best = logits.topk(2)
        if best.values[0] - best.values[1] < 2 * tolerance * logits.std():
            break
        found = torch.cat((found, best.indices[:1]))
    return found[len(start) :]


def plain_token(tokenizer: Tokenizer) -> int:
    """Return the id of a token of whole printable characters."""
    for i in range(tokenizer.vocab_size):
        text = tokenizer.decode([i])
        if i != tokenizer.eot_id and text and text.isprintable() and "\ufffd" not in text:
            return i
    raise UserError("the tokenizer has no token that can be printed; the comparison needs one")


def texts_to_compare(tokenizer: Tokenizer, text: str, n: int) -> list[str]:
    """Return `n` texts: pieces of `text`, and random mixtures of many kinds of characters."""
    kinds = (tokenizer.chars,) if isinstance(tokenizer, CharsTokenizer) else CHARACTERS
    draw = random.Random(0)
    texts = []
    for number in range(n):
        start = draw.randrange(len(text))
        if number % 2 == 0 and not text.isspace():
            texts.append(text[start : start + draw.randrange(1, 200)])
        else:
            words = draw.choices(kinds, k=draw.randrange(1, 12))
            texts.append("".join(draw.choice(word) for word in words for _ in range(3)))
    return texts


def modelfile_of(file: Path) -> Path:
    """Return the path of the Modelfile beside a GGUF file."""
    return file.with_suffix(".Modelfile")


def write_modelfile(tokenizer: Tokenizer, file: Path, block_size: int) -> None:
    """Write the Modelfile of Ollama beside a GGUF file: a text is completed as it is."""
    lines = [
        f"# ollama create {file.stem.lower()} -f {modelfile_of(file).name}",
        f"FROM ./{file.name}",
        f"PARAMETER num_ctx {block_size}",
        "PARAMETER temperature 0.8",
    ]
    if tokenizer.eot is not None:
        lines.append(f'PARAMETER stop "{tokenizer.eot}"')
    if "chat_template" not in tokenizer.config:
        lines.append('TEMPLATE """{{ .Prompt }}"""')
    modelfile_of(file).write_text("\n".join(lines) + "\n", encoding="utf-8")
