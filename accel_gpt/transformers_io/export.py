"""Export a model to a folder for transformers, and prove that it computes the same there.

    accel-gpt export RUN --to DIR

Writes config.json, generation_config.json, model.safetensors (in shards above 5 GB) and the
tokenizer's files. Then `compare_export.py` opens the folder with transformers in a new process, and
compares the results.
"""

import contextlib
import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from accel_gpt.children import child_error, run_child
from accel_gpt.data.tokenizer import Tokenizer
from accel_gpt.errors import CheckpointError, UserError, require
from accel_gpt.files import write_file
from accel_gpt.model.gpt import GPT
from accel_gpt.transformers_io.as_qwen3 import convert_to_qwen3
from accel_gpt.transformers_io.compare_export import DIFFERENT
from accel_gpt.transformers_io.exportable import (
    COMPARED_SEQUENCES,
    compared_tokens,
    compute_logits,
    load_exportable,
)
from accel_gpt.transformers_io.hf_config import HF_CLASSES, write_hf_config
from accel_gpt.transformers_io.hf_weights import export_tensors, exportable_preset
from accel_gpt.transformers_io.pretrained import Pretrained

TEMPORARY = ".tmp_export"
SHARD_SIZE = "5GB"  # of model.safetensors; the default of transformers 4
EXPORT_DTYPES = MappingProxyType(
    {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
)


def export(
    pretrained: Pretrained,
    to: Path,
    dtype: str = "fp32",
    as_qwen3: bool = False,
) -> str:
    """Export a model to the folder `to`.

    Returns a description. The folder appears when it is complete and compared, or not at all.
    `as_qwen3` converts a model of the preset fast. Raises `UserError` if the folder holds files, or
    if no class of transformers computes the model; `CheckpointError` if transformers computes other
    values.
    """
    to = to.resolve()
    temporary = to / TEMPORARY  # `to` may be a mount point or a working directory
    shutil.rmtree(temporary, ignore_errors=True)
    existed = to.exists()
    require(
        not existed or (to.is_dir() and not any(to.iterdir())),
        f"{to} already exists; give a new or an empty folder",
    )
    model, tokenizer = load_exportable(pretrained)
    exportable_preset(model)  # raises an error before anything is written
    try:
        temporary.mkdir(parents=True)
        description = write_model(
            model=model,
            tokenizer=tokenizer,
            folder=temporary,
            dtype=dtype,
            as_qwen3=as_qwen3,
        )
        for path in temporary.iterdir():
            if path.name != "config.json":  # moved last: a folder without it is not a model
                path.rename(to / path.name)
        (temporary / "config.json").rename(to / "config.json")
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if not existed:
            with contextlib.suppress(OSError):  # it holds the model, or was not made
                to.rmdir()
    return f"{to}: {description}"


def write_model(
    model: GPT, tokenizer: Tokenizer, folder: Path, dtype: str, as_qwen3: bool = False
) -> str:
    """Write all files of a model into an existing folder, and compare what transformers computes.

    Returns a description. `as_qwen3` converts a model of the preset fast. Consumes the model.
    """
    tokens = compared_tokens(model, tokenizer)
    reference = {"tokens": tokens}
    if dtype != "fp32":
        reference["trained"] = compute_logits(model, tokens)
    if as_qwen3:
        model = convert_to_qwen3(model, tokens)
    preset = exportable_preset(model)
    with torch.no_grad():
        for weight in model.parameters():  # and not the rotary table
            weight.copy_(weight.to(EXPORT_DTYPES[dtype]))
    reference["logits"] = compute_logits(model, tokens)
    require(
        bool(reference["logits"].isfinite().all()),
        f"the weights in {dtype} give logits that are not finite; nothing was exported",
    )
    parameters, size = write_files(model, tokenizer, folder, EXPORT_DTYPES[dtype])
    report = prove_equal(reference, tokenizer, folder)
    differences = f"{report['difference']:.1e} from ours"
    if "from_trained" in report:
        differences += (
            f" with the weights in {dtype}, and by at most {report['from_trained']:.1e} from ours "
            "with the trained weights,"
        )
    return (
        f"{HF_CLASSES[preset]}, {parameters:,} parameters in {dtype}, {size / 1e6:,.1f} MB\n"
        f"opened by transformers {report['transformers']}: its logits differ by at most "
        f"{differences} on {COMPARED_SEQUENCES} sequences of random tokens\n"
    )


def write_files(
    model: GPT, tokenizer: Tokenizer, folder: Path, dtype: torch.dtype
) -> tuple[int, int]:
    """Write all files of a model into `folder`; return the count of its parameters and their bytes.

    Consumes the model, to free its memory.
    """
    from huggingface_hub import save_torch_state_dict

    config = write_hf_config(
        model.config,
        vocab_size=model.vocab_size,
        eot_id=tokenizer.eot_id,
        dtype=str(dtype).removeprefix("torch."),
    )
    generation = {
        "bos_token_id": config["bos_token_id"],
        "eos_token_id": config["eos_token_id"],
        "pad_token_id": tokenizer.eot_id,
    }
    write_settings(folder / "config.json", config)
    write_settings(folder / "generation_config.json", generation)
    tokenizer.save(folder, model.config.block_size, model.vocab_size)
    tensors = export_tensors(model, exportable_preset(model), dtype)
    model.to("meta")  # frees its memory for the process that compares
    try:
        save_torch_state_dict(tensors, folder, max_shard_size=SHARD_SIZE, metadata={"format": "pt"})
    except SafetensorError as error:  # in place of OSError, such as of a full disk
        raise UserError(f"{folder} cannot be written: {error}") from None
    for file in folder.glob("*.safetensors"):
        shutil.copymode(folder / "config.json", file)  # safetensors lets only the owner read it
    parameters = sum(tensor.numel() for tensor in tensors.values())
    size = sum(tensor.numel() * tensor.itemsize for tensor in tensors.values())
    return parameters, size


def write_settings(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file as transformers writes its configs."""
    text = json.dumps(content, indent=2, sort_keys=True) + "\n"
    write_file(path, [text.encode()])


# --------------------------------------------------------------------------- proof


def prove_equal(reference: dict[str, Tensor], tokenizer: Tokenizer, folder: Path) -> dict[str, Any]:
    """Open `folder` with transformers and compare it with `reference`: see `compare_in_child`."""
    text = tokenizer.decode(reference["tokens"][0].tolist())
    return compare_in_child(
        exported=folder,
        name=str(folder),
        reference={**reference, "ids": torch.tensor(tokenizer.encode_prompt(text))},
        metadata={"text": text},
        module="accel_gpt.transformers_io.compare_export",
        program="transformers",
        environment={"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"},
    )


def compare_in_child(
    exported: Path,
    name: str,
    reference: dict[str, Tensor],
    metadata: dict[str, str],
    module: str,
    program: str,
    environment: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Open an exported model with another program, in a new process that runs `module`.

    The process compares it with `reference` and `metadata`. `name` and `program` stand in errors.
    Returns the report of the process. Raises `CheckpointError` with the first difference,
    `UserError` if the process failed.
    """
    with tempfile.TemporaryDirectory(dir=exported.parent) as temporary:
        file = Path(temporary) / "reference.safetensors"
        save_file(reference, file, metadata=metadata)
        done = run_child(
            [str(exported), str(file)], module=module, environment=environment, capture=True
        )
    error = child_error(done.stderr, done.returncode)
    if done.returncode == DIFFERENT:
        raise CheckpointError(
            f"the exported model differs from the trained one: {error}; nothing was kept"
        )
    require(
        done.returncode == 0,
        f"{program} could not open {name}: exit code {done.returncode} ({error}); nothing was kept",
    )
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report
