"""Host arrays on their way to the device: packed into pinned memory and sent in one copy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from .streams import Mark, Streams

Array = NDArray[Any]
_ALIGN = 16  # bytes; every array starts at a multiple of it
_SMALLEST = 1 << 16  # bytes of a buffer at first


@dataclass(kw_only=True)
class _Buffer:
    """Pinned memory of one copy."""

    pinned: torch.Tensor  # uint8 [n]
    host: NDArray[np.uint8]  # the same memory
    sent: Mark  # passed when the last copy from here is done


class Staging:
    """Uploads without waiting: a ring of pinned buffers, each rewritten only once its last copy is done.

    A step has one or two uploads, up to seven where rows change tiers; twice as many buffers are never waited for. On the
    CPU arrays become tensors that share their memory.
    """

    def __init__(self, streams: Streams, n_buffers: int = 16) -> None:
        self.streams = streams
        self.copies = 0  # uploads so far
        # Made at once: the driver stops the device to pin memory.
        self._ring = [_pinned(_SMALLEST) for _ in range(n_buffers)] if streams.cuda else []
        self._next = 0

    def upload(self, arrays: Mapping[str, Array]) -> dict[str, torch.Tensor]:
        """The arrays as tensors on the device, each of its own shape and dtype, in one copy on the current stream."""
        if not self.streams.cuda:
            return {name: _shared(array) for name, array in arrays.items()}
        places, size = _places(arrays)
        if size == 0:
            return {name: self._empty(array) for name, array in arrays.items()}
        device = torch.empty(size, dtype=torch.uint8, device=self.streams.device)
        buffer = self._take(size)
        for name, array in arrays.items():
            start = places[name]
            buffer.host[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self._send(buffer, device)
        found = {}
        for name, array in arrays.items():
            part = device[places[name] : places[name] + array.nbytes]
            found[name] = part.view(_dtype(array)).view(array.shape) if array.size else self._empty(array)
        return found

    def _empty(self, array: Array) -> torch.Tensor:
        return torch.empty(array.shape, dtype=_dtype(array), device=self.streams.device)

    def _take(self, size: int) -> _Buffer:
        """A buffer of at least ``size`` bytes that no copy reads."""
        place, self._next = self._next, (self._next + 1) % len(self._ring)
        buffer = self._ring[place]
        if not buffer.sent.done:
            self.streams.wait(buffer.sent)
        if len(buffer.host) < size:
            buffer = self._ring[place] = _pinned(size)
        return buffer

    def _send(self, buffer: _Buffer, target: torch.Tensor) -> None:
        target.copy_(buffer.pinned[: target.shape[0]], non_blocking=True)
        buffer.sent = self.streams.mark()
        self.copies += 1


def _pinned(size: int) -> _Buffer:
    pinned = torch.empty(max(_SMALLEST, 1 << (size - 1).bit_length()), dtype=torch.uint8, pin_memory=True)
    return _Buffer(pinned=pinned, host=pinned.numpy(), sent=Mark(None))


def _places(arrays: Mapping[str, Array]) -> tuple[dict[str, int], int]:
    """Where each array begins in the buffer, and the bytes of all."""
    places, size = {}, 0
    for name, array in arrays.items():
        places[name] = size
        size += -(-array.nbytes // _ALIGN) * _ALIGN
    return places, size


def _dtype(array: Array) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, array.dtype.name)
    return dtype


def _shared(array: Array) -> torch.Tensor:
    """``array`` as a tensor; one that may not be written, as those that came in a message, is copied."""
    return torch.from_numpy(array if array.flags.writeable else array.copy())
