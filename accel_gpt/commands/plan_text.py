"""The table that `accel-gpt plan` prints: what, how much, why."""

from collections.abc import Iterator, Mapping
from typing import Any

from accel_gpt.commands.plan_ladder import loss_rows
from accel_gpt.config.plan import plural
from accel_gpt.console import format_hours, table

CHINCHILLA = 20  # tokens per parameter; Hoffmann et al. 2022, table 3


def plan_text(report: Mapping[str, Any]) -> str:
    """Format the report as a table; the sections are separated by empty lines."""
    precision = report["precision"]
    lines = [f"{report['config']} on {report['machine']}"]
    lines.append(f"precision {precision['is']}: {precision['source']}")
    lines.extend(report["depth"])
    lines.append("")
    rows = table([*size_rows(report), *cost_rows(report)], "<25", ">16", "<", gap=3)
    return "\n".join(lines) + "\n" + rows + verdict(report["memory"]) + "\n"


def verdict(memory: Mapping[str, Any]) -> str:
    """Say whether a run fits, and what to try if it does not."""
    if memory["fits"] is None:
        return "Whether it fits is not known; --gpu or --memory_gb tells what it must fit in."
    if memory["fits"]:
        largest = memory["largest_micro_batch_size"]
        return f"It fits; train.micro_batch_size may be up to {largest}."
    options = memory["try"]
    if not options:
        return (
            "It does not fit; plan for more devices with --distribution fsdp, for devices with "
            "more memory, or for a smaller model."
        )
    if len(options) == 1:
        return f"It does not fit; try {options[0]}."
    return f"It does not fit; try {', '.join(options[:-1])} or {options[-1]}."


def size_rows(report: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield parameters by part, vocabulary and length: what, how much, why."""
    counts = dict(report["parameters"])
    total = counts.pop("total")
    real = counts.pop("total_unpadded")
    padding = f"of them {total - real:,} pad the vocabulary" if total > real else ""
    yield "parameters", f"{total:,}", padding
    for part, count in counts.items():
        if count:
            yield f"  {part}", f"{count:,}", ""
        elif part == "head":
            yield "  head", "0", "shared with the embedding"
    vocabulary = report["vocabulary"]
    yield "vocabulary", f"{vocabulary['tokens']:,}", vocabulary["source"]
    yield ()
    length = report["length"]
    yield "steps", f"{length['steps']:,}", f"{length['warmup_steps']:,} of them warm-up"
    batch = (
        f"{length['micro_batch_size']:,} x {length['block_size']:,} tokens x "
        f"{plural(length['accumulation_steps'], 'micro-step')} x "
        f"{plural(length['devices'], 'device')}"
    )
    yield "tokens per step", f"{length['tokens_per_step']:,}", batch
    yield "tokens", f"{length['tokens']:,}", ""
    ratio = f"{length['tokens_per_parameter']:.1f}"
    yield "tokens per parameter", ratio, f"Chinchilla: about {CHINCHILLA}"
    yield "FLOPs per token", f"{length['flops_per_token']:.3e}", "forward and backward"
    yield "  per step", f"{length['flops_per_step']:.3e}", ""
    yield "  of the run", f"{length['flops']:.3e}", ""
    yield ()
    if report["loss"]:
        yield from loss_rows(report["loss"])


def cost_rows(report: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield memory, speed, hours and disk: what, how much, why."""
    yield from memory_rows(report["memory"])
    yield ()
    yield from time_rows(report["time"])
    yield ()
    disk = report["disk"]
    kept = f"{disk['checkpoints_kept']} kept: {gigabytes(disk['checkpoints'])}"
    if disk["checkpoint_by_rank"] < disk["checkpoint"]:
        kept += f"; each rank writes {gigabytes(disk['checkpoint_by_rank'])}"
    yield "data read", gigabytes(disk["data_read"]), ""
    yield "checkpoint", gigabytes(disk["checkpoint"]), kept
    yield ()


def memory_rows(memory: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield the memory of a device, and the memory of a node's host."""
    limit = f"of {gigabytes(memory['device'])}" if memory["device"] else ""
    yield "memory of a device", gigabytes(memory["total"]), limit
    for part, size in memory["parts"].items():
        yield f"  {part}", gigabytes(size), ""
    yield "  at its fullest", "", memory["moment"]
    if memory["compiled"]:
        yield "", "", "train.compile keeps less; how much is not counted"
    if memory["host"]:
        host = dict(memory["host"])
        libraries = host.pop("libraries")
        most = max(host, key=host.__getitem__)
        yield "memory of a node's host", gigabytes(libraries + host[most]), f"libraries and {most}"
        for part, size in memory["host"].items():
            yield f"  {part}", gigabytes(size), ""


def time_rows(time: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield speed, hours and cost."""
    if time["step"]:
        yield from step_rows(time["step"])
    speed = time["tokens_per_second"]
    evaluation = time["evaluation_hours"]
    yield "tokens per second", f"{speed:,.0f}" if speed else "?", time["source"]
    if time["mfu"] is not None:
        yield "  MFU", f"{time['mfu']:.1%}", "of the peak of all devices"
    if speed is not None:
        share = "without" if evaluation is None else f"{evaluation / time['hours']:.0%} of them"
        yield "time", format_hours(time["hours"]), f"{share} evaluations"
        yield "device hours", f"{time['device_hours']:,.2f}", ""
    if time["cost"] is not None:
        yield "cost", f"{time['cost']:,.2f}", "at --price a device hour"


def step_rows(step: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield where the time of a step goes."""
    limit = f"limited by {step['limit']}" if "limit" in step else ""
    yield "step", milliseconds(step["total"]), limit
    yield "  compute", milliseconds(step["compute"]), ""
    for one in step.get("collectives", ()):
        sent = f"{gigabytes(one['sent'])} from each device, {plural(one['calls'], 'call')}"
        yield f"  {one['name']}", milliseconds(one["seconds"]), sent
    if step["exposed"]:
        yield "  not hidden by compute", milliseconds(step["exposed"]), "of the collectives"
    if step["exposed"] is None:
        yield "  collectives", "?", "not known; give --bandwidth"


def milliseconds(seconds: float) -> str:
    """Format a time of a step."""
    return f"{1e3 * seconds:,.1f} ms"


def gigabytes(size: float) -> str:
    """Format bytes in units of 1e9, or of 1e6 if there are few."""
    if size >= 1e8:
        return f"{size / 1e9:,.2f} GB"
    return f"{size / 1e6:,.1f} MB"
