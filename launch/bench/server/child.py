"""The server that is measured: real sockets, HTTP processes, loop, scheduler and detokeniser around a model of arithmetic.

``python -m rorqual.launch.bench.server.child '{"max_num_seqs": 64, ...}'`` prints a JSON line with its URL and the ids of its processes.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


def children(pid: int) -> list[int]:
    """Ids of the processes that ``pid`` has started (Linux)."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += [int(word) for word in (task / "children").read_text().split()]
    return found


def serve_costless(settings: dict[str, Any]) -> int:
    """Serve until a signal ends it; the exit code."""
    import socket

    from ....engine.server.config import ServerConfig
    from ....engine.serving.costless import CostlessEngine
    from ....engine.serving.serve import serve
    from ....engine.serving.settings import ServeSettings
    from ...serve import open_front

    workers = settings.pop("api_server_count")
    port = settings.pop("port")
    config = ServerConfig(port=port, api_server_count=workers, disable_access_log=True, max_concurrent_requests=1 << 16)
    with open_front(config) as (link, processes):
        engine = CostlessEngine(**settings)
        me = os.getpid()
        print(json.dumps({"host": socket.gethostname(), "engine": me, "http": children(me)}), flush=True)
        limits, care = ServeSettings(max_queued_requests=1 << 16), {"every_second": processes.look_after, "replace": processes.replace}
        code = serve(engine, link, limits, **care)  # type: ignore[arg-type]
        engine.close()
    return code


if __name__ == "__main__":
    sys.exit(serve_costless(json.loads(sys.argv[1])))
