"""Waiting for another rank's flag on the host: what kernels do on the device."""

from __future__ import annotations

import time

import torch

from ..blocks import Blocks
from ..heap.peers import Peers
from ..state import Failure, PeerState, Status
from ..timeout import FlagMissed
from ..wire import Wire

_EAGER_TURNS = 200  # before a wait lets other processes have the core
_NAP_S = 50e-6


def stop_if_failed(state: PeerState, fault_tolerant: bool | None = None) -> None:
    """Raise FlagMissed once a wait has failed: what this rank would send may rest on rows that never came.

    A fault-tolerant group goes on after a missed flag, and only then; None: whether it is one shows in the missing rank's place.
    """
    failed = int(state.status[Status.FAILED])
    if fault_tolerant is None:
        fault_tolerant = not int(state.active[int(state.status[Status.MISSING])])
    if failed and not (fault_tolerant and failed == Failure.MISSED):
        raise FlagMissed


def await_flag(
    wire: Wire, peers: Peers, state: PeerState, blocks: Blocks, *,
    phase: int, channel: int, source: int, timeout_ms: int, fault_tolerant: bool, tag: int, begin: float | None = None,
) -> int | None:  # fmt: skip
    """Tokens that rank ``source`` announced in the running epoch of ``channel``, once it has; None if it takes no part.

    Reads of x86 are not reordered, and neither are its writes: a flag that is seen means that all stored before it is.
    ``begin`` (monotonic seconds): when this rank began to wait for any rank in this phase; None: now.

    Raises:
        FlagMissed: see ``Failure``; not for a missed flag if ``fault_tolerant``: the rank then no longer takes part.
    """
    if not int(state.active[source]):
        return None
    stop_if_failed(state, fault_tolerant)
    epoch, flag = int(state.epoch[channel]), blocks.flags[phase, source]
    begin = time.monotonic() if begin is None else begin
    seen = _poll(blocks.flags[phase, :, 0], state, source, epoch, begin, timeout_ms, fault_tolerant)
    count = int(flag[1])
    if seen < epoch:
        code = Failure.MISSED
    elif seen > epoch:
        code = Failure.LEFT_OUT
    elif not 0 <= count <= wire.max_tokens:
        code = Failure.COUNT
    else:
        return count
    if not int(state.status[Status.FAILED]) or code != Failure.MISSED:
        words = {Status.FAILED: code, Status.PHASE: phase, Status.EPOCH: epoch, Status.MISSING: source, Status.SEEN: seen}
        words |= {Status.TAG: tag, Status.CHANNEL: channel, Status.COUNT: count if code == Failure.COUNT else 0}
        state.status.copy_(torch.tensor([words[Status(i)] for i in range(len(state.status))]))
    if code == Failure.MISSED and fault_tolerant:
        state.active[source] = 0
        return None
    raise FlagMissed


def _poll(
    epochs: torch.Tensor, state: PeerState, source: int, epoch: int, begin: float, timeout_ms: int, fault_tolerant: bool
) -> int:  # fmt: skip
    """The epoch that ``source`` has reached, of ``epochs`` [R], once it is at least ``epoch``, or after the deadline.

    A rank may be late because it waits for a dead one itself, for as long as this one would. So a fault-tolerant group has
    ``timeout_ms`` of patience for every rank that is missing now: those that only wait come in the meantime, the dead do not.
    """
    turns = 0
    while True:
        seen, waited = int(epochs[source]), 1000 * (time.monotonic() - begin)
        if seen >= epoch:
            return seen
        if waited >= timeout_ms:
            missing = int(((epochs < epoch) & (state.active > 0)).sum()) if fault_tolerant else 1
            if waited >= missing * timeout_ms:
                return int(epochs[source])
        turns += 1
        time.sleep(0 if turns < _EAGER_TURNS else _NAP_S)
