"""Experts from GPU to GPU by NCCL, on a stream of their own.

It has not run on several GPUs. Its order of launches is tested without a device (tests/moe/eplb/live).
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist

from ....parallel.group import Group
from .transport import GroupTransport, LinkError

_POLL_S = 0.0005


class NcclTransport(GroupTransport):
    """Over a ``Group`` of its own with backends for both devices; tensors on the CPU go by its other backend.

    The two operations of a round are one NCCL group call, so neither waits for the other on the stream. They are few at a
    time and take few multiprocessors (``side_group(max_ctas=)``), so that kernels of steps that need many at once find them.
    """

    def __init__(self, group: Group, device: torch.device) -> None:
        """Collective over ``group``: NCCL makes its connections at the first call, in which all ranks must take part."""
        super().__init__(group)
        if group.size > 1:
            group.all_reduce(torch.zeros(1, device=device))
            torch.cuda.synchronize(device)
        self.device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._commit = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._commit.record(torch.cuda.current_stream(device))

    def exchange(self, send: tuple[torch.Tensor, int] | None, receive: tuple[torch.Tensor, int] | None) -> None:
        """See ``Transport``. The host polls, so that a peer that never comes ends in an error at the group's deadline."""
        parts = [part for part in (send, receive) if part is not None]
        if not parts or parts[0][0].device.type == "cpu":
            return super().exchange(send, receive)
        group = self.group.process_group
        if group is None:
            raise LinkError("the group is closed", parts[0][1])
        ops = [] if send is None else [dist.P2POp(dist.isend, send[0], group=group, group_peer=send[1])]
        ops += [] if receive is None else [dist.P2POp(dist.irecv, receive[0], group=group, group_peer=receive[1])]
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        try:
            with torch.cuda.stream(self._stream):
                for work in dist.batch_isend_irecv(ops):
                    work.wait()
                done.record(self._stream)
        except RuntimeError as error:
            raise LinkError(f"rank {self.rank}: {error}", parts[-1][1]) from error
        self._await(done, [part[1] for part in parts])

    def _await(self, done: torch.cuda.Event, peers: list[int]) -> None:
        end = time.monotonic() + self.group.deadline_s
        while not done.query():  # type: ignore[no-untyped-call]
            if time.monotonic() > end:
                ranks = [self.group.ranks[peer] for peer in peers]
                raise LinkError(f"rank {self.rank}: no exchange with ranks {ranks} within {self.group.deadline_s:g} s", peers[-1])
            time.sleep(_POLL_S)

    def aside(self) -> AbstractContextManager[object]:
        """See ``Transport``."""
        return torch.cuda.stream(self._stream)

    def begin(self) -> None:
        """See ``Transport``."""
        # A thread begins on the first GPU; leaving ``aside`` would go back there, and take memory of it for a context of this process.
        torch.cuda.set_device(self.device)
        self._stream.wait_event(self._commit)

    def settle(self) -> None:
        """See ``Transport``."""
        self._stream.synchronize()

    def committed(self) -> None:
        """See ``Transport``."""
        self._commit.record(torch.cuda.current_stream(self.device))
