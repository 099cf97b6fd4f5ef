"""The backend over NVSHMEM: stores into ranks that are mapped, puts to those that are not, the same protocol either way."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch

from ...parallel.group import Group
from ..caps import Caps
from ..dispatcher import EPSpec
from ..heap.nvshmem import NvshmemHeap
from ..peer import PeerDispatcher


class NvshmemDispatcher(PeerDispatcher):
    """``PeerDispatcher`` over an ``NvshmemHeap``. ``unmap`` names ranks to be served by puts even where they can be mapped.

    A put has no deadline of its own, so with unmapped ranks a rank that is gone ends the job: ``fault_tolerant`` is refused.
    """

    caps: Caps = replace(PeerDispatcher.caps, needs=("nvshmem4py", "nvidia-nvshmem with libnvshmem_device.bc", "Triton", "CUDA"))

    def __init__(self, group: Group, spec: EPSpec, device: torch.device, *, unmap: Collection[int] = ()) -> None:
        """Collective over ``group``, as is the first one's start of NVSHMEM. ValueError: see ``PeerDispatcher`` and ``NvshmemHeap``."""
        heap = NvshmemHeap(group, device, unmap=unmap)
        super().__init__(group, spec, heap, device=device)
        if not heap.unmapped:
            return
        try:
            if spec.fault_tolerant:
                raise ValueError("fault_tolerant needs ranks that are all mapped: a put to a rank that is gone may never end; use torch")
            from .kernels.put_home import ring_bytes
            from .ops import put_ops

            self.ops = put_ops(heap.symmetric(ring_bytes(self.wire, spec.max_sms)))
        except BaseException:
            heap.close()
            raise
