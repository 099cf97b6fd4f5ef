"""The HTTP processes that rank 0 talks to: their names, and how long each has been silent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ... import __version__
from .wire import PROTOCOL, Hello

#: most that one look adds to a silence: rank 0 may have been held up itself, and read nothing meanwhile
_LONGEST_LOOK_S = 2.0


@dataclass(frozen=True, kw_only=True)
class Keeper:
    """Who starts and ends HTTP processes, as the serving loop knows it."""

    every_second: Callable[[], None]  # called about so often; what it raises ends the engine
    replace: Callable[[str, str], None]  # gets the name of an HTTP process that is hung, and why it is thought so


def mismatch(hello: Hello) -> str | None:
    """Why an HTTP process cannot talk to this engine; None when it can."""
    if (hello.protocol, hello.version) == (PROTOCOL, __version__):
        return None
    found = f"protocol {hello.protocol} of version {hello.version}"
    return f"the engine speaks protocol {PROTOCOL} of version {__version__}, found {found}"


class Peers:
    """Those that have said something. One that is given up is never taken back: messages to it are lost."""

    def __init__(self, timeout: float) -> None:
        """``timeout``: seconds of silence after which a peer is overdue."""
        self._timeout = timeout
        self._names: dict[bytes, str] = {}
        self._silent: dict[bytes, float] = {}  # seconds since the last message, as far as rank 0 would have read one
        self.given_up: set[bytes] = set()  # nothing more is sent to them but a goodbye
        self._looked = 0.0  # time of the last look

    def __iter__(self) -> Iterator[bytes]:
        return iter(list(self._names))

    def heard(self, peer: bytes) -> bool:
        """A message of ``peer`` has come. False when it was given up before."""
        if peer in self.given_up:
            return False
        self._names.setdefault(peer, "")
        self._silent[peer] = 0.0
        return True

    def name(self, peer: bytes) -> str:
        """What it calls itself, "" when it has not said."""
        return self._names.get(peer, "")

    def before(self, peer: bytes, name: str) -> list[bytes]:
        """Those whose requests end when ``peer`` begins as ``name``: itself, and others of the name, which it replaces."""
        return [other for other, known in self._names.items() if other == peer or (name and known == name)]

    def meet(self, peer: bytes, name: str) -> None:
        """``peer`` says that it is called ``name``."""
        self._names[peer], self._silent[peer] = name, 0.0

    def overdue(self, now: float) -> list[bytes]:
        """Those that have been silent for too long. Call it about once a second."""
        passed, self._looked = min(now - self._looked, _LONGEST_LOOK_S), now
        for peer in self._silent:
            self._silent[peer] += passed
        return [peer for peer, seconds in self._silent.items() if seconds > self._timeout]

    def drop(self, peer: bytes, *, give_up: bool = False) -> None:
        """Forget a peer; with ``give_up`` it is not taken back when it says something later."""
        self._names.pop(peer, None)
        self._silent.pop(peer, None)
        if give_up:
            self.given_up.add(peer)
