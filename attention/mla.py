"""Multi-head latent attention over a paged cache, dense or with the keys a lightning indexer selects."""

from __future__ import annotations

import torch
from torch import nn

from ..parallel.linear import Stacked, stack
from .absorbed import absorb_queries, expand_values
from .batch import AttentionBatch
from .config import MLAConfig
from .dense import dense_absorbed, dense_expanded
from .forms import expanding_pays, masking_pays
from .fused import fused_forward
from .indexer import Indexer
from .kv.cache import LayerCache
from .latents import FoundLatents, Latents
from .norm import RMSNorm
from .ops import AttentionOps, twins
from .rope import rotate, rotation
from .selection import Selection, random_keys, recent_keys
from .sparse import sparse_attention
from .tiles import TileGroup


def layer_has_indexer(config: MLAConfig, layer_index: int) -> bool:
    """Whether a layer selects its own keys; False in dense models and in layers that share an earlier selection."""
    if config.indexer is None:
        return False
    types = config.indexer.layer_types
    return not types or types[layer_index] == "full"


class MLA(nn.Module):
    """Attention of one layer (arXiv:2405.04434, section 2.1; sparse: arXiv:2512.02556). Names follow Hugging Face.

    The number of heads is read off the weights, so that ``q_b_proj`` (or ``q_proj``), ``kv_b_proj`` and ``o_proj`` may be
    replaced by a tensor-parallel rank's share of heads. ``selection`` other than "indexer" plants a known fault (or, as
    "dense", every key) for evaluation; set it on all layers alike.
    """

    def __init__(self, config: MLAConfig, layer_index: int) -> None:
        super().__init__()
        self.config, self.layer_index = config, layer_index
        self.selection: Selection = "indexer"
        self.by_hidden: Stacked | None = None  # query latent, index key and latent row as one product
        self.by_latent: Stacked | None = None  # queries and index queries as one product
        self.ops: AttentionOps | None = None  # None: the torch path below, over tiles of host-known shapes
        query_width = config.n_heads * (config.nope_dim + config.rope_dim)
        if config.q_lora_rank is None:
            self.q_proj = nn.Linear(config.hidden, query_width, bias=False)
        else:
            self.q_a_proj = nn.Linear(config.hidden, config.q_lora_rank, bias=config.bias)
            self.q_a_layernorm = RMSNorm(config.q_lora_rank, config.norm_eps)
            self.q_b_proj = nn.Linear(config.q_lora_rank, query_width, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(config.hidden, config.latent_dim, bias=config.bias)
        self.kv_a_layernorm = RMSNorm(config.kv_lora_rank, config.norm_eps)
        self.kv_b_proj = nn.Linear(config.kv_lora_rank, config.n_heads * (config.nope_dim + config.v_dim), bias=False)
        self.o_proj = nn.Linear(config.n_heads * config.v_dim, config.hidden, bias=config.bias)
        self.indexer = Indexer(config) if layer_has_indexer(config, layer_index) else None

    def fuse(self, ops: AttentionOps) -> None:
        """Run by ``ops`` from now on, products of one input as one where weights allow; called once they are in place."""
        self.ops = ops
        if self.config.q_lora_rank is not None:
            keys = [] if self.indexer is None else [self.indexer.wk]
            self.by_hidden = stack([self.q_a_proj, *keys, self.kv_a_proj_with_mqa])
            self.by_latent = None if self.indexer is None else stack([self.q_b_proj, self.indexer.wq_b])

    def kv_b(self) -> torch.Tensor:
        """The weights that expand a latent, [heads, nope + v, C], by head: a view, never stale."""
        config = self.config
        return self.kv_b_proj.weight.view(-1, config.nope_dim + config.v_dim, config.kv_lora_rank)

    def forward(
        self, x: torch.Tensor, batch: AttentionBatch, cache: LayerCache, shared_topk: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Write the tokens ``x`` [T, hidden] to the cache and attend: ([T, hidden], selection).

        The selection is int64 [T, topk], positions ascending, -1 at the end of short rows, for the layers after this one
        that share it (``shared_topk``); on the fused path it is int32 cache rows. None means every visible key: the attention
        is dense, no request of the batch has more than ``topk`` keys, or there are no tokens.
        """
        assert batch.groups or batch.n_tokens == 0 or (self.ops is not None and self.selection == "indexer"), "a static batch has no tiles"
        if self.ops is not None and self.selection == "indexer":
            return fused_forward(self, self.ops, x, batch, cache, shared_topk)
        rope = self.config.rope
        turn = batch.once(("rope", rope), lambda: rotation(rope, batch.positions))
        q_latent, queries = self._queries(x)
        self._write(x, turn, batch, cache)
        topk = self._select(x, q_latent, turn, batch, cache, shared_topk)
        q_nope, q_rope = torch.split(queries, [self.config.nope_dim, self.config.rope_dim], -1)
        q_rope = rotate(q_rope, turn, interleaved=rope.interleaved)
        heads = self._attend(q_nope, q_rope, topk, batch, cache)
        out: torch.Tensor = self.o_proj(heads.to(x.dtype).flatten(1))
        return out, topk

    def _queries(self, x: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Normed query latent [T, q_lora_rank] (None without one) and queries [T, heads, nope + rope], not rotated."""
        latent = None
        if self.config.q_lora_rank is None:
            queries = self.q_proj(x)
        else:
            latent = self.q_a_layernorm(self.q_a_proj(x))
            queries = self.q_b_proj(latent)
        width = self.config.nope_dim + self.config.rope_dim
        return latent, queries.view(x.shape[0], queries.shape[1] // width, width)

    def _write(self, x: torch.Tensor, turn: torch.Tensor, batch: AttentionBatch, cache: LayerCache) -> None:
        """Cache the latent, the rotated key and the index key of every token."""
        latent, key = torch.split(self.kv_a_proj_with_mqa(x), [self.config.kv_lora_rank, self.config.rope_dim], -1)
        key = rotate(key, turn, interleaved=self.config.rope.interleaved).to(x.dtype)
        cache.latent.write(batch.latent_write_rows, torch.cat((self.kv_a_layernorm(latent), key), -1))
        if self.indexer is not None:
            self.indexer.write_keys(x, turn, batch, cache)

    def _select(
        self,
        x: torch.Tensor,
        q_latent: torch.Tensor | None,
        turn: torch.Tensor,
        batch: AttentionBatch,
        cache: LayerCache,
        shared_topk: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """Selected positions [T, topk], or None for every visible key."""
        sparse = self.config.indexer
        if sparse is None or self.selection == "dense" or batch.max_context <= sparse.topk or batch.n_tokens == 0:
            return None
        if self.selection == "recent":
            return recent_keys(batch, sparse.topk)
        if self.selection == "random":
            return random_keys(batch, sparse.topk, layer=self.layer_index)
        if self.indexer is None:
            assert shared_topk is not None, f"layer {self.layer_index} shares a selection, but none was passed"
            return shared_topk
        assert q_latent is not None
        return self.indexer.select(x, q_latent, turn, batch, cache)

    def _attend(
        self, q_nope: torch.Tensor, q_rope: torch.Tensor, topk: torch.Tensor | None, batch: AttentionBatch, cache: LayerCache
    ) -> torch.Tensor:
        """Head outputs [T, heads, v] of queries [T, heads, nope] and rotated [T, heads, rope]."""
        config = self.config
        kv_b = self.kv_b()
        out = q_nope.new_empty(batch.n_tokens, kv_b.shape[0], config.v_dim)
        latents = FoundLatents(batch, cache, topk, twins()) if batch.offloaded and batch.n_tokens else Latents(batch, cache)
        for group in batch.groups:
            chosen = None if topk is None else group.pick(topk)
            heads = self._attend_group(group.pick(q_nope), group.pick(q_rope), chosen, group, kv_b, latents)
            out = group.put(out, heads.to(out.dtype), batch.n_tokens)
        return out

    def _attend_group(
        self,
        q_nope: torch.Tensor,
        q_rope: torch.Tensor,
        topk: torch.Tensor | None,
        group: TileGroup,
        kv_b: torch.Tensor,
        cache: Latents,
    ) -> torch.Tensor:
        """Head outputs [n, heads, v] of a group's n tokens, in the cheapest form."""
        config = self.config
        nope, latent, scale = config.nope_dim, config.kv_lora_rank, config.softmax_scale
        if expanding_pays(config, group) if topk is None else masking_pays(config, group, topk.shape[1], kv_b.shape[0]):
            queries = torch.cat((q_nope.float(), q_rope.float()), -1).mul_(scale)
            return dense_expanded(queries, group, cache, kv_b, nope, topk)
        queries = absorb_queries(q_nope, q_rope, kv_b[:, :nope], scale)
        if topk is None:
            attended = dense_absorbed(queries, group, cache, latent)
        else:
            attended = sparse_attention(queries, topk, group, cache, latent)
        return expand_values(attended.to(kv_b.dtype), kv_b[:, nope:])
