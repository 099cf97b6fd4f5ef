"""Cases of the block-FP8 linear layers: the dense products of DeepSeek-V3 for decode batches and a prefill chunk."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle
from typing import Any

import torch
import torch.nn.functional as F

from .case import Case, Runs, Target

_SHAPES = {  # N, K
    "q_a + kv_a": (2112, 7168),
    "q_b": (24576, 1536),
    "o_proj": (7168, 16384),
    "shared gate_up": (4096, 7168),
    "shared down": (7168, 2048),
    "dense gate_up": (36864, 7168),
    "dense down": (7168, 18432),
}
_ROWS = (1, 16, 64, 128, 4096)
_DEEP_GEMM = {(64, 2112, 7168), (4096, 7168, 16384)}  # M, N, K: its JIT takes seconds a shape
_BLOCK = 128
_L2 = 60e6
Call = Callable[[], Any]


def cases() -> list[Case]:
    """Every layer with every number of rows, and the quantisation before it."""
    products = [_product(name, n, k, rows) for name, (n, k) in _SHAPES.items() for rows in _ROWS]
    return [*products, *(_quantise(rows, gated) for rows in (64, 4096) for gated in (False, True))]


def _product(name: str, n: int, k: int, rows: int) -> Case:
    from ....parallel.kernels.fp8_gemm_config import bucket

    blocks = -(-k // _BLOCK)
    return Case(
        op="fp8_gemm",
        name=f"{name} M={rows}",
        params={"m": rows, "n": n, "k": k},
        build=lambda: _build(rows, n, k),
        n_bytes=float(n * k + rows * (k + 4 * blocks + 2 * n) + 4 * blocks * -(-n // _BLOCK)),
        flops=2.0 * rows * n * k,
        unit="fp8",
        graph=rows <= 128,
        target=Target(peer="best", ratio=0.9 if rows <= 128 else 0.6),
        tune_shape={"rows": bucket(rows), "n": n, "k": k},
    )


def _operands(rows: int, n: int, k: int, copies: int) -> tuple[torch.Tensor, torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
    """Quantised activations with their scales, and ``copies`` weights with theirs."""
    from ....parallel.kernels.quantise import quantise_activation

    a, scale = quantise_activation(torch.randn(rows, k, device="cuda"))
    weights = []
    for _ in range(copies):
        codes = torch.randint(0, 256, (n, k), device="cuda", dtype=torch.uint8) & 0xBF  # below 2 in size: no NaN code
        weights.append((codes.view(torch.float8_e4m3fn), torch.rand(-(-n // _BLOCK), -(-k // _BLOCK), device="cuda") + 0.5))
    return a, scale, weights


def _candidates(rows: int, n: int, k: int) -> list[dict[str, Any]]:
    """Launches worth measuring."""
    from ....parallel.kernels.fp8_gemm_config import bucket, split_config

    if rows > 128:
        wide = {"kind": "tiles", "rows": 256, "stages": 4}
        return [{**wide, "group": group, "share": share} for group in (4, 8) for share in (False, True)]
    narrow = [{"kind": "narrow", "rows": 64, "columns": columns, "stages": 10} for columns in (16, 32, 64, 128)]
    return [*narrow, split_config(bucket(rows), n, k)]


def _build(rows: int, n: int, k: int) -> Runs:
    from ....parallel.kernels import fp8_gemm, fp8_gemm_torch

    a, scale, weights = _operands(rows, n, k, max(1, round(2.5 * _L2 / (n * k))) if rows <= 128 else 1)
    b, b_scale = weights[0]
    out = torch.empty(rows, n, device="cuda", dtype=torch.bfloat16)

    def ours(weight: torch.Tensor = b, weight_scale: torch.Tensor = b_scale) -> torch.Tensor:
        return fp8_gemm.fp8_gemm(a, scale, weight, weight_scale, out=out)

    def variant(config: dict[str, Any]) -> Call:
        return _in_turn([partial(fp8_gemm.run, a, scale, w, s, None, out, config) for w, s in weights])

    def check() -> None:
        want = fp8_gemm_torch.fp8_gemm(a, scale, b, b_scale, out_dtype=torch.float32)
        error = (ours().float() - want).abs().max() / want.abs().max()
        assert error < 5e-3, f"error {error:.2e} of the largest value"  # of bf16

    return Runs(
        ours=ours,
        peers=_peers(a, scale, weights),
        variants={json.dumps(config): variant(config) for config in _candidates(rows, n, k)},
        check=check,
        rotate=[partial(ours, w, s) for w, s in weights[1:]],
        written=(out,),
    )


def _in_turn(calls: Sequence[Call]) -> Call:
    """One call after the other, so that a weight smaller than the L2 is not found there."""
    turn = cycle(calls)
    return lambda: next(turn)()


def _peers(a: torch.Tensor, scale: torch.Tensor, weights: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, Call | list[Call]]:
    """DeepGEMM, cuBLASLt's block-scaled product, and a bf16 product for orientation; scales are laid out before the timing."""
    n, k = weights[0][0].shape
    peers: dict[str, Call | list[Call]] = {}
    try:
        import deep_gemm

        if (a.shape[0], n, k) in _DEEP_GEMM:
            aligned = deep_gemm.get_mn_major_tma_aligned_tensor(scale.contiguous())
            out = torch.empty(a.shape[0], n, device="cuda", dtype=torch.bfloat16)
            peers["deep_gemm"] = [partial(deep_gemm.fp8_gemm_nt, (a, aligned), pair, out) for pair in weights]
    except ImportError:
        pass
    if n % _BLOCK == 0 and hasattr(F, "ScalingType"):
        rows = F.pad(a.view(torch.uint8), (0, 0, 0, -a.shape[0] % 4)).view(a.dtype)  # it wants a multiple of four rows
        lines = F.pad(scale, (0, 0, 0, -a.shape[0] % 4)).t().contiguous().t()
        kinds = F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128
        laid = [(w.t(), F.pad(s, (0, -s.shape[1] % 4)).t()) for w, s in weights]
        peers["cublaslt"] = [partial(F.scaled_mm, rows, w, lines, kinds[0], s, kinds[1]) for w, s in laid]
    x, wide = a.to(torch.bfloat16), [w.to(torch.bfloat16).t() for w, _ in weights]
    peers["bf16"] = [partial(torch.matmul, x, w) for w in wide]
    return peers


def _quantise(rows: int, gated: bool) -> Case:
    width = 7168 if not gated else 2048

    def build() -> Runs:
        from ....parallel.kernels import quantise, quantise_torch

        x = torch.randn(rows, width * (2 if gated else 1), device="cuda", dtype=torch.bfloat16)
        name = "silu_mul_quantise" if gated else "quantise_activation"
        return Runs(ours=lambda: getattr(quantise, name)(x), peers={"torch": lambda: getattr(quantise_torch, name)(x)})

    return Case(
        op="quantise",
        name=f"{'silu_mul_quantise' if gated else 'quantise'} {rows} x {width}",
        params={"m": rows, "k": width},
        build=build,
        n_bytes=rows * width * (1 + (4.0 if gated else 2.0)),
        target=Target(roof=0.8) if rows > 64 else Target(us=4.0),
    )
