"""How the tokens of a layer meet their experts on one rank grid."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..comm.dispatcher import Dispatcher, Routed
from ..parallel.group import Group
from ..parallel.tokens import gather_tokens, slice_tokens
from .experts import Experts
from .fixed_exchange import fixed_exchange
from .load import ExpertLoad
from .ops import MoEOps
from .placement import Placement
from .router import Router


class ExpertExchange:
    """Routes, dispatches, computes and combines. One instance serves all layers of a rank.

    The tokens of a replica are the same on all its tp ranks. With expert parallelism each tp rank handles a contiguous
    slice of them and the results are gathered; without it (``spread`` false) every tp rank holds a slice of every
    expert's width and partial sums are all-reduced.
    """

    def __init__(
        self,
        *,
        dispatcher: Dispatcher,
        tp: Group,
        placement: Placement,
        load: ExpertLoad,
        spread: bool,
        fixed: Group | None = None,
    ) -> None:
        """``fixed`` is the expert-parallel group where padded batches go through ``fixed_exchange``; None: no padding there."""
        self.dispatcher = dispatcher
        self.fixed = fixed
        self.tp = tp
        self.load = load
        self.spread = spread
        self.placement = placement
        self.ops: MoEOps | None = None  # None: the torch path
        self._slots = placement.first_slots().to(load.counts.device)  # [layers, experts]

    @property
    def here(self) -> bool:
        """Whether tokens meet their experts without travelling and without being rounded as if they did."""
        return self.dispatcher.spec.n_ranks == 1 and self.dispatcher.spec.payload == "native"

    @property
    def still(self) -> bool:
        """Whether padded batches run without a host sync and without shapes that depend on values."""
        return self.here or self.fixed is not None

    def run(
        self,
        layer: int,
        x: torch.Tensor,
        router: Router,
        experts: Experts,
        meanwhile: Callable[[torch.Tensor], torch.Tensor] | None,
        n_valid: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x [T, hidden] -> routed output [T, hidden], plus ``meanwhile(x)`` (the shared expert), which runs while tokens travel.

        Tokens at or past ``n_valid`` [1] int32 are padding: no expert sees them. Only the fused path knows padding.
        """
        assert n_valid is None or (self.ops is not None and (self.fixed is not None or not self.spread)), "padding needs the fused path"
        start, stop = slice_tokens(len(x), self.tp) if self.spread else (0, len(x))
        mine = x[start:stop]
        slots, weights = self._route(layer, mine, router, n_valid)
        if self.ops is not None and self.fixed is not None and n_valid is not None:
            out = fixed_exchange(self.fixed, self.ops, mine, slots, weights, experts, self.dispatcher.spec.slots_per_rank)
            beside = meanwhile(x) if meanwhile is not None else None
        elif self.ops is not None and self.here:
            out = self.ops.fused_experts(mine, slots, weights, experts.weights, out_dtype=x.dtype)
            beside = meanwhile(x) if meanwhile is not None else None
        else:
            ticket = self.dispatcher.dispatch_send(mine, slots, weights)
            beside = meanwhile(x) if meanwhile is not None else None
            routed = self.dispatcher.dispatch_recv(ticket)
            out = self.dispatcher.combine(self._compute(experts, routed), routed)
        if self.spread:
            out = gather_tokens(out, len(x), self.tp)
        else:
            out = self.tp.all_reduce(out)
        return out if beside is None else out + beside

    def _route(self, layer: int, x: torch.Tensor, router: Router, n_valid: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Physical slots [T, k] and weights [T, k] of tokens x [T, hidden]; counts the load."""
        counted = self.spread or self.tp.index == 0
        if self.ops is None:
            ids, weights = router(x)
            if counted:
                self.load.add(layer, ids)
            return self._slots[layer][ids], weights
        config = router.config
        _, weights, slots = self.ops.route(
            router.logits(x),
            getattr(router, "e_score_correction_bias", None),
            n_group=config.n_group,
            topk_group=config.topk_group,
            top_k=config.top_k,
            scoring=config.scoring,
            method=config.method,
            norm_topk_prob=config.norm_topk_prob,
            routed_scaling_factor=config.routed_scaling_factor,
            expert_to_slot=self._slots[layer],
            counts=self.load.counts[layer] if counted and self.load.enabled else None,
            n_valid=n_valid,
        )
        return slots, weights

    def _compute(self, experts: Experts, routed: Routed) -> torch.Tensor:
        """Expert outputs of the rows that arrived."""
        if self.ops is None:
            out: torch.Tensor = experts(routed.x, routed.counts)
        else:
            out = self.ops.grouped_swiglu(routed.x, routed.counts, experts.weights)
        return out
