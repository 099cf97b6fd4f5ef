"""Which latent rows every token of the fused path attends, and in which pool they lie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .batch import AttentionBatch
from .beside import IN_ORDER
from .kv.cache import LayerCache
from .residency import POOL_ROWS, Copies, Ways, fetch, gather, resolve, seed
from .tiles import PageView, Spans

if TYPE_CHECKING:
    from .ops import AttentionOps


_BESIDE_FROM = 8  # tokens of a step; with fewer, a fetch takes less than what it costs to run it beside other work


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Keys that a layer chose, or that an earlier one passed on."""

    positions: torch.Tensor | None  # int32 [T, k], ascending, -1 at the end; None where rows do
    rows: torch.Tensor | None  # int32 [T, k], their rows by the latent table; None where that was not computed
    scores: torch.Tensor | None = None  # fp32 [T, >= context], index scores behind the choice, for hot buffers that go by them

    def without_scores(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions and rows."""
        assert self.positions is not None and self.rows is not None
        return self.positions, self.rows


@dataclass(frozen=True, kw_only=True)
class Keys:
    """The keys of a step in one layer."""

    pool: torch.Tensor  # latent rows as kernels take them
    pages: PageView  # the requests' pages in ``pool``, for steps that attend every visible key
    rows: torch.Tensor | None  # int32 [T, k], -1: no key; None: every visible key
    copies: tuple[Copies, ...] = ()  # what is being fetched beside other work, until the join

    def spans(self, spans: Spans) -> torch.Tensor:
        """Rows int64 [sum of contexts] of all keys of a group of requests."""
        return spans.rows if self.pages.table is spans.pages.table else spans.rows_by(self.pages)


def keys_by_pages(batch: AttentionBatch, cache: LayerCache) -> Keys:
    """Every visible key, all on the device."""
    return Keys(pool=cache.latent.pool, pages=batch.latents, rows=None)


def unfolded(ops: AttentionOps, batch: AttentionBatch, cache: LayerCache) -> Keys:
    """Every visible key, some in absent pages: every context is copied into a pool of this step's, page by page."""
    starts, counts, size = batch.starts, batch.counts, batch.page_size
    assert starts is not None and counts is not None, "a static step over every key has all its pages on the device"
    pools, tables, first = [], [], 0
    for request, context in enumerate((starts + counts).tolist()):
        every = torch.arange(context, dtype=torch.int32, device=batch.positions.device)[None]
        pool, rows = gather(ops, every, batch, cache, request, context) if counts[request] else (cache.latent.bytes[:0], every[:, :0])
        n_pages = -(-rows.shape[1] // size)
        whole = pool.new_zeros(n_pages * size, pool.shape[1])
        whole[: rows.shape[1]] = pool.index_select(0, rows[0])
        pools.append(whole)
        width = batch.latent_table.shape[1]
        tables.append((first + torch.arange(width, dtype=torch.int32, device=pool.device)).clamp(max=max(first + n_pages - 1, 0)))
        first += n_pages
    joined = torch.cat(pools)
    return Keys(pool=_like(cache, joined), pages=PageView(torch.stack(tables), size), rows=None)


def find(ops: AttentionOps, choice: Choice, batch: AttentionBatch, cache: LayerCache) -> Keys:
    """The chosen keys; where ``copies`` are left, they are under way: ``ops.beside.join`` comes before the rows are read."""
    if not batch.offloaded:
        assert choice.rows is not None
        return Keys(pool=cache.latent.pool, pages=batch.latents, rows=choice.rows)
    positions = choice.positions
    assert positions is not None
    if batch.counts is None:
        rows, copies = resolve(ops, positions, batch, cache, None, choice.scores)
        return Keys(pool=cache.latent.pool, pages=batch.latents, rows=rows, copies=_start(ops, copies, batch, cache))
    return _find_mixed(ops, choice, positions, batch, cache)


def _find_mixed(ops: AttentionOps, choice: Choice, positions: torch.Tensor, batch: AttentionBatch, cache: LayerCache) -> Keys:
    """``find`` for a step of prompts and single tokens."""
    ways = batch.once("ways", lambda: Ways.of(batch, together=True))
    gathered = [gather(ops, positions[part.tokens], batch, cache, part.request, part.context) for part in ways.gathered]
    seed(ops, positions, batch, cache)  # before rows resolve: what it puts into a hot buffer replaces all
    rows = _by_table(positions, batch) if choice.rows is None else choice.rows
    copies: tuple[Copies, ...] = ()
    if len(ways.resolving):
        tokens = ways.resolving_tokens
        scores = None if choice.scores is None else choice.scores.index_select(0, tokens)
        found, needed = resolve(ops, positions.index_select(0, tokens), batch, cache, ways.resolving, scores)
        rows, copies = rows.index_copy(0, tokens, found), _start(ops, needed, batch, cache)
    if not gathered:
        return Keys(pool=cache.latent.pool, pages=batch.latents, rows=rows, copies=copies)
    if copies:
        ops.beside.join()
    return _joined(ways, gathered, rows, batch, cache)


def _joined(
    ways: Ways, gathered: list[tuple[torch.Tensor, torch.Tensor]], rows: torch.Tensor, batch: AttentionBatch, cache: LayerCache
) -> Keys:
    """All keys in one pool of this step's: those of the gathered requests, then copies of the single tokens' rows.

    One pool is one call of the attention kernel, with the shapes it has when every page is on the device: the same bits.
    """
    single = rows.index_select(0, ways.in_pool)
    copied = cache.latent.bytes.index_select(0, single.clamp(min=0).view(-1))
    pools, rows, first = [pool for pool, _ in gathered], rows.clone(), 0
    for part, (pool, mine) in zip(ways.gathered, gathered, strict=True):
        rows[part.tokens] = torch.where(mine < 0, -1, mine + first)
        first += len(pool)
    if len(single):
        numbers = torch.arange(first, first + single.numel(), dtype=torch.int32, device=rows.device).view(single.shape)
        rows.index_copy_(0, ways.in_pool, torch.where(single < 0, -1, numbers))
        pools.append(copied)
    short = -sum(len(pool) for pool in pools) % POOL_ROWS
    if short:
        pools.append(copied.new_zeros(short, cache.latent.bytes.shape[1]))
    joined = pools[0] if len(pools) == 1 else torch.cat(pools)
    return Keys(pool=_like(cache, joined), pages=batch.latents, rows=rows)


def overlaps(ops: AttentionOps, batch: AttentionBatch) -> bool:
    """Whether fetches of a step like this one run beside the queries' products. Whether it is offloaded plays no part: a step's
    products are cut in one way or the other, which may change their last bit.
    """
    return batch.tier is not None and ops.beside is not IN_ORDER and batch.n_tokens >= _BESIDE_FROM


def _start(ops: AttentionOps, copies: Copies, batch: AttentionBatch, cache: LayerCache) -> tuple[Copies, ...]:
    """Fetch, and what to keep until the join if that is beside other work."""
    if not overlaps(ops, batch):
        fetch(ops, copies, cache)
        return ()
    with ops.beside.fork():
        fetch(ops, copies, cache)
    return (copies,)


def _by_table(positions: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
    """Rows int32 of ``positions`` int32 [T, k] by the latent table; anything for absent pages."""
    there, size = positions.clamp(min=0).long(), batch.page_size
    page = batch.latent_table.index_select(0, batch.token_row).gather(1, there // size)
    return torch.where(positions < 0, -1, page * size + (there % size).int())


def _like(cache: LayerCache, rows: torch.Tensor) -> torch.Tensor:
    """Bytes of rows, uint8 [N, row bytes], as kernels take the layer's pool."""
    return rows.view(cache.latent.pool.dtype)
