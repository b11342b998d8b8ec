"""`accel-gpt COMMAND ...`: one parser; what a command needs is imported when it is called."""

import difflib
import json
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from accel_gpt import __version__
from accel_gpt.config.data import DataConfig, PrepareConfig, Source
from accel_gpt.config.experiment import SampleConfig
from accel_gpt.config.options import (
    BenchCommand,
    EvaluateCommand,
    ExportCommand,
    InspectCommand,
    PlanCommand,
    PrepareCommand,
    PushCommand,
    ReportCommand,
    SampleCommand,
    VerifyResumeCommand,
)
from accel_gpt.config.parse import (
    build,
    flatten,
    leaves,
    load_config,
    parse_command,
    read_options,
    read_yaml,
)
from accel_gpt.config.shipped import resolve_config
from accel_gpt.errors import (
    CheckpointError,
    DataError,
    UserError,
    require,
    run_main,
    visible,
    without_secrets,
)

T = TypeVar("T")


def train_command(argv: Sequence[str]) -> int:
    """Train in this process; `accelerate launch` starts more of them."""
    from accel_gpt.hub.sources import inherit

    # a mistake is told before torch is imported
    config = load_config(argv, "accel-gpt train", inherit)
    from accel_gpt.train import launch

    return launch(config, argv[0])


def prepare_command(argv: Sequence[str]) -> int:
    """Make a data folder, or a part of one, or join the parts."""
    asked = parse_recipe(PrepareCommand, argv, "accel-gpt prepare")
    values = {f.name: getattr(asked, f.name) for f in fields(PrepareConfig)}
    if asked.merge:
        require(bool(asked.out), "--merge needs --out, the folder whose parts are joined")
        from accel_gpt.prepare.merge import merge

        merge(Path(asked.out))
        return 0
    if asked.source is None:
        from accel_gpt.text.documents import guess_source

        without_path: Source = "dataset" if asked.dataset else "stdlib"
        values["source"] = guess_source(asked.path) if asked.path else without_path
    out = asked.out or f"data/{values['source']}_{Path(asked.tokenizer).stem}"
    from accel_gpt.prepare.prepare import prepare

    if not prepare(PrepareConfig(**values), Path(out), asked.rank, asked.world):
        require(
            asked.path != "-",
            f"{out} is already prepared, so standard input was not read; delete the folder or give "
            "another --out",
        )
        show(f"already prepared: {out}\n")
    return 0


def parse_recipe(cls: type[T], argv: Sequence[str], prog: str) -> T:
    """`[RECIPE] --key value ...` as the dataclass `cls`, whose fields are the keys of both."""
    words = list(argv)
    path = words.pop(0) if words and not words[0].startswith("-") else None
    if path is None or {"-h", "--help"} & set(words):
        return parse_command(cls, words, f"{prog} [RECIPE]")
    path = str(resolve_config(path, "data"))
    values = read_yaml(path)
    require(isinstance(values, Mapping), f"{path} holds no keys; see configs/data/ for recipes")
    return build(cls, {**dict(flatten(cls, values, path)), **dict(read_options(cls, words))})


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

    from accel_gpt.commands.sample import interact
    from accel_gpt.evals.samples import SEPARATOR, say_cut, write_text
    from accel_gpt.hub.load import load_pretrained

    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    model, tokenizer = load_pretrained(asked.run, asked.checkpoint, asked.allow_pickle, device)
    generator = torch.Generator(device).manual_seed(asked.seed)
    if asked.interactive:
        interact(model, tokenizer, config, generator, sys.stdin, sys.stdout, say)
        return 0
    say_cut(asked.prompt, tokenizer, model.config.block_size, say)
    texts = write_text(model, tokenizer, asked.prompt, config, generator)
    show(SEPARATOR.join(texts) + "\n")
    return 0


def show(text: str) -> None:
    """Write to standard output; control characters of a model or a file never to a terminal."""
    sys.stdout.write(visible(text, sys.stdout))


def say(text: str) -> None:
    """A line beside the output."""
    sys.stderr.write(visible(f"{text}\n", sys.stderr))


def evaluate_command(argv: Sequence[str]) -> int:
    """Print the figures of a model, and keep those of a run with it."""
    asked = parse_command(EvaluateCommand, argv, "accel-gpt evaluate")
    exit_on_sigterm()
    from accel_gpt.commands.evaluate import evaluate

    show(evaluate(asked))
    return 0


def export_command(argv: Sequence[str]) -> int:
    """Write a folder for transformers; exit code 4 where it computes something else."""
    asked = parse_command(ExportCommand, argv, "accel-gpt export")
    exit_on_sigterm()
    from accel_gpt.hub.export import export

    to = Path(asked.to)
    exported = export(
        asked.run, to, asked.checkpoint, asked.dtype, asked.overwrite, asked.allow_pickle
    )
    show(exported.told(to))
    return 0


