"""One replica's pages of a host pool that several replicas share."""

from __future__ import annotations

import torch

from ...attention.kv.tier import HostRows


class HostPart:
    """Pages ``first .. first + n_pages - 1`` of one layer, counted from 0: ``HostRows`` of ``attention.kv.tier``."""

    dtype = torch.uint8  # for kernels, which take anything with data_ptr() and dtype

    def __init__(self, rows: HostRows, first: int, n_pages: int, page_size: int) -> None:
        self.row_bytes, self.pitch, self.n_rows = rows.row_bytes, rows.pitch, n_pages * page_size
        self._rows, self._start = rows, first * page_size

    @property
    def bytes(self) -> torch.Tensor:
        """uint8 [n_rows, pitch]."""
        return self._rows.bytes[self._start : self._start + self.n_rows]

    def data_ptr(self) -> int:
        """Address of row 0."""
        return self._rows.data_ptr() + self._start * self.pitch
