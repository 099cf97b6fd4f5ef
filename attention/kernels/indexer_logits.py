"""The lightning indexer's logits over a paged cache, on the GPU."""

from __future__ import annotations

from functools import lru_cache

import torch

from ...parallel.kernels.tuned import config_for
from . import indexer_logits_paged
from .indexer_logits_schedule import Config, default_config, kind
from .indexer_logits_torch import check, is_fp4


def indexer_logits(
    q: torch.Tensor,
    weights: torch.Tensor,
    pool: torch.Tensor,
    page_table: torch.Tensor,
    token_row: torch.Tensor,
    limit: torch.Tensor,
    *,
    page_size: int,
    max_context: int,
    max_query: int,
    out: torch.Tensor | None = None,
    start: torch.Tensor | None = None,
    config: Config | None = None,
) -> torch.Tensor:
    """As ``indexer_logits_torch.indexer_logits``, same arguments and results; fp32 accumulation, bit-equal from run to run.

    FP8 and FP4 keys in pages of 64 with 128 values and 32 or 64 heads take the Hopper kernel on a Hopper GPU, all else the portable one.
    A token's logits do not depend on the other tokens of the batch. ``config`` overrides the launch settings (tuning only).
    """
    check(q, weights, pool, page_table, token_row, limit, page_size, max_context, max_query, out, start)
    if out is None:
        out = torch.empty(len(q), -(-max_context // 64) * 64, dtype=torch.float32, device=q.device)
    if not len(q) or not max_context:
        return out
    q, weights = q.contiguous(), weights.contiguous()
    if _hopper_fits(q, pool, page_size):
        from . import indexer_logits_hopper_launch

        if config is None:
            heads, fp4 = q.shape[1], is_fp4(pool, page_size, q.shape[2])
            name = "indexer_logits_fp4" if fp4 else "indexer_logits"
            config = config_for(name, default_config(heads, max_query, fp4=fp4), tokens=len(q), kind=kind(heads, max_query))
        indexer_logits_hopper_launch.launch(q, weights, pool, page_table, token_row, limit, start, out, max_query, config)
    else:
        indexer_logits_paged.launch(q, weights, pool, page_table, token_row, limit, start, out, page_size, max_context)
    return out


def _hopper_fits(q: torch.Tensor, pool: torch.Tensor, page_size: int) -> bool:
    return (
        pool.dtype == torch.uint8
        and page_size == 64
        and q.shape[2] == 128
        and q.shape[1] in (32, 64)
        and pool.is_contiguous()
        and pool.data_ptr() % 16 == 0
        and q.is_cuda
        and _is_hopper(q.device.index)
    )


@lru_cache(maxsize=16)
def _is_hopper(device: int) -> bool:
    return torch.cuda.get_device_capability(device)[0] == 9
