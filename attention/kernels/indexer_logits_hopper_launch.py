"""Host side of the Hopper kernel of ``indexer_logits``: descriptors of the paged pool, and the launch."""

from __future__ import annotations

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ...parallel.kernels.hopper import multiprocessors
from .indexer_logits_hopper import indexer_logits_kernel
from .indexer_logits_schedule import Config, constants

_SWIZZLED = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
_HALF_SWIZZLED = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=8, rank=2)
_PLAIN = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)


class _Address:
    """What a descriptor needs of its tensor; does not keep the pool alive."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.dtype, self._pointer = tensor.dtype, tensor.data_ptr()

    def data_ptr(self) -> int:
        return self._pointer


_pool_descriptors: dict[tuple[int, int, int], tuple[TensorDescriptor, TensorDescriptor]] = {}


def _descriptors(pool: torch.Tensor) -> tuple[TensorDescriptor, TensorDescriptor]:
    """Keys as rows of 128 bytes (a page is 66 of them, the last two hold its scales), scales as rows of 64 (the last of a page's 33).

    FP4: rows of 64 bytes, 68 a page, and words of scales, the last of a page's 17 rows.
    """
    key = (pool.data_ptr(), len(pool), pool.shape[1])
    if key not in _pool_descriptors:
        if len(_pool_descriptors) >= 1024:
            _pool_descriptors.clear()
        fp4 = pool.shape[1] == 64 * 68
        width, layout = (64, _HALF_SWIZZLED) if fp4 else (128, _SWIZZLED)
        keys, scales = pool.view(-1, width), pool.view(torch.int32 if fp4 else torch.float32).view(-1, 64)
        keys = keys if fp4 else keys.view(torch.float8_e4m3fn)
        _pool_descriptors[key] = (
            TensorDescriptor(_Address(keys), list(keys.shape), [width, 1], [64, width], layout),
            TensorDescriptor(_Address(scales), list(scales.shape), [64, 1], [1, 64], _PLAIN),
        )
    return _pool_descriptors[key]


def launch(
    q: torch.Tensor,
    weights: torch.Tensor,
    pool: torch.Tensor,
    page_table: torch.Tensor,
    token_row: torch.Tensor,
    limit: torch.Tensor,
    start: torch.Tensor | None,
    out: torch.Tensor,
    max_query: int,
    config: Config,
) -> None:
    """Run the kernel; arguments as in ``indexer_logits``, checked and contiguous.

    ``config`` may also name ``programs``, fewer than fill the GPU where other kernels are to run beside this one.
    """
    tokens, heads, width = q.shape
    programs = config.get("programs", multiprocessors(q.device) * config["per_sm"])
    settings = constants(heads, max_query, tokens, start is not None, **{name: x for name, x in config.items() if name != "programs"})
    keys, scales = _descriptors(pool)
    queries = q.view(tokens * heads, width)
    indexer_logits_kernel[(programs,)](
        keys,
        scales,
        TensorDescriptor(queries, [tokens * heads, width], [width, 1], [settings["QB"] * heads, width], _SWIZZLED),
        weights,
        page_table,
        page_table.stride(0),
        token_row,
        limit,
        limit if start is None else start,
        out,
        out.stride(0),
        tokens,
        **settings,
    )
