"""What a rank says of itself before a failed job ends: its batch, its step, its last collective, and where its main thread is."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from .progress import Progress, describe

#: frames of the main thread that are told, the innermost
_FRAMES = 12


def last_words(progress: Progress) -> str:
    """This rank, from any of its threads: one line, and the frames of the main thread."""
    record = progress.record()
    calls = ", ".join(f"{group} {count}" for group, count in sorted(record["calls"].items())) or "none"
    head = f"state: {describe(record)}; batch: {record['batch'] or 'none'}; collectives entered: {calls}"
    return f"{head}\n{_main_thread()}"


def _main_thread() -> str:
    main = threading.main_thread()
    frame = sys._current_frames().get(main.ident or 0)
    if frame is None:
        return "  main thread: gone"
    stack = traceback.extract_stack(frame)[-_FRAMES:]
    return "  main thread, innermost last:\n" + "\n".join(f"    {entry.filename}:{entry.lineno} in {entry.name}" for entry in stack)


def table(records: Mapping[int, Mapping[str, Any]], silence: Callable[[int], float]) -> str:
    """The last heartbeat of every other rank, a line each; ``silence``: seconds since it changed."""
    lines = ["last heartbeats of the other ranks:"]
    for rank, record in sorted(records.items()):
        lines.append(f"  rank {rank}: {silence(rank):.1f} s ago {describe(dict(record))}; batch: {record.get('batch') or 'none'}")
    return "\n".join(lines)
