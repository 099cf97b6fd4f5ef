"""Expert parallelism in shapes that depend on nothing but the batch size, so that a captured graph can hold it.

Every rank gets every rank's tokens, runs its own experts on those that chose them, and sends the sums back: for the few
tokens of a decode step that costs little more than sending each token where it is wanted, and no count has to be known.
"""

from __future__ import annotations

import torch

from ..parallel.group import Group
from .experts import Experts
from .ops import MoEOps


def fixed_exchange(
    group: Group, ops: MoEOps, x: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor, experts: Experts, slots_per_rank: int
) -> torch.Tensor:
    """Routed output [B, hidden] of this rank's tokens. Collective: B must be the same on every rank of ``group``.

    Args:
        group: the expert-parallel group.
        ops: backend of the experts.
        x: [B, hidden].
        slots: int32 [B, k], physical slots over all ranks, -1 for none.
        weights: float32 [B, k].
        experts: the slots that this rank hosts.
        slots_per_rank: slot s lives on rank ``s // slots_per_rank``.

    The sums are those of the dispatchers: in ascending slot order within a rank, rounded to x's dtype, then ranks ascending
    in float32.
    """
    tokens = len(x)
    everyone, chosen, shares = group.all_gather(x), group.all_gather(slots), group.all_gather(weights)
    local = chosen - group.index * slots_per_rank
    local = torch.where((chosen >= 0) & (local >= 0) & (local < slots_per_rank), local, -1)
    partial = ops.fused_experts(everyone, local, shares, experts.weights, out_dtype=x.dtype)
    split = [tokens] * group.size
    home = group.all_to_all_async(partial, split, split).wait().view(group.size, tokens, x.shape[1])
    total = home[0].float()
    for part in home[1:]:
        total = total + part.float()
    return total.to(x.dtype)
