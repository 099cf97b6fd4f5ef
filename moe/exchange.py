"""How the tokens of a layer meet their experts on one rank grid."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..comm.dispatcher import Dispatcher, Routed
from ..parallel.group import Group
from ..parallel.tokens import gather_tokens, slice_tokens
from .experts import Experts
from .load import ExpertLoad
from .ops import MoEOps
from .placement import Placement
from .ranked import answer, unpacked
from .router import Router
from .track import IN_LINE, Track
from .ways import ExpertIds, SlotIds, Ways

#: tokens up to which their routing is a chain of kernels too small to fill the device
_ASIDE_TO = 16


@dataclass(kw_only=True)
class Flight:
    """The tokens of one layer on their way to their experts and back. Holds what the device still reads."""

    n_tokens: int  # T, all of this replica's
    x: torch.Tensor  # [t, hidden] those that this rank sends
    slots: SlotIds  # [t, k]
    weights: torch.Tensor  # [t, k]
    ticket: Any = None  # of the dispatcher; None where tokens do not travel
    routed: Routed | None = None  # what arrived; with ``arrived``, once that is joined
    arrived: Any = None  # end of the receiving, where it runs beside
    back: Any = None  # ticket of the way back, or what came back once ``returned`` is joined
    returned: Any = None  # end of the way back, where it runs beside
    out: torch.Tensor | None = None  # [t, hidden] routed outputs
    keep: Any = None  # expert outputs until they are home


class ExpertExchange:
    """Routes, dispatches, computes and combines. One instance serves all layers of a rank.

    The tokens of a replica are the same on all its tp ranks. With expert parallelism each tp rank handles a contiguous
    slice of them and the results are gathered; without it (``spread`` false) every tp rank holds a slice of every
    expert's width and partial sums are all-reduced.

    ``begin``, ``compute`` and ``finish`` are the parts of ``run``, for callers that do something else in between. Those of
    two batches may alternate; each part is called in the same order on all ranks.
    """

    def __init__(
        self,
        *,
        dispatcher: Dispatcher,
        tp: Group,
        placement: Placement,
        load: ExpertLoad,
        spread: bool,
        track: Track = IN_LINE,
        ways: Ways | None = None,
    ) -> None:
        self.dispatcher = dispatcher
        self.tp = tp
        self.load = load
        self.spread = spread
        self.placement = placement  # as of the start; ``ways`` is what counts
        self.track = track  # where tokens travel, beside the computation only if the dispatcher waits on the device; else the shared expert
        self.ops: MoEOps | None = None  # None: the torch path
        #: where this rank's tokens meet each expert; rewritten in place when experts move
        self.ways = ways or Ways.static(placement, source=dispatcher.group.index, device=load.counts.device)

    @property
    def here(self) -> bool:
        """Whether tokens meet their experts without travelling and without being rounded as if they did."""
        return self.dispatcher.spec.n_ranks == 1 and self.dispatcher.spec.payload == "native"

    @property
    def still(self) -> bool:
        """Whether the fused path runs without a host sync and without shapes that depend on values."""
        return self.here or self.dispatcher.caps.graph

    def run(
        self,
        layer: int,
        x: torch.Tensor,
        router: Router,
        experts: Experts,
        meanwhile: Callable[[torch.Tensor], torch.Tensor] | None,
        n_valid: torch.Tensor | None = None,
        most_tokens: int | None = None,
    ) -> torch.Tensor:
        """x [T, hidden] -> routed output [T, hidden], plus ``meanwhile(x)`` (the shared expert), which runs while tokens travel, or
        beside the routing and the experts of few tokens that need not.

        Tokens at or past ``n_valid`` [1] int32 are padding: no expert sees them. ``most_tokens`` is a bound of T over all
        replicas, the same number on all ranks. Only the fused path knows padding.
        """
        shared, end = None, None
        aside = meanwhile is not None and self._leaves_room(x)
        if meanwhile is not None and aside:
            shared, end = self.track.run(partial(meanwhile, x))
        flight = self.begin(layer, x, router, n_valid, most_tokens)
        if meanwhile is not None and not aside:
            shared = meanwhile(x)
        self.compute(flight, experts)
        out = self.finish(flight)
        if aside:
            self.track.join(end)
        return out if shared is None else out + shared

    def _leaves_room(self, x: torch.Tensor) -> bool:
        """Whether routing x and sorting it by expert leaves the device, and the queue of travelling tokens, nearly idle.

        Not with tp: its ranks sum the shared expert's outputs, and a group's sums have one order.
        """
        return self.here and self.tp.size == 1 and self.track.beside and 0 < len(x) <= _ASIDE_TO

    def begin(
        self, layer: int, x: torch.Tensor, router: Router, n_valid: torch.Tensor | None = None, most_tokens: int | None = None
    ) -> Flight:
        """Route the tokens x [T, hidden] and start to send them; arguments as of ``run``."""
        assert n_valid is None or (self.ops is not None and (self.still or not self.spread)), "padding needs the fused path"
        assert n_valid is None or self.tp.size == 1 or not self.spread, "padding is counted over all tokens, not over a slice of them"
        start, stop = slice_tokens(len(x), self.tp) if self.spread else (0, len(x))
        mine = x[start:stop]
        slots, weights = self._route(layer, mine, router, n_valid)
        flight = Flight(n_tokens=len(x), x=mine, slots=slots, weights=weights)
        if self.here:
            return flight
        parts = self.tp.size if self.spread else 1
        capacity = None if most_tokens is None else min(max(1, -(-most_tokens // parts)), self.dispatcher.spec.max_tokens)

        def send() -> Any:
            return self.dispatcher.dispatch_send(mine, slots.ids, weights, n_valid, tag=layer, capacity=capacity)

        if not self.track.beside:
            flight.ticket = send()
            return flight

        def send_and_receive() -> tuple[Any, Routed]:
            ticket = send()
            return ticket, self.dispatcher.dispatch_recv(ticket, self._layout)

        (flight.ticket, flight.routed), flight.arrived = self.track.run(send_and_receive)
        return flight

    @property
    def _layout(self) -> str:
        """How arrived rows are wanted: as they lie where their number is known beforehand, else sorted by slot."""
        return "rank" if self.ops is not None and self.dispatcher.caps.rank_layout else "contiguous"

    def compute(self, flight: Flight, experts: Experts) -> None:
        """Run this rank's experts on the tokens that come, and start to send the results home."""
        if self.here:
            flight.out = self._alone(flight, experts)
            return
        if self.track.beside:
            self.track.join(flight.arrived)
        else:
            flight.routed = self.dispatcher.dispatch_recv(flight.ticket, self._layout)
        routed = flight.routed
        assert routed is not None
        y, more = self._compute(experts, routed)
        flight.keep = (y, more)
        if not self.track.beside:
            flight.back = self.dispatcher.combine_send(y, routed, **more)
            return
        out = torch.empty((len(flight.x), y.shape[-1]), dtype=flight.x.dtype, device=y.device)

        def send_and_receive() -> torch.Tensor:
            return self.dispatcher.combine_recv(self.dispatcher.combine_send(y, routed, **more), out)

        flight.back, flight.returned = self.track.run(send_and_receive)

    def finish(self, flight: Flight) -> torch.Tensor:
        """Routed outputs [T, hidden] of the replica's tokens."""
        if flight.out is None and self.track.beside:
            self.track.join(flight.returned)
            flight.out = flight.back
        elif flight.out is None:
            flight.out = self.dispatcher.combine_recv(flight.back)
        assert flight.out is not None
        flight.keep = flight.routed = None
        return gather_tokens(flight.out, flight.n_tokens, self.tp) if self.spread else self.tp.all_reduce(flight.out)

    def _route(self, layer: int, x: torch.Tensor, router: Router, n_valid: torch.Tensor | None) -> tuple[SlotIds, torch.Tensor]:
        """Physical slots [T, k] and weights [T, k] of tokens x [T, hidden]; counts the load."""
        counted = self.spread or self.tp.index == 0
        if self.ops is None:
            ids, weights = router(x)
            if counted:
                self.load.add(layer, ids)
                self.load.keep(layer, ids)
            return self.ways.slots(layer, ExpertIds(ids)), weights
        config = router.config
        ids, weights, slots = self.ops.route(
            router.logits(x),
            getattr(router, "e_score_correction_bias", None),
            n_group=config.n_group,
            topk_group=config.topk_group,
            top_k=config.top_k,
            scoring=config.scoring,
            method=config.method,
            norm_topk_prob=config.norm_topk_prob,
            routed_scaling_factor=config.routed_scaling_factor,
            expert_to_slot=self.ways.table[layer],
            counts=self.load.counts[layer] if counted and self.load.enabled else None,
            n_valid=n_valid,
        )
        if counted and self.load.kept is not None:  # in steps that run eagerly only: where padding begins is read on the host
            self.load.keep(layer, ids if n_valid is None else ids[: int(n_valid)])
        return SlotIds(slots), weights

    def _alone(self, flight: Flight, experts: Experts) -> torch.Tensor:
        """Routed outputs of tokens that need not travel."""
        if self.ops is not None:
            x, slots = flight.x, flight.slots.ids
            out: torch.Tensor = self.ops.fused_experts(x, slots, flight.weights, experts.weights, out_dtype=x.dtype)
            return out
        routed = self.dispatcher.dispatch(flight.x, flight.slots.ids, flight.weights)
        y, _ = self._compute(experts, routed)
        return self.dispatcher.combine(y, routed)

    def _compute(self, experts: Experts, routed: Routed) -> tuple[torch.Tensor, dict[str, Any]]:
        """Expert outputs of the rows that arrived, and what ``combine_send`` takes beside them."""
        if routed.layout == "rank":
            assert self.ops is not None
            return answer(self.ops, self.dispatcher.spec, routed, experts, indexed=self.dispatcher.caps.indexed)
        x, counts = unpacked(routed, self.dispatcher.spec), routed.counts
        assert counts is not None
        if self.ops is not None:
            return self.ops.grouped_swiglu(x, counts, experts.weights), {}
        if counts.device.type == "cpu":
            return experts(x, counts), {}
        sizes = torch.tensor(routed.host_counts())
        y, n = torch.zeros_like(x), int(sizes.sum())
        y[:n] = experts(x[:n], sizes)
        return y, {}
