"""What a dispatch brings to a rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

LAYOUTS = ("rank", "contiguous", "masked")


@dataclass(kw_only=True)
class Routed:
    """Tokens that arrived at this rank.

    ``layout`` says how the rows of ``x`` lie:

    - "contiguous": sorted by (local slot, source rank, token). ``x[offsets[s] : offsets[s] + counts[s]]`` are those of slot s;
      offsets are multiples of ``EPSpec.alignment``, and rows between are zeros. A token with two choices on this rank has two
      rows. x may have more rows than ``offsets[-1]``: their number does not depend on values where a device has the counts.
    - "masked": [slots, rows, hidden], the rows of slot s being ``x[s, :counts[s]]``; the others are anything.
    - "rank": one row for every token that may have come, whoever wants it: ``slots`` and ``shares`` say which rows are there and
      what for. Rows that nobody wants are anything, not numbers perhaps.

    ``weights`` are matched to the rows: the caller computes expert outputs unweighted and ``combine`` applies the weights (layout
    "rank": see ``Dispatcher.combine_send``). What it holds may lie in memory of the dispatcher: it is valid until combine_recv.
    """

    x: torch.Tensor  # in the spec's dtype; over symmetric memory as it travelled: bf16, e4m3 with ``scales``, or uint8
    handle: Any  # what the backend needs to send results home
    layout: str = "contiguous"
    scales: torch.Tensor | None = None  # float32, x's shape with ceil(hidden / 128) for hidden; x ~ values * scale
    counts: torch.Tensor | None = None  # [slots_per_rank] rows per slot: int64 on the CPU if the host knows them, else int32
    offsets: torch.Tensor | None = None  # int32 [slots_per_rank + 1], where counts are; layout "contiguous"
    weights: torch.Tensor | None = None  # float32, one a row of x; None in the layout "rank"
    sources: torch.Tensor | None = None  # int32, one a row of x: source rank * max_tokens + its token's number, -1 for padding
    slots: torch.Tensor | None = None  # int32 [rows, k] local slots of row's choices, -1 for none; layout "rank"
    shares: torch.Tensor | None = None  # float32 [rows, k] weights of ``slots``; layout "rank"
    epoch: int = 0  # number of this dispatch on the host, from 1

    def host_counts(self) -> list[int]:
        """Rows per slot, on the host. Waits for the device unless the host knows them.

        Raises:
            RuntimeError: a CUDA graph is being captured, or the layout is "rank", which has no counts.
        """
        if self.counts is None:
            raise RuntimeError('the layout "rank" has no counts; ask dispatch_recv for layout="contiguous" or "masked"')
        if self.counts.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("host_counts() inside a CUDA graph capture: no count can reach the host there; use counts on the device")
        found: list[int] = self.counts.tolist()
        return found
