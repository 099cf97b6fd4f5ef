"""As much of deep_ep as the adapters use, on the CPU over gloo: checks how it is called and gives what the library documents.

Results are written only when their event is waited for or their hook is called; until then, and in rows that nobody sent, they are
NaN. Rows arrive in an order that depends on nothing the caller may rely on.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from rorqual.comm.fp8 import quantise

topk_idx_t = torch.int64
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


class Event:
    """What ``async_with_compute_stream`` returns."""

    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish: Callable[[], None] | None = finish

    def current_stream_wait(self) -> None:
        assert self._finish is not None, "waited for twice"
        self._finish()
        self._finish = None


def poisoned(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((*shape, dtype.itemsize), 0xFF, dtype=torch.uint8).view(dtype).view(shape)


def everybody(group: Any, value: Any) -> list[Any]:
    found: list[Any] = [None] * group.size()
    dist.all_gather_object(found, value, group=group)
    return found


def check_tokens(x: Any, ids: torch.Tensor, weights: torch.Tensor, hidden: int, k: int, most: int) -> None:
    values, scales = x if isinstance(x, tuple) else (x, None)
    n = len(values)
    assert 1 <= n <= most, f"{n} tokens"
    assert values.shape == (n, hidden) and values.is_contiguous() and values.dtype == (BF16 if scales is None else FP8)
    assert scales is None or (scales.shape == (n, -(-hidden // 128)) and scales.dtype == torch.float32)
    assert ids.shape == weights.shape == (n, k) and ids.dtype == topk_idx_t and weights.dtype == torch.float32
    assert ids.is_contiguous() and weights.is_contiguous() and bool((ids >= -1).all()), "only -1 is no choice"
    assert all(len(set(row)) == len(row) for row in ([i for i in row if i >= 0] for row in ids.tolist())), "a slot is named twice"


class ElasticBuffer:
    """V2."""

    def __init__(
        self, group: Any, num_bytes: int | None = None, num_cpu_bytes: int = 0, num_max_tokens_per_rank: int = 0, hidden: int = 0,
        num_topk: int = 0, use_fp8_dispatch: bool = False, deterministic: bool = False, allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True, prefer_overlap_with_compute: bool = True, sl_idx: int = 3, num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300, num_gpu_timeout_secs: int = 100, explicitly_destroy: bool = False,
    ) -> None:  # fmt: skip
        assert isinstance(group, dist.ProcessGroup) and explicitly_destroy and num_gpu_timeout_secs > 0
        assert hidden % 256 == 0 and num_topk <= 32
        self.group, self.most, self.hidden, self.k, self.fp8 = group, num_max_tokens_per_rank, hidden, num_topk, use_fp8_dispatch
        self.calls = 0
        self.destroyed = False

    def destroy(self) -> None:
        assert not self.destroyed
        self.destroyed = True

    def dispatch(
        self, x: Any, *, topk_idx: torch.Tensor, topk_weights: torch.Tensor, num_experts: int, num_max_tokens_per_rank: int,
        expert_alignment: int, async_with_compute_stream: bool, do_cpu_sync: bool,
    ) -> tuple[Any, torch.Tensor, torch.Tensor, Any, Event]:  # fmt: skip
        assert async_with_compute_stream and not do_cpu_sync and num_max_tokens_per_rank == self.most and expert_alignment == 1
        assert isinstance(x, tuple) == self.fp8
        check_tokens(x, topk_idx, topk_weights, self.hidden, self.k, self.most)
        self.calls += 1
        size, me = self.group.size(), self.group.rank()
        local_experts = num_experts // size
        rows = []
        told = (x[0].view(torch.uint8), x[1]) if self.fp8 else x  # FP8 tensors cannot be pickled
        for source, (values, ids, weights) in enumerate(everybody(self.group, (told, topk_idx, topk_weights))):
            local = torch.where((ids >= me * local_experts) & (ids < (me + 1) * local_experts), ids - me * local_experts, -1)
            for t in (local >= 0).any(dim=1).nonzero().view(-1).tolist():
                value, scale = (values[0][t].view(FP8), values[1][t]) if self.fp8 else (values[t], None)
                rows.append((value, scale, local[t], weights[t], source * self.most + t))
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(self.calls)).tolist()
        total = size * self.most
        received = poisoned(total, self.hidden, dtype=FP8 if self.fp8 else BF16)
        scales = poisoned(total, -(-self.hidden // 128), dtype=torch.float32)
        ids_out, weights_out = torch.full((total, self.k), 77, dtype=topk_idx_t), poisoned(total, self.k, dtype=torch.float32)
        source_out = torch.full((total, self.k + 2), 1 << 30, dtype=torch.int32)
        counts = torch.zeros(size, dtype=torch.int32)

        def finish() -> None:
            for place, number in enumerate(order):
                value, scale, local, weight, origin = rows[number]
                received[place], ids_out[place], weights_out[place], source_out[place, 0] = value, local, weight, origin
                if scale is not None:
                    scales[place] = scale
                counts[origin // self.most :] += 1

        handle = SimpleNamespace(
            psum_num_recv_tokens_per_scaleup_rank=counts, recv_src_metadata=source_out, n=len(rows), n_tokens=len(topk_idx), used=False
        )
        return (received, scales) if self.fp8 else received, ids_out, weights_out, handle, Event(finish)

    def combine(self, x: torch.Tensor, handle: Any, *, async_with_compute_stream: bool) -> tuple[torch.Tensor, None, Event]:
        assert async_with_compute_stream and not handle.used and x.dtype == BF16 and x.is_contiguous()
        assert x.shape == (self.group.size() * self.most, self.hidden)
        handle.used = True
        me = self.group.rank()
        parts = everybody(self.group, (x[: handle.n], handle.recv_src_metadata[: handle.n, 0]))
        total = torch.zeros((handle.n_tokens, self.hidden))
        for values, origins in parts:
            mine = torch.div(origins, self.most, rounding_mode="floor") == me
            total.index_add_(0, (origins[mine] % self.most).long(), values[mine].float())
        out = poisoned(handle.n_tokens, self.hidden, dtype=BF16)

        def finish() -> None:
            out.copy_(total)

        return out, None, Event(finish)


class Buffer:
    """V1, low-latency mode."""

    def __init__(
        self, group: Any, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0, low_latency_mode: bool = False, num_qps_per_rank: int = 24,
        explicitly_destroy: bool = False, enable_shrink: bool = False,
    ) -> None:  # fmt: skip
        assert isinstance(group, dist.ProcessGroup) and low_latency_mode and num_rdma_bytes > 0 and explicitly_destroy
        self.group, self.qps, self.masked = group, num_qps_per_rank, torch.zeros(group.size(), dtype=torch.int32) if enable_shrink else None
        self.held = 0  # results whose combine has not ended
        self.destroyed = False

    @staticmethod
    def get_low_latency_rdma_size_hint(most: int, hidden: int, num_ranks: int, num_experts: int) -> int:
        return most * hidden * num_experts

    def destroy(self) -> None:
        assert not self.destroyed
        self.destroyed = True

    def low_latency_dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        most: int,
        num_experts: int,
        *,
        use_fp8: bool,
        round_scale: bool,
        return_recv_hook: bool,
    ) -> tuple[Any, torch.Tensor, Any, None, Callable[[], None]]:
        size, me, hidden = self.group.size(), self.group.rank(), x.shape[1]
        assert return_recv_hook and self.qps == num_experts // size and self.held < 2, "a third result"
        assert (size * most) % 4 == 0
        assert not round_scale or use_fp8
        check_tokens(x, topk_idx, torch.zeros(topk_idx.shape), hidden, topk_idx.shape[1], most)
        self.held += 1
        n_local = num_experts // size
        rows = poisoned(n_local, size * most, hidden, dtype=FP8 if use_fp8 else BF16)
        scales = poisoned(n_local, hidden // 128, size * most, dtype=torch.float32).transpose(1, 2)
        counts, origins = torch.full((n_local,), -9, dtype=torch.int32), torch.full((n_local, size * most), -1)
        told = everybody(self.group, (x, topk_idx))

        def hook() -> None:
            counts.zero_()
            for source in sorted(range(size), key=lambda r: (3 * r + 1) % 7):
                values, ids = told[source]
                if self.masked is not None and self.masked[source]:
                    continue
                made, made_scales = quantise(values, ue8m0=round_scale) if use_fp8 else (values, None)
                for slot in range(n_local):
                    for t in (ids == me * n_local + slot).any(dim=1).nonzero().view(-1).tolist():
                        place = int(counts[slot])
                        rows[slot, place], origins[slot, place] = made[t], source * most + t
                        if made_scales is not None:
                            scales[slot, place] = made_scales[t]
                        counts[slot] += 1

        handle = (origins, counts, most, hidden, num_experts)
        return (rows, scales) if use_fp8 else rows, counts, handle, None, hook

    def low_latency_combine(
        self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, handle: Any, *, return_recv_hook: bool
    ) -> tuple[torch.Tensor, None, Callable[[], None]]:
        origins, counts, most, hidden, num_experts = handle
        size, me = self.group.size(), self.group.rank()
        n_local = num_experts // size
        assert return_recv_hook and x.shape == (n_local, size * most, hidden) and x.dtype == BF16 and x.is_contiguous()
        assert topk_weights.dtype == torch.float32
        told = everybody(self.group, (x, origins, counts))
        out = poisoned(len(topk_idx), hidden, dtype=BF16)

        def hook() -> None:
            total = torch.zeros((len(topk_idx), hidden))
            for t, choices in enumerate(topk_idx.tolist()):
                for column, expert in enumerate(choices):
                    if expert < 0 or (self.masked is not None and self.masked[expert // n_local]):
                        continue
                    values, places, filled = told[expert // n_local]
                    slot = expert % n_local
                    there = (places[slot, : int(filled[slot])] == me * most + t).nonzero().view(-1).tolist()
                    if self.masked is not None and self.masked[me]:
                        continue  # the others do not take what a masked rank sends
                    (place,) = there
                    total[t] += topk_weights[t, column] * values[slot, place].float()
            out.copy_(total)
            self.held -= 1

        return out, None, hook

    def low_latency_update_mask_buffer(self, rank: int, mask: bool = False) -> None:
        assert self.masked is not None
        self.masked[rank] = int(mask)

    def low_latency_query_mask_buffer(self, status: torch.Tensor) -> None:
        assert self.masked is not None and status.dtype == torch.int32
        status.copy_(self.masked)
