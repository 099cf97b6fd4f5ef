"""Queues beside the current stream, inside captures of graphs too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

_T = TypeVar("_T")


class _Side:
    """A stream that forks off the current one and joins it again."""

    def __init__(self, device: torch.device, *, captured_only: bool = False, urgent: bool = True) -> None:
        """Of a CUDA device.

        Args:
            device: that of the current stream.
            captured_only: launches that are not being captured stay in order, where the host's time for events counts.
            urgent: its work goes first where both streams have some ready.
        """
        self._stream = torch.cuda.Stream(device, priority=-1 if urgent else 0)  # type: ignore[no-untyped-call]
        self._captured_only = captured_only

    @property
    def beside(self) -> bool:
        """Whether work runs beside the current stream's now; the same throughout one step."""
        return not self._captured_only or torch.cuda.is_current_stream_capturing()

    @contextmanager
    def fork(self) -> Iterator[None]:
        """What is launched inside comes after all launched before, and runs beside what is launched later, until it is joined."""
        if not self.beside:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield


class SideStream(_Side):
    """For parts of attention: ``attention.beside.Beside`` on CUDA."""

    def join(self) -> None:
        """What is launched from now on comes after the forked work."""
        if self.beside:
            torch.cuda.current_stream().wait_stream(self._stream)


class SideQueue(_Side):
    """For tokens on their way to experts, or the shared expert where none travel: ``moe.track.Track`` on CUDA.

    Tokens go first where both streams have work ready: it is little, and other ranks wait for it.
    """

    def run(self, body: Callable[[], _T]) -> tuple[_T, torch.cuda.Event]:
        """Launch ``body`` after all launched so far, on this stream or the current one, and beside what is launched later: its end."""
        with self.fork():
            result = body()
            end = torch.cuda.Event()  # type: ignore[no-untyped-call]
            end.record()
        return result, end

    def join(self, end: torch.cuda.Event) -> None:
        """What is launched on the current stream from now on comes after ``end``."""
        torch.cuda.current_stream().wait_event(end)
