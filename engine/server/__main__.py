"""``python -m rorqual.engine.server``: one HTTP process. Rank 0 starts it; see ``start`` for what it is told."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading

from .process import HttpProcess
from .start import decode_start

#: of the access log
QUIET_PATHS = frozenset(("/health", "/ping", "/metrics", "/dashboard.json"))


def main() -> int:
    """Serve until the engine ends; the exit code."""
    # Slurm and systemd signal every process of a job: rank 0 drains, and this one has to be there until it has
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    show_log()
    start = decode_start(sys.stdin.buffer.readline())
    listener = socket.socket(fileno=start.descriptor)
    try:
        process = HttpProcess(start.config, start.address, listener, name=start.name, counts_folder=start.counts_folder)
    except ValueError as error:
        print(f"rorqual: error ({start.name}): {error}", file=sys.stderr, flush=True)
        return 3
    threading.Thread(target=_watch_parent, args=(process,), name="parent", daemon=True).start()
    return process.run()


def show_log() -> None:
    """Log lines of this process to stderr, requests among them."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", datefmt="%H:%M:%S"))
    for name, level in (("rorqual", logging.INFO), ("uvicorn.error", logging.ERROR), ("uvicorn.access", logging.INFO)):
        logger = logging.getLogger(name)
        logger.addHandler(handler)
        logger.setLevel(level)
        logger.propagate = False
    logging.getLogger("uvicorn.access").addFilter(is_worth_a_line)


def is_worth_a_line(record: logging.LogRecord) -> bool:
    """False for probes and scrapes that went well: they come every few seconds."""
    arguments = record.args
    if not isinstance(arguments, tuple) or len(arguments) < 5:
        return True
    return not (arguments[4] == 200 and str(arguments[2]).split("?")[0] in QUIET_PATHS)


def _watch_parent(process: HttpProcess) -> None:
    """Rank 0 holds the other end of standard input: its end, however it comes, is ours."""
    while os.read(0, 4096):
        pass
    process.lose_engine("rank 0 has ended")


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads that tokenise something long must not hold the end up
