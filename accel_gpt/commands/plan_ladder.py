"""`accel-gpt plan` with a ladder: predict a loss, and choose a config for a budget."""

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from accel_gpt.commands.options import PlanCommand
from accel_gpt.config.experiment import Config
from accel_gpt.config.parse import to_flat, to_nested
from accel_gpt.config.plan import Plan, make_plan
from accel_gpt.config.shipped import shipped_folder
from accel_gpt.console import table
from accel_gpt.cost.cluster import Network
from accel_gpt.cost.flops import flops_per_token
from accel_gpt.cost.forecast import assumed_mfu, run_time, speed_at
from accel_gpt.cost.memory import footprint, largest_size, with_size
from accel_gpt.cost.rungs import config_at, depth_keys, other_recipe, run_size
from accel_gpt.cost.scaling import LEVEL, Ladder, Prediction, Size, read_ladder
from accel_gpt.data.planning import data_folders, evaluation_tokens
from accel_gpt.data.sources import open_data
from accel_gpt.errors import UserError, require
from accel_gpt.files import write_file
from accel_gpt.training.run_folder import RunFolder

SHIPPED = "_ladder.json"  # end of the file names of shipped ladders, in configs/references
DEEPEST = 200  # largest depth that is tried
UNLIMITED = 10**9  # steps, to start the search
ROUNDS = 5  # of the search for the steps: the share of evaluations changes with the steps
BUDGET_ROWS = MappingProxyType(
    {
        "parameters": ",",
        "tokens": ",",
        "flops": ".2e",
        "steps": ",",
        "batch": ",",
        "micro_batch_size": ",",
        "hours": ",.3g",
        "memory_gb": ".2f",
        "cost": ",.2f",
        "loss": ".4f",
        "low": ".4f",
        "high": ".4f",
    }
)
BOUNDS = MappingProxyType({"low": f"  {LEVEL:.0%} from", "high": "  to"})
WORSE = 3  # depths in a row that are worse end the search


# --------------------------------------------------------------------------- the loss of a config


def plan_loss(options: PlanCommand, config: Config, vocab_size: int) -> dict[str, Any] | None:
    """Predict the loss of a config from --ladder or a shipped ladder; None without a ladder."""
    fingerprint = data_fingerprint(config)
    if options.ladder is None:
        shipped = shipped_ladder(config, vocab_size)
        if shipped is None:
            return None
        found = predict_loss(shipped, config, vocab_size)
        same_text = ladder_config(shipped, config).data.prepare == config.data.prepare
        if fingerprint not in (None, shipped.data["fingerprint"]) and not same_text:
            found["doubts"].append(f"{config.data.folder} is not the data of the rungs")
        return found
    ladder = read_ladder(options.ladder)
    require(
        ladder.data["vocab_size"] == vocab_size,
        f"the rungs of --ladder {options.ladder} have a vocabulary of "
        f"{ladder.data['vocab_size']:,} tokens, but {options.config} has {vocab_size:,}; losses "
        "of different tokenizers follow different laws; train a ladder with this tokenizer",
    )
    require(
        fingerprint in (None, ladder.data["fingerprint"]),
        f"the rungs of --ladder {options.ladder} were trained on {ladder.data['folder']}, but "
        f"{options.config} has other data ({config.data.folder}); train a ladder on this data",
    )
    return predict_loss(ladder, config, vocab_size)


def predict_loss(ladder: Ladder, config: Config, vocab_size: int) -> dict[str, Any]:
    """Predict the loss of a config, with warnings."""
    size = law_size(config, vocab_size)
    rungs = to_flat(ladder_config(ladder, config))
    own = to_flat(config)
    same_window = (
        rungs["eval.tokens"] == own["eval.tokens"]
        and rungs["model.block_size"] == own["model.block_size"]
    )
    law = ladder.law.predict(size, 0.0 if same_window else ladder.windows)
    warnings = list(ladder.warnings(size))
    names = ", ".join(other_recipe(config, rungs))
    if names:
        warnings.append(f"other values of {names} than in the rungs")
    return {"ladder": ladder.title, **law._asdict(), **bits(ladder, law), "doubts": warnings}


def bits(ladder: Ladder, law: Prediction) -> dict[str, Any]:
    """Return a prediction in bits per byte; None if the ladder has none."""
    factor = ladder.bits_per_byte
    if factor is None:
        return {"bits_per_byte": None}
    return {"bits_per_byte": [factor * value for value in law]}


def law_size(config: Config, vocab_size: int) -> Size:
    """Return the size from which a law predicts the loss of a config."""
    plan = plan_of_one_process(config)
    return run_size(config, vocab_size, plan.max_steps * plan.tokens_per_step)


def plan_of_one_process(config: Config) -> Plan:
    """Make the plan of a config for one process, without a measurement for `auto`."""
    if config.train.micro_batch_size == "auto":
        config = with_size(config, 1)
    return make_plan(config, 1)


def ladder_config(ladder: Ladder, config: Config) -> Config:
    """Return the config that a rung would have at the depth and length of `config`."""
    depth = config.model.depth or config.model.n_layer
    steps = plan_of_one_process(config).max_steps
    return config_at(given_keys(ladder), depth, max_steps=steps)


