"""A ZeroMQ DEALER on an asyncio event loop, without the cost of a future for every message."""

from __future__ import annotations

import asyncio
import os
import struct
from collections.abc import Callable
from typing import Any

from .needs import need

#: messages that wait for an engine that does not read; beyond it ``send`` says False
_SEND_QUEUE = 20_000
#: messages read before other tasks get their turn
_BURST = 200


class Dealer:
    """Calls ``on_message(data)`` for every message and ``on_gone()`` when the peer closes the connection."""

    def __init__(self, address: str, name: str, on_message: Callable[[bytes], None], on_gone: Callable[[], None]) -> None:
        """``address`` as ``ipc:///path``; ``name`` begins the socket's identity, which is unique."""
        self.address = address
        self._identity = f"{name}.{os.getpid()}.{os.urandom(4).hex()}".encode()
        self._on_message, self._on_gone = on_message, on_gone
        self._context: Any = None
        self._socket: Any = None
        self._monitor: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def open(self) -> None:
        """Connect; the peer need not be there yet. Call on the event loop that shall call back."""
        zmq = need("zmq")
        self._zmq = zmq
        self._loop = asyncio.get_running_loop()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, self._identity)
        self._socket.setsockopt(zmq.SNDHWM, _SEND_QUEUE)
        self._socket.setsockopt(zmq.RCVHWM, 0)  # news that were dropped would leave a request open for ever
        self._socket.setsockopt(zmq.LINGER, 0)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._socket.connect(self.address)
        self._loop.add_reader(self._socket.getsockopt(zmq.FD), self._read)
        self._loop.add_reader(self._monitor.getsockopt(zmq.FD), self._watch)
        # a socket signals what comes after it was found empty
        self._loop.call_soon(self._read)
        self._loop.call_soon(self._watch)

    def send(self, data: bytes) -> bool:
        """Queue a message; False when the queue is full or the socket closed."""
        if self._socket is None:
            return False
        try:
            self._socket.send(data, self._zmq.NOBLOCK, copy=True)
        except self._zmq.Again:
            return False
        self._later()  # sending may swallow the edge that says there is something to read
        return True

    def _later(self) -> None:
        assert self._loop is not None
        self._loop.call_soon(self._read)

    def _read(self) -> None:
        """Take what is there. The file descriptor signals edges, so all of it must be read, now or in a moment."""
        more = True  # also when a message raises: the others must not wait for an edge that does not come
        try:
            more = self._burst()
        finally:
            if more:
                self._later()

    def _burst(self) -> bool:
        """Take some messages; False when there are no more."""
        zmq = self._zmq
        for _ in range(_BURST):
            if self._socket is None:
                return False
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return False
            self._on_message(data)
        return True

    def _watch(self) -> None:
        """Events of the connection: only its loss is asked for."""
        zmq = self._zmq
        while self._monitor is not None:
            try:
                frames = self._monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            event, _ = struct.unpack("=hi", frames[0])
            if event == zmq.EVENT_DISCONNECTED:
                try:
                    while self._burst():  # all that it said before
                        pass
                finally:
                    self._on_gone()

    def close(self) -> None:
        """Close the socket. Nothing the second time."""
        if self._socket is None:
            return
        assert self._loop is not None
        socket, monitor, self._socket, self._monitor = self._socket, self._monitor, None, None
        for each in (socket, monitor):
            self._loop.remove_reader(each.getsockopt(self._zmq.FD))
        socket.disable_monitor()
        monitor.close(linger=0)
        socket.close(linger=0)
        self._context.term()
