"""Two runs of one config, figure by figure and bit by bit: what differs, and where first.

Reads `metrics.jsonl` and the last checkpoint of both folders.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from accel_gpt.training.checkpoint import find_checkpoint
from accel_gpt.training.run_folder import RunFolder

TOLERANCE = 1e-3  # relative, of losses on several numbers of processes; assumption
FIGURES: tuple[tuple[str, str], ...] = (  # what they are called, how their keys begin
    ("losses", "train/loss"),
    ("gradient norms", "train/grad_norm"),
    ("learning rates", "train/lr"),
    ("tokens", "tokens"),
    ("batch hashes", "data/batch_hash"),
    ("evaluations", "eval/"),
)
ROUNDED = ("losses", "gradient norms", "evaluations")  # may differ with the number of processes
JUDGED = ("losses", "evaluations")  # those of them that must be within the tolerance


@dataclass(frozen=True)
class Finding:
    """How one thing compares: values, how many of them differ and by how much at most."""

    what: str
    compared: int
    different: int
    largest: float  # absolute difference; nan where one side has no number
    first: str | None  # the first difference, with its place and both values
    equal: bool  # as equal as was asked for

    def joined(self, other: "Finding") -> "Finding":
        """Both as one; the first difference is that of the earlier."""
        return replace(
            self,
            compared=self.compared + other.compared,
            different=self.different + other.different,
            largest=largest([self.largest, other.largest]),
            first=self.first or other.first,
            equal=self.equal and other.equal,
        )


def compare_runs(whole: Path, other: Path, steps: int, exact: bool) -> list[Finding]:
    """One finding each for the steps, the kinds of figures, the weights and the optimizer's state.

    `exact`: equal bit for bit. Else losses within `TOLERANCE`, while gradient norms, weights and
    the optimizer's state are measured and not judged; all the rest must be equal still.
    Raises `UserError` where a run lacks its last checkpoint.
    """
    runs = [list(RunFolder(folder).records()) for folder in (whole, other)]
    numbered = [{(i + 1, "step"): r["step"] for i, r in enumerate(records)} for records in runs]
    findings = [compare_values("steps", numbered[0], numbered[1], exact=True)]
    for what, start in FIGURES:
        named = [figures(records, start) for records in runs]
        judge = exact or what not in ROUNDED
        findings.append(compare_values(what, named[0], named[1], judge))
    places = [find_checkpoint(folder, str(steps)) for folder in (whole, other)]
    for what, read in (("weights", read_weights), ("optimizer state", read_optimizer)):
        findings.append(compare_tensors(what, read(places[0]), read(places[1]), exact))
    return findings


# --------------------------------------------------------------------------- figures


def figures(records: Sequence[Mapping[str, Any]], start: str) -> dict[tuple[int, str], Any]:
    """(step, key) -> value, of the keys that begin with `start`."""
    return {
        (record["step"], key): value
        for record in records
        for key, value in record.items()
        if key.startswith(start)
    }


def compare_values(
    what: str,
    whole: Mapping[tuple[int, str], Any],
    other: Mapping[tuple[int, str], Any],
    exact: bool,
) -> Finding:
    """Compare figures by their (step, key); one that is missing on one side is a difference."""
    first, differences, equal = None, [], True
    for place in sorted(whole.keys() | other.keys()):
        pair = [side.get(place, "nothing") for side in (whole, other)]
        if same(*pair):
            continue
        apart = difference(*pair)
        differences.append(apart)
        missing = math.isnan(apart)
        if exact or missing or (what in JUDGED and apart > TOLERANCE * max(map(abs, pair))):
            equal = False
        if first is None:
            first = f"step {place[0]}, {place[1]}: {pair[0]} when never stopped, {pair[1]} here"
    many = len(whole.keys() | other.keys())
    return Finding(what, many, len(differences), largest(differences), first, equal)


def same(one: Any, two: Any) -> bool:
    """Whether two values of JSON are the same, floats bit for bit."""
    if isinstance(one, float) and isinstance(two, float):
        return one.hex() == two.hex()
    return bool(one == two)


def difference(one: Any, two: Any) -> float:
    """How far two numbers are apart; nan where one of them is no number."""
    numbers = isinstance(one, int | float) and isinstance(two, int | float)
    return abs(one - two) if numbers else math.nan


def largest(values: Sequence[float]) -> float:
    """The largest, 0 of none; nan where any is nan."""
    return math.nan if any(map(math.isnan, values)) else max(values, default=0.0)


# --------------------------------------------------------------------------- tensors


def read_weights(checkpoint: Path) -> dict[str, Any]:
    """Name -> tensor of a checkpoint's weights."""
    return load_file(checkpoint / "model.safetensors")


