"""A raw client of an engine's socket, as an HTTP process is one, without HTTP."""

from __future__ import annotations

import itertools
import os
import time
from array import array
from typing import Any

import msgspec
import zmq

import rorqual
from rorqual.engine.serving.wire import (
    ALIVE_EVERY_S,
    PROTOCOL,
    Abort,
    Alive,
    Control,
    Down,
    Goodbye,
    Hello,
    News,
    Piece,
    Refused,
    Reply,
    Snapshot,
    Submit,
    Up,
    Welcome,
    decode_down,
    encode,
)


class Completion(msgspec.Struct):
    """What came of one completion."""

    token_ids: list[int] = []
    text: str = ""
    logprobs: list[Any] = []
    prompt_logprobs: Any = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    cached_tokens: int = 0
    dp_rank: int | None = None
    pieces: int = 0
    first_at: float = 0.0  # monotonic seconds of the first piece

    def add(self, piece: Piece) -> None:
        assert self.finish_reason is None, "a piece after the last one"
        if self.pieces == 0:
            self.dp_rank, self.prompt_logprobs, self.first_at = piece.dp_rank, piece.prompt_logprobs, time.monotonic()
        self.pieces += 1
        self.token_ids = self.token_ids + piece.token_ids
        self.text += piece.text
        self.logprobs = self.logprobs + (piece.logprobs or [])
        self.finish_reason, self.stop_reason, self.error = piece.finish_reason, piece.stop_reason, piece.error
        self.cached_tokens = piece.cached_tokens


class RawClient:
    """Sends and keeps what comes back. Every wait has a deadline."""

    def __init__(self, address: str, *, timeout: float = 90.0, hello: bool = True, name: str = "") -> None:
        self.timeout = timeout
        self.welcome: Welcome | None = None
        self.done: dict[tuple[str, int], Completion] = {}
        self.open: dict[tuple[str, int], Completion] = {}
        self.refused: dict[str, Refused] = {}
        self.replies: dict[str, Reply] = {}
        self.snapshots: list[Snapshot] = []
        self.goodbyes: list[Goodbye] = []
        self.beats, self._next_beat = hello, 0.0  # whether it gives signs of life
        self._names, self._mark = itertools.count(), os.urandom(6).hex()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 500)
        self._socket.connect(address)
        if hello:
            self.say_hello(name=name)
            self.until(lambda: self.welcome is not None, "Welcome")

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def close(self) -> None:
        if not self._socket.closed:
            self._socket.close()
            self._context.term()

    # ---- out

    def send(self, message: Up) -> None:
        self._socket.send(encode(message))

    def say_hello(self, protocol: int = PROTOCOL, name: str = "") -> None:
        self.send(Hello(protocol=protocol, version=rorqual.__version__, name=name))

    def send_bytes(self, data: bytes) -> None:
        self._socket.send(data)

    def submit(self, ids: list[int], *, request_id: str | None = None, priority: int = 0, dp_rank: int | None = None, **params: Any) -> str:
        name = request_id or self.new_name()
        for index in range(params.get("n", 1)):
            self.open.setdefault((name, index), Completion())
        self.submit_raw(ids, params, name=name, priority=priority, dp_rank=dp_rank)
        return name

    def new_name(self) -> str:
        return f"r{next(self._names)}-{self._mark}"

    def submit_raw(self, ids: list[int], params: dict[str, Any], *, name: str | None = None, **more: Any) -> str:
        """As ``submit``, without expecting anything to come of it."""
        name = name or self.new_name()
        self.send(Submit(request_id=name, prompt=array("i", ids).tobytes(), params=params, at=time.time(), **more))
        return name

    def abort(self, *names: str, everything: bool = False) -> None:
        self.send(Abort(request_ids=list(names), everything=everything))

    def control(self, name: str, **args: Any) -> Reply:
        control_id = f"c{next(self._names)}"
        self.send(Control(control_id=control_id, name=name, args=args))
        self.until(lambda: control_id in self.replies, f"the reply to {name}")
        return self.replies.pop(control_id)

    # ---- in

    def poll(self, seconds: float) -> bool:
        """Take one message, if one comes within ``seconds``. Signs of life go out by the way."""
        if self.beats and time.monotonic() > self._next_beat:
            self._next_beat = time.monotonic() + ALIVE_EVERY_S
            self.send(Alive())
        if not self._socket.poll(max(0, int(seconds * 1000))):
            return False
        self._take(decode_down(self._socket.recv()))
        return True

    def until(self, true: Any, what: str, timeout: float | None = None, ended: bool = False) -> None:
        end = time.monotonic() + (timeout or self.timeout)
        while not true():
            over = [g.reason for g in self.goodbyes if g.phase == "end"]
            assert ended or not over, f"the engine ended ({over[0]}) before {what}"
            left = end - time.monotonic()
            assert left > 0, f"no {what} within {timeout or self.timeout:g} s"
            self.poll(min(left, 0.2))

    def finish(self, *names: str) -> None:
        """Wait until these requests, or all, have ended."""
        self.until(lambda: not [k for k in self.open if not names or k[0] in names], f"end of {names or 'all requests'}")

    def complete(self, ids: list[int], **params: Any) -> Completion:
        """One request with one completion, to its end."""
        name = self.submit(ids, **params)
        self.finish(name)
        assert name not in self.refused, self.refused[name]
        return self.done[name, 0]

    def _take(self, message: Down) -> None:
        if isinstance(message, News):
            for piece in message.pieces:
                key = (piece.request_id, piece.index)
                self.open[key].add(piece)
                if piece.finish_reason is not None:
                    self.done[key] = self.open.pop(key)
        elif isinstance(message, Refused):
            self.refused[message.request_id] = message
            for key in [k for k in self.open if k[0] == message.request_id]:
                del self.open[key]
        elif isinstance(message, Reply):
            self.replies[message.control_id] = message
        elif isinstance(message, Welcome):
            self.welcome = message
        elif isinstance(message, Snapshot):
            self.snapshots = [*self.snapshots[-9:], message]
        else:
            self.goodbyes.append(message)
