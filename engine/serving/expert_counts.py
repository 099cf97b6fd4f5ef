"""The load of experts on one leader, brought to the host about once a second without waiting for the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...moe.placement import Placement
from ..eplb.steps import ExpertSteps
from ..models.build import Stage
from ..streams import HostCopy, Streams
from .expert_balance import pack, rank_loads

#: reports between two that bring the counts of all experts
_EVERY = 10


class ExpertCounts:
    """What the experts of this stage got of this rank's tokens between two reports. ``read`` is called once a report."""

    def __init__(self, stage: Stage, experts: ExpertSteps | None, streams: Streams) -> None:
        """``experts``: moves them, if they move."""
        self._streams, self._experts = streams, experts
        self._layers = [layer.layer for layer in stage.model.moe_layers()]
        self._load, self._placement = stage.load, stage.placement
        self._rows = None if stage.load is None else torch.tensor(self._layers, device=stage.load.counts.device)
        self._coming: HostCopy | None = None
        self._before: NDArray[np.int64] | None = None  # counts at the last report, [MoE layers, experts]
        self._shown: NDArray[np.int64] | None = None  # counts when they were told in full
        self._reports = 0

    def read(self) -> dict[str, Any]:
        """``expert_loads`` by EP rank since the last report; now and then ``expert_counts`` by expert. {} while there is nothing to tell.

        What is told is as old as the report before: the copy that was begun then is there now.
        """
        if self._load is None or self._rows is None or self._placement is None or not self._layers or not self._load.enabled:
            return {}
        copy, counts = self._coming, None
        if copy is not None and copy.mark.done:
            counts = copy.wait().numpy()
        if copy is None or counts is not None:
            self._coming = self._streams.download(self._load.counts.index_select(0, self._rows))  # a copy: the counts go on
        return {} if counts is None else self._tell(counts, self._placement)

    def _tell(self, counts: NDArray[np.int64], placement: Placement) -> dict[str, Any]:
        before, self._before = self._before, counts
        if self._shown is None or before is None:
            self._shown = counts
            return {}
        found: dict[str, Any] = {}
        if placement.n_ranks > 1:
            slots = self._slots(placement)
            found["expert_loads"] = pack(rank_loads(np.maximum(counts - before, 0), slots, placement.n_ranks), self._layers)
        self._reports += 1
        if self._reports % _EVERY == 1:
            found["expert_counts"] = pack(np.maximum(counts - self._shown, 0), self._layers)
            self._shown = counts
        return found

    def _slots(self, placement: Placement) -> NDArray[np.int64]:
        live = None if self._experts is None else self._experts.live
        if live is not None:
            return np.asarray(live.slot_to_expert, dtype=np.int64)
        slots: NDArray[np.int64] = placement.slot_to_expert[self._layers].numpy()
        return slots


def sent_copy(stage: Stage, streams: Streams) -> HostCopy | None:
    """The dispatcher's counters of what it sent, on their way to the host; None where the host has them anyway."""
    counters: torch.Tensor | None = None if stage.dispatcher is None else stage.dispatcher.traffic()
    return None if counters is None else streams.download(counters.clone())
