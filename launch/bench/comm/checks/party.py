"""One rank among those that are checked, and the trips that checks make."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from .....comm.dispatcher import Dispatcher, EPSpec, Routed
from .....comm.fp8 import dequantise
from .....comm.local import LocalDispatcher
from .....comm.rows import DTYPES
from .....comm.timeout import DispatchTimeout
from .inputs import expert
from .reach import Reach, reach_of

Tokens = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # x, slot_ids, weights


class CheckFailed(AssertionError):
    """A backend does not do what it must."""


def require(good: bool, what: str, *found: Any) -> None:
    """Raise CheckFailed with ``what`` and what was found unless ``good``."""
    if not good:
        raise CheckFailed(what + (": " + ", ".join(str(item) for item in found) if found else ""))


@dataclass(frozen=True, kw_only=True)
class Party:
    """One rank. All ranks run the same checks with equal arguments."""

    backend: str
    rank: int
    size: int  # ranks
    device: torch.device  # of tokens
    make: Callable[[EPSpec], Dispatcher]  # collective
    gather: Callable[[list[int]], list[list[int]]]  # collective: every rank's numbers, by rank
    node_of: tuple[int, ...]  # node of each rank

    @property
    def reach(self) -> Reach:
        """What its backend can be asked for."""
        return reach_of(self.backend)

    def spec(self, **changes: Any) -> EPSpec:
        """The usual spec of a check: small, with odd widths, as far as the backend carries them."""
        usual = EPSpec(
            n_ranks=self.size, n_slots=4 * self.size, hidden=40, top_k=3, max_tokens=24, timeout_ms=20_000, dtype=self.reach.dtypes[0]
        )
        spec, width = replace(usual, **changes), self.reach.width
        return replace(spec, hidden=-(-spec.hidden // width) * width)

    def layout(self, number: int) -> str:
        """The layouts by turns."""
        return self.reach.layouts[number % len(self.reach.layouts)]

    def here(self, tokens: Tokens) -> Tokens:
        """``tokens`` on this rank's device."""
        x, ids, weights = (tensor.to(self.device) for tensor in tokens)
        return x, ids, weights

    def meet(self) -> None:
        """Wait for all ranks."""
        self.gather([0])

    @property
    def bits(self) -> bool:
        """Whether sums must have the bits of ``LocalDispatcher`` on this device: kernels may contract a product and a sum."""
        return self.reach.bits and (self.device.type == "cpu" or self.backend.startswith("torch"))


def dequantised(routed: Routed, spec: EPSpec) -> torch.Tensor:
    """The tokens of ``routed`` in the spec's dtype, whatever they travelled as."""
    x, dtype = routed.x, DTYPES[spec.dtype]
    if routed.scales is not None:
        flat = dequantise(x.reshape(-1, x.shape[-1]), routed.scales.reshape(-1, routed.scales.shape[-1]), dtype)
        return flat.view(x.shape)
    return x.to(dtype)


def answer(routed: Routed, spec: EPSpec, rank: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The fake experts' outputs as ``combine_send`` takes them: (y, index). Waits for nothing."""
    x, first = dequantised(routed, spec), rank * spec.slots_per_rank
    own = torch.arange(first, first + spec.slots_per_rank, device=x.device)
    if routed.layout == "contiguous":
        assert routed.offsets is not None
        place = torch.arange(len(x), device=x.device, dtype=routed.offsets.dtype)
        slot = torch.searchsorted(routed.offsets[1:].to(x.device), place, right=True).clamp(max=spec.slots_per_rank - 1)
        return expert(own[slot], x), None
    if routed.layout == "masked":
        return expert(own.unsqueeze(1), x), None
    assert routed.slots is not None
    y = torch.cat([expert(slot, x) for slot in own])
    row = torch.arange(len(x), device=x.device).unsqueeze(1)
    return y, torch.where(routed.slots < 0, -1, routed.slots * len(x) + row).to(torch.int32)


def trip(dispatcher: Dispatcher, rank: int, tokens: Tokens, layout: str = "contiguous", **more: Any) -> torch.Tensor:
    """dispatch, fake experts, combine."""
    routed = dispatcher.dispatch(*tokens, layout=layout, **more)
    y, index = answer(routed, dispatcher.spec, rank)
    return dispatcher.combine(y, routed, index=index)


def whole_trip(dispatcher: Dispatcher, rank: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """``trip`` in the usual layout."""
    return trip(dispatcher, rank, (x, ids, weights))


def alone(spec: EPSpec, tokens: Tokens) -> torch.Tensor:
    """The same tokens with all experts on one rank."""
    single = replace(spec, n_ranks=1, fault_tolerant=False, alignment=1)
    return trip(LocalDispatcher(single), 0, tokens)


def by_rank(spec: EPSpec, tokens: Tokens) -> torch.Tensor:
    """What a dispatcher that is not deterministic must give: sums of each rank, rounded, then of ranks, ascending."""
    x, ids, weights = tokens
    total = torch.zeros((len(x), spec.hidden), dtype=torch.float32, device=x.device)
    for rank in range(spec.n_ranks):
        mine = torch.where(torch.div(ids, spec.slots_per_rank, rounding_mode="floor") == rank, ids, -1)
        total += alone(spec, (x, mine, weights)).float()
    return total.to(DTYPES[spec.dtype])


def failure_of(dispatcher: Dispatcher, work: Callable[[], Any]) -> DispatchTimeout | None:
    """The timeout that ``work`` or the health after it raised; None if nothing did."""
    try:
        work()
        dispatcher.health(wait=True)
    except DispatchTimeout as error:
        return error
    return None
