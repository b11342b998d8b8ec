"""`accel-gpt report RUN [RUN ...]`: curves, samples and configs of runs as one HTML file.

Reads `metrics.jsonl`, `run.json`, `config.yaml` and `samples/` of each run, also while it trains;
writes nothing there but `report.html`. Needs no torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from accel_gpt.config.options import REQUIRED, option
from accel_gpt.config.parse import parse_command
from accel_gpt.console import write_out
from accel_gpt.errors import UserError, require
from accel_gpt.files import write_file
from accel_gpt.report.page import build_page
from accel_gpt.report.references import find_reference
from accel_gpt.report.runs import open_runs


@dataclass(frozen=True)
class ReportCommand:
    """Write curves, samples and configs of runs as one HTML file, which needs no network.

    Works while a run is training. The runs may be anybody's: all that is in them is shown as text.
    Examples:
      accel-gpt report runs/quickstart
      accel-gpt report runs/a runs/b --out compared.html
      accel-gpt report runs/quickstart --reference none
    """

    run: tuple[str, ...] = option(
        REQUIRED,
        "Folders of runs.",
        positional=True,
    )
    out: str | None = option(
        None,
        "HTML file; null: report.html in the run, or for several runs in the current folder.",
    )
    reference: str = option(
        "auto",
        "Grey curve to compare with: a name in configs/references, a .json file, or none; auto: "
        "the one for the same model, vocabulary and data.",
    )


def main(argv: Sequence[str]) -> int:
    """Write a page with curves, samples and configs of runs."""
    write_out(report(parse_command(ReportCommand, argv, "accel-gpt report")))
    return 0


def report(options: ReportCommand) -> str:
    """Write the page; returns lines that say where it is.

    Raises `UserError` for a folder that is not a run, an unknown reference, and a file that cannot
    be written.
    """
    runs = open_runs(options.run)
    if options.out and not options.out.endswith(".html"):
        in_run = (Path(options.out).parent / "run.json").exists()
        require(
            not (in_run and Path(options.out).exists()),
            f"{options.out} is a file of a run; name another one",
        )
    reference = find_reference(options.reference, runs)
    default = runs[0].path / "report.html" if len(runs) == 1 else Path("report.html")
    out = Path(options.out) if options.out else default
    page = build_page(runs, reference).encode(errors="replace")
    lines = [f"report     {out} ({len(page) / 1e6:.2f} MB)"]
    lines += [f"           {run.name}: {run.status}" for run in runs if run.running]
    if reference:
        lines.append(f"reference  {reference['name']}: {reference['title']}")
    try:
        write_file(out, [page])
    except OSError as error:
        raise UserError(f"{error.filename or out} cannot be written: {error.strerror}") from None
    return "".join(f"{line}\n" for line in lines)
