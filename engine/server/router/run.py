"""The router as a process."""

from __future__ import annotations

import logging
import signal
from contextlib import suppress

from ....parallel.ports import listen
from ..needs import need
from ..process import raise_file_limit
from .app import make_app
from .config import RouterConfig

log = logging.getLogger("rorqual.router")

_DRAIN_S = 25  # that open requests get after SIGTERM


def run(config: RouterConfig) -> int:
    """Route until SIGTERM or SIGINT; open requests get some time to end.

    Raises:
        ValueError: a package is missing, or the port is in use.
    """
    uvicorn = need("uvicorn")
    need("httptools")
    from ..protocol import guarded

    app = make_app(config)
    listener = listen(config.host, config.port, "rorqual router", backlog=2048)
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
