"""`accel-gpt ladder CONFIG --depths 1,2,3`: train small sizes, fit a law of the loss.

Each rung is an ordinary run in its own folder. Writes ladder.json, which `accel-gpt plan --ladder`
reads, and report.html. docs/explanation/ladder.md describes the law.
"""

import base64
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel_gpt.commands.options import LadderCommand
from accel_gpt.commands.series import Series, SeriesRun
from accel_gpt.config.depth import scaling_parameters
from accel_gpt.config.experiment import Config
from accel_gpt.config.parse import config_of
from accel_gpt.config.plan import LENGTH, plural
from accel_gpt.console import table, write_err, write_out
from accel_gpt.cost.rungs import config_at, run_size, shape_keys
from accel_gpt.cost.scaling import FILE, LEVEL, SIZES, Ladder, Size
from accel_gpt.cost.scaling_fit import NoLawError, fit_law, law_terms
from accel_gpt.data.planning import data_folders, split_tokens, vocabulary_size
from accel_gpt.errors import UserError, require
from accel_gpt.files import write_file
from accel_gpt.prepare.ensure import ensure_data
from accel_gpt.report.page import build_page
from accel_gpt.report.plots import ladder_png
from accel_gpt.report.runs import open_runs
from accel_gpt.training.run_folder import RunFolder, locked

NAME = re.compile(r"depth_(\d+)_ratio_(\d+(?:\.\d+)?(?:e-?\d+)?)(?:_seed_(\d+))?")
MEASURED = ("rung", "parameters", "tokens", "FLOPs", "loss", "bits per byte")  # columns


@dataclass(frozen=True)
class Rung:
    """One run of a ladder."""

    depth: int
    ratio: float  # tokens for each parameter
    seed: int | None  # None: the seed of the config
    config: Config
    size: Size

    @property
    def name(self) -> str:
        """Name of the rung's folder."""
        ratio = repr(self.ratio).removesuffix(".0")
        seed = "" if self.seed is None else f"_seed_{self.seed}"
        return f"depth_{self.depth}_ratio_{ratio}{seed}"

    @property
    def steps(self) -> int:
        """Length of the run."""
        return self.config.train.max_steps or 0


def run(options: LadderCommand) -> int:
    """Train the rungs, fit the law, write ladder.json, the page and a table; 1 if a rung failed.

    If the rungs give no law, writes their table and page without one, then raises `UserError` with
    the rungs to add.
    """
    out = Path(options.out or f"{options.base.out_dir.rstrip('/')}_ladder")
    with locked(out):
        return train_and_fit(options, out)


def train_and_fit(options: LadderCommand, out: Path) -> int:
    """Do what `run` does in its locked folder."""
    given = dict(options.given)
    base = options.base
    if base.data.train == str(Path(base.out_dir, "data")):
        # prepared from data.text, once for all rungs
        given["data.train"] = str(out / "data")
    # the sizes of all rungs follow from the vocabulary of the data
    ensure_data(config_of(given | {"out_dir": str(out)}))
    rungs = all_rungs(options, given, out)
    law_terms([rung.size for rung in rungs])  # raises before training if they cannot give a law
    runs_to_train = [SeriesRun(rung.name, out, rung.config) for rung in rungs]
    failures = Series(runs_to_train).train()
    runs = {rung.name: RunFolder(out / rung.name) for rung in rungs}
    try:
        ladder = fit_ladder(out.name, given, rungs, runs, failures)
    except NoLawError as error:
        write_without_law(rungs, runs, out)
        remedy = "" if error.remedy else f"; {rungs_to_add(rungs, error)}"
        raise UserError(f"{error}{remedy}") from None
    write_file(out / FILE, [(json.dumps(ladder.content(), indent=1) + "\n").encode()])
    write_ladder_page(ladder, out)
    write_out(table(ladder_rows(ladder), "<", *[">"] * 7) + "\n")
    write_out("\n".join(ladder_lines(ladder)) + "\n\n")
    write_out(f"ladder     {out / FILE}\n")
    write_out(f"report     {out / 'report.html'}\n")
    return 1 if failures else 0


# --------------------------------------------------------------------------- the rungs


