"""What a step of the experts costs, as planners see it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Time of one layer's experts on one rank: the weights of activated experts are read, and tokens computed, whichever is longer.

    The layer ends when its slowest rank ends. Defaults are DeepSeek-V3's experts in FP8 on an H200.
    """

    expert_bytes: int = 44_050_000  # weights and scales of one expert, which move together
    token_seconds: float = 1.1e-7  # computing one routed token (one choice) when many are computed together: 88 MFLOP at 800 TFLOP/s
    expert_seconds: float = 1.05e-5  # reading one activated expert: its bytes at 4.2 TB/s
    fixed_seconds: float = 2e-5  # launches of a layer
    copy_bytes_per_second: float = 4e10  # of a moving expert on its way to one rank

    def __post_init__(self) -> None:
        """ValueError: prices that make no time."""
        prices = {name: getattr(self, name) for name in ("token_seconds", "expert_seconds", "fixed_seconds")}
        if not all(0 <= price < float("inf") for price in prices.values()):
            raise ValueError(f"cost: seconds must be finite and not negative, found {prices}")
        if not self.expert_bytes >= 1 or not self.copy_bytes_per_second > 0:
            raise ValueError(
                f"cost: expert_bytes and copy_bytes_per_second must be above 0, found {self.expert_bytes} and {self.copy_bytes_per_second}"
            )

    def layer_seconds(self, tokens: Floats, activated: Floats) -> Floats:
        """Seconds of layers: tokens [..., ranks] routed to each rank, activated [..., ranks] its experts that got any -> [...]."""
        busy: Floats = np.maximum(tokens * self.token_seconds, activated * self.expert_seconds)
        slowest: Floats = self.fixed_seconds + busy.max(-1)
        return slowest

    def move_seconds(self, arrivals: npt.NDArray[np.int64]) -> float:
        """Seconds until every rank has its new experts: arrivals [..., ranks], experts that a rank did not hold before."""
        per_rank = arrivals.reshape(-1, arrivals.shape[-1]).sum(0)
        return float(per_rank.max(initial=0)) * self.expert_bytes / self.copy_bytes_per_second
