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
from .copies_on_host import CopiesOnHost
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
        self,
        *,
        cache: KVCache,
        pool: HostPool,
        staging: Staging,
        topk: int,
        writes: bool = True,
        shared: bool = False,
        keys: PoolPairs | None = None,
        debug: bool = False,
    ) -> None:
        """``shared``: other ranks rely on the copies of this one. ``keys``: index keys are copied too, and others use the pool."""
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
        on_cuda = cache.device.type == "cuda"
        self._ops = kernels_or_twin("...attention.kernels.mirror_pages", __package__, cuda=on_cuda)
        self._empty = kernels_or_twin("...attention.kernels.release_hot", __package__, cuda=on_cuda)
        self._keys, self._on_host = keys, CopiesOnHost()
        if debug and keys is None:
            for host in hosts:  # not all of the pool: the other ranks that share it may be at work
                host.bytes.fill_(_POISON)
        if debug:
            cache.poison((), range(cache.n_device_pages))

    def before(self, plan: StepPlan, *, tables: bool) -> None:
        """Everything that the step of ``plan`` relies on; without ``tables`` its graph changes those itself."""
        if self._keys is not None and (len(plan.imports) or len(plan.freed_pages)):
            self._bring(plan, self._keys)
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

    def _bring(self, plan: StepPlan, keys: PoolPairs) -> None:
        """Index keys of pages that come from the directory, into logical pages of which nothing is read any more."""
        if self._copies and self._on_host.involves(plan.freed_pages):  # a copy of what they held may not have begun
            self._staging.streams.follow(self._copies[-1][1])
        if len(plan.imports):
            found = self._staging.upload({"logical": plan.imports[:, 0].copy(), "host": plan.imports[:, 1].copy()})
            self._ops.restore_layers(keys, found["host"], found["logical"], page_size=1)

    def _believe(self, plan: StepPlan) -> None:
        """Host pages that ``plan`` says are finished are taken for that only if their copies are: others would be read as garbage.

        What is left out counts as unwritten when it is read.
        """
        pages = plan.host_pages[:, 1]
        named = pages[pages >= 0]
        plan_of_copy = self._copied[named]
        right = (plan_of_copy >= 0) & (plan_of_copy <= plan.step - RIPE_AFTER)
        right |= np.isin(named, plan.imports[:, 1])  # finished before they came here
        self._copied[named] = NOWHERE
        if not right.all():
            believed = plan.host_pages.copy()
            believed[np.isin(pages, named[~right]), 1] = NOWHERE
            plan.host_pages = believed

    def _lease(self, plan: StepPlan) -> None:
        """Hot rows that leases gain or lose hold nothing."""
        changes = plan.hot_pages
        begins = changes[changes[:, 1] == 0]  # or ends
        self._leased[begins[:, 0]] = begins[:, 2] >= 0
        slots, place = np.unique(changes[:, 0], return_inverse=True)
        first, last = np.full(len(slots), self.places.lease_pages, dtype=np.int32), np.zeros(len(slots), dtype=np.int32)
        np.minimum.at(first, place, changes[:, 1])
        np.maximum.at(last, place, changes[:, 1] + 1)
        found = self._staging.upload({"slots": slots, "first": first, "last": last})
        assert self._cache.hot is not None
        held, size = self._cache.hot.positions, self._cache.page_size
        self._empty.release_hot(held, found["slots"], found["first"], found["last"], page_size=size)

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
        arrays = {"device": plan.mirrors[:, 0].copy(), "host": plan.mirrors[:, 1].copy()}
        found = self._staging.upload(arrays if self._keys is None else arrays | {"logical": plan.mirrored.copy()})

        def copy() -> None:
            self._ops.mirror_layers(self._pairs, found["device"], found["host"], page_size=self._cache.page_size)
            if self._keys is not None:
                self._ops.mirror_layers(self._keys, found["logical"], found["host"], page_size=1)

        mark = self._staging.streams.beside(copy, found.values())
        self._copies.append((plan.step, mark))
        if self._keys is not None:
            self._on_host.started(plan.step, mark, plan.mirrored)

    def copies_done(self, step: int) -> bool:
        """Whether the copies of plan ``step`` and all before it are finished for certain; never waits. With a directory only."""
        return self._on_host.done(step)

    def settle(self, step: int) -> None:
        """Block the host until copies that plan ``step`` relies on are done; before it goes to ranks that share the pool."""
        for plan, mark in self._copies:
            if plan <= step - RIPE_AFTER:
                self._staging.streams.wait(mark)
