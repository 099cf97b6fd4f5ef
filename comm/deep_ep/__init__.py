"""The library deep_ep behind the protocol of this room: its V2 buffers, and the low-latency mode of its V1 buffers."""

from __future__ import annotations

import torch

from ...parallel.group import Group
from ..base import BaseDispatcher
from ..dispatcher import EPSpec


def make(group: Group, spec: EPSpec, device: torch.device, *, low_latency: bool = False) -> BaseDispatcher:
    """The backend "deep_ep", or "deep_ep_ll" with ``low_latency``. Collective; ValueError if it is not installed or not for ``spec``."""
    from .elastic import ElasticDispatcher
    from .low_latency import LowLatencyDispatcher

    torch.cuda.set_device(device)  # the library works on the current device
    if low_latency:
        return LowLatencyDispatcher(group, spec)
    group.all_reduce(torch.zeros(1, device=device))  # V2 takes the NCCL communicator of torch, which is made for the first collective
    return ElasticDispatcher(group, spec)
