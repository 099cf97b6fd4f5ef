"""A leader's numbers of its replica, about once a second."""

from __future__ import annotations

import time
from typing import Any

from ...parallel.grid import Grid
from ..eplb.steps import ExpertSteps
from ..leader import Leader
from ..models.build import Stage
from ..offload.tier_counts import totals
from ..runner import Runner
from ..streams import HostCopy
from .expert_counts import ExpertCounts, sent_copy
from .step_meter import StepMeter

#: seconds between reports
_EVERY_S = 1.0


class Gauge:
    """Reads the counters of one replica's leader. Never waits for the device or for another rank."""

    def __init__(self, *, grid: Grid, leader: Leader, runner: Runner, stage: Stage, experts: ExpertSteps | None) -> None:
        self._grid, self._leader, self._runner, self._stage = grid, leader, runner, stage
        self._eplb = experts
        self._steps = StepMeter()
        self._experts = ExpertCounts(stage, experts, runner.streams)
        self._sent: HostCopy | None = None
        self._sent_bytes = 0
        self._next = 0.0
        leader.on_step = self._steps.launched

    def due(self) -> dict[str, Any] | None:
        """The numbers if a second has passed since the last ones. Cheap to ask."""
        now = time.monotonic()
        if now < self._next:
            return None
        self._next = now + _EVERY_S
        return self.read()

    def read(self) -> dict[str, Any]:
        """Numbers of this moment; counters began at the start of the engine.

        ``running``, ``waiting``: requests. ``pages``, ``pages_used``, ``kv_usage`` (0 to 1): of the KV pool, cached prefixes not counted.
        ``prefix_queries``, ``prefix_hits``: tokens of admitted requests, and those found cached. Of steps: see ``StepMeter.read``, and
        ``graph_steps``, ``padding_tokens``. ``dispatch_bytes``: what the leader's own rank sent to other expert ranks.
        With offloading ``tiers``, with a prefix directory ``directory``, with balancing ``eplb``: counters by name.
        """
        scheduler, stats = self._leader.scheduler, self._leader.scheduler.stats
        used, pages = scheduler.pages_in_use, scheduler.config.n_pages
        found: dict[str, Any] = {"running": scheduler.n_running, "waiting": scheduler.n_waiting}
        found |= {"pages": pages, "pages_used": used, "kv_usage": used / pages if pages else 0.0}
        found |= {"prefix_queries": stats.queried_tokens, "prefix_hits": stats.cached_tokens, "preemptions": stats.preemptions}
        found |= {"evictions": stats.evictions, **self._steps.read()}
        runner = self._runner.stats
        found |= {"graph_steps": runner.graph_steps, "padding_tokens": runner.padding_tokens, "host_waits": self._runner.streams.waits}
        if self._stage.dispatcher is not None:
            found["dispatch_bytes"] = self._dispatched()
        if self._runner.mover is not None:
            found["tiers"] = self._tiers()
        if scheduler.share is not None:
            found["directory"] = scheduler.share.stats()
        if self._eplb is not None and self._eplb.live is not None:
            found["eplb"] = self._moves()
        return found | self._experts.read()

    def _dispatched(self) -> int:
        """Bytes as of the report before where the device counts them."""
        dispatcher = self._stage.dispatcher
        assert dispatcher is not None
        copy = self._sent
        if copy is None or copy.mark.done:
            if copy is not None:
                self._sent_bytes = sum(dispatcher.bytes_sent(copy.wait()))
            self._sent = sent_copy(self._stage, self._runner.streams)
            if self._sent is None:
                self._sent_bytes = sum(dispatcher.bytes_sent())
        return self._sent_bytes

    def _tiers(self) -> dict[str, Any]:
        mover, tier = self._runner.mover, self._leader.scheduler.tier
        assert mover is not None
        found = totals(mover.counts.latest())
        return found if tier is None else found | tier.stats()

    def _moves(self) -> dict[str, Any]:
        assert self._eplb is not None
        stats = self._eplb.stats()
        cycles = {str(name): int(count) for name, count in stats["cycles"].items()}
        found = {"cycles": cycles, "age_steps": int(stats["age_steps"])}
        return found | {"experts_received": int(stats["experts_received"]), "bytes_received": int(stats["bytes_received"])}
