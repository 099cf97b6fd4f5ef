"""A meeting by a key-value store: everybody leaves a record, number 0 reads them all, judges, and tells the verdict.

Nobody reads what all the others wrote but number 0, so a thousand ranks cost a few thousand small messages.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

from torch._C._distributed_c10d import Store

_LOOK_S = 0.2  # between looks of those that have something to say while they wait
_MARGIN_S = 3.0  # the others wait this much longer than number 0, and number 0 so long for them to have heard of a failure

Record = dict[str, Any]


class AbsentError(RuntimeError):
    """Some did not come within the deadline. ``missing`` are their numbers."""

    def __init__(self, missing: Sequence[int], timeout_s: float) -> None:
        super().__init__(f"{', '.join(map(str, missing)) or 'nobody known'} did not come within {timeout_s:g} s")
        self.missing = tuple(missing)


def call_roll(
    store: Store,
    index: int,
    size: int,
    record: Record,
    judge: Callable[[Sequence[Record]], Any],
    timeout_s: float,
    *,
    waiting: Callable[[Sequence[int]], None] | None = None,
) -> Any:
    """Meet ``size`` parties of which this is number ``index`` -> what ``judge`` (asked by number 0) made of all records, as JSON has it.

    ``waiting`` is called several times a second with those that have not come yet (on others than number 0: with []).

    Raises:
        ValueError: that of ``judge``, on all, with the same text.
        AbsentError: not all came within ``timeout_s`` seconds.
    """
    store.set(f"record/{index}", json.dumps(record))
    end = time.monotonic() + timeout_s
    if index == 0:
        verdict = _verdict(store, size, judge, end, waiting)
        store.set("verdict", json.dumps(verdict))
        if "result" not in verdict:  # the store may end with this process: let the others hear why
            _await_readers(store, [i for i in range(1, size) if i not in verdict.get("missing", ())])
    elif _await(store, "verdict", end + _MARGIN_S, (lambda: waiting([])) if waiting else None):
        verdict = json.loads(store.get("verdict"))
        store.set(f"read/{index}", "1")
    else:
        verdict = {"missing": _absent(store, range(size)) or [0]}
    if verdict.get("missing"):
        raise AbsentError(verdict["missing"], timeout_s)
    if verdict.get("error"):
        raise ValueError(verdict["error"])
    return verdict["result"]


def _await_readers(store: Store, others: Sequence[int]) -> None:
    end = time.monotonic() + _MARGIN_S
    while others and time.monotonic() < end:
        others = [i for i in others if not store.check([f"read/{i}"])]
        time.sleep(0.05)


def refuse(store: Store, index: int, record: Record, error: str) -> None:
    """Instead of ``call_roll``: leave ``record`` for number 0 to judge; number 0 itself makes ``error`` the verdict."""
    store.set(f"record/{index}", json.dumps(record))
    if index == 0:
        store.set("verdict", json.dumps({"error": error}))


def _verdict(
    store: Store, size: int, judge: Callable[[Sequence[Record]], Any], end: float, waiting: Callable[[Sequence[int]], None] | None
) -> dict[str, Any]:
    keys = [f"record/{i}" for i in range(size)]
    for i, key in enumerate(keys):
        rest = range(i, size)
        every = None if waiting is None else partial(_tell, waiting, store, rest)
        if not _await(store, key, end, every):
            return {"missing": _absent(store, rest)}
    try:
        return {"result": judge([json.loads(raw) for raw in store.multi_get(keys)])}
    except ValueError as error:
        return {"error": str(error)}


def _await(store: Store, key: str, end: float, every: Callable[[], None] | None) -> bool:
    """Whether ``key`` was there before ``end``, monotonic seconds; ``every`` is called between looks."""
    while every is not None:
        if store.check([key]):
            return True
        if time.monotonic() > end:
            return False
        every()
        time.sleep(_LOOK_S)
    return come(store, key, end)


def come(store: Store, key: str, end: float) -> bool:
    """Whether ``key`` is there before ``end``, monotonic seconds; waits for it.

    Raises:
        RuntimeError: the store is gone.
    """
    try:
        store.wait([key], timedelta(seconds=max(end - time.monotonic(), 0.001)))
        return True
    except RuntimeError as error:
        if "imeout" in str(error) or "imed out" in str(error):
            return False
        raise


def _tell(waiting: Callable[[Sequence[int]], None], store: Store, rest: Sequence[int]) -> None:
    waiting(_absent(store, rest))


def _absent(store: Store, numbers: Sequence[int]) -> list[int]:
    return [i for i in numbers if not store.check([f"record/{i}"])]