def exit_on_sigterm() -> None:
    """Let SIGTERM end this process as an error does, which leaves nothing half done behind."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


def push_command(argv: Sequence[str]) -> int:
    """Export a run and upload it to the Hub."""
    asked = parse_command(PushCommand, argv, "accel-gpt push")
    exit_on_sigterm()
    from accel_gpt.hub.push import push

    show(push(asked))
    return 0


def inspect_command(argv: Sequence[str]) -> int:
    """Print a report, then its problems on stderr; 0 when there are none."""
    asked = parse_command(InspectCommand, argv, "accel-gpt inspect")
    from accel_gpt.commands.inspect_report import data_text, printable, tokenizers_text

    data, code, place = DataConfig(tokenizer=asked.tokenizer), DataError.exit_code, asked.place
    if asked.text:
        from accel_gpt.commands.compare_tokenizers import compare

        specs = asked.tokenizers or ("gpt2", "bytes", *filter(None, [place]))
        report, tell = compare(asked.text, specs, data), tokenizers_text
    elif is_run(place):
        from accel_gpt.commands.inspect_run import inspect_run, run_text

        report, tell, code = inspect_run(place, asked.quick), run_text, CheckpointError.exit_code
    else:
        from accel_gpt.commands.inspect_data import inspect_data

        report = inspect_data(place, data, asked.quick, asked.windows, asked.block_size)
        tell = data_text
    text = json.dumps(report, indent=1) + "\n" if asked.json else tell(report)
    show(without_secrets(text))
    sys.stdout.flush()
    for problem in report["problems"]:
        sys.stderr.write(f"error: {without_secrets(printable(problem))}\n")
    return code if report["problems"] else 0


def verify_resume_command(argv: Sequence[str]) -> int:
    """Kill and launch again what a config asks for; 1 where that differs from never stopping."""
    from accel_gpt.hub.sources import inherit

    own, rest = parted(VerifyResumeCommand, argv)
    asked = parse_command(VerifyResumeCommand, own, "accel-gpt verify-resume")
    config = load_config([asked.config, *rest], "accel-gpt verify-resume", inherit)
    exit_on_sigterm()
    from accel_gpt.commands.verify_resume import verify_resume

    return verify_resume(asked, config)


def bench_command(argv: Sequence[str]) -> int:
    """Measure the training step of a config on this machine."""
    from accel_gpt.hub.sources import inherit

    own, rest = parted(BenchCommand, argv)
    asked = parse_command(BenchCommand, own, "accel-gpt bench")
    config = load_config([asked.config, *rest], "accel-gpt bench", inherit)
    exit_on_sigterm()
    from accel_gpt.commands.bench import bench, compare, table

    if asked.compare:
        show(compare(asked, rest))
    elif report := bench(asked, config):
        show(json.dumps(report, indent=1) + "\n" if asked.json else table(report))
    return 0


def plan_command(argv: Sequence[str]) -> int:
    """Print what a config will take, and what would make it fit."""
    from accel_gpt.commands.plan import forecast
    from accel_gpt.commands.plan_table import table
    from accel_gpt.commands.plan_vocabulary import inherit_known

    own, rest = parted(PlanCommand, argv)
    asked = parse_command(PlanCommand, own, "accel-gpt plan")
    config = load_config([asked.config, *rest], "accel-gpt plan", inherit_known)
    report = forecast(asked, config)
    show(json.dumps(report, indent=1) + "\n" if asked.json else table(report))
    return 0


def report_command(argv: Sequence[str]) -> int:
    """Write a page with curves, samples and configs of runs."""
    places: list[str] = []
    rest: list[str] = []
    for number, word in enumerate(argv):
        option = number > 0 and argv[number - 1].startswith("--") and "=" not in argv[number - 1]
        (rest if word.startswith("-") or option else places).append(word)
    asked = parse_command(ReportCommand, [*places[:1], *rest], "accel-gpt report")
    from accel_gpt.report.report import report

    show(report(replace(asked, run=tuple(places))))
    return 0


def parted(cls: type, argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words that the dataclass `cls` of a command takes, and those of the options it lacks."""
    own: list[str] = []
    rest: list[str] = []
    taking = own
    for word in argv:
        if word.startswith("--"):
            key, equals, _ = word[2:].partition("=")
            known = key.replace("-", "_") in (*leaves(cls), "help")
            taking = own if known else rest
            taking.append(word)
            if equals:
                taking = own
        else:
            taking.append(word)
            taking = own
    return own, rest


def is_run(place: str) -> bool:
    """Whether a folder is a run's or a checkpoint's."""
    marks = ("checkpoints", "manifest.json", "trainer_state.json")
    return any(Path(place, mark).exists() for mark in marks)


Command = Callable[[Sequence[str]], int]
COMMANDS: Mapping[str, tuple[Command, str]] = MappingProxyType(
    {
        "train": (train_command, "train a GPT as a config says, or go on with its run"),
        "prepare": (prepare_command, "text -> tokenized shards"),
        "sample": (sample_command, "text from a run, an exported folder or a Hub id"),
        "evaluate": (evaluate_command, "loss, bits per byte and questions, with standard errors"),
        "export": (export_command, "a folder that transformers opens, proven equal"),
        "push": (push_command, "the same to the Hub, with a model card"),
        "inspect": (inspect_command, "verify data or a checkpoint; compare tokenizers"),
        "plan": (plan_command, "size, FLOPs, memory, hours and cost of a config; does it fit?"),
        "bench": (bench_command, "tokens/s, MFU, memory of a config; where a step's time goes"),
        "report": (report_command, "curves and samples of runs, one HTML file"),
        "verify-resume": (
            verify_resume_command,
            "kill and continue runs: equal to never stopping?",
        ),
    }
)


def dispatch(argv: Sequence[str]) -> int:
    """Call the command that `argv` names."""
    if not argv or argv[0] in ("-h", "--help"):
        show(overview())
        return 0
    if argv[0] in ("-V", "--version"):
        show(f"accel-gpt {__version__}\n")
        return 0
    if argv[0] not in COMMANDS:
        near = difflib.get_close_matches(argv[0], COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(COMMANDS)}"
        raise UserError(f"unknown command {argv[0]!r}; {hint}")
    return COMMANDS[argv[0]][0](argv[1:])


def overview() -> str:
    """The help of `accel-gpt` itself."""
    lines = [f"  {name:<13} {text}" for name, (_, text) in COMMANDS.items()]
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