def all_rungs(options: LadderCommand, given: Mapping[str, Any], out: Path) -> list[Rung]:
    """Return the requested rungs and the rungs that the folder has, by compute."""
    wanted: set[tuple[int, float, int | None]] = set()
    for depth in options.depths:
        for ratio in options.ratios:
            for seed in options.seeds or (None,):
                wanted.add((depth, ratio, seed))
    for folder in out.glob("depth_*"):
        found = NAME.fullmatch(folder.name)
        if found:
            seed = int(found[3]) if found[3] else None
            wanted.add((int(found[1]), float(found[2]), seed))
    rungs = [make_rung(given, depth, ratio, seed) for depth, ratio, seed in wanted]

    def compute_and_name(rung: Rung) -> tuple[float, str]:
        return rung.size.flops, rung.name

    return sorted(rungs, key=compute_and_name)


def make_rung(given: Mapping[str, Any], depth: int, ratio: float, seed: int | None = None) -> Rung:
    """Make the rung of a depth and a ratio from the keys in `given`."""
    config = config_at(given, depth, max_steps=1, seed=seed)
    vocab_size, _ = vocabulary_size(config, None)
    tokens_per_step = config.train.tokens_per_step
    tokens = ratio * scaling_parameters(config.model, vocab_size)
    steps = max(1, round(tokens / tokens_per_step))
    config = config_at(given, depth, max_steps=steps, seed=seed)
    size = run_size(config, vocab_size, tokens=steps * tokens_per_step)
    return Rung(depth=depth, ratio=ratio, seed=seed, config=config, size=size)


# --------------------------------------------------------------------------- the law


def fit_ladder(
    title: str,
    given: Mapping[str, Any],
    rungs: Sequence[Rung],
    runs: Mapping[str, RunFolder],
    failures: Mapping[str, str],
) -> Ladder:
    """Fit the law to the rungs that have not diverged.

    Raises `NoLawError` if they give no law, `UserError` if they read different data.
    """
    trained = [rung for rung in rungs if rung.name not in failures]
    data = shared_data(trained, runs)
    left_out = [f"{name}: {failure}" for name, failure in failures.items()]
    rows = []
    for rung in trained:
        row = rung_row(rung, runs[rung.name])
        if row["loss"] is None or row["loss"] > math.log(data["vocab_size"]):
            left_out.append(f"{rung.name}: diverged, its val loss is {row['loss']}")
        else:
            rows.append(row)
    for line in left_out:
        write_err(f"left out: {line}")
    sizes = [Size(*(row[name] for name in SIZES)) for row in rows]
    try:
        law_terms(sizes)
    except NoLawError as error:
        if not left_out:
            raise
        raise NoLawError(
            f"{len(rows)} of {plural(len(rungs), 'rung')} can be fitted ({left_out[0]}), but "
            f"{error}, or fix the rungs that were left out",
            remedy=True,
        ) from None
    config = rungs[0].config
    data["folder"] = Path(config.data.folder or "").name
    data["train_tokens"] = split_tokens([*map(str, data_folders(config))], "train", None)
    bits_per_byte = rows[-1]["bits_per_byte"]
    if bits_per_byte is not None:
        bits_per_byte /= rows[-1]["loss"]
    return Ladder(
        title=title,
        law=fit_law(sizes, [row["loss"] for row in rows]),
        rungs=rows,
        left_out=left_out,
        config=ladder_keys(given),
        data=data,
        bits_per_byte=bits_per_byte,
        windows=max(row["loss_se"] / row["loss"] for row in rows),
    )


def shared_data(rungs: Sequence[Rung], runs: Mapping[str, RunFolder]) -> dict[str, Any]:
    """Return the data and the tokenizer of the rungs; `UserError` if they differ."""
    data: dict[str, Any] = {}
    for rung in rungs:
        run = runs[rung.name]
        found = {
            "fingerprint": run.last_launch("data", "fingerprint"),
            "tokenizer": run.last_launch("data", "tokenizer"),
            "tokenizer_fingerprint": run.last_launch("data", "tokenizer_fingerprint"),
            "vocab_size": run.last_launch("model", "vocab_size"),
        }
        for name, value in found.items():
            require(
                data.setdefault(name, value) == value,
                f"the rungs have different data: {name} of {rung.name} is {value}, but "
                f"{data[name]} in smaller rungs; train all rungs on the same data in another --out",
            )
    return data


