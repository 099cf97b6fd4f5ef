"""Serving from cached prefixes: measured steps and copies, played out for clients."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ....attention.kv.host.pool import HostPool
from ....attention.ops import AttentionOps
from .capacity import Capacity
from .clock import measure
from .closed_loop import System
from .copies import copy_seconds
from .products import MOST_REQUESTS, Products
from .rig import Rig
from .shape import RigShape
from .ways import Way

NETWORK_GB_PER_S = 12.5  # of the RDMA baseline: 100 Gb/s
_PARTS_FROM = 16  # requests from which the engine fetches in parts


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is compared."""

    base: RigShape  # its requests and context are set in turn
    contexts: tuple[int, ...]  # tokens of a cached prefix
    output: int = 1000  # tokens of an answer
    budget: int = 40 << 30  # bytes of device memory for keys and rows
    steps: int = 8  # timed of each batch, after 8
    batches: tuple[int, ...] = (1, 4, 16, 48)  # measured, and the largest that fits

    def capacity(self, context: int) -> Capacity:
        """Room for requests of ``context``."""
        return Capacity(shape=replace(self.base, context=context), tokens=context + self.output, budget=self.budget)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Of one context. Seconds."""

    context: int
    capacity: Capacity
    demand_s: dict[int, float]  # step by batch, rows fetched on demand
    resident_s: dict[int, float]  # every row on the device
    cold_s: float  # first step of one request with an empty hot buffer, beyond a usual one
    missed: float  # share of chosen rows fetched, in usual steps
    link_s: float  # copy of a whole prefix, rows and index keys, at the link's speed
    network_s: float  # the same at the network's
    index_s: float  # copy of its index keys alone


def measure_context(plan: Plan, context: int, device: torch.device, ops: AttentionOps, host: HostPool, products: Products) -> Measured:
    """Time steps of growing batches, and copies.

    Raises:
        ValueError: not even one request fits the budget.
    """
    capacity = plan.capacity(context)
    most, most_resident = min(capacity.offloaded(), MOST_REQUESTS), capacity.resident()
    if most_resident < 1:
        one = (capacity.index_bytes + capacity.latent_bytes) / 2**30
        raise ValueError(
            f"{plan.budget / 2**30:.1f} GiB do not hold one request of {context} tokens ({one:.1f} GiB); "
            "give a larger --budget-gib or smaller --contexts"
        )
    demand, resident = {}, {}
    cold, missed = 0.0, 0.0
    for batch in sorted({1, *(b for b in plan.batches if b < most), most}):
        way: Way = "parts" if batch >= _PARTS_FROM else "beside"
        ways: tuple[Way, ...] = (way, "resident") if batch <= most_resident else (way,)
        with_all = _steps(plan, context, batch, ways, device, ops, host, products)
        demand[batch], missed = with_all[way], with_all["missed"]
        cold = with_all["cold"] if batch == 1 else cold
        if "resident" in with_all:
            resident[batch] = with_all["resident"]
    if most_resident not in resident:
        resident[most_resident] = _steps(plan, context, most_resident, ("resident",), device, ops, host, products)["resident"]
    whole = capacity.index_bytes + capacity.latent_bytes
    return Measured(
        context=context, capacity=capacity, demand_s=demand, resident_s=resident, cold_s=max(0.0, cold), missed=missed,
        link_s=copy_seconds(host, whole, device), network_s=copy_seconds(host, whole, device, gb_per_s=NETWORK_GB_PER_S),
        index_s=copy_seconds(host, capacity.index_bytes, device),
    )  # fmt: skip


def _steps(
    plan: Plan, context: int, batch: int, ways: Sequence[Way], device: torch.device, ops: AttentionOps, host: HostPool, products: Products
) -> dict[str, float]:
    """Seconds of a step each way; on demand also the share missed and, at batch 1, what a cold step takes longer."""
    shape = replace(plan.base, context=context, requests=batch)
    rig = Rig(shape, device, ops, host=host, products=products)
    found: dict[str, float] = {}
    try:
        for way in ways:
            timing = measure(rig, way, warm_up=8, steps=plan.steps)
            found[way] = timing.us / 1e6
            if way != "resident":
                found["missed"] = timing.missed(shape.requests * shape.k)
                if batch == 1:
                    cold = measure(rig, way, warm_up=2, steps=plan.steps, cold=True)
                    found["cold"] = statistics.median(cold.step_us) / 1e6 - found[way]
    finally:
        rig.close()
        del rig
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return found


def systems(found: Measured, rest_s: float, sharing: int = 1) -> list[System]:
    """Ours first; then copies of the whole prefix before decoding, into device memory or into host memory; then no copy at all.

    ``sharing`` GPUs have one network adapter between them, so that a copy takes that many times as long.
    """
    network_s = found.network_s * sharing
    room, resident = found.capacity.offloaded(), found.capacity.resident()

    def system(name: str, steps: dict[int, float], copy_s: float, capacity: int, *, blocks: bool = False, cold_s: float = 0.0) -> System:
        return System(name=name, step_s=steps, copy_s=copy_s, blocks=blocks, cold_s=cold_s, capacity=capacity, rest_s=rest_s)

    demand, whole = found.demand_s, found.resident_s
    return [
        system("rows on demand", demand, found.index_s, room, cold_s=found.cold_s),
        system("network copy first, to the device", whole, network_s, resident),
        system("network copy first, to the device, decoding waits", whole, network_s, resident, blocks=True),
        system("network copy first, to host memory", demand, network_s, room, cold_s=found.cold_s),
        system("network copy first, to host memory, decoding waits", demand, network_s, room, blocks=True, cold_s=found.cold_s),
        system("link copy first, to the device", whole, found.link_s, resident),
        system("all resident", whole, 0.0, resident),
    ]
