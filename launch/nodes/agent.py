"""torchrun in this process: it starts the ranks of this node and watches them; signals go to all of them.

torchrun's own handling ends the ranks 30 seconds after a signal and then fails; a server has to finish its requests first and
leave with 0. So signals are passed on here, as often as they come, and torchrun sees only how the ranks end.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from .settings import NodeSettings

log = logging.getLogger("rorqual")
_PASSED = (signal.SIGTERM, signal.SIGINT)
_KILL_AT = 3  # this many signals end the ranks for good


def run_agent(nodes: NodeSettings, nproc: int, port: int, words: Sequence[str]) -> int:
    """Run ``python -m rorqual.launch WORDS`` in ``nproc`` rank processes; returns when they have ended: the exit code.

    0 when all ranks of this node left well, else the first failed rank's code (128 + signal for one that a signal ended).
    """
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    torchrun: Any = run  # it has no types
    host, _ = nodes.endpoint
    arguments = [
        f"--nnodes={nodes.nnodes}", f"--node-rank={nodes.node_rank}", f"--nproc-per-node={nproc}", f"--master-addr={host}",
        f"--master-port={port}", "--rdzv-backend=static", "--signals-to-handle=SIGHUP", "-m", "rorqual.launch",
    ]  # fmt: skip
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun would set it, with a warning of several lines
    os.environ["RORQUAL_AGENT"] = str(os.getpid())
    for name in _PASSED:
        signal.signal(name, _Relay())
    try:
        parsed = torchrun.parse_args(arguments)
        parsed.training_script_args = list(words)  # not through its parser, which would take flags of ours for its own
        torchrun.run(parsed)
        return 0
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        ended = f"by signal {-failure.exitcode}" if failure.exitcode < 0 else f"with code {failure.exitcode}"
        print(f"rorqual: rank {rank} ended {ended}, and with it the job; its messages are above", file=sys.stderr, flush=True)
        return 128 - failure.exitcode if failure.exitcode < 0 else failure.exitcode


class _Relay:
    """Signal handler: the signal goes to every process that this one started."""

    counts: dict[int, int] = {}  # of all signals together: SIGTERM then SIGINT are two

    def __call__(self, number: int, frame: FrameType | None) -> None:
        count = self.counts[0] = self.counts.get(0, 0) + 1
        for child in children():
            try:
                os.kill(child, signal.SIGKILL if count >= _KILL_AT else number)
            except ProcessLookupError:
                continue


def children() -> list[int]:
    """Process ids of this process' children."""
    found: list[int] = []
    for tasks in Path("/proc/self/task").glob("*/children"):
        try:
            found += map(int, tasks.read_text().split())
        except OSError:  # the thread ended meanwhile
            continue
    return found