def ladder_keys(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that all rungs share, as JSON values."""
    varied = {*shape_keys(1), *LENGTH, "out_dir"}
    found = {}
    for key, value in given.items():
        if key not in varied:
            found[key] = list(value) if isinstance(value, tuple) else value
    return found


def rung_row(rung: Rung, run: RunFolder) -> dict[str, Any]:
    """Return the entry of a rung in ladder.json; launching the rung again does not change it."""
    last = run.metrics.last
    return {
        "name": rung.name,
        "depth": rung.depth,
        "ratio": rung.ratio,
        "seed": rung.config.seed,
        "steps": rung.steps,
        **rung.size._asdict(),
        "loss": last("eval/val_loss"),
        "loss_se": last("eval/val_loss_se") or 0.0,
        "bits_per_byte": last("eval/val_bits_per_byte"),
    }


def ladder_rows(ladder: Ladder) -> Sequence[tuple[str, ...]]:
    """Return a table of the rungs, their losses and their distances to the law."""
    rows: list[tuple[str, ...]] = [(*MEASURED, "law", "residual")]
    for rung, size in zip(ladder.rungs, ladder.sizes, strict=True):
        law = ladder.law.predict(size).loss
        rows.append((*measured_cells(rung), f"{law:.4f}", f"{rung['loss'] / law - 1:+.2%}"))
    return rows


def measured_cells(rung: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the cells of a rung under `MEASURED`; values that are not recorded are empty."""
    loss = rung["loss"]
    bits = rung["bits_per_byte"]
    return (
        rung["name"],
        f"{rung['parameters']:,}",
        f"{rung['tokens']:,}",
        f"{rung['flops']:.2e}",
        "" if loss is None else f"{loss:.4f}",
        "" if bits is None else f"{bits:.4f}",
    )


def ladder_lines(ladder: Ladder) -> list[str]:
    """Describe the law as lines of text."""
    formula = "E + A / C^a"
    if len(ladder.law.sizes) > 1:
        formula = "E + A / N^a + B / D^b"
    values = []
    for name, (value, low, high) in ladder.law.constants().items():
        values.append(f"{name} {value:.3g} ({low:.3g} to {high:.3g})")
    return [
        f"loss = {formula}: {', '.join(values)}; {LEVEL:.0%} intervals",
        f"runs deviate from the law by {ladder.law.noise:.2%} (standard deviation); on other text "
        f"of the same kind the loss has a standard error of {ladder.windows:.2%}",
        *(f"left out: {line}" for line in ladder.left_out),
    ]


def write_ladder_page(ladder: Ladder, out: Path) -> None:
    """Write report.html: the law, and the curves of the rungs below it."""
    write_rungs(
        names=[rung["name"] for rung in ladder.rungs],
        title=ladder.title,
        rows=ladder_rows(ladder),
        lines=ladder_lines(ladder),
        image=base64.b64encode(ladder_png(ladder)).decode(),
        out=out,
    )


def write_rungs(
    names: Sequence[str],
    title: str,
    rows: Sequence[tuple[str, ...]],
    lines: Sequence[str],
    image: str | None,
    out: Path,
) -> None:
    """Write report.html: a table and an image of the rungs, and their curves below it."""
    runs = open_runs([str(out / name) for name in names])
    section = {"heading": "Ladder", "image": image, "rows": rows, "lines": lines}
    page = build_page(runs, None, section, title=f"{title}: {plural(len(runs), 'rung')}")
    write_file(out / "report.html", [page.encode(errors="replace")])


# --------------------------------------------------------------------------- without a law


def write_without_law(rungs: Sequence[Rung], runs: Mapping[str, RunFolder], out: Path) -> None:
    """Print the table of rungs that give no law, and write it to report.html."""
    rows: list[tuple[str, ...]] = [MEASURED]
    for rung in rungs:
        rows.append(measured_cells(rung_row(rung, runs[rung.name])))
    write_out(table(rows, "<", *[">"] * 5) + "\n")
    started = [name for name, run in runs.items() if run.launches]
    if started:
        write_rungs(
            names=started,
            title=out.name,
            rows=rows,
            lines=["These rungs give no law."],
            image=None,
            out=out,
        )
        write_out(f"report     {out / 'report.html'}\n")


def rungs_to_add(rungs: Sequence[Rung], error: NoLawError) -> str:
    """Suggest the rungs to add if the present ones give no law.

    If longer rungs are no better, the size limits the loss: suggest deeper rungs. Else suggest
    longer rungs.
    """
    depths = sorted({rung.depth for rung in rungs})
    ratios = sorted({rung.ratio for rung in rungs})
    if list(error.flat) == ["tokens"]:
        kind = "deeper"
        depths = [depths[-1] + 1, 2 * depths[-1]]
    else:
        kind = "longer"
        ratios = [2 * ratios[-1], 4 * ratios[-1]]
    return (
        f"add {kind} rungs: repeat the command with --depths {','.join(map(str, depths))} "
        f"--ratios {','.join(f'{ratio:g}' for ratio in ratios)}"
    )
