"""`accel-gpt sweep CONFIG --optim.lr 1e-3,3e-3 --seed 1,2,3`: which setting is better?

A setting is a combination of a config and values; the first one is the baseline. Each run has a
folder below `--out_dir`. The result goes to `sweep.json` there.
docs/how-to/sweep.md describes the comparison.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, replace
from types import MappingProxyType

from torch import Tensor

from accel_gpt.commands.options import SweepCommand
from accel_gpt.commands.paired_comparison import (
    FEWEST,
    WRONG,
    Comparison,
    compare,
    fewest_seeds,
    smallest_difference,
)
from accel_gpt.commands.series import Series, SeriesRun
from accel_gpt.commands.sweep_settings import Grid, Setting
from accel_gpt.config.compare import differences
from accel_gpt.config.experiment import Config
from accel_gpt.config.plan import plural
from accel_gpt.config.stages import stage_configs, total_tokens
from accel_gpt.config.values import to_flat
from accel_gpt.console import table, write_out
from accel_gpt.data.corpus import open_corpus
from accel_gpt.errors import require
from accel_gpt.evals.validation import first_sequences
from accel_gpt.files import strict_json, write_file
from accel_gpt.prepare.missing_data import ensure_data
from accel_gpt.report.curves import read_metrics
from accel_gpt.runs.folder import RunFolder, locked

TEXT = ("data.train", "data.val", "data.tokenizer", "data.prepare.")  # change the text or tokens
EVALUATED = ("eval.tokens", "model.block_size", "data.document_mask")  # change what is evaluated
CHECKED_SEQUENCES = 64  # of the val split, whose targets are compared; assumption
SAME_TIME = 0.05  # relative difference of two times that a verdict does not mention; assumption
UNITS = MappingProxyType({"val_loss": "val loss", "val_bits_per_byte": "bits per byte"})
NOTES = ((TEXT, "bits per byte are compared"), (EVALUATED, "other sequences are evaluated"))


def run(options: SweepCommand) -> int:
    """Train the settings of a sweep and compare them; 1 if a run failed without diverging."""
    folder = options.grid.folder
    with locked(folder):
        for setting in options.grid.settings:
            ensure_data(setting.config)
        sweep = Sweep(options.grid)
        sweep.check_targets()
        sweep.train()
        sweep.write()
    return 1 if sweep.broken else 0


def first_targets(config: Config) -> Tensor:
    """Return the targets (B, T) of the first evaluated sequences of the val split."""
    corpus = open_corpus(config)
    source = corpus.evaluated["val"][0]
    tokens, targets = first_sequences(source, config.model.block_size, CHECKED_SEQUENCES)
    return corpus.target_mask.apply(tokens, targets)[0]


class Sweep:
    """Trains settings seed after seed, and compares each with the first one, the baseline."""

    def __init__(self, grid: Grid) -> None:
        self.folder = grid.folder
        self.seeds = grid.seeds
        self.baseline, *self.others = grid.settings
        self.yardstick = self.baseline.config.eval.yardstick
        self.metric = self.yardstick.metric.removeprefix("eval/")
        if self.metric == "val_loss" and self.changed(TEXT, *self.others):
            self.metric = "val_bits_per_byte"
        self.unit = UNITS.get(self.metric, self.metric)
        self.losses: defaultdict[str, dict[int, float]] = defaultdict(dict)  # inf: diverged
        self.steps: defaultdict[str, list[int]] = defaultdict(list)  # of a run
        self.times: defaultdict[str, list[float]] = defaultdict(list)  # of a step, in seconds
        self.lines: list[str] = []  # below the table
        self.broken: set[str] = set()  # settings with a run that failed without diverging

    def changed(self, prefixes: tuple[str, ...], *settings: Setting) -> list[str]:
        """Return the keys with these prefixes that settings change, compared with the baseline."""
        found = set()
        before = to_flat(self.baseline.config)
        for setting in settings:
            keys = differences(before, to_flat(setting.config))
            found |= {key for key in keys if key.startswith(prefixes)}
        return sorted(found - {"seed"})

    def check_targets(self) -> None:
        """Raise `UserError` if a setting keeps other targets than the baseline, by `targets()`.

        Compares the first sequences of the val split, unless a setting changes what is evaluated.
        """
        if all(one.config.own.targets is None for one in (self.baseline, *self.others)):
            return
        expected = first_targets(self.baseline.config)
        for setting in self.others:
            require(
                bool(self.changed(TEXT + EVALUATED, setting))
                or first_targets(setting.config).equal(expected),
                f"{setting.name} keeps other targets than {self.baseline.name}, so their losses "
                "are means over other targets; define the same targets()",
            )

    def train(self) -> None:
        """Train seed after seed; leave out settings whose answer is clear or with a failed run."""
        for seed in self.seeds:
            settings = []
            for setting in self.others:
                if setting.name not in self.broken and not self.compare(setting).settled:
                    settings.append(setting)
            if not settings or self.baseline.name in self.broken:
                return
            self.train_seed(seed, [self.baseline, *settings])

    def train_seed(self, seed: int, settings: Sequence[Setting]) -> None:
        """Train the runs of a seed side by side; read their losses and the times of a step."""
        runs = []
        for setting in settings:
            config = replace(setting.config, seed=seed)
            runs.append(SeriesRun(f"{setting.name},seed={seed}", self.folder, config))
        failures = Series(runs).train()
        for setting, run in zip(settings, runs, strict=True):
            if run.name in failures and not run.diverged:
                self.broken.add(setting.name)
            self.steps[setting.name].append(run.steps)
            loss = final_loss(run, self.metric)
            if loss is not None:
                self.losses[setting.name][seed] = loss
                if math.isfinite(loss):
                    self.times[setting.name].append(seconds_per_step(run))

    def time(self, setting: Setting) -> float | None:
        """Return the time of a run, divided by the baseline's; None: not known."""
        if setting.name not in self.times or self.baseline.name not in self.times:
            return None
        return self.seconds(setting) / self.seconds(self.baseline)

    def seconds(self, setting: Setting) -> float:
        """Return the seconds of all steps of a run; medians over the seeds."""
        seconds = statistics.median(self.times[setting.name])
        return statistics.median(self.steps[setting.name]) * seconds

    def tokens(self, setting: Setting) -> float | None:
        """Return the tokens of a run, divided by the baseline's; None: not known."""
        if setting.name not in self.steps or self.baseline.name not in self.steps:
            return None
        mine, others = (
            total_tokens(one.config, int(statistics.median(self.steps[one.name])))
            for one in (setting, self.baseline)
        )
        return mine / others

    def compare(self, setting: Setting) -> Comparison:
        """Compare the losses of a setting with the baseline's."""
        baseline = self.losses[self.baseline.name]
        return compare(
            losses=self.losses[setting.name],
            baseline=baseline,
            settings=len(self.others),
            highest=self.yardstick.highest,
        )

    # ----------------------------------------------------------------------- the result

    def write(self) -> None:
        """Write sweep.json, and print the table and a verdict on each setting."""
        sign = -1 if self.yardstick.highest else 1
        ranked = sorted(self.others, key=lambda one: sign * self.compare(one).mean)
        ranked.insert(0, self.baseline)
        columns = ["setting", self.unit, "difference", "tokens", "time", "seeds"]
        rows = [columns, *map(self.row, ranked)]
        for keys, effect in NOTES:
            changed = self.changed(keys, *self.others)
            lengths = {last_length(setting) for setting in (self.baseline, *self.others)}
            if keys == EVALUATED and len(lengths) > 1 and not changed:
                changed = ["stages"]
            if changed:
                self.lines.append(f"{', '.join(changed)} differ: {effect}")
        self.lines += dict.fromkeys(map(self.verdict, ranked[1:]))
        self.lines += self.rule()
        settings = [
            {
                "name": setting.name,
                "steps": self.steps[setting.name],  # of each seed
                "time": self.time(setting),
                "losses": self.losses[setting.name],  # null: diverged
                "comparison": asdict(self.compare(setting)),
            }
            for setting in ranked
        ]
        content = {"metric": self.metric, "lines": self.lines, "settings": settings}
        write_file(self.folder / "sweep.json", [strict_json(content, indent=1).encode()])
        write_out(f"{table(rows, '<', *'>' * 5)}\n{self.folder / 'sweep.json'}\n\n")
        write_out("\n".join(self.lines) + "\n")

    def row(self, setting: Setting) -> list[str]:
        """Return the cells of a setting in the table."""
        losses = self.losses[setting.name]
        finite = [loss for loss in losses.values() if math.isfinite(loss)]
        tokens = self.tokens(setting)
        time = self.time(setting)
        return [
            setting.name,
            f"{statistics.fmean(finite):.4f}" if finite else "",
            "baseline" if setting is self.baseline else self.compare(setting).cell,
            f"{tokens:.2f} x" if tokens else "",
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
            seeds = plural(len(found.differences), "seed")
            parts.append(f"{start}: {found.cell} in {self.unit} over {seeds}")
            if not found.clear and not found.diverged and not found.baseline_diverged:
                fewest = fewest_seeds(len(self.others))
                if math.isfinite(found.smallest):
                    parts.append(f"a difference counts from {found.smallest:.4f} on")
                elif fewest > FEWEST:
                    parts.append(f"a verdict takes at least {fewest} seeds")
        for one, diverged in {name: found.diverged, baseline: found.baseline_diverged}.items():
            if diverged:
                seeds = ", ".join(map(str, diverged))
                count = plural(found.seeds, "seed")
                parts.append(f"{one} diverged with {len(diverged)} of {count}: {seeds}")
        time = self.time(setting)
        tokens = self.tokens(setting)
        if all(one.config.train.budget for one in (self.baseline, *self.others)):
            if tokens and abs(tokens - 1) > SAME_TIME:
                parts.append(f"its budget was enough for {tokens:.2f} times the tokens")
        elif tokens == 1 and found.differences and time and abs(time - 1) > SAME_TIME:
            parts.append(f"equal tokens took {time:.2f} times as long")
        return "; ".join(parts) or f"no seed has the {self.unit} of {name} and {baseline}"

    def rule(self) -> list[str]:
        """Return the line that says when a difference counts, if a setting has no verdict."""
        found = [self.compare(setting) for setting in self.others]
        seeds = max([len(one.differences) for one in found if not one.clear], default=0)
        if not seeds:
            return []
        settings = len(self.others)
        seeds = max(seeds, fewest_seeds(settings))
        more = seeds + 2
        # with this deviation, the standard error is 1
        limit = smallest_difference(seeds, math.sqrt(seeds), settings)
        limit_of_more = smallest_difference(more, math.sqrt(more), settings)
        return [
            f"A difference counts from {limit:.1f} standard errors on with {seeds} seeds, from "
            f"{limit_of_more:.1f} with {more}: then at most {WRONG:.0%} of sweeps of equal "
            "settings find one"
        ]


def last_length(setting: Setting) -> int:
    """Return the length of the sequences of the last evaluation of a run."""
    return stage_configs(setting.config)[-1].model.block_size


def final_loss(run: SeriesRun, metric: str) -> float | None:
    """Return the loss at the last step of a run; None if it has none.

    inf: the run diverged. It has no finite val loss, or one above the loss of equal probabilities.
    """
    if not run.finished:
        return None
    folder = RunFolder(run.folder)
    metrics = read_metrics(folder.records())
    steps, losses = metrics.curve("eval/val_loss")
    at_end = losses[steps == run.steps]
    if not len(at_end) or at_end[-1] > math.log(folder.last_launch("model", "vocab_size")):
        return math.inf
    steps, values = metrics.curve(f"eval/{metric}")
    at_end = values[steps == run.steps]  # without one that is not finite
    return float(at_end[-1]) if len(at_end) else None


def seconds_per_step(run: SeriesRun) -> float:
    """Return the seconds of a step of a run, without evaluations and saves.

    This is the median, and with stages the mean of their medians, weighted by their steps.
    """
    metrics = read_metrics(RunFolder(run.folder).records())
    steps, times = metrics.curve("perf/step_ms")
    _, stages = metrics.curve("data/stage")
    if len(times) > 1:  # the first step warms up
        steps, times, stages = steps[1:], times[1:], stages[1:]
    if not len(stages):
        median: float = statistics.median(times.tolist())
        return median / 1000
    first = 0.0
    total = 0.0
    for stage in sorted(set(stages.tolist())):
        of_stage = stages == stage
        last = float(steps[of_stage][-1])
        total += (last - first) * statistics.median(times[of_stage].tolist())
        first = last
    return total / first / 1000
