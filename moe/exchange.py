"""How the tokens of a layer meet their experts on one rank grid."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..comm.dispatcher import Dispatcher
from ..parallel.group import Group
from ..parallel.tokens import gather_tokens, slice_tokens
from .experts import Experts
from .load import ExpertLoad
from .placement import Placement
from .router import Router


class ExpertExchange:
    """Routes, dispatches, computes and combines. One instance serves all layers of a rank.

    The tokens of a replica are the same on all its tp ranks. With expert parallelism each tp rank handles a contiguous
    slice of them and the results are gathered; without it (``spread`` false) every tp rank holds a slice of every
    expert's width and partial sums are all-reduced.
    """

    def __init__(self, *, dispatcher: Dispatcher, tp: Group, placement: Placement, load: ExpertLoad, spread: bool) -> None:
        self.dispatcher = dispatcher
        self.tp = tp
        self.load = load
        self.spread = spread
        self.placement = placement
        self._slots = placement.first_slots().to(load.counts.device)  # [layers, experts]

    def run(
        self, layer: int, x: torch.Tensor, router: Router, experts: Experts, meanwhile: Callable[[torch.Tensor], torch.Tensor] | None
    ) -> torch.Tensor:
        """x [T, hidden] -> routed output [T, hidden], plus ``meanwhile(x)`` (the shared expert), which runs while tokens travel."""
        start, stop = slice_tokens(len(x), self.tp) if self.spread else (0, len(x))
        mine = x[start:stop]
        ids, weights = router(mine)
        if self.spread or self.tp.index == 0:
            self.load.add(layer, ids)
        ticket = self.dispatcher.dispatch_send(mine, self._slots[layer][ids], weights)
        beside = meanwhile(x) if meanwhile is not None else None
        routed = self.dispatcher.dispatch_recv(ticket)
        out = self.dispatcher.combine(experts(routed.x, routed.counts), routed)
        if self.spread:
            out = gather_tokens(out, len(x), self.tp)
        else:
            out = self.tp.all_reduce(out)
        return out if beside is None else out + beside
