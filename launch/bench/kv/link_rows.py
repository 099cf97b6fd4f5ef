"""Host memory as rows of any width, and ever fresh choices of them: what a fetch in a decode step finds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

#: where the pages of a request lie: one contiguous range, 2 MiB pieces anywhere, pages anywhere, or every row for itself
Placement = Literal["range", "extents", "pages", "rows"]
#: in which order the rows are listed: by position, by address, or mixed
Order = Literal["positions", "addresses", "mixed"]

_EXTENT = 2 << 20
#: bytes that the device translates at once: every further piece that is touched costs time, whatever is read of it
PIECE = 64 << 10
_PAGE = 64
_DRAWS = 64  # sets of positions that the choices come from


class MemoryRows:
    """Rows over bytes of host memory that the device can read: ``HostRows`` of ``attention.kv.tier``."""

    def __init__(self, memory: torch.Tensor, row_bytes: int) -> None:
        """``memory``: uint8 [n], registered."""
        self.memory, self.row_bytes, self.pitch, self.n_rows = memory, row_bytes, row_bytes, memory.numel() // row_bytes

    @property
    def bytes(self) -> torch.Tensor:
        """uint8 [n_rows, pitch]."""
        return self.memory[: self.n_rows * self.pitch].view(self.n_rows, self.pitch)

    def data_ptr(self) -> int:
        """Address of row 0."""
        return self.memory.data_ptr()


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What each launch fetches."""

    requests: int
    rows: int  # of each request
    context: int = 131072  # positions that they are chosen from
    placement: Placement = "extents"
    order: Order = "positions"


class Choices:
    """Lists of sources, targets and counts for several launches; ``refill`` makes them new ones in place."""

    def __init__(self, choice: Choice, n_host: int, pitch: int, n_device: int, launches: int, device: torch.device | str) -> None:
        self.choice, self.n_host, self.pitch, self.n_device = choice, n_host, pitch, n_device
        self.device = torch.device(device)
        shape = (choice.requests, choice.rows)
        zeros = torch.zeros(shape, dtype=torch.int32, device=self.device)
        self.source = [zeros.clone() for _ in range(launches)]
        self.target = [zeros.clone() for _ in range(launches)]
        self.count = [torch.full_like(zeros[:, 0].contiguous(), choice.rows) for _ in range(launches)]
        draws = [torch.rand(choice.context, device=self.device).topk(choice.rows).indices.sort().values for _ in range(_DRAWS)]
        self._positions = torch.stack(draws)
        self.refill()

    @property
    def unit(self) -> int:
        """Rows of a piece that lies together."""
        extent = max(1, _EXTENT // (_PAGE * self.pitch)) * _PAGE
        return {"range": self.choice.context, "extents": extent, "pages": _PAGE, "rows": 1}[self.choice.placement]

    def pieces(self) -> float:
        """Pieces of ``PIECE`` bytes that a launch touches, in the mean."""
        counts = [torch.unique(source.long() * self.pitch // PIECE).numel() for source in self.source]
        return float(sum(counts) / len(counts))

    def refill(self) -> None:
        """Choose anew, on the device."""
        launches, requests = len(self.source), self.choice.requests
        sets = launches * requests
        positions = self._positions[torch.randint(0, _DRAWS, (sets,), device=self.device)]
        pieces = -(-self.choice.context // self.unit)
        start = torch.randint(0, max(1, self.n_host // self.unit), (sets, pieces), device=self.device)
        row = torch.gather(start, 1, positions // self.unit) * self.unit + positions % self.unit
        if self.choice.order == "addresses":
            row = row.sort(1).values
        elif self.choice.order == "mixed":
            row = torch.gather(row, 1, torch.rand(row.shape, device=self.device).argsort(1))
        for launch in range(launches):
            self.source[launch].copy_(row[launch * requests : (launch + 1) * requests])
            targets = torch.randperm(self.n_device, device=self.device)[: self.source[launch].numel()]
            self.target[launch].copy_(targets.view_as(self.target[launch]))
