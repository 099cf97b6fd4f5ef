"""The host pool: every layer's latent rows in one piece of host memory that the device can read."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from .backing import Backing
from .layout import HostLayout, pool_bytes
from .region import Region
from .register import register, unregister
from .throttle import Throttle
from .touch import fill

_POISON = 0xFF  # floats of all formats made of this byte are NaN


class HostLayer:
    """One layer's rows: ``HostRows`` of ``attention.kv.tier``."""

    dtype = torch.uint8  # for kernels, which take anything with data_ptr() and dtype

    def __init__(self, region: Region, offset: int, layout: HostLayout, index_offset: int, index_page_bytes: int) -> None:
        self.row_bytes, self.pitch, self.n_rows = layout.row_bytes, layout.pitch, layout.n_rows
        self.n_pages, self.index_page_bytes = layout.n_pages, index_page_bytes
        self._region, self._offset, self._index_offset = region, offset, index_offset
        self._bytes = region.tensor[offset : offset + self.n_rows * self.pitch].view(self.n_rows, self.pitch)

    @property
    def bytes(self) -> torch.Tensor:
        """uint8 [n_rows, pitch] over the pool, no copy; not to be used after the pool is closed."""
        self._region.check_open()
        return self._bytes

    @property
    def index_pages(self) -> torch.Tensor:
        """uint8 [n_pages, index_page_bytes] over the pool, no copy; no columns for a layer without index keys."""
        size = self.n_pages * self.index_page_bytes
        return self._region.tensor[self._index_offset :][:size].view(self.n_pages, self.index_page_bytes)

    def data_ptr(self) -> int:
        """Address of row 0, the same on host and device."""
        return self._region.address + self._offset

    def index_data_ptr(self) -> int:
        """Address of index-key page 0."""
        return self._region.address + self._index_offset


class HostPool:
    """``layers`` x ``n_pages`` x ``page_size`` rows of ``row_bytes`` on a ``backing``; see ``HostLayout`` for the order.

    New memory is zero. With a CUDA ``device`` all of it is registered, so that kernels read it at its own address.
    It is closed by ``close``, by a ``with`` block, when nothing refers to its memory any more, or when the process ends.
    """

    def __init__(
        self,
        layers: int,
        n_pages: int,
        page_size: int,
        row_bytes: int,
        backing: Backing,
        *,
        pitch: int = 0,
        index_page_bytes: Sequence[int] = (),
        model: str = "",
        device: torch.device | str = "cpu",
        checked: bool = False,
    ) -> None:
        """Make the pool, or join it where the backing is shared.

        ``index_page_bytes``: of each layer, 0 for one without. ``model``: fingerprint of whatever decides what a row holds.
        ``checked``: ``backing.check`` was called, by all ranks of the host before any of them comes here.

        Raises:
            ValueError: wrong sizes; a backing that cannot give the memory; CUDA refused to register it. Nothing stays allocated.
        """
        self.layout = HostLayout(
            n_layers=layers,
            n_pages=n_pages,
            page_size=page_size,
            row_bytes=row_bytes,
            pitch=pitch,
            index_page_bytes=tuple(index_page_bytes),
        )
        self.kind, self.device = backing.kind, torch.device(device)
        self.n_bytes = pool_bytes(self.layout, backing.kind)
        if not checked:
            backing.check(self.layout)
        opened = backing.open(self.layout, model)
        assert opened.region.n_bytes == self.n_bytes, f"planned {self.n_bytes} bytes, mapped {opened.region.n_bytes}"
        self.about, self.found, self.identity = opened.about, opened.found, opened.identity
        self.throttle: Throttle | None = getattr(backing, "throttle", None)
        self._region, self._start = opened.region, opened.offset
        registered: list[int] = []
        self._region.before_end.append(partial(unregister, registered))
        if self.device.type == "cuda":
            try:
                registered += register(opened.region.address + opened.offset, self.layout.offsets, self.device)
            except BaseException:
                self.close()
                raise
        self._layers = [self._layer(index) for index in range(layers)]

    def _layer(self, index: int) -> HostLayer:
        layout = self.layout
        size = layout.index_page_bytes[index] if layout.index_page_bytes else 0
        return HostLayer(self._region, self._start + layout.offsets[index], layout, self._start + layout.index_offset(index), size)

    @property
    def n_layers(self) -> int:
        """Layers."""
        return self.layout.n_layers

    @property
    def n_pages(self) -> int:
        """Pages of every layer."""
        return self.layout.n_pages

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._region.closed

    def layer(self, index: int) -> HostLayer:
        """Rows of layer ``index`` (of this pool: a stage counts its own)."""
        return self._layers[index]

    def poison(self, pages: Sequence[int] | None = None) -> None:
        """Fill ``pages``, or everything, with 0xFF, so that reading what was not written shows."""
        if pages is None:
            fill(self._region, self._start, self.layout.offsets[-1], _POISON)
            return
        where = torch.as_tensor(list(pages), dtype=torch.int64)
        for layer in self._layers:
            layer.bytes.view(self.n_pages, -1).index_fill_(0, where, _POISON)
            layer.index_pages.index_fill_(0, where, _POISON)

    def close(self) -> None:
        """Unregister and give the memory back; the device must have finished with it. A second call does nothing."""
        self._region.close()

    def __enter__(self) -> HostPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
