"""Running copies or products beside other work: what attention asks of whoever owns the device's streams."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol


class Beside(Protocol):
    """Work that may overlap with what is launched after it. Forks do not nest; those between two joins run in order."""

    def fork(self) -> AbstractContextManager[None]:
        """What is launched inside comes after everything launched before, and may run beside what is launched later.

        Its operands stay alive until ``join``, and what it gives is let go of before the next fork.
        """

    def join(self) -> None:
        """What is launched from now on comes after the forked work, of which there is some."""


class InOrder:
    """One thing after the other."""

    def fork(self) -> AbstractContextManager[None]:
        """Nothing changes inside."""
        return nullcontext()

    def join(self) -> None:
        """Done already."""


IN_ORDER: Beside = InOrder()
