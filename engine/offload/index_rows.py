"""Pages of index keys as rows, so that what copies latent rows copies them too."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...attention.kernels.mirror_pages_torch import PoolPairs, pool_pairs
from ...attention.kv.cache import KVCache
from ...attention.kv.host.pool import HostLayer


class IndexRows:
    """One layer's pages of index keys in the host pool, a row each: ``HostRows`` of ``attention.kv.tier``."""

    dtype = torch.uint8  # for kernels, which take anything with data_ptr() and dtype

    def __init__(self, layer: HostLayer) -> None:
        self.row_bytes = self.pitch = layer.index_page_bytes
        self.n_rows = layer.n_pages
        self._layer = layer

    @property
    def bytes(self) -> torch.Tensor:
        """uint8 [n_pages, bytes of a page]."""
        return self._layer.index_pages

    def data_ptr(self) -> int:
        """Address of page 0."""
        return self._layer.index_data_ptr()


def index_pairs(cache: KVCache, layers: Sequence[HostLayer]) -> PoolPairs:
    """Index keys of all layers that have some, on the device by logical page and on the host by host page; rows are whole pages.

    ``layers``: those of the host pool that belong to the layers of ``cache``.

    Raises:
        ValueError: the host pool has no room for them, or pages of another size.
    """
    places = [place for place, layer in enumerate(cache.layers) if layer.index is not None]
    pools = []
    for place in places:
        index = cache.layers[place].index
        assert index is not None
        pools.append(index.pool.reshape(-1).view(torch.uint8).view(cache.n_pages + 1, -1))
    return pool_pairs(pools, [IndexRows(layers[place]) for place in places])
