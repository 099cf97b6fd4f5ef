"""How large the tables are that ``resolve_rows`` keeps for each request, in shared memory where they fit."""

from __future__ import annotations

#: bytes of shared memory that the kernel declares: with what Triton adds (``shared`` of a report) no more than 48 KiB in all
CAPACITY = 46 * 1024
#: cells of a program that all its threads add up in: sums first, then minima, then maxima
SUM_CELLS, MIN_CELLS, MAX_CELLS = 60, 2, 2
CELLS = SUM_CELLS + MIN_CELLS + MAX_CELLS
#: groups of 64 positions counted at a time
CHUNK = 2048


#: the window in which victims of a large lease are sought goes by the last bits of the step's number
WINDOW_TURN = 0xFFFF


def whole_rows(usual: int | None, hot: int, page_size: int) -> int:
    """Most hot rows of leases that are searched whole: the power of two above those that most have, or above ``hot``."""
    return 1 << (max(page_size, hot if usual is None else min(usual, hot)) - 1).bit_length()


def window_start(step: int, leased: int, window: int) -> int:
    """First hot row of a step's window in a large lease; it goes around."""
    return (step & WINDOW_TURN) * window % leased


def totals_bytes(elements: int) -> int:
    """Bytes of a row of totals, one int32 for every 32 of ``elements``; what follows it stays aligned."""
    return max(elements // 8, 16)


def groups_of(context: int) -> int:
    """Groups of 64 positions in ``context``."""
    return -(-context // 64)


def shared_groups(chosen: int, hot: int) -> int:
    """Most groups for which the shared tables have room, beside lists of ``chosen`` entries and sums over them and ``hot`` rows.

    0 or less: not even the lists fit.
    """
    totals = totals_bytes(chosen) + totals_bytes(CHUNK) + totals_bytes(hot)
    beside = 4 * CELLS + totals + 2 * chosen + 4 + list_bytes(chosen)
    return (CAPACITY - beside) // 80 * 8


def list_bytes(chosen: int) -> int:
    """Bytes of the shared list of missing positions; a long one is better left in global memory."""
    return 4 * chosen if chosen <= 2048 else 0


def table_words(context: int, chosen: int) -> int:
    """int32 words that the tables of a request take in global memory."""
    return 3 * groups_of(context) + chosen


def scratch_words(requests: int, context: int, chosen: int, hot: int) -> int:
    """int32 words of scratch that ``resolve_rows`` needs for ``requests``; 0 where all its tables fit shared memory.

    ``chosen`` entries a request and ``hot`` rows a slot, both rounded up to powers of two.
    """
    return 0 if groups_of(context) <= shared_groups(chosen, hot) else requests * table_words(context, chosen)
