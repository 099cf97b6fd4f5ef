"""How bytes of experts get from rank to rank, apart from the group that steps use."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

from ....parallel.failure import CollectiveError
from ....parallel.group import Group, Pending

_TAG = 91  # of these transfers


class LinkError(RuntimeError):
    """Bytes could not be exchanged with ``peer``; the connection is not to be used again."""

    def __init__(self, message: str, peer: int) -> None:
        super().__init__(message)
        self.peer = peer


class Transport(Protocol):
    """One rank's end. Used by one thread at a time; every rank makes its exchanges in the order of the same rounds."""

    rank: int  # of the group
    size: int  # ranks

    def exchange(self, send: tuple[torch.Tensor, int] | None, receive: tuple[torch.Tensor, int] | None) -> None:
        """Send and fill contiguous uint8 or int64 tensors, (tensor, rank) each, at the same time; returns when both are done.

        Raises:
            LinkError: one of them failed; the other was waited for all the same.
        """

    def aside(self) -> AbstractContextManager[object]:
        """Work on the device inside runs beside that of steps."""

    def begin(self) -> None:
        """Work aside waits for what ``committed`` saw launched."""

    def settle(self) -> None:
        """Wait for work aside."""

    def committed(self) -> None:
        """A commit is launched on the current stream: buffers may be filled, and slots read, behind it only."""

    def close(self) -> None:
        """Let go of the group; may be called from another thread, to end a wait."""


class GroupTransport:
    """Over a ``Group`` of its own, for tensors on the CPU."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.rank = group.index
        self.size = group.size

    def exchange(self, send: tuple[torch.Tensor, int] | None, receive: tuple[torch.Tensor, int] | None) -> None:
        """See ``Transport``. Both are posted before either is waited for."""
        posted: list[tuple[int, Pending]] = []
        failed: LinkError | None = None
        for part, start in ((receive, self.group.recv_async), (send, self.group.send_async)):
            if part is not None:
                try:
                    posted.append((part[1], start(part[0], part[1], _TAG)))
                except RuntimeError as error:  # CollectiveError, or the group is closed
                    failed = LinkError(str(error), part[1])
        for peer, pending in posted:
            try:
                pending.wait()
            except CollectiveError as error:
                failed = LinkError(str(error), peer)
        if failed is not None:
            raise failed

    def aside(self) -> AbstractContextManager[object]:
        """See ``Transport``: the CPU does things in order."""
        return nullcontext()

    def begin(self) -> None:
        """See ``Transport``."""

    def settle(self) -> None:
        """See ``Transport``."""

    def committed(self) -> None:
        """See ``Transport``."""

    def close(self) -> None:
        """See ``Transport``."""
        self.group.close()
