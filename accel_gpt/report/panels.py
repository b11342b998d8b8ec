"""What is drawn: the plots of a report, for the page and for single pictures alike."""

from collections.abc import Sequence
from dataclasses import dataclass

from accel_gpt.report.figures import Figures


@dataclass(frozen=True)
class Panel:
    """One plot. A key that ends with a slash stands for all that begin with it."""

    name: str
    title: str
    unit: str
    keys: tuple[str, ...]
    log: bool = False  # the values, at first
    factor: float = 1.0  # from what is recorded to `unit`
    smooth: bool = False
    low: bool = False  # lower is better: the best is named

    def present(self, figures: Figures) -> list[str]:
        """Those of its keys that a run has recorded."""
        found: list[str] = []
        for key in self.keys:
            found += figures.named(key) if key.endswith("/") else [key] * (key in figures.columns)
        return found


PANELS = (
    Panel(
        *("loss", "Loss", "nats per token", ("train/loss", "eval/train_loss", "eval/val_loss")),
        smooth=True,
        low=True,
    ),
    Panel("val_sets", "Val loss by set", "nats per token", ("eval/val_loss/",), low=True),
    Panel(
        *("bits_per_byte", "Val bits per byte", "bits per byte", ("eval/val_bits_per_byte",)),
        low=True,
    ),
    Panel("hellaswag", "HellaSwag", "% acc_norm", ("eval/hellaswag_acc_norm",), factor=100),
    Panel("lr", "Learning rate", "per step", ("train/lr",)),
    Panel("grad_norm", "Gradient norm", "", ("train/grad_norm",), log=True, smooth=True),
    Panel("throughput", "Throughput", "tokens/s", ("perf/tokens_per_second",), smooth=True),
    Panel("mfu", "MFU", "% of the peak", ("perf/mfu",), factor=100, smooth=True),
    Panel("memory", "Peak memory", "GB", ("perf/memory_gb",)),
)
# what a key is called where a plot shows several
NAMES = (
    ("train/loss", "train"),
    ("eval/train_loss", "train, evaluated"),
    ("eval/val_loss", "val"),
)


def key_name(key: str) -> str:
    """The name of a curve: that in `NAMES`, or what follows the second slash."""
    return dict(NAMES).get(key) or key.split("/", 2)[-1]


def color(panel: Panel, key: str, keys: Sequence[str]) -> int:
    """Number of a colour where a report has one run: val has the same in every plot."""
    if panel.name == "val_sets":
        return keys.index(key)
    fixed = {"eval/val_loss": 1, "eval/val_bits_per_byte": 1, "eval/train_loss": 2}
    return fixed.get(key, 0)


def style(key: str) -> str:
    """What is measured now and then has dots, what is logged is a line."""
    if key == "eval/train_loss":
        return "dashed"
    return "dots" if key.startswith("eval/") else "line"
