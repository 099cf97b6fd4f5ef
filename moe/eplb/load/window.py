"""The load of the last steps, on the device where it is counted."""

from __future__ import annotations

from collections.abc import Sequence

import torch

#: a window is cut in so many parts at most; it is longer than asked by less than two of them
PARTS = 32


def rows_of(counts: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """Rows of counts [layers, experts]: a view that follows the counts if the rows lie together, else a copy."""
    first = rows[0]
    if list(rows) == list(range(first, first + len(rows))):
        return counts[first : first + len(rows)]
    return counts[torch.tensor(list(rows), device=counts.device)]


class LoadWindow:
    """Choices of the last ``length`` steps, from cumulative counts that stay where they are.

    Copies of the counts are taken a few times in each window, not in every step: a window of 1,000 steps costs a copy every 32 steps
    and memory for 33 of them. Nothing here waits for the device.
    """

    def __init__(self, counts: torch.Tensor, rows: Sequence[int], length: int) -> None:
        """Counts int64 [layers, experts], of which ``rows`` are watched.

        Raises:
            ValueError: a length below one step.
        """
        if length < 1:
            raise ValueError(f"load window: the length must be one step or more, found {length}")
        self.length = length
        self.steps = 0  # steps seen
        self.every = -(-length // PARTS)  # steps between two copies
        self._keep = -(-length // self.every)  # copies that a full window spans
        self._counts, self._rows = counts, tuple(rows)
        self._ring = torch.zeros(self._keep + 1, len(self._rows), counts.shape[1], dtype=torch.int64, device=counts.device)
        self._ring[0].copy_(self._now())

    @property
    def covered(self) -> int:
        """Steps that ``sum`` covers: at least ``length`` once so many were seen, and less than 2 * ``every`` more."""
        return self.steps - self._oldest * self.every

    def push(self) -> None:
        """A step has been launched."""
        self.steps += 1
        if self.steps % self.every == 0:
            self._ring[(self.steps // self.every) % len(self._ring)].copy_(self._now())

    def sum(self) -> torch.Tensor:
        """[rows, experts] int64 choices of the window."""
        return self._now() - self._ring[self._oldest % len(self._ring)]

    @property
    def _oldest(self) -> int:
        return max(0, self.steps // self.every - self._keep)

    def _now(self) -> torch.Tensor:
        return rows_of(self._counts, self._rows)
