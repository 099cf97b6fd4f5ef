"""Counters of one rank's tiers, brought to the host now and then without waiting for the device."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

from ...attention.kv.tier import TierCounter
from ..streams import HostCopy, Mark, Streams

_EVERY = 16  # steps between two readings


class TierCounts:
    """The device's counters, int64 [layers, len(TierCounter)], as they were at the last reading.

    A row that was chosen and never written means wrong tokens: ``confirm`` raises RuntimeError before a token is told, where the step was
    watched; ``step`` and ``verify`` do so for all other steps. It is raised once.
    """

    def __init__(self, counters: torch.Tensor, streams: Streams) -> None:
        self._counters, self._streams = counters, streams
        self._steps = 0
        self._coming: HostCopy | None = None
        self._known = torch.zeros(counters.shape, dtype=torch.int64)
        self._raised = self._fresh = False  # a fault was told; ``_known`` has not been looked at
        self._watched: deque[tuple[int, torch.Tensor, Mark]] = deque()  # (step, its counters on the host, when they are there)
        self._places: list[torch.Tensor] = []  # of such counters, not in use

    def step(self) -> None:
        """A step has been launched.

        Raises:
            RuntimeError: an earlier one read a row that was never written, and its counters have arrived.
        """
        self._steps += 1
        if self._coming is None and self._steps % _EVERY == 0:
            self._coming = self._streams.download(self._counters.clone())
        self._take()
        if self._fresh:
            self._check()

    def watch(self, step: int) -> None:
        """``step`` has been launched; somebody will ``confirm`` it, or a later one. Its counters come down behind it."""
        host = self._places.pop() if self._places else torch.empty(self._known.shape, dtype=torch.int64, pin_memory=self._streams.cuda)
        host.copy_(self._counters, non_blocking=True)
        self._watched.append((step, host, self._streams.mark()))

    def confirm(self, step: int) -> None:
        """Tokens of ``step``, which are on the host, may be told; its counters are there with them, or nearly.

        Raises:
            RuntimeError: it, or one before it, read a row that was never written.
        """
        while self._watched and self._watched[0][0] <= step:
            _, host, mark = self._watched.popleft()
            self._streams.wait(mark)
            self._places.append(host)
            if host.numpy()[:, TierCounter.UNWRITTEN].any():
                self._known = host.clone()
                self._check()

    def verify(self) -> None:
        """The same check of all steps so far; waits for the device.

        Raises:
            RuntimeError: as ``step``.
        """
        self.now()
        self._check()

    def _check(self) -> None:
        self._fresh = False
        unwritten = self._known[:, TierCounter.UNWRITTEN].tolist()
        if not self._raised and any(unwritten):
            self._raised = True
            layer = next(layer for layer, count in enumerate(unwritten) if count)
            raise RuntimeError(
                f"KV offload: layer {layer} of this rank read {unwritten[layer]} rows that are in no device page and no finished host page "
                f"({sum(unwritten)} in all its layers): tokens of the last steps are wrong. This is a fault of the engine; run with "
                "--kv-offload off"
            )

    def _take(self) -> None:
        if self._coming is not None and self._coming.mark.done:
            self._known, self._coming, self._fresh = self._coming.wait(), None, True

    def latest(self) -> torch.Tensor:
        """int64 [layers, len(TierCounter)] on the host, up to 32 steps old; never waits."""
        self._take()
        return self._known

    def now(self) -> torch.Tensor:
        """The same of this moment; waits for the device, so not for steps."""
        copy = self._streams.download(self._counters.clone())
        self._known, self._coming = copy.wait(), None
        return self._known

    def summary(self) -> str:
        """All that was found and moved so far, in one line."""
        found = totals(self.now())
        share, moved = found["miss_rate"], found["bytes"] / 1e9
        rows = ", ".join(f"{found[name]} {name}" for name in ("resident", "hits", "misses", "moved", "evictions", "unwritten"))
        return f"KV tiers: rows chosen in offloaded steps: {rows}; {share:.1%} missed, {moved:.3f} GB fetched"

    def report(self) -> dict[str, Any]:
        """Sums and rows by layer, of this moment; for reports between calls."""
        counts = self.now()
        return {"total": totals(counts), "layers": layer_rows(counts)}


def layer_rows(counts: torch.Tensor) -> list[dict[str, int]]:
    """Counters of each layer by name."""
    names = [counter.name.lower() for counter in TierCounter]
    return [dict(zip(names, row, strict=True)) for row in counts.tolist()]


def totals(counts: torch.Tensor) -> dict[str, Any]:
    """Sums over the layers, and the share of chosen rows of offloaded steps that was not on the device."""
    found: dict[str, Any] = {counter.name.lower(): int(counts[:, counter].sum()) for counter in TierCounter}
    chosen = found["resident"] + found["hits"] + found["misses"] + found["moved"] + found["unwritten"]
    return found | {"miss_rate": found["misses"] / chosen if chosen else 0.0}
