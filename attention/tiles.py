"""Ragged queries cut into rectangular tiles, and tiles into chunks of bounded memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch

ELEMENT_BUDGET = 1 << 20  # temporary elements a chunk may hold; small enough to stay in a CPU's cache
_CACHED_KEYS = 1 << 20  # chunks with more keys than this compute their row ids anew in every layer


def upload(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """``host`` on ``device``; to a GPU through pinned memory, so that nothing waits for what runs there."""
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


@dataclass(frozen=True)
class PageView:
    """Where the keys of the requests lie: ``table`` [R, P] int32 of pages of ``size`` rows, a power of two."""

    table: torch.Tensor
    size: int

    @property
    def shift(self) -> int:
        """log2 of the page size."""
        return self.size.bit_length() - 1

    def rows(self, request: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Flat cache rows (int64, shape of ``positions`` [n, m]) of positions of ``request`` [n]."""
        pages = self.table.index_select(0, request).long().gather(1, positions >> self.shift)
        return (pages << self.shift) | (positions & (self.size - 1))


@dataclass(frozen=True)
class Chunk:
    """``n`` tiles of ``b`` queries with up to ``keys`` keys each. Queries past a request's end repeat its last one.

    Tokens are counted within the group: index i is token ``members[i]`` of the batch.
    """

    pages: PageView  # of index keys
    latents: PageView  # of latent rows
    request: torch.Tensor  # [n] int64, batch row of every tile
    tiles: slice  # place of the tiles in their group
    token: torch.Tensor  # [n * b] int64, token of every query
    limit: torch.Tensor  # [n, b] int64, keys a query may see (its position + 1)
    context: torch.Tensor  # [n] int64, keys of every tile, in 1..keys
    keys: int  # most keys of a tile
    stored: tuple[torch.Tensor, torch.Tensor] | None  # (query index, token) of the real queries; None when all are

    @cached_property
    def _key_positions(self) -> torch.Tensor:
        every = torch.arange(self.keys, device=self.request.device)
        # Past a tile's context its last key repeats: that row is always written, so nothing has to be cleared of NaN.
        return torch.minimum(every, self.context[:, None] - 1)

    @cached_property
    def _key_rows(self) -> torch.Tensor:
        return self.pages.rows(self.request, self._key_positions)

    @cached_property
    def _latent_rows(self) -> torch.Tensor:
        return self.latents.rows(self.request, self._key_positions)

    @property
    def key_positions(self) -> torch.Tensor:
        """Positions [n, keys] int64 of the keys, clamped to the tile's context."""
        return self._key_positions

    @property
    def key_rows(self) -> torch.Tensor:
        """Flat index rows [n, keys] int64 of the keys, clamped to the tile's context."""
        if self.context.shape[0] * self.keys <= _CACHED_KEYS:
            return self._key_rows
        return self.pages.rows(self.request, self.key_positions)

    @property
    def latent_rows(self) -> torch.Tensor:
        """Flat latent rows [n, keys] int64 of the keys, clamped to the tile's context."""
        if self.latents is self.pages:
            return self.key_rows
        if self.context.shape[0] * self.keys <= _CACHED_KEYS:
            return self._latent_rows
        return self.latents.rows(self.request, self.key_positions)

    @cached_property
    def hidden(self) -> torch.Tensor:
        """Causal mask [n, b, keys] bool: True where a query does not see a key."""
        return torch.arange(self.keys, device=self.request.device) >= self.limit[:, :, None]

    def store(self, out: torch.Tensor, values: torch.Tensor) -> None:
        """Write ``values`` [n * b, ...] to the tokens' rows of ``out`` [members, ...]; repeated queries are dropped."""
        if self.stored is None:
            out.index_copy_(0, self.token, values)
        else:
            out.index_copy_(0, self.stored[1], values.index_select(0, self.stored[0]))


