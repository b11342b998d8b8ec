"""The part of `accel-gpt plan` about quality: the loss by a ladder; what a budget trains best."""

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import yaml

from accel_gpt.commands.ladder import depth_keys, recipe_differences, sized
from accel_gpt.commands.plan_time import plan_time
from accel_gpt.commands.plan_vocabulary import data_folders
from accel_gpt.config.compare import option_of
from accel_gpt.config.depth import scaling_parameters
from accel_gpt.config.experiment import Config
from accel_gpt.config.parse import to_flat, to_nested
from accel_gpt.config.plan import LENGTH, make_plan
from accel_gpt.config.shipped import shipped_folder
from accel_gpt.console import table
from accel_gpt.cost.flops import flops_per_token
from accel_gpt.cost.memory import Machine, footprint, largest_size, with_size
from accel_gpt.cost.scaling import LEVEL, Ladder, Prediction, Size, read_ladder
from accel_gpt.errors import UserError, require
from accel_gpt.files import write_file
from accel_gpt.training.run_folder import RunFolder

if TYPE_CHECKING:
    from accel_gpt.commands.plan import PlanCommand

SHIPPED = "_ladder.json"  # how the shipped ones end, in configs/references
DEEPEST = 200  # of the sizes that are tried
UNLIMITED = 10**9  # steps
BUDGET_ROWS = MappingProxyType(
    {
        **{"parameters": ",", "tokens": ",", "flops": ".2e", "steps": ",", "batch": ","},
        **{"micro_batch_size": ",", "hours": ",.3g", "memory_gb": ".2f", "cost": ",.2f"},
        **{"loss": ".4f", "low": ".4f", "high": ".4f"},
    }
)
BOUNDS = MappingProxyType({"low": f"  {LEVEL:.0%} from", "high": "  to"})
WORSE = 3  # sizes in a row that are worse end the search


# --------------------------------------------------------------------------- the loss of a config


def plan_loss(options: "PlanCommand", config: Config, vocab_size: int) -> dict[str, Any] | None:
    """The expected loss of a config by the ladder that is given or shipped; None without one."""
    if options.ladder is None:
        if (shipped := shipped_ladder(config, vocab_size)) is None:
            return None
        found = expected(shipped, config, vocab_size)
        if data_fingerprint(config) not in (None, shipped.data["fingerprint"]):
            found["doubts"].append(f"{config.data.folder} is not the text that the rungs read")
        return found
    ladder, fingerprint = read_ladder(options.ladder), data_fingerprint(config)
    require(
        ladder.data["vocab_size"] == vocab_size,
        f"the rungs of --ladder {options.ladder} have a vocabulary of "
        f"{ladder.data['vocab_size']:,} tokens and {options.config} one of {vocab_size:,}; losses "
        "of different tokenizers are no one law: train a ladder with this one",
    )
    require(
        fingerprint in (None, ladder.data["fingerprint"]),
        f"the rungs of --ladder {options.ladder} were trained on other data "
        f"({ladder.data['folder']}) than {options.config} has ({config.data.folder}); train a "
        "ladder on these",
    )
    return expected(ladder, config, vocab_size)


def expected(ladder: Ladder, config: Config, vocab_size: int) -> dict[str, Any]:
    """What a ladder predicts for a config, with what speaks against it."""
    size, same = law_size(config, vocab_size), to_flat(ladder_config(ladder, config))
    windows = [(one["eval.tokens"], one["model.block_size"]) for one in (same, to_flat(config))]
    law = ladder.law.predict(size, ladder.windows if len(set(windows)) > 1 else 0.0)
    names = ", ".join(other_recipe(config, same))
    doubts = [*ladder.doubts(size), *([f"other values of {names} than the rungs"] if names else [])]
    return {"ladder": ladder.title, **law._asdict(), **bits(ladder, law), "doubts": doubts}


def other_recipe(config: Config, rung: Mapping[str, Any]) -> list[str]:
    """The keys that differ between a config and a rung, without those that a ladder varies: size,
    length, seed, and how the loss is evaluated.
    """
    return [
        key
        for key in recipe_differences(config, rung)
        if not option_of(key).size
        and key not in LENGTH
        and key != "seed"
        and not key.startswith("eval.")
    ]


def bits(ladder: Ladder, law: Prediction) -> dict[str, Any]:
    """A prediction in bits per byte."""
    factor = ladder.bits_per_byte
    return {"bits_per_byte": None if factor is None else [factor * value for value in law]}


def law_size(config: Config, vocab_size: int) -> Size:
    """What a law needs of a config."""
    plan = make_plan(with_size(config, 1) if config.train.micro_batch_size == "auto" else config, 1)
    tokens, flops = plan.max_steps * plan.tokens_per_step, flops_per_token(config.model, vocab_size)
    return Size(scaling_parameters(config.model, vocab_size), tokens, flops * tokens)


