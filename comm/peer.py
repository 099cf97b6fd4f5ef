"""Dispatch and combine by plain stores into the other ranks' memory, with flags that carry epochs.

Four operations, one a half: ``send_tokens`` stores rows where they are wanted, ``receive_tokens`` waits for them,
``send_home`` stores results where the tokens came from, ``sum_home`` waits and adds. ``wire`` says where everything lies and
why no place is written too early. The host waits for nothing and allocates nothing but results, so a CUDA graph can hold it.
"""

from __future__ import annotations

from typing import Any

import torch

from ..parallel.group import Group
from .blocks import blocks_at
from .caps import Caps
from .checks import check_call, check_not_capturing, check_outputs, check_valid
from .dispatcher import EPSpec, Routed
from .flight import Flight
from .heap.heap import Heap
from .layouts import arrange, contiguous, masked
from .members import PeerMembers
from .ops import PeerOps
from .order import choices_of
from .rows import DTYPES
from .state import PeerState
from .timeout import FlagMissed, failure
from .watch import StatusWatch
from .wire import Wire

MOST_CHOICES = 32  # of a token


class PeerDispatcher(PeerMembers):
    """The backend over a heap whose memory all ranks map: "symm", "nvshmem", "shm" or "virtual" by the heap's name.

    Rows of the layout "rank" are the workspace itself: R * capacity of them, a rank's behind another's.
    """

    caps = Caps(
        graph=True, fp8=True, overlap_without_sm=True, fault_mask=True, deterministic=True, indexed=True, max_top_k=MOST_CHOICES,
        needs=("memory of every rank mapped by every rank",),
    )  # fmt: skip

    def __init__(
        self,
        group: Group,
        spec: EPSpec,
        heap: Heap,
        *,
        ops: PeerOps | None = None,
        device: torch.device | None = None,
        compare: bool = True,
    ) -> None:
        """Collective over ``group``: specs are compared, then the workspace is made. The heap is this object's from now on.

        Args:
            group: the expert-parallel ranks; also the way small control messages take.
            spec: the same on all ranks.
            heap: where the workspace comes from.
            ops: None: the kernels on CUDA, their twins elsewhere.
            device: of tokens; None: where the heap's memory is.
            compare: False where the caller has all specs (virtual ranks).

        Raises:
            ValueError: a spec that cannot be, or that differs between ranks. The heap is closed.
        """
        self.name = heap.name
        try:
            check_not_capturing(device)
            super().__init__(group, spec, compare=compare)
            self.wire = self._layout(spec)
            self.peers = heap.allocate(self.wire.total_bytes)
        except BaseException:
            heap.close()
            raise
        self.heap = heap
        self.device = device or self.peers.own.device
        self.ops = ops or PeerOps.load("triton" if self.device.type == "cuda" else "torch")
        self.state = PeerState.make(spec.depth, spec.n_ranks, self.device)
        rows = spec.n_ranks * spec.max_tokens
        self._slots = torch.full((spec.depth, rows, spec.top_k), -1, dtype=torch.int32, device=self.device)
        self._shares = torch.zeros((spec.depth, rows, spec.top_k), dtype=torch.float32, device=self.device)
        self._free = [True] * spec.depth  # by channel
        self._watch = StatusWatch(self.state.status)

    def _layout(self, spec: EPSpec) -> Wire:
        """Where everything lies in a workspace."""
        return Wire.of(spec)

    # ---- dispatch ----------------------------------------------------------------------------------------------------

    def dispatch_send(
        self,
        x: torch.Tensor,
        slot_ids: torch.Tensor,
        weights: torch.Tensor,
        n_valid: torch.Tensor | None = None,
        *,
        tag: int = 0,
        capacity: int | None = None,
        scales: torch.Tensor | None = None,
    ) -> Flight:
        """See ``Dispatcher``.

        A fault-tolerant dispatcher ignores ``capacity``: a rank that is given up may write late, into its own places only if
        these are where they were.
        """
        self._check_open()
        check_call(self.spec, x, slot_ids, weights, limit=capacity, scales=scales)
        check_valid(n_valid, x)
        self._begin()
        wire = self.wire if capacity is None or self.spec.fault_tolerant else self.wire.narrowed(max(capacity, 1))
        if x.device.type == "cpu" or self.spec.deterministic:  # elsewhere the order of a token's choices is left to the kernels
            slot_ids, weights = choices_of(slot_ids, weights, as_given=self.spec.deterministic)
        flight = Flight(
            channel=self._free.index(True), wire=wire, ids=slot_ids.to(torch.int32).contiguous(),
            weights=weights.to(torch.float32).contiguous(), n_valid=n_valid, tag=tag, epoch=self._epoch,
        )  # fmt: skip
        self._free[flight.channel] = False
        try:
            self._send(x, flight, scales)
        except (TypeError, ValueError):  # refused, nothing was sent
            self._free[flight.channel] = True
            self._end()
            raise
        return flight

    def _send(self, x: torch.Tensor, flight: Flight, scales: torch.Tensor | None) -> None:
        self._run(
            self.ops.send_tokens, flight.wire, self.peers, self.state, columns(x), flight.ids, flight.weights,
            channel=flight.channel, n_valid=flight.n_valid, scales=scales, tag=flight.tag, programs=self.spec.max_sms,
        )  # fmt: skip

    def dispatch_recv(self, ticket: Flight, layout: str = "contiguous") -> Routed:
        """See ``Dispatcher``."""
        self._check_recv(layout)
        spec, wire, channel = self.spec, ticket.wire, ticket.channel
        rows = wire.n_ranks * wire.max_tokens
        slots, shares = self._slots[channel, :rows], self._shares[channel, :rows]
        self._run(
            self.ops.receive_tokens, wire, self.peers, self.state, slots, shares,
            channel=channel, timeout_ms=spec.timeout_ms, fault_tolerant=spec.fault_tolerant, tag=ticket.tag,
            programs=spec.max_sms,
        )  # fmt: skip
        blocks = blocks_at(wire, self.peers, self.peers.rank, channel)
        routed = Routed(x=blocks.values, scales=blocks.scales, handle=ticket, layout=layout, slots=slots, shares=shares, epoch=ticket.epoch)
        if layout != "rank":
            ticket.arrangement = (contiguous if layout == "contiguous" else masked)(spec, slots)
            row = torch.arange(rows, dtype=torch.int32, device=slots.device)
            arrange(spec, routed, ticket.arrangement, row // wire.max_tokens * spec.max_tokens + row % wire.max_tokens)
        return routed

    # ---- combine -----------------------------------------------------------------------------------------------------

    def combine_send(self, y: torch.Tensor, routed: Routed, *, index: torch.Tensor | None = None) -> Flight:
        """See ``Dispatcher``."""
        self._check_open()
        flight: Flight = routed.handle
        rows = flight.wire.n_ranks * flight.wire.max_tokens
        slots, shares = self._slots[flight.channel, :rows], self._shares[flight.channel, :rows]
        if routed.layout != "rank":
            assert flight.arrangement is not None
            check_outputs(self.spec, y, tuple(routed.x.shape[:-1]))
            y, index = y.reshape(-1, self.spec.hidden), flight.arrangement.index
        elif index is None:
            check_outputs(self.spec, y, rows)
            if self.spec.deterministic:
                raise ValueError("combine: in deterministic mode the layout rank needs index, and outputs without weights")
        self._run(
            self.ops.send_home, flight.wire, self.peers, self.state, columns(y), slots,
            channel=flight.channel, index=index, shares=None if index is None or self.spec.deterministic else shares,
            deterministic=self.spec.deterministic, tag=flight.tag, programs=self.spec.max_sms, **_pulling(flight),
        )  # fmt: skip
        return flight

    def results(self, routed: Routed) -> torch.Tensor | None:
        """Where outputs of the layout "rank" may be written, [R * capacity, hidden], so that ``combine_send`` moves nothing.

        The other ranks then fetch them from there in ``combine_recv``. All ranks ask, or none does. None where that cannot be: over
        twins, in deterministic mode, and in fault-tolerant mode, where one that was given up could still fetch what is overwritten.
        """
        if routed.layout != "rank" or self.ops.name != "triton" or self.spec.deterministic or self.spec.fault_tolerant:
            return None
        flight: Flight = routed.handle
        flight.pull = True
        return blocks_at(flight.wire, self.peers, self.peers.rank, flight.channel).home.flatten(0, 1)

    def combine_recv(self, ticket: Flight, out: torch.Tensor | None = None) -> torch.Tensor:
        """See ``Dispatcher``."""
        self._check_open()
        spec = self.spec
        if out is None:
            out = torch.empty((len(ticket.ids), spec.hidden), dtype=DTYPES[spec.dtype], device=ticket.ids.device)
        else:
            check_outputs(spec, out, len(ticket.ids))
        self._run(
            self.ops.sum_home, ticket.wire, self.peers, self.state, ticket.ids, ticket.weights, out,
            channel=ticket.channel, timeout_ms=spec.timeout_ms, fault_tolerant=spec.fault_tolerant,
            deterministic=spec.deterministic, n_valid=ticket.n_valid, tag=ticket.tag,
            programs=spec.max_sms, **_pulling(ticket),
        )  # fmt: skip
        self._free[ticket.channel] = True
        self._end()
        return out

    def _run(self, op: Any, *args: Any, **more: Any) -> None:
        """Run an operation. Twins raise at once; what kernels leave is found by ``health``."""
        try:
            op(*args, **more)
        except FlagMissed:
            error = failure(self.state.status.tolist(), self.group.ranks, self.group.index, self.spec.timeout_ms)
            assert error is not None
            raise error from None

    # ---- the end -----------------------------------------------------------------------------------------------------

    def traffic(self) -> torch.Tensor | None:
        """See ``Dispatcher``."""
        return self.state.sent

    def bytes_sent(self, counters: torch.Tensor | None = None) -> list[int]:
        """See ``Dispatcher``: rows, choices and results; flags (16 bytes a rank and half) are not counted.

        Waits for the device, unless it gets ``counters``.
        """
        wire = self.wire
        rows, choices, results = (self.state.sent if counters is None else counters).tolist()
        each = zip(rows, choices, results, strict=True)
        return [a * wire.row_bytes + b * 8 * wire.top_k + c * wire.hidden * wire.home_itemsize for a, b, c in each]

    def forget_traffic(self) -> None:
        """See ``BaseDispatcher``."""
        self.state.sent.zero_()

    def close(self) -> None:
        """See ``Dispatcher``."""
        if not self._closed:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self._sent = self.bytes_sent()
            super().close()
            del self.peers, self._slots, self._shares
            self.heap.close()


def columns(x: torch.Tensor) -> torch.Tensor:
    """x [n, width] with contiguous columns: itself, or a copy."""
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


def _pulling(flight: Flight) -> dict[str, bool]:
    """The keyword of kernels over results that are fetched; twins do not know it."""
    return {"pull": True} if flight.pull else {}
