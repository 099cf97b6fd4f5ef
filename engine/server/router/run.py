"""The router as a process."""

from __future__ import annotations

import logging
import signal
import socket
from contextlib import suppress

from ..needs import need
from ..process import raise_file_limit
from .app import make_app
from .config import RouterConfig

log = logging.getLogger("rorqual.router")

_DRAIN_S = 25  # that open requests get after SIGTERM


def listen(host: str, port: int) -> socket.socket:
    """A listening socket.

    Raises:
        ValueError: the address is none of this machine, or the port is in use.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ValueError(f"--host {host}: {error}") from None
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise ValueError(f"cannot listen on {host}:{port}: {error.strerror}; choose another --port") from None
    return listener


def run(config: RouterConfig) -> int:
    """Route until SIGTERM or SIGINT; open requests get some time to end.

    Raises:
        ValueError: a package is missing, or the port is in use.
    """
    uvicorn = need("uvicorn")
    need("httptools")
    from ..protocol import guarded

    app = make_app(config)
    listener = listen(config.host, config.port)
    raise_file_limit()
    host, port = listener.getsockname()[:2]
    log.info("routing to %d servers by %s", len(config.urls), config.dp_routing)
    print(f"listening at http://{f'[{host}]' if ':' in host else host}:{port}", flush=True)
    settings = uvicorn.Config(
        app, http=guarded(config.header_timeout), ws="none", lifespan="on", log_config=None, access_log=not config.disable_access_log,
        server_header=False, proxy_headers=False, backlog=2048, timeout_keep_alive=30, timeout_graceful_shutdown=_DRAIN_S,
    )  # fmt: skip
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)  # uvicorn raises what it has caught once more when it has ended
    with listener, suppress(KeyboardInterrupt):
        uvicorn.Server(settings).run(sockets=[listener])
    signal.signal(signal.SIGTERM, before)
    return 0
