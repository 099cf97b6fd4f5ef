"""V2 of deep_ep (``ElasticBuffer``) behind the protocol: one row a token and rank travels, and the sum of a rank's experts comes back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ...parallel.group import Group
from ..base import BaseDispatcher
from ..caps import Caps
from ..checks import check_call, check_valid
from ..dispatcher import EPSpec, Routed
from ..fp8 import dequantise
from ..grouping import Arrived, group_by_slot, results, weighted_rows
from ..rows import DTYPES, is_fp8
from .limits import ELASTIC_RANKS, ELASTIC_TOP_K, check_elastic
from .package import ELASTIC, load
from .tokens import Tokens, process_group


@dataclass(kw_only=True)
class _Flight:
    tokens: Tokens
    received: Any  # rows, or (rows, scales); valid after the event
    local: torch.Tensor  # [rows, k] local slots, -1 for none
    weights: torch.Tensor  # float32 [rows, k]
    handle: Any
    event: Any
    epoch: int
    arrived: Arrived | None = None
    combined: torch.Tensor | None = None


class ElasticDispatcher(BaseDispatcher):
    """The library carries weights but does not apply them: they are applied here, to a rank's sum, before it goes home.

    Rows arrive in any order. Nothing waits for the host: buffers are as large as the worst case. ``capacity`` is ignored, since the
    library's layout depends on it; ``max_tokens`` is the same in every call.
    """

    name = ELASTIC
    caps = Caps(
        graph=True, fp8=True, deterministic=False, max_ranks=ELASTIC_RANKS, max_top_k=ELASTIC_TOP_K,
        needs=("sgl-deep-ep or deep_ep 2", "torch that it was built for", "NCCL 2.30.4", "CUDA"),
    )  # fmt: skip

    def __init__(self, group: Group, spec: EPSpec, *, library: Any = None) -> None:
        """Collective over ``group``. ``library`` stands for the module deep_ep. ValueError: not installed, or not for this spec."""
        self._library = library or load(ELASTIC)
        check_elastic(spec)
        super().__init__(group, spec)
        self._buffer: Any = self._library.ElasticBuffer(
            process_group(group), num_max_tokens_per_rank=spec.max_tokens, hidden=spec.hidden, num_topk=spec.top_k,
            use_fp8_dispatch=is_fp8(spec), num_gpu_timeout_secs=max(1, spec.timeout_ms // 1000), explicitly_destroy=True,
        )  # fmt: skip

    def dispatch_send(
        self, x: torch.Tensor, slot_ids: torch.Tensor, weights: torch.Tensor, n_valid: torch.Tensor | None = None, *,
        tag: int = 0, capacity: int | None = None, scales: torch.Tensor | None = None,
    ) -> _Flight:  # fmt: skip
        """See ``Dispatcher``."""
        self._check_open()
        check_call(self.spec, x, slot_ids, weights, limit=capacity, scales=scales)
        check_valid(n_valid, x)
        self._begin()
        tokens = Tokens.of(self.spec, x, slot_ids, weights, n_valid, scales, id_dtype=self._library.topk_idx_t, quantised=True)
        values = tokens.x if tokens.scales is None else (tokens.x, tokens.scales)
        received, local, came, handle, event = self._buffer.dispatch(
            values, topk_idx=tokens.ids, topk_weights=tokens.weights, num_experts=self.spec.n_slots,
            num_max_tokens_per_rank=self.spec.max_tokens, expert_alignment=1, async_with_compute_stream=True, do_cpu_sync=False,
        )  # fmt: skip
        return _Flight(tokens=tokens, received=received, local=local, weights=came, handle=handle, event=event, epoch=self._epoch)

    def dispatch_recv(self, ticket: _Flight, layout: str = "contiguous") -> Routed:
        """See ``Dispatcher``. Layout "rank": FP8 rows as they travelled, with scales."""
        self._check_recv(layout)
        ticket.event.current_stream_wait()
        n = ticket.handle.psum_num_recv_tokens_per_scaleup_rank[-1]
        there = torch.arange(len(ticket.local), device=ticket.local.device) < n  # rows behind the last are as they were
        local = torch.where(there.unsqueeze(1), ticket.local.long(), -1)
        origins = torch.where(there, ticket.handle.recv_src_metadata[:, 0], -1).int()
        weights = torch.where(local >= 0, ticket.weights, 0.0)
        values, scales = ticket.received if isinstance(ticket.received, tuple) else (ticket.received, None)
        x = values if scales is None or layout == "rank" else dequantise(values, scales, DTYPES[self.spec.dtype])
        order = None if layout == "rank" else torch.where(there, origins, torch.iinfo(torch.int32).max).argsort(stable=True)
        routed, ticket.arrived = group_by_slot(self.spec, x, local, weights, origins, layout, order)
        routed.handle, routed.epoch = ticket, ticket.epoch
        if layout == "rank":
            routed.scales = scales
        return routed

    def combine_send(self, y: torch.Tensor, routed: Routed, *, index: torch.Tensor | None = None) -> _Flight:
        """See ``Dispatcher``."""
        self._check_open()
        flight: _Flight = routed.handle
        assert flight.arrived is not None
        values, places = results(self.spec, y, routed, flight.arrived, index)
        rows = weighted_rows(self.spec, values, places, flight.arrived.weights).contiguous()
        flight.combined, _, flight.event = self._buffer.combine(rows, flight.handle, async_with_compute_stream=True)
        return flight

    def combine_recv(self, ticket: _Flight, out: torch.Tensor | None = None) -> torch.Tensor:
        """See ``Dispatcher``."""
        self._check_open()
        assert ticket.combined is not None
        ticket.event.current_stream_wait()
        return self._deliver(ticket.tokens.results(ticket.combined, self.spec), out)

    def close(self) -> None:
        """See ``Dispatcher``."""
        if not self._closed:
            super().close()
            destroy: Callable[[], None] = self._buffer.destroy
            self._buffer = None
            destroy()
