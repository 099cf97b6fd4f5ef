"""A host pool's pages as the checksums read them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ..ids import HostPage

if TYPE_CHECKING:
    from ..host.pool import HostPool


class HostPoolBytes:
    """``PageBytes`` of a ``HostPool``: latent rows without the padding of their pitch, then index keys, layer by layer.

    Not to be used after the pool is closed.
    """

    def __init__(self, pool: HostPool) -> None:
        size = pool.layout.page_size
        self._planes: list[npt.NDArray[np.uint8]] = []
        for index in range(pool.n_layers):
            layer = pool.layer(index)
            rows = layer.bytes.view(pool.n_pages, size, layer.pitch).numpy()
            self._planes.append(rows[:, :, : layer.row_bytes])
            if layer.index_pages.shape[1]:
                self._planes.append(layer.index_pages.numpy())

    def page_views(self, page: HostPage) -> list[memoryview]:
        """Bytes of ``page`` in every plane, no copy; not contiguous where rows are padded."""
        return [plane[page].data for plane in self._planes]
