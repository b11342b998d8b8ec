"""Compare two runs value by value: metrics, weights and the optimizer's state.

Reads metrics.jsonl and the last checkpoint of each run, for `accel-gpt verify-resume`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from accel_gpt.training.checkpoint import find_checkpoint
from accel_gpt.training.run_folder import RunFolder

TOLERANCE = 1e-3  # relative, of losses on several numbers of processes; assumption
METRICS = (  # name, prefix of the keys
    ("losses", "train/loss"),
    ("gradient norms", "train/grad_norm"),
    ("learning rates", "train/lr"),
    ("tokens", "tokens"),
    ("batch hashes", "data/batch_hash"),
    ("evaluations", "eval/"),
)
KINDS = ("steps", *dict(METRICS), "weights", "optimizer state")
# what may differ with the number of processes, and what of it must lie within the tolerance
ROUNDED = ("losses", "gradient norms", "evaluations", "weights", "optimizer state")
JUDGED = ("losses", "evaluations")


def run_values(folder: Path, steps: int) -> dict[str, dict[Any, Any]]:
    """Return the values of a run for each of `KINDS`, by their name or (step, key).

    Raises `UserError` if the run lacks its last checkpoint.
    """
    records = list(RunFolder(folder).records())
    checkpoint = find_checkpoint(folder, str(steps))
    found: dict[str, dict[Any, Any]] = {kind: {} for kind in KINDS}
    for number, record in enumerate(records, start=1):
        found["steps"][number, "step"] = record["step"]
        for kind, prefix in METRICS:
            for key, value in record.items():
                if key.startswith(prefix):
                    found[kind][record["step"], key] = value
    found["weights"] = load_file(checkpoint / "model.safetensors")
    optimizer = torch.load(checkpoint / "optimizer.bin", weights_only=True, map_location="cpu")
    found["optimizer state"] = flatten_state(optimizer)
    return found


def flatten_state(value: Any, name: str = "") -> dict[str, Any]:
    """Map the dotted name of each leaf of nested mappings and lists to its value.

    A mapping or list that is empty is a leaf.
    """
    if isinstance(value, list | tuple):
        value = dict(enumerate(value))
    if not isinstance(value, dict) or not value:
        return {name: value}
    found: dict[str, Any] = {}
    for key, part in value.items():
        found |= flatten_state(part, f"{name}.{key}" if name else str(key))
    return found


def as_tensor(value: Any) -> torch.Tensor:
    """Convert a number to a tensor; anything else that is no tensor to an empty tensor."""
    if torch.is_tensor(value):
        return value.contiguous()
    if isinstance(value, int | float):
        return torch.tensor(value, dtype=torch.double)
    return torch.tensor([], dtype=torch.double)


@dataclass
class Finding:
    """How one kind of values compares, over all runs; `exact`: they must be equal bit for bit.

    If not exact, losses must lie within `TOLERANCE`; gradient norms, weights and the optimizer's
    state are measured and not judged.
    """

    kind: str
    exact: bool
    compared: int = 0  # values
    different: int = 0
    largest: float = 0.0  # absolute difference; nan if one side has no number
    first: str | None = None  # the first difference, with its place and both values
    equal: bool = True  # as equal as required

    def compare(self, whole: Mapping[Any, Any], other: Mapping[Any, Any]) -> None:
        """Add the values of two runs, see `run_values`.

        A value that is missing on one side, or that has another shape, differs.
        """
        for name in sorted(whole.keys() | other.keys()):
            self.compare_value(
                place=f"step {name[0]}, {name[1]}" if isinstance(name, tuple) else name,
                one=whole.get(name, "nothing"),
                two=other.get(name, "nothing"),
            )

    def compare_value(self, place: str, one: Any, two: Any) -> None:
        """Add a value of each of two runs."""
        first = as_tensor(one)
        second = as_tensor(two)
        size = max(first.numel(), second.numel())
        self.compared += size
        if (first.shape, first.dtype) != (second.shape, second.dtype):
            self.equal = False
            self.different += max(size, 1)
            self.largest = math.nan
            self.note_first(place, describe_value(one), describe_value(two))
            return
        unequal = (bytes_of(first) != bytes_of(second)).any(dim=1)
        if not unequal.any():
            return
        if self.exact or not self.is_near(first, second):
            self.equal = False
        self.different += int(unequal.sum())
        apart = float((first.double() - second.double()).abs().max())
        if math.isnan(apart) or apart > self.largest:  # a nan stays
            self.largest = apart
        index = torch.unravel_index(unequal.nonzero()[0, 0], first.shape)
        if index:
            place += str([int(i) for i in index])
            one = repr(first[index].item())
            two = repr(second[index].item())
        self.note_first(place, f"{one}", f"{two}")

    def is_near(self, one: torch.Tensor, two: torch.Tensor) -> bool:
        """Return whether all values lie within the tolerance, if their kind is judged."""
        if self.kind not in JUDGED:
            return True
        apart = (one.double() - two.double()).abs()
        limit = TOLERANCE * one.double().abs().maximum(two.double().abs())
        return bool((apart <= limit).all())

    def note_first(self, place: str, one: str, two: str) -> None:
        """Keep the first difference."""
        if self.first is None:
            self.first = f"{place}: {one} when never stopped, {two} here"

    def row(self) -> tuple[str, ...]:
        """Return the cells of the table: kind, compared, different, largest difference, verdict."""
        different = "none"
        apart = ""
        verdict = "equal" if self.compared else "none there"
        if self.different:
            different = f"{self.different:,}"
            apart = "no number" if math.isnan(self.largest) else f"{self.largest:.3g}"
            verdict = f"within {TOLERANCE:g}" if self.kind in JUDGED else "measured"
        if not self.equal:
            verdict = "DIFFERENT"
        return self.kind, f"{self.compared:,}", different, apart, verdict


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of each element (N, bytes): a zero and a negative zero differ in them."""
    return tensor.reshape(-1, 1).view(torch.uint8)


def describe_value(value: Any) -> str:
    """Return the shape and type of a tensor, or the value itself."""
    if torch.is_tensor(value):
        return f"{list(value.shape)} {value.dtype}"
    return str(value)
