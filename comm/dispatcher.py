"""The protocol of expert-parallel dispatch and combine that every backend implements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ..parallel.group import Group
from .caps import Caps
from .routed import Routed

if TYPE_CHECKING:
    from .timeout import DispatchTimeout

__all__ = ["Dispatcher", "EPSpec", "Routed"]


@dataclass(frozen=True, kw_only=True)
class EPSpec:
    """Everything the ranks of an EP group must agree on; every field is compared across ranks at setup."""

    n_ranks: int  # ranks in the EP group
    n_slots: int  # physical expert slots over all ranks
    hidden: int  # width of a token
    top_k: int  # expert choices per token
    max_tokens: int  # most tokens one rank dispatches in one call
    payload: str = "native"  # how x travels, see ``checks.PAYLOADS``
    deterministic: bool = False  # add a token's outputs in the order of its choices, whatever the layout and wherever experts are
    dtype: str = "float32"  # dtype of x (uint8 if the payload is "bytes") and of the combined result
    alignment: int = 1  # rows of a slot start at multiples of it in the layout "contiguous": 1 or 128
    depth: int = 2  # dispatches that may be between their dispatch_send and their combine_recv
    timeout_ms: int = 30_000  # longest wait for a rank, where the backend waits by itself
    max_sms: int = 32  # multiprocessors that a send may take, where the backend has kernels of its own
    fault_tolerant: bool = False  # go on without a rank that does not answer, instead of ending all

    @property
    def slots_per_rank(self) -> int:
        """Physical slots a rank hosts; slot s lives on EP rank ``s // slots_per_rank``."""
        return self.n_slots // self.n_ranks


class Dispatcher(Protocol):
    """Sends tokens to the ranks of their experts and brings the weighted sums back.

    ``dispatch`` and ``combine`` are collective over the EP group: every rank calls them the same number of times in
    the same order, with zero tokens if it has none. The ``*_send`` / ``*_recv`` halves allow other work in between: at
    most ``spec.depth`` dispatches may be on their way at a time.
    """

    name: str  # of the backend
    spec: EPSpec
    caps: Caps
    group: Group  # the EP ranks

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
        """Start sending.

        Args:
            x: [T, hidden] in the spec's dtype; or, for an FP8 payload, already quantised: float8_e4m3fn with ``scales``.
            slot_ids: [T, k] int32 or int64 physical slots, -1 for none. In deterministic mode their order is that of the sums.
            weights: [T, k] float32.
            n_valid: int32 [1] on x's device: tokens from there on are padding, and their results are zeros. None: all T.
            tag: what an error names the call by, such as its layer.
            capacity: most tokens that any rank has in this call, the same number on all; None: ``spec.max_tokens``.
                Backends over symmetric memory lay rows closer by it (layout "rank" then has n_ranks * capacity rows).
            scales: float32 [T, ceil(hidden / 128)] of an x that is already quantised.

        Raises:
            ValueError: the tensors do not fit the spec; nothing was sent.
            RuntimeError: closed, or ``spec.depth`` dispatches are already on their way.
        """

    def dispatch_recv(self, ticket: Any, layout: str = "contiguous") -> Routed:
        """Finish the dispatch that ``ticket`` started; ``layout``: see ``Routed``."""

    def combine_send(self, y: torch.Tensor, routed: Routed, *, index: torch.Tensor | None = None) -> Any:
        """Start returning expert outputs.

        Args:
            y: row for row as ``routed.x``: [N, hidden] unweighted ("contiguous"), [slots, rows, hidden] unweighted
                ("masked"), or [rows, hidden] with one weighted sum of this rank's experts a row ("rank").
            routed: what ``dispatch_recv`` gave.
            index: int32 [rows, k], only with the layout "rank": y is [N, hidden], unweighted, and ``index`` says which row of y
                belongs to each choice, -1 for none. In deterministic mode the layout "rank" needs it.
        """

    def combine_recv(self, ticket: Any, out: torch.Tensor | None = None) -> torch.Tensor:
        """Finish: [T, hidden], fp32 sums in a fixed order, cast to the spec's dtype; written to ``out`` if given."""

    def dispatch(
        self, x: torch.Tensor, slot_ids: torch.Tensor, weights: torch.Tensor, n_valid: torch.Tensor | None = None, **more: Any
    ) -> Routed:
        """Both halves of dispatch; ``more``: keywords of either."""

    def combine(self, y: torch.Tensor, routed: Routed, out: torch.Tensor | None = None, **more: Any) -> torch.Tensor:
        """Both halves of combine."""

    def active_mask(self) -> list[bool]:
        """Which EP ranks take part. Waits for the device."""

    def set_active(self, mask: Sequence[bool]) -> None:
        """Collective over the ranks that ``mask`` names, with nothing on its way: from now on they, and only they, take part."""

    def health(self, *, wait: bool = False) -> None:
        """Raise ``DispatchTimeout`` if a wait has failed. Without ``wait`` it says what was known a moment ago, and waits for nothing."""

    @property
    def status(self) -> torch.Tensor | None:
        """Words that the device writes when a wait fails, for ``verdict``; None where calls raise by themselves."""

    def verdict(self, words: Sequence[int]) -> DispatchTimeout | None:
        """The error that a copy of ``status`` means; None if it means none."""

    def traffic(self) -> torch.Tensor | None:
        """What ``bytes_sent`` is made from where the device counts it, to be copied; None where the host does."""

    def bytes_sent(self, counters: torch.Tensor | None = None) -> list[int]:
        """Bytes of rows and results sent to each EP rank since the start; 0 for this rank itself.

        ``counters``: a copy of ``traffic()``, of an earlier moment; without it the host may wait for the device.
        """

    def close(self) -> None:
        """Release buffers; later calls raise RuntimeError. Communicates nothing."""
