"""What ``resolve_rows.resolve_rows`` computes, in plain PyTorch: one request at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from ..kv.tier import NOWHERE, TierCounter
from .resolve_rows_sizes import whole_rows, window_start

#: what makes a hot row the next to give way: the step that last used it, or the index score that this step gives its position
Policy = Literal["lru", "score"]
POLICIES: tuple[Policy, ...] = ("lru", "score")

LEVELS = 27  # that scores are told apart by where victims are sought; three rounds of thirds find one
LEAST_SPAN = 1e-30  # scores closer together than this are equal

_EMPTY = -1  # key of a hot row that holds nothing: goes first


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """Where the chosen rows are, and what has to be copied before they can be read."""

    rows: torch.Tensor  # int32 [T, k], rows of the device pool, -1 where there is no position
    source: torch.Tensor  # int32 [R, q * k], >= 0: row of the host pool; <= -2: device row -(source + 2); undefined from count on
    target: torch.Tensor  # int32 [R, q * k], device row that the copy goes to; undefined from count on
    count: torch.Tensor  # int32 [R], copies of each request


def resolve_rows(
    positions: torch.Tensor,
    latent_table: torch.Tensor,
    host_table: torch.Tensor,
    moving: torch.Tensor,
    slots: torch.Tensor,
    hot_pages: torch.Tensor,
    hot_positions: torch.Tensor,
    hot_stamps: torch.Tensor,
    stamp: torch.Tensor,
    scratch: torch.Tensor,
    counters: torch.Tensor,
    *,
    page_size: int,
    row_bytes: int,
    n_valid: torch.Tensor | None = None,
    scores: torch.Tensor | None = None,
    policy: Policy = "lru",
    usual: int | None = None,
) -> Resolved:
    """Find every chosen row in a page on the device or in the request's hot buffer; give the missing ones a hot row.

    The ``q`` rows of positions of a request are resolved together: a position that several of them miss is fetched once, and
    no hot row that this step uses gives way. A page that is on the device is read there, unless its request is moving and the
    page has a finished host copy: then its rows go into the hot buffer too, from the device. Victims are the leased hot rows
    that hold nothing, then those with the lowest key, the lowest hot row first among equals. The key is the stamp ("lru"), or
    the score that this step gives the position, in ``LEVELS`` levels ("score"). The n-th missing position, ascending,
    takes the n-th victim, in order of hot rows.

    Args:
        positions: int32 [R * q, k], ascending, -1 for none; -1 anywhere and repeated positions are tolerated.
        latent_table: int32 [R, P], device page of each page of a request, -1 absent.
        host_table: int32 [R, P], host page, -1 for one without a finished copy.
        moving: int8 or bool [R].
        slots: int64 [R], request slots, no two equal among the requests that exist.
        hot_pages: int32 [S + 1, H], device pages leased to a slot, -1 none; hot row b is row b % page_size of page b // page_size.
        hot_positions: int32 [S + 1, H * page_size], position that a hot row holds, -1 nothing. Updated.
        hot_stamps: int32 [S + 1, H * page_size], last step that used a hot row. Updated.
        stamp: int32 [1], number of this step, higher than in any earlier call for the layer.
        scratch: int32, any content; for kernels that need some.
        counters: int64 [len(TierCounter)], added to. A position that repeats a missing one counts as a hit.
        page_size: rows a page.
        row_bytes: bytes of a row, for the counter.
        n_valid: int32 [1], rows of ``positions`` that exist, the later ones are padding; None: all.
        scores: fp32 [R * q, >= any position + 1], index scores of this step; ``policy`` "score" reads the last row of each request.
        policy: one of ``POLICIES``.
        usual: hot rows of most leases, at least ``q * k``; all leases are the first pages of their slots then. Of one with more than
            the next power of two, victims are sought in a window of as many rows as ``q * k``, or the next power of two, in its order;
            it goes around the lease, a window further in every step. None: all leases are searched whole.

    A hot row of a page on the device that is not moving is left alone. A position in no page on the device and in no finished host
    page, or one for which no hot row is left, is a fault: it counts as unwritten and its row is -1. That no hot row is left cannot
    happen where a lease has at least ``q * k`` rows.

    Raises:
        ValueError: policy "score" without scores.
    """
    if policy == "score" and scores is None:
        raise ValueError('policy "score" was asked for without scores; pass the index scores of this step or use policy "lru"')
    requests, k = len(slots), positions.shape[1]
    per_request = len(positions) // max(requests, 1) * k
    entries = positions.reshape(requests, per_request)
    rows = torch.full_like(entries, NOWHERE)
    source, target = torch.full_like(entries, NOWHERE), torch.full_like(entries, NOWHERE)
    count = torch.zeros(requests, dtype=torch.int32, device=positions.device)
    valid = len(positions) if n_valid is None else int(n_valid)
    for r in range(requests):
        if r * (per_request // max(k, 1)) >= valid:
            break
        slot = int(slots[r])
        row = None if scores is None or policy == "lru" else scores[(r + 1) * (per_request // k) - 1]
        pages = hot_pages[slot].repeat_interleave(page_size)
        window = _window(pages, int(stamp), whole_rows(usual, len(pages), page_size), 1 << (per_request - 1).bit_length())
        hot = _HotRows(pages, hot_positions[slot], hot_stamps[slot], int(stamp), page_size, row, window)
        found = _resolve_one(entries[r], latent_table[r], host_table[r], bool(moving[r]), hot, page_size)
        rows[r], n = found.rows, len(found.source)
        source[r, :n], target[r, :n], count[r] = found.source, found.target, n
        counters += torch.tensor([*found.counts, found.counts[TierCounter.MISSES] * row_bytes], device=counters.device)
    return Resolved(rows=rows.view_as(positions), source=source, target=target, count=count)


def score_levels(x: torch.Tensor, free: torch.Tensor) -> torch.Tensor:
    """int32 levels 0 to ``LEVELS - 1`` of fp32 scores, linear between the lowest and the highest finite one that is ``free``.

    NaN and -inf are at level 0, inf at the highest.
    """
    finite = free & x.isfinite()
    if not finite.any():
        return torch.where(x == float("inf"), LEVELS - 1, 0).int()
    low, high = x[finite].min(), x[finite].max()
    span = high - low
    wide = finite & (span >= LEAST_SPAN) & (span < float("inf"))
    level = (torch.where(wide, x - low, 0.0) * torch.full_like(span, LEVELS - 1.0).div(span)).int()
    return torch.where(wide, level, torch.where(x == float("inf"), LEVELS - 1, 0)).int()


def _window(pages: torch.Tensor, step: int, whole: int, window: int) -> torch.Tensor:
    """Hot rows of ``pages`` [B] among which victims are sought: all of up to ``whole`` leased ones, else ``window`` of them."""
    leased, every = int((pages >= 0).sum()), torch.arange(len(pages), device=pages.device)
    return every if leased <= whole else (every[:window] + window_start(step, leased, window)) % leased


@dataclass(frozen=True)
class _HotRows:
    """The hot buffer of one slot in one layer, views of it."""

    pages: torch.Tensor  # int32 [B], device page of each hot row, -1 not leased
    positions: torch.Tensor  # int32 [B]
    stamps: torch.Tensor  # int32 [B]
    stamp: int
    page_size: int
    scores: torch.Tensor | None  # fp32 of every position; None: victims go by their stamps
    window: torch.Tensor  # int64 [n], hot rows among which victims are sought

    def find(self, wanted: torch.Tensor) -> torch.Tensor:
        """Hot row of each position of ``wanted`` [n], -1 where none holds it."""
        same = (self.positions[None, :] == wanted[:, None]) & (self.pages >= 0)[None, :] & (wanted >= 0)[:, None]
        return torch.where(same.any(1), same.int().argmax(1), NOWHERE)

    def row(self, hot: torch.Tensor) -> torch.Tensor:
        """Device row of hot rows, int32."""
        return self.pages[hot] * self.page_size + (hot % self.page_size).int()

    def victims(self, n: int, hits: torch.Tensor) -> torch.Tensor:
        """Up to ``n`` hot rows to give way, none of the ``hits``, in order of the window."""
        empty = self.positions < 0
        free = self.pages >= 0
        free[hits] = False
        free &= torch.zeros_like(free).index_fill(0, self.window, True)
        keys = torch.where(empty, _EMPTY, self._keys(free & ~empty))[self.window]
        order = keys.argsort(stable=True)
        return self.window[order[free[self.window[order]]][:n].sort().values]

    def _keys(self, free: torch.Tensor) -> torch.Tensor:
        """int32 [B] keys, of which those that are ``free`` matter."""
        if self.scores is None:
            return self.stamps.clamp(max=self.stamp)
        scored = (self.positions >= 0) & (self.positions < len(self.scores))
        x = self.scores[self.positions.clamp(0, len(self.scores) - 1).long()]
        return score_levels(torch.where(scored, x, float("-inf")), free)


@dataclass(frozen=True)
class _Found:
    rows: torch.Tensor
    source: torch.Tensor
    target: torch.Tensor
    counts: tuple[int, ...]  # all of TierCounter but BYTES


def _resolve_one(p: torch.Tensor, latent: torch.Tensor, host: torch.Tensor, moving: bool, hot: _HotRows, page_size: int) -> _Found:
    """Resolve the positions ``p`` [q * k] of one request; its hot buffer is updated."""
    exists = p >= 0
    page, offset = p.clamp(min=0).long() // page_size, p.clamp(min=0) % page_size
    device_page, host_page = latent[page], host[page]
    resident = exists & (device_page >= 0) & ~((host_page >= 0) & moving)
    held = hot.find(torch.where(resident, NOWHERE, p))
    hit = held >= 0
    rows = torch.where(resident, device_page * page_size + offset, NOWHERE)
    rows[hit] = hot.row(held[hit])
    hot.stamps[held[hit]] = hot.stamp

    missing = exists & ~resident & ~hit
    fetchable = missing & ((device_page >= 0) | (host_page >= 0))
    new = p[fetchable].unique()  # ascending
    victims = hot.victims(len(new), held[hit])
    new = new[: len(victims)]  # fewer only where a lease is too small
    evicted = int((hot.positions[victims] >= 0).sum())
    hot.positions[victims], hot.stamps[victims] = new, hot.stamp
    at = hot.find(torch.where(fetchable, p, NOWHERE))
    rows[at >= 0] = hot.row(at[at >= 0])

    page, offset = new.long() // page_size, new % page_size
    moved = latent[page] >= 0
    source = torch.where(moved, -(latent[page] * page_size + offset) - 2, host[page] * page_size + offset)
    unwritten, n_moved = int((missing & (at < 0)).sum()), int(moved.sum())
    hits = int(exists.sum()) - int(resident.sum()) - len(new) - unwritten
    counts = (int(resident.sum()), hits, len(new) - n_moved, n_moved, evicted, unwritten)
    return _Found(rows, source, hot.row(victims), counts)
