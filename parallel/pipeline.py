"""Hidden states and sampled tokens between pipeline stages, point to point."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .group import Group, Pending


@dataclass(kw_only=True)
class PipeStats:
    """Traffic of one rank since the start. Waiting is host time; on CUDA the device waits instead."""

    sends: int = 0  # messages sent
    receives: int = 0  # messages received
    bytes_sent: int = 0  # payload bytes
    bytes_received: int = 0  # payload bytes
    send_wait_s: float = 0.0  # seconds the host waited for room to send
    recv_wait_s: float = 0.0  # seconds the host waited for messages: a stage without work


class Pipe:
    """Point-to-point messages over ``group`` (the grid's world, so that peers are named by global rank).

    Sends do not wait: the tensor is kept alive, and must not be written to, until it has left; at most ``depth``
    sends are under way, the oldest is waited for beyond that. Messages between two ranks arrive in the order sent.
    Both sides know the shape: a tensor without elements is no message.
    """

    def __init__(self, group: Group, depth: int = 64) -> None:
        self.group = group
        self.depth = depth
        self.stats = PipeStats()
        self._leaving: deque[Pending] = deque()

    @property
    def in_flight(self) -> int:
        """Sends not known to have left."""
        while self._leaving and self._leaving[0].is_done():
            self._leaving.popleft().wait()
        return len(self._leaving)

    def send_async(self, x: torch.Tensor, dst: int) -> Pending | None:
        """Start sending x to rank ``dst``; ``wait`` on the result, or ``drain``, to use x's memory again."""
        if x.numel() == 0:
            return None
        begin = time.perf_counter()
        while self.in_flight >= self.depth:
            self._leaving.popleft().wait()
        pending = self.group.send_async(x.contiguous(), dst)
        self._leaving.append(pending)
        self.stats.send_wait_s += time.perf_counter() - begin
        self.stats.sends += 1
        self.stats.bytes_sent += x.numel() * x.element_size()
        return pending

    def recv(self, shape: Sequence[int], dtype: torch.dtype, src: int, device: torch.device | None = None) -> torch.Tensor:
        """The next message of rank ``src``, which has this shape and dtype, on ``device`` (the CPU by default).

        Raises:
            CollectiveError: none came within the group's deadline.
        """
        x = torch.empty(tuple(shape), dtype=dtype, device=device)
        if x.numel() == 0:
            return x
        begin = time.perf_counter()
        self.group.recv_async(x, src).wait()
        self.stats.recv_wait_s += time.perf_counter() - begin
        self.stats.receives += 1
        self.stats.bytes_received += x.numel() * x.element_size()
        return x

    def drain(self) -> None:
        """Wait until all sends have left."""
        while self._leaving:
            self._leaving.popleft().wait()
