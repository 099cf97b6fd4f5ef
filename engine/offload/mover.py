"""What one rank does of a plan's moves: tables, restores and hot rows before the step, copies to the host after it."""

from __future__ import annotations

from collections import deque

import numpy as np
import torch

from ...attention.kernels.mirror_pages_torch import PoolPairs, pool_pairs
from ...attention.kv.cache import KVCache
from ...attention.kv.host.pool import HostPool
from ...attention.kv.tier import NOWHERE, HostRows, TierStep
from ...parallel.backends import kernels_or_twin
from ..plan import StepPlan
from ..staging import Staging
from ..streams import Mark
from .tier_counts import TierCounts
from .tier_limits import RIPE_AFTER
from .tier_places import TierPlaces

_POISON = 0xFF  # floats of all formats made of this byte are NaN


class Mover:
    """Moves of one rank. The host waits for nothing; the device waits for copies that are two plans old, before their pages change.

    With ``writes`` False another rank copies the same rows into the shared pool, and the leader holds back the plans that
    rely on it.
    """

    def __init__(
        self, *, cache: KVCache, pool: HostPool, staging: Staging, topk: int, writes: bool = True, shared: bool = False, debug: bool = False
    ) -> None:
        """``shared``: other ranks rely on the copies of this one."""
        assert cache.tables is not None and cache.hot is not None
        self.pool, self.shared = pool, shared
        self.places = TierPlaces.of(cache.tables)
        cache.tables = self.places.tables
        self.counts = TierCounts(cache.hot.counters, staging.streams)
        self._cache, self._staging, self._topk, self._writes, self._debug = cache, staging, topk, writes, debug
        self._copies: deque[tuple[int, Mark]] = deque()  # (plan, where its copies to the host end)
        self._copied = np.full(pool.n_pages, NOWHERE, dtype=np.int64)  # plan whose copy to the host page nobody relies on yet
        self._leased = np.zeros(self.places.spare_slot + 1, dtype=np.bool_)  # by slot
        hosts: list[HostRows] = [layer.tier.host for layer in cache.layers if layer.tier is not None]
        self._pairs: PoolPairs = pool_pairs([layer.latent.bytes for layer in cache.layers], hosts)
        self._ops = kernels_or_twin("...attention.kernels.mirror_pages", __package__, cuda=cache.device.type == "cuda")
        if debug:
            for host in hosts:  # not all of the pool: the other ranks that share it may be at work
                host.bytes.fill_(_POISON)
            cache.poison((), range(cache.n_device_pages))

    def before(self, plan: StepPlan, *, tables: bool) -> None:
        """Everything that the step of ``plan`` relies on; without ``tables`` its graph changes those itself."""
        if not (plan.n_moves or len(plan.vacated) or len(plan.restores)):
            return
        while self._copies and self._copies[0][0] <= plan.step - RIPE_AFTER:
            self._staging.streams.follow(self._copies.popleft()[1])
        if len(plan.host_pages):
            self._believe(plan)
        if self._debug and len(plan.vacated):
            self._cache.poison((), plan.vacated)
        if len(plan.hot_pages):
            self._lease(plan)
        if tables and plan.n_moves:
            at, values = self.places.changes(plan)
            moving = plan.moving.astype(np.int64)
            found = self._staging.upload({"at": at, "values": values, "slots": moving[:, 0].copy(), "moving": moving[:, 1].copy()})
            self.places.put(found["at"], found["values"], found["slots"], found["moving"])
        if len(plan.restores):
            found = self._staging.upload({"host": plan.restores[:, 0].copy(), "device": plan.restores[:, 1].copy()})
            self._ops.restore_layers(self._pairs, found["host"], found["device"], page_size=self._cache.page_size)

    def _believe(self, plan: StepPlan) -> None:
        """Host pages that ``plan`` says are finished are taken for that only if their copies are: others would be read as garbage.

        What is left out counts as unwritten when it is read.
        """
        pages = plan.host_pages[:, 1]
        named = pages[pages >= 0]
        plan_of_copy = self._copied[named]
        right = (plan_of_copy >= 0) & (plan_of_copy <= plan.step - RIPE_AFTER)
        self._copied[named] = NOWHERE
        if not right.all():
            believed = plan.host_pages.copy()
            believed[np.isin(pages, named[~right]), 1] = NOWHERE
            plan.host_pages = believed

    def _lease(self, plan: StepPlan) -> None:
        """Hot rows of leases that begin or end hold nothing."""
        slots = np.unique(plan.hot_pages[:, 0])
        self._leased[slots] = False
        self._leased[plan.hot_pages[plan.hot_pages[:, 2] >= 0, 0]] = True
        assert self._cache.hot is not None
        found = self._staging.upload({"slots": slots.astype(np.int64)})
        self._cache.hot.positions.index_fill_(1, found["slots"], NOWHERE)

    def step(self, plan: StepPlan, page_table: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor | None) -> TierStep:
        """Where the pages of the requests of ``plan`` are, for a step that runs eagerly.

        ``positions`` [R] int64 are those of its tokens where each request has one and the batch is static; None otherwise.
        """
        size = self._cache.page_size
        offloaded = plan.offloaded and int((plan.starts + plan.counts).max(initial=0)) > self._topk
        if not offloaded:
            return self.places.tables.step(page_table, slots, page_size=size, offloaded=False, positions=positions)
        self.places.tables.stamp.add_(1)
        if positions is not None:
            return self.places.tables.step(page_table, slots, page_size=size, offloaded=True, positions=positions)
        absent = np.zeros(plan.n_rows, dtype=np.bool_)
        absent[plan.absent] = True
        seeded = tuple(np.flatnonzero(np.isin(plan.slots, plan.seeds)).tolist())
        leased = self._leased[plan.slots]
        return self.places.tables.step(page_table, slots, page_size=size, offloaded=True, absent=absent, leased=leased, seeded=seeded)

    def after(self, plan: StepPlan) -> None:
        """Start the copies to the host of what the step completes."""
        self.counts.step()
        if len(plan.mirrors):
            self._copied[plan.mirrors[:, 1]] = plan.step
        if not len(plan.mirrors) or not self._writes:
            return
        found = self._staging.upload({"device": plan.mirrors[:, 0].copy(), "host": plan.mirrors[:, 1].copy()})

        def copy() -> None:
            self._ops.mirror_layers(self._pairs, found["device"], found["host"], page_size=self._cache.page_size)

        self._copies.append((plan.step, self._staging.streams.beside(copy, found.values())))

    def settle(self, step: int) -> None:
        """Block the host until copies that plan ``step`` relies on are done; before it goes to ranks that share the pool."""
        for plan, mark in self._copies:
            if plan <= step - RIPE_AFTER:
                self._staging.streams.wait(mark)
