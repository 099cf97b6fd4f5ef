"""Buffers that experts arrive in, made once."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .digest import Digest
from .layout import TRAILER_WORDS, Layout

_MARK = 0x524F5251  # first word of a trailer that was written


@dataclass(frozen=True, kw_only=True)
class Trailer:
    """What a sender says of the expert in front of it."""

    good: bool  # the bytes are the expert; else the sender failed, and says so in this way
    layer: int  # MoE layer
    expert: int  # logical
    digest: int  # of the payload, 0 where none is computed


class Staging:
    """``n_buffers`` buffers to receive in, and a spare one to send from, which the commit uses when nothing is sent."""

    def __init__(self, layout: Layout, n_buffers: int, device: torch.device, *, digests: bool) -> None:
        self.layout = layout
        self.spare = n_buffers
        # Zeros, not empty: memory is taken now, and padding is the same on all ranks.
        self.buffers = torch.zeros(n_buffers + 1, layout.buffer_bytes, dtype=torch.uint8, device=device)
        self._digest = Digest(device) if digests else None
        self._found = torch.zeros((), dtype=torch.int64, device=device)

    @property
    def n_bytes(self) -> int:
        """Bytes of all buffers."""
        return self.buffers.numel()

    def payload(self, buffer: int) -> torch.Tensor:
        """uint8, without the trailer."""
        return self.buffers[buffer, : self.layout.payload_bytes]

    def _words(self, buffer: int) -> torch.Tensor:
        return self.buffers[buffer, self.layout.payload_bytes :].view(torch.int64)

    def seal(self, buffer: int, layer: int, expert: int, *, good: bool) -> None:
        """Write the trailer behind what is packed in ``buffer``. Waits for nothing."""
        words = torch.zeros(TRAILER_WORDS, dtype=torch.int64)
        words[:4] = torch.tensor([_MARK, int(good), layer, expert])
        self._words(buffer).copy_(words)
        if good and self._digest is not None:
            self._digest.of(self.payload(buffer), self._words(buffer)[4])

    def unseal(self, buffer: int) -> Trailer:
        """Read and clear a trailer, so that it is not read twice. Waits for the device.

        Raises:
            ValueError: nothing arrived, or bytes that are not what the sender read.
        """
        mark, good, layer, expert, digest = self._words(buffer)[:5].tolist()
        self._words(buffer).zero_()
        if mark != _MARK:
            raise ValueError("no expert arrived")
        found = 0
        if good and self._digest is not None:
            self._digest.of(self.payload(buffer), self._found)
            found = int(self._found.item())
            if found != digest:
                raise ValueError(f"expert {expert} of MoE layer {layer} arrived with checksum {found:x} instead of {digest:x}")
        return Trailer(good=bool(good), layer=layer, expert=expert, digest=found)
