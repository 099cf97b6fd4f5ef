"""Rank 0's end of the socket that HTTP processes connect to."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

from .wire import Down, Up, decode_up, encode

#: messages that may wait for one peer. A process that runs takes them in a thread of its own, however busy it is; one that does not
#: gets a message a step, and these are a minute of short steps
MOST_WAITING = 4096
_LINGER_MS = 3000  # how long the last messages may take to leave


#: why a message was not sent
GONE = "has closed its connection"
FULL = f"does not read: {MOST_WAITING} messages wait for it"


class Link:
    """A ROUTER socket in a private folder of this machine. Not thread safe.

    Messages to a peer wait in memory until it reads them, at most ``MOST_WAITING``.
    """

    def __init__(self, folder: str | None = None) -> None:
        """Bind in ``folder``, which is then the caller's to remove; by default in a new one that only this user can enter.

        Raises:
            ValueError: pyzmq is missing, or the folder's name is too long for a socket.
        """
        try:
            import zmq
        except ImportError:
            raise ValueError("serving needs pyzmq; install it with: pip install 'rorqual[serve]'") from None
        self._zmq = zmq
        self._own = tempfile.mkdtemp(prefix="rorqual-") if folder is None else None
        path = os.path.join(folder or str(self._own), "engine.sock")
        if len(path.encode()) > zmq.IPC_PATH_MAX_LEN:
            raise ValueError(f"{path} is too long for a socket (at most {zmq.IPC_PATH_MAX_LEN} bytes); set TMPDIR to a shorter folder")
        #: what peers connect to
        self.address = f"ipc://{path}"
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a peer that is gone is told, not ignored
        self._socket.setsockopt(zmq.SNDHWM, MOST_WAITING)
        self._socket.setsockopt(zmq.LINGER, _LINGER_MS)
        self._socket.bind(self.address)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._wakers: set[int] = set()

    def wake_by(self, descriptor: int) -> None:
        """``wait`` also returns when ``descriptor`` can be read."""
        self._poller.register(descriptor, self._zmq.POLLIN)
        self._wakers.add(descriptor)

    def forget_waker(self, descriptor: int) -> None:
        """Undo ``wake_by``."""
        self._poller.unregister(descriptor)
        self._wakers.discard(descriptor)

    def wait(self, seconds: float) -> None:
        """Sleep until there is a message, at most ``seconds``."""
        self._poller.poll(max(0, int(seconds * 1000)))

    def receive(self, seconds: float) -> Iterator[tuple[bytes, Up | ValueError]]:
        """(peer, message) of those that are there; a ValueError instead of a message that is none. Stops after ``seconds``."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                frames = self._socket.recv_multipart(self._zmq.NOBLOCK)
            except self._zmq.Again:
                return
            yield frames[0], _decoded(frames)

    def send(self, peer: bytes, message: Down) -> str | None:
        """Send without waiting. None, or why it was not sent: ``GONE`` or ``FULL``."""
        try:
            self._socket.send_multipart((peer, encode(message)), self._zmq.NOBLOCK)
        except self._zmq.ZMQError as error:
            if error.errno == self._zmq.EHOSTUNREACH:
                return GONE
            if error.errno == self._zmq.EAGAIN:
                return FULL
            raise
        return None

    def close(self) -> None:
        """Give the last messages a moment to leave, then close. A second call does nothing."""
        if not self._socket.closed:
            self._socket.close()
            self._context.term()
        if self._own is not None:
            shutil.rmtree(self._own, ignore_errors=True)

    def __enter__(self) -> Link:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def _decoded(frames: Sequence[bytes]) -> Up | ValueError:
    if len(frames) != 2:
        return ValueError(f"a message has one frame, found {len(frames) - 1}")
    try:
        return decode_up(frames[1])
    except ValueError as error:
        return error
