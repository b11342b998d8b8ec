"""Export a model as one GGUF file, for llama.cpp, Ollama and LM Studio.

    accel-gpt export RUN --gguf model.gguf

Writes the file, and beside it a Modelfile for `ollama create`. `gguf_proof.py` opens the file in
float32 with llama.cpp in a new process, which must compute the same. For a smaller type it then
measures the difference. Needs the extra gguf.
"""

import importlib.util
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from accel_gpt.config.model import ModelConfig
from accel_gpt.data.tokenizer import Tokenizer
from accel_gpt.errors import install_extra, require
from accel_gpt.model.gpt import GPT
from accel_gpt.model.layers import rotary_frequencies, unscaled_frequencies
from accel_gpt.publish.gguf_proof import LLAMA_CPP, compare_gguf, compute_reference
from accel_gpt.publish.gguf_tokenizer import Vocabulary, add_tokenizer, llama_cpp_vocabulary
from accel_gpt.transformers_io.as_qwen3 import convert_to_qwen3
from accel_gpt.transformers_io.exportable import compared_tokens, load_exportable
from accel_gpt.transformers_io.hf_config import matching_preset
from accel_gpt.transformers_io.hf_weights import export_tensor, exportable_preset, weight_table
from accel_gpt.transformers_io.pretrained import Pretrained

if TYPE_CHECKING:
    from gguf import GGUFWriter

# GGMLQuantizationType of matrices, and LlamaFileType of the file
QUANTIZATION = MappingProxyType(
    {
        "fp32": ("F32", "ALL_F32"),
        "fp16": ("F16", "MOSTLY_F16"),
        "bf16": ("BF16", "MOSTLY_BF16"),
        "q8_0": ("Q8_0", "MOSTLY_Q8_0"),
    }
)
Q8_0_BLOCK = 32  # values that share a scale; other row lengths stay in float16


def export_gguf(pretrained: Pretrained, to: Path, dtype: str = "fp32") -> str:
    """Export a model to the GGUF file `to`.

    Returns a description of the file, and how to run it. The file appears when it is complete and
    compared, or not at all. Raises `UserError` if the file or its Modelfile exists, or if llama.cpp
    cannot compute the model or its tokenizer; `CheckpointError` if llama.cpp computes other values.
    """
    for package in ("gguf", LLAMA_CPP):
        require(
            importlib.util.find_spec(package) is not None,
            f"--gguf needs the package {package} but it is not installed; {install_extra('gguf')}",
        )
    for path in (to, modelfile_of(to)):
        require(not path.exists(), f"{path} already exists; give another file")
    model, tokenizer = load_exportable(pretrained)
    tokens = compared_tokens(model, tokenizer)
    architecture = llama_cpp_architecture(model.config)  # raises before anything is written
    vocabulary = llama_cpp_vocabulary(tokenizer)
    reference = compute_reference(model, tokenizer, vocabulary, tokens)
    if exportable_preset(model) == "fast":
        model = convert_to_qwen3(model, tokens)
    to.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".tmp_gguf_", dir=to.parent) as folder:
        written = Path(folder) / to.name
        write_gguf(model, architecture, tokenizer, vocabulary, written, "fp32")
        report = compare_gguf(written, reference)
        compared = (
            f"opened by llama.cpp ({LLAMA_CPP} {report['version']}): its logits at "
            f"{len(reference.values['lengths'])} tokens differ by at most "
            f"{report['difference']:.1e} from ours in float32; the ids of "
            f"{len(reference.settings['texts']):,} texts are equal\n"
        )
        if dtype != "fp32":
            write_gguf(model, architecture, tokenizer, vocabulary, written, dtype)
            difference = compare_gguf(written, reference, exact=False)["difference"]
            compared += f"in {dtype} its logits differ by at most {difference:.1e}\n"
        write_modelfile(tokenizer, written, model.config.block_size)
        modelfile_of(written).replace(modelfile_of(to))
        written.replace(to)
    ollama = to.stem.lower()
    return (
        f"{to}: {architecture} in {dtype}, {to.stat().st_size / 1e6:,.1f} MB\n"
        f"{compared}"
        f'  llama.cpp   llama-completion -m {to} -p "..."\n'
        f"  Ollama      ollama create {ollama} -f {modelfile_of(to)} && ollama run {ollama}\n"
    )


# --------------------------------------------------------------------------- the file


def write_gguf(
    model: GPT,
    architecture: str,
    tokenizer: Tokenizer,
    vocabulary: Vocabulary,
    file: Path,
    dtype: str,
) -> None:
    """Write a model and its tokenizer to `file`."""
    import gguf

    wanted, file_type = QUANTIZATION[dtype]
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_type("model")
    writer.add_name(file.stem)
    writer.add_file_type(gguf.LlamaFileType[file_type])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    add_shape(writer, model.config, model.vocab_size)
    add_tokenizer(writer, tokenizer, vocabulary, model.vocab_size)
    for name, tensor, stored in gguf_tensors(model, architecture, wanted):
        largest = tensor.abs().max().item()
        require(
            stored != "F16" or largest <= torch.finfo(torch.float16).max,
            f"{name} has a value of {largest:.3g}, too large for float16; give --dtype bf16",
        )
        kind = gguf.GGMLQuantizationType[stored]
        writer.add_tensor(name, gguf.quantize(tensor.numpy(), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


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
    for key, is_lacking in (
        ("mlp", config.mlp == "gelu_erf"),  # its GELU is the tanh form
        ("logit_softcap", config.logit_softcap is not None),
        ("rope_factor", preset == "qwen3" and config.rope_factor != 1),
    ):
        require(
            not is_lacking,
            f"model.{key} is {getattr(config, key)}, which llama.cpp cannot compute for {preset}",
        )
    return "qwen3" if preset == "fast" else preset


def add_shape(writer: "GGUFWriter", config: ModelConfig, vocab_size: int) -> None:
    """Add the sizes and constants of the model to the metadata."""
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
    if config.rope_factor != 1:  # llama.cpp divides its frequencies by this tensor
        unscaled = unscaled_frequencies(config)
        yield "rope_freqs.weight", unscaled / rotary_frequencies(config), "F32"


def interleave(rows: Tensor, head_size: int) -> Tensor:
    """Order the rows of queries or keys as pairs: channel i, i + D/2, i + 1, i + 1 + D/2, ..."""
    halves = rows.reshape(-1, 2, head_size // 2, *rows.shape[1:])
    return halves.transpose(1, 2).reshape(rows.shape)


# --------------------------------------------------------------------------- Modelfile


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
