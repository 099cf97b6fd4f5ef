"""The status words of a device, read by the host without waiting for it."""

from __future__ import annotations

import torch

from .state import N_STATUS


class StatusWatch:
    """A copy of ``status`` int64 [N_STATUS] that is as old as the last call of ``words``, or older while the device is busy."""

    def __init__(self, status: torch.Tensor) -> None:
        self._status = status
        self._last = [0] * N_STATUS
        self._pinned: torch.Tensor | None = None
        self._event: torch.cuda.Event | None = None
        self._stream: torch.cuda.Stream | None = None
        if status.device.type == "cuda":
            self._pinned = torch.zeros(N_STATUS, dtype=torch.int64, pin_memory=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._stream = torch.cuda.Stream(status.device)  # type: ignore[no-untyped-call]
        self._copying = False

    def words(self, *, wait: bool) -> list[int]:
        """The newest words that are there; with ``wait``, those after all that was launched."""
        if self._pinned is None:
            return [int(word) for word in self._status.tolist()]
        assert self._event is not None and self._stream is not None
        if wait:
            torch.cuda.synchronize(self._status.device)
            self._last, self._copying = [int(word) for word in self._status.tolist()], False
            return self._last
        if torch.cuda.is_current_stream_capturing():
            return self._last
        if self._copying and self._event.query():  # type: ignore[no-untyped-call]
            self._last, self._copying = [int(word) for word in self._pinned.tolist()], False
        if not self._copying:
            # On its own stream and in no order with the kernels: a flag that is set stays set.
            with torch.cuda.stream(self._stream):
                self._pinned.copy_(self._status, non_blocking=True)
                self._event.record(self._stream)
            self._copying = True
        return self._last

    def forget(self) -> None:
        """The words were reset: drop what an earlier copy may still bring."""
        if self._copying and self._event is not None:
            self._event.synchronize()
        self._last, self._copying = [0] * N_STATUS, False
