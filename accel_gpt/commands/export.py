"""`accel-gpt export RUN`: write a model as a folder for transformers, or a file for llama.cpp."""

from pathlib import Path

from accel_gpt.commands.options import ExportCommand
from accel_gpt.console import install_exit_handlers, write_out
from accel_gpt.publish.gguf import export_gguf
from accel_gpt.transformers_io.export import export
from accel_gpt.transformers_io.pretrained import find_pretrained


def run(options: ExportCommand) -> int:
    """Write the model; exit code 4 if transformers or llama.cpp computes other logits."""
    install_exit_handlers()
    write_out(export_model(options))
    return 0


def export_model(options: ExportCommand) -> str:
    """Write the folder or file; return a description of it."""
    pretrained = find_pretrained(options.run, options.checkpoint, options.weights)
    if options.gguf:
        return export_gguf(
            pretrained=pretrained,
            to=Path(options.gguf),
            dtype=options.dtype,
        )
    return export(
        pretrained=pretrained,
        to=Path(options.to),
        dtype=options.dtype,
        as_qwen3=options.as_ == "qwen3",
    )
