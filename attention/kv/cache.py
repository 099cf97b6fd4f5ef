"""The paged cache of one pipeline stage: latent rows of every layer, index keys of the layers with an indexer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from ..config import MLAConfig
from .hot import HotState, allocate_hot_state, allocate_tables, table_tensors
from .layout import check_layout, kv_bytes_per_token, latent_row_bytes
from .rows import FloatRows, Fp4IndexRows, Fp8IndexRows, Fp8LatentRows, LatentStore, RowStore, page_ids
from .sizes import TierShape
from .tier import HostRows, LayerTier, TierTables

__all__ = ["KVCache", "LayerCache", "kv_bytes_per_token"]

_FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16}
#: index keys in pages of values, then scales
_CODED: dict[str, type[Fp8IndexRows] | type[Fp4IndexRows]] = {"fp8": Fp8IndexRows, "fp4": Fp4IndexRows}
_Pages = Sequence[int] | np.ndarray | torch.Tensor


@dataclass(frozen=True, kw_only=True)
class LayerCache:
    """One layer's rows, addressed by ``page * page_size + offset``."""

    latent: LatentStore  # rows [kv_lora_rank normed latent | rope_dim rotated key], in device pages
    index: RowStore | None  # rows [index_head_dim], in logical pages; None for a layer without an indexer
    rotate_index: bool  # index queries and keys go through the Hadamard transform, queries are FP8 (FP8 and FP4 keys)
    tier: LayerTier | None = None  # None: every latent page is on the device, under its logical number


class KVCache:
    """``n_pages`` pages of ``page_size`` tokens in every layer, and page ``n_pages``, the dummy, for rows nobody wants.

    With ``tiers`` these are logical pages, by which index keys are addressed; the latent pools have ``tiers.n_device_pages`` and
    their own dummy, and ``tables`` says which logical page is where.
    """

    def __init__(
        self,
        config: MLAConfig,
        layer_has_indexer: Sequence[bool],
        n_pages: int,
        page_size: int,
        dtype: str,
        compute_dtype: torch.dtype,
        device: torch.device | str,
        *,
        tiers: TierShape | None = None,
        host: Sequence[HostRows] = (),
        index_dtype: str | None = None,
    ) -> None:
        """Allocate the pools.

        ``dtype`` is the storage format (float32, bfloat16, fp8), ``index_dtype`` that of index keys (fp4 too), ``dtype`` by default; rows
        are read as ``compute_dtype``, index keys always as fp32.
        ``host`` is each layer's part of the host pool, for ``tiers``.

        Raises:
            ValueError: an unknown dtype or widths it cannot hold; a layer asked to have an indexer the model lacks; no pages;
                sizes of tiers that cannot be, or host rows that do not fit the layers.
        """
        check_layout(config, dtype, index_dtype)
        if n_pages < 1:
            raise ValueError(f"a KV cache needs at least one page, got {n_pages}; give it more memory or a smaller page size")
        if page_size < 1 or page_size & (page_size - 1):
            raise ValueError(f"page size must be a power of two, got {page_size}; use 1, 2, 4 .. 256")
        if any(layer_has_indexer) and config.indexer is None:
            raise ValueError("layers with an indexer were asked for, but the model's attention configuration has none")
        self.n_pages, self.page_size, self.dtype, self.device = n_pages, page_size, dtype, torch.device(device)
        self.index_dtype = index_dtype or dtype
        self.bytes_per_token = kv_bytes_per_token(config, layer_has_indexer, dtype, index_dtype)
        self.n_device_pages = n_pages if tiers is None else tiers.n_device_pages
        self.tables: TierTables | None = None
        self.hot: HotState | None = None  # hot buffers and counters of all layers
        if tiers is not None:
            tiers.check(n_layers=len(layer_has_indexer), n_pages=n_pages, page_size=page_size)
            _check_host(host, len(layer_has_indexer), latent_row_bytes(config, dtype))
            tables = allocate_tables(tiers.hot, self.device, dummy_device_page=self.dummy_device_page)
            self.tables = replace(tables, scored=tiers.scored)
            self.hot = allocate_hot_state(tiers.hot, self.device)
        self.layers = [self._layer(config, has, compute_dtype, i, host) for i, has in enumerate(layer_has_indexer)]

    @property
    def dummy_page(self) -> int:
        """The logical page for rows nobody reads; it is no part of ``n_pages``."""
        return self.n_pages

    @property
    def dummy_device_page(self) -> int:
        """The latent page for rows nobody reads; the dummy page is there."""
        return self.n_device_pages

    @property
    def n_bytes(self) -> int:
        """Device memory of all pools, the dummy pages included, and of what tiers need beside them."""
        pools = sum(layer.latent.n_bytes + (layer.index.n_bytes if layer.index else 0) for layer in self.layers)
        if self.tables is None or self.hot is None:
            return pools
        return pools + self.hot.n_bytes + sum(table.nbytes for table in table_tensors(self.tables))

    def poison(self, pages: _Pages, device_pages: _Pages | None = None) -> None:
        """Fill pages with NaN in every layer, so that a read of a freed page shows.

        ``pages`` are logical: their index keys go, and without tiers their latent rows. ``device_pages`` are latent pages, for tiers.
        """
        where = page_ids(pages, self.device)
        latent = where if self.tables is None else page_ids(() if device_pages is None else device_pages, self.device)
        for layer in self.layers:
            layer.latent.poison(latent)
            if layer.index is not None:
                layer.index.poison(where)

    def _layer(self, config: MLAConfig, has_indexer: bool, compute_dtype: torch.dtype, place: int, host: Sequence[HostRows]) -> LayerCache:
        total, resident, size, device = self.n_pages + 1, self.n_device_pages + 1, self.page_size, self.device
        latent: LatentStore
        if self.dtype == "fp8":
            latent = Fp8LatentRows(resident, size, config.kv_lora_rank, config.rope_dim, compute_dtype, device)
        else:
            latent = FloatRows(resident, size, config.latent_dim, _FLOATS[self.dtype], compute_dtype, device)
        index: RowStore | None = None
        if has_indexer and config.indexer is not None:
            width = config.indexer.head_dim
            if self.index_dtype in _CODED:
                index = _CODED[self.index_dtype](total, size, width, torch.float32, device)
            else:
                index = FloatRows(total, size, width, _FLOATS[self.index_dtype], torch.float32, device)
        return LayerCache(latent=latent, index=index, rotate_index=self.index_dtype in _CODED, tier=self._tier(place, host))

    def _tier(self, place: int, host: Sequence[HostRows]) -> LayerTier | None:
        if self.hot is None:
            return None
        return LayerTier(host=host[place], hot=self.hot.layer(place), counters=self.hot.counters[place])


def _check_host(host: Sequence[HostRows], layers: int, row_bytes: int) -> None:
    """Refuse host rows that are not those of the layers.

    Raises:
        ValueError: naming what was found and what is needed.
    """
    if len(host) != layers:
        raise ValueError(f"an offloaded KV cache of {layers} layers needs host rows for each of them, got {len(host)}")
    for rows in host:
        if rows.row_bytes != row_bytes or rows.pitch < row_bytes:
            found = f"got rows of {rows.row_bytes} bytes in a pitch of {rows.pitch}"
            raise ValueError(
                f"host rows must hold the layers' latent rows of {row_bytes} bytes, {found}; make the host pool for this model"
            )
