"""What ``topk.select_rows`` computes, in plain PyTorch."""

from __future__ import annotations

import torch

from ..topk import select_topk


def select_rows(
    logits: torch.Tensor,
    limit: torch.Tensor,
    k: int,
    page_table: torch.Tensor,
    token_row: torch.Tensor,
    *,
    page_size: int,
    max_context: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions of the ``k`` highest of the first ``limit`` scores of every row, and the cache rows they lie in.

    logits fp32 [T, >= max_context], limit int32 [T], page_table int32 [R, P], token_row [T]; two int32 [T, k] out, positions
    ascending, -1 at the end of short rows. Ties go to the lower position; 0.0 equals -0.0, NaN counts as -inf.
    """
    chosen = select_topk(logits[:, :max_context], limit.long(), k)
    page = page_table[token_row.long()].gather(1, chosen.clamp(min=0) // page_size)
    rows = torch.where(chosen < 0, -1, page * page_size + chosen % page_size)
    return chosen.int(), rows.int()
