"""Where latent rows are when they are not all on the device: tables of pages, hot rows, and a layer's share of the host pool."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from ...parallel.backends import kernels_or_twin

NOWHERE = -1  # a page or row that is not there


class TierCounter(IntEnum):
    """Places in ``LayerTier.counters``: chosen rows by where they were found, and what that cost."""

    RESIDENT = 0  # in a page on the device
    HITS = 1  # in the request's hot buffer
    MISSES = 2  # fetched from the host pool
    MOVED = 3  # copied from a page on the device into the hot buffer, ahead of the page's drop
    EVICTIONS = 4  # hot rows that gave way to others
    UNWRITTEN = 5  # in no page on the device and in no finished host page: a fault
    BYTES = 6  # fetched from the host pool


class HostRows(Protocol):
    """One layer's part of the host pool: rows of ``pitch`` bytes, of which the first ``row_bytes`` hold a latent row."""

    row_bytes: int
    pitch: int
    n_rows: int

    @property
    def bytes(self) -> torch.Tensor:
        """uint8 [n_rows, pitch] on the host, for the plain twins."""

    def data_ptr(self) -> int:
        """Address that the device reads; the host's own where there is no device."""


@dataclass(frozen=True, kw_only=True)
class TierTables:
    """Where the pages of one rank are; shared by its layers, on the device."""

    device_page: torch.Tensor  # int32 [n_logical + 1], device page of a logical page; the last one is the dummy's
    host_page: torch.Tensor  # int32 [n_logical + 1], host page with a finished copy
    hot_pages: torch.Tensor  # int32 [n_slots + 1, H], device pages leased to a slot, -1 past them; the last row belongs to padding
    moving: torch.Tensor  # int8 [n_slots + 1], 1: resident rows go into the hot buffer, their pages will be dropped
    stamp: torch.Tensor  # int32 [1], number of the step, rising
    scratch: torch.Tensor  # int32 [n, longest context], any content; memory of the kernels, of no layer's own
    usual_rows: int | None = None  # hot rows of most leases, None: of all; ``usual`` of ``resolve_rows``
    scored: bool = False  # hot rows with the lowest index scores of the step give way first, not the oldest
    window: int = 32  # last tokens of a prompt whose choices a hot buffer begins with

    def step(
        self,
        page_table: torch.Tensor,
        slots: torch.Tensor,
        *,
        page_size: int,
        offloaded: bool,
        positions: torch.Tensor | None = None,
        absent: NDArray[np.bool_] | None = None,
        leased: NDArray[np.bool_] | None = None,
        seeded: tuple[int, ...] = (),
    ) -> TierStep:
        """Where the pages of a step's requests are now; on the device, without waiting for it.

        ``page_table`` [R, P] int32 and ``slots`` [R] int64 are those of the step, ``positions`` [R] int64 those of its tokens if every
        request has one; the others are fields of ``TierStep``.
        """
        places = _kernels(page_table.is_cuda).page_places(
            self.device_page, self.host_page, self.moving, page_table, slots, positions, page_size=page_size, everywhere=offloaded
        )
        return TierStep(
            latent_table=places.latent_table,
            host_table=places.host_table,
            moving=places.moving,
            write_rows=places.write_rows,
            slots=slots,
            tables=self,
            offloaded=offloaded,
            absent=absent,
            leased=leased,
            seeded=seeded,
        )


@dataclass(frozen=True, kw_only=True)
class HotBuffer:
    """Rows of one layer that each request slot keeps on the device."""

    positions: torch.Tensor  # int32 [n_slots + 1, H * page_size], position held by each hot row, -1: nothing
    stamps: torch.Tensor  # int32 [n_slots + 1, H * page_size], last step that used it


@dataclass(frozen=True, kw_only=True)
class LayerTier:
    """What one layer's attention needs beside its pool."""

    host: HostRows
    hot: HotBuffer
    counters: torch.Tensor  # int64 [len(TierCounter)]


@dataclass(frozen=True, kw_only=True)
class TierStep:
    """Where the pages of one step's requests are; the same for every layer. ``TierTables.step`` makes it.

    Without ``offloaded`` every page of every request is on the device and nothing moves. With it, a static batch resolves all
    its rows, so that each of its requests with an absent page needs a hot lease; a batch with host-known lengths resolves the
    requests of one token that are leased, gathers the rows of others that have absent pages, and reads the rest directly.
    """

    latent_table: torch.Tensor  # int32 [R, P], device page of every page of a request, -1: absent
    host_table: torch.Tensor | None  # int32 [R, P], host page, -1: none; None unless offloaded
    moving: torch.Tensor | None  # int8 [R]; None unless offloaded
    write_rows: torch.Tensor | None  # int64 [R], latent row of every request's token; None unless each has one
    slots: torch.Tensor  # int64 [R], request slots
    tables: TierTables
    offloaded: bool  # some request has an absent page or is moving; the host knows
    absent: NDArray[np.bool_] | None = None  # [R] on the host: a page of the request is not on the device; None in a static batch
    leased: NDArray[np.bool_] | None = None  # [R] on the host: the request has hot pages; None in a static batch
    seeded: tuple[int, ...] = ()  # leased requests whose prompt ends with this step: their hot buffers begin with its choices


@lru_cache(maxsize=2)
def _kernels(cuda: bool) -> Any:
    """The module with ``page_places``: a kernel on CUDA where Triton is installed."""
    return kernels_or_twin("..kernels.page_places", __package__, cuda=cuda)
