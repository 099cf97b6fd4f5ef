"""Hot buffers of many requests at true sizes, made on the device, and pools of tags that show whether a row is the right one."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rorqual.attention.kernels.resolve_rows_torch import Resolved
from rorqual.attention.kv.tier import TierCounter


@dataclass(frozen=True)
class Shape:
    requests: int = 4
    queries: int = 1
    k: int = 2048
    page: int = 64
    lease: int = 64  # pages
    context: int = 20_000
    absent: float = 0.95  # part of the pages that are not on the device

    @property
    def hot(self) -> int:
        return self.lease * self.page

    @property
    def n_pages(self) -> int:
        return -(-self.context // self.page)


class HotState:
    """One layer's state. Every page has a host copy but the last one of each request, which is on the device."""

    def __init__(self, shape: Shape, seed: int, device: torch.device) -> None:
        self.shape, self.random = shape, torch.Generator(device=device).manual_seed(seed)
        self.device = device
        requests, pages, slots = shape.requests, shape.n_pages, shape.requests + 3
        ids = torch.randperm(requests * pages + slots * shape.lease, generator=self.random, device=device).int()
        self.latent = ids[: requests * pages].view(requests, pages).clone()
        self.hot_pages = torch.full((slots + 1, shape.lease), -1, dtype=torch.int32, device=device)
        self.hot_pages[:slots] = ids[requests * pages :].view(slots, shape.lease)
        absent = torch.rand(requests, pages, generator=self.random, device=device) < shape.absent
        absent[:, -1] = False
        self.latent[absent] = -1
        self.host = torch.randperm(requests * pages, generator=self.random, device=device).int().view(requests, pages)
        self.host[:, -1] = -1
        self.moving = torch.zeros(requests, dtype=torch.int8, device=device)
        self.slots = torch.randperm(slots, generator=self.random, device=device)[:requests]
        self.hot_positions = torch.full((slots + 1, shape.hot), -1, dtype=torch.int32, device=device)
        self.hot_stamps = torch.zeros_like(self.hot_positions)
        self.stamp = torch.full((1,), 100, dtype=torch.int32, device=device)
        self.scratch = torch.randint(0, shape.hot, (requests, pages * shape.page), generator=self.random, device=device, dtype=torch.int32)
        self.counters = torch.zeros(len(TierCounter), dtype=torch.int64, device=device)
        self.device_tags = torch.full((len(ids) * shape.page,), -7, device=device)
        self.host_tags = self._tags(self.host, -9)
        where = (self.latent.long() * shape.page)[:, :, None] + torch.arange(shape.page, device=device)
        self.device_tags[where[~absent]] = self._positions()[~absent]

    def _positions(self) -> torch.Tensor:
        """Tag of every position: [R, P, page]."""
        z = self.shape
        every = torch.arange(z.n_pages * z.page, device=self.device).view(1, z.n_pages, z.page)
        return every + 10_000_000 * torch.arange(z.requests, device=self.device)[:, None, None]

    def _tags(self, pages: torch.Tensor, poison: int) -> torch.Tensor:
        out = torch.full((pages.numel() * self.shape.page,), poison, device=self.device)
        there = pages >= 0
        out[((pages.long() * self.shape.page)[:, :, None] + torch.arange(self.shape.page, device=self.device))[there]] = self._positions()[
            there
        ]
        return out

    def choose(self) -> torch.Tensor:
        """Evenly drawn positions, int32 [R * q, k], ascending."""
        z = self.shape
        draw = torch.rand(z.requests * z.queries, z.context, generator=self.random, device=self.device)
        return draw.topk(min(z.k, z.context), 1).indices.sort(1).values.int()

    def next(self, positions: torch.Tensor, changed: float) -> torch.Tensor:
        """``positions`` with about that part of each row drawn anew."""
        draw = self.choose()
        new = torch.where(torch.rand(positions.shape, generator=self.random, device=self.device) < changed, draw, positions)
        new = new.sort(1).values  # repeated positions become -1 at the end
        twice = torch.zeros_like(new, dtype=torch.bool)
        twice[:, 1:] = new[:, 1:] == new[:, :-1]
        new = torch.where(twice, self.shape.context + 1, new).sort(1).values
        return torch.where(new > self.shape.context, -1, new).int()

    def fill(self, positions: torch.Tensor, present: float) -> None:
        """Hot buffers hold that part of what is chosen of absent pages, the rest of them other positions, with mixed stamps."""
        z = self.shape
        weight = torch.rand(z.requests, z.context, generator=self.random, device=self.device)
        first = positions.view(z.requests, -1).long()
        drawn = torch.rand(first.shape, generator=self.random, device=self.device)
        weight.scatter_(1, first.clamp(min=0), torch.where(drawn < present, 2 + drawn, -1.0))
        held = weight.topk(min(z.hot, z.context), 1).indices.int()
        order = torch.rand(held.shape, generator=self.random, device=self.device).argsort(1)
        held = held.gather(1, order)
        self.hot_positions[self.slots, : held.shape[1]] = held
        b = torch.arange(held.shape[1], device=self.device)
        rows = self.hot_pages[self.slots][:, b // z.page].long() * z.page + b % z.page
        self.device_tags[rows] = held + 10_000_000 * torch.arange(z.requests, device=self.device)[:, None]
        self.hot_stamps[self.slots] = torch.randint(80, 100, (z.requests, z.hot), generator=self.random, device=self.device).int()

    def arguments(self, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
        tables = (self.latent, self.host, self.moving, self.slots, self.hot_pages)
        return (positions, *tables, self.hot_positions, self.hot_stamps, self.stamp, self.scratch, self.counters)

    def copy(self, found: Resolved) -> None:
        """What ``fetch_rows`` does."""
        there = torch.arange(found.source.shape[1], device=self.device) < found.count[:, None]
        source, target = found.source[there].long(), found.target[there].long()
        assert (source != -1).all() and len(target.unique()) == len(target)
        tags = torch.where(source >= 0, self.host_tags[source.clamp(min=0)], self.device_tags[(-source - 2).clamp(min=0)])
        self.device_tags[target] = tags

    def check(self, positions: torch.Tensor, found: Resolved) -> None:
        """After the copies every chosen position reads its own row."""
        request = torch.arange(len(positions), device=self.device) // self.shape.queries
        wanted = torch.where(positions >= 0, positions + 10_000_000 * request[:, None], -1)
        read = torch.where(found.rows >= 0, self.device_tags[found.rows.clamp(min=0).long()], -1)
        assert torch.equal(read, wanted)
