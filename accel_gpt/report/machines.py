"""The machines of a run, what they made and what they cost, from run.json and metrics.jsonl.

A machine is a kind and number of devices at a price. The hours of a launch end with its last known
record or save.
"""

import itertools
import math
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import numpy as np

from accel_gpt.config.plan import plural
from accel_gpt.console import format_clock
from accel_gpt.report.runs import NamedRun
from accel_gpt.runs.folder import number
from accel_gpt.runs.launches import LaunchClock

LONGEST_NAME = 60  # characters


class Work(NamedTuple):
    """What a launch took."""

    name: str  # of its machine: `2 x NVIDIA L4`
    price: float | None  # of a device hour
    device_hours: float  # since its process began; 0: unknown
    seconds: float  # of training
    gap: float  # seconds without training before it; 0: unknown

    @property
    def machine(self) -> tuple[str, float | None]:
        """Return what tells machines apart."""
        return self.name, self.price

    @property
    def cost(self) -> float:
        """Return its money; 0 if the price is unknown."""
        return self.device_hours * (self.price or 0.0)


class Band(NamedTuple):
    """The steps that a machine made in a row; `kind` is its row in the table, from 0."""

    step: int  # complete when it began
    kind: int
    label: str
    text: str


# of the texts in `rows`; launches whose steps were repeated count too
COLUMNS = ("machine", "launches", "tokens/s", "training", "device hours", "price per hour", "cost")


def works(run: NamedRun) -> list[Work]:
    """Return what each launch of a run took."""
    found = []
    before: LaunchClock | None = None
    for launch, clock in zip(run.launches, run.clocks, strict=True):
        devices = number(launch.get("processes"))
        price = number(launch.get("price"))
        hours = clock.process_seconds / 3600 if clock else 0.0
        gap = clock.trained - before.ended if clock and before and before.ended else 0.0
        work = Work(
            name=machine_name(launch),
            price=price if math.isfinite(price) else None,
            device_hours=hours * (devices if math.isfinite(devices) else 1.0),
            seconds=clock.seconds if clock else 0.0,
            gap=max(gap, 0.0),
        )
        found.append(work)
        before = clock
    return found


def machine_name(launch: Mapping[str, Any]) -> str:
    """Return number and kind of the devices of a launch."""
    device = " ".join(str(launch.get("device")).split())
    return f"{launch.get('processes')} x {device}"[:LONGEST_NAME]


def speed(run: NamedRun, launches: Collection[int]) -> str:
    """Return the median of the tokens per second that the records of `launches` have."""
    steps, rates = run.metrics.curve("perf/tokens_per_second")
    writers = np.array([index for _, index in run.kept_launches])
    firsts = [step for step, _ in run.kept_launches]
    if not len(writers) or not len(rates):
        return ""
    owners = writers[np.maximum(np.searchsorted(firsts, steps) - 1, 0)]
    found = rates[np.isin(owners, list(launches))]
    return f"{np.median(found):,.0f}" if len(found) else ""


def bands(run: NamedRun) -> list[Band]:
    """Return the bands of the machines over the steps; none if one machine made all of them."""
    took = works(run)
    order = list(dict.fromkeys(work.machine for work in took))  # as in `rows`
    found = []
    groups = itertools.groupby(run.kept_launches, key=lambda kept: took[kept[1]].machine)
    for (name, price), group in groups:
        members = list(group)
        launches = [index for _, index in members]
        rate = speed(run, launches)
        gap = sum(took[index].gap for index in launches)
        parts = [
            f"{name} from step {members[0][0]:,}",
            f"{rate} tokens/s" if rate else "",
            "" if price is None else f"{price:,g} per device hour",
            plural(len(launches), "launch", "launches") if len(launches) > 1 else "",
            f"{format_clock(gap)} between launches" if gap else "",
        ]
        label = name.replace("NVIDIA ", "")
        text = ", ".join(filter(None, parts))
        found.append(Band(members[0][0], order.index((name, price)), label, text))
    return found if len(found) > 1 else []


def rows(run: NamedRun) -> list[list[str]]:
    """Return the `COLUMNS` of each machine; none without clocks or for one unpriced launch."""
    took = works(run)
    priced = any(work.price is not None for work in took)
    if not any(run.clocks) or (len(took) == 1 and not priced):
        return []
    found = []
    for name, price in dict.fromkeys(work.machine for work in took):
        launches = [i for i, work in enumerate(took) if work.machine == (name, price)]
        members = [took[i] for i in launches]
        row = [
            name,
            str(len(members)),
            speed(run, launches),
            format_clock(sum(work.seconds for work in members)),
            f"{sum(work.device_hours for work in members):,.2f}",
            "" if price is None else f"{price:,g}",
            "" if price is None else f"{sum(work.cost for work in members):,.2f}",
        ]
        found.append(row)
    return found


def summary(run: NamedRun) -> str:
    """Return the sums over all launches in one line; "" if there are no `rows`."""
    if not rows(run):
        return ""
    took = works(run)
    trained = sum(work.seconds for work in took)
    parts = [f"{plural(len(took), 'launch', 'launches')}: {format_clock(trained)} of training"]
    kept = float(run.metrics.seconds[-1]) if len(run.metrics.seconds) else 0.0
    if trained - kept >= 1:  # seconds
        parts.append(f"{format_clock(trained - kept)} of it in steps that were repeated")
    parts.append(f"{sum(work.device_hours for work in took):,.2f} device hours")
    if len(took) > 1:
        parts.append(f"{format_clock(sum(work.gap for work in took))} between launches")
    priced = [work for work in took if work.price is not None]
    if priced:
        of = "" if len(priced) == len(took) else f" for {len(priced)} of them"
        parts.append(f"cost {sum(work.cost for work in priced):,.2f}{of}")
    return ", ".join(parts)
