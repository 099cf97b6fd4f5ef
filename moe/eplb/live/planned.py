"""The beginning of a cycle: loads are summed, one rank plans, all get the plan and check it, and know the same batches."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..plan import Floats, rank_loads
from ..topology import Ints, Topology
from ..validate import validate
from .changes import Batch
from .message import PlanMessage
from .points import Probe
from .schedule import make_schedule
from .transport import LinkError, Transport
from .trouble import Trouble

Counts = npt.NDArray[np.int64]
#: (load [layers, experts], slots now [layers, slots]) -> what has ``slot_to_expert`` [layers, slots] and ``reason``, such as a ``Plan``
MakePlan = Callable[[Floats, Ints], Any]


@dataclass(kw_only=True)
class Planned(Trouble):
    """What a rank knows when planning is over; without a problem it has a plan."""

    reason: str = ""  # of the plan
    target: Ints | None = None  # [layers, slots]
    batches: list[Batch] = field(default_factory=list)
    before: float = 0.0  # imbalance now, as the load has it
    after: float = 0.0  # and with the plan
    digest: int = 0  # equal on two ranks if they are about to do the same


@dataclass(kw_only=True)
class Planner:
    """This rank's part in planning. The first of ``members`` plans; the others follow. Whatever fails, all messages are sent."""

    rank: int
    n_experts: int
    staging: int  # experts a rank may receive in a batch
    max_sends: int
    transport: Transport
    make_plan: MakePlan
    probe: Probe
    _given_up: threading.Event = field(default_factory=threading.Event, init=False)  # of the present run

    def run(
        self, counts: Callable[[], Counts], now: Ints, topology: Topology, members: Sequence[int], given_up: threading.Event | None = None
    ) -> Planned:
        """In the worker thread.

        Args:
            counts: gives this rank's [layers, experts].
            now: [layers, slots] placement.
            topology: of the slots.
            members: ranks that take part, ascending.
            given_up: set once nobody wants the plan any more: messages still go round, but nothing else is done.
        """
        found = Planned()
        self._given_up = given_up or threading.Event()
        mine = self._counted(counts, now, found)
        message: PlanMessage | None
        if self.rank == members[0]:
            message = self._lead(mine, now, topology, members[1:], found)
        else:
            message = self._follow(mine, now, members[0], found)
        if message is not None:
            self._accept(message, now, topology, found)
        return found

    def _counted(self, counts: Callable[[], Counts], now: Ints, found: Planned) -> torch.Tensor:
        """int64 [layers * experts + 1]: the counts, and whether they are no good."""
        table = torch.zeros(len(now) * self.n_experts + 1, dtype=torch.int64)
        try:
            self.probe("sum")
            array = np.asarray(counts())
            if array.shape != (len(now), self.n_experts):
                raise ValueError(f"counts must be [{len(now)}, {self.n_experts}], found {list(array.shape)}")
            table[:-1] = torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64)).view(-1)
        except Exception as error:
            found.fail(f"its counts: {error}")
            table[-1] = 1
        return table

    def _lead(self, total: torch.Tensor, now: Ints, topology: Topology, others: Sequence[int], found: Planned) -> PlanMessage:
        part, dead = torch.zeros_like(total), set()
        for peer in others:
            try:
                self.transport.exchange(None, (part, peer))
                total += part
            except LinkError as error:
                found.fail(str(error), peer)
                found.broken = True
                dead.add(peer)
        message = self._plan(total, now, topology, found)
        words = message.encode(now.shape)
        for peer in others:
            if peer in dead:
                continue
            try:
                self.transport.exchange((words, peer), None)
            except LinkError as error:
                found.fail(str(error), peer)
                found.broken = True
        return message

    def _plan(self, total: torch.Tensor, now: Ints, topology: Topology, found: Planned) -> PlanMessage:
        try:
            if found.problems or int(total[-1]):
                raise ValueError(found.problems[0] if found.problems else f"{int(total[-1])} ranks have no counts")
            self._check_wanted()
            load = total[:-1].view(len(now), -1).numpy().astype(np.float64)
            self.probe("plan")
            plan = self.make_plan(load, now)
            target = np.asarray(plan.slot_to_expert)
            self.probe("share")
            problems = validate(target, self.n_experts, topology, duplicates=False)
            if problems or target.shape != now.shape:
                raise ValueError(f"the plan cannot be used: {'; '.join(problems) or f'its shape is {list(target.shape)}'}")
            before, after = (_imbalance(slots, load, topology) for slots in (now, target))
            return PlanMessage(good=True, slots=target.astype(np.int64), text=str(plan.reason), before=before, after=after)
        except Exception as error:
            return PlanMessage(good=False, slots=now, text=f"no plan: {str(error) or type(error).__name__}")

    def _follow(self, mine: torch.Tensor, now: Ints, leader: int, found: Planned) -> PlanMessage | None:
        words = PlanMessage(good=False, slots=now, text="").encode(now.shape)
        try:
            self.transport.exchange((mine, leader), None)
            self.transport.exchange(None, (words, leader))
        except LinkError as error:
            found.fail(str(error), leader)
            found.broken = True
            return None
        return PlanMessage.decode(words, now.shape)

    def _check_wanted(self) -> None:
        if self._given_up.is_set():
            raise ValueError("the cycle was given up while other work was under way")

    def _accept(self, message: PlanMessage, now: Ints, topology: Topology, found: Planned) -> None:
        """Check the plan and make its batches, on every rank for itself."""
        try:
            if not message.good:
                raise ValueError(message.text)
            self._check_wanted()
            self.probe("validate")
            problems = validate(message.slots, self.n_experts, topology, duplicates=False)
            if problems:
                raise ValueError(f"the plan cannot be used: {'; '.join(problems)}")
            self.probe("schedule")
            found.batches = make_schedule(now, message.slots, topology, staging=self.staging, max_sends=self.max_sends)
            found.target, found.reason = message.slots, message.text
            found.before, found.after = message.before, message.after
            found.digest = zlib.crc32(repr(found.batches).encode(), zlib.crc32(message.slots.tobytes()))
        except Exception as error:
            found.fail(str(error))


def taken(counts: Callable[[], Counts | Callable[[], Counts]]) -> Callable[[], Counts]:
    """What gives the worker thread ``counts()``, which is called now: a copy of what it returns, or the function that it returns.

    An error comes later too, so that all ranks are told of it.
    """
    try:
        found = counts()
    except Exception as error:
        failure = error

        def fail() -> Counts:
            raise failure

        return fail
    if callable(found):
        return found
    copy = np.array(found, dtype=np.int64)
    return lambda: copy


def _imbalance(slots: Ints, load: Floats, topology: Topology) -> float:
    """Largest over mean load of the usable ranks, mean over the layers that have load."""
    usable = [rank for rank in range(topology.n_ranks) if rank not in topology.failed]
    loads = rank_loads(slots, load, topology)[:, usable]
    loads = loads[loads.sum(1) > 0]
    return float((loads.max(1) / loads.mean(1)).mean()) if len(loads) else 1.0
