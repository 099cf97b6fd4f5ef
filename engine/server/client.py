"""The HTTP process' end of the socket to rank 0."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from itertools import count
from typing import Any

import msgspec

from ... import __version__
from ..grammar.names import Namer
from ..serving import wire
from .errors import ApiError
from .mailbox import Mailbox
from .socket import Dealer

log = logging.getLogger("rorqual.server")


class EngineClient:
    """Submits requests to the engine and hands its news to their mailboxes. All of it runs on one event loop."""

    welcome: wire.Welcome | None  # what the engine is; None until it is ready
    snapshot: wire.Snapshot | None  # its latest counters
    ending: str | None  # why it takes no more requests; None while it does
    lost: str | None  # why it is gone; None while it is there

    def __init__(self, address: str, *, name: str = "http-0", on_lost: Callable[[str], None] | None = None) -> None:
        """``address`` is rank 0's (``ipc://...``), ``name`` this process' among its like; ``on_lost`` is called once."""
        self.welcome = None
        self.snapshot = None
        self.on_snapshot: Callable[[wire.Snapshot], None] | None = None  # gets every one
        self.ending = None
        self.lost = None
        self.heard = 0.0  # time.monotonic() of the last message
        self.name = name
        self._on_lost = on_lost
        self._ready = asyncio.Event()
        self._streams: dict[str, tuple[Mailbox, int, int]] = {}  # request id -> mailbox, prompt number, open completions
        self._leaving: dict[str, int] = {}  # aborted request id -> completions whose last news has not come
        self._replies: dict[str, asyncio.Future[wire.Reply]] = {}
        self._numbers = count()
        self._grammars = Namer()
        self._dealer = Dealer(address, name, self._take, self._engine_gone)

    # ---- life

    def start(self) -> None:
        """Connect and say hello. Call on the event loop."""
        self._dealer.open()
        self._dealer.send(wire.encode(wire.Hello(protocol=wire.PROTOCOL, version=__version__, name=self.name)))

    def say_alive(self) -> None:
        """Tell the engine that this event loop runs."""
        self._dealer.send(wire.encode(wire.Alive()))

    async def ready(self, timeout: float) -> wire.Welcome:
        """What the engine is, once it says so.

        Raises:
            TimeoutError: the engine was silent for ``timeout`` seconds.
            ConnectionError: the engine is gone, or of another version.
        """
        async with asyncio.timeout(timeout):
            await self._ready.wait()
        if self.welcome is None:
            raise ConnectionError(self.lost or "the engine is gone")
        return self.welcome

    def close(self) -> None:
        """Leave the engine; its answers are no longer read."""
        self._dealer.close()

    # ---- requests

    def check(self) -> wire.Welcome:
        """The engine's welcome.

        Raises:
            ApiError: 503, it does not take requests (now).
        """
        if self.lost is not None:
            raise ApiError(503, f"the engine is gone: {self.lost}")
        if self.ending is not None:
            raise ApiError(503, f"the server is ending: {self.ending}", retry_after_s=30)
        if self.welcome is None:
            raise ApiError(503, "the model is being loaded; try again when /health answers 200", code="loading", retry_after_s=10)
        return self.welcome

    @property
    def open(self) -> int:
        """Prompts that have not ended."""
        return len(self._streams)

    def submit(self, mailbox: Mailbox, prompt: int, message: wire.Submit) -> None:
        """Send a request; its news go to ``mailbox`` as those of prompt number ``prompt``.

        Raises:
            ApiError: 503 (not now), or 409 (the id is in use).
        """
        self.check()
        # news of one that was aborted may be under way: they must not reach another request under its id
        if message.request_id in self._streams or message.request_id in self._leaving:
            raise ApiError(409, f"request id {message.request_id!r} is in use; wait for its end or take another", param="request_id")
        if message.grammar is not None:
            text = message.grammar
            name = self._grammars.name(text, lambda name: self._send(wire.Grammar(name=name, text=text)))
            message = msgspec.structs.replace(message, grammar=name)
        self._send(message)
        self._streams[message.request_id] = (mailbox, prompt, mailbox.n)

    def abort(self, mailbox: Mailbox, request_ids: Iterable[str]) -> None:
        """End requests for which nobody looks into ``mailbox`` any more. Their late news are ignored.

        Ids whose news go elsewhere stay: one that was in use belongs to the request that had it first.
        """
        known = [name for name in request_ids if name in self._streams and self._streams[name][0] is mailbox]
        for name in known:
            self._leaving[name] = self._streams.pop(name)[2]
        if known and self.lost is None:
            # where the queue is full the engine is stuck; its watchdog ends it, and with it these requests
            self._dealer.send(wire.encode(wire.Abort(request_ids=known)))

    def ask_abort(self, request_ids: list[str], *, everything: bool = False) -> None:
        """End requests of this or any other HTTP process; who waits for them gets the last pieces."""
        self.check_alive()
        self._send(wire.Abort(request_ids=request_ids, everything=everything))

    def check_alive(self) -> None:
        """Raise ApiError 503 when there is no engine."""
        if self.lost is not None or self.welcome is None:
            self.check()

    async def control(self, name: str, timeout: float, **args: Any) -> dict[str, Any]:
        """Ask for something that is no completion (see ``wire.Control``).

        Raises:
            ApiError: 409 refused by the engine, 503 no engine, 504 no answer in ``timeout`` seconds.
        """
        self.check_alive()
        control_id = f"{self.name}-{next(self._numbers)}"
        future: asyncio.Future[wire.Reply] = asyncio.get_running_loop().create_future()
        self._replies[control_id] = future
        try:
            self._send(wire.Control(control_id=control_id, name=name, args=args))
            async with asyncio.timeout(timeout):
                reply = await future
        except TimeoutError:
            raise ApiError(504, f"the engine has not answered {name!r} within {timeout:g} s") from None
        finally:
            self._replies.pop(control_id, None)
        if not reply.ok:
            raise ApiError(409, reply.error or f"the engine refused {name!r}")
        return reply.body

    def _send(self, message: wire.Up) -> None:
        if not self._dealer.send(wire.encode(message)):
            raise ApiError(503, "the engine takes no messages: its queue is full", retry_after_s=5)

    # ---- news

    def _take(self, data: bytes) -> None:
        """One message of the engine."""
        self.heard = time.monotonic()
        message = wire.decode_down(data)
        if isinstance(message, wire.News):
            for piece in message.pieces:
                found = self._streams.get(piece.request_id)
                if found is None:
                    if piece.finish_reason is not None:
                        self._left(piece.request_id)
                    continue  # aborted
                mailbox, prompt, left = found
                if piece.finish_reason is not None:
                    if left == 1:
                        del self._streams[piece.request_id]
                    else:
                        self._streams[piece.request_id] = (mailbox, prompt, left - 1)
                mailbox.put(prompt, piece)
        elif isinstance(message, wire.Snapshot):
            self.snapshot = message
            if self.on_snapshot is not None:
                self.on_snapshot(message)
        elif isinstance(message, wire.Refused):
            found = self._streams.pop(message.request_id, None)
            self._leaving.pop(message.request_id, None)
            if found is not None:
                found[0].fail(ApiError(message.status, message.error, retry_after_s=message.retry_after_s))
        elif isinstance(message, wire.Reply):
            future = self._replies.get(message.control_id)
            if future is not None and not future.done():
                future.set_result(message)
        elif isinstance(message, wire.Welcome):
            self._meet(message)
        else:
            self._goodbye(message)

    def _left(self, request_id: str) -> None:
        """One completion of an aborted request has ended."""
        open = self._leaving.pop(request_id, 1) - 1
        if open > 0:
            self._leaving[request_id] = open

    def _meet(self, welcome: wire.Welcome) -> None:
        if welcome.protocol != wire.PROTOCOL or welcome.version != __version__:
            theirs, ours = f"{welcome.version} (protocol {welcome.protocol})", f"{__version__} (protocol {wire.PROTOCOL})"
            self.lose(f"the engine is rorqual {theirs}, this HTTP process {ours}; start both from one installation")
            return
        self.welcome = welcome
        self._ready.set()

    def _goodbye(self, message: wire.Goodbye) -> None:
        self.ending = self.ending or message.reason
        if message.phase == "end":
            self.lose(message.reason)

    def _engine_gone(self) -> None:
        self.lose("its process closed the connection")

    def lose(self, reason: str) -> None:
        """The engine is gone: all that wait are told. Nothing the second time."""
        if self.lost is not None:
            return
        self.lost = reason
        streams, self._streams = self._streams, {}
        self._leaving.clear()
        for mailbox, _, _ in streams.values():
            mailbox.fail(ApiError(503, f"the engine is gone: {reason}"))
        for future in self._replies.values():
            if not future.done():
                future.set_exception(ApiError(503, f"the engine is gone: {reason}"))
        self._ready.set()
        if self._on_lost is not None:
            self._on_lost(reason)
