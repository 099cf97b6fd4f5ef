"""Sparse MLA decode: attention of a few query tokens over the pool rows that each of them names."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from ...parallel.kernels.overlap import early_start
from ...parallel.kernels.tuned import config_for
from .sparse_attention_torch import check_arguments
from .sparse_decode_combine import sparse_decode_combine_kernel
from .sparse_decode_fp8 import sparse_decode_fp8_kernel
from .sparse_decode_rows import sparse_decode_rows_kernel

_LOG2_E = 1.4426950408889634
_MOST_SPLITS = 32  # one warp joins them all
_GRID_Y = 65535  # most programs in the second dimension of a launch
_TRITON = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@dataclass(frozen=True, kw_only=True)
class DecodeConfig:
    """How a sparse decode is launched."""

    kernel: str  # "rows" (any widths and dtypes), "fp8" (FP8 rows, C % 128 == 0); on Hopper with C 512, R 64: "few", "wide"
    heads: int  # heads of a program
    keys: int  # keys of a tile
    splits: int  # programs that share a token's keys
    warps: int  # of a program; of each of the three groups in "few" and "wide"
    stages: int  # tiles in flight


def sparse_attention(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    pool: torch.Tensor,
    rows: torch.Tensor,
    *,
    scale: float,
    sink: torch.Tensor | None = None,
    n_keys: torch.Tensor | None = None,
    config: DecodeConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``sparse_attention_torch.sparse_attention`` as kernels: the same arguments, results and errors.

    ``config`` overrides how it is launched. Splits are chosen from shapes alone, and joined in a fixed order: results do
    not vary from run to run, and a call can be captured in a CUDA graph.

    Source: split-KV decoding with a joined softmax, https://crfm.stanford.edu/2023/10/12/flashdecoding.html.
    """
    check_arguments(q_latent, q_rope, pool, rows, sink=sink, n_keys=n_keys)
    tokens, heads, latent = q_latent.shape
    out = torch.empty((tokens, heads, latent), dtype=q_latent.dtype, device=q_latent.device)
    lse = torch.empty((tokens, heads), dtype=torch.float32, device=q_latent.device)
    if tokens == 0 or heads == 0:
        return out, lse
    if config is None:
        aligned = pool.data_ptr() % 16 == 0 and pool.stride(0) % 16 == 0
        config = plan(tokens, heads, rows.shape[1], latent, q_rope.shape[2], q_latent.dtype, pool.dtype, aligned)
    if config.splits == 1:
        _launch(config, q_latent, q_rope, pool, rows, scale, sink, n_keys, out, lse)
        return out, lse
    part = torch.empty((tokens, heads, config.splits, latent), dtype=torch.float32, device=q_latent.device)
    part_lse = torch.empty((tokens, heads, config.splits), dtype=torch.float32, device=q_latent.device)
    _launch(config, q_latent, q_rope, pool, rows, scale, sink, n_keys, part, part_lse)
    width = min(128, triton.next_power_of_2(latent))
    sparse_decode_combine_kernel[(tokens * heads, triton.cdiv(latent, width))](
        part, part_lse, lse if sink is None else sink, out, lse, int(sink is not None), heads, config.splits,
        C=latent, WIDTH=width, PADDED=triton.next_power_of_2(config.splits), num_warps=1,
        **early_start(q_latent.device),
    )  # fmt: skip
    return out, lse


