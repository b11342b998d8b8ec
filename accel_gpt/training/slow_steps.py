"""Names the slowest rank where steps take far longer than before."""

import socket
import statistics
import time
from collections import deque
from collections.abc import Callable

import torch

from accel_gpt.training.ranks import all_gather

SLOW = 1.5  # times the median
KEPT, FEWEST = 50, 4  # of the earlier times that the median is of
MATRIX = 1024  # rows: 4 MB, as a device may be full
CUDA_PRODUCTS = 100  # 1 to 10 ms; on a CPU one takes more


class SlowSteps:
    """Compares the seconds of steps with their median; `synchronize` waits for `device`."""

    def __init__(self, device: torch.device, synchronize: Callable[[], object]) -> None:
        self.device, self.synchronize = device, synchronize
        self.earlier: deque[float] = deque(maxlen=KEPT)

    def check(self, seconds: float, waited: float) -> str | None:
        """A warning, or None where a step took no longer than usual; a collective.

        `seconds`: of a step, on average since the last call; `waited`: those of them for data.
        """
        if len(every := all_gather((seconds, waited))) == 1:
            return None
        slow = max(seconds for seconds, _ in every)
        usual = statistics.median(self.earlier or [slow])
        self.earlier.append(slow)
        if len(self.earlier) <= FEWEST or slow < SLOW * usual:
            return None
        products, hosts = zip(*all_gather((self.product(), socket.gethostname())), strict=True)
        parts = [f"WARNING: a step takes {1000 * slow:,.0f} ms, before {1000 * usual:,.0f}"]
        for what, values in (("data", [waited for _, waited in every]), ("a product", products)):
            rank = values.index(max(values))
            parts.append(
                f"for {what} rank {rank} ({hosts[rank]}) takes {1000 * values[rank]:,.1f} ms, the "
                f"fastest {1000 * min(values):,.1f}"
            )
        return "; ".join(parts)

    def product(self) -> float:
        """Seconds of fixed products of matrices on this rank's device, at their second run."""
        matrix = torch.ones(MATRIX, MATRIX, device=self.device)
        for _ in range(2):
            self.synchronize()
            start = time.monotonic()
            for _ in range(CUDA_PRODUCTS if self.device.type == "cuda" else 1):
                torch.mm(matrix, matrix)
            self.synchronize()
        return time.monotonic() - start
