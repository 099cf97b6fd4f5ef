"""A host pool's pages as the checksums read them."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ..ids import HostPage

if TYPE_CHECKING:
    from ..host.pool import HostPool


class HostPoolBytes:
    """``PageBytes`` of a ``HostPool``: latent rows without the padding of their pitch, then index keys, layer by layer.

    They are gathered first: Python lets other threads go on during copies and during checksums of large pieces, but not
    during checksums of many small ones. Not to be used after the pool is closed.
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
        self._ends = np.cumsum([plane[0].size for plane in self._planes]).tolist()
        self._gathered = threading.local()  # memory of a thread for one page

    def page_views(self, page: HostPage) -> list[memoryview]:
        """Two halves of the bytes of ``page`` in all planes; good until the same thread asks for another page."""
        bytes_ = self._memory()
        start = 0
        for plane, end in zip(self._planes, self._ends, strict=True):
            np.copyto(bytes_[start:end].reshape(plane.shape[1:]), plane[page])
            start = end
        half = start // 2
        return [bytes_[:half].data, bytes_[half:].data]

    def _memory(self) -> npt.NDArray[np.uint8]:
        found: npt.NDArray[np.uint8] | None = getattr(self._gathered, "bytes", None)
        if found is None:
            found = self._gathered.bytes = np.empty(self._ends[-1], dtype=np.uint8)
        return found
