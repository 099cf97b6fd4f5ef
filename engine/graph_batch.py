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
    """The static batch of a decode step, whose parts are computed already; in halves from ``halves_from`` rows on."""
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
