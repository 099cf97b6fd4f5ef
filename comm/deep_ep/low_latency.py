"""The low-latency mode of V1 of deep_ep (``Buffer``) behind the protocol: rows by slot, padded; weighted where tokens came from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from ...parallel.group import Group
from ..base import BaseDispatcher
from ..caps import Caps
from ..checks import check_call, check_outputs, check_valid
from ..dispatcher import EPSpec, Routed
from ..fp8 import dequantise
from ..rows import DTYPES, is_fp8
from .limits import LL_TOP_K, check_low_latency, low_latency_tokens
from .package import LOW_LATENCY, load
from .tokens import Tokens, process_group


@dataclass(kw_only=True)
class _Flight:
    tokens: Tokens
    received: Any  # [L, R * M, hidden], or (e4m3, scales); valid after the hook
    counts: torch.Tensor  # int32 [L]
    handle: Any
    hook: Callable[[], None]
    epoch: int
    index: torch.Tensor | None = None  # int64 [L, R * M] place of every row in the contiguous layout
    combined: torch.Tensor | None = None


class LowLatencyDispatcher(BaseDispatcher):
    """The library's layout is "masked"; "contiguous" is made from it, and "rank" cannot be.

    Weights do not travel, so ``Routed.weights`` and ``sources`` are None: outputs are given unweighted, as always, and the token's
    own rank weights and adds them. With ``fault_tolerant`` the library masks a rank that does not come by itself.
    """

    name = LOW_LATENCY
    caps = Caps(
        graph=True, fp8=True, overlap_without_sm=True, fault_mask=True, deterministic=False, rank_layout=False, max_top_k=LL_TOP_K,
        needs=("deep_ep with its V1 buffers", "NVSHMEM with IBGDA between hosts", "CUDA"),
    )  # fmt: skip

    def __init__(self, group: Group, spec: EPSpec, *, library: Any = None) -> None:
        """Collective over ``group``. ``library`` stands for the module deep_ep. ValueError: not installed, or not for this spec."""
        self._library = library or load(LOW_LATENCY)
        check_low_latency(spec)
        super().__init__(group, spec)
        self._most = low_latency_tokens(spec)
        n_bytes = self._library.Buffer.get_low_latency_rdma_size_hint(self._most, spec.hidden, spec.n_ranks, spec.n_slots)
        self._buffer: Any = self._library.Buffer(
            process_group(group), num_rdma_bytes=n_bytes, low_latency_mode=True, num_qps_per_rank=spec.slots_per_rank,
            explicitly_destroy=True, enable_shrink=spec.fault_tolerant,
        )  # fmt: skip

    def dispatch_send(
        self, x: torch.Tensor, slot_ids: torch.Tensor, weights: torch.Tensor, n_valid: torch.Tensor | None = None, *,
        tag: int = 0, capacity: int | None = None, scales: torch.Tensor | None = None,
    ) -> _Flight:  # fmt: skip
        """See ``Dispatcher``. The library quantises by itself: tokens that are FP8 already are refused. ``capacity`` is ignored."""
        self._check_open()
        check_call(self.spec, x, slot_ids, weights, limit=capacity, scales=scales)
        check_valid(n_valid, x)
        if scales is not None:
            raise ValueError("deep_ep's low-latency mode quantises by itself: give bf16 tokens, without scales")
        self._begin()
        tokens = Tokens.of(self.spec, x, slot_ids, weights, n_valid, None, id_dtype=self._library.topk_idx_t, quantised=False)
        received, counts, handle, _, hook = self._buffer.low_latency_dispatch(
            tokens.x, tokens.ids, self._most, self.spec.n_slots,
            use_fp8=is_fp8(self.spec), round_scale=self.spec.payload == "fp8_ue8m0", return_recv_hook=True,
        )  # fmt: skip
        return _Flight(tokens=tokens, received=received, counts=counts, handle=handle, hook=hook, epoch=self._epoch)

    def dispatch_recv(self, ticket: _Flight, layout: str = "contiguous") -> Routed:
        """See ``Dispatcher``. Layout "masked": FP8 rows as they travelled, with scales whose last two dimensions are column-major."""
        self._check_recv(layout)
        if layout == "rank":
            raise ValueError('deep_ep\'s low-latency mode brings a row for every choice and no weights: ask for "masked" or "contiguous"')
        ticket.hook()
        x, scales = ticket.received if isinstance(ticket.received, tuple) else (ticket.received, None)
        if layout == "masked":
            n_slots, n_rows = x.shape[:2]
            offsets = torch.arange(n_slots + 1, dtype=torch.int32, device=x.device) * n_rows
            return Routed(x=x, scales=scales, handle=ticket, layout=layout, counts=ticket.counts, offsets=offsets, epoch=ticket.epoch)
        return self._contiguous(ticket, x, scales)

    def _contiguous(self, ticket: _Flight, x: torch.Tensor, scales: torch.Tensor | None) -> Routed:
        """Every slot's rows behind those of the slot before; zeros between and behind."""
        spec, (n_slots, n_rows) = self.spec, x.shape[:2]
        steps = -(-ticket.counts.long() // spec.alignment) * spec.alignment
        offsets = F.pad(steps.cumsum(0), (1, 0))
        number = torch.arange(n_rows, device=x.device)
        there = number < ticket.counts.unsqueeze(1)
        most = spec.n_ranks * spec.max_tokens * min(spec.top_k, n_slots) + n_slots * (spec.alignment - 1)
        ticket.index = torch.where(there, offsets[:-1].unsqueeze(1) + number, most)  # the last row takes what is nobody's
        values = x if scales is None else dequantise(x.flatten(0, 1), scales.flatten(0, 1), DTYPES[spec.dtype]).view(x.shape)
        rows = values.new_zeros((most + 1, spec.hidden)).index_copy_(0, ticket.index.view(-1), values.reshape(-1, spec.hidden))
        rows[most] = 0
        return Routed(
            x=rows[:most], handle=ticket, layout="contiguous", counts=ticket.counts, offsets=offsets.int(), epoch=ticket.epoch
        )  # fmt: skip

    def combine_send(self, y: torch.Tensor, routed: Routed, *, index: torch.Tensor | None = None) -> _Flight:
        """See ``Dispatcher``."""
        self._check_open()
        flight: _Flight = routed.handle
        check_outputs(self.spec, y, tuple(routed.x.shape[:-1]))
        y = y.to(torch.bfloat16)
        if routed.layout == "contiguous":
            assert flight.index is not None
            y = torch.cat([y, y.new_zeros((1, self.spec.hidden))])[flight.index]
        flight.combined, _, flight.hook = self._buffer.low_latency_combine(
            y.contiguous(), flight.tokens.ids, flight.tokens.weights, flight.handle, return_recv_hook=True
        )
        return flight

    def combine_recv(self, ticket: _Flight, out: torch.Tensor | None = None) -> torch.Tensor:
        """See ``Dispatcher``."""
        self._check_open()
        ticket.hook()
        assert ticket.combined is not None
        return self._deliver(ticket.tokens.results(ticket.combined, self.spec), out)

    def active_mask(self) -> list[bool]:
        """See ``Dispatcher``."""
        self._check_open()
        if not self.spec.fault_tolerant:
            return super().active_mask()
        masked = torch.zeros(self.group.size, dtype=torch.int32, device="cuda" if torch.cuda.is_available() else "cpu")
        self._buffer.low_latency_query_mask_buffer(masked)
        return [not word for word in masked.tolist()]

    def set_active(self, mask: Sequence[bool]) -> None:
        """See ``Dispatcher``. Only with ``fault_tolerant``."""
        self._check_open()
        super().set_active(mask)
        if not self.spec.fault_tolerant:
            if not all(mask):
                raise ValueError("set_active: the dispatcher was made without fault_tolerant, so deep_ep has no mask of ranks")
            return
        for rank, (now, wanted) in enumerate(zip(self.active_mask(), mask, strict=True)):
            if now != wanted:
                self._buffer.low_latency_update_mask_buffer(rank, not wanted)
        self._flying = 0

    def close(self) -> None:
        """See ``Dispatcher``."""
        if not self._closed:
            super().close()
            destroy: Callable[[], None] = self._buffer.destroy
            self._buffer = None
            destroy()
