"""`accel-gpt sweep CONFIG --optim.lr 1e-3,3e-3 --seed 1,2`: a run for each combination of values.

A setting is a combination of all values but the seed's. Each run is an ordinary one, in a folder of
its own below `--out_dir`; beside them `sweep.json` and `report.html`, lowest val loss first.
"""

import hashlib
import itertools
import json
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from accel_gpt.commands.options import SweepCommand
from accel_gpt.commands.series import Series, SeriesRun, series_run
from accel_gpt.config.experiment import Config
from accel_gpt.config.parse import load_config
from accel_gpt.config.plan import make_plan
from accel_gpt.console import table, write_out
from accel_gpt.errors import UserError, require
from accel_gpt.files import read_json, write_file
from accel_gpt.hub.pretrained import inherit
from accel_gpt.prepare.ensure import ensure_data
from accel_gpt.report.page import build_page
from accel_gpt.report.runs import open_runs
from accel_gpt.training.run_folder import RunFolder, locked

MOST_LETTERS = 200  # of the name of a folder, of which file systems take 255
MOST_CURVES = 16  # runs that the report draws, of the best settings


@dataclass(frozen=True)
class Setting:
    """A combination of values and its runs, one a seed."""

    values: Mapping[str, str]  # by key, as typed
    runs: tuple[SeriesRun, ...]

    def values_at(self, share: float, metric: str) -> list[float]:
        """A metric of its runs after a share of their steps; empty unless all have it."""
        found: list[float] = []
        for run in (at_share(run, share) for run in self.runs):
            steps, values = RunFolder(run.folder).metrics.curve(f"eval/{metric}")
            found += values[steps == run.steps][-1:].tolist()
        return found if len(found) == len(self.runs) else []

    def result(self, shares: Sequence[float]) -> dict[str, Any]:
        """How far its runs came, the means of their metrics there, and the spread of the loss."""
        share = max((s for s in shares if self.values_at(s, "val_loss")), default=0.0)
        losses, bits = (self.values_at(share, f"val_{m}") for m in ("loss", "bits_per_byte"))
        return {
            "values": dict(self.values),
            "share_of_steps": share,
            "val_loss": statistics.fmean(losses) if losses else None,
            "standard_deviation": statistics.stdev(losses) if len(losses) > 1 else None,
            "val_bits_per_byte": statistics.fmean(bits) if bits else None,
            "runs": {run.name: loss for run, loss in itertools.zip_longest(self.runs, losses)},
        }


def run(options: SweepCommand) -> int:
    """Train the runs of a sweep and compare them; 1 if one of them failed."""
    swept = options.grid.swept
    base = dict(options.given)
    out_dir = base.pop("out_dir", Config.out_dir)
    folder = Path(options.grid.out_dir or f"{out_dir}_sweep")
    words = [options.config, *options.grid.fixed]
    settings = make_settings(words, options.grid.settings, folder)
    with locked(folder):
        check_same_sweep(folder, base | {"halve_at": options.halve_at, "swept": sorted(swept)})
        shares, alive, failed = (*options.halve_at, 1.0), settings, False
        for share in shares:
            runs = [at_share(run, share) for setting in alive for run in setting.runs]
            failed |= bool(Series(runs).train())
            alive = ranked(alive, (share,))[: -(-len(alive) // 2)]
        settings = ranked(settings, shares)
        results = [setting.result(shares) for setting in settings]
        content = read_json(folder / "sweep.json") | {"settings": results}
        write_file(folder / "sweep.json", [json.dumps(content, indent=1).encode()])
        rows = sweep_rows(results, [*swept])
        best = [run.folder for setting in settings for run in setting.runs][:MOST_CURVES]
        series = {"heading": "Settings, best first", "image": "", "lines": [], "rows": rows}
        if trained := open_runs([str(path) for path in best if RunFolder(path).launches]):
            page = build_page(trained, None, series)
            write_file(folder / "report.html", [page.encode(errors="replace")])
    write_out(table(rows, *("<" if key in swept else ">" for key in rows[0])))
    write_out(f"\n{folder / 'sweep.json'}{f', {folder}/report.html' if trained else ''}\n")
    return int(failed)


def make_settings(
    arguments: Sequence[str], grid: Sequence[Sequence[Mapping[str, str]]], folder: Path
) -> list[Setting]:
    """The runs of each setting, their configs checked and their data prepared."""
    settings, prepared = [], list[Config]()
    for group in grid:
        runs = []
        for values in group:
            words = [*arguments, *(f"--{key}={value}" for key, value in values.items())]
            config = load_config(words, "accel-gpt sweep", inherit)
            name = ",".join(f"{key}={value}" for key, value in values.items())
            safe = re.sub(r"[^\w.,=+-]", "_", name)
            if safe != name or len(name) > MOST_LETTERS:
                safe = f"{safe[:MOST_LETTERS]}_{hashlib.sha256(name.encode()).hexdigest()[:8]}"
            own = str(Path(config.out_dir, "data"))
            if config.data.train == own:  # of data.text, prepared once for all runs
                config = replace(config, data=replace(config.data, train=str(folder / "data")))
            runs.append(series_run(name, folder, config, make_plan(config, 1).last_step, safe))
            if all(config.data != other.data for other in prepared):
                prepared.append(replace(config, out_dir=str(folder)))
        setting = {key: value for key, value in group[0].items() if key != "seed"}
        settings.append(Setting(setting, tuple(runs)))
    for config in prepared:
        ensure_data(config)
    return settings


def at_share(run: SeriesRun, share: float) -> SeriesRun:
    """The run until a share of its steps, on the schedule of all of them."""
    steps = max(1, int(share * run.steps))
    if share == 1:
        return run
    return replace(run, steps=steps, arguments=[*run.arguments, f"--train.stop_at={steps}"])


def check_same_sweep(folder: Path, options: Mapping[str, Any]) -> None:
    """Record the `options` in `sweep.json`; `UserError` if it has others, or is of a run."""
    require(not (folder / "run.json").exists(), f"{folder} is a run's; set another --out_dir")
    now = {"options": json.loads(json.dumps(options, default=str))}
    path = folder / "sweep.json"
    if not path.exists():
        write_file(path, [json.dumps(now).encode()])
    try:
        was = dict(read_json(path)["options"])
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"{path} cannot be read; remove it, or set another --out_dir") from None
    for key in sorted(was.keys() | now["options"].keys()):
        a, b = (side.get(key, "not set") for side in (was, now["options"]))
        problem = f"{folder} has another sweep: {key} was {a}, is {b}; set another --out_dir"
        require(a == b, problem)


def ranked(settings: Sequence[Setting], shares: Sequence[float]) -> list[Setting]:
    """Settings that came farthest first, of these the lowest loss; without a loss last."""

    def rank(setting: Setting) -> tuple[float, float]:
        result = setting.result(shares)
        loss = result["val_loss"]
        return -result["share_of_steps"], math.inf if loss is None else loss

    return sorted(settings, key=rank)


def sweep_rows(results: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> list[list[str]]:
    """The table of a sweep: a row a setting, after the names of the columns."""
    keys = [key for key in keys if key != "seed"]
    rows = [[*keys, "val loss", "± over seeds", "bits per byte", "runs", "of the steps"]]
    for found in results:
        numbers = (found[k] for k in ("val_loss", "standard_deviation", "val_bits_per_byte"))
        cells = ["" if number is None else f"{number:.4f}" for number in numbers]
        cells += [str(len(found["runs"])), f"{found['share_of_steps']:.0%}"]
        rows.append([*(found["values"][key] for key in keys), *cells])
    return rows
