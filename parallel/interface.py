"""Which of its addresses a host is known by to the others, and the interface that carries it."""

from __future__ import annotations

import fcntl
import os
import socket
import struct

_SIOCGIFADDR = 0x8915


def interfaces() -> list[tuple[str, str]]:
    """(name, IPv4 address) of this host's interfaces, loopback last."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(sock.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # an interface without an address
                continue
            found.append((name, socket.inet_ntoa(answer[20:24])))
    return sorted(found, key=lambda entry: (is_loopback(entry[1]), entry[0]))


def address_towards(host: str, port: int) -> str | None:
    """The address this host sends from when it talks to ``host``; None if there is no way or no such name. Sends nothing."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as sock:
            sock.connect(address)
            return str(sock.getsockname()[0])
    except OSError:
        return None


def interface_towards(host: str, port: int) -> str | None:
    """Name of the interface that carries ``address_towards``; None where it is not one of this host's own.

    Node 0 talks to itself over loopback whatever address it names, so there the interface that has the address is taken.
    """
    address = address_towards(host, port)
    return next((name for name, own in interfaces() if own == address), None)


def is_loopback(address: str) -> bool:
    """Whether only this host itself is behind ``address``."""
    return address.startswith("127.") or address == "::1"


def address_elsewhere(host: str, port: int) -> str | None:
    """The address that ``host`` is here, if another host could reach it; None if it is loopback, or no such name."""
    try:
        address = str(socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0][4][0])
    except OSError:
        return None
    return None if is_loopback(address) else address


def host_label(host: str, port: int) -> str:
    """This host for messages: its name and, where the job's meeting is not on loopback, its address towards it."""
    address = address_towards(host, port)
    name = socket.gethostname()
    return name if address is None or is_loopback(address) else f"{name} ({address})"


def named_interface() -> tuple[str, str] | None:
    """(name, address) of the first interface of GLOO_SOCKET_IFNAME that has an address; None where it is not set.

    Raises:
        ValueError: it names none with an address.
    """
    given = os.environ.get("GLOO_SOCKET_IFNAME")
    if not given:
        return None
    known = dict(interfaces())
    name = next((name for name in given.split(",") if name in known), None)
    if name is None:
        raise ValueError(f"GLOO_SOCKET_IFNAME={given} names no interface with an address; this host has {', '.join(known)}")
    return name, known[name]


def choose_gloo_interface(host: str, port: int, *, single_host: bool) -> str | None:
    """Let gloo use the interface on which the ranks met, unless GLOO_SOCKET_IFNAME says others -> what that says then.

    Left alone gloo takes the address that the host's name resolves to, which on many machines is loopback (other hosts cannot
    reach it) or a network that others do not share. The ranks of one host use loopback, so that nothing listens beyond it.

    Raises:
        ValueError: GLOO_SOCKET_IFNAME names no interface of this host.
    """
    if named_interface() is not None:
        return os.environ["GLOO_SOCKET_IFNAME"]
    name = next((n for n, own in interfaces() if is_loopback(own)), None) if single_host else interface_towards(host, port)
    if name is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = name
    return name