def shipped_ladder(config: Config, vocab_size: int) -> Ladder | None:
    """Return the shipped ladder of the same data, vocabulary and recipe, if there is one."""
    folder = Path(config.data.folder or "").name
    for path in sorted((shipped_folder() / "references").glob(f"*{SHIPPED}")):
        ladder = read_ladder(path)
        if ladder.data["vocab_size"] != vocab_size or ladder.data["folder"] != folder:
            continue
        if not other_recipe(config, to_flat(ladder_config(ladder, config))):
            return ladder
    return None


def data_fingerprint(config: Config) -> str | None:
    """Return the fingerprint of the training data; None unless it is one prepared folder."""
    folders = [folder for folder in data_folders(config) if (folder / "dataset.json").is_file()]
    if len(folders) != 1:
        return None
    return open_data(str(folders[0]), "train", config.data)[0].fingerprint


def loss_rows(found: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield the expected loss as rows of a table."""
    interval = f"{LEVEL:.0%}: {found['low']:.3f} to {found['high']:.3f}; ladder {found['ladder']}"
    yield "expected val loss", f"{found['loss']:.3f}", interval
    if found["bits_per_byte"]:
        value, low, high = found["bits_per_byte"]
        yield "  bits per byte", f"{value:.3f}", f"{LEVEL:.0%}: {low:.3f} to {high:.3f}"
    for warning in found["doubts"]:
        yield "  warning", "", warning
    yield ()


# --------------------------------------------------------------------------- a budget


def open_budget(options: PlanCommand) -> tuple[Ladder, Config]:
    """Return the ladder that chooses a config, and its config at the deepest rung."""
    require(
        options.ladder is not None,
        "--ladder is missing; give the folder of a ladder for --budget or --hours",
    )
    require(
        options.hours is not None or options.price is not None,
        f"--budget is {options.budget}, but --price is missing; give --price, or give --hours "
        "instead",
    )
    unused = ["tokens_per_second", "vocab_size"]
    if not options.gpu:
        unused.append("mfu")
    for name in unused:
        require(
            getattr(options, name) is None,
            f"--{name} has no effect with --budget and --hours, since speed and vocabulary come "
            "from --gpu or from the rungs; leave it out",
        )
    ladder = read_ladder(options.ladder or "")
    return ladder, config_at(given_keys(ladder), ladder.depths[-1], max_steps=1)


def plan_budget(options: PlanCommand, ladder: Ladder, network: Network) -> dict[str, Any]:
    """Find the depth that reaches the lowest loss within a budget, and its neighbors.

    A depth whose prediction has warnings is the best only if every depth has warnings.
    """
    machine = network.machine
    bought = (options.budget or 0) / (options.price or 1) / machine.devices
    hours = options.hours or bought
    found: list[dict[str, Any]] = []
    best: dict[str, Any] = {"depth": DEEPEST, "flops": 0.0}
    for depth in range(1, DEEPEST + 1):
        row = candidate(options, ladder, network, depth, hours)
        if row is not None:
            found.append(row)
            best = min(found, key=candidate_key)
        if depth >= max(ladder.depths[-1], best["depth"] + WORSE):
            break
    smallest = min(size.flops for size in ladder.sizes)
    require(
        best["flops"] >= smallest,
        f"{hours:,.3g} hours on {machine} are too few to train the smallest rung "
        f"({smallest:.2g} FLOPs); give a larger budget, or train smaller rungs",
    )
    out = Path(options.out)
    write_config(ladder, best, out)
    return {
        "machine": str(machine),
        "ladder": ladder.title,
        "hours": hours,
        "rows": [row for row in found if abs(row["depth"] - best["depth"]) <= 1],
        "best": best["depth"],
        "config": str(out),
    }


def candidate_key(row: Mapping[str, Any]) -> tuple[bool, float]:
    """Return the sort key of a candidate: candidates with warnings come last, then by loss."""
    return len(row["doubts"]) > 0, row["loss"]


def candidate(
    options: PlanCommand, ladder: Ladder, network: Network, depth: int, hours: float
) -> dict[str, Any] | None:
    """Return the longest run of a depth; None if it exceeds the memory or the hours."""
    machine = network.machine
    vocab_size = int(ladder.data["vocab_size"])
    config = config_at(given_keys(ladder), depth, max_steps=1)
    if machine.memory_bytes is not None or config.train.micro_batch_size == "auto":
        largest = largest_size(config, vocab_size, machine)
        if largest is None:
            return None
        config = with_size(config, min(largest, config.train.micro_batch_sequences))
    speed: float | None
    if machine.gpu:
        speed = speed_at(options.mfu or assumed_mfu(config), config, vocab_size, machine)
    else:
        flops = flops_per_token(config.model, vocab_size)
        speed = measured_flops(options.ladder or "", ladder, depth) * machine.devices / flops
    if speed is None:
        raise UserError(f"the speed of {machine} is unknown; give --gpu")
    longest = longest_run(config, vocab_size, network, speed, hours)
    if longest is None:
        return None
    config, plan, run_hours = longest
    size = law_size(config, vocab_size)
    law = ladder.law.predict(size)
    return {
        "depth": depth,
        **size._asdict(),
        "steps": plan.max_steps,
        "batch": plan.tokens_per_step,
        "micro_batch_size": config.train.micro_batch_size,
        **law._asdict(),
        **bits(ladder, law),
        "doubts": ladder.warnings(size),
        "hours": run_hours,
        "cost": run_hours * machine.devices * options.price if options.price else None,
        "memory_gb": footprint(config, vocab_size, machine).total / 1e9,
    }


def longest_run(
    config: Config, vocab_size: int, network: Network, speed: float, hours: float
) -> tuple[Config, Plan, float] | None:
    """Return the config of the longest run that ends within `hours`, its plan and its hours.

    None if a single step takes longer, or if all steps would be warm-up.
    """
    steps = UNLIMITED
    for _ in range(ROUNDS):
        config = replace(config, train=replace(config.train, max_steps=steps))
        try:
            plan = make_plan(config, network.machine.devices)
        except UserError:
            return None
        time = run_time(
            config=config,
            vocab_size=vocab_size,
            network=network,
            plan=plan,
            compute_speed=speed,
            evaluated=evaluation_tokens(config, plan.max_steps),
        )
        if time.hours > hours:
            steps = max(1, int(steps * hours / time.hours))
    if time.hours > 1.01 * hours:
        return None
    return with_size(config, plan.micro_batch_size), plan, time.hours


def given_keys(ladder: Ladder) -> dict[str, Any]:
    """Return the keys that the config of a ladder sets."""
    given = {}
    for key, value in ladder.config.items():
        given[key] = tuple(value) if isinstance(value, list) else value
    return given


def measured_flops(folder: str, ladder: Ladder, depth: int) -> float:
    """Return the median FLOP/s of a process in the rungs nearest to a depth."""

    def distance(other: int) -> int:
        return abs(other - depth)

    nearest = min(ladder.depths, key=distance)
    found = []
    for rung, size in zip(ladder.rungs, ladder.sizes, strict=True):
        if rung["depth"] == nearest:
            speeds = rung_speeds(Path(folder) / rung["name"])
            if speeds:
                found.append((size.flops / size.tokens) * statistics.median(speeds))
    require(
        bool(found),
        f"--ladder {folder} holds no runs, so the speed of this machine is unknown; give --gpu, or "
        "train a ladder here",
    )
    return statistics.median(found)


def rung_speeds(folder: Path) -> list[float]:
    """Return the tokens per second that a run logged, without the first if there are others."""
    speeds: list[float] = RunFolder(folder).metrics.curve("perf/tokens_per_second")[1].tolist()
    return speeds[1:] or speeds


def write_config(ladder: Ladder, best: Mapping[str, Any], out: Path) -> None:
    """Write the config that trains a candidate; `UserError` if it cannot be written."""
    own = {"out_dir": f"runs/{out.stem}", **ladder.config}
    own |= depth_keys(ladder.config, best["depth"])
    own["train.max_steps"] = best["steps"]
    own["train.micro_batch_size"] = best["micro_batch_size"]
    comment = (
        f"# ladder {ladder.title}, depth {best['depth']}: val loss {best['loss']:.3f} expected "
        f"({LEVEL:.0%}: {best['low']:.3f} to {best['high']:.3f}), {best['hours']:.3g} hours\n"
    )
    if out.is_file():
        require(
            out.read_text(errors="replace").startswith("# ladder "),
            f"--out {out} holds another config; give another file",
        )
    text = comment + yaml.safe_dump(to_nested(own), sort_keys=False)
    try:
        write_file(out, [text.encode()])
    except OSError as error:
        raise UserError(f"--out {out} cannot be written: {error.strerror}") from None


def budget_text(report: Mapping[str, Any]) -> str:
    """Format the answer to a budget as a table: the best depth and its neighbors."""
    rows = report["rows"]
    titles = [""]
    depths = ["depth"]
    for row in rows:
        depths.append(str(row["depth"]))
        if row["depth"] == report["best"]:
            best = row
            titles.append("best")
        else:
            titles.append("warning" if row["doubts"] else "")
    cells = [titles, depths]
    for name, form in BUDGET_ROWS.items():
        if any(row[name] is not None for row in rows):
            title = BOUNDS.get(name, name.replace("_", " "))
            cells.append([title, *(format(row[name], form) for row in rows)])
    for i, title in enumerate(["bits per byte", *BOUNDS.values()]):
        cells.append([title])
        for row in rows:
            bits_per_byte = row["bits_per_byte"]
            cells[-1].append(f"{bits_per_byte[i]:.4f}" if bits_per_byte else "")
    text = f"{report['hours']:.3g} hours on {report['machine']}, ladder {report['ladder']}\n\n"
    text += table(cells, "<20", *[">14"] * len(rows))
    for warning in best["doubts"]:
        text += f"warning: {warning}\n"
    return text + f"\naccel-gpt train {report['config']}\n"
