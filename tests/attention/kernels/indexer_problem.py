"""Random inputs of ``indexer_logits`` with everything that may not be read filled with NaN."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from rorqual.attention.kernels.indexer_logits_torch import fill


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Arguments of one call."""

    q: torch.Tensor
    weights: torch.Tensor
    pool: torch.Tensor
    page_table: torch.Tensor
    token_row: torch.Tensor
    limit: torch.Tensor
    page_size: int
    max_context: int
    max_query: int
    start: torch.Tensor | None = None

    def call(self, function: Any, **more: Any) -> torch.Tensor:
        names = ("page_size", "max_context", "max_query", "start")
        given = {**{name: getattr(self, name) for name in names}, **more}
        result: torch.Tensor = function(self.q, self.weights, self.pool, self.page_table, self.token_row, self.limit, **given)
        return result

    def defined(self, length: int) -> torch.Tensor:
        """Which entries of [T, length] have a meaning."""
        at = torch.arange(length, device=self.q.device)
        first = torch.zeros_like(self.limit) if self.start is None else self.start
        return (at >= first[:, None]) & (at < self.limit[:, None]) & (self.token_row >= 0)[:, None]

    def reference(self) -> torch.Tensor:
        """fp64 evaluation, 0 where undefined."""
        out = torch.zeros(len(self.q), self.max_context, dtype=torch.float64, device=self.q.device)
        fill(out, self.q, self.weights, self.pool, self.page_table, self.token_row, self.limit, self.start, self.page_size, torch.float64)
        return out

    def rows(self, token: slice) -> Problem:
        """The same tokens of a smaller batch."""
        start = None if self.start is None else self.start[token]
        q, weights = self.q[token], self.weights[token]
        return replace(self, q=q, weights=weights, token_row=self.token_row[token], limit=self.limit[token], start=start)

    def error(self, out: torch.Tensor) -> float:
        """Largest error over the largest true value, over the defined entries; infinite if one is not finite."""
        mask = self.defined(self.max_context)
        got, true = out[:, : self.max_context].double()[mask], self.reference()[mask]
        if not got.numel():
            return 0.0
        return float("inf") if not bool(got.isfinite().all()) else float((got - true).abs().max() / true.abs().max())


def problem(
    requests: Sequence[tuple[int, int]],
    *,
    heads: int = 64,
    width: int = 128,
    page_size: int = 64,
    dtype: torch.dtype = torch.float8_e4m3fn,
    pool_dtype: torch.dtype | None = None,
    max_context: int | None = None,
    max_query: int | None = None,
    n_pages: int | None = None,
    first_page: int = 0,
    row_type: torch.dtype = torch.int32,
    fp4: bool = False,
    device: str = "cpu",
    seed: int = 0,
) -> Problem:
    """Requests of (context, new tokens): new token ``i`` sees ``context - new + i + 1`` keys.

    The pages of a request are scattered over the pool; unused pages and unused rows of the last page are NaN, table entries past
    the end are -1. Scales are no powers of two and span six decades. ``fp4``: keys of random bits, any multiplier in any block.
    """
    rng = torch.Generator(device=device).manual_seed(seed)
    tokens = sum(new for _, new in requests)
    longest = max(context for context, _ in requests)
    max_context = longest if max_context is None else max_context
    used = sum(-(-context // page_size) for context, _ in requests)
    n_pages = used + 3 if n_pages is None else n_pages
    order = torch.randperm(n_pages - first_page, generator=rng, device=device)[:used].to(torch.int32) + first_page
    table = torch.full((len(requests), max(1, -(-max_context // page_size))), -1, dtype=torch.int32, device=device)
    fp8 = dtype == torch.float8_e4m3fn
    pool_dtype = dtype if pool_dtype is None else pool_dtype
    half = page_size * width // 2
    shape = (n_pages, half + 4 * page_size if fp4 else page_size * (width + 4)) if fp8 else (n_pages * page_size, width)
    pool = torch.empty(shape, dtype=torch.uint8 if fp8 else pool_dtype, device=device)
    pool.fill_(0xFF if fp8 else float("nan"))
    token_row, limit, taken = [], [], 0
    for row, (context, new) in enumerate(requests):
        pages = -(-context // page_size)
        table[row, :pages] = order[taken : taken + pages]
        taken += pages
        token_row += [row] * new
        limit += [context - new + i + 1 for i in range(new)]
        position = torch.arange(context, device=device)
        page, offset = table[row].long()[position // page_size], position % page_size
        keys = torch.randn(context, width, generator=rng, device=device)
        if fp4:
            bits = torch.randint(0, 256, (context, width // 2), generator=rng, device=device, dtype=torch.uint8)
            pool[:, :half].view(n_pages, page_size, width // 2)[page, offset] = bits
            scales = (0.02 * 10 ** (6 * torch.rand(context, generator=rng, device=device) - 3)).view(torch.int32) & -65536
            words = scales | torch.randint(0, 65536, (context,), generator=rng, device=device, dtype=torch.int32)
            pool[:, half:].view(torch.int32)[page, offset] = words
        elif fp8:
            codes = pool[:, : page_size * width].view(n_pages, page_size, width)
            codes[page, offset] = (40 * keys).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
            scales = pool[:, page_size * width :].view(torch.float32)
            scales[page, offset] = 0.013 * 10 ** (6 * torch.rand(context, generator=rng, device=device) - 3)
        else:
            pool[page * page_size + offset] = keys.to(pool_dtype)
    q = torch.randn(tokens, heads, width, generator=rng, device=device)
    return Problem(
        q=(40 * q).clamp(-448, 448).to(dtype) if fp8 else q.to(dtype),
        weights=torch.randn(tokens, heads, generator=rng, device=device) / heads,
        pool=pool,
        page_table=table,
        token_row=torch.tensor(token_row, dtype=row_type, device=device),
        limit=torch.tensor(limit, dtype=torch.int32, device=device),
        page_size=page_size,
        max_context=max_context,
        max_query=max(new for _, new in requests) if max_query is None else max_query,
    )
