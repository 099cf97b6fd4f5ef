"""Finding the chosen latent rows of a step in which some pages are not on the device; the same for both paths of attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from .batch import AttentionBatch
from .kv.cache import LayerCache
from .kv.tier import LayerTier, TierStep
from .tiles import upload

POOL_ROWS = 64  # a pool has a multiple of these rows, as FlashMLA wants it


class TierOps(Protocol):
    """The operations that move rows between tiers; ``AttentionOps`` has them."""

    @property
    def resolve_rows(self) -> Any:
        """Where chosen rows are, and what has to be copied."""

    @property
    def fetch_rows(self) -> Any:
        """Those copies."""

    @property
    def gather_union(self) -> Any:
        """All chosen rows of a request in a pool of their own."""

    @property
    def seed_hot(self) -> Any:
        """The beginning of a hot buffer."""


@dataclass(frozen=True, kw_only=True)
class Gathered:
    """A request whose chosen rows are gathered: its tokens stand together."""

    request: int
    tokens: slice
    context: int  # its keys


@dataclass(frozen=True, kw_only=True)
class Ways:
    """How the tokens of a step get at their rows. Requests without tokens are in none of the three."""

    resolving: torch.Tensor  # int64 [m], leased requests of one token: through their hot buffers
    resolving_tokens: torch.Tensor  # int64 [m], those tokens
    gathered: tuple[Gathered, ...]  # requests with absent pages otherwise
    in_pool: torch.Tensor  # int64 [n], tokens whose rows are in the device pool in the end: all but the gathered

    @classmethod
    def of(cls, batch: AttentionBatch, *, resolve: bool = True, together: bool = False) -> Ways:
        """The ways of a batch whose lengths the host knows.

        Without ``resolve`` no hot buffer is used. ``together``: where one request is gathered, all with several tokens are.
        """
        tier, starts, counts = batch.tier, batch.starts, batch.counts
        assert tier is not None and starts is not None and counts is not None, "a static batch has one way: its rows resolve"
        assert tier.absent is not None and tier.leased is not None, "an offloaded batch says which requests have absent pages and leases"
        resolving = (counts == 1) & tier.leased if resolve else np.zeros(len(counts), bool)
        gathered = (counts > 0) & tier.absent & ~resolving
        if together and gathered.any():
            gathered |= counts > 1
        first = np.cumsum(counts) - counts
        in_pool = np.flatnonzero(np.repeat(~gathered, counts))
        found = [np.flatnonzero(resolving), first[resolving], in_pool]
        device = batch.positions.device
        tensors = [upload(torch.from_numpy(x.astype(np.int64)), device) for x in found]
        return cls(
            resolving=tensors[0],
            resolving_tokens=tensors[1],
            in_pool=tensors[2],
            gathered=tuple(
                Gathered(request=r, tokens=slice(int(first[r]), int(first[r] + counts[r])), context=int(starts[r] + counts[r]))
                for r in np.flatnonzero(gathered).tolist()
            ),
        )


@dataclass(frozen=True, kw_only=True)
class _Tables:
    """What ``resolve_rows`` reads of the requests that resolve."""

    latent_table: torch.Tensor
    host_table: torch.Tensor
    moving: torch.Tensor
    slots: torch.Tensor

    n_valid: torch.Tensor | None

    @classmethod
    def of(cls, batch: AttentionBatch, tier: TierStep, requests: torch.Tensor | None) -> _Tables:
        """Of ``requests`` [m] int64, or of all."""
        assert tier.host_table is not None and tier.moving is not None
        rows, valid = (tier.latent_table, tier.host_table, tier.moving, tier.slots), batch.n_valid
        if requests is not None:
            latent, host, moving, slots = (x.index_select(0, requests) for x in rows)
            rows, valid = (latent, host, moving, slots), None
        return cls(latent_table=rows[0], host_table=rows[1], moving=rows[2], slots=rows[3], n_valid=valid)


@dataclass(frozen=True, kw_only=True)
class Copies:
    """Copies that have to be made before the rows that they go to are read."""

    source: torch.Tensor
    target: torch.Tensor
    count: torch.Tensor


def resolve(
    ops: TierOps,
    positions: torch.Tensor,
    batch: AttentionBatch,
    cache: LayerCache,
    requests: torch.Tensor | None = None,
    scores: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Copies]:
    """Device rows int32 [R * q, k] of the chosen ``positions`` int32 [R * q, k], good once the copies are made.

    ``requests`` int64 [R] are those of the positions, all of the batch where it is None (a static batch). ``scores`` fp32
    [R * q, >= context] are this step's index scores, for hot buffers that go by them.
    """
    tier, layer = _tiers(batch, cache)
    where = batch.once("tables of all" if requests is None else "tables of some", lambda: _Tables.of(batch, tier, requests))
    tables = tier.tables
    scored = tables.scored and scores is not None
    found = ops.resolve_rows(
        positions,
        where.latent_table,
        where.host_table,
        where.moving,
        where.slots,
        tables.hot_pages,
        layer.hot.positions,
        layer.hot.stamps,
        tables.stamp,
        tables.scratch,
        layer.counters,
        page_size=batch.page_size,
        row_bytes=layer.host.row_bytes,
        n_valid=where.n_valid,
        scores=scores if scored else None,
        policy="score" if scored else "lru",
        usual=tables.usual_rows,
    )
    return found.rows, Copies(source=found.source, target=found.target, count=found.count)


def fetch(ops: TierOps, copies: Copies, cache: LayerCache) -> None:
    """Make the copies."""
    assert cache.tier is not None
    ops.fetch_rows(cache.tier.host, cache.latent.bytes, copies.source, copies.target, copies.count)


def gather(
    ops: TierOps, positions: torch.Tensor, batch: AttentionBatch, cache: LayerCache, request: int, context: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes of every chosen row of ``request``, uint8 [U, row bytes], and rows int32 [T, k] of ``positions`` int32 [T, k] in them."""
    tier, layer = _tiers(batch, cache)
    assert tier.host_table is not None
    most = tier.latent_table.shape[1] * batch.page_size
    pool, rows = ops.gather_union(
        positions,
        tier.latent_table[request],
        tier.host_table[request],
        layer.host,
        cache.latent.bytes,
        page_size=batch.page_size,
        context=min(-(-context // POOL_ROWS) * POOL_ROWS, most),  # mostly a pool that needs no padding
    )
    return pool, rows


def seed(ops: TierOps, positions: torch.Tensor, batch: AttentionBatch, cache: LayerCache) -> None:
    """Begin the hot buffers of the batch's ``seeded`` requests with what their last tokens chose, ``positions`` int32 [T, k]."""
    tier, layer = _tiers(batch, cache)
    if not tier.seeded:
        return
    counts, tables = batch.counts, tier.tables
    assert counts is not None and tier.host_table is not None
    ends = np.cumsum(counts)
    for request in tier.seeded:
        last = int(ends[request])
        copies = ops.seed_hot(
            positions[max(last - int(counts[request]), last - tables.window) : last],
            tier.slots[request : request + 1],
            tier.latent_table[request],
            tier.host_table[request],
            tables.hot_pages,
            layer.hot.positions,
            layer.hot.stamps,
            tables.stamp,
            tables.scratch,
            page_size=batch.page_size,
        )
        fetch(ops, Copies(source=copies.source, target=copies.target, count=copies.count), cache)


def _tiers(batch: AttentionBatch, cache: LayerCache) -> tuple[TierStep, LayerTier]:
    assert batch.tier is not None and cache.tier is not None, "an offloaded batch needs a cache with tiers"
    return batch.tier, cache.tier
