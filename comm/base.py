"""What the backends share: checks, sorted choices, byte counts, the joined halves."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch

from ..parallel.group import Group
from .checks import check_agreement, check_call, check_outputs, check_spec
from .dispatcher import EPSpec, Routed
from .order import sort_choices


class BaseDispatcher(ABC):
    """Implements the parts of ``Dispatcher`` that do not depend on how bytes travel."""

    name = ""  # of the backend

    def __init__(self, group: Group, spec: EPSpec) -> None:
        check_spec(spec, group.size)
        if group.size > 1:
            check_agreement(spec, self.name, group)
        self.spec = spec
        self.group = group
        self._sent = [0] * group.size
        self._closed = False

    def _prepare(self, x: torch.Tensor, slot_ids: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Check a call; return its slots [T, k] int64 and weights [T, k] float32 in ascending slot order."""
        if self._closed:
            raise RuntimeError(f"the {self.name} dispatcher is closed")
        check_call(self.spec, x, slot_ids, weights)
        return sort_choices(slot_ids, weights)

    def _check_outputs(self, y: torch.Tensor, routed: Routed) -> None:
        if self._closed:
            raise RuntimeError(f"the {self.name} dispatcher is closed")
        check_outputs(self.spec, y, routed.x.shape[0])

    @abstractmethod
    def dispatch_send(self, x: torch.Tensor, slot_ids: torch.Tensor, weights: torch.Tensor) -> Any:
        """See ``Dispatcher``."""

    @abstractmethod
    def dispatch_recv(self, ticket: Any) -> Routed:
        """See ``Dispatcher``."""

    @abstractmethod
    def combine_send(self, y: torch.Tensor, routed: Routed) -> Any:
        """See ``Dispatcher``."""

    @abstractmethod
    def combine_recv(self, ticket: Any) -> torch.Tensor:
        """See ``Dispatcher``."""

    def dispatch(self, x: torch.Tensor, slot_ids: torch.Tensor, weights: torch.Tensor) -> Routed:
        """x [T, hidden], slot_ids [T, k], weights [T, k] -> the tokens of this rank's slots."""
        return self.dispatch_recv(self.dispatch_send(x, slot_ids, weights))

    def combine(self, y: torch.Tensor, routed: Routed) -> torch.Tensor:
        """Expert outputs y [N, hidden], row for row as ``routed.x`` -> [T, hidden]."""
        return self.combine_recv(self.combine_send(y, routed))

    def bytes_sent(self) -> list[int]:
        """Bytes of rows and results sent to each EP rank since the start; 0 for this rank itself."""
        return list(self._sent)

    def close(self) -> None:
        """Later calls raise RuntimeError. Communicates nothing."""
        self._closed = True
