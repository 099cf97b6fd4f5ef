"""Where the chosen rows of a decode step are, and which hot rows the missing ones take: one Triton program a request."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton

from ...parallel.kernels.overlap import early_start
from ...parallel.kernels.tuned import config_for
from .resolve_rows_kernel import resolve_rows_kernel
from .resolve_rows_sizes import CHUNK, groups_of, list_bytes, scratch_words, shared_groups, table_words, whole_rows
from .resolve_rows_torch import POLICIES, Policy, Resolved


@dataclass(frozen=True, kw_only=True)
class ResolvePlan:
    """Launch settings."""

    warps: int  # of a program
    registers: int  # a thread may use; with the warps it bounds how many programs share a multiprocessor


@lru_cache(maxsize=256)
def plan_for(requests: int, chosen: int, hot: int) -> ResolvePlan:
    """Settings for a shape: measured ones where there are."""
    default = {"warps": 32 if chosen > 512 else 8, "registers": 64}
    return ResolvePlan(**config_for("resolve_rows", default, requests=requests, chosen=chosen, hot=hot))


def resolve_rows(
    positions: torch.Tensor,
    latent_table: torch.Tensor,
    host_table: torch.Tensor,
    moving: torch.Tensor,
    slots: torch.Tensor,
    hot_pages: torch.Tensor,
    hot_positions: torch.Tensor,
    hot_stamps: torch.Tensor,
    stamp: torch.Tensor,
    scratch: torch.Tensor,
    counters: torch.Tensor,
    *,
    page_size: int,
    row_bytes: int,
    n_valid: torch.Tensor | None = None,
    scores: torch.Tensor | None = None,
    policy: Policy = "lru",
    usual: int | None = None,
    plan: ResolvePlan | None = None,
) -> Resolved:
    """``resolve_rows_torch.resolve_rows`` as a kernel: the same results.

    Args: those of the plain version, with
        positions: contiguous.
        scratch: used in long contexts, where it should have ``scratch_words``; else memory is allocated.
        plan: launch settings; ``plan_for`` the shape by default.

    Raises:
        ValueError: an unknown policy, or "score" without scores.
    """
    if policy not in POLICIES or (policy == "score" and scores is None):
        raise ValueError(
            f"policy {policy!r} {'needs scores' if policy in POLICIES else 'is unknown'}; use one of {POLICIES}, or pass scores"
        )
    requests, k = slots.shape[0], positions.shape[1]
    out = torch.empty((3, requests, positions.shape[0] // max(requests, 1) * k), dtype=torch.int32, device=positions.device)
    rows = torch.empty_like(positions)
    count = torch.empty(requests, dtype=torch.int32, device=positions.device)
    chosen, hot = out.shape[2], hot_positions.shape[1]
    scores = scores if policy == "score" else None
    plan = plan_for(requests, chosen, hot) if plan is None else plan
    n, b = triton.next_power_of_2(chosen), whole_rows(usual, hot, page_size)
    context = latent_table.shape[1] * page_size
    words = scratch_words(requests, context, n, b) if positions.is_cuda else requests * table_words(context, n)
    shared, groups = words == 0, groups_of(context)
    if scratch.numel() < words or not scratch.is_contiguous():
        scratch = torch.empty(words, dtype=torch.int32, device=positions.device)
    warps = min(plan.warps, max(1, min(n, b) // 32))  # one thread an element: several would race in the tables
    cuda = positions.is_cuda
    if requests:
        resolve_rows_kernel[(requests,)](
            positions, latent_table, latent_table.stride(0), host_table, host_table.stride(0), moving.view(torch.int8), slots,
            hot_pages, hot_positions, hot_stamps, stamp, None if shared else scratch, words // requests, groups, n_valid,
            scores, 0 if scores is None else scores.stride(0), 0 if scores is None else scores.shape[1], counters, row_bytes, rows,
            out[0], out[1], count, out[2], CHOSEN=chosen, QUERIES=chosen // k, HOT=hot, PAGE=page_size, BY_SCORE=scores is not None,
            N=n, B=b, PAGES=triton.next_power_of_2(hot // page_size), GROUPS=shared_groups(n, b),
            CHUNK=CHUNK if cuda else triton.next_power_of_2(groups), SHARED=shared, LIST=shared and list_bytes(n) > 0,
            THREADS=32 * warps, FAST=shared and min(n, b) >= 1024,
            num_warps=warps, maxnreg=plan.registers, **early_start(positions.device),
        )  # fmt: skip
    return Resolved(rows=rows, source=out[0], target=out[1], count=count)
