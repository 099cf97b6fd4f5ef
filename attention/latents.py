"""Latent rows as the torch path reads them: by pages, or found for one layer where some pages are not on the device."""

from __future__ import annotations

import torch

from .batch import AttentionBatch
from .kv.cache import LayerCache
from .residency import TierOps, Ways, fetch, gather, resolve, seed
from .tiles import Chunk, Spans, TileGroup


class Latents:
    """Rows that lie where the batch's page table says."""

    def __init__(self, batch: AttentionBatch, cache: LayerCache) -> None:
        self.batch, self.cache = batch, cache

    def of_chunk(self, chunk: Chunk) -> torch.Tensor:
        """Values [n, keys, W] of a chunk's keys."""
        return self.cache.latent.read(chunk.latent_rows)

    def of_spans(self, spans: Spans) -> torch.Tensor:
        """Values [sum of contexts, W] of all keys of a group."""
        return self.cache.latent.read(spans.rows)

    def chosen(self, group: TileGroup, here: slice, topk: torch.Tensor) -> torch.Tensor:
        """Values [m, k, W] of the keys at ``topk`` [m, k] of the group's tokens ``here``; for -1 the first key once more."""
        positions = torch.where(topk < 0, topk[:, :1], topk) if group.fewest_keys < topk.shape[1] else topk
        return self.cache.latent.read(self.batch.rows(group.pick(self.batch.token_row)[here], positions))


class FoundLatents(Latents):
    """Rows of one layer that may be in device pages, hot rows, or gathered beside the pool, behind which they are counted."""

    def __init__(self, batch: AttentionBatch, cache: LayerCache, topk: torch.Tensor | None, ops: TierOps) -> None:
        """Find the rows of the chosen positions ``topk`` int64 [T, k] (-1: none; None: every visible key) and fetch what is missing."""
        super().__init__(batch, cache)
        ways = batch.once(("ways", topk is None), lambda: Ways.of(batch, resolve=topk is not None))
        every = torch.arange(batch.n_requests, device=batch.positions.device)
        self.table = batch.latents.rows(every, batch.all_positions())  # [R, max_context], below 0: not on the device
        self.pools = [cache.latent.bytes]
        for part in ways.gathered:
            if topk is None:
                chosen = torch.arange(part.context, dtype=torch.int32, device=every.device)[None]
            else:
                chosen = topk[part.tokens].int()
            pool, rows = gather(ops, chosen, batch, cache, part.request, part.context)
            exists = chosen >= 0
            self.table[part.request, chosen[exists].long()] = rows[exists].long() + sum(len(pool) for pool in self.pools)
            self.pools.append(pool)
        self.rows: torch.Tensor | None = None  # [T, k] of the chosen positions
        if topk is not None:
            seed(ops, topk.int(), batch, cache)  # first: what it puts into a hot buffer replaces all
            self.rows = torch.where(topk < 0, -1, self.table.index_select(0, batch.token_row).gather(1, topk.clamp(min=0)))
            if len(ways.resolving):
                mine = topk.index_select(0, ways.resolving_tokens).int()
                found, copies = resolve(ops, mine, batch, cache, ways.resolving)
                fetch(ops, copies, cache)
                self.rows.index_copy_(0, ways.resolving_tokens, found.long())

    def of_chunk(self, chunk: Chunk) -> torch.Tensor:
        """Values [n, keys, W] of a chunk's keys."""
        return self._read(self.table.index_select(0, chunk.request).gather(1, chunk.key_positions))

    def of_spans(self, spans: Spans) -> torch.Tensor:
        """Values [sum of contexts, W] of all keys of a group; anything for those that were not chosen."""
        return self._read(self.table[spans.keys])

    def chosen(self, group: TileGroup, here: slice, topk: torch.Tensor) -> torch.Tensor:
        """Values [m, k, W] of the keys at ``topk`` [m, k] of the group's tokens ``here``; for -1 the first key once more."""
        assert self.rows is not None
        rows = group.pick(self.rows)[here]
        return self._read(torch.where(topk < 0, rows[:, :1], rows))

    def _read(self, rows: torch.Tensor) -> torch.Tensor:
        """Values [..., W] of rows [...] int64, counted through all pools."""
        flat, first = rows.reshape(-1), 0
        taken: torch.Tensor | None = None
        for pool in self.pools:
            here = pool.index_select(0, (flat - first).clamp(0, len(pool) - 1))
            taken = here if taken is None else torch.where((flat >= first)[:, None], here, taken)
            first += len(pool)
        assert taken is not None
        values = self.cache.latent.decode(taken)
        return values.view(*rows.shape, values.shape[1])