@dataclass(frozen=True, kw_only=True)
class Spans:
    """The contexts of a group's requests laid end to end, for work that is done once a key, not once a tile."""

    pages: PageView  # of latent rows
    context: np.ndarray  # [G] keys of every request
    queries: np.ndarray  # [G] its queries
    request: torch.Tensor  # [G] int64, batch row
    tile_start: torch.Tensor  # [N] int64, where the context of each tile's request begins

    @cached_property
    def query_start(self) -> torch.Tensor:
        """[G + 1] int32 on the device: first query of every request, within the group."""
        return self._starts(self.queries)

    @cached_property
    def key_start(self) -> torch.Tensor:
        """[G + 1] int32 on the device: first key of every request in ``rows``."""
        return self._starts(self.context)

    def _starts(self, counts: np.ndarray) -> torch.Tensor:
        return upload(torch.from_numpy(np.concatenate(([0], np.cumsum(counts))).astype(np.int32)), self.request.device)

    @cached_property
    def rows(self) -> torch.Tensor:
        """Flat latent rows of all keys, [sum of contexts] int64."""
        return self.rows_by(self.pages)

    def rows_by(self, pages: PageView) -> torch.Tensor:
        """Flat rows of all keys by other pages, [sum of contexts] int64."""
        request, positions = self.keys
        return (pages.table[request, positions >> pages.shift].long() << pages.shift) | (positions & (pages.size - 1))

    @cached_property
    def keys(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Request and position of all keys, [sum of contexts] int64 each."""
        lengths = upload(torch.from_numpy(self.context), self.request.device)
        total = int(self.context.sum())
        request = torch.repeat_interleave(self.request, lengths, output_size=total)
        start = torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths, output_size=total)
        return request, torch.arange(total, device=self.request.device) - start


@dataclass(frozen=True, kw_only=True)
class TileGroup:
    """Tiles of one width, longest context first. Host arrays decide shapes; device tensors hold the same numbers."""

    pages: PageView  # of index keys
    latents: PageView  # of latent rows; the same object where their pages are the same
    width: int  # queries a tile
    n_tokens: int  # tokens of the group
    whole: bool  # the group is the whole batch, so that member i is token i
    members: torch.Tensor  # [n_tokens] int64, flat tokens of the group, ascending
    contexts: np.ndarray  # [N] keys of every tile
    real: np.ndarray  # [N] queries of the tile that exist
    request: torch.Tensor  # [N] int64, batch row
    token: torch.Tensor  # [N, width] int64, index into members
    limit: torch.Tensor  # [N, width] int64, keys a query may see
    context: torch.Tensor  # [N] int64, contexts on the device
    spans: Spans
    _plans: dict[tuple[int, int], tuple[Chunk, ...]] = field(default_factory=dict)

    @property
    def fewest_keys(self) -> int:
        """Keys that the query with the shortest past sees at least (exact for single-token requests)."""
        return int((self.contexts - self.real + 1).min())

    def pick(self, x: torch.Tensor) -> torch.Tensor:
        """Rows of ``x`` [T, ...] that belong to the group: [n_tokens, ...]."""
        return x if self.whole else x.index_select(0, self.members)

    def put(self, out: torch.Tensor | None, values: torch.Tensor, n_tokens: int) -> torch.Tensor:
        """``out`` [T, ...] (made when None) with ``values`` [n_tokens, ...] at the group's rows."""
        if self.whole:
            return values
        out = values.new_empty(n_tokens, *values.shape[1:]) if out is None else out
        return out.index_copy_(0, self.members, values)

    def chunks(self, *, pair_cost: int, key_cost: int) -> Sequence[Chunk]:
        """Chunks needing ``pair_cost`` elements per (query, key) and ``key_cost`` per key, within the element budget.

        The keys of one tile are never split, so a chunk may exceed the budget when its context alone does.
        """
        plan = self._plans.get((pair_cost, key_cost))
        if plan is None:
            plan = self._plans[(pair_cost, key_cost)] = tuple(self._cut(pair_cost, key_cost))
        return plan

    def _cut(self, pair_cost: int, key_cost: int) -> list[Chunk]:
        chunks, first = [], 0
        while first < len(self.contexts):
            keys = int(self.contexts[first])
            room = ELEMENT_BUDGET // keys  # elements per key
            tiles = max(1, room // (self.width * pair_cost + key_cost))
            # A lone tile may be cut further, but not so far that fetching its keys outweighs using them.
            width = self.width if tiles > 1 else min(self.width, max(1, room // pair_cost, key_cost // pair_cost))
            last = min(first + tiles, len(self.contexts))
            chunks += [self._chunk(slice(first, last), at, min(at + width, self.width)) for at in range(0, self.width, width)]
            first = last
        return chunks

    def _chunk(self, tiles: slice, start: int, stop: int) -> Chunk:
        token = self.token[tiles, start:stop].reshape(-1)
        exists = np.arange(start, stop)[None, :] < self.real[tiles, None]
        stored = None
        if not exists.all():
            index = upload(torch.from_numpy(np.flatnonzero(exists)), token.device)
            stored = (index, token.index_select(0, index))
        keys = int(self.contexts[tiles.start])
        limit, context = self.limit[tiles, start:stop], self.context[tiles]
        return Chunk(self.pages, self.latents, self.request[tiles], tiles, token, limit, context, keys, stored)
