"""The listening socket of a server: TCP or Unix, bound before any weight is read so that a port in use is told at once."""

from __future__ import annotations

import errno
import os
import socket
import stat
from ipaddress import ip_address

from ..engine.server.config import ServerConfig
from ..parallel.ports import listen


def open_listener(config: ServerConfig) -> tuple[socket.socket, str]:
    """(socket, its URL for people).

    Raises:
        ValueError: the port or the path is in use, or the address is not of this host.
    """
    if config.uds is not None:
        return _unix(config.uds), f"unix:{config.uds}"
    found = listen(config.host, config.port, "rorqual serve", backlog=2048)
    host, port = found.getsockname()[:2]
    scheme = "http" if config.ssl_certfile is None else "https"
    return found, f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def close_listener(listener: socket.socket, config: ServerConfig) -> None:
    """Close it, and remove the file of a Unix socket."""
    listener.close()
    if config.uds is not None:
        try:
            os.unlink(config.uds)
        except FileNotFoundError:
            pass


def is_open_to_others(config: ServerConfig) -> bool:
    """True when other machines can reach the address."""
    if config.uds is not None:
        return False
    try:
        return not ip_address(config.host).is_loopback
    except ValueError:
        return config.host != "localhost"


def _unix(path: str) -> socket.socket:
    """A listening Unix socket that only this user can open; a stale file of an earlier one gives way."""
    found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_stale(path)
        old = os.umask(0o177)
        try:
            found.bind(path)
        finally:
            os.umask(old)
        found.listen(2048)
    except OSError as error:
        found.close()
        raise ValueError(f"--uds {path} cannot be bound: {error.strerror or error}") from None
    except ValueError:
        found.close()
        raise
    found.set_inheritable(True)
    return found


def _remove_stale(path: str) -> None:
    """Remove the file of a socket on which nobody listens.

    Raises:
        ValueError: the file is something else, or somebody listens.
    """
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ValueError(f"--uds {path} exists and is no socket; name another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        code = probe.connect_ex(path)
    if code != errno.ECONNREFUSED:
        raise ValueError(f"--uds {path} is in use by another server; name another path, or end that server")
    os.unlink(path)
