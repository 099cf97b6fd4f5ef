"""Whether slots hold what the placement says, by a checksum of every slot of every rank."""

from __future__ import annotations

import time

import numpy as np
import torch

from ..topology import Ints
from .digest import Digest
from .mover import Mover

_SHOWN = 5
_IDLE_S = 60.0  # for the worker thread to be done with what was given up


class Audit:
    """Compares all copies of an expert with each other, and with what the first audit found for that expert."""

    def __init__(self, mover: Mover) -> None:
        self._mover = mover
        self._digest = Digest(mover.states[0].device)
        self._first: Ints | None = None  # [layers, experts]

    def run(self) -> list[str]:
        """Problems, the same on all ranks; [] if there are none. Collective; no cycle may be under way, and steps stand still.

        Reads all experts of the rank once.

        Raises:
            RuntimeError: the worker thread, which uses the same buffers, is not done with a cycle that was given up.
        """
        if not self._mover.worker.start(lambda: None).wait(time.monotonic() + _IDLE_S):
            raise RuntimeError(f"audit: rank {self._mover.rank} is still at work for a cycle that was given up, after {_IDLE_S:g} s")
        found = self._gather(self._own())
        problems = []
        slots, n_experts = self._mover.slots, self._mover.n_experts
        now = np.zeros((len(slots), n_experts), dtype=np.int64)
        for layer, row in enumerate(slots):
            for expert in range(n_experts):
                places = np.flatnonzero(row == expert)
                digests = found[layer, places]
                now[layer, expert] = digests[0]
                odd = places[digests != digests[0]]
                if len(odd):
                    problems.append(f"MoE layer {layer}: slot {odd[0]} does not hold the same expert {expert} as slot {places[0]}")
                elif self._first is not None and digests[0] != self._first[layer, expert]:
                    problems.append(f"MoE layer {layer}: slot {places[0]} does not hold the expert {expert} of the first audit")
        if self._first is None and not problems:
            self._first = now
        more = len(problems) - _SHOWN
        return problems[:_SHOWN] + ([f"and {more} more"] if more > 0 else [])

    def _own(self) -> torch.Tensor:
        """int64 [layers, most slots of a rank] digests of this rank's slots."""
        mover = self._mover
        table = torch.zeros(len(mover.states), max(mover.topology.slots), dtype=torch.int64)
        payload, out = mover.staging.payload(mover.staging.spare), torch.zeros((), dtype=torch.int64, device=mover.states[0].device)
        with torch.inference_mode():
            for layer, state in enumerate(mover.states):
                for slot in range(state.n_slots):
                    state.pack(slot, payload)
                    self._digest.of(payload, out)
                    table[layer, slot] = out.item()
        return table

    def _gather(self, own: torch.Tensor) -> Ints:
        """[layers, slots] digests of all ranks."""
        mover, members = self._mover, self._mover.members
        found = np.zeros((len(own), mover.topology.n_slots), dtype=np.int64)
        place = members.index(mover.rank)
        for offset in range(len(members)):
            to, of = members[(place + offset) % len(members)], members[(place - offset) % len(members)]
            theirs = own
            if offset:
                theirs = torch.zeros_like(own)
                mover.transport.exchange((own, to), (theirs, of))
            first, stop = mover.topology.first_slot[of : of + 2]
            found[:, first:stop] = theirs[:, : stop - first].numpy()
        return found
