"""MLA as a chain of fused operations over flat tokens: no host decision depends on values, so that it can be captured.

The same mathematics as ``MLA.forward`` on the torch path; a token's keys are named by cache rows, not by tiles.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .batch import AttentionBatch
from .fused_forms import attend
from .keys import Choice, Keys, find, keys_by_pages, overlaps, unfolded
from .kv.cache import LayerCache
from .ops import AttentionOps
from .projections import Inputs, project
from .queries import Queries, apart, has_choice, make_queries
from .rope import rotation
from .scorer import Scorer

if TYPE_CHECKING:
    from .indexer import Indexer
    from .mla import MLA


def fused_forward(
    mla: MLA, ops: AttentionOps, x: torch.Tensor, batch: AttentionBatch, cache: LayerCache, shared: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Write the tokens ``x`` [T, hidden] and attend: ([T, hidden], selection int32 [T, topk] or None for every key).

    The selection, which ``shared`` is too, is latent rows, or positions in a step whose rows have to be looked for.
    """
    config = mla.config
    turn = batch.once(("turn", config.rope), lambda: torch.view_as_real(rotation(config.rope, batch.positions)))
    late = overlaps(ops, batch)  # queries are computed after the choice of keys, beside fetches
    early = not late and apart(mla, ops, batch)
    inputs = project(mla, x, queries_later=late or early)
    queries: Queries | None = None
    if early and has_choice(mla, batch):
        with ops.aside.fork():
            queries = make_queries(mla, ops, inputs, turn, absorb=True)
    ops.write_latent(
        inputs.latent_row,
        mla.kv_a_layernorm.weight,
        mla.kv_a_layernorm.eps,
        turn,
        batch.latent_write_rows,
        cache.latent.pool,
        interleaved=config.rope.interleaved,
    )
    keys, selection = _keys(mla, ops, x, inputs, turn, batch, cache, shared)
    if queries is None:
        queries = make_queries(mla, ops, inputs, turn)
    else:
        ops.aside.join()
    heads = attend(mla, ops, queries, keys, batch)
    out: torch.Tensor = mla.o_proj(heads)
    return out, selection


def _keys(
    mla: MLA,
    ops: AttentionOps,
    x: torch.Tensor,
    inputs: Inputs,
    turn: torch.Tensor,
    batch: AttentionBatch,
    cache: LayerCache,
    shared: torch.Tensor | None,
) -> tuple[Keys, torch.Tensor | None]:
    """The keys to attend, on their way to where they are read, and the selection to pass on. Writes the index keys."""
    indexer = mla.indexer
    if indexer is not None:
        assert inputs.index_key is not None
        _write_index(indexer, ops, inputs.index_key, turn, batch, cache)
    if not has_choice(mla, batch):
        return unfolded(ops, batch, cache) if batch.absent and batch.n_tokens else keys_by_pages(batch, cache), None
    if indexer is None:
        assert shared is not None, f"layer {mla.layer_index} shares a selection, but none was passed"
        choice = Choice(positions=shared, rows=None, scores=batch.last_scores) if batch.offloaded else Choice(positions=None, rows=shared)
        return find(ops, choice, batch, cache), shared
    choice = Scorer.of(indexer, ops, x, inputs.index_queries(mla), turn, batch, cache).choose_all()
    return find(ops, choice, batch, cache), choice.positions if batch.offloaded else choice.rows


def _write_index(
    indexer: Indexer, ops: AttentionOps, key: torch.Tensor, turn: torch.Tensor, batch: AttentionBatch, cache: LayerCache
) -> None:
    assert cache.index is not None
    norm = indexer.k_norm
    ops.write_index(
        key,
        norm.weight,
        norm.bias,
        norm.eps,
        turn,
        batch.write_rows,
        cache.index.pool,
        page_size=batch.page_size,
        interleaved=indexer.interleaved,
        rotate=cache.rotate_index,
    )
