"""First phase of a batch: every expert that is to come lies in a staging buffer, compared with what its sender read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..topology import Ints
from .changes import Batch, Transfer
from .pace import Pace
from .points import Probe
from .staging import Staging
from .state import ExpertState
from .tables import Tables
from .transport import LinkError, Transport
from .trouble import Trouble
from .worker import Gate

#: tensors of a logical expert by declared name, without the slot dimension: (MoE layer, expert) -> tensors
LoadExpert = Callable[[int, int], Mapping[str, torch.Tensor]]


@dataclass(kw_only=True)
class Prepared(Trouble):
    """What a rank has of a batch when its first phase is over; without a problem it is ready."""

    stopped: bool = False  # given up before it was done
    dealt: Any = None  # tables of the layers that change, for the commit
    n_received: int = 0
    n_loaded: int = 0


@dataclass(kw_only=True)
class Preparer:
    """This rank's part in the first phase. A rank that fails sends all it has to, marked as no good, so that nobody waits for it."""

    rank: int
    first_slot: int  # of this rank
    states: Sequence[ExpertState]
    staging: Staging
    pace: Pace
    transport: Transport
    tables: Tables
    probe: Probe
    load_expert: LoadExpert | None = None
    waiting_for: int = -1  # rank of the exchange under way

    def run(self, batch: Batch, after: Ints | None, gate: Gate, lost: frozenset[int] = frozenset()) -> Prepared:
        """In the worker thread.

        Args:
            batch: of all ranks.
            after: [layers, slots] when it is committed; None: tables are not made.
            gate: lets the pieces of all rounds pass, in order.
            lost: ranks not to talk to.
        """
        found, dead = Prepared(), set(lost)
        self.transport.begin()
        with torch.inference_mode(), self.transport.aside():
            self._load(batch, found)
            for number, group in enumerate(batch.rounds):
                if not self._round(number, group, gate, found, dead):
                    found.stopped = True
                    return found
            if after is not None:
                self._deal(batch, after, found)
        self.transport.settle()
        return found

    def _load(self, batch: Batch, found: Prepared) -> None:
        for move in batch.loads:
            if move.target != self.rank:
                continue
            try:
                self.probe("load")
                if self.load_expert is None:
                    raise ValueError("no rank holds it, and there is no function that loads it")
                self.states[move.layer].fill(self.staging.payload(move.buffer), self.load_expert(move.layer, move.expert))
                found.n_loaded += 1
            except Exception as error:
                found.fail(f"expert {move.expert} of MoE layer {move.layer} was not loaded: {error}")

    def _round(self, number: int, group: Sequence[Transfer], gate: Gate, found: Prepared, dead: set[int]) -> bool:
        """One round of transfers, as far as this rank has a part in it; False if it was given up."""
        send = next((move for move in group if move.source == self.rank), None)
        receive = next((move for move in group if move.target == self.rank), None)
        if send is not None and send.target not in dead:
            self._pack(send, found)
        for piece in range(self.pace.pieces):
            if not gate.passes(number * self.pace.pieces + piece):
                return False
            self._exchange(send, receive, self.pace.piece(piece), found, dead)
        if receive is not None and receive.source not in dead:
            self._unseal(receive, found)
        return True

    def _pack(self, move: Transfer, found: Prepared) -> None:
        """Copy an expert to the spare buffer with a trailer, which says so if that failed."""
        spare = self.staging.spare
        try:
            self.probe("send")
            state = self.states[move.layer]
            state.pack(move.source_slot - self.first_slot, self.staging.payload(spare))
            self.staging.seal(spare, move.layer, move.expert, good=True)
        except Exception as error:
            found.fail(f"expert {move.expert} of MoE layer {move.layer} was not sent: {error}")
            self.staging.seal(spare, move.layer, move.expert, good=False)

    def _exchange(self, send: Transfer | None, receive: Transfer | None, piece: slice, found: Prepared, dead: set[int]) -> None:
        buffers = self.staging.buffers
        out = None if send is None or send.target in dead else (buffers[self.staging.spare, piece], send.target)
        into = None if receive is None or receive.source in dead else (buffers[receive.buffer, piece], receive.source)
        if out is None and into is None:
            return
        self.waiting_for = into[1] if into is not None else out[1] if out is not None else -1
        try:
            self.transport.exchange(out, into)
        except LinkError as error:
            found.fail(str(error), error.peer)
            found.broken = True
            dead.add(error.peer)
        except Exception as error:  # no more is known of either connection; those to other ranks go on
            found.fail(f"{type(error).__name__}: {error}")
            found.broken = True
            dead.update(part[1] for part in (out, into) if part is not None)
        self.waiting_for = -1

    def _unseal(self, move: Transfer, found: Prepared) -> None:
        try:
            self.probe("receive")
            trailer = self.staging.unseal(move.buffer)
            self.probe("checksum")
            what = f"expert {move.expert} of MoE layer {move.layer}"
            if not trailer.good:
                raise ValueError(f"its sender could not read {what}")
            if (trailer.layer, trailer.expert) != (move.layer, move.expert):
                raise ValueError(f"{what} was due, expert {trailer.expert} of MoE layer {trailer.layer} came")
            found.n_received += 1
        except Exception as error:
            found.fail(f"from rank {move.source}: {error}", move.source)

    def _deal(self, batch: Batch, after: Ints, found: Prepared) -> None:
        try:
            self.probe("tables")
            layers = batch.layers
            found.dealt = self.tables.deal(layers, after[layers])
        except Exception as error:
            found.fail(f"tables of MoE layers {batch.layers} were not made: {error}")
