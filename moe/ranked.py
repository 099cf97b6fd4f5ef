"""Experts on rows as they arrived: in the payload's dtype, and perhaps one for every token that any rank may have sent."""

from __future__ import annotations

from typing import Any

import torch

from ..comm.dispatcher import EPSpec, Routed
from ..comm.fp8 import dequantise
from ..comm.rows import DTYPES
from .experts import Experts
from .ops import MoEOps

#: choices whose outputs are held at a time; more tokens are computed some at a time, each summed before the next begin
_MOST_CHOICES = 1 << 16


def answer(ops: MoEOps, spec: EPSpec, routed: Routed, experts: Experts, *, indexed: bool) -> tuple[torch.Tensor, dict[str, Any]]:
    """What ``combine_send`` takes for ``routed`` of the layout "rank": outputs of every choice with their places, or sums.

    ``indexed``: the former cost the dispatcher no more. Buffers are sized for the case that every token comes here: no count is
    known to the host, and none is needed.
    """
    slots, shares, dtype = routed.slots, routed.shares, DTYPES[spec.dtype]
    assert slots is not None and shares is not None
    x = routed.x if routed.scales is not None or experts.fp8 else routed.x.to(experts.gate_up.dtype)
    expected = -(-slots.numel() // spec.n_ranks)  # a token has k choices, over all ranks
    if spec.deterministic or (indexed and slots.numel() <= _MOST_CHOICES):  # the former: summed at home, in the order of all choices
        y, place = ops.expert_rows(x, slots, experts.weights, x_scales=routed.scales, out_dtype=dtype, n_rows=expected)
        return y, {"index": place}
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    step = max(1, _MOST_CHOICES // slots.shape[1])
    for first in range(0, len(x), step):
        some = slice(first, first + step)
        scales = None if routed.scales is None else routed.scales[some]
        part = -(-expected * len(slots[some]) // len(slots))
        out[some] = ops.fused_experts(
            x[some], slots[some], shares[some], experts.weights, x_scales=scales, out_dtype=dtype, n_rows=part
        )  # fmt: skip
    return out, {}


def unpacked(routed: Routed, spec: EPSpec) -> torch.Tensor:
    """Rows of a sorted layout in the spec's dtype, whatever they travelled as."""
    if routed.scales is not None:
        return dequantise(routed.x, routed.scales, DTYPES[spec.dtype])
    return routed.x.to(DTYPES[spec.dtype])
