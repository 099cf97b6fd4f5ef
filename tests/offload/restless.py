"""Engines whose leases grow whenever they can, and shrink at random steps for no reason."""

from __future__ import annotations

import random

from rorqual import LLM


def unsettle(llm: LLM, seed: int) -> None:
    """From now on leases of the replica that this rank leads come and go, and its books are checked at every step."""
    leader = llm.engine.leader
    if leader is None:
        return
    scheduler, draw = leader.scheduler, random.Random(seed)
    tier, schedule = scheduler.tier, scheduler.schedule
    tier.leases.every, tier.leases.rest = 1, 0

    def restless():
        if draw.random() < 0.3:
            tier.leases.give_back(len(tier.book.free) + draw.randint(1, 6))
        plan = schedule()
        scheduler.check()
        return plan

    scheduler.schedule = restless


def changes(llm: LLM) -> tuple[int, int]:
    """How often leases of this replica grew and shrank."""
    leases = llm.engine.leader.scheduler.tier.leases
    return leases.grown, leases.shrunk
