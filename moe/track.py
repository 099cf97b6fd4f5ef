"""Where the exchange of experts runs, or the shared expert where no token travels: beside the computation, or in line with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

_T = TypeVar("_T")


class Track(Protocol):
    """A second queue of the device, where there is one; the queue that is current computes."""

    @property
    def beside(self) -> bool:
        """Whether work runs beside the computation now; otherwise calls change nothing."""

    def run(self, body: Callable[[], _T]) -> tuple[_T, Any]:
        """Launch ``body`` after everything that was launched so far, on either queue, and beside what is computed later.

        Returns what it gave, and its end for ``join``. What it reads must stay alive until that is joined.
        """

    def join(self, end: Any) -> None:
        """What is launched on the current queue from now on comes after ``end``."""


class InLine:
    """One queue."""

    beside = False

    def run(self, body: Callable[[], _T]) -> tuple[_T, Any]:
        """``body()``."""
        return body(), None

    def join(self, end: Any) -> None:
        """Done already."""


IN_LINE: Track = InLine()
