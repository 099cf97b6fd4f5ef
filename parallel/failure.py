"""Errors of collectives, and the sentence that says which ranks were missing."""

from __future__ import annotations

import re
from collections.abc import Sequence

from .progress import Progress


class CollectiveError(RuntimeError):
    """A collective failed or passed its deadline. ``missing`` maps the ranks that did not come to what they did last."""

    def __init__(self, message: str, *, op: str, group: str, rank: int, step: int, deadline_s: float, missing: dict[int, str]) -> None:
        super().__init__(message)
        self.op = op
        self.group = group
        self.rank = rank
        self.step = step
        self.deadline_s = deadline_s
        self.missing = missing


def _cause(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    text = re.sub(r"^\[\S+:\d+\] ", "", lines[0]) if lines else type(error).__name__  # without torch's source line
    return text.split(". This is typically")[0][:300]


def collective_error(
    error: BaseException | str, *, op: str, group: str, ranks: Sequence[int], peers: Sequence[int], deadline_s: float, progress: Progress
) -> CollectiveError:
    """The error to raise instead of ``error``, which ended ``op`` between this rank and ``peers`` of ``group``.

    With a watchdog, the peers' records say who is behind; that may take a few seconds, in which a first error of
    another rank may end this process. Without one, the peers are only listed.
    """
    waited = progress.waiting_s()
    cause = error if isinstance(error, str) else _cause(error)
    others = [rank for rank in peers if rank != progress.rank]
    lost = any(word in cause for word in ("closed", "reset", "roken pipe", "refused"))
    missing: dict[int, str] = {}
    if progress.find_missing is not None and (lost or "imed out" in cause or "deadline" in cause):
        missing = progress.find_missing(group, others, waited, lost)
    if missing:
        who = "missing " + "; ".join(f"rank {rank} ({what})" for rank, what in sorted(missing.items()))
    else:
        who = "no rank of the group is known to be missing"
    head = f"rank {progress.rank}: {op} in group {group} (ranks {list(ranks)}, call {progress.calls.get(group, 0)}, step {progress.step})"
    message = f"{head} failed after {waited:.1f} s (deadline {deadline_s:g} s): {who}. Cause: {cause}"
    return CollectiveError(message, op=op, group=group, rank=progress.rank, step=progress.step, deadline_s=deadline_s, missing=missing)
