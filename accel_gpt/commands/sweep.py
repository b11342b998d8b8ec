"""`accel-gpt sweep CONFIG --optim.lr 1e-3,3e-3 --seed 1,2,3`: which setting is better?

A setting is a combination of a config and values; the first one is the baseline. Each run has a
folder below `--out_dir`. The result goes to `sweep.json` and `report.html` there.
docs/explanation/sweep.md describes the comparison.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from accel_gpt.commands.grid import Grid, Setting
from accel_gpt.commands.options import SweepCommand
from accel_gpt.commands.paired import Comparison, compare
from accel_gpt.commands.series import Series, SeriesRun
from accel_gpt.config.compare import differences
from accel_gpt.config.plan import LENGTH, plural
from accel_gpt.config.values import to_flat
from accel_gpt.console import table, write_err, write_out
from accel_gpt.errors import UserError, require
from accel_gpt.files import strict_json, write_file
from accel_gpt.prepare.ensure import ensure_data
from accel_gpt.report.page import build_page
from accel_gpt.report.runs import open_runs
from accel_gpt.training.run_folder import RunFolder, locked

MOST_CURVES = 16  # runs in the report
SAME_TIME = 0.03  # largest relative difference of times that counts as none; assumption
TEXT = ("data.train", "data.val", "data.tokenizer", "data.prepare.")  # change the text or tokens
EVALUATED = ("eval.tokens", "model.block_size", "data.document_mask")  # change what is evaluated
UNTIMED = ("optim.", "schedule.")  # cost no time, except optim.name
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
        self.baseline, *self.others = grid.settings
        self.metric = "val_bits_per_byte" if self.changed(TEXT, *self.others) else "val_loss"
        self.unit = "bits per byte" if self.metric == "val_bits_per_byte" else "val loss"
        self.losses: defaultdict[str, dict[int, float]] = defaultdict(dict)  # inf: diverged
        self.folders: dict[tuple[int, str], Path] = {}  # of the runs, by seed and setting
        self.times: dict[str, float] = {}  # seconds of a step, from the first seed that has them
        self.untimed = [*self.others]  # their steps in equal time are not known
        self.lines: list[str] = []  # below the table
        self.failed = False

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
        for number, seed in enumerate(self.seeds, start=1):
            settings = [setting for setting in self.others if not self.compare(setting).settled]
            if not settings:
                return
            self.train_seed(seed, [self.baseline, *settings])
            added = [one for setting in settings for one in self.with_equal_time(setting)]
            self.others += added
            for earlier in self.seeds[:number]:
                self.train_seed(earlier, added)

    def train_seed(self, seed: int, settings: Sequence[Setting]) -> None:
        """Train the runs of a seed side by side; read their losses and the times of a step."""
        runs = []
        for setting in settings:
            config = replace(setting.config, seed=seed)
            runs.append(SeriesRun(f"{setting.name},seed={seed}", self.folder, config))
        failures = Series(runs).train()
        for setting, run in zip(settings, runs, strict=True):
            self.folders[seed, setting.name] = run.folder
            self.failed |= run.name in failures and not run.diverged
            loss = final_loss(run, self.metric)
            if loss is not None:
                self.losses[setting.name][seed] = loss
                if math.isfinite(loss):
                    self.times.setdefault(setting.name, seconds_per_step(run))

    def with_equal_time(self, setting: Setting) -> list[Setting]:
        """Return the setting with as many steps as the baseline's time allows, if they differ.

        Returns it once, when the time is known. A resumed sweep reads the same time from the same
        run. A setting that only has another length would be the baseline.
        """
        time = self.time(setting)
        if time is None or setting not in self.untimed:
            return []
        self.untimed.remove(setting)
        steps = max(1, round(setting.steps / time))
        if abs(time - 1) <= SAME_TIME or steps == setting.steps:
            return []
        line = f"{setting.name} takes {time:.2f} x the time of {self.baseline.name}"
        if not self.differs_with_equal_steps(setting):
            return []
        try:
            equal = setting.with_steps(steps)
        except UserError as error:
            self.lines.append(f"{line}, but is not trained for equal time: {error}")
            return []
        write_err(f"{line}, so it is also trained for {plural(steps, 'step')}")
        self.times[equal.name] = self.times[setting.name]
        return [equal]

    def differs_with_equal_steps(self, setting: Setting) -> bool:
        """Return whether a setting differs from the baseline in more than its length."""
        try:
            equal = setting.with_steps(self.baseline.steps)
        except UserError:  # its warm-up and decay need more steps
            return True
        return not set(self.changed(("",), equal)) <= {*LENGTH, "train.stop_at"}

    def time(self, setting: Setting) -> float | None:
        """Return the time of a run, divided by the baseline's; None: not known."""
        changed = self.changed(("",), setting)
        if "optim.name" not in changed and all(key.startswith(UNTIMED) for key in changed):
            return 1.0
        if setting.name not in self.times or self.baseline.name not in self.times:
            return None
        seconds = setting.steps * self.times[setting.name]
        return seconds / (self.baseline.steps * self.times[self.baseline.name])

    def compare(self, setting: Setting) -> Comparison:
        """Compare the losses of a setting with the baseline's."""
        baseline = self.losses[self.baseline.name]
        return compare(self.losses[setting.name], baseline, settings=len(self.others))

    # ----------------------------------------------------------------------- the result

    def write(self) -> None:
        """Write sweep.json and report.html, and print the table and a verdict on each setting."""
        ranked = [self.baseline, *sorted(self.others, key=lambda one: self.compare(one).mean)]
        columns = ["setting", self.unit, "difference", "tokens", "time", "seeds"]
        rows = [columns, *map(self.row, ranked)]
        for keys, effect in NOTES:
            changed = self.changed(keys, *self.others)
            if changed:
                self.lines.append(f"{', '.join(changed)} differ: {effect}")
        self.lines += dict.fromkeys(map(self.verdict, ranked[1:]))
        settings = [
            {
                "name": setting.name,
                "steps": setting.steps,
                "time": self.time(setting),
                "losses": self.losses[setting.name],  # null: diverged
                "comparison": asdict(self.compare(setting)),
            }
            for setting in ranked
        ]
        content = {"metric": self.metric, "lines": self.lines, "settings": settings}
        write_file(self.folder / "sweep.json", [strict_json(content, indent=1).encode()])
        runs = [(seed, setting.name) for seed in self.seeds for setting in ranked]
        folders = [str(self.folders[one]) for one in runs if one in self.folders]
        started = [folder for folder in folders if RunFolder(folder).launches]
        if started:
            section = {"heading": "Settings", "lines": self.lines, "rows": rows}
            page = build_page(open_runs(started[:MOST_CURVES]), None, section)
            write_file(self.folder / "report.html", [page.encode(errors="replace")])
        write_out(f"{table(rows, '<', *'>' * 5)}\n{self.folder / 'sweep.json'}\n\n")
        write_out("\n".join(self.lines) + "\n")

    def row(self, setting: Setting) -> list[str]:
        """Return the cells of a setting in the table."""
        losses = self.losses[setting.name]
        finite = [loss for loss in losses.values() if math.isfinite(loss)]
        time = self.time(setting)
        return [
            setting.name,
            f"{statistics.fmean(finite):.4f}" if finite else "",
            "baseline" if setting is self.baseline else self.compare(setting).cell,
            f"{setting.tokens / self.baseline.tokens:.2f} x",
            f"{time:.2f} x" if time else "",
            str(len(losses)),
        ]

    def verdict(self, setting: Setting) -> str:
        """Return the line that says whether a setting is better, worse, or neither."""
        found = self.compare(setting)
        name = setting.name
        baseline = self.baseline.name
        parts = []
        if found.differences:
            start = f"{found.verdict} between {name} and {baseline}"
            if found.clear:
                start = f"{name} is {found.verdict} than {baseline}"
            tokens = as_multiple(setting.tokens / self.baseline.tokens, "tokens")
            cost = f"{tokens} and {as_multiple(self.time(setting), 'time')}"
            seeds = plural(len(found.differences), "seed")
            parts.append(f"{start} with {cost}: {found.cell} in {self.unit} over {seeds}")
        for one, diverged in {name: found.diverged, baseline: found.baseline_diverged}.items():
            if diverged:
                seeds = ", ".join(map(str, diverged))
                count = plural(found.seeds, "seed")
                parts.append(f"{one} diverged with {len(diverged)} of {count}: {seeds}")
        return "; ".join(parts) or f"no seed has the {self.unit} of {name} and {baseline}"


def as_multiple(factor: float | None, name: str) -> str:
    """Format a factor on tokens or time; None: the time is not known."""
    if factor is None:
        return f"unknown {name}"
    return f"equal {name}" if abs(factor - 1) <= SAME_TIME else f"{factor:.2f} x the {name}"


def final_loss(run: SeriesRun, metric: str) -> float | None:
    """Return the loss at the last step of a run; None if it has none.

    inf: the run diverged. It has no finite val loss, or one above the loss of equal probabilities.
    """
    if not run.finished:
        return None
    folder = RunFolder(run.folder)
    steps, losses = folder.metrics.curve("eval/val_loss")
    at_end = losses[steps == run.steps]
    if not len(at_end) or at_end[-1] > math.log(folder.last_launch("model", "vocab_size")):
        return math.inf
    return folder.metrics.last(f"eval/{metric}")


def seconds_per_step(run: SeriesRun) -> float:
    """Return the median seconds of a step of a run: no evaluations, no saves."""
    times: list[float] = RunFolder(run.folder).metrics.curve("perf/step_ms")[1].tolist()
    return statistics.median(times[1:] or times) / 1000  # the first step warms up