def ladder_config(ladder: Ladder, config: Config) -> Config:
    """What the rungs would be at the depth of a config."""
    return sized(given_keys(ladder), config.model.depth or config.model.n_layer, 1)


def shipped_ladder(config: Config, vocab_size: int) -> Ladder | None:
    """The shipped ladder of the same data, vocabulary and recipe, if there is one."""
    for path in sorted((shipped_folder() / "references").glob(f"*{SHIPPED}")):
        ladder, folder = read_ladder(path), Path(config.data.folder or "").name
        same = ladder.data["vocab_size"] == vocab_size and folder == ladder.data["folder"]
        if same and not other_recipe(config, to_flat(ladder_config(ladder, config))):
            return ladder
    return None


def data_fingerprint(config: Config) -> str | None:
    """The fingerprint of the training data, where they are one prepared folder."""
    folders = [folder for folder in data_folders(config) if (folder / "dataset.json").is_file()]
    if len(folders) != 1:
        return None
    from accel_gpt.data.sources import open_data

    return open_data(str(folders[0]), "train", config.data)[0].fingerprint


def loss_rows(found: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """The expected loss as rows of a table."""
    interval = f"{LEVEL:.0%}: {found['low']:.3f} to {found['high']:.3f}; ladder {found['ladder']}"
    yield "expected val loss", f"{found['loss']:.3f}", interval
    if found["bits_per_byte"]:
        value, low, high = found["bits_per_byte"]
        yield "  bits per byte", f"{value:.3f}", f"{LEVEL:.0%}: {low:.3f} to {high:.3f}"
    for doubt in found["doubts"]:
        yield "  a guess", "", doubt
    yield ()


# --------------------------------------------------------------------------- a budget


def open_budget(options: "PlanCommand") -> tuple[Ladder, Config]:
    """The ladder by which a budget is spent, and its config at the depth of the deepest rung."""
    require(options.ladder is not None, "--budget and --hours need --ladder")
    require(
        options.hours is not None or options.price is not None,
        f"--budget is {options.budget}, and without --price it buys no hours; give it, or --hours",
    )
    without = {"tokens_per_second": None, "measure": False, "vocab_size": None}
    without |= {} if options.gpu else {"mfu": None}
    for name, value in without.items():
        require(
            getattr(options, name) == value,
            f"--{name} has no effect with --budget and --hours: speed and vocabulary are those of "
            "--gpu, or of the ladder's rungs; leave it out",
        )
    ladder = read_ladder(options.ladder or "")
    return ladder, sized(given_keys(ladder), ladder.depths[-1], steps=1)


def plan_budget(options: "PlanCommand", ladder: Ladder, machine: Machine) -> dict[str, Any]:
    """The depth that reaches the lowest loss in the hours of a budget, and its neighbors.

    One whose loss is a guess is the best only if all are.
    """
    hours = options.hours or (options.budget or 0) / (options.price or 1) / machine.devices
    smallest = min(size.flops for size in ladder.sizes)
    found: list[dict[str, Any]] = []
    best: dict[str, Any] = {"depth": DEEPEST, "flops": 0.0}
    for depth in range(1, DEEPEST + 1):
        one = candidate(options, ladder, machine, depth, hours)
        found += [one] if one else []
        best = min(found, key=lambda row: (len(row["doubts"]) > 0, row["loss"]), default=best)
        if depth >= max(ladder.depths[-1], best["depth"] + WORSE):
            break
    require(
        best["flops"] >= smallest,
        f"{hours:,.3g} hours on {machine} are too few: they do not train as much as the smallest "
        f"rung, {smallest:.2g} FLOPs; give a larger budget, or train smaller rungs",
    )
    near = [row for row in found if abs(row["depth"] - best["depth"]) <= 1]
    out = Path(options.out)
    write_config(ladder, best, out)
    return {
        "machine": str(machine),
        "ladder": ladder.title,
        "hours": hours,
        "rows": near,
        "best": best["depth"],
        "config": str(out),
    }


def candidate(
    options: "PlanCommand", ladder: Ladder, machine: Machine, depth: int, hours: float
) -> dict[str, Any] | None:
    """What a depth reaches in the hours; None where it does not fit, or is all warm-up."""
    vocab_size = int(ladder.data["vocab_size"])
    config = sized(given_keys(ladder), depth, steps=1)
    if machine.memory is not None or config.train.micro_batch_size == "auto":
        largest = largest_size(config, vocab_size, machine)
        if largest is None:
            return None
        config = with_size(config, min(largest, config.train.sequences))
    flops = flops_per_token(config.model, vocab_size)
    if not machine.gpu:
        rate = measured_flops(options.ladder or "", ladder, depth) * machine.devices / flops
        options = replace(options, tokens_per_second=rate)
    steps = UNLIMITED
    for _ in range(5):  # an evaluation at the end alone takes its share of a short run
        config = replace(config, train=replace(config.train, max_steps=steps))
        try:
            plan = make_plan(config, machine.devices)
        except UserError:
            return None
        time = plan_time(options, config, vocab_size, machine, plan)
        require(time["hours"] is not None, f"the speed of {machine} is not known; give --gpu")
        if time["hours"] > hours:
            steps = max(1, int(steps * hours / time["hours"]))
    if time["hours"] > 1.01 * hours:  # a single step takes longer
        return None
    size = law_size(config, vocab_size)
    law = ladder.law.predict(size)
    return {
        **{"depth": depth, **size._asdict(), "steps": plan.max_steps},
        **{"batch": plan.tokens_per_step, "micro_batch_size": config.train.micro_batch_size},
        **{**law._asdict(), **bits(ladder, law), "doubts": ladder.doubts(size)},
        **{"hours": time["hours"], "cost": time["cost"]},
        "memory_gb": footprint(config, vocab_size, machine).total / 1e9,
    }


def given_keys(ladder: Ladder) -> dict[str, Any]:
    """The keys that the config of a ladder sets."""
    return {key: tuple(v) if isinstance(v, list) else v for key, v in ladder.config.items()}


def measured_flops(folder: str, ladder: Ladder, depth: int) -> float:
    """FLOP/s of a process that trained the rungs nearest to a depth, the median of their steps."""
    nearest = min(ladder.depths, key=lambda other: abs(other - depth))
    found = [
        (size.flops / size.tokens) * statistics.median(rates)
        for rung, size in zip(ladder.rungs, ladder.sizes, strict=True)
        if rung["depth"] == nearest and len(rates := rung_rates(Path(folder) / rung["name"]))
    ]
    require(
        bool(found),
        f"--ladder {folder} has no runs beside it whose speed would tell that of this machine; "
        "give --gpu, or train a ladder here",
    )
    return statistics.median(found)


def rung_rates(folder: Path) -> list[float]:
    """Tokens a second of a run as it logged them, the first value left out where there are more."""
    rates: list[float] = RunFolder(folder).metrics.curve("perf/tokens_per_second")[1].tolist()
    return rates[1:] or rates


def write_config(ladder: Ladder, best: Mapping[str, Any], out: Path) -> None:
    """Write the config that trains a candidate; `UserError` where it cannot be written."""
    own = {"out_dir": f"runs/{out.stem}", **given_keys(ladder)}
    own |= depth_keys(ladder.config, best["depth"])
    own |= {"train.max_steps": best["steps"], "train.micro_batch_size": best["micro_batch_size"]}
    own = {key: list(v) if isinstance(v, tuple) else v for key, v in own.items()}
    text = f"# ladder {ladder.title}, depth {best['depth']}: val loss {best['loss']:.3f} expected ("
    text += f"{LEVEL:.0%}: {best['low']:.3f} to {best['high']:.3f}), {best['hours']:.3g} hours\n"
    known = out.read_text(errors="replace") if out.is_file() else "# ladder "
    require(known.startswith("# ladder "), f"--out {out} is another config; name another file")
    try:
        write_file(out, [(text + yaml.safe_dump(to_nested(own), sort_keys=False)).encode()])
    except OSError as error:
        raise UserError(f"--out {out} cannot be written: {error.strerror}") from None


def budget_text(report: Mapping[str, Any]) -> str:
    """The answer to a budget as a table: the best depth and its neighbors."""
    rows = report["rows"]
    best = next(row for row in rows if row["depth"] == report["best"])
    lines = [["best" if row is best else "a guess" if row["doubts"] else "" for row in rows]]
    lines += [[f"{row['depth']}" for row in rows]]
    names = ["", "depth"]
    for name, form in BUDGET_ROWS.items():
        if any(row[name] is not None for row in rows):
            names.append(BOUNDS.get(name, name.replace("_", " ")))
            lines.append([format(row[name], form) for row in rows])
    names += ["bits per byte", *BOUNDS.values()]
    for i in range(3):
        lines.append(
            [f"{row['bits_per_byte'][i]:.4f}" if row["bits_per_byte"] else "" for row in rows]
        )
    cells = [(name, *line) for name, line in zip(names, lines, strict=True)]
    text = f"{report['hours']:.3g} hours on {report['machine']}, ladder {report['ladder']}\n\n"
    text += table(cells, "<20", *[">14"] * len(rows))
    text += "".join(f"a guess: {doubt}\n" for doubt in best["doubts"])
    return text + f"\naccel-gpt train {report['config']}\n"
