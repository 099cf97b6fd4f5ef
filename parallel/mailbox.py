"""Messages from one rank of a group to all others, posted without waiting for them to be read."""

from __future__ import annotations

from collections import deque

import torch

from .group import Group, Pending
from .wire import INLINE_MIN, as_tensor, inline_for, message_length, pack_message

_TAG = 2  # apart from other point-to-point traffic of the group


class Mailbox:
    """A broadcast whose sender runs ahead: readers get the messages in order, each at its own time.

    A collective broadcast would hold the sender until the slowest reader arrives, and so would keep a pipeline's first
    stage from starting a step while the last one is still busy with the step before.
    """

    def __init__(self, group: Group, src_index: int = 0, depth: int = 32) -> None:
        """``depth`` messages may be unread; posting one more waits for the oldest."""
        self.group = group
        self.src_index = src_index
        self.depth = depth
        self._inline = INLINE_MIN  # bytes that travel with the length; both sides follow the last message
        self._leaving: deque[list[Pending]] = deque()

    def post(self, data: bytes) -> None:
        """Send ``data`` to every other rank of the group.

        Raises:
            CollectiveError: a reader did not take the oldest of ``depth`` messages within the group's deadline.
        """
        assert self.group.index == self.src_index
        if self.group.size == 1:
            return
        while self._leaving and (len(self._leaving) >= self.depth or all(p.is_done() for p in self._leaving[0])):
            self._wait_oldest()
        parts = [pack_message(data, self._inline)]
        if len(data) > self._inline:
            parts.append(as_tensor(data[self._inline :]))
        self._inline = inline_for(len(data))
        readers = [index for index in range(self.group.size) if index != self.src_index]
        self._leaving.append([self.group.send_async(part, reader, tag=_TAG) for reader in readers for part in parts])

    def take(self) -> bytes:
        """The next message.

        Raises:
            CollectiveError: none came within the group's deadline.
        """
        inline = self._inline
        head = self.group.recv_async(torch.empty(8 + inline, dtype=torch.uint8), self.src_index, tag=_TAG).wait()
        length = message_length(head)
        self._inline = inline_for(length)
        data: bytes = head[8 : 8 + min(length, inline)].numpy().tobytes()
        if length > inline:
            rest = torch.empty(length - inline, dtype=torch.uint8)
            data += self.group.recv_async(rest, self.src_index, tag=_TAG).wait().numpy().tobytes()
        return data

    def drain(self) -> None:
        """Wait until every message has left.

        Raises:
            CollectiveError: one did not within the group's deadline.
        """
        while self._leaving:
            self._wait_oldest()

    def _wait_oldest(self) -> None:
        for pending in self._leaving.popleft():
            pending.wait()
