"""Making host memory readable by the GPU: cudaHostRegister, a few layers at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch

_PORTABLE_MAPPED = 3  # cudaHostRegisterPortable | cudaHostRegisterMapped
_LARGEST = 4 << 30  # bytes of one registration, unless one layer is larger


def chunks(edges: Sequence[int], largest: int = _LARGEST) -> list[tuple[int, int]]:
    """Split ``edges[0] .. edges[-1]`` into (start, bytes): whole layers, as many as fit into ``largest`` bytes, at least one.

    A copy within one layer never crosses registrations, which copy engines do not allow.
    """
    found, start = [], edges[0]
    for edge, following in zip(edges[1:], [*edges[2:], None], strict=True):
        if following is None or following - start > largest:
            found.append((start, edge - start))
            start = edge
    return [part for part in found if part[1]]


def register(address: int, edges: Sequence[int], device: torch.device) -> list[int]:
    """Register the bytes between ``edges`` (offsets from ``address``); the addresses to unregister.

    The device sees them at the same addresses.

    Raises:
        ValueError: the driver refused; nothing stays registered.
    """
    cuda: Any = torch.cuda
    cudart = cuda.cudart()
    done: list[int] = []
    with torch.cuda.device(device):
        for start, length in chunks(edges):
            code = int(cudart.cudaHostRegister(address + start, length, _PORTABLE_MAPPED))
            if code:
                unregister(done)
                _forget_error(device)
                raise ValueError(
                    f"CUDA could not register {length / 2**30:.1f} GiB of the host pool, {start / 2**30:.1f} GiB into it (error {code}); "
                    "make the pool smaller, or look at the memory limits of this process (ulimit -l, control group)"
                )
            done.append(address + start)
    return done


def _forget_error(device: torch.device) -> None:
    """Let the runtime report its last error once, so that no later launch is blamed for it."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device=device)


def unregister(addresses: list[int]) -> None:
    """Undo ``register``; empties the list. The device must not be reading."""
    cuda: Any = torch.cuda
    while addresses:
        cuda.cudart().cudaHostUnregister(addresses.pop())
