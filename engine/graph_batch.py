"""The batch that attention sees inside a captured decode step."""

from __future__ import annotations

import torch

from ..attention.batch import AttentionBatch
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
) -> AttentionBatch:
    """The static batch of a decode step, whose parts are computed already."""
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
    )
    batch.once("limit", lambda: entry.limit)
    return batch
