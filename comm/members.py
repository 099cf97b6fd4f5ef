"""Who takes part in the dispatches of a backend over peer memory, and who did not come."""

from __future__ import annotations

from abc import ABC
from collections.abc import Sequence

import torch

from .base import BaseDispatcher
from .control import agreed_epochs
from .state import Failure, PeerState, Status
from .timeout import DispatchTimeout, failure
from .watch import StatusWatch


class PeerMembers(BaseDispatcher, ABC):
    """The part of ``PeerDispatcher`` that knows ranks, not rows."""

    device: torch.device  # of tokens
    state: PeerState
    _watch: StatusWatch
    _free: list[bool]  # by channel: no dispatch is on its way there

    def active_mask(self) -> list[bool]:
        """See ``Dispatcher``."""
        self._check_open()
        return [bool(word) for word in self.state.active.tolist()]

    def set_active(self, mask: Sequence[bool]) -> None:
        """See ``Dispatcher``. Dispatches that were given up with an error are forgotten, and a past failure is."""
        self._check_open()
        super().set_active(mask)
        if not mask[self.group.index]:
            raise ValueError(f"set_active: the mask leaves out rank {self.group.ranks[self.group.index]}, which called it")
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # nothing of an earlier step may still store
        self.resume(mask, agreed_epochs(self.group, mask, self.state.epoch.tolist()))

    def resume(self, mask: Sequence[bool], epochs: Sequence[int]) -> None:
        """Start over from ``epochs`` [depth] with the ranks of ``mask``; ``set_active`` has made them the same on all."""
        self.state.epoch.copy_(torch.tensor(epochs, dtype=torch.int64))
        self.state.active.copy_(torch.tensor(mask, dtype=torch.int32))
        self.state.arrived.zero_()
        self.state.status.zero_()
        self._watch.forget()
        self._free = [True] * self.spec.depth
        self._flying = 0

    def health(self, *, wait: bool = False) -> None:
        """See ``Dispatcher``. A missed rank is no error of a fault-tolerant dispatcher: ``active_mask`` says who is left."""
        self._check_open()
        error = self.verdict(self._watch.words(wait=wait))
        if error is not None:
            raise error

    @property
    def status(self) -> torch.Tensor | None:
        """See ``BaseDispatcher``."""
        return self.state.status if self.device.type == "cuda" else None

    def verdict(self, words: Sequence[int]) -> DispatchTimeout | None:
        """See ``BaseDispatcher``."""
        if self.spec.fault_tolerant and words[Status.FAILED] == Failure.MISSED:
            return None
        return failure(words, self.group.ranks, self.group.index, self.spec.timeout_ms)
