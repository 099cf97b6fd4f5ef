"""Routings, tokens and fake experts that any rank can make for any other."""

from __future__ import annotations

import torch

from .....comm.dispatcher import EPSpec
from .....comm.rows import token_dtype

KINDS = ("random", "one_hot", "all_to_one", "round_robin", "lognormal", "node_limited", "with_none", "all_none", "same_rank", "repeated")


def make_ids(kind: str, n: int, spec: EPSpec, gen: torch.Generator) -> torch.Tensor:
    """slot_ids [n, k] int64 of a kind of routing."""
    slots, k = spec.n_slots, spec.top_k
    if kind == "lognormal":
        weights = torch.randn(slots, generator=gen).exp().expand(n, slots)
        return torch.multinomial(weights, k, generator=gen) if n else torch.empty(0, k, dtype=torch.int64)
    scores = torch.rand(n, slots, generator=gen)
    if kind == "node_limited" and slots % 8 == 0 and slots // 2 >= k:  # 4 of 8 groups of neighbours
        groups = torch.rand(n, 8, generator=gen).argsort(dim=1) < 4
        scores += (~groups).repeat_interleave(slots // 8, dim=1).float()
    ids = scores.argsort(dim=1)[:, :k]
    if ids.shape[1] < k:
        ids = torch.cat([ids, ids.new_full((n, k - ids.shape[1]), -1)], dim=1)
    if kind == "one_hot":
        ids[:, 1:] = -1
    elif kind == "all_to_one":
        ids = ids[:1].expand(n, k).clone()
    elif kind == "round_robin":
        ids = (torch.arange(n * k) % slots).view(n, k)
    elif kind == "with_none":
        ids[torch.rand(n, k, generator=gen) < 0.4] = -1
    elif kind == "all_none":
        ids[:] = -1
    elif kind == "same_rank":
        ids = torch.rand(n, spec.slots_per_rank, generator=gen).argsort(dim=1)[:, :k] + spec.slots_per_rank * (spec.n_ranks - 1)
        ids = torch.cat([ids, ids.new_full((n, k - ids.shape[1]), -1)], dim=1)
    elif kind == "repeated":
        ids[:, 1:2] = ids[:, :1]
    return ids


def make_tokens(rank: int, n: int, spec: EPSpec, kind: str, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [n, hidden], slot_ids [n, k], weights [n, k] of one rank, on the CPU; any rank can make those of any other."""
    gen = torch.Generator().manual_seed(1000 * seed + rank)
    if spec.payload == "bytes":
        x = torch.randint(0, 256, (n, spec.hidden), generator=gen, dtype=torch.uint8)
    else:
        x = torch.randn(n, spec.hidden, generator=gen).to(token_dtype(spec))
    ids = make_ids(kind, n, spec, gen)
    return x, ids, torch.rand(n, spec.top_k, generator=gen)


def expert(slot: torch.Tensor | int, x: torch.Tensor) -> torch.Tensor:
    """What the fake expert of a global slot makes of rows x: elementwise, so that it is exact in any batch."""
    s = torch.as_tensor(slot, dtype=torch.float64)
    scale = (1.0 + 0.37 * torch.sin(s)).to(torch.float32).unsqueeze(-1)
    return (x.float() * scale + torch.cos(s).to(torch.float32).unsqueeze(-1)).to(x.dtype)


def run_experts(x: torch.Tensor, counts: torch.Tensor, spec: EPSpec, rank: int) -> torch.Tensor:
    """The fake experts of ``rank`` on rows sorted by local slot, ``counts`` [slots] of them each."""
    slots = torch.repeat_interleave(torch.arange(spec.slots_per_rank), counts) + rank * spec.slots_per_rank
    return expert(slots.to(x.device), x)


def exact(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The combined result in fp64, [n, hidden]."""
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for column in range(ids.shape[1]):
        y = expert(ids[:, column].clamp(min=0), x).double()
        out += torch.where(ids[:, column : column + 1] >= 0, weights[:, column : column + 1].double() * y, 0.0)
    return out


def magnitude(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """sum of weight * |expert output| in fp64, [n, hidden]: what rounding errors are relative to."""
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for column in range(ids.shape[1]):
        y = expert(ids[:, column].clamp(min=0), x).double().abs()
        out += torch.where(ids[:, column : column + 1] >= 0, weights[:, column : column + 1].double() * y, 0.0)
    return out
