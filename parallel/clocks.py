"""How far the clocks of hosts are apart, by questions and answers through the job's store."""

from __future__ import annotations

import time
from collections.abc import Sequence

from torch._C._distributed_c10d import Store

from .roll_call import AbsentError, come

_ROUNDS = 4  # the shortest round trip counts; the first one waits for its turn and does not


def serve_clock(store: Store, askers: Sequence[int], timeout_s: float) -> dict[int, tuple[float, float]]:
    """Rank 0: answer the ``askers`` one after the other -> how far each one's clock is ahead of ours, and how sure that is, in seconds.

    Raises:
        AbsentError: one does not ask, or tell, within ``timeout_s``.
    """
    found = {}
    for asker in askers:
        for turn in range(_ROUNDS):
            _need(store, f"ask/{asker}/{turn}", asker, timeout_s)
            store.set(f"answer/{asker}/{turn}", repr(time.time()))
        _need(store, f"offset/{asker}", asker, timeout_s)
        ahead, sure = store.get(f"offset/{asker}").decode().split()
        found[asker] = (float(ahead), float(sure))
    return found


def ask_clock(store: Store, asker: int, timeout_s: float) -> None:
    """The other side of ``serve_clock``: measure, and tell rank 0.

    Raises:
        AbsentError: rank 0 does not answer within ``timeout_s``.
    """
    best = (float("inf"), 0.0)
    for turn in range(_ROUNDS):
        before, began = time.time(), time.monotonic()
        store.set(f"ask/{asker}/{turn}", "1")
        _need(store, f"answer/{asker}/{turn}", 0, timeout_s)
        answer = float(store.get(f"answer/{asker}/{turn}").decode())
        took = time.monotonic() - began
        if turn > 0:
            best = min(best, (took, before + took / 2 - answer))
    took, ahead = best
    store.set(f"offset/{asker}", f"{ahead!r} {took / 2!r}")


def _need(store: Store, key: str, rank: int, timeout_s: float) -> None:
    """Wait for what ``rank`` has to write."""
    if not come(store, key, time.monotonic() + timeout_s):
        raise AbsentError([rank], timeout_s)
