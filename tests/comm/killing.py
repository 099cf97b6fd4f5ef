"""Ranks of which one is killed with SIGKILL at a random moment, on CPUs or GPUs."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from dataclasses import dataclass, replace

import torch

from rorqual.comm.dispatcher import Dispatcher, EPSpec
from rorqual.comm.select import make_dispatcher
from rorqual.launch.bench.comm.checks.inputs import make_tokens
from rorqual.launch.bench.comm.checks.party import Tokens, failure_of, trip
from rorqual.parallel.grid import Grid, GridSpec


@dataclass(kw_only=True)
class Rank:
    """One rank, and what its steps must give."""

    grid: Grid
    dispatcher: Dispatcher
    tokens: Tokens
    whole: torch.Tensor  # with everybody
    rest: torch.Tensor  # without the victim's experts

    def step(self) -> torch.Tensor:
        """One dispatch and combine."""
        return trip(self.dispatcher, self.grid.ep.index, self.tokens)


def start(seed: int, backend: str, world: int, timeout_ms: int, fault_tolerant: bool, shared: bool) -> Rank:
    """This rank, after which the victim ``seed % world`` has at most 0.3 s to live. ``shared``: all on the first GPU."""
    rank, victim = int(os.environ["RANK"]), seed % world
    device = torch.device("cuda", 0 if shared else rank) if backend == "symm" else torch.device("cpu")
    grid = Grid.create(GridSpec(dp=world), device, 60.0)
    spec = EPSpec(n_ranks=world, n_slots=4 * world, hidden=40, top_k=3, max_tokens=16, timeout_ms=timeout_ms)
    dispatcher = make_dispatcher(backend, grid, replace(spec, fault_tolerant=fault_tolerant))
    x, ids, weights = (tensor.to(device) for tensor in make_tokens(rank, 9, spec, "random", seed))
    left = torch.where(torch.div(ids, spec.slots_per_rank, rounding_mode="floor") == victim, -1, ids)
    whole, rest = trip(dispatcher, rank, (x, ids, weights)), trip(dispatcher, rank, (x, left, weights))
    dispatcher.health(wait=True)
    grid.ep.barrier("together")
    trip(dispatcher, rank, (x, ids, weights))  # once it is through, all have left the barrier, which cannot do without a rank
    if rank == victim:
        threading.Timer(random.Random(seed).uniform(0.0, 0.3), os.kill, (os.getpid(), signal.SIGKILL)).start()
    return Rank(grid=grid, dispatcher=dispatcher, tokens=(x, ids, weights), whole=whole, rest=rest)


def until_failure(seed: int, backend: str, world: int, timeout_ms: int, shared: bool = False) -> tuple[int, int, float]:
    """(rank named missing, epochs between, seconds of the step that failed)."""
    me = start(seed, backend, world, timeout_ms, False, shared)
    outs: list[torch.Tensor] = []
    while True:
        begin = time.monotonic()
        error = failure_of(me.dispatcher, lambda: outs.append(me.step()))
        if error is not None:
            assert failure_of(me.dispatcher, me.step) is not None, "a failed dispatcher gave results"
            return error.missing, error.epoch - error.seen, time.monotonic() - begin
        assert torch.equal(outs.pop(), me.whole)


def going_on(seed: int, backend: str, world: int, timeout_ms: int, shared: bool = False) -> tuple[list[bool], int]:
    """(who is left, good steps after the kill)."""
    me = start(seed, backend, world, timeout_ms, True, shared)
    good = between = 0
    while good < 5:
        out = me.step()
        if torch.equal(out, me.rest):
            good += 1
        else:
            assert good == 0 and (torch.equal(out, me.whole) or between == 0), "one step at most is neither with nor without the rank"
            between += not torch.equal(out, me.whole)
    mask = me.dispatcher.active_mask()
    me.dispatcher.set_active(mask)  # over the survivors alone
    for _ in range(3):
        assert torch.equal(me.step(), me.rest)
        good += 1
    me.dispatcher.health(wait=True)
    return mask, good
