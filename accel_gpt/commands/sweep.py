"""`accel-gpt sweep CONFIG --optim.lr 1e-3,3e-3 --seed 1,2`: a run for each combination of values.

A setting is one combination of the values of all keys except seed. Each run has a folder below
`--out_dir`. `sweep.json` and `report.html` there list the settings, lowest val loss first.
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

MOST_LETTERS = 200  # in the name of a folder; file systems allow 255 bytes
MOST_CURVES = 16  # runs in the report, from the best settings


@dataclass(frozen=True)
class Setting:
    """A combination of values and its runs, one for each seed."""

    values: Mapping[str, str]  # by key, as typed
    runs: tuple[SeriesRun, ...]

    def values_at(self, share: float, metric: str) -> list[float]:
        """Return a metric of each run after a share of its steps; empty if a run lacks it."""
        found: list[float] = []
        for whole in self.runs:
            run = at_share(whole, share)
            steps, values = RunFolder(run.folder).metrics.curve(f"eval/{metric}")
            found += values[steps == run.steps][-1:].tolist()
        return found if len(found) == len(self.runs) else []

    def result(self, shares: Sequence[float]) -> dict[str, Any]:
        """Return the share of steps that all runs reached, and their mean metrics there."""
        reached = [share for share in shares if self.values_at(share, "val_loss")]
        share = max(reached, default=0.0)
        losses = self.values_at(share, "val_loss")
        bits = self.values_at(share, "val_bits_per_byte")
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
    fixed = dict(options.given)
    out_dir = fixed.pop("out_dir", Config.out_dir)
    folder = Path(options.grid.out_dir or f"{out_dir}_sweep")
    arguments = [options.config, *options.grid.fixed]
    settings = make_settings(arguments, options.grid.settings, folder)
    shares = (*options.halve_at, 1.0)
    with locked(folder):
        check_same_sweep(folder, fixed | {"halve_at": options.halve_at, "swept": sorted(swept)})
        failed = train_settings(settings, shares)
        settings = ranked(settings, shares)
        results = [setting.result(shares) for setting in settings]
        content = read_json(folder / "sweep.json") | {"settings": results}
        write_file(folder / "sweep.json", [json.dumps(content, indent=1).encode()])
        rows = sweep_rows(results, [*swept])
        has_page = write_sweep_page(settings, rows, folder)
    alignments = ["<" if key in swept else ">" for key in rows[0]]
    write_out(table(rows, *alignments))
    page = f", {folder}/report.html" if has_page else ""
    write_out(f"\n{folder / 'sweep.json'}{page}\n")
    return 1 if failed else 0


def train_settings(settings: Sequence[Setting], shares: Sequence[float]) -> bool:
    """Train all settings; after each share of the steps only the better half continues.

    Returns whether a run failed.
    """
    failed = False
    alive = list(settings)
    for share in shares:
        runs = [at_share(run, share) for run in all_runs(alive)]
        if Series(runs).train():
            failed = True
        better_half = math.ceil(len(alive) / 2)
        alive = ranked(alive, (share,))[:better_half]
    return failed


def write_sweep_page(
    settings: Sequence[Setting], rows: Sequence[Sequence[str]], folder: Path
) -> bool:
    """Write report.html: the table and the curves of the best runs; False if no run has started."""
    best = all_runs(settings)[:MOST_CURVES]
    started = [str(run.folder) for run in best if RunFolder(run.folder).launches]
    if not started:
        return False
    section = {"heading": "Settings, best first", "image": "", "lines": [], "rows": rows}
    page = build_page(open_runs(started), None, section)
    write_file(folder / "report.html", [page.encode(errors="replace")])
    return True


def all_runs(settings: Sequence[Setting]) -> list[SeriesRun]:
    """Return the runs of all settings, in order."""
    runs: list[SeriesRun] = []
    for setting in settings:
        runs.extend(setting.runs)
    return runs


def make_settings(
    arguments: Sequence[str], grid: Sequence[Sequence[Mapping[str, str]]], folder: Path
) -> list[Setting]:
    """Make the runs of each setting: check their configs, prepare their data.

    `arguments`: command-line arguments that all runs share. `grid`: the values of each run,
    grouped by setting.
    """
    settings = []
    to_prepare: list[Config] = []
    for group in grid:
        runs = []
        for values in group:
            own_arguments = [f"--{key}={value}" for key, value in values.items()]
            config = load_config([*arguments, *own_arguments], "accel-gpt sweep", inherit)
            if config.data.train == str(Path(config.out_dir, "data")):
                # data.text is prepared once for all runs
                config = replace(config, data=replace(config.data, train=str(folder / "data")))
            name = ",".join(f"{key}={value}" for key, value in values.items())
            steps = make_plan(config, 1).last_step
            runs.append(series_run(name, folder, config, steps, folder_name(name)))
            if all(config.data != other.data for other in to_prepare):
                to_prepare.append(replace(config, out_dir=str(folder)))
        setting = {key: value for key, value in group[0].items() if key != "seed"}
        settings.append(Setting(setting, tuple(runs)))
    for config in to_prepare:
        ensure_data(config)
    return settings


def folder_name(name: str) -> str:
    """Return a safe name for a run's folder, with a hash if characters are replaced or cut."""
    safe = re.sub(r"[^\w.,=+-]", "_", name)
    if safe == name and len(name) <= MOST_LETTERS:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()
    return f"{safe[:MOST_LETTERS]}_{digest[:8]}"


def at_share(run: SeriesRun, share: float) -> SeriesRun:
    """Return the run with a stop after a share of its steps; the schedule spans all steps."""
    if share == 1:
        return run
    steps = max(1, int(share * run.steps))
    return replace(run, steps=steps, arguments=[*run.arguments, f"--train.stop_at={steps}"])


def check_same_sweep(folder: Path, options: Mapping[str, Any]) -> None:
    """Record the `options` in sweep.json.

    Raises `UserError` if the folder has a sweep with other options, or is the folder of a run.
    """
    require(
        not (folder / "run.json").exists(),
        f"{folder} is the folder of a run; set another --out_dir",
    )
    now = json.loads(json.dumps(options, default=str))
    path = folder / "sweep.json"
    if not path.exists():
        write_file(path, [json.dumps({"options": now}).encode()])
    try:
        before = dict(read_json(path)["options"])
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"{path} cannot be read; remove it, or set another --out_dir") from None
    for key in sorted(before.keys() | now.keys()):
        was = before.get(key, "not set")
        value = now.get(key, "not set")
        require(
            was == value,
            f"{folder} holds another sweep: {key} was {was} and is now {value}; set another "
            "--out_dir",
        )


def ranked(settings: Sequence[Setting], shares: Sequence[float]) -> list[Setting]:
    """Sort settings by the share of steps that they reached, then by loss."""

    def rank(setting: Setting) -> tuple[float, float]:
        result = setting.result(shares)
        loss = result["val_loss"]
        return -result["share_of_steps"], math.inf if loss is None else loss

    return sorted(settings, key=rank)


def sweep_rows(results: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> list[list[str]]:
    """Return the table of a sweep: the names of the columns, then a row for each setting."""
    keys = [key for key in keys if key != "seed"]
    rows = [[*keys, "val loss", "± over seeds", "bits per byte", "runs", "of the steps"]]
    for result in results:
        cells = [result["values"][key] for key in keys]
        for name in ("val_loss", "standard_deviation", "val_bits_per_byte"):
            cells.append("" if result[name] is None else f"{result[name]:.4f}")
        cells.append(str(len(result["runs"])))
        cells.append(f"{result['share_of_steps']:.0%}")
        rows.append(cells)
    return rows
