"""One HTTP request in the engine: its prompts are submitted, their news come to one mailbox, all end together."""

from __future__ import annotations

import asyncio
import sys
import time
from array import array
from collections.abc import Callable, Sequence
from typing import Any

from ...serving.wire import Piece, Submit
from ..errors import ApiError
from ..mailbox import Mailbox
from ..state import ServerState


def mixed_prompts() -> ApiError:
    """What is told for a list of prompts that is none."""
    return ApiError(400, "prompt mixes token ids and other things; give text, a list of texts, or lists of ids", param="prompt")


def check_ids(ids: Sequence[int], vocab_size: int) -> None:
    """Refuse a prompt of token ids that cannot be one.

    Raises:
        ApiError: 400, none, or an id that the model does not have.
    """
    if not ids:
        raise ApiError(400, "the prompt is empty; give at least one token", param="prompt")
    try:
        low, high = min(ids), max(ids)
    except TypeError:  # of a prompt that begins with an id
        raise mixed_prompts() from None
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        raise ApiError(400, f"the prompt has the token id {wrong}; the vocabulary has ids 0 to {vocab_size - 1}", param="prompt")


def pack_ids(ids: Sequence[int], vocab_size: int) -> bytes:
    """Token ids as the wire carries them. ApiError as ``check_ids`` says: a tokenizer may know more tokens than the model."""
    check_ids(ids, vocab_size)
    packed = array("i", ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


class Generation:
    """The prompts of one HTTP request. ``with`` aborts what has not ended when the block is left."""

    def __init__(self, state: ServerState, name: str, submits: Sequence[Submit], n: int) -> None:
        """``name`` is the public id; ``submits`` one for each prompt, of ``n`` completions."""
        self.state, self.name = state, name
        self.created = int(time.time())
        self.mailbox = Mailbox(len(submits), n)
        self._submits = submits
        timeout = state.config.request_timeout
        self._deadline = None if timeout is None else time.monotonic() + timeout

    def __enter__(self) -> Generation:
        self.state.enter()
        try:
            for prompt, submit in enumerate(self._submits):
                self.state.client.submit(self.mailbox, prompt, submit)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Abort what is open."""
        self.state.leave()
        self.state.client.abort(self.mailbox, (s.request_id for s in self._submits))

    @property
    def taken(self) -> bool:
        """True when every completion has ended and ``take`` has given all of it."""
        return self.mailbox.open <= 0 and not self.mailbox.full

    async def take(self, timeout: float | None = None) -> list[tuple[int, Piece]]:
        """News: (place of the completion, piece); [] after ``timeout`` seconds without any.

        Raises:
            ApiError: the engine refused the request or is gone, the client has left, or the time is up.
        """
        if self._deadline is not None:
            left = self._deadline - time.monotonic()
            if left <= 0:
                raise ApiError(504, f"the request took longer than {self.state.config.request_timeout:g} s (--request-timeout)")
            timeout = left if timeout is None else min(timeout, left)
        return await self.mailbox.take(timeout)

    def gone(self, *_: Any) -> None:
        """The client has left."""
        self.state.disconnects += 1
        self.mailbox.fail(ApiError(499, "the client closed the connection"))


def failure(piece: Piece) -> ApiError | None:
    """The error that a last piece tells; None for a completion that ended well or was aborted on demand."""
    if piece.finish_reason == "error":
        return ApiError(500, piece.error or "the engine failed")
    if piece.finish_reason == "abort" and piece.error:
        return ApiError(503, piece.error)
    return None


def check(piece: Piece) -> None:
    """Raise the ``failure`` that a piece tells."""
    error = failure(piece)
    if error is not None:
        raise error


def events_of(items: Sequence[tuple[int, Piece]], writers: Sequence[Callable[[Piece], bytes]]) -> tuple[bytes, ApiError | None]:
    """The events of pieces that came together, by the writer of each completion; those before an error, and the error."""
    made: list[bytes] = []
    try:
        for place, piece in items:
            made.append(writers[place](piece))
    except ApiError as error:
        return b"".join(made), error
    return b"".join(made), None


class Watch:
    """Tells a generation when its client leaves. ``async with`` it, after the body was read."""

    def __init__(self, receive: Any, generation: Generation) -> None:
        self._receive, self._generation = receive, generation
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> None:
        self._task = asyncio.create_task(self._watch())

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._generation.gone()
