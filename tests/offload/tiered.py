"""The toy device of the scheduler's tests with its rows in two tiers. Copies to the host end as late as they may."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import numpy as np

from rorqual.attention.kv.host.allocator import HostPageAllocator
from rorqual.engine.offload.tier_limits import TierLimits, least_device_pages
from rorqual.engine.plan import StepPlan
from rorqual.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from tests.scheduler.harness import POISON, FakeDevice, Loop, row_value, sampled

_LATE = 2  # plans after which a copy has to be done


def tiered(
    config: SchedulerConfig, *, policy: str = "hybrid", topk: int = 4, hot: int = 1, spare: int = 2, host: int = 0, more: int = 0
) -> SchedulerConfig:
    """``config`` with a device of ``spare`` pages more than one request needs; leases hold ``hot`` times the keys of a token.

    They may grow by ``more`` pages.
    """
    hot_pages = -(-topk * hot // config.page_size)
    limits = TierLimits(
        policy=policy, page_size=config.page_size, n_pages=config.n_pages, n_device_pages=least_device_pages(hot_pages) + spare,
        n_host_pages=config.n_pages + host, topk=topk, hot_pages=hot_pages, step_tokens=config.max_num_batched_tokens,
        most_hot_pages=hot_pages + more,
    )  # fmt: skip
    return replace(config, tier=limits)


class TieredDevice(FakeDevice):
    """Rows are found through the tables that plans change, and checked against the rules of what may be absent when."""

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        assert config.tier is not None
        tier, size = config.tier, config.page_size
        self.tier = tier
        self.store = np.full((tier.n_device_pages, size), POISON, dtype=np.int64)
        self.host = np.full((tier.n_host_pages, size), POISON, dtype=np.int64)
        self.device_page = np.full(config.n_pages, -1)
        self.host_page = np.full(config.n_pages, -1)
        self.leases = np.full((config.max_num_seqs, tier.largest_lease), -1)
        self.moving = np.zeros(config.max_num_seqs, dtype=np.int64)
        self.absent_rows = self.dense_rows = self.moved_rows = 0
        self._mirrors: deque[tuple[int, list[tuple[int, int]]]] = deque()

    def launch(self, plan: StepPlan) -> None:
        freed, plan.freed_pages = plan.freed_pages, plan.freed_pages[:0]
        self._apply(plan)
        super().launch(plan)
        plan.freed_pages = freed
        if len(plan.mirrors):
            assert (plan.mirrors >= 0).all()
            self._mirrors.append((plan.step, plan.mirrors.tolist()))

    def _apply(self, plan: StepPlan) -> None:
        if plan.n_moves or len(plan.vacated) or len(plan.restores):
            while self._mirrors and self._mirrors[0][0] <= plan.step - _LATE:
                for device, host in self._mirrors.popleft()[1]:
                    self.host[host] = self.store[device]
        self.store[plan.vacated] = POISON
        for slot, index, page in plan.hot_pages.tolist():
            self.leases[slot, index] = page
            self.store[page if page >= 0 else []] = POISON
        for page, device in plan.device_pages.tolist():
            self.device_page[page] = device
        for page, host in plan.host_pages.tolist():
            self.host_page[page] = host
        for slot, flag in plan.moving.tolist():
            self.moving[slot] = flag
        for host, device in plan.restores.tolist():
            self.store[device] = self.host[host]
        leased = self.leases[self.leases >= 0].tolist()
        assert len(set(leased)) == len(leased), "a device page is leased twice"
        there = self.leases >= 0
        assert (there[:, 1:] <= there[:, :-1]).all(), "a lease has a hole"
        assert (there[:, self.tier.hot_pages - 1] == there[:, 0]).all(), "a lease has less than is promised"

    def _row(self, step: int, slot: int, start: int, count: int, samples: bool) -> None:
        size, end = self.config.page_size, start + count
        pages = self.table[slot, : -(-end // size)]
        assert (pages >= 0).all(), f"step {step}: slot {slot} has no page for a position below {end}"
        self.reads[step].update(pages.tolist())
        devices = self.device_page[pages]
        leased = set(self.leases[self.leases >= 0].tolist())
        assert not leased.intersection(devices.tolist()), f"step {step}: slot {slot} reads hot rows as its own"
        absent = int((devices < 0).sum())
        if absent:
            assert end > self.tier.topk, f"step {step}: slot {slot} reads every key and misses some"
            assert count > 1 or self.leases[slot, 0] >= 0, f"step {step}: slot {slot} misses rows and has no hot rows"
            self.absent_rows += 1
        self.dense_rows += end <= self.tier.topk
        self.moved_rows += int(self.moving[slot])
        before = 0 if start == 0 else self._read(int(pages[(start - 1) // size]))[(start - 1) % size]
        for position in range(start, end):
            token = int(self.tokens[slot, position])
            assert token >= 0, f"step {step}: slot {slot} reads a token at {position} that nobody wrote"
            before = row_value(token, int(before))
            device = devices[position // size]
            assert device >= 0, f"step {step}: slot {slot} writes a page that is not on the device"
            self.store[device, position % size] = before
        rows = np.concatenate([self._read(page) for page in pages.tolist()])[:end]
        assert (rows != POISON).all(), f"step {step}: slot {slot} reads a poisoned row"
        if samples:
            self.results[step].append(sampled(rows, int(self.seeds[slot])))
            self._late.append((step + self.config.pp, slot, end, self.results[step][-1]))

    def _read(self, page: int) -> np.ndarray:
        if self.device_page[page] >= 0:
            return self.store[self.device_page[page]]
        assert self.host_page[page] >= 0, f"page {page} has no rows anywhere"
        return self.host[self.host_page[page]]


class TieredLoop(Loop):
    """The scheduler's loop with offloading."""

    def make(self) -> tuple[Scheduler, TieredDevice]:
        assert self.config.tier is not None
        self.host_pages = HostPageAllocator(self.config.tier.n_host_pages, 4)
        return Scheduler(self.config, self.host_pages), TieredDevice(self.config)

    def check_plan(self, plan: StepPlan) -> None:
        super().check_plan(plan)
        assert plan.n_rows or not (plan.n_moves or len(plan.mirrors) or len(plan.restores)), "moves in a plan that may not be launched"
        lost = int(sum(self.device.leases[slot, 0] >= 0 for slot in plan.slots.tolist()))
        assert plan.offloaded or not lost or len(plan.hot_pages), "a plan with offloaded rows says it has none"

    def drain(self) -> None:
        super().drain()
        tier = self.scheduler.tier
        assert tier is not None and tier.idle
        used = sum(self.scheduler._pool.pages.refs(page) > 0 for page in range(self.config.n_pages))
        assert self.host_pages.n_used == used
        self.host_pages.check()
