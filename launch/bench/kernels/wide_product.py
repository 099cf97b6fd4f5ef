"""Cases of products of a few rows with a small bf16 weight, summed in fp32: the router's scores, the indexer's head weights.

The floor is one read of the weight. The peer is the matrix product that would be taken instead.
"""

from __future__ import annotations

import torch

from .case import Call, Case, Runs, Target

_HIDDEN = 7168


def cases() -> list[Case]:
    """Decode steps of one request up to the most rows that the engine gives it, DeepSeek-V3.2."""
    shapes = [("head weights", 64, rows) for rows in (1, 4, 16)] + [("router", 256, rows) for rows in (1, 4)]
    return [_case(*shape) for shape in shapes]


def _case(what: str, n: int, rows: int) -> Case:
    return Case(
        op="wide_product",
        name=f"wide_product {what} M={rows}",
        params={"m": rows, "n": n, "k": _HIDDEN},
        build=lambda: _build(n, rows),
        n_bytes=2.0 * n * _HIDDEN + 2.0 * rows * _HIDDEN + 4.0 * rows * n,
        target=Target(peer="torch", ratio=1.0),
    )


def _build(n: int, rows: int) -> Runs:
    from ....parallel.kernels.wide_product import wide_product

    copies = min(64, (192 << 20) // (2 * n * _HIDDEN))  # past the L2
    weights = [torch.randn(n, _HIDDEN, device="cuda").bfloat16() for _ in range(copies)]
    x = torch.randn(rows, _HIDDEN, device="cuda").bfloat16()

    def ours(weight: torch.Tensor) -> Call:
        return lambda: wide_product(x, weight)

    def peer(weight: torch.Tensor) -> Call:
        return lambda: torch.mm(x, weight.t(), out_dtype=torch.float32)

    def check() -> None:
        torch.testing.assert_close(wide_product(x, weights[0]).double(), x.double() @ weights[0].double().t(), rtol=1e-5, atol=1e-3)

    calls = [ours(weight) for weight in weights]
    return Runs(ours=calls[0], peers={"torch": [peer(weight) for weight in weights]}, check=check, rotate=calls[1:])
