"""Host memory as an argument of a kernel: the address that the device reads, without a tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..kv.tier import HostRows


@dataclass(frozen=True)
class HostAddress:
    """What Triton takes for a pointer to bytes."""

    address: int
    dtype: torch.dtype = torch.uint8

    def data_ptr(self) -> int:
        """The address."""
        return self.address


def argument(host: HostRows, device: torch.device) -> Any:
    """``host`` for a kernel on ``device``; the interpreter wants a tensor."""
    return HostAddress(host.data_ptr()) if device.type == "cuda" else host.bytes
