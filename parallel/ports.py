"""Listening sockets that are ours from the first moment, and who holds a port that is not free."""

from __future__ import annotations

import errno
import os
import socket
from contextlib import suppress
from pathlib import Path

from .interface import interfaces

_LISTEN = "0A"  # state of a socket in /proc/net/tcp


def listen(host: str, port: int, what: str, *, backlog: int = 1024) -> socket.socket:
    """A listening TCP socket on ``host:port``; port 0 takes a free one. It may be inherited by other processes.

    Raises:
        ValueError: the address is not of this host, or the port is taken (by whom) or not allowed.
    """
    family, address = _resolve(host, port, what)
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(address)
        sock.listen(backlog)
    except OSError as error:
        sock.close()
        raise ValueError(f"{what} cannot listen on {host}:{port}: {_reason(error, port)}") from None
    sock.set_inheritable(True)
    return sock


def _resolve(host: str, port: int, what: str) -> tuple[int, tuple[object, ...]]:
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError, OverflowError) as error:
        raise ValueError(
            f"{what} cannot listen on {host}:{port}: {host!r} is no address and no name that this host knows ({error})"
        ) from None
    found.sort(key=lambda entry: entry[0] != socket.AF_INET)
    return found[0][0], found[0][4]


def _reason(error: OSError, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        holder = port_holder(port)
        return f"the port is in use{f' by {holder}' if holder else ''}; choose another, or end that process"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"this host has no such address; it has {', '.join(f'{own} ({name})' for name, own in interfaces()) or 'none'}"
    if error.errno == errno.EACCES:
        return f"{error.strerror}; ports below 1024 need privileges, choose another"
    return error.strerror or str(error)


def port_holder(port: int) -> str | None:
    """The process that listens on TCP ``port`` of this host, as "process 123 (its command)"; None if it cannot be seen."""
    inodes = _listening(port)
    if not inodes:
        return None
    for folder in Path("/proc").glob("[0-9]*"):
        if any(f"socket:[{inode}]" in _links(folder / "fd") for inode in inodes):
            return f"process {folder.name} ({_command(folder)})"
    return "a process of another user"


def _links(folder: Path) -> set[str]:
    """What the open files of a process are; empty if it has ended, or belongs to another user."""
    found = set()
    with suppress(OSError):
        for entry in folder.iterdir():
            with suppress(OSError):  # closed meanwhile
                found.add(os.readlink(entry))
    return found


def _listening(port: int) -> set[str]:
    """Inodes of the sockets that listen on ``port``."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            rows = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for fields in map(str.split, rows):
            if fields[3] == _LISTEN and int(fields[1].rsplit(":", 1)[1], 16) == port:
                inodes.add(fields[9])
    return inodes


def _command(folder: Path) -> str:
    try:
        words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return "ended meanwhile"
    secret = next((place for place, word in enumerate(words) if word.startswith("--api-k")), None)  # argparse takes shorter spellings
    if secret is not None:  # this text goes into logs
        words[secret:] = ["--api-key", "..."]
    text = " ".join(words).strip()
    return text if len(text) <= 120 else f"{text[:117]}..."
