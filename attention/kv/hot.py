"""Memory of the hot buffers and of the tables of pages: what is allocated and how many bytes that takes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..kernels.resolve_rows_sizes import scratch_words, whole_rows
from ..kernels.tier_most import MOST_HOT_ROWS, MOST_REQUESTS
from .tier import NOWHERE, HotBuffer, TierCounter, TierTables

_INT = 4  # bytes of the int32 that nearly everything here is


@dataclass(frozen=True, kw_only=True)
class HotShape:
    """What the memory of hot buffers and page tables follows from.

    Raises:
        ValueError: no slots, layers or pages; a lease smaller than what one step may choose for a request; more rows or requests than
            the kernels count.
    """

    n_slots: int  # requests that can hold device tables
    n_layers: int  # of this rank
    lease_pages: int  # H, most device pages leased to a slot
    page_size: int
    n_logical_pages: int
    max_requests: int  # most requests of one decode step, padding included
    max_context: int  # longest request, tokens
    chosen_rows: int  # most rows that one step chooses for one request: query rows x index_topk
    usual_pages: int = 0  # device pages of most leases, which are the first pages of their slots; 0: lease_pages

    def __post_init__(self) -> None:
        for name in ("n_slots", "n_layers", "lease_pages", "page_size", "n_logical_pages", "max_requests", "max_context", "chosen_rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"hot buffers need {name} of at least 1, got {getattr(self, name)}")
        if not 0 <= self.usual_pages <= self.lease_pages:
            raise ValueError(f"hot buffers of {self.lease_pages} pages cannot usually have {self.usual_pages}; use 0 to {self.lease_pages}")
        if self.usual_rows < self.chosen_rows:
            needed = -(-self.chosen_rows // self.page_size)
            raise ValueError(
                f"a hot buffer of {self.usual_rows} rows ({self.usual_rows // self.page_size} pages of {self.page_size}) cannot hold the "
                f"{self.chosen_rows} rows that a step may choose for a request; give it at least {needed} pages"
            )
        if self.hot_rows > MOST_HOT_ROWS:
            most = MOST_HOT_ROWS // self.page_size
            raise ValueError(
                f"kv_hot_slots: a hot buffer has at most {MOST_HOT_ROWS} rows, got {self.hot_rows} ({self.lease_pages} pages of "
                f"{self.page_size}); use at most {most * self.page_size}"
            )
        if self.max_requests > MOST_REQUESTS:
            raise ValueError(
                f"max_num_seqs: with kv_offload rows are fetched for at most {MOST_REQUESTS} requests in a step, got {self.max_requests}; "
                f"use at most {MOST_REQUESTS}, and more replicas (data_parallel_size) for more requests"
            )

    @property
    def hot_rows(self) -> int:
        """B, hot rows of a full lease in one layer."""
        return self.lease_pages * self.page_size

    @property
    def usual_rows(self) -> int:
        """Hot rows of most leases in one layer."""
        return (self.usual_pages or self.lease_pages) * self.page_size

    @property
    def context_rows(self) -> int:
        """Positions of the longest request in whole pages."""
        return -(-self.max_context // self.page_size) * self.page_size

    @property
    def scratch_rows(self) -> int:
        """Times ``context_rows`` words that the kernels need: one for ``seed_hot``, more where ``resolve_rows`` has long contexts."""
        chosen, whole = 1 << (self.chosen_rows - 1).bit_length(), whole_rows(self.usual_rows, self.hot_rows, self.page_size)
        return max(1, -(-scratch_words(self.max_requests, self.context_rows, chosen, whole) // self.context_rows))


@dataclass(frozen=True, kw_only=True)
class HotState:
    """The hot buffers of all layers of a rank, and their counters."""

    positions: torch.Tensor  # int32 [L, n_slots + 1, H * page_size], -1: nothing
    stamps: torch.Tensor  # int32 [L, n_slots + 1, H * page_size]
    counters: torch.Tensor  # int64 [L, len(TierCounter)]

    def layer(self, number: int) -> HotBuffer:
        """Views of one layer's part."""
        return HotBuffer(positions=self.positions[number], stamps=self.stamps[number])

    @property
    def n_bytes(self) -> int:
        """Memory of the tensors."""
        return self.positions.nbytes + self.stamps.nbytes + self.counters.nbytes


def hot_state_bytes(shape: HotShape) -> int:
    """Bytes of ``allocate_hot_state``."""
    return shape.n_layers * ((shape.n_slots + 1) * shape.hot_rows * 2 * _INT + len(TierCounter) * 8)


def table_bytes(shape: HotShape) -> int:
    """Bytes of ``allocate_tables``."""
    pages, slots = shape.n_logical_pages + 1, shape.n_slots + 1
    return _INT * (2 * pages + slots * shape.lease_pages + 1 + shape.scratch_rows * shape.context_rows) + slots


def allocate_hot_state(shape: HotShape, device: torch.device | str) -> HotState:
    """Empty hot buffers."""
    size = (shape.n_layers, shape.n_slots + 1, shape.hot_rows)
    return HotState(
        positions=torch.full(size, NOWHERE, dtype=torch.int32, device=device),
        stamps=torch.zeros(size, dtype=torch.int32, device=device),
        counters=torch.zeros((shape.n_layers, len(TierCounter)), dtype=torch.int64, device=device),
    )


def allocate_tables(shape: HotShape, device: torch.device | str, *, dummy_device_page: int) -> TierTables:
    """Tables that say: no page is anywhere but the dummy logical page, the last, which is at ``dummy_device_page``; no lease."""

    def nowhere(*size: int) -> torch.Tensor:
        return torch.full(size, NOWHERE, dtype=torch.int32, device=device)

    device_page = nowhere(shape.n_logical_pages + 1)
    device_page[-1] = dummy_device_page
    return TierTables(
        device_page=device_page,
        host_page=nowhere(shape.n_logical_pages + 1),
        hot_pages=nowhere(shape.n_slots + 1, shape.lease_pages),
        moving=torch.zeros(shape.n_slots + 1, dtype=torch.int8, device=device),
        stamp=torch.zeros(1, dtype=torch.int32, device=device),
        scratch=torch.empty(shape.scratch_rows, shape.context_rows, dtype=torch.int32, device=device),
        usual_rows=shape.usual_rows,
    )


def table_tensors(tables: TierTables) -> tuple[torch.Tensor, ...]:
    """Every tensor of ``tables``, for sums of their bytes."""
    return tables.device_page, tables.host_page, tables.hot_pages, tables.moving, tables.stamp, tables.scratch
