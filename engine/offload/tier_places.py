"""The tables of pages of one rank in one piece of memory, so that a plan's changes are one scatter."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from ...attention.kv.tier import TierTables
from ..plan import I64, StepPlan


@dataclass(frozen=True, kw_only=True)
class TierPlaces:
    """``tables`` whose device pages, host pages and leases are views of ``flat``, in this order."""

    tables: TierTables
    flat: torch.Tensor  # int32 [2 * (n_logical + 1) + (n_slots + 1) * H]

    @classmethod
    def of(cls, tables: TierTables) -> TierPlaces:
        """The same tables, moved into one tensor."""
        parts = (tables.device_page, tables.host_page, tables.hot_pages)
        flat = torch.cat([part.reshape(-1) for part in parts])
        views = torch.split(flat, [part.numel() for part in parts])
        moved = replace(tables, device_page=views[0], host_page=views[1], hot_pages=views[2].view(parts[2].shape))
        return cls(tables=moved, flat=flat)

    @property
    def n_pages(self) -> int:
        """Logical pages, the dummy included."""
        return self.tables.device_page.shape[0]

    @property
    def lease_pages(self) -> int:
        """Most pages of a lease."""
        return self.tables.hot_pages.shape[1]

    @property
    def idle_place(self) -> int:
        """A place that is ``NOWHERE`` and stays so: the host page of the dummy."""
        return 2 * self.n_pages - 1

    @property
    def spare_slot(self) -> int:
        """The slot of padding, which never moves."""
        return self.tables.moving.shape[0] - 1

    def changes(self, plan: StepPlan) -> tuple[I64, I64]:
        """Places in ``flat`` and what they become by ``plan``, int64 [n] each, no place twice."""
        width = self.lease_pages
        device, host, hot = plan.device_pages, plan.host_pages, plan.hot_pages
        leases = hot[:, 0].astype(np.int64) * width + hot[:, 1] + 2 * self.n_pages
        places = np.concatenate([device[:, 0], host[:, 0].astype(np.int64) + self.n_pages, leases])
        return places, np.concatenate([device[:, 1], host[:, 1], hot[:, 2]]).astype(np.int64)

    def put(self, at: torch.Tensor, values: torch.Tensor, moving_at: torch.Tensor, moving: torch.Tensor) -> None:
        """Change places ``at`` of ``flat`` to ``values`` and the flags of slots ``moving_at`` to ``moving``; int64 [n], [m]."""
        self.flat.scatter_(0, at, values.int())
        self.tables.moving.scatter_(0, moving_at, moving.to(torch.int8))
