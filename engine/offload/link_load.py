"""What fetching missing rows puts on the link between host and device: arithmetic on rates of misses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

#: shares of chosen rows that may be missing: hot buffers of 4, 2 and 1 times the chosen rows on traces with locality, and hard cases
MISS_RATES = (0.067, 0.134, 0.30, 0.50, 0.65)


@dataclass(frozen=True, kw_only=True)
class LinkLoad:
    """One rate of misses on one rank."""

    miss_rate: float  # share of the chosen rows that are fetched
    rows: float  # fetched by one token in one layer
    bytes_per_token: float  # over all layers of the rank
    tokens_per_s: float  # at which the link of the rank is full


def link_loads(
    *, layers: int, topk: int, row_bytes: int, link_bytes_per_s: float, context: int, miss_rates: Sequence[float] = MISS_RATES
) -> list[LinkLoad]:
    """Loads of a rank with ``layers`` layers whose tokens choose ``topk`` rows of ``row_bytes`` each.

    ``context`` keys or less than ``topk`` are never offloaded: nothing is fetched, and there is nothing to list.
    """
    if context <= topk:
        return []
    loads = []
    for rate in miss_rates:
        fetched = rate * topk * layers * row_bytes
        loads.append(LinkLoad(miss_rate=rate, rows=rate * topk, bytes_per_token=fetched, tokens_per_s=link_bytes_per_s / fetched))
    return loads
