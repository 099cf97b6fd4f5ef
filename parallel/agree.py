"""A user's error on one rank becomes the same error on all."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from .grid import Grid

T = TypeVar("T")


def together(grid: Grid, work: Callable[[], T]) -> T:
    """``work()`` on every rank, then one exchange: if any rank got a ValueError, all raise it.

    Collective over the world. ``work`` may be collective itself only if its ValueErrors are the same on all ranks.

    Raises:
        ValueError: of the lowest rank that has one; the text names that rank where this one had none.
    """
    if grid.world.size == 1:
        return work()
    error: ValueError | None = None
    result: list[T] = []
    try:
        result.append(work())
    except ValueError as caught:
        error = caught
    text = b"" if error is None else (str(error) or type(error).__name__).encode()
    sizes = grid.world.gather_ints([len(text)])[:, 0]
    if sizes.any():
        first = int((sizes > 0).argmax())
        said = grid.world.broadcast_bytes(text if grid.world.index == first else None, first).decode()
        if error is not None and str(error) == said:
            raise error
        raise ValueError(f"rank {first}: {said}")
    return result[0]