@lru_cache(maxsize=1024)
def plan(
    tokens: int, heads: int, k: int, latent: int, rope: int, q_dtype: torch.dtype, pool_dtype: torch.dtype, aligned: bool
) -> DecodeConfig:
    """The launch for a shape: heuristics, overridden by what ``bench tune`` found on this GPU. ``aligned``: rows start at 16 bytes."""
    default = _default(tokens, heads, k, latent, rope, q_dtype, pool_dtype, aligned)
    kind = str(pool_dtype).removeprefix("torch.")
    found = DecodeConfig(**config_for("sparse_decode", asdict(default), tokens=tokens, heads=heads, k=k, width=latent, pool=kind))
    # a neighbour's setting may be of a kernel that cannot take this shape, or have more splits than there are tiles
    return found if found.kernel == default.kernel and found.splits <= max(1, -(-k // found.keys)) else default


def _default(
    tokens: int, heads: int, k: int, latent: int, rope: int, q_dtype: torch.dtype, pool_dtype: torch.dtype, aligned: bool
) -> DecodeConfig:
    small = heads <= 16
    fp8 = pool_dtype == torch.uint8
    if (latent, rope) == (512, 64) and q_dtype == torch.bfloat16 and aligned and _hopper() and (fp8 or pool_dtype == torch.bfloat16):
        wide = heads > (32 if fp8 else 16) and tokens <= _GRID_Y
        if wide or fp8:
            block = 64 if wide else 16
            splits = _splits(tokens * -(-heads // block), k, 64, 132)
            return DecodeConfig(kernel="wide" if wide else "few", heads=block, keys=64, splits=splits, warps=4, stages=2 if wide else 4)
    if fp8 and latent % 128 == 0 and latent <= 512 and q_dtype != torch.float32:
        block = 16 if small else 64
        return DecodeConfig(
            kernel="fp8", heads=block, keys=32, splits=_splits(tokens * -(-heads // block), k, 32, 264), warps=4 if small else 8, stages=2
        )
    exact = fp8 or q_dtype != pool_dtype or q_dtype == torch.float32
    block = 16 if small or exact else 64
    keys = 16 if exact else 64 if block == 16 else 32
    splits = _splits(tokens * -(-heads // block), k, keys, 264)
    return DecodeConfig(kernel="rows", heads=block, keys=keys, splits=splits, warps=4 if block == 16 else 8, stages=2)


def _splits(programs: int, k: int, keys: int, wanted: int) -> int:
    """Parts of a token's keys, so that about ``wanted`` programs run, each with whole tiles and none without."""
    tiles = max(1, -(-k // keys))
    each = -(-tiles // max(1, min(tiles, wanted // programs, _MOST_SPLITS)))
    return -(-tiles // each)


@lru_cache(maxsize=1)
def _hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


def _launch(
    config: DecodeConfig,
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    pool: torch.Tensor,
    rows: torch.Tensor,
    scale: float,
    sink: torch.Tensor | None,
    n_keys: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """Run the kernel of ``config``; ``out`` and ``lse`` are the results or, with splits, the parts."""
    tokens, heads, latent = q_latent.shape
    rope, k = q_rope.shape[2], rows.shape[1]
    per_split = triton.cdiv(triton.cdiv(k, config.splits), config.keys) * config.keys
    grid = (tokens, -(-heads // config.heads), config.splits)
    arguments = (
        q_latent, q_rope, pool, rows, rows if n_keys is None else n_keys, lse if sink is None else sink, out, lse,
        int(sink is not None), int(n_keys is not None), len(pool), k, heads, config.splits, per_split, scale * _LOG2_E,
        q_latent.stride(0), q_latent.stride(1), q_rope.stride(0), q_rope.stride(1), pool.stride(0), rows.stride(0),
    )  # fmt: skip
    flags: dict[str, Any] = {"HB": config.heads, "PARTS": config.splits > 1}
    options = {"num_warps": config.warps}
    if config.kernel == "few":
        from .sparse_decode_few import sparse_decode_few_kernel

        sparse_decode_few_kernel[grid](
            *arguments, **flags, STAGES=config.stages, SECOND_REGS=208, LOAD_REGS=80, num_warps=4, launch_pdl=True
        )
        return
    if config.kernel == "wide":
        from .sparse_decode_wide import sparse_decode_wide_kernel

        del flags["HB"]
        regs = {"VALUE_REGS": 168, "LOAD_REGS": 128} if pool.dtype == torch.uint8 else {"VALUE_REGS": 184, "LOAD_REGS": 72}
        sparse_decode_wide_kernel[(grid[1], tokens, config.splits)](*arguments, **flags, **regs, num_warps=4, launch_pdl=True)
        return
    options["num_stages"] = config.stages
    padded = max(16, triton.next_power_of_2(rope))
    if config.kernel == "fp8":
        turn = tl.float16 if q_latent.dtype == torch.float16 else tl.bfloat16
        sparse_decode_fp8_kernel[grid](*arguments, **flags, C=latent, R=rope, RP=padded, NB=config.keys, TURN=turn, **options)
        return
    exact = pool.dtype == torch.uint8 or q_latent.dtype != pool.dtype
    sparse_decode_rows_kernel[grid](
        *arguments, **flags, C=latent, R=rope, CP=max(16, triton.next_power_of_2(latent)), RP=padded, NB=config.keys,
        FP8=pool.dtype == torch.uint8, DOT=tl.float32 if exact else _TRITON[q_latent.dtype], **options,
    )  # fmt: skip
