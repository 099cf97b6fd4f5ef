"""Block-FP8 product for few rows: bound by reading the weights once, so the weights are what is spread over the GPU.

The roles of the operands are swapped: FEATURES rows of the weight fill the 64 or 128 rows of a wgmma and ROWS activations
its columns, so that no tensor-core row is spent on padding. Every weight tile is cut into SPLITS ranges of K that run in
different programs; each leaves its fp32 sums in a workspace, and the program that finds itself the last of its tile adds
them in the order of K. Which program is the last does not matter to the result.
"""

from __future__ import annotations

import threading

import torch
import triton
import triton.language as tl

from .overlap import early_start, enter


@triton.jit
def _finish(total, out, bias, rows, features, n_rows, n_features, out_stride, BIAS: tl.constexpr):
    """Write total [FEATURES, ROWS] transposed, in out's dtype."""
    if BIAS:
        total += tl.load(bias + features, mask=features < n_features, other=0.0).to(tl.float32)[:, None]
    target = out + rows.to(tl.int64)[:, None] * out_stride + features[None, :]
    tl.store(target, tl.trans(total).to(out.dtype.element_ty), mask=(rows < n_rows)[:, None] & (features < n_features)[None, :])


@triton.jit(do_not_specialize=["n_rows", "b_scale_stride"])
def fp8_gemm_split_kernel(
    a, a_scale, b, b_scale, bias, out, partial, arrived, n_rows, n_features, width, a_stride, a_scale_row, a_scale_block, b_stride,
    b_scale_stride, out_stride,
    FEATURES: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr, BIAS: tl.constexpr, WHOLE: tl.constexpr, STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Program (split of a weight tile, tile of rows). WHOLE: the widths are multiples of the tile's, only rows need a mask."""
    enter(EARLY)
    n_blocks = tl.cdiv(width, 128)
    tile = tl.program_id(0) // SPLITS
    split = tl.program_id(0) % SPLITS
    features = tile * FEATURES + tl.arange(0, FEATURES)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    lanes = tl.arange(0, 128)
    held = features if WHOLE else tl.minimum(features, n_features - 1)
    # Rows beyond the last are zeros. If they repeated it, all programs would ask for its few lines at once, which takes a fifth longer.
    real = rows < n_rows
    named = tl.minimum(rows, n_rows - 1)
    b_at = b + held.to(tl.int64)[:, None] * b_stride + lanes[None, :]
    a_at = a + named.to(tl.int64)[None, :] * a_stride + lanes[:, None]
    a_scale_at = a_scale + named * a_scale_row
    b_scale_at = b_scale + (tile * FEATURES // 128) * b_scale_stride
    total = tl.zeros([FEATURES, ROWS], tl.float32)
    for block in tl.range(split * n_blocks // SPLITS, (split + 1) * n_blocks // SPLITS, num_stages=STAGES):
        if WHOLE:
            weight = tl.load(b_at + block * 128)
            value = tl.load(a_at + block * 128, mask=real[None, :], other=0.0)
        else:
            weight = tl.load(b_at + block * 128, mask=(lanes < width - block * 128)[None, :], other=0.0)
            value = tl.load(a_at + block * 128, mask=(lanes < width - block * 128)[:, None] & real[None, :], other=0.0)
        scale = tl.load(a_scale_at + block * a_scale_block) * tl.load(b_scale_at + block)
        total += tl.dot(weight, value) * scale[None, :]
    if SPLITS == 1:
        _finish(total, out, bias, rows, features, n_rows, n_features, out_stride, BIAS)
    else:
        slot = tl.program_id(1) * tl.num_programs(0) + tile * SPLITS
        inner = tl.arange(0, FEATURES)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
        tl.store(partial + (slot + split).to(tl.int64) * (FEATURES * ROWS) + inner, total)
        tl.debug_barrier()  # every thread's sums are out before the arrival is
        counter = arrived + slot // SPLITS
        if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == SPLITS - 1:
            total = tl.zeros([FEATURES, ROWS], tl.float32)
            for other in tl.static_range(SPLITS):
                total += tl.load(partial + (slot + other).to(tl.int64) * (FEATURES * ROWS) + inner, cache_modifier=".cg")
            tl.store(counter, 0)  # ready for the next launch
            _finish(total, out, bias, rows, features, n_rows, n_features, out_stride, BIAS)


#: Blocks of K of a program up to which it may start early. Programs that start early go where the kernel before leaves room, two to an SM
#: where there would be one to each, and all wait for the slowest: 7168 x 16384 took 51 us instead of 37.
_SHORT = 32
_COUNTERS = 1 << 14  # of a stream
_CAPTURED = 1 << 20  # of all products in graphs on a device
_arrivals: dict[tuple[int, int], torch.Tensor] = {}
_captured: dict[int, torch.Tensor] = {}  # those not given away yet
_giving = threading.Lock()  # of one launch's to one launch


def arrivals(device: torch.device, count: int) -> torch.Tensor:
    """int32 zeros [>= count] for a launch, which leaves them zero.

    Launches of one stream share theirs; a stream has its own, because two products may run at the same time. On which stream a graph
    will run nobody knows: each captured launch has its own for ever, and zeroes them in every replay once all are given away.
    """
    if device.type != "cuda" or count > _COUNTERS:
        return torch.zeros(count, dtype=torch.int32, device=device)
    index = device.index or 0
    if torch.cuda.is_current_stream_capturing():
        with _giving:
            left = _captured.get(index)
            if left is None or len(left) < count:
                return torch.zeros(count, dtype=torch.int32, device=device)
            _captured[index] = left[count + -count % 4 :]  # those of each launch begin on 16 bytes, as kernels are compiled for
            return left[:count]
    if index not in _captured:  # a capture could not make them: its memory is not its own between replays
        _captured[index] = torch.zeros(_CAPTURED, dtype=torch.int32, device=device)
    key = (index, torch.cuda.current_stream(device).cuda_stream)
    found = _arrivals.get(key)
    if found is None:
        found = _arrivals[key] = torch.zeros(_COUNTERS, dtype=torch.int32, device=device)
    return found


def launch(
    a: torch.Tensor, a_scale: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor,
    *, rows: int, features: int, splits: int, stages: int, warps: int,
) -> None:  # fmt: skip
    """Run ``fp8_gemm_split_kernel`` with tiles of ``features`` x ``rows``; at least one row."""
    n_rows, width = a.shape
    n_features = b.shape[0]
    n_tiles, n_row_tiles = triton.cdiv(n_features, features), triton.cdiv(n_rows, rows)
    splits = max(min(splits, triton.cdiv(width, 128)), 1)
    partial = arrived = None
    more = early_start(a.device)
    if triton.cdiv(width, 128) > _SHORT * splits:
        more["launch_pdl"] = False
    if splits > 1:
        partial = torch.empty(n_tiles * n_row_tiles * splits * features * rows, dtype=torch.float32, device=a.device)
        arrived = arrivals(a.device, n_tiles * n_row_tiles)
    fp8_gemm_split_kernel[(n_tiles * splits, n_row_tiles)](
        a, a_scale, b, b_scale, bias, out, partial, arrived, n_rows, n_features, width, a.stride(0), a_scale.stride(0), a_scale.stride(1),
        b.stride(0), b_scale.stride(0), out.stride(0),
        FEATURES=features, ROWS=rows, SPLITS=splits, BIAS=bias is not None, WHOLE=n_features % features == 0 and width % 128 == 0,
        STAGES=stages, num_warps=warps, **more,
    )  # fmt: skip
