"""Pools, page tables and hot buffers of the attention rig."""

from __future__ import annotations

import torch
from torch import nn

from ....attention.kv.host.pinned import PinnedBacking
from ....attention.kv.host.pool import HostPool
from ....attention.kv.layout import encode_latent
from ....attention.kv.tier import NOWHERE, TierCounter
from .shape import RigShape


class RigMemory:
    """Every layer's rows in host memory, whole contexts on the device beside them, and a hot buffer for each request.

    A device pool holds hot pages, then the pages of resident contexts, then a page for each request's newest rows. Where the
    contexts do not fit, requests share pages: which rows are read is the same, how much memory there is is not.
    """

    def __init__(self, shape: RigShape, device: torch.device, host: HostPool | None = None) -> None:
        """Allocate and fill; ``host``: a pool of ``host_pool`` for a shape with the same layers, rows and page contents.

        Raises:
            ValueError: the machine has too little memory.
        """
        self.shape, self.device = shape, device
        self._own_host = host is None
        self.host = host_pool(shape, device) if host is None else host
        self.pools = self._device_pools()
        self._make_tables()
        requests = shape.requests
        size = (shape.layers, requests + 1, shape.hot_rows)
        self.hot_positions = torch.full(size, NOWHERE, dtype=torch.int32, device=device)
        self.hot_stamps = torch.zeros(size, dtype=torch.int32, device=device)
        self.counters = torch.zeros(shape.layers, len(TierCounter), dtype=torch.int64, device=device)
        self.stamp = torch.zeros(1, dtype=torch.int32, device=device)
        self.scratch = torch.zeros(requests, shape.context, dtype=torch.int32, device=device)
        self.moving = torch.zeros(requests, dtype=torch.int8, device=device)
        self.slots = torch.arange(requests, device=device)
        _synchronise(device)

    def _device_pools(self) -> list[torch.Tensor]:
        """uint8 [rows, bytes of a row] of every layer."""
        shape, content = self.shape, page_contents(self.shape, self.device)
        hot, resident, requests = shape.requests * shape.hot_pages, shape.resident_pages, shape.requests
        pools = []
        for _ in range(shape.layers):
            pages = torch.zeros(hot + resident + requests, content.shape[1], dtype=torch.uint8, device=self.device)
            _fill(pages[hot : hot + resident], content)
            pages[hot + resident :] = content[(shape.pages - 1) % len(content)]
            pools.append(pages.view(-1, shape.row_bytes))
        return pools

    def _make_tables(self) -> None:
        """Contexts lie in one piece each, spread over the pools."""
        shape, device = self.shape, self.device
        hot, resident, requests = shape.requests * shape.hot_pages, shape.resident_pages, shape.requests
        request, page = torch.arange(requests, device=device)[:, None], torch.arange(shape.pages, device=device)
        apart = max(shape.pages, self.host.n_pages // requests // shape.distinct_pages * shape.distinct_pages)
        self.host_table = ((request * apart + page) % self.host.n_pages).int()
        self.resident_table = ((request * shape.pages + page) % resident + hot).int()
        self.latent_table = torch.full_like(self.host_table, NOWHERE)
        self.latent_table[:, -1] = torch.arange(hot + resident, hot + resident + requests, device=device)  # never only on the host
        self.hot_table = torch.full((requests + 1, shape.hot_pages), NOWHERE, dtype=torch.int32, device=device)
        self.hot_table[:requests] = torch.arange(hot, device=device, dtype=torch.int32).view(requests, -1)

    def empty_hot_buffers(self) -> None:
        """Forget what is hot, and what was counted."""
        self.hot_positions.fill_(NOWHERE)
        self.hot_stamps.zero_()
        self.counters.zero_()

    def close(self) -> None:
        """Give the memory back."""
        _synchronise(self.device)
        self.pools.clear()
        if self._own_host:
            self.host.close()


def host_pool(shape: RigShape, device: torch.device) -> HostPool:
    """A host pool with the rows of every layer, filled.

    Raises:
        ValueError: the machine has too little memory.
    """
    pool = HostPool(shape.layers, shape.host_pages, shape.page_size, shape.row_bytes, PinnedBacking(), device=device)
    content = page_contents(shape, device)
    room = pool.layer(0).pitch - shape.row_bytes
    padded = nn.functional.pad(content.view(-1, shape.row_bytes), (0, room)).view(len(content), -1)
    for layer in range(shape.layers):
        _fill(pool.layer(layer).bytes.view(pool.n_pages, -1), padded)
    _synchronise(device)
    return pool


class SharedHost:
    """One host pool for several shapes; made anew only for a shape that it does not suit."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._made: tuple[RigShape, HostPool] | None = None

    def pool(self, shape: RigShape) -> HostPool:
        """A filled pool for ``shape``. ValueError: the machine has too little memory."""
        if self._made is None or _sort(self._made[0]) != _sort(shape):
            self.close()
            self._made = shape, host_pool(shape, self._device)
        return self._made[1]

    def close(self) -> None:
        """Give the memory back."""
        if self._made is not None:
            self._made[1].close()
            self._made = None

    def __enter__(self) -> SharedHost:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _sort(shape: RigShape) -> tuple[int, ...]:
    return shape.layers, shape.page_size, shape.row_bytes, shape.host_bytes, shape.distinct_pages


def page_contents(shape: RigShape, device: torch.device) -> torch.Tensor:
    """uint8 [distinct pages, bytes of a page] of random rows."""
    draw = torch.Generator(device).manual_seed(0)
    values = torch.randn(shape.distinct_pages * shape.page_size, shape.latent + shape.rope, device=device, generator=draw)
    return encode_latent(values, shape.latent).view(shape.distinct_pages, -1)


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _fill(pages: torch.Tensor, content: torch.Tensor) -> None:
    """Write ``content`` [m, bytes] over and over into ``pages`` [n, bytes], n a multiple of m, on the device or on the host."""
    for start in range(0, len(pages), len(content)):
        pages[start : start + len(content)].copy_(content[: len(pages) - start], non_blocking=True)
