"""Bytes of the cache's parts, from sizes alone: what is planned is what ``KVCache`` allocates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..config import MLAConfig
from .hot import HotShape, hot_state_bytes, table_bytes
from .layout import check_layout, index_row_bytes, latent_row_bytes


@dataclass(frozen=True, kw_only=True)
class TierShape:
    """Sizes of a cache whose latent rows need not all be on the device."""

    n_device_pages: int  # latent pages on the device, leased ones included; the dummy is one more
    hot: HotShape  # of the hot buffers, and of the tables
    scored: bool = True  # see ``TierTables``

    def check(self, *, n_layers: int, n_pages: int, page_size: int) -> None:
        """Refuse sizes that are not those of the cache.

        Raises:
            ValueError: naming the size, what was found and what would be valid.
        """
        if self.n_device_pages < 1:
            raise ValueError(f"an offloaded KV cache needs at least one latent page on the device, got {self.n_device_pages}")
        expected = {"n_layers": n_layers, "n_logical_pages": n_pages, "page_size": page_size}
        found = {name: getattr(self.hot, name) for name in expected}
        if found != expected:
            raise ValueError(f"the hot buffers' shape says {found}, the cache has {expected}; make both from the same settings")


@dataclass(frozen=True, kw_only=True)
class KVBytes:
    """Device bytes of a cache by part."""

    latent: int  # latent pools, dummy page included
    index: int  # index keys, dummy page included
    hot: int  # what the hot rows hold and when they were used, and the counters; the rows are latent pages
    tables: int  # where pages are, leases, and scratch

    @property
    def total(self) -> int:
        """All of it."""
        return self.latent + self.index + self.hot + self.tables


def kv_bytes(
    config: MLAConfig,
    layer_has_indexer: Sequence[bool],
    dtype: str,
    *,
    n_pages: int,
    page_size: int,
    tiers: TierShape | None = None,
    index_dtype: str | None = None,
) -> KVBytes:
    """Device bytes of a cache of ``n_pages`` logical pages, all of them resident or as ``tiers`` says.

    ``index_dtype`` of index keys is ``dtype`` by default.

    Raises:
        ValueError: a dtype is unknown, or the widths do not fit its format.
    """
    check_layout(config, dtype, index_dtype)
    resident = n_pages if tiers is None else tiers.n_device_pages
    return KVBytes(
        latent=len(layer_has_indexer) * (resident + 1) * page_size * latent_row_bytes(config, dtype),
        index=sum(layer_has_indexer) * (n_pages + 1) * page_size * index_row_bytes(config, index_dtype or dtype),
        hot=0 if tiers is None else hot_state_bytes(tiers.hot),
        tables=0 if tiers is None else table_bytes(tiers.hot),
    )
