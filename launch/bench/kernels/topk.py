"""Cases of the exact top-k: decode rows, and the score rows of a prefill chunk. Their floor is one read of the scores."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from itertools import product
from typing import Any

import torch

from .case import Call, Case, Runs, Target

_K, _PAGE = 2048, 64


def cases() -> list[Case]:
    """Rows of 64 k and 128 k scores, one to thousands of them; the targets are those of CUDA kernels on the same GPU."""
    return [
        _case(1, 131_072, Target(us=40.0)),
        _case(16, 65_536, Target(us=39.0)),
        _case(64, 131_072, Target(us=60.0)),
        _case(64, 131_072, Target(peer="torch"), limit=4096),
        _case(2048, 131_072, Target(roof=0.3)),
        _case(8192, 65_536, Target(us=1800.0)),
    ]


def _case(rows: int, length: int, target: Target, limit: int | None = None) -> Case:
    """``limit``: scores a row in fact has, of the ``length`` that the launch must be ready for."""
    actual = length if limit is None else limit
    return Case(
        op="topk",
        name=f"topk {rows} x {length}" + ("" if limit is None else f", {limit} of them"),
        params={"rows": rows, "length": length, "limit": actual, "k": _K},
        build=lambda: _build(rows, length, actual),
        n_bytes=4.0 * rows * (actual + 2 * _K),
        target=target,
        tune_shape={"rows": rows, "max_context": length, "k": _K} if limit is None else None,
    )


def _build(rows: int, length: int, limit: int) -> Runs:
    from ....attention.kernels import topk, topk_torch
    from ....attention.kernels.topk_plan import TopkPlan, plan_for

    copies = max(1, min(3, (256 << 20) // (4 * rows * length)))
    scores = [torch.randn(rows, length, device="cuda") for _ in range(copies)]
    limits = torch.full((rows,), limit, dtype=torch.int32, device="cuda")
    table = torch.randperm(8 * (length // _PAGE), device="cuda").int().view(8, -1)
    token_row = torch.arange(rows, device="cuda") % 8

    def call(x: torch.Tensor, plan: TopkPlan | None = None) -> Call:
        return lambda: topk.select_rows(x, limits, _K, table, token_row, page_size=_PAGE, max_context=length, plan=plan)

    def check() -> None:
        some = slice(0, 32)
        wanted = topk_torch.select_rows(scores[0][some], limits[some], _K, table, token_row[some], page_size=_PAGE, max_context=length)
        for got, expected in zip(call(scores[0])(), wanted, strict=True):
            assert torch.equal(got[some], expected), "the choice differs from the plain version's"

    plans = [replace(plan_for(rows, length, _K), **config) for config in _configs(rows)]
    variants: dict[str, Call] = {json.dumps(asdict(plan)): call(scores[0], plan) for plan in plans}
    return Runs(
        ours=call(scores[0]),
        peers={"torch": lambda: scores[0][:, :limit].topk(_K, dim=1)},
        variants=variants,
        check=check,
        rotate=[call(x) for x in scores[1:]],
    )


def _configs(rows: int) -> list[dict[str, Any]]:
    """Launch settings worth trying, over the default ones."""
    found: list[dict[str, Any]] = []
    if rows >= 128:
        tried = product((2048, 4096), ((4, 128), (4, 96), (8, 128), (8, 80)))
        found += [{"by_rows": True, "block": b, "warps": w, "registers": r, "emit": 2048} for b, (w, r) in tried]
    if rows <= 512:
        tried = product((2048, 4096), ((4, 8), (8, 8)))
        found += [{"by_rows": False, "block": b, "warps": w, "row_warps": r, "emit": 8192} for b, (w, r) in tried]
    return found
