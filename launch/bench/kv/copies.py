"""A whole prefix copied from the host pool before decoding: at the link's speed, or slowed down to a network's."""

from __future__ import annotations

import time

import torch

from ....attention.kv.host.pool import HostPool
from ....attention.kv.host.throttle import Throttle

_CHUNK = 128 << 20  # bytes a copy engine is given at a time


def copy_seconds(host: HostPool, n_bytes: int, device: torch.device, *, gb_per_s: float | None = None) -> float:
    """Seconds until ``n_bytes`` from ``host`` have arrived on ``device``; ``gb_per_s``: slowed down to that.

    Each layer's share is read from the beginning of its part of the pool, over and over if the pool is smaller.
    """
    share = n_bytes // host.n_layers
    sources = [host.layer(layer).bytes.view(-1) for layer in range(host.n_layers)]
    target = torch.empty(max(1, min(share, _CHUNK)), dtype=torch.uint8, device=device)
    throttle = None if gb_per_s is None else Throttle(gb_per_s)
    _synchronise(device)
    start = time.perf_counter()
    for source in sources:
        for offset in range(0, share, _CHUNK):
            size = min(_CHUNK, share - offset)
            begin = offset % max(1, len(source) - size + 1)
            target[:size].copy_(source[begin : begin + size], non_blocking=True)
            if throttle is not None:
                _synchronise(device)
                throttle.wait(size)
    _synchronise(device)
    return time.perf_counter() - start


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
