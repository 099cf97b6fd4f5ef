"""The ways to run a step of the rig, and what one took."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Literal

import torch

from ....attention.kv.tier import TierCounter

#: resident: every row is on the device. resolve: hot buffers are kept, nothing is copied (its results mean nothing). serial: resolve,
#: fetch, then the rest. beside: the fetch runs beside the queries' products. parts: the same, and the first half of the requests is
#: fetched beside the choice of the second, as the engine does it. waves: parts, whose second choice leaves room for the fetch, and the
#: first half is attended beside the second fetch. halves: beside, and the second half is fetched beside the attention
#: of the first. hits: rows that were there are attended beside the fetch, then the others, and both are joined. tier: resolve and fetch
Way = Literal["resident", "resolve", "serial", "beside", "parts", "waves", "halves", "hits", "tier"]
WAYS: tuple[Way, ...] = ("resident", "resolve", "serial", "beside", "parts", "waves", "halves", "hits", "tier")


@dataclass(frozen=True, kw_only=True)
class Timing:
    """A way, measured."""

    way: Way
    step_us: tuple[float, ...]  # of each step
    counters: torch.Tensor  # int64 [layers, len(TierCounter)], of all those steps; on the host

    @property
    def us(self) -> float:
        """Median microseconds of a step."""
        return statistics.median(self.step_us)

    def missed(self, chosen: int) -> float:
        """Share of the ``chosen`` rows of a layer's step that were fetched, mean over the layers."""
        return float(self.count(TierCounter.MISSES).mean()) / chosen

    def count(self, counter: TierCounter) -> torch.Tensor:
        """fp64 [layers], per step."""
        return self.counters[:, counter].double() / len(self.step_us)
