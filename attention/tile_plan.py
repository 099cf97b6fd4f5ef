"""Cutting ragged queries into tiles: the arithmetic on the host."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from .tiles import PageView, Spans, TileGroup

_TILE = 64  # most queries of a tile; bounds the padding of the last tile of a request


@dataclass(frozen=True, kw_only=True)
class TilePlan:
    """Host side of a TileGroup."""

    whole: bool
    arrays: tuple[np.ndarray, ...]  # members, request, token, limit, context, span request, tile start: for the device
    real: np.ndarray
    span_context: np.ndarray
    span_queries: np.ndarray

    def group(self, pages: PageView, latents: PageView, tensors: list[torch.Tensor]) -> TileGroup:
        """The tiles on the device: ``arrays`` as ``tensors``, and the pages of index keys and of latent rows."""
        members, request, token, limit, context, span_request, tile_start = tensors
        spans = Spans(pages=latents, context=self.span_context, queries=self.span_queries, request=span_request, tile_start=tile_start)
        return TileGroup(
            pages=pages,
            latents=latents,
            width=token.shape[1],
            n_tokens=members.shape[0],
            whole=self.whole,
            members=members,
            contexts=self.arrays[4],
            real=self.real,
            request=request,
            token=token,
            limit=limit,
            context=context,
            spans=spans,
        )


def plan_tiles(chosen: np.ndarray, starts: np.ndarray, counts: np.ndarray, query_start: np.ndarray) -> TilePlan:
    """Cut the queries of the ``chosen`` requests into tiles, longest context first."""
    queries, start = counts[chosen], starts[chosen]
    local_start = np.cumsum(queries) - queries
    members = np.arange(queries.sum()) + np.repeat(query_start[chosen] - local_start, queries)
    width = min(_TILE, 1 << int(queries.max() - 1).bit_length())
    tiles = -(-queries // width)
    span = np.repeat(np.arange(len(chosen)), tiles)
    first = (np.arange(len(span)) - np.repeat(np.cumsum(tiles) - tiles, tiles)) * width
    real = np.minimum(queries[span] - first, width)
    contexts = start[span] + first + real
    order = np.argsort(-contexts, kind="stable")
    span, first, real, contexts = span[order], first[order], real[order], contexts[order]
    within = first[:, None] + np.minimum(np.arange(width)[None, :], real[:, None] - 1)
    token = local_start[span][:, None] + within
    limit = start[span][:, None] + within + 1
    ends = start + queries
    tile_start = (np.cumsum(ends) - ends)[span]
    return TilePlan(
        whole=len(members) == query_start[-1],
        arrays=(members, chosen[span], token, limit, contexts, chosen, tile_start),
        real=real,
        span_context=ends,
        span_queries=queries,
    )
