"""Where the news of one HTTP request are put until its handler takes them."""

from __future__ import annotations

import asyncio
from collections import deque

from ..serving.wire import Piece
from .errors import ApiError


class Mailbox:
    """Pieces of the completions of one HTTP request, in the order in which they came.

    A request may have several prompts; completion ``index`` of prompt ``p`` has the place ``p * n + index``. Filled by the
    client's reader and emptied by one task, both on the same event loop.
    """

    __slots__ = ("_error", "_items", "_waiter", "n", "open")

    def __init__(self, prompts: int, n: int) -> None:
        self.n = n
        self.open = prompts * n  # completions that have not ended
        self._items: deque[tuple[int, Piece]] = deque()
        self._error: ApiError | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def full(self) -> bool:
        """True while there is something to take."""
        return bool(self._items)

    def put(self, prompt: int, piece: Piece) -> None:
        """News of a completion of prompt number ``prompt``."""
        if piece.finish_reason is not None:
            self.open -= 1
        self._items.append((prompt * self.n + piece.index, piece))
        self._wake()

    def fail(self, error: ApiError) -> None:
        """Nothing more will come; what is here is taken first. The first error counts."""
        if self._error is None:
            self._error = error
        self._wake()

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def take(self, timeout: float | None = None) -> list[tuple[int, Piece]]:
        """All that is here, at least one item; [] after ``timeout`` seconds without any.

        Raises:
            ApiError: what ``fail`` said.
        """
        if not self._items and self._error is None:
            await self._wait(timeout)
        if self._items:
            found = list(self._items)
            self._items.clear()
            return found
        if self._error is not None:
            raise self._error
        return []

    async def _wait(self, timeout: float | None) -> None:
        loop = asyncio.get_running_loop()
        waiter = self._waiter = loop.create_future()
        timer = None if timeout is None else loop.call_later(timeout, self._wake)
        try:
            await waiter
        finally:
            self._waiter = None
            if timer is not None:
                timer.cancel()
