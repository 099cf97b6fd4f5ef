"""Requests through a few layers whose latent pages come and go: a small engine that shuffles every id and poisons what is free."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import torch

from rorqual.attention.batch import AttentionBatch
from rorqual.attention.config import IndexerConfig, MLAConfig
from rorqual.attention.kv.cache import KVCache
from rorqual.attention.kv.hot import HotShape
from rorqual.attention.kv.layout import latent_row_bytes
from rorqual.attention.kv.sizes import TierShape
from rorqual.attention.kv.tier import NOWHERE, TierCounter, TierStep
from rorqual.attention.mla import MLA, layer_has_indexer
from rorqual.attention.ops import AttentionOps
from tests.attention.common import SPARSE, make_mla

TOPK = 8
GLM = dataclasses.replace(SPARSE, indexer=IndexerConfig(n_heads=16, head_dim=16, topk=TOPK, layer_types=("full", "shared", "full")))


class HostPart:
    """One layer's host rows, with a pitch wider than a row; everything is poison until it is written."""

    def __init__(self, n_pages: int, page_size: int, row_bytes: int, pinned: bool) -> None:
        self.row_bytes, self.pitch, self.n_rows = row_bytes, row_bytes + 32, n_pages * page_size
        self.bytes = torch.full((self.n_rows, self.pitch), 0xFF, dtype=torch.uint8, pin_memory=pinned)

    def data_ptr(self) -> int:
        return self.bytes.data_ptr()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """What a run is made of."""

    config: MLAConfig = GLM
    n_layers: int = 3
    lengths: tuple[int, ...] = (40, 40, 23, 9)
    prefix: int = 0  # tokens that request 1 takes over from request 0, whole pages
    page_size: int = 4
    dtype: str = "float32"
    compute: torch.dtype = torch.float32
    fused: bool = False
    static: bool = False  # decode steps as static batches, with a row of padding
    scored: bool = False
    seed: int = 0
    chunk: int = 9  # most tokens of a request in a step
    ops: str = "torch"
    device: str = "cpu"


