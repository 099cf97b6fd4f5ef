"""A symmetric workspace on NVSHMEM's heap: mapped into the peers that can be reached by load and store, and into no other."""

from __future__ import annotations

from collections.abc import Collection

import torch

from ...parallel.group import Group
from ..checks import check_not_capturing
from ..nvshmem.runtime import Runtime, Space, start, take
from .peers import Peers


class NvshmemHeap:
    """``Heap`` over the ranks of ``group``, one PE each. Making it is collective, and starts NVSHMEM if need be.

    ``unmap`` names ranks (indices of the group) that are treated as if they could not be mapped, for tests of the ways
    that only such ranks take.

    Raises:
        ValueError: on every rank, with what to install or to change, if NVSHMEM cannot be used on one of them.
        RuntimeError: NVSHMEM does not start, or a CUDA graph is being captured.
    """

    name = "nvshmem"

    def __init__(self, group: Group, device: torch.device, *, unmap: Collection[int] = ()) -> None:
        if torch.cuda.is_available():
            check_not_capturing(device)
        self.group = group
        self.device = device
        self.unmapped = False  # whether any rank has a peer that it cannot map; known once memory is there
        self._unmap = frozenset(unmap) - {group.index}
        self._runtime: Runtime | None = start(group, device)
        self._spaces: list[Space] = []

    @property
    def allocated_bytes(self) -> int:
        """See ``Heap``."""
        return sum(space.bytes.numel() for space in self._spaces)

    def allocate(self, n_bytes: int) -> Peers:
        """See ``Heap``. MemoryError, on every rank, if there is no room on one."""
        own, runtime = self.symmetric(n_bytes), self._running()
        views: list[torch.Tensor | None] = []
        for pe in range(self.group.size):
            if pe == self.group.index:
                views.append(own)
            elif pe in self._unmap or not runtime.bindings.ptr(own.data_ptr(), pe):
                views.append(None)
            else:
                views.append(runtime.core.interop.torch.get_peer_tensor(own, pe))
        self.unmapped = bool(self.group.gather_ints([any(view is None for view in views)]).any())
        pointers = [0 if view is None else view.data_ptr() for view in views]
        return Peers(rank=self.group.index, views=tuple(views), pointers=torch.tensor(pointers, dtype=torch.int64, device=self.device))

    def symmetric(self, n_bytes: int) -> torch.Tensor:
        """uint8 [n_bytes], zeros, at the same place on every rank's heap; for puts. Collective, only at setup."""
        self._spaces.append(take(self._running(), n_bytes))
        return self._spaces[-1].bytes

    def close(self) -> None:
        """See ``Heap``. The memory waits for the next heap of its size; ``nvshmem.runtime.stop`` gives it back."""
        runtime, self._runtime = self._runtime, None
        if runtime is not None:
            torch.cuda.synchronize(self.device)
            runtime.spare += self._spaces
            self._spaces = []

    def _running(self) -> Runtime:
        if self._runtime is None:
            raise RuntimeError("the NVSHMEM heap is closed")
        return self._runtime
