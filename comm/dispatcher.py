"""The protocol of expert-parallel dispatch and combine that every backend implements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch


@dataclass(frozen=True, kw_only=True)
class EPSpec:
    """Everything the ranks of an EP group must agree on; compared across ranks at setup."""

    n_ranks: int  # ranks in the EP group
    n_slots: int  # physical expert slots over all ranks
    hidden: int  # width of a token
    top_k: int  # expert choices per token
    max_tokens: int  # most tokens one rank dispatches in one call
    payload: str = "native"  # "native": x as it is; "bf16": rounded; "fp8": e4m3 with one fp32 scale per 128 values
    deterministic: bool = False  # combine in expert order, whatever the layout
    dtype: str = "float32"  # dtype of x and of the combined result

    @property
    def slots_per_rank(self) -> int:
        """Physical slots a rank hosts; slot s lives on EP rank ``s // slots_per_rank``."""
        return self.n_slots // self.n_ranks


@dataclass(kw_only=True)
class Routed:
    """Tokens that arrived at this rank, sorted by local slot.

    ``x[offsets[s]:offsets[s+1]]`` are the N tokens of local slot s. ``weights`` are already matched to the rows; the
    caller computes expert outputs unweighted and ``combine`` applies the weights.
    """

    x: torch.Tensor  # [N, hidden] in the spec's dtype, whatever the payload
    counts: torch.Tensor  # [slots_per_rank] int64 on the CPU, rows per local slot
    weights: torch.Tensor  # [N] float32
    handle: Any  # what the backend needs to send results home


class Dispatcher(Protocol):
    """Sends tokens to the ranks of their experts and brings the weighted sums back.

    ``dispatch`` and ``combine`` are collective over the EP group: every rank calls them the same number of times in
    the same order, with zero tokens if it has none. The ``*_send`` / ``*_recv`` halves allow other work in between.
    """

    name: str  # of the backend
    spec: EPSpec

    def dispatch_send(self, x: torch.Tensor, slot_ids: torch.Tensor, weights: torch.Tensor) -> Any:
        """Start sending. x [T, hidden]; slot_ids [T, k] int physical slots, -1 for none; weights [T, k] float32."""

    def dispatch_recv(self, ticket: Any) -> Routed:
        """Finish the dispatch that ``ticket`` started."""

    def combine_send(self, y: torch.Tensor, routed: Routed) -> Any:
        """Start returning expert outputs y [N, hidden], row for row as ``routed.x``."""

    def combine_recv(self, ticket: Any) -> torch.Tensor:
        """Finish: [T, hidden], fp32 sums in a fixed order, cast to the spec's dtype."""

    def dispatch(self, x: torch.Tensor, slot_ids: torch.Tensor, weights: torch.Tensor) -> Routed:
        """Both halves of dispatch."""

    def combine(self, y: torch.Tensor, routed: Routed) -> torch.Tensor:
        """Both halves of combine."""

    def bytes_sent(self) -> list[int]:
        """Payload bytes sent to each EP rank since the start."""

    def close(self) -> None:
        """Release buffers; later calls raise."""
