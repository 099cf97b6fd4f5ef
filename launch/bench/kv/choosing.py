"""The indexer's part of a layer: logits of every key and the choice of the highest, run for their time.

The keys are random, so what is chosen means nothing: the rig takes its choices from traces.
"""

from __future__ import annotations

from typing import Any

import torch

from ....attention.kv import fp4
from ....attention.kv.layout import quantise
from ....attention.ops import AttentionOps
from .shape import RigShape


class Choosing:
    """Index keys of every request, FP8 or FP4; the layers take ``trace_kinds`` pools in turn."""

    def __init__(self, shape: RigShape, device: torch.device, ops: AttentionOps) -> None:
        self.shape, self.ops = shape, ops
        size, width, requests = shape.page_size, shape.index_dim, shape.requests
        draw = torch.Generator(device).manual_seed(1)

        def normal(*dims: int) -> torch.Tensor:
            return torch.randn(dims, device=device, generator=draw)

        keys = normal(shape.pages * size, width)
        codes, scales = fp4.quantise(keys) if shape.index_format == "fp4" else quantise(keys, width)
        content = torch.cat((codes.view(shape.pages, -1).view(torch.uint8), scales.view(shape.pages, size).view(torch.uint8)), 1)
        self.pools = [content.repeat(requests, 1) for _ in range(shape.trace_kinds)]
        self.queries = normal(requests, shape.index_heads, width).to(torch.float8_e4m3fn)
        self.weights = normal(requests, shape.index_heads)
        self.table = torch.arange(requests * shape.pages, dtype=torch.int32, device=device).view(requests, -1)
        self.token_row = torch.arange(requests, dtype=torch.int32, device=device)
        self.limit = torch.full((requests,), shape.context, dtype=torch.int32, device=device)

    def run(self, layer: int, part: slice, *, beside: bool = False) -> None:
        """Score and choose for the requests of ``part``; ``beside`` a fetch, for which the GPU's kernel leaves room."""
        shape, pool = self.shape, self.pools[layer % self.shape.trace_kinds]
        token_row, limit = self.token_row[part], self.limit[part]
        scores = self.ops.indexer_logits(
            self.queries[part], self.weights[part], pool, self.table, token_row, limit,
            page_size=shape.page_size, max_context=shape.context, max_query=1,
            **({"config": _with_room(shape, self.queries[part])} if beside and pool.is_cuda else {}),
        )  # fmt: skip
        self.ops.select_rows(scores, limit, shape.k, self.table, token_row, page_size=shape.page_size, max_context=shape.context)


def _with_room(shape: RigShape, queries: torch.Tensor) -> dict[str, Any]:
    """The usual launch settings with two thirds of the programs."""
    from ....attention.kernels.indexer_logits_schedule import default_config, kind
    from ....parallel.kernels.hopper import multiprocessors
    from ....parallel.kernels.tuned import config_for

    heads, small = shape.index_heads, shape.index_format == "fp4"
    name = "indexer_logits_fp4" if small else "indexer_logits"
    usual = config_for(name, default_config(heads, 1, fp4=small), tokens=len(queries), kind=kind(heads, 1))
    return {**usual, "programs": max(1, multiprocessors(queries.device) * usual["per_sm"] * 2 // 3)}
