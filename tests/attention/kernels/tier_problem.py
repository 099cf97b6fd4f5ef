"""Requests whose pages come and go, and pools whose rows hold tags instead of latents, so that a wrong row shows."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rorqual.attention.kernels.resolve_rows_torch import Resolved
from rorqual.attention.kv.tier import TierCounter

POISON = -999


@dataclass(frozen=True)
class Sizes:
    requests: int = 3
    queries: int = 1
    k: int = 6
    page: int = 4
    lease: int = 4  # pages
    context: int = 64
    spare_slots: int = 2
    spare_pages: int = 5  # device pages beside one for each page of every request and lease


class World:
    """State of one layer for some requests. ``numbers`` of pages and slots are shuffled, so that no id space can pass for another."""

    def __init__(self, sizes: Sizes, seed: int, device: torch.device | str = "cpu") -> None:
        self.sizes, self.device = sizes, torch.device(device)
        self.random = torch.Generator().manual_seed(seed)
        z = sizes
        self.n_pages = -(-z.context // z.page)
        n_slots = z.requests + z.spare_slots
        n_device = z.requests * self.n_pages + n_slots * z.lease + z.spare_pages
        self.slots = torch.randperm(n_slots, generator=self.random)[: z.requests]
        self.free = torch.randperm(n_device, generator=self.random).tolist()
        self.device_rows = torch.full((n_device * z.page,), POISON)
        self.host_rows = torch.full((z.requests * self.n_pages * z.page,), POISON)
        self.latent = torch.full((z.requests, self.n_pages), -1, dtype=torch.int32)
        self.host = torch.full((z.requests, self.n_pages), -1, dtype=torch.int32)
        self.host_ids = torch.randperm(z.requests * self.n_pages, generator=self.random).view(z.requests, self.n_pages).int()
        self.moving = torch.zeros(z.requests, dtype=torch.int8)
        self.hot_pages = torch.full((n_slots + 1, z.lease), -1, dtype=torch.int32)
        self.hot_positions = torch.full((n_slots + 1, z.lease * z.page), -1, dtype=torch.int32)
        self.hot_stamps = torch.zeros(n_slots + 1, z.lease * z.page, dtype=torch.int32)
        self.stamp = torch.zeros(1, dtype=torch.int32)
        self.scratch = torch.randint(-5, z.lease * z.page + 5, (z.requests + 1, self.n_pages * z.page + 3), generator=self.random).int()
        self.counters = torch.zeros(len(TierCounter), dtype=torch.int64)
        self.lengths = [0] * z.requests
        self.previous = torch.full((z.requests * z.queries, z.k), -1, dtype=torch.int32)

    def integers(self, high: int, *size: int) -> torch.Tensor:
        return torch.randint(high, size, generator=self.random)

    def chance(self, odds: float) -> bool:
        return bool(torch.rand((), generator=self.random) < odds)

    def tag(self, request: int, position: torch.Tensor) -> torch.Tensor:
        return 100_000 * (request + 1) + position

    # pages

    def _rows_of(self, page: int) -> torch.Tensor:
        return page * self.sizes.page + torch.arange(self.sizes.page)

    def extend(self, request: int, length: int) -> None:
        """Write positions up to ``length`` into pages on the device."""
        for p in range(self.lengths[request], length):
            page = p // self.sizes.page
            if self.latent[request, page] < 0:
                self.latent[request, page] = self.free.pop()
            at = int(self.latent[request, page]) * self.sizes.page + p % self.sizes.page
            self.device_rows[at] = self.tag(request, torch.tensor(p))
        self.lengths[request] = length

    def mirror(self, request: int, page: int) -> None:
        if (page + 1) * self.sizes.page <= self.lengths[request]:
            self.host[request, page] = self.host_ids[request, page]
            self.host_rows[self._rows_of(int(self.host[request, page]))] = self.device_rows[self._rows_of(int(self.latent[request, page]))]

    def drop(self, request: int, page: int) -> None:
        """Take a mirrored page off the device and poison it."""
        if self.latent[request, page] >= 0 and self.host[request, page] >= 0:
            self._give_back(int(self.latent[request, page]))
            self.latent[request, page] = -1

    def restore(self, request: int, page: int) -> None:
        if self.latent[request, page] < 0 and self.host[request, page] >= 0:
            self.latent[request, page] = self.free.pop()
            self.device_rows[self._rows_of(int(self.latent[request, page]))] = self.host_rows[self._rows_of(int(self.host[request, page]))]

    def _give_back(self, page: int) -> None:
        self.device_rows[self._rows_of(page)] = POISON
        self.free.insert(int(self.integers(max(1, len(self.free)))), page)

    def lease(self, request: int, pages: int) -> None:
        """Change the lease of a request's slot to its first ``pages`` pages."""
        slot, size = int(self.slots[request]), self.sizes.page
        for h in range(self.sizes.lease):
            page = int(self.hot_pages[slot, h])
            if h < pages and page < 0:
                self.hot_pages[slot, h] = self.free.pop()
            elif h >= pages and page >= 0:
                self.hot_pages[slot, h] = -1
                self.hot_positions[slot, h * size : (h + 1) * size] = -1
                self._give_back(page)

    # steps

    def choose(self, *, spoil: bool) -> torch.Tensor:
        """int32 [R * q, k]: some of the last step's, recent and random positions; ``spoil``: -1 in between and repeated ones."""
        z, out = self.sizes, torch.full_like(self.previous, -1)
        for row in range(len(out)):
            length = self.lengths[row // z.queries] - (z.queries - 1 - row % z.queries)
            old = self.previous[row][self.previous[row] >= 0].tolist()
            pool = [p for p in old if self.chance(0.7) and p < length] + [p for p in range(length - 2, length) if p >= 0]
            pool += self.integers(max(1, length), z.k).tolist() + list(range(min(length, z.k)))
            wanted = sorted(list(dict.fromkeys(pool))[: z.k]) if length > 0 else []
            self.previous[row] = torch.tensor(wanted + [-1] * (z.k - len(wanted)))
            if spoil and wanted:
                for i in range(1, len(wanted)):
                    wanted[i] = -1 if self.chance(0.15) else wanted[i - 1] if self.chance(0.2) else wanted[i]
            out[row, : len(wanted)] = torch.tensor(wanted, dtype=torch.int32)
        return out

    def copy(self, source: torch.Tensor, target: torch.Tensor, count: torch.Tensor) -> None:
        """What ``fetch_rows`` does with [R, n] copies."""
        for row, n in enumerate(count.tolist()):
            for at, to in zip(source[row, :n].tolist(), target[row, :n].tolist(), strict=True):
                assert at >= 0 or at <= -2
                self.device_rows[to] = self.host_rows[at] if at >= 0 else self.device_rows[-at - 2]

    def check(self, positions: torch.Tensor, found: Resolved, valid: int) -> None:
        """After the copies every chosen position reads its own row; no position is held twice."""
        for row, request in ((row, row // self.sizes.queries) for row in range(len(positions))):
            p = positions[row].long()
            wanted = torch.where((p >= 0) & (request * self.sizes.queries < valid), self.tag(request, p), POISON)
            at = found.rows[row].long()
            assert torch.equal(at < 0, wanted == POISON)
            assert torch.equal(torch.where(at >= 0, self.device_rows[at.clamp(min=0)], POISON), wanted)
        for held in self.hot_positions:
            held = held[held >= 0]
            assert len(held.unique()) == len(held)

    def wander(self) -> None:
        """Something happens to the pages between two steps."""
        z = self.sizes
        for request in range(z.requests):
            if self.chance(0.5):
                self.extend(request, min(z.context, self.lengths[request] + int(self.integers(3))))
            for page in range(self.n_pages):
                if self.host[request, page] < 0 and self.chance(0.5):
                    self.mirror(request, page)
            full = -(-z.k * z.queries // z.page)
            self.lease(request, full + int(self.integers(z.lease - full + 1)) if self.chance(0.3) else z.lease)
            self.moving[request] = int(self.chance(0.3))
            for page in self.integers(self.n_pages, 4).tolist():
                self.drop(request, page) if self.chance(0.7) else self.restore(request, page)

    def arguments(self, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Positional arguments of ``resolve_rows``; tensors that it updates are this world's own."""
        tables = (self.latent, self.host, self.moving, self.slots, self.hot_pages)
        return (positions, *tables, self.hot_positions, self.hot_stamps, self.stamp, self.scratch, self.counters)
