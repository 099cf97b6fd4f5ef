"""One step's batch as two halves that take turns on the device."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from .batch import AttentionBatch


def join_halves(first: AttentionBatch, second: AttentionBatch, request: int) -> AttentionBatch:
    """The batch of two halves, which it holds; it has no tiles of its own.

    ``request`` is the first one of the second half: one past the last of the first half, or that one, where its tokens are cut.
    """
    both = (first, second)
    token_row = torch.cat([first.token_row, second.token_row + request])
    write_rows = torch.cat([half.write_rows for half in both])
    return AttentionBatch(
        positions=torch.cat([half.positions for half in both]),
        token_row=token_row,
        query_start=token_row,
        context_lens=torch.cat([half.context_lens for half in both]),
        write_rows=write_rows,
        latent_write_rows=write_rows,
        page_table=first.page_table,
        page_size=first.page_size,
        max_context=max(half.max_context for half in both),
        max_query=max(half.max_query for half in both),
        groups=(),
        most_tokens=None if first.most_tokens is None else 2 * first.most_tokens,
        halves=both,
    )


def build_halves(
    starts: np.ndarray, counts: np.ndarray, page_table: torch.Tensor, page_size: int, device: torch.device, most_tokens: int
) -> AttentionBatch:
    """``AttentionBatch.build`` in halves of equal numbers of tokens; the request in the middle may be cut.

    Its tokens in the second half see those in the first by the cache, which every layer writes for the first half before.
    ``most_tokens`` is a bound of the tokens over all replicas.
    """
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(counts) else 0
    cut = (total + 1) // 2
    row = int(np.searchsorted(ends, cut, side="right"))  # requests that are whole in the first half
    inside = cut - (int(ends[row - 1]) if row else 0)  # tokens of the next one that are in it too
    first, last = row + (inside > 0), slice(row, len(counts))
    head, tail = counts[:first].copy(), counts[last].copy()
    begin = starts[last].copy()
    if inside:
        head[-1], tail[0], begin[0] = inside, tail[0] - inside, begin[0] + inside
    most = (most_tokens + 1) // 2
    made = [
        replace(AttentionBatch.build(s, c, pages, page_size, device), most_tokens=most)
        for s, c, pages in ((starts[:first], head, page_table[:first]), (begin, tail, page_table[last]))
    ]
    return join_halves(made[0], made[1], row)


def static_halves(batch: AttentionBatch) -> AttentionBatch:
    """A static batch of single tokens, one a request in order, with its halves; without a host sync."""
    assert batch.tier is None, "halves know no tiers"
    total = batch.n_tokens
    cut = (total + 1) // 2
    valid: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
    if batch.n_valid is not None:
        valid = (batch.n_valid.clamp(max=cut), (batch.n_valid - cut).clamp(min=0))
    most = None if batch.most_tokens is None else (batch.most_tokens + 1) // 2
    halves = []
    for here, n_valid in zip((slice(0, cut), slice(cut, total)), valid, strict=True):
        rows = batch.token_row[: here.stop - here.start]
        half = replace(
            batch,
            positions=batch.positions[here],
            token_row=rows,
            query_start=rows,
            context_lens=batch.context_lens[here],
            write_rows=batch.write_rows[here],
            latent_write_rows=batch.latent_write_rows[here],
            page_table=batch.page_table[here],
            n_valid=n_valid,
            most_tokens=most,
            _memo={"limit": batch.limit[here]},
        )
        halves.append(half)
    return replace(batch, halves=(halves[0], halves[1]))
