"""The paged cache of one pipeline stage: latent rows of every layer, index keys of the layers with an indexer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..config import MLAConfig
from .layout import check_layout, kv_bytes_per_token
from .rows import FloatRows, Fp8IndexRows, Fp8LatentRows, RowStore, page_ids

__all__ = ["KVCache", "LayerCache", "kv_bytes_per_token"]

_FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class LayerCache:
    """One layer's rows, addressed by ``page * page_size + offset``."""

    latent: RowStore  # rows [kv_lora_rank normed latent | rope_dim rotated key]
    index: RowStore | None  # rows [index_head_dim]; None for a layer without an indexer
    rotate_index: bool  # index queries and keys go through the Hadamard transform (FP8 keys)


class KVCache:
    """``n_pages`` pages of ``page_size`` tokens in every layer, and page ``n_pages``, the dummy, for rows nobody wants."""

    def __init__(
        self,
        config: MLAConfig,
        layer_has_indexer: Sequence[bool],
        n_pages: int,
        page_size: int,
        dtype: str,
        compute_dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        """Allocate the pools.

        ``dtype`` is the storage format (float32, bfloat16, fp8); rows are read as ``compute_dtype``, index keys always as fp32.

        Raises:
            ValueError: unknown dtype or widths it cannot hold; a layer asked to have an indexer the model lacks; no pages.
        """
        check_layout(config, dtype)
        if n_pages < 1:
            raise ValueError(f"a KV cache needs at least one page, got {n_pages}; give it more memory or a smaller page size")
        if page_size < 1 or page_size & (page_size - 1):
            raise ValueError(f"page size must be a power of two, got {page_size}; use 1, 2, 4 .. 256")
        if any(layer_has_indexer) and config.indexer is None:
            raise ValueError("layers with an indexer were asked for, but the model's attention configuration has none")
        self.n_pages, self.page_size, self.dtype, self.device = n_pages, page_size, dtype, torch.device(device)
        self.bytes_per_token = kv_bytes_per_token(config, layer_has_indexer, dtype)
        self.layers = [self._layer(config, has, compute_dtype) for has in layer_has_indexer]

    @property
    def dummy_page(self) -> int:
        """The page for rows nobody reads; it is no part of ``n_pages``."""
        return self.n_pages

    @property
    def n_bytes(self) -> int:
        """Memory of all pools, the dummy page included."""
        return sum(layer.latent.n_bytes + (layer.index.n_bytes if layer.index else 0) for layer in self.layers)

    def poison(self, pages: Sequence[int] | np.ndarray | torch.Tensor) -> None:
        """Fill ``pages`` with NaN in every layer, so that a read of a freed page shows."""
        where = page_ids(pages, self.device)
        for layer in self.layers:
            layer.latent.poison(where)
            if layer.index is not None:
                layer.index.poison(where)

    def _layer(self, config: MLAConfig, has_indexer: bool, compute_dtype: torch.dtype) -> LayerCache:
        total, size, device = self.n_pages + 1, self.page_size, self.device
        fp8 = self.dtype == "fp8"
        latent: RowStore
        if fp8:
            latent = Fp8LatentRows(total, size, config.kv_lora_rank, config.rope_dim, compute_dtype, device)
        else:
            latent = FloatRows(total, size, config.latent_dim, _FLOATS[self.dtype], compute_dtype, device)
        index: RowStore | None = None
        if has_indexer and config.indexer is not None:
            width = config.indexer.head_dim
            if fp8:
                index = Fp8IndexRows(total, size, width, torch.float32, device)
            else:
                index = FloatRows(total, size, width, _FLOATS[self.dtype], torch.float32, device)
        return LayerCache(latent=latent, index=index, rotate_index=fp8)
