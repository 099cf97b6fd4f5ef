"""The batch that attention sees inside a captured decode step."""

from __future__ import annotations

import torch

from ..attention.batch import AttentionBatch
from ..attention.halves import static_halves
from ..attention.kv.tier import TierStep
from .kernels.step_edges_torch import StepEntry


def decode_batch(
    entry: StepEntry,
    positions: torch.Tensor,
    rows: torch.Tensor,
    page_size: int,
    max_context: int,
    n_valid: torch.Tensor,
    tier: TierStep | None = None,
    halves_from: int | None = None,
) -> AttentionBatch:
    """The static batch of a decode step of B rows, whose parts are computed already.

    Args:
        entry: what ``enter_step`` made of the step's inputs.
        positions: int64 [B], of the token of every row.
        rows: int64 [B], 0, 1, 2, ...
        page_size: tokens of a page.
        max_context: longest context that the graph's kernels are sized for, tokens.
        n_valid: int32 [1] on the device, rows that exist.
        tier: where pages are, with offloading.
        halves_from: rows from which the step is cut in halves; None: never.
    """
    batch = AttentionBatch.static(
        positions,
        rows,
        entry.page_table,
        page_size,
        max_context=max_context,
        n_valid=n_valid,
        ends=entry.ends,
        write_rows=entry.write_rows,
        tier=tier,
        most_tokens=len(positions),  # all replicas replay graphs of one size
    )
    batch.once("limit", lambda: entry.limit)
    return static_halves(batch) if halves_from is not None and len(positions) >= max(2, halves_from) else batch
