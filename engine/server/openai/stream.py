"""The stream of server-sent events that answers of all routes have in common."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from ...serving.wire import Piece
from ..sse import DONE, PATIENCE_S, PING
from .generation import Generation, events_of
from .prepare import dumps
from .usage import Usage


def prefix_of(head: dict[str, Any]) -> bytes:
    """The beginning of an event with the fields ``head``, up to the place of its one choice."""
    return b"data: " + dumps(head)[:-1] + b',"choices":[{"index":'


class Tail:
    """How events of a stream end: with the counts so far (``always``), with null where they come last (``listed``), or without."""

    def __init__(self, usage: Usage, *, listed: bool, always: bool) -> None:
        self._usage = usage if always else None
        self._fixed = b'}],"usage":null}\n\n' if listed else b"}]}\n\n"

    def now(self) -> bytes:
        """The end of an event that is written now."""
        return self._fixed if self._usage is None else b'}],"usage":' + dumps(self._usage.as_dict()) + b"}\n\n"


async def stream_events(
    generation: Generation, head: dict[str, Any], usage: Usage, writers: Sequence[Callable[[Piece], bytes]], *, include_usage: bool
) -> AsyncIterator[bytes]:
    """An event for each piece, by the writer of its completion; those that came together in one write.

    Raises:
        ApiError: a completion failed; what came before it has been given.
    """
    while not generation.taken:
        items = await generation.take(PATIENCE_S)
        made, error = events_of(items, writers)
        if made or not items:
            yield made or PING
        if error is not None:
            raise error
    if include_usage:
        yield b"data: " + dumps({**head, "choices": [], "usage": usage.as_dict()}) + b"\n\n" + DONE
    else:
        yield DONE
