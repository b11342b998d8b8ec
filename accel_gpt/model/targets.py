"""Choose the targets that a model learns and is evaluated on.

Shapes: B batch, T tokens.
"""

from dataclasses import dataclass

from torch import Tensor

from accel_gpt.config.experiment import Config
from accel_gpt.errors import require
from accel_gpt.model.documents import separate
from accel_gpt.model.loss import IGNORE
from accel_gpt.own_code import unexpected

PLAIN = Config()


@dataclass(frozen=True)
class TargetMask:
    """Ignores targets across the ends of documents, and those that `targets()` of --code drops."""

    document_end: int | None = None  # the token that ends a document; None: no token
    config: Config = PLAIN

    @property
    def keeps_all(self) -> bool:
        """Return whether every target counts."""
        return self.document_end is None and self.config.own.targets is None

    def apply(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the targets (B, T), ignored ones as `IGNORE`, and each token's document (B, T).

        The documents are None without `document_end`. Waits for no device: on a CPU, raises
        `UserError` if `targets()` changes a target otherwise; elsewhere only its -100 count.
        """
        documents = None
        if self.document_end is not None:
            targets, documents = separate(tokens, targets, self.document_end)
        own = self.config.own
        if own.targets is None:
            return targets, documents
        place = own.place("targets")
        chosen = own.targets(
            tokens=tokens, targets=targets.clone(), documents=documents, config=self.config
        )
        if not isinstance(chosen, Tensor) or chosen.shape != targets.shape:
            raise unexpected(place, chosen, f"the targets, of shape {tuple(targets.shape)}")
        is_dropped = chosen == IGNORE
        if targets.device.type == "cpu":
            same = (chosen == targets) | is_dropped
            require(
                bool(same.all()),
                f"{place} changed a target; return the targets, with {IGNORE} where nothing is "
                "learned",
            )
        return targets.masked_fill(is_dropped, IGNORE), documents
