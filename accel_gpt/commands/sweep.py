"""`accel-gpt sweep CONFIG --optim.lr 1e-3,3e-3 --seed 1,2,3`: which setting is better?

A setting is a combination of a config and values; the first one is the baseline. Each run has a
folder below `--out_dir`. The result goes to `sweep.json` and `report.html` there.
docs/explanation/sweep.md describes the comparison.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from accel_gpt.commands.grid import Grid, Setting
from accel_gpt.commands.options import SweepCommand
from accel_gpt.commands.paired import Comparison, compare
from accel_gpt.commands.series import Series, SeriesRun
from accel_gpt.config.compare import differences
from accel_gpt.config.parse import to_flat
from accel_gpt.config.plan import plural, scale_length
from accel_gpt.console import table, write_err, write_out
from accel_gpt.errors import require
from accel_gpt.files import strict_json, write_file
from accel_gpt.prepare.ensure import ensure_data
from accel_gpt.report.page import build_page
from accel_gpt.report.runs import open_runs
from accel_gpt.training.run_folder import RunFolder, locked

MOST_CURVES = 16  # runs in the report, from the best settings
SAME_TIME = 0.03  # largest relative difference of times that counts as none; assumption
# keys that change the text or its tokens; that change what is evaluated; that cost no time
TEXT = ("data.train", "data.val", "data.tokenizer", "data.prepare.")
EVALUATED = ("eval.tokens", "model.block_size", "data.document_mask")
UNTIMED = ("optim.", "schedule.")
NOTES = ((TEXT, "bits per byte are compared"), (EVALUATED, "other sequences are evaluated"))


def run(options: SweepCommand) -> int:
    """Train the settings of a sweep and compare them; 1 if a run failed without diverging."""
    folder = options.grid.folder
    require(
        not (folder / "run.json").exists(),
        f"{folder} is the folder of a run; set another --out_dir",
    )
    with locked(folder):
        for setting in options.grid.settings:
            ensure_data(setting.config)
        sweep = Sweep(options.grid)
        sweep.train()
        sweep.write()
    return 1 if sweep.failed else 0


class Sweep:
    """Trains settings seed after seed, and compares each with the first one, the baseline."""

    def __init__(self, grid: Grid) -> None:
        self.folder = grid.folder
        self.seeds = grid.seeds
        self.baseline = grid.settings[0]
        self.others = grid.settings[1:]
        self.failed = False
        self.metric = "val_bits_per_byte" if self.changed(TEXT, *self.others) else "val_loss"
        self.unit = "bits per byte" if self.metric == "val_bits_per_byte" else "val loss"

    def changed(self, prefixes: tuple[str, ...], *settings: Setting) -> list[str]:
        """Return the keys with these prefixes that settings change, compared with the baseline."""
        found = set()
        before = to_flat(self.baseline.config)
        for setting in settings:
            keys = differences(before, to_flat(setting.config))
            found |= {key for key in keys if key.startswith(prefixes)}
        return sorted(found - {"seed"})

    def train(self) -> None:
        """Train one seed after another, with the settings whose answer is not clear."""
        for seed in self.seeds:
            settings = [setting for setting in self.others if not self.is_clear(setting)]
            if settings:
                self.train_seed(seed, [self.baseline, *settings])
            again = []
            for setting in settings:
                self.choose_in_time(setting)
                in_time = setting.in_time
                if in_time not in (None, setting) and not self.compare(setting).diverged:
                    again.append(in_time)
            self.train_seed(seed, again)

    def train_seed(self, seed: int, settings: Sequence[Setting]) -> None:
        """Train the runs of a seed side by side; read their losses and how long they take."""
        runs = []
        for setting in settings:
            config = replace(setting.config, seed=seed)
            runs.append(SeriesRun(f"{setting.name},seed={seed}", self.folder, config))
        series = Series(runs)
        failures = series.train()
        self.failed |= not series.diverged.issuperset(failures)
        for setting, run in zip(settings, runs, strict=True):
            setting.folders.append(run.folder)
            loss = math.inf if run.name in series.diverged else final_loss(run, self.metric)
            if loss is not None:
                setting.losses[seed] = loss
            if setting.seconds is None and loss not in (None, math.inf):
                setting.seconds = training_seconds(run)

    def choose_in_time(self, setting: Setting) -> None:
        """Choose how many steps of a setting take the baseline's time, if the times are known.

        A resumed sweep reads the same times from its runs, so it makes the same choice.
        """
        changed = self.changed(("",), setting)
        if "optim.name" not in changed and all(key.startswith(UNTIMED) for key in changed):
            setting.time = 1.0
        elif setting.seconds and self.baseline.seconds:
            setting.time = setting.seconds / self.baseline.seconds
        if setting.in_time is not None or setting.time is None:
            return
        setting.in_time = setting
        steps = max(1, round(setting.steps / setting.time))
        if abs(setting.time - 1) > SAME_TIME and steps != setting.steps:
            write_err(
                f"{setting.name} takes {setting.time:.2f} x the time of {self.baseline.name}, so "
                f"it is also trained for {plural(steps, 'step')}"
            )
            config = scale_length(setting.config, steps)
            setting.in_time = Setting(f"{setting.name},{steps}_steps", setting.values, config)

    def is_clear(self, setting: Setting) -> bool:
        """Return whether a setting needs no further seed."""
        comparison = self.compare(setting)
        in_time = self.compare(setting.in_time)
        return comparison.diverged or (comparison.clear and in_time.clear)

    def compare(self, setting: Setting | None) -> Comparison:
        """Compare the losses of a setting with the baseline's."""
        losses = setting.losses if setting else {}
        return compare(losses, self.baseline.losses, len(self.others))

    # ----------------------------------------------------------------------- the result

    def write(self) -> None:
        """Write sweep.json and report.html, and print the table and a verdict on each setting."""
        ranked = [self.baseline, *sorted(self.others, key=lambda one: self.compare(one).mean)]
        columns = [self.unit, "difference", "tokens", "at equal seconds", "time", "seeds"]
        rows = [[*self.baseline.values, *columns], *map(self.row, ranked)]
        lines = []
        for keys, effect in NOTES:
            changed = self.changed(keys, *self.others)
            if changed:
                lines.append(f"{', '.join(changed)} differ: {effect}")
        lines += map(self.verdict, ranked[1:])
        content = {"metric": self.metric, "settings": [self.content(one) for one in ranked]}
        write_file(self.folder / "sweep.json", [strict_json(content, indent=1).encode()])
        folders = [str(folder) for setting in ranked for folder in setting.folders]
        started = [folder for folder in folders if RunFolder(folder).launches]
        if started:
            section = {"heading": "Settings", "image": "", "lines": lines, "rows": rows}
            page = build_page(open_runs(started[:MOST_CURVES]), None, section)
            write_file(self.folder / "report.html", [page.encode(errors="replace")])
        alignments = ["<"] * len(self.baseline.values) + [">"] * len(columns)
        write_out(f"{table(rows, *alignments)}\n{self.folder / 'sweep.json'}\n\n")
        write_out("\n".join(lines) + "\n")

    def row(self, setting: Setting) -> list[str]:
        """Return the cells of a setting in the table."""
        losses = [loss for loss in setting.losses.values() if math.isfinite(loss)]
        cells = [self.compare(setting).cell, self.compare(setting.in_time).cell]
        if setting is self.baseline:
            cells = ["baseline", ""]
        return [
            *setting.values.values(),
            f"{statistics.fmean(losses):.4f}" if losses else "",
            cells[0],
            f"{setting.tokens / self.baseline.tokens:.2f} x",
            cells[1],
            f"{setting.time:.2f} x" if setting.time else "",
            str(len(setting.losses)),
        ]

    def verdict(self, setting: Setting) -> str:
        """Return the line that says whether a setting is better, worse, or neither."""
        tokens = setting.tokens / self.baseline.tokens
        where = "at equal tokens" if tokens == 1 else f"with {tokens:.2f} x the tokens"
        comparison = self.compare(setting)
        compared = {where: comparison}
        if setting.in_time is setting:
            compared = {f"{where} and equal seconds": comparison}
        elif setting.in_time and not comparison.diverged:
            compared["at equal seconds"] = self.compare(setting.in_time)
        parts = []
        before = ""
        for where, one in compared.items():
            names = f"{one.verdict} between {setting.name} and {self.baseline.name}"
            if one.clear:
                names = f"{setting.name} is {one.verdict} than {self.baseline.name}"
            numbers = f"no seed has the {self.unit} of both"
            if one.differences:
                numbers = f"{one.cell} in {self.unit} over {len(one.differences)} seeds"
            start = "" if names == before else f"{names} "
            parts.append(f"{start}{where}: {one.reason or numbers}{one.left_out}")
            before = names
        return "; ".join(parts)

    def content(self, setting: Setting) -> dict[str, Any]:
        """Return the entry of a setting in sweep.json."""
        found = {
            "name": setting.name,
            "values": setting.values,
            "losses": setting.losses,  # null: diverged
            "time": setting.time,
        }
        if setting is not self.baseline:
            found["losses_at_equal_seconds"] = setting.in_time.losses if setting.in_time else {}
            found["as_configured"] = asdict(self.compare(setting))
            found["at_equal_seconds"] = asdict(self.compare(setting.in_time))
            found["verdict"] = self.verdict(setting)
        return found


def final_loss(run: SeriesRun, metric: str) -> float | None:
    """Return the loss at the last step of a run; None if it has none.

    inf: the run diverged. Its val loss is not finite, or above the loss of equal probabilities.
    """
    if not run.finished:
        return None
    folder = RunFolder(run.folder)
    steps, losses = folder.metrics.curve("eval/val_loss")
    at_end = losses[steps == run.steps]
    if not len(at_end) or at_end[-1] > math.log(folder.last_launch("model", "vocab_size")):
        return math.inf
    return folder.metrics.last(f"eval/{metric}")


def training_seconds(run: SeriesRun) -> float:
    """Return the seconds of all steps of a run, by the median step: no evaluations, no saves."""
    times: list[float] = RunFolder(run.folder).metrics.curve("perf/step_ms")[1].tolist()
    return run.steps * statistics.median(times[1:] or times) / 1000  # the first step warms up
