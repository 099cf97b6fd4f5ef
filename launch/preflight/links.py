"""Plain TCP connections between all pairs of hosts, tried before any collective: one that is refused is told by name."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch._C._distributed_c10d import PrefixStore

from ...parallel.interface import address_towards, interfaces, named_interface
from ...parallel.muster import Roll, first_of_each_host
from ...parallel.roll_call import Record, call_roll
from ...parallel.store import Rendezvous

_PINGS = 5
_SHOWN = 6  # links that an error names


@dataclass(frozen=True, kw_only=True)
class Link:
    """One host as another sees it."""

    source: int  # rank that connected, the first of its host
    target: int  # rank that it connected to, the first of its host
    address: str  # where
    interface: str  # that carries the address on the target's host
    rtt_us: float  # shortest round trip; 0 if there was none
    error: str  # why there is none, else empty


def own_address(meeting: Rendezvous, roll: Roll) -> tuple[str, str]:
    """(interface, address) on which this host's ranks will listen: GLOO_SOCKET_IFNAME's, else that towards the meeting.

    Raises:
        ValueError: GLOO_SOCKET_IFNAME names no interface of this host.
    """
    named = named_interface()
    if named is not None:
        return named
    address = address_towards(roll.meeting_host(meeting.host, meeting.port), meeting.port) or "127.0.0.1"
    return next((name for name, own in interfaces() if own == address), "?"), address


def probe_links(meeting: Rendezvous, prefix: str, roll: Roll, timeout_s: float) -> list[Link]:
    """Connect every host to every other -> all links, on all ranks. Collective.

    Raises:
        ValueError: hosts cannot reach one another; says which, at which address and interface, and why.
    """
    leaders = first_of_each_host(roll)
    store = PrefixStore(f"{prefix}/links", meeting.store)
    mine: Record = {}
    echo = None
    if meeting.rank in leaders:
        interface, address = own_address(meeting, roll)
        echo = _Echo(address)
        mine = {"interface": interface, "address": address, "port": echo.port}
    try:
        places = call_roll(PrefixStore("places", store), meeting.rank, meeting.world_size, mine, list, timeout_s)
        found: Record = {"links": []}
        if meeting.rank in leaders:
            found["links"] = [_try(meeting.rank, other, places[other], timeout_s) for other in leaders if other != meeting.rank]
        links = call_roll(
            PrefixStore("found", store), meeting.rank, meeting.world_size, found, lambda records: _judge(records, roll), 3 * timeout_s
        )
        return [Link(**link) for link in links]
    finally:
        if echo is not None:
            echo.close()


def _try(source: int, target: int, place: Record, timeout_s: float) -> dict[str, Any]:
    link = {"source": source, "target": target, "address": place["address"], "interface": place["interface"], "rtt_us": 0.0, "error": ""}
    wait = min(timeout_s, 5.0)
    try:
        with socket.create_connection((place["address"], place["port"]), timeout=wait) as sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            times = []
            for _ in range(_PINGS):
                begin = time.perf_counter()
                sock.sendall(b"!")
                if sock.recv(1) != b"!":
                    raise ConnectionResetError("something else answered")
                times.append(time.perf_counter() - begin)
            link["rtt_us"] = min(times) * 1e6
    except TimeoutError:
        link["error"] = f"no answer within {wait:g} s"
    except OSError as error:
        link["error"] = error.strerror or str(error)
    return link


def _judge(records: Sequence[Record], roll: Roll) -> list[dict[str, Any]]:
    links = [link for record in records for link in record["links"]]
    bad = [link for link in links if link["error"]]
    if bad:
        said = [
            f"{roll.hosts[link['source']]} cannot reach {roll.hosts[link['target']]} at {link['address']} "
            f"(interface {link['interface']}): {link['error']}"
            for link in bad[:_SHOWN]
        ]
        more = f"; and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
        raise ValueError(
            f"{'; '.join(said)}{more}. A firewall is in between, or the hosts do not share that network: name one that they share by "
            "GLOO_SOCKET_IFNAME (and NCCL_SOCKET_IFNAME)"
        )
    return links


class _Echo:
    """A listener that sends back what it gets, a byte at a time."""

    def __init__(self, address: str) -> None:
        self._server = socket.create_server((address, 0), backlog=512)
        self.port = int(self._server.getsockname()[1])
        threading.Thread(target=self._accept, name="rorqual-echo", daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        self._server.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    @staticmethod
    def _serve(connection: socket.socket) -> None:
        with connection:
            connection.settimeout(10.0)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            try:
                while data := connection.recv(1):
                    connection.sendall(data)
            except OSError:
                return
