"""What the backends share: checks, sorted choices, numbers in flight, byte counts, the joined halves."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from ..parallel.group import Group
from .caps import Caps
from .checks import check_agreement, check_call, check_caps, check_layout, check_outputs, check_spec, check_valid
from .dispatcher import EPSpec, Routed
from .order import choices_of
from .timeout import DispatchTimeout


class BaseDispatcher(ABC):
    """Implements the parts of ``Dispatcher`` that do not depend on how bytes travel."""

    name = ""  # of the backend
    caps: Caps = Caps(rank_layout=False, needs=("torch.distributed",))

    def __init__(self, group: Group, spec: EPSpec, *, compare: bool = True) -> None:
        """Collective over ``group`` if ``compare``: its ranks' specs must be equal."""
        check_spec(spec, group.size)
        check_caps(spec, self.name, self.caps)
        if group.size > 1 and compare:
            check_agreement(spec, self.name, group)
        self.spec = spec
        self.group = group
        self._sent = [0] * group.size
        self._closed = False
        self._flying = 0  # dispatches on their way
        self._epoch = 0  # dispatches since the start

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError(f"the {self.name} dispatcher is closed")

    def _begin(self) -> None:
        """Count a dispatch that is about to be sent."""
        if self._flying >= self.spec.depth:
            most = f"{self._flying} dispatches are on their way, the most there may be (EPSpec.depth {self.spec.depth})"
            raise RuntimeError(f"{self.name} dispatcher: {most}; finish one with combine_recv first")
        self._flying += 1
        self._epoch += 1

    def _end(self) -> None:
        """Count a dispatch whose results have come home."""
        self._flying -= 1

    def _prepare(
        self,
        x: torch.Tensor,
        slot_ids: torch.Tensor,
        weights: torch.Tensor,
        n_valid: torch.Tensor | None = None,
        *,
        capacity: int | None = None,
        scales: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Check a call and count it; return its slots [T, k] int64 and weights [T, k] float32: ascending, or as given if deterministic."""
        self._check_open()
        check_call(self.spec, x, slot_ids, weights, limit=capacity, scales=scales)
        check_valid(n_valid, x)
        self._begin()
        if n_valid is not None:
            padding = torch.arange(len(x), device=x.device).unsqueeze(1) >= n_valid
            slot_ids = slot_ids.masked_fill(padding, -1)
        return choices_of(slot_ids, weights, as_given=self.spec.deterministic)

    def _check_recv(self, layout: str) -> None:
        self._check_open()
        check_layout(layout)

    def _deliver(self, result: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        """End a flight: its result [T, hidden], in ``out`` if given."""
        if out is not None:
            check_outputs(self.spec, out, len(result))
            result = out.copy_(result)
        self._end()
        return result

    @abstractmethod
    def dispatch_send(
        self,
        x: torch.Tensor,
        slot_ids: torch.Tensor,
        weights: torch.Tensor,
        n_valid: torch.Tensor | None = None,
        *,
        tag: int = 0,
        capacity: int | None = None,
        scales: torch.Tensor | None = None,
    ) -> Any:
        """See ``Dispatcher``."""

    @abstractmethod
    def dispatch_recv(self, ticket: Any, layout: str = "contiguous") -> Routed:
        """See ``Dispatcher``."""

    @abstractmethod
    def combine_send(self, y: torch.Tensor, routed: Routed, *, index: torch.Tensor | None = None) -> Any:
        """See ``Dispatcher``."""

    @abstractmethod
    def combine_recv(self, ticket: Any, out: torch.Tensor | None = None) -> torch.Tensor:
        """See ``Dispatcher``."""

    def dispatch(
        self, x: torch.Tensor, slot_ids: torch.Tensor, weights: torch.Tensor, n_valid: torch.Tensor | None = None, **more: Any
    ) -> Routed:
        """x [T, hidden], slot_ids [T, k], weights [T, k] -> the tokens of this rank's slots."""
        layout = {"layout": more.pop("layout")} if "layout" in more else {}
        return self.dispatch_recv(self.dispatch_send(x, slot_ids, weights, n_valid, **more), **layout)

    def combine(self, y: torch.Tensor, routed: Routed, out: torch.Tensor | None = None, **more: Any) -> torch.Tensor:
        """Expert outputs y, row for row as ``routed.x`` -> [T, hidden]."""
        return self.combine_recv(self.combine_send(y, routed, **more), out)

    def active_mask(self) -> list[bool]:
        """See ``Dispatcher``. Everybody, where the backend cannot go on without a rank."""
        return [True] * self.group.size

    def set_active(self, mask: Sequence[bool]) -> None:
        """See ``Dispatcher``. ValueError where the backend cannot go on without a rank."""
        if len(mask) != self.group.size:
            raise ValueError(f"set_active: the mask has {len(mask)} entries, the expert group {self.group.size} ranks")
        if not all(mask) and not self.caps.fault_mask:
            raise ValueError(f"set_active: the {self.name} backend cannot go on without a rank; symm, nvshmem and shm can")

    def health(self, *, wait: bool = False) -> None:
        """See ``Dispatcher``. Nothing to say but that it is closed, where errors come from the group's own deadlines."""
        self._check_open()

    @property
    def status(self) -> torch.Tensor | None:
        """Words that the device writes when a wait fails, for ``verdict``; None where calls raise by themselves."""
        return None

    def verdict(self, words: Sequence[int]) -> DispatchTimeout | None:
        """The error that a copy of ``status`` means; None if it means none."""
        return None

    def traffic(self) -> torch.Tensor | None:
        """See ``Dispatcher``: the host counts."""
        return None

    def bytes_sent(self, counters: torch.Tensor | None = None) -> list[int]:
        """Bytes of rows and results sent to each EP rank since the start; 0 for this rank itself."""
        return list(self._sent)

    def forget_traffic(self) -> None:
        """``bytes_sent`` begins anew."""
        self._sent[:] = [0] * self.group.size

    def close(self) -> None:
        """Later calls raise RuntimeError. Communicates nothing."""
        self._closed = True