class Resident:
    """Every page on the device, under its logical number."""

    def __init__(self, setting: Setting) -> None:
        self.setting = s = setting
        self.device = torch.device(s.device)
        generator = torch.Generator().manual_seed(s.seed)
        self.x = [torch.randn(n, s.config.hidden, generator=generator).to(self.device, s.compute) for n in s.lengths]
        if s.prefix:
            self.x[1][: s.prefix] = self.x[0][: s.prefix]
        each = [-(-n // s.page_size) for n in s.lengths]
        self.n_pages = sum(each) + 3
        pages = torch.randperm(self.n_pages, generator=generator).int().split([*each, 3])
        self.table = torch.full((len(each) + 1, max(each) + 2), self.n_pages, dtype=torch.int32)  # the last row is padding's
        for row, mine in enumerate(pages[:-1]):
            self.table[row, : len(mine)] = mine
        if s.prefix:
            self.table[1, : s.prefix // s.page_size] = self.table[0, : s.prefix // s.page_size]
        self.on_host = self.table.clone()
        self.table = self.table.to(self.device)
        self.done = np.zeros(len(each), np.int64)
        self.layers = [self._mla(i) for i in range(s.n_layers)]
        self.cache = self._cache([layer.indexer is not None for layer in self.layers])
        self.cache.poison(torch.arange(self.n_pages + 1))

    def _mla(self, layer: int) -> MLA:
        s = self.setting
        mla = make_mla(s.config, seed=layer, layer=layer, dtype=s.compute).to(self.device)
        assert (mla.indexer is not None) == layer_has_indexer(s.config, layer)
        if s.fused:
            mla.fuse(AttentionOps.load(s.ops))
        return mla

    def _cache(self, indexed: list[bool]) -> KVCache:
        s = self.setting
        return KVCache(s.config, indexed, self.n_pages, s.page_size, s.dtype, s.compute, self.device)

    def tier(self, rows: list[int], counts: list[int], static: bool) -> TierStep | None:
        """Where latent pages are, after what happens to them before the step."""
        return None

    @torch.inference_mode()
    def step(self, rows: list[int], counts: list[int]) -> torch.Tensor:
        """Push the next ``counts`` tokens of ``rows`` through the layers: [T, hidden]."""
        parts = [self.x[r][self.done[r] : self.done[r] + n] for r, n in zip(rows, counts, strict=True)]
        static = self.setting.static and set(counts) == {1}
        if static:
            parts.append(torch.randn(1, self.setting.config.hidden).to(self.device, self.setting.compute))
        out = self.run(torch.cat(parts), rows, counts, self.tier(rows, counts, static), static)
        self.done[rows] += counts
        return out[: sum(counts)]

    def run(self, x: torch.Tensor, rows: list[int], counts: list[int], tier: TierStep | None, static: bool) -> torch.Tensor:
        """The layers on ``x`` [T, hidden], of a static batch with a row of padding."""
        size, device = self.cache.page_size, self.device
        if static:
            n = len(rows)
            batch = AttentionBatch.static(
                torch.tensor([*self.done[rows].tolist(), 0], device=device), torch.arange(n + 1, device=device),
                self.table[[*rows, len(self.x)]], size, max_context=self.table.shape[1] * size,
                n_valid=torch.tensor([n], dtype=torch.int32, device=device), tier=tier,
            )  # fmt: skip
        else:
            batch = AttentionBatch.build(self.done[rows], np.array(counts, np.int64), self.table[rows], size, device, tier)
        return self.forward(x, batch)

    def forward(self, x: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
        """All layers, each adding to ``x`` [T, hidden]."""
        shared = None
        for mla, cache in zip(self.layers, self.cache.layers, strict=True):
            out, shared = mla(x, batch, cache, shared)
            x = x + out
        return x


class Tiered(Resident):
    """Latent pages that are mirrored, dropped, restored and leased at random between steps."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.random = random.Random(setting.seed)
        self.tables = self.cache.tables
        assert self.tables is not None
        self.free_device = self.random.sample(range(self.cache.n_device_pages), self.cache.n_device_pages)
        self.free_host = self.random.sample(range(self.n_pages), self.n_pages)
        self.cache.poison((), torch.arange(self.cache.n_device_pages + 1))
        self.host_of: dict[int, int] = {}  # logical page -> host page with a finished copy
        self.device_of: dict[int, int] = {}  # logical page -> device page
        self.lease_of: dict[int, list[int]] = {}  # request -> device pages of its hot buffer
        self.moving: set[int] = set()
        self.step_number = 0

    def _cache(self, indexed: list[bool]) -> KVCache:
        s = self.setting
        self.hot_pages = -(-2 * s.config.indexer.topk // s.page_size)
        hot = HotShape(
            n_slots=len(s.lengths) + 2, n_layers=s.n_layers, lease_pages=self.hot_pages, page_size=s.page_size,
            n_logical_pages=self.n_pages, max_requests=len(s.lengths) + 1, max_context=self.table.shape[1] * s.page_size,
            chosen_rows=s.config.indexer.topk,
        )  # fmt: skip
        shape = TierShape(n_device_pages=self.n_pages + hot.n_slots * self.hot_pages, hot=hot, scored=s.scored)
        row = latent_row_bytes(s.config, s.dtype)
        self.host = [HostPart(self.n_pages, s.page_size, row, self.device.type == "cuda") for _ in indexed]
        self.slots = torch.randperm(hot.n_slots, generator=torch.Generator().manual_seed(s.seed))[: len(s.lengths)].to(self.device)
        return KVCache(s.config, indexed, self.n_pages, s.page_size, s.dtype, s.compute, self.device, tiers=shape, host=self.host)

    def where(self, logical: int) -> int:
        return self.device_of.get(logical, NOWHERE)

    def put(self, logical: int, page: int) -> None:
        self.device_of[logical] = page
        self.tables.device_page[logical] = page

    def pages(self, r: int, upto: int) -> list[int]:
        """Logical pages of the first ``upto`` tokens."""
        return self.on_host[r, : -(-upto // self.cache.page_size)].tolist()

    def full_pages(self, r: int) -> list[int]:
        return self.on_host[r, : int(self.done[r]) // self.cache.page_size].tolist()

    def rows(self, page: int) -> slice:
        return slice(page * self.cache.page_size, (page + 1) * self.cache.page_size)

    def mirror(self, logical: int) -> None:
        host = self.free_host.pop()
        for layer, part in zip(self.cache.layers, self.host, strict=True):
            part.bytes[self.rows(host), : part.row_bytes] = layer.latent.bytes[self.rows(self.where(logical))].cpu()
        self.host_of[logical] = host
        self.tables.host_page[logical] = host

    def drop(self, logical: int) -> None:
        assert logical in self.host_of
        self.give_back(self.where(logical))
        self.put(logical, NOWHERE)

    def give_back(self, page: int) -> None:
        self.cache.poison((), [page])
        self.free_device.insert(self.random.randrange(len(self.free_device) + 1), page)

    def restore(self, logical: int) -> None:
        page = self.free_device.pop()
        for layer, part in zip(self.cache.layers, self.host, strict=True):
            layer.latent.bytes[self.rows(page)] = part.bytes[self.rows(self.host_of[logical]), : part.row_bytes].to(self.device)
        self.put(logical, page)

    def leased(self, r: int) -> bool:
        return r in self.lease_of

    def lease(self, r: int) -> None:
        slot = int(self.slots[r])
        pages = self.lease_of[r] = [self.free_device.pop() for _ in range(self.hot_pages)]
        self.tables.hot_pages[slot] = torch.tensor(pages, dtype=torch.int32)
        self.cache.hot.positions[:, slot] = NOWHERE

    def release(self, r: int) -> None:
        slot = int(self.slots[r])
        for page in self.lease_of.pop(r):
            self.give_back(page)
        self.tables.hot_pages[slot] = NOWHERE

    def absent(self, r: int) -> bool:
        return any(self.where(page) < 0 for page in self.pages(r, int(self.done[r])))

    def shake(self) -> None:
        """Events between two steps."""
        for r in range(len(self.x)):
            for page in self.full_pages(r):
                there, dice = self.where(page) >= 0, self.random.random()
                if there and page not in self.host_of and dice < 0.6:
                    self.mirror(page)
                elif there and page in self.host_of and dice < 0.35:
                    self.drop(page)
                elif not there and dice < 0.1:
                    self.restore(page)

    def tier(self, rows: list[int], counts: list[int], static: bool) -> TierStep:
        """Assign pages for the new tokens, settle leases, and say where everything is."""
        self.step_number += 1
        self.tables.stamp[0] = self.step_number
        for r, n in zip(rows, counts, strict=True):
            self.assign(r, n)
        for r in range(len(self.x)):
            self.settle(r, static)
        absent, leased = np.array([self.absent(r) for r in rows]), np.array([self.leased(r) for r in rows])
        slots = self.slots[rows]
        moving = bool(self.moving & set(rows))
        if static:
            table, slots = self.table[[*rows, len(self.x)]], torch.cat((slots, slots.new_tensor([len(self.tables.moving) - 1])))
            positions = torch.tensor([*self.done[rows].tolist(), 0], device=self.device)
            return self.tables.step(
                table, slots, page_size=self.cache.page_size, positions=positions, offloaded=bool(absent.any()) or moving
            )
        seeded = self.seeds(counts, leased.tolist())
        offloaded = bool(absent.any()) or moving or bool(seeded)
        more = {"absent": absent, "leased": leased, "seeded": seeded}
        return self.tables.step(self.table[rows], slots, page_size=self.cache.page_size, offloaded=offloaded, **more)

    def seeds(self, counts: list[int], leased: list[bool]) -> tuple[int, ...]:
        """Requests of a step whose hot buffers begin with it."""
        return tuple(i for i, n in enumerate(counts) if leased[i] and self.random.random() < (0.5 if n > 1 else 0.1))

    def assign(self, r: int, n: int) -> None:
        """Put the pages that get the next ``n`` tokens on the device."""
        for page in self.pages(r, int(self.done[r]) + n)[int(self.done[r]) // self.cache.page_size :]:
            if self.where(page) < 0 and page in self.host_of:
                self.restore(page)
            elif self.where(page) < 0:
                self.put(page, self.free_device.pop())

    def settle(self, r: int, static: bool) -> None:
        """Lease or release, and move or not, at random; a request with absent pages keeps its lease, and in a static step needs one."""
        absent = self.absent(r)
        if not absent and self.leased(r) and self.random.random() < 0.2:
            self.release(r)
        elif not self.leased(r) and (self.random.random() < 0.2 or (absent and (static or self.random.random() < 0.5))):
            self.lease(r)
        self.move(r, self.leased(r) and self.random.random() < 0.3)

    def move(self, r: int, yes: bool) -> None:
        if yes != (r in self.moving):
            self.moving ^= {r}
            self.tables.moving[self.slots[r]] = int(yes)

    def counted(self, what: TierCounter) -> int:
        return int(self.cache.hot.counters[:, what].sum())


def plan(setting: Setting) -> list[tuple[list[int], list[int]]]:
    """Random steps until every request is done; request 1 begins when its prefix is there."""
    dice, left = random.Random(setting.seed + 1), list(setting.lengths)
    done, steps = [0] * len(left), []
    started = not setting.prefix
    while any(d < n for d, n in zip(done, setting.lengths, strict=True)):
        if not started and done[0] >= setting.prefix:
            started, done[1] = True, setting.prefix
        open_rows = [r for r, n in enumerate(setting.lengths) if done[r] < n and (r != 1 or started)]
        rows = dice.sample(open_rows, dice.randint(1, len(open_rows)))
        decode = dice.random() < 0.6
        counts = [1 if decode or dice.random() < 0.3 else min(dice.randint(2, setting.chunk), setting.lengths[r] - done[r]) for r in rows]
        for r, n in zip(rows, counts, strict=True):
            done[r] += n
        steps.append((rows, counts))
    return steps
