"""`accel-gpt COMMAND ...`: one parser; what a command needs is imported when it is called."""

import difflib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Literal

import tyro

from accel_gpt import __version__
from accel_gpt.config import PrepareConfig, SampleConfig
from accel_gpt.errors import UserError, run_main
from accel_gpt.parse import load_config, parse_command


def train_command(argv: Sequence[str]) -> int:
    """Train in this process; `accelerate launch` starts more of them."""
    config = load_config(argv, "accel-gpt train")  # a mistake is told before torch is imported
    from accel_gpt.train import launch

    return launch(config)


@dataclass(frozen=True)
class PrepareCommand(PrepareConfig):
    """Turn text into token shards."""

    source: Literal["stdlib", "text", "jsonl", "parquet", "dataset"] | None = None
    """Where documents come from; null: text with --path, dataset with --dataset, else stdlib."""
    out: str = ""
    """Folder to make; empty: data/<source>_<tokenizer>."""


def prepare_command(argv: Sequence[str]) -> int:
    """Make a data folder."""
    asked = parse_command(PrepareCommand, argv, "accel-gpt prepare")
    values = {f.name: getattr(asked, f.name) for f in fields(PrepareConfig)}
    if asked.source is None:
        values["source"] = "text" if asked.path else "dataset" if asked.dataset else "stdlib"
    out = asked.out or f"data/{values['source']}_{Path(asked.tokenizer).stem}"
    from accel_gpt.data.prepare import prepare

    prepare(PrepareConfig(**values), Path(out))
    return 0


@dataclass(frozen=True)
class SampleCommand:
    """Write text with the model of a run or a checkpoint."""

    run: Annotated[str, tyro.conf.Positional]
    """Folder of a run, or of one checkpoint."""
    prompt: str = ""
    """Text to continue; empty: the start of a document."""
    num: int = 1
    """Samples."""
    max_new_tokens: int = 200
    """Tokens per sample."""
    temperature: float = 0.8
    """0: greedy."""
    top_k: int | None = 50
    """Tokens to choose from; null: all."""
    top_p: float = 1.0
    """Probability mass to choose from."""
    seed: int = 1337
    """Of the draws."""
    checkpoint: str = "last"
    """last, best, or a step."""


def sample_command(argv: Sequence[str]) -> int:
    """Print samples."""
    asked = parse_command(SampleCommand, argv, "accel-gpt sample")
    config = SampleConfig(
        num=asked.num,
        max_new_tokens=asked.max_new_tokens,
        temperature=asked.temperature,
        top_k=asked.top_k,
        top_p=asked.top_p,
    )
    import torch

    from accel_gpt.evals.samples import write_text
    from accel_gpt.run.checkpoint import find_checkpoint, load_model

    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    model, tokenizer = load_model(find_checkpoint(Path(asked.run), asked.checkpoint), device)
    generator = torch.Generator(device).manual_seed(asked.seed)
    texts = write_text(model, tokenizer, asked.prompt, config, generator)
    sys.stdout.write("\n---------------\n".join(texts) + "\n")
    return 0


Command = Callable[[Sequence[str]], int]
COMMANDS: Mapping[str, tuple[Command, str]] = MappingProxyType(
    {
        "train": (train_command, "train a GPT as a config says, or go on with its run"),
        "prepare": (prepare_command, "text -> tokenized shards"),
        "sample": (sample_command, "text from a run or a checkpoint"),
    }
)


def dispatch(argv: Sequence[str]) -> int:
    """Call the command that `argv` names."""
    if not argv or argv[0] in ("-h", "--help"):
        sys.stdout.write(overview())
        return 0
    if argv[0] in ("-V", "--version"):
        sys.stdout.write(f"accel-gpt {__version__}\n")
        return 0
    if argv[0] not in COMMANDS:
        near = difflib.get_close_matches(argv[0], COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(COMMANDS)}"
        raise UserError(f"unknown command {argv[0]!r}; {hint}")
    return COMMANDS[argv[0]][0](argv[1:])


def overview() -> str:
    """The help of `accel-gpt` itself."""
    lines = [f"  {name:<9} {text}" for name, (_, text) in COMMANDS.items()]
    return (
        "usage: accel-gpt COMMAND [...]\n\nPretrain GPT language models.\n\n"
        + "\n".join(lines)
        + "\n\naccel-gpt COMMAND --help lists its options with types, defaults and units.\n"
    )


def main() -> None:
    """Entry point of the `accel-gpt` script."""
    sys.exit(run_main(dispatch, sys.argv[1:]))


if __name__ == "__main__":
    main()
