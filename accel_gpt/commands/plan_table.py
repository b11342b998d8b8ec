"""The report of `accel-gpt plan` as an aligned table."""

from collections.abc import Iterator, Mapping
from typing import Any

from accel_gpt.commands.plan_forecast import CHINCHILLA
from accel_gpt.config.plan import plural

Row = tuple[str, str, str]  # what, how much, how come
LABEL, VALUE = 28, 16  # columns


def table(report: Mapping[str, Any]) -> str:
    """The whole report as text."""
    precision = report["precision"]
    title = "\n".join(
        [
            f"{report['config']} on {report['machine']}",
            f"precision {precision['is']}: {precision['source']}",
            *report["depth"],
        ]
    )
    sections = (parameters, length, memory, time, disk)
    blocks = ["\n".join(lines(section(report))) for section in sections]
    return "\n\n".join([title, *blocks, verdict(report)]) + "\n"


def lines(rows: Iterator[Row]) -> Iterator[str]:
    """Each row in its columns."""
    for label, value, note in rows:
        yield f"{label:<{LABEL}}{value:>{VALUE}}   {note}".rstrip()


def parameters(report: Mapping[str, Any]) -> Iterator[Row]:
    """Weights by part."""
    counts, vocabulary = dict(report["parameters"]), report["vocabulary"]
    total, real = counts.pop("total"), counts.pop("total_unpadded")
    padding = f"of them {total - real:,} pad the vocabulary" if total > real else ""
    yield "parameters", f"{total:,}", padding
    for part, count in counts.items():
        tied = "shared with the embedding" if part == "head" and not count else ""
        if count or tied:
            yield f"  {part}", f"{count:,}", tied
    yield "vocabulary", f"{vocabulary['tokens']:,}", vocabulary["source"]


def length(report: Mapping[str, Any]) -> Iterator[Row]:
    """Steps, tokens, FLOPs."""
    run = report["length"]
    batch = (
        f"{run['micro_batch_size']:,} x {run['block_size']:,} tokens x "
        f"{plural(run['accumulation_steps'], 'micro-step')} x {plural(run['devices'], 'device')}"
    )
    ratio = run["tokens_per_parameter"]
    yield "steps", f"{run['steps']:,}", f"{run['warmup_steps']:,} of them warm-up"
    yield "tokens per step", f"{run['tokens_per_step']:,}", batch
    yield "tokens", f"{run['tokens']:,}", ""
    yield "tokens per parameter", f"{ratio:.1f}", f"Chinchilla: about {CHINCHILLA}"
    yield "FLOPs per token", f"{run['flops_per_token']:.3e}", "forward and backward"
    yield "  per step", f"{run['flops_per_step']:.3e}", ""
    yield "  of the run", f"{run['flops']:.3e}", ""


def memory(report: Mapping[str, Any]) -> Iterator[Row]:
    """What one device holds."""
    held = report["memory"]
    device = held["device"]
    of = f"of {gigabytes(device)}" if device else ""
    yield "memory of a device", gigabytes(held["total"]), of
    for part, size in held["parts"].items():
        yield f"  {part}", gigabytes(size), ""
    yield "  at its fullest", "", held["moment"]
    if held["compiled"]:
        yield "", "", "train.compile keeps less; how much is not counted"
    for part, size in held["host"].items():
        yield "memory of the host", gigabytes(size), f"{part}, a process"


def time(report: Mapping[str, Any]) -> Iterator[Row]:
    """Speed, hours, cost."""
    told = report["time"]
    rate, share = told["tokens_per_second"], told["mfu"]
    if rate is None:
        yield "tokens per second", "?", told["source"]
        return
    yield "tokens per second", f"{rate:,.0f}", told["source"]
    if share is not None:
        yield "  MFU", f"{share:.1%}", "of the peak of all devices"
    evaluating = told["evaluation_hours"]
    of_it = "without evaluations"
    if evaluating is not None:
        of_it = f"{evaluating / told['hours']:.0%} of them evaluations"
    yield "hours", f"{told['hours']:,.2f}", of_it
    yield "device hours", f"{told['device_hours']:,.2f}", ""
    if told["cost"] is not None:
        yield "cost", f"{told['cost']:,.2f}", "at --price a device hour"


def disk(report: Mapping[str, Any]) -> Iterator[Row]:
    """Bytes read and written."""
    room = report["disk"]
    kept = f"{room['checkpoints_kept']} kept: {gigabytes(room['checkpoints'])}"
    yield "data read", gigabytes(room["data_read"]), ""
    yield "checkpoint", gigabytes(room["checkpoint"]), kept


def verdict(report: Mapping[str, Any]) -> str:
    """Whether it fits, and what would make it fit."""
    held = report["memory"]
    if held["fits"] is None:
        return "Whether it fits is not known; --gpu or --memory_gb tells what it must fit in."
    if held["fits"]:
        largest = held["largest_micro_batch_size"]
        return f"It fits; train.micro_batch_size may be up to {largest}."
    return "\n".join(["It does not fit. With these settings it does:", *held["remedies"]])


def gigabytes(size: float) -> str:
    """Bytes in 1e9, or in 1e6 where there are few."""
    return f"{size / 1e9:,.2f} GB" if size >= 1e8 else f"{size / 1e6:,.1f} MB"