def read_optimizer(checkpoint: Path) -> dict[str, Any]:
    """Name -> tensor or setting of a checkpoint's optimizer."""
    path = checkpoint / "optimizer.bin"
    return dict(leaves_of(torch.load(path, weights_only=True, map_location="cpu")))


def leaves_of(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted names and values of nested mappings and lists."""
    if isinstance(value, Mapping):
        inner = [(str(key), item) for key, item in value.items()]
    elif isinstance(value, list | tuple):
        inner = [(str(i), item) for i, item in enumerate(value)]
    else:
        yield prefix.rstrip("."), value
        return
    for name, item in inner:
        yield from leaves_of(item, f"{prefix}{name}.")


def compare_tensors(
    what: str, whole: Mapping[str, Any], other: Mapping[str, Any], exact: bool
) -> Finding:
    """Compare named tensors and settings; one that is missing or of another shape differs."""
    total = different = 0
    first, differences, equal = None, [], True
    for name in sorted(whole.keys() | other.keys()):
        one, two = (as_tensor(side.get(name)) for side in (whole, other))
        fitting = one.shape == two.shape and one.dtype == two.dtype
        total += max(one.numel(), two.numel())
        if fitting and not (unequal := differing(one, two)).any():
            continue
        if not fitting:
            different, equal = different + max(one.numel(), two.numel()), False
            differences.append(math.nan)
            told = [f"{list(t.shape)} {t.dtype}" if t.numel() else "nothing" for t in (one, two)]
            place = name
        else:
            different += int(unequal.sum())
            equal = equal and not exact
            differences.append(float((one.double() - two.double()).abs().max()))
            index = [int(i) for i in unequal.nonzero()[0]]
            told = [repr(t[tuple(index)].item()) for t in (one, two)]
            place = f"{name}{index if index else ''}"
        first = first or f"{place}: {told[0]} when never stopped, {told[1]} here"
    return Finding(what, total, different, largest(differences), first, equal)


def as_tensor(value: Any) -> Tensor:
    """A tensor, a number as one of no dimension; anything else, and nothing, as an empty one."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, bool | int | float):
        return torch.tensor(value, dtype=torch.float64)
    return torch.empty(0)


def differing(one: Tensor, two: Tensor) -> Tensor:
    """Which elements are not the same bits."""
    if not one.numel():
        return torch.zeros(one.shape, dtype=torch.bool)
    flat = [t.contiguous().reshape(-1, 1).view(torch.uint8) for t in (one, two)]
    return (flat[0] != flat[1]).any(dim=1).reshape(one.shape)


# --------------------------------------------------------------------------- the table


def table(findings: Sequence[Finding]) -> str:
    """The findings as aligned lines."""
    rows = [("", "compared", "different", "largest difference", "")]
    rows += [
        (
            finding.what,
            f"{finding.compared:,}",
            f"{finding.different:,}" if finding.different else "none",
            "" if not finding.different else spoken(finding.largest),
            verdict(finding),
        )
        for finding in findings
    ]
    return "".join(
        f"{what:<16} {count:>12} {many:>12} {most:>20}   {told}".rstrip() + "\n"
        for what, count, many, most, told in rows
    )


def verdict(finding: Finding) -> str:
    """`equal`, `DIFFERENT`, or what was asked of it."""
    if not finding.compared:
        return "none there"
    if not finding.equal:
        return "DIFFERENT"
    if not finding.different:
        return "equal"
    return f"within {TOLERANCE:g}" if finding.what in JUDGED else "measured"


def spoken(value: float) -> str:
    """A difference as people read it."""
    return "no number" if math.isnan(value) else f"{value:.3g}"
