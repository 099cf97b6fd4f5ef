"""A load that forgets: the newest steps weigh most."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..trace import LoadTrace

Floats = npt.NDArray[np.float64]


class Ewma:
    """Exponentially weighted mean of the load of a step. A step weighs half as much as one ``half_life`` steps later."""

    def __init__(self, half_life: float) -> None:
        """ValueError: a half life that is not positive."""
        if not half_life > 0:
            raise ValueError(f"ewma: the half life must be a positive number of steps, found {half_life}")
        self.half_life = half_life
        self._sum: Floats | None = None
        self._weight = 0.0

    def add(self, counts: npt.ArrayLike, steps: int = 1) -> None:
        """Take in counts [layers, experts], the sum over ``steps`` steps that follow those seen so far."""
        if steps < 1:
            raise ValueError(f"ewma: counts must be of one step or more, found {steps}")
        new = np.asarray(counts, dtype=np.float64)
        if self._sum is not None and self._sum.shape != new.shape:
            raise ValueError(f"ewma: counts were {self._sum.shape} so far, found {new.shape}")
        decay = 0.5 ** (steps / self.half_life)
        # the steps of one call weigh 1, d, d^2 ..; within them the load is taken as even
        weight = (1.0 - decay) / (1.0 - 0.5 ** (1.0 / self.half_life))
        self._sum = (0.0 if self._sum is None else self._sum * decay) + new * (weight / steps)
        self._weight = self._weight * decay + weight

    @property
    def value(self) -> Floats:
        """[layers, experts] mean load of a step; the first steps are not drawn towards zero.

        Raises:
            ValueError: nothing was added.
        """
        if self._sum is None:
            raise ValueError("ewma: no counts were added")
        return self._sum / self._weight


def ewma(trace: LoadTrace, half_life: float) -> Floats:
    """[layers, experts] mean load of a step at the end of the trace."""
    mean = Ewma(half_life)
    for counts in trace.counts:
        mean.add(counts)
    return mean.value
