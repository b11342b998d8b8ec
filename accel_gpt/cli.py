"""`accel-gpt COMMAND ...`: one parser; what a command needs is imported when it is called."""

import difflib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, TypeVar

import tyro

from accel_gpt import __version__
from accel_gpt.config import SampleConfig
from accel_gpt.data_config import DataConfig, PrepareConfig, Source
from accel_gpt.errors import (
    CheckpointError,
    DataError,
    UserError,
    not_negative,
    positive,
    require,
    run_main,
)
from accel_gpt.parse import (
    build,
    flatten,
    load_config,
    parse_command,
    read_options,
    read_yaml,
)

T = TypeVar("T")


def train_command(argv: Sequence[str]) -> int:
    """Train in this process; `accelerate launch` starts more of them."""
    from accel_gpt.hub.sources import inherit

    # a mistake is told before torch is imported
    config = load_config(argv, "accel-gpt train", inherit)
    from accel_gpt.train import launch

    return launch(config)


@dataclass(frozen=True)
class PrepareCommand(PrepareConfig):
    """Turn text, or shards of another project, into token shards; stopped, it continues.

    RECIPE.yaml holds any of these options as `key: value`; those of the command line go first.
    """

    source: Source | None = None
    """What path or dataset holds; null: what the endings of path's files tell, dataset with
    --dataset, else stdlib, the library of this Python."""
    out: str = ""
    """Folder to make; empty: data/<source>_<tokenizer>."""
    rank: int = 0
    """Which part of out this machine makes, from 0; of the --world parts."""
    world: int = 1
    """Machines that make a part of out each."""
    merge: bool = False
    """Join the parts of out that --rank and --world made."""


def prepare_command(argv: Sequence[str]) -> int:
    """Make a data folder, or a part of one, or join the parts."""
    asked = parse_recipe(PrepareCommand, argv, "accel-gpt prepare")
    values = {f.name: getattr(asked, f.name) for f in fields(PrepareConfig)}
    if asked.merge:
        require(bool(asked.out), "--merge needs --out, the folder whose parts are joined")
        from accel_gpt.data.making.merge import merge

        merge(Path(asked.out))
        return 0
    if asked.source is None:
        from accel_gpt.data.sources import guess_source

        without_path: Source = "dataset" if asked.dataset else "stdlib"
        values["source"] = guess_source(asked.path) if asked.path else without_path
    out = asked.out or f"data/{values['source']}_{Path(asked.tokenizer).stem}"
    from accel_gpt.data.prepare import prepare

    if not prepare(PrepareConfig(**values), Path(out), asked.rank, asked.world):
        require(
            asked.path != "-",
            f"{out} is already prepared, so standard input was not read; delete the folder or give "
            "another --out",
        )
        sys.stdout.write(f"already prepared: {out}\n")
    return 0


def parse_recipe(cls: type[T], argv: Sequence[str], prog: str) -> T:
    """`[RECIPE.yaml] --key value ...` as the dataclass `cls`, whose fields are the keys of both."""
    words = list(argv)
    path = words.pop(0) if words and not words[0].startswith("-") else None
    if path is None or {"-h", "--help"} & set(words):
        return parse_command(cls, words, f"{prog} [RECIPE.yaml]")
    values = read_yaml(path)
    require(isinstance(values, Mapping), f"{path} holds no keys; see configs/data/ for recipes")
    return build(cls, {**dict(flatten(cls, values, path)), **dict(read_options(cls, words))})


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


@dataclass(frozen=True)
class InspectCommand:
    """Tell what data, a run or a checkpoint holds and verify it, or compare tokenizers on a text.

    Exit code 3 when data is damaged, 4 when a checkpoint is.
    """

    place: Annotated[str, tyro.conf.Positional] = ""
    """Data folder, of any project, or its URL; or folder of a run or of a checkpoint."""
    json: bool = False
    """One JSON object in place of text."""
    quick: bool = False
    """Read no shard and hash no checkpoint."""
    tokenizer: str | None = None
    """gpt2, bytes or the path of a tokenizer.json, for shards that do not say it."""
    windows: int = 2
    """First windows of each split that are shown as text."""
    block_size: int = 64
    """Tokens in a window."""
    text: str | None = None
    """File of UTF-8 text on which tokenizers are compared."""
    tokenizers: tuple[str, ...] = ()
    """For text: gpt2, bytes, tokenizer.json files, data folders; none: gpt2, bytes, PLACE's."""

    def __post_init__(self) -> None:
        require(bool(self.place or self.text), "PLACE or --text FILE missing; see --help")
        require(bool(self.text or not self.tokenizers), "--tokenizers needs --text FILE")
        not_negative("inspect", self, "windows")
        positive("inspect", self, "block_size")


def inspect_command(argv: Sequence[str]) -> int:
    """Print a report, then its problems on stderr; 0 when there are none."""
    asked = parse_command(InspectCommand, argv, "accel-gpt inspect")
    from accel_gpt.data.inspection.report import data_text, printable, tokenizers_text

    data, code, place = DataConfig(tokenizer=asked.tokenizer), DataError.exit_code, asked.place
    if asked.text:
        from accel_gpt.data.inspection.compare import compare

        specs = asked.tokenizers or ("gpt2", "bytes", *filter(None, [place]))
        report, tell = compare(asked.text, specs, data), tokenizers_text
    elif is_run(place):
        from accel_gpt.run.inspection import inspect_run, run_text

        report, tell, code = inspect_run(place, asked.quick), run_text, CheckpointError.exit_code
    else:
        from accel_gpt.data.inspection.describe import inspect_data

        report = inspect_data(place, data, asked.quick, asked.windows, asked.block_size)
        tell = data_text
    sys.stdout.write(json.dumps(report, indent=1) + "\n" if asked.json else tell(report))
    sys.stdout.flush()
    for problem in report["problems"]:
        sys.stderr.write(f"error: {printable(problem)}\n")
    return code if report["problems"] else 0


def is_run(place: str) -> bool:
    """Whether a folder is a run's or a checkpoint's."""
    marks = ("checkpoints", "manifest.json", "trainer_state.json")
    return any(Path(place, mark).exists() for mark in marks)


Command = Callable[[Sequence[str]], int]
COMMANDS: Mapping[str, tuple[Command, str]] = MappingProxyType(
    {
        "train": (train_command, "train a GPT as a config says, or go on with its run"),
        "prepare": (prepare_command, "text -> tokenized shards"),
        "sample": (sample_command, "text from a run or a checkpoint"),
        "inspect": (inspect_command, "verify data or a checkpoint; compare tokenizers"),
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
