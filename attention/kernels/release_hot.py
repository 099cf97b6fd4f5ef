"""Hot rows forgotten in every layer at once, as one Triton launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def release_hot_kernel(
    hot_positions, layer_stride, slots, first, last, n_layers, HOT: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr
):
    """Grid (n, programs): each program takes every programs-th layer of one range."""
    slot = tl.load(slots + tl.program_id(0)).to(tl.int64)
    begin = tl.load(first + tl.program_id(0)) * PAGE
    end = tl.minimum(tl.load(last + tl.program_id(0)) * PAGE, HOT)
    for layer in range(tl.program_id(1), n_layers, tl.num_programs(1)):
        held = hot_positions + (tl.full((), 0, tl.int64) + layer) * layer_stride + slot * HOT
        for start in range(begin, end, BLOCK):
            hot = start + tl.arange(0, BLOCK)
            tl.store(held + hot, tl.full((BLOCK,), -1, tl.int32), mask=hot < end)


def release_hot(hot_positions: torch.Tensor, slots: torch.Tensor, first: torch.Tensor, last: torch.Tensor, *, page_size: int) -> None:
    """Forget what hot rows hold, in every layer, because their slot's request or the device pages under them leave.

    Args:
        hot_positions: int32 [L, S + 1, H * page_size], of all layers. Positions of the hot rows concerned become -1.
        slots: int32 [n], request slots; a slot may occur more than once.
        first: int32 [n], first page of the slot's lease to be emptied.
        last: int32 [n], end of that range (0 and H: all of the slot).
        page_size: hot rows a page.
    """
    n, n_layers, width = slots.shape[0], hot_positions.shape[0], hot_positions.shape[2]
    if n and n_layers:
        release_hot_kernel[(n, min(n_layers, 128))](
            hot_positions, hot_positions.stride(0), slots, first, last, n_layers,
            HOT=width, PAGE=page_size, BLOCK=min(1024, triton.next_power_of_2(width)), num_warps=4,
        )  # fmt: skip
