"""One step's ragged batch as attention sees it: flat tokens, their positions, and where their keys lie."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch

from .kv.tier import TierStep
from .tile_plan import plan_tiles
from .tiles import PageView, TileGroup, upload

_ROW_TABLE = 1 << 20  # largest table of (request, position) to cache row that is kept for a step
_V = TypeVar("_V")


@dataclass(frozen=True, kw_only=True)
class AttentionBatch:
    """R requests with T tokens in all. Token t of request r follows ``starts[r]`` cached keys; T and R may be 0."""

    positions: torch.Tensor  # [T] int64, position of every token in its request
    token_row: torch.Tensor  # [T] int64, request of every token
    query_start: torch.Tensor  # [R + 1] int64, first flat token of every request; in a static batch the requests of the tokens
    context_lens: torch.Tensor  # [R] int64, keys of every request once this batch is written
    write_rows: torch.Tensor  # [T] int64, flat index row of every token: page * page_size + offset
    latent_write_rows: torch.Tensor  # [T] int64, flat latent row of every token; ``write_rows`` itself without tiers
    page_table: torch.Tensor  # [R, P] int32, pages of every request in order of position; logical ones with tiers
    page_size: int  # rows a page
    max_context: int  # largest context length, 0 when R is 0
    max_query: int  # most tokens of one request, 0 when R is 0
    groups: tuple[TileGroup, ...]  # single-token requests first, then the others; empty groups left out; () in a static batch
    n_valid: torch.Tensor | None = None  # [1] int32, tokens that exist; later ones are padding. None: all of them
    tier: TierStep | None = None  # where latent pages are; None: all on the device, under the numbers of ``page_table``
    most_tokens: int | None = None  # bound of T over all replicas, the same number on all ranks; None: not known
    halves: tuple[AttentionBatch, AttentionBatch] | None = None  # the tokens in two batches to take turns; each has no halves
    starts: np.ndarray | None = None  # [R] keys before this step, on the host; None in a static batch
    counts: np.ndarray | None = None  # [R] tokens of this step, on the host; None in a static batch
    _memo: dict[Any, Any] = field(default_factory=dict)

    @property
    def n_tokens(self) -> int:
        """T."""
        return self.positions.shape[0]

    @property
    def n_requests(self) -> int:
        """R."""
        return self.context_lens.shape[0]

    @property
    def limit(self) -> torch.Tensor:
        """[T] int32, keys every token sees: its position + 1."""
        return self.once("limit", lambda: (self.positions + 1).int())

    @property
    def pages(self) -> PageView:
        """Page table and page size together, for index keys."""
        return PageView(self.page_table, self.page_size)

    @property
    def latent_table(self) -> torch.Tensor:
        """[R, P] int32, pages of the latent rows; with tiers some may be -1, absent."""
        return self.page_table if self.tier is None else self.tier.latent_table

    @property
    def offloaded(self) -> bool:
        """Whether latent rows have to be looked for: some request has an absent page, or one whose pages will be dropped."""
        return self.tier is not None and self.tier.offloaded

    @property
    def absent(self) -> bool:
        """Whether the host knows of a request with an absent page."""
        return self.offloaded and self.tier is not None and self.tier.absent is not None and bool(self.tier.absent.any())

    @property
    def last_scores(self) -> torch.Tensor | None:
        """What ``keep_scores`` kept in the last layer that called it."""
        return self._memo.get("scores")

    def keep_scores(self, scores: torch.Tensor | None) -> None:
        """Keep index scores for the layers that share the selection, where a hot buffer goes by them."""
        wanted = self.tier is not None and self.tier.offloaded and self.tier.tables.scored
        self._memo["scores"] = scores if wanted else None

    @property
    def latents(self) -> PageView:
        """Page table and page size together, for latent rows."""
        return PageView(self.latent_table, self.page_size)

    def rows(self, request: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Flat latent rows (int64, shape of ``positions`` [n, m]) of positions of ``request`` [n] int64."""
        if self.n_requests * self.max_context > _ROW_TABLE:
            return self.latents.rows(request, positions)
        every = torch.arange(self.n_requests, device=request.device)
        table = self.once("rows", lambda: self.latents.rows(every, self.all_positions()).reshape(-1))
        at = positions + request[:, None] * self.max_context
        return table.index_select(0, at.reshape(-1)).view(positions.shape)

    def all_positions(self) -> torch.Tensor:
        """0..max_context - 1 for every request, clamped to its context: [R, max_context] int64."""
        every = torch.arange(self.max_context, device=self.context_lens.device)
        return torch.minimum(every, (self.context_lens[:, None] - 1).clamp_min(0))

    def once(self, key: Any, make: Callable[[], _V]) -> _V:
        """``make()``, computed for the first layer that asks under ``key`` and kept for the others."""
        if key not in self._memo:
            self._memo[key] = make()
        value: _V = self._memo[key]
        return value

    @classmethod
    def static(
        cls,
        positions: torch.Tensor,
        token_row: torch.Tensor,
        page_table: torch.Tensor,
        page_size: int,
        *,
        max_context: int,
        max_query: int = 1,
        n_valid: torch.Tensor | None = None,
        ends: torch.Tensor | None = None,
        write_rows: torch.Tensor | None = None,
        tier: TierStep | None = None,
        most_tokens: int | None = None,
    ) -> AttentionBatch:
        """A batch whose shapes say nothing of its contents, for captured graphs; only the Triton path takes it.

        ``positions`` [T] int64 and ``token_row`` [T] int64 are on the device; ``max_context`` and ``max_query`` bound what they
        may come to hold. Tokens at or past ``n_valid`` [1] int32 are padding: their pages must be the dummy page.
        ``ends`` (position + 1) and ``write_rows`` [T] int64 are computed where they are not given.
        With an offloaded ``tier`` the tokens of a request stand together, as many for each, and every request with an absent
        page has a hot lease.
        """
        if write_rows is None:
            write_rows = _rows_of(page_table, token_row, positions, page_size)
        if tier is None:
            latent_rows = write_rows
        else:
            latent_rows = _rows_of(tier.latent_table, token_row, positions, page_size) if tier.write_rows is None else tier.write_rows
        return cls(
            positions=positions,
            token_row=token_row,
            query_start=token_row,  # of one-token requests; nothing on this path reads it
            context_lens=positions + 1 if ends is None else ends,
            write_rows=write_rows,
            latent_write_rows=latent_rows,
            page_table=page_table,
            page_size=page_size,
            max_context=max_context,
            max_query=max_query,
            groups=(),
            n_valid=n_valid,
            tier=tier,
            most_tokens=most_tokens,
        )

    @classmethod
    def build(
        cls,
        starts: np.ndarray,
        counts: np.ndarray,
        page_table: torch.Tensor,
        page_size: int,
        device: torch.device,
        tier: TierStep | None = None,
    ) -> AttentionBatch:
        """Batch of requests with ``starts`` [R] keys in the cache and ``counts`` [R] new tokens (0 allowed).

        ``page_table`` [R, P] int32 on ``device`` names the pages of at least ``starts + counts`` keys; entries past
        them are never read. Arithmetic is done on the host and uploaded in one copy. An offloaded ``tier`` says which requests
        have absent pages and which are leased; pages that get the new tokens are on the device.
        """
        starts, counts = np.asarray(starts, np.int64), np.asarray(counts, np.int64)
        assert starts.shape == counts.shape and page_table.shape[0] == len(starts), (starts.shape, counts.shape, page_table.shape)
        assert page_size > 0 and page_size & (page_size - 1) == 0, page_size
        ends = starts + counts
        max_context = int(ends.max(initial=0))
        assert max_context <= page_table.shape[1] * page_size, (max_context, page_table.shape, page_size)
        query_start = np.concatenate(([0], np.cumsum(counts)))
        token_row = np.repeat(np.arange(len(counts)), counts)
        positions = np.arange(query_start[-1]) - np.repeat(query_start[:-1] - starts, counts)
        kinds = [np.flatnonzero(counts == 1), np.flatnonzero(counts > 1)]
        plans = [plan_tiles(kind, starts, counts, query_start) for kind in kinds if len(kind)]
        arrays = [positions, token_row, query_start, ends, *(array for plan in plans for array in plan.arrays)]
        tensors = _upload(arrays, torch.device(device))
        pages = PageView(page_table, page_size)
        latents = pages if tier is None else PageView(tier.latent_table, page_size)
        groups = tuple(plan.group(pages, latents, tensors[4 + 7 * i : 11 + 7 * i]) for i, plan in enumerate(plans))
        where, row = tensors[0], tensors[1]
        write_rows = _rows_of(page_table, row, where, page_size)
        return cls(
            positions=where,
            token_row=row,
            query_start=tensors[2],
            context_lens=tensors[3],
            write_rows=write_rows,
            latent_write_rows=write_rows if tier is None else _rows_of(tier.latent_table, row, where, page_size),
            page_table=page_table,
            page_size=page_size,
            max_context=max_context,
            max_query=int(counts.max(initial=0)),
            groups=groups,
            tier=tier,
            starts=starts,
            counts=counts,
        )


def _rows_of(table: torch.Tensor, request: torch.Tensor, positions: torch.Tensor, page_size: int) -> torch.Tensor:
    """Flat rows [T] int64 of ``positions`` [T] of ``request`` [T], by the pages in ``table`` [R, P]."""
    if len(request) == 0:
        return request
    return table[request, positions // page_size].long() * page_size + positions % page_size


def _upload(arrays: list[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """The int64 arrays as tensors on ``device``, moved in one copy. Each begins on 16 bytes: others take kernels of their own."""
    sizes = [array.size + array.size % 2 for array in arrays]
    flat = np.zeros(sum(sizes), dtype=np.int64)
    for array, end, size in zip(arrays, np.cumsum(sizes), sizes, strict=True):
        flat[end - size : end - size + array.size] = array.reshape(-1)
    parts = torch.split(upload(torch.from_numpy(flat), device), sizes)
    return [part[: array.size].view(array.shape) for part, array in zip(parts, arrays, strict=True)]
