"""The kernel of ``resolve_rows``: one program a request, all scattered accesses in shared memory.

The chosen positions that may be in the hot buffer form a set, one bit each, so that the number of a position among them is a
count of bits. Every hot row looks its own position up: a hit writes the hot row at the position's number. Numbers that nobody
wrote to are missing; the n-th of them takes the n-th victim, and every entry reads at its position's number what became of it.
Positions that are chosen several times, by one row or by several, have one number and are fetched once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...parallel.kernels.overlap import enter
from ..kv.tier import TierCounter
from .resolve_rows_sizes import CAPACITY, CELLS, WINDOW_TURN, totals_bytes
from .resolve_rows_sums import clear_cells, combine, ranks, result
from .resolve_rows_tables import add_to_set, get_short, get_word, group_size, look_up, put_short, put_word, shared_base
from .resolve_rows_victims import victims_of

_COUNTERS = tl.constexpr(len(TierCounter))
assert list(TierCounter) == list(range(7))  # the order in which ``_count`` adds
_CAPACITY, _CELLS = tl.constexpr(str(CAPACITY)), tl.constexpr(CELLS)
_TURN = tl.constexpr(WINDOW_TURN)
_totals_bytes = triton.constexpr_function(totals_bytes)


# no vectors: loads, gathers and scans of one layout need no exchange between threads
@triton.jit(
    do_not_specialize=["n_groups", "scores_width"],
    do_not_specialize_on_alignment=["positions", "hot_pages", "hot_positions", "hot_stamps", "rows"],
)
def resolve_rows_kernel(
    positions, latent_table, latent_stride, host_table, host_stride, moving, slots, hot_pages, hot_positions, hot_stamps, stamp,
    tables, tables_stride, n_groups, n_valid, scores, scores_stride, scores_width, counters, row_bytes, rows, source, target, count,
    wanted, CHOSEN: tl.constexpr, QUERIES: tl.constexpr, HOT: tl.constexpr, PAGE: tl.constexpr, BY_SCORE: tl.constexpr,
    N: tl.constexpr, B: tl.constexpr, PAGES: tl.constexpr, GROUPS: tl.constexpr, CHUNK: tl.constexpr, SHARED: tl.constexpr,
    LIST: tl.constexpr, THREADS: tl.constexpr, FAST: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (R). ``CHOSEN`` entries a request in ``QUERIES`` rows, ``HOT`` hot rows of at most ``PAGES`` pages a slot.

    ``N`` is the power of two above ``CHOSEN``, ``B`` that above the hot rows of most leases. Victims are sought among all rows of
    these, of a larger lease in a window of ``N``. Positions are below ``64 * n_groups``; ``CHUNK`` groups are counted at a time. The
    tables are ``SHARED``, then there is room for ``GROUPS``, or in global memory; the list of missing positions (``LIST``) too.
    ``FAST``: sums and ranks through shared memory.
    """
    enter(EARLY)
    request = tl.program_id(0).to(tl.int64)
    entry = tl.arange(0, N)
    inside = entry < CHOSEN
    slot = tl.load(slots + request)
    now = tl.load(stamp)
    moves = tl.load(moving + request) != 0
    p = tl.load(positions + request * CHOSEN + entry, mask=inside, other=-1)
    if n_valid is not None:  # padding chooses nothing
        p = tl.where(tl.program_id(0) * QUERIES < tl.load(n_valid), p, -1)
    hot_pages += slot * (HOT // PAGE)
    hot_positions += slot * HOT
    hot_stamps += slot * HOT
    rows += request * CHOSEN
    usual = True
    if HOT > B:
        usual = tl.load(hot_pages + B // PAGE) < 0  # leases are the first pages
    hot = tl.arange(0, B)
    leased, holds, age = _hot_rows(hot_pages, hot_positions, hot_stamps, hot, HOT, PAGE, BY_SCORE)
    some = p >= 0
    device_page = tl.load(latent_table + request * latent_stride + p // PAGE, mask=some, other=-1)
    host_page = tl.load(host_table + request * host_stride + p // PAGE, mask=some, other=-1)
    # tables
    if SHARED:
        bits = shared_base(_CAPACITY)
        ranked = bits + 8 * GROUPS
        cells = ranked + 2 * GROUPS
        totals = cells + 4 * _CELLS
        more_totals = totals + _totals_bytes(N)
        hot_totals = more_totals + _totals_bytes(CHUNK)
        places = hot_totals + _totals_bytes(B)
        missed = places + 4 * ((CHOSEN + 1) // 2)
    else:
        bits = tables + request * tables_stride
        ranked = bits + 2 * n_groups
        places = ranked + n_groups
        cells, totals, more_totals, hot_totals = 0, 0, 0, 0
    if not LIST:
        missed = wanted + request * CHOSEN
    for start in range(0, 2 * n_groups, 2 * CHUNK):
        word = start + tl.arange(0, 2 * CHUNK)
        put_word(bits, word, tl.zeros((2 * CHUNK,), tl.int32), word < 2 * n_groups, SHARED)
    put_short(places, entry, tl.full((N,), -1, tl.int32), inside, SHARED)
    clear_cells(cells, FAST)
    tl.debug_barrier()
    # where the pages are
    resident = (device_page >= 0) & ((host_page < 0) | ~moves)
    look = some & ~resident
    row = tl.where(resident, device_page * PAGE + p % PAGE, -1)
    at_source = tl.where(host_page >= 0, host_page * PAGE + p % PAGE, -1)  # -1: nowhere
    at_source = tl.where(device_page >= 0, -(device_page * PAGE + p % PAGE) - 2, at_source)
    tally = combine(look.to(tl.int32) + (some.to(tl.int32) << 16), cells, 0, "add", N, THREADS, FAST)
    nowhere = combine((look & (at_source == -1)).to(tl.int32), cells, 1, "add", N, THREADS, FAST)
    look = look & (at_source != -1)
    add_to_set(bits, p, look, SHARED)  # what is to be found in the hot buffer; a member's number is its rank
    tl.debug_barrier()
    tally = result(tally, cells, FAST)
    n_look, n_some = tally & 0xFFFF, tally >> 16
    if n_look == 0:
        tl.store(rows + entry, row, mask=inside)
        tl.store(count + request, 0)
        tl.atomic_add(counters, n_some.to(tl.int64), mask=n_some > 0, sem="relaxed")
    else:
        unwritten = result(nowhere, cells, FAST)
        n_members = 0 * n_look
        for start in range(0, n_groups, CHUNK):
            group = start + tl.arange(0, CHUNK)
            before, whole = ranks(group_size(bits, group, group < n_groups, SHARED), more_totals, CHUNK, THREADS, FAST)
            put_short(ranked, group, n_members + before, group < n_groups, SHARED)
            n_members += whole
            tl.debug_barrier()
        if usual:
            _settle(
                hot, leased, holds, age, now, now, p, look, at_source, row, request, now, n_look, n_some,
                n_members, unwritten, n_groups, hot_pages, hot_positions, hot_stamps, scores, scores_stride, scores_width, bits, ranked,
                cells, totals, hot_totals, places, missed, counters, row_bytes, rows, source, target, count, CHOSEN, QUERIES, PAGE,
                BY_SCORE, N, B, False, SHARED, LIST, THREADS, FAST,
            )  # fmt: skip
        else:
            page = tl.arange(0, PAGES)
            n_leased = tl.sum((tl.load(hot_pages + page, mask=page < HOT // PAGE, other=-1) >= 0).to(tl.int32), 0) * PAGE
            begin = (now & _TURN) * N % n_leased
            window = _around(begin + tl.arange(0, N), n_leased)
            some_leased, some_held, some_ages = _hot_rows(hot_pages, hot_positions, hot_stamps, window, HOT, PAGE, BY_SCORE)
            _settle(
                window, some_leased, some_held, some_ages, begin, n_leased, p, look, at_source, row, request, now, n_look, n_some,
                n_members, unwritten, n_groups, hot_pages, hot_positions, hot_stamps, scores, scores_stride, scores_width, bits, ranked,
                cells, totals, hot_totals, places, missed, counters, row_bytes, rows, source, target, count, CHOSEN, QUERIES, PAGE,
                BY_SCORE, N, N, True, SHARED, LIST, THREADS, FAST,
            )  # fmt: skip


@triton.jit
def _settle(
    hot, leased, holds, age, begin, n_leased, p, look, at_source, row, request, now, n_look, n_some, n_members, unwritten,
    n_groups, hot_pages, hot_positions, hot_stamps, scores, scores_stride, scores_width, bits, ranked, cells, totals, hot_totals,
    places, missed, counters, row_bytes, rows, source, target, count, CHOSEN: tl.constexpr, QUERIES: tl.constexpr, PAGE: tl.constexpr,
    BY_SCORE: tl.constexpr, N: tl.constexpr, W: tl.constexpr, REST: tl.constexpr, SHARED: tl.constexpr, LIST: tl.constexpr,
    THREADS: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Everything that is written of a request that looks for some rows in its hot buffer. Victims are sought in ``hot`` [W].

    ``leased``, ``holds`` and ``age`` are theirs. With ``REST`` hits are looked for in the others of ``n_leased`` hot rows too, to
    which ``hot`` belongs from ``begin`` on.
    """
    entry = tl.arange(0, N)
    inside = entry < CHOSEN
    held = leased & (holds >= 0) & (holds < 64 * n_groups)
    found = look_up(bits, holds, held, SHARED)
    hit = held & ((found & 1) != 0)
    full = leased & (holds >= 0) & ~hit
    empty = leased & (holds < 0)
    put_short(places, get_short(ranked, holds >> 6, hit, SHARED) + (found >> 1), hot, hit, SHARED)
    if REST:  # what is hot outside of the window
        for first in range(W, n_leased, W):
            other = first + tl.arange(0, W)
            inside_lease = other < n_leased
            other = _around(begin + other, n_leased)
            holds_too = tl.load(hot_positions + other, mask=inside_lease, other=-1)
            hit_too = (holds_too >= 0) & (holds_too < 64 * n_groups)
            found = look_up(bits, holds_too, hit_too, SHARED)
            hit_too = hit_too & ((found & 1) != 0)
            put_short(places, get_short(ranked, holds_too >> 6, hit_too, SHARED) + (found >> 1), other, hit_too, SHARED)
            tl.store(hot_stamps + other, tl.zeros((W,), tl.int32) + now, mask=hit_too)
    value = age
    if BY_SCORE:
        scores += (request * QUERIES + QUERIES - 1) * scores_stride
        value = tl.load(scores + holds, mask=full & (holds < scores_width), other=float("-inf"))
    number = get_short(ranked, p >> 6, look, SHARED) + (look_up(bits, p, look, SHARED) >> 1)
    tl.debug_barrier()
    # members that no hot row holds are numbered in turn: -2, -3 ..
    place = get_short(places, entry, entry < n_members, SHARED)
    missing = (entry < n_members) & (place < 0)
    before, n_missing = ranks(missing.to(tl.int32), totals, N, THREADS, FAST)
    put_short(places, entry, -2 - before, missing, SHARED)
    tl.debug_barrier()
    place = get_short(places, number, look, SHARED)
    touched = hit
    placed = 0 * n_missing
    moved = placed
    evicted = placed
    if n_missing > 0:
        target += request * CHOSEN
        number = -2 - place
        misses = look & (place < 0)
        put_word(missed, number, tl.where(at_source < 0, -1 - p, p), misses, LIST)
        tl.store(source + request * CHOSEN + number, at_source, mask=misses)
        victim, order, placed = victims_of(value, full, empty, now, n_missing, cells, hot_totals, BY_SCORE, W, THREADS, FAST)
        if not FAST:
            tl.debug_barrier()
        takes = get_word(missed, order, victim, LIST)
        from_device = takes < 0
        tally = (victim & from_device).to(tl.int32) + ((victim & full).to(tl.int32) << 16)
        tally = combine(tally, cells, 2, "add", W, THREADS, FAST)
        new_row = tl.load(hot_pages + hot // PAGE, mask=victim, other=0) * PAGE + hot % PAGE
        put_word(missed, order, hot, victim, LIST)
        tl.store(target + order, new_row, mask=victim)
        tl.store(hot_positions + hot, tl.where(from_device, -1 - takes, takes), mask=victim)
        touched = hit | victim
        tl.debug_barrier()
        tally = result(tally, cells, FAST)
        moved, evicted = tally & 0xFFFF, tally >> 16
        place = tl.where(misses, get_word(missed, number, misses & (number < placed), LIST), place)
        if placed < n_missing:
            place = tl.where(misses & (number >= placed), -1, place)
            unwritten += tl.sum((misses & (place < 0)).to(tl.int32), 0)
    found_hot = look & (place >= 0)
    new_page = tl.load(hot_pages + place // PAGE, mask=found_hot, other=0)
    row = tl.where(found_hot, new_page * PAGE + place % PAGE, row)
    tl.store(rows + entry, row, mask=inside)
    tl.store(count + request, placed)
    tl.store(hot_stamps + hot, tl.zeros((W,), tl.int32) + now, mask=touched)
    hits = n_look - placed - unwritten
    _count(counters, n_some - n_look, hits, placed - moved, moved, evicted, unwritten, row_bytes)


@triton.jit
def _hot_rows(hot_pages, hot_positions, hot_stamps, hot, HOT: tl.constexpr, PAGE: tl.constexpr, BY_SCORE: tl.constexpr):
    """Of the hot rows ``hot``: whether they are leased, what they hold, and without scores the steps that last used them."""
    leased = tl.load(hot_pages + hot // PAGE, mask=hot < HOT, other=-1) >= 0
    holds = tl.load(hot_positions + hot, mask=hot < HOT, other=-1)
    age = holds
    if not BY_SCORE:
        age = tl.load(hot_stamps + hot, mask=hot < HOT, other=0)
    return leased, holds, age


@triton.jit
def _around(hot, n_leased):
    """Hot rows past the lease are those from its beginning on."""
    return tl.where(hot >= n_leased, hot - n_leased, hot)


@triton.jit
def _count(counters, resident, hits, misses, moved, evicted, unwritten, row_bytes):
    """Add to every counter, in the order of ``TierCounter``. Integers: the order of programs changes nothing."""
    which = tl.arange(0, 8)
    more = tl.where(which == 0, resident, tl.where(which == 1, hits, tl.where(which == 2, misses, 0)))
    more = tl.where(which == 3, moved, tl.where(which == 4, evicted, tl.where(which == 5, unwritten, more))).to(tl.int64)
    more = tl.where(which == 6, misses.to(tl.int64) * row_bytes, more)
    tl.atomic_add(counters + which, more, mask=(which < _COUNTERS) & (more != 0), sem="relaxed")
