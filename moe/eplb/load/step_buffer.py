"""Counts of single steps, on the device until they are asked for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ..topology import Ints
from .window import rows_of

#: steps on the device before they go to the host, if all steps are kept
_CHUNK = 256


class StepBuffer:
    """The last ``size`` steps, or all of them (``size`` None: they go to the host 256 at a time, which waits for the device)."""

    def __init__(self, counts: torch.Tensor, rows: Sequence[int], size: int | None) -> None:
        """Counts int64 [layers, experts] that only grow, of which ``rows`` are watched.

        Raises:
            ValueError: a size below one step.
        """
        if size is not None and size < 1:
            raise ValueError(f"buffer of recorded steps: the size must be one step or more, or none for all steps, found {size}")
        self.size = size
        self._counts, self._rows = counts, tuple(rows)
        shape = (size or _CHUNK, len(self._rows), counts.shape[1])
        self._ring = torch.zeros(shape, dtype=torch.int32, device=counts.device)  # a step has fewer than 2^31 choices
        self._last = rows_of(counts, self._rows).clone()
        self._steps = 0  # pushed since the ring was emptied
        self._host: list[Ints] = []

    def push(self) -> None:
        """A step has been launched: what the counts have grown by since the last call is its own."""
        if self.size is None and self._steps == len(self._ring):
            self._host.append(self._on_device())
            self._steps = 0
        now = rows_of(self._counts, self._rows)
        self._ring[self._steps % len(self._ring)].copy_(now - self._last)
        self._last.copy_(now)
        self._steps += 1

    @property
    def n_steps(self) -> int:
        """Steps that ``counts`` gives."""
        return sum(map(len, self._host)) + min(self._steps, len(self._ring))

    def counts(self) -> Ints:
        """[steps, rows, experts] int64 on the host, oldest first. Waits for the device."""
        return np.concatenate([*self._host, self._on_device()])

    def clear(self) -> None:
        """Forget all steps; what was counted meanwhile belongs to none."""
        self._steps, self._host = 0, []
        self._last.copy_(rows_of(self._counts, self._rows))

    def _on_device(self) -> Ints:
        n, size = self._steps, len(self._ring)
        order = torch.arange(max(0, n - size), n, device=self._ring.device) % size
        found: Ints = self._ring[order].cpu().numpy().astype(np.int64)
        return found
