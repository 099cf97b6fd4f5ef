"""The lightning indexer of DeepSeek sparse attention: which keys a query attends to."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from ..parallel.linear import WideWeight
from .batch import AttentionBatch
from .config import MLAConfig
from .hadamard import hadamard
from .kv.cache import LayerCache
from .rope import rotate
from .tiles import Chunk
from .topk import select_topk


class Indexer(nn.Module):
    """``score(q, k) = sum_h w_h * relu(q_h . k)``; the ``topk`` highest visible keys are kept (arXiv:2512.02556, section 2.1).

    Parameter names follow Hugging Face. ``k_norm`` and ``weights_proj`` are made in fp32 whatever the default dtype is.
    """

    def __init__(self, config: MLAConfig) -> None:
        super().__init__()
        assert config.indexer is not None and config.q_lora_rank is not None
        self.topk, self.head_dim, self.n_heads = config.indexer.topk, config.indexer.head_dim, config.indexer.n_heads
        self.is_shared = bool(config.indexer.layer_types)  # other layers may use this one's choice
        self.rope_dim, self.interleaved = config.rope_dim, config.indexer.rope_interleaved
        self.wq_b = nn.Linear(config.q_lora_rank, self.n_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(config.hidden, self.head_dim, bias=False)
        self.k_norm = nn.LayerNorm(self.head_dim, eps=1e-6, dtype=torch.float32)
        self.weights_proj = nn.Linear(config.hidden, self.n_heads, bias=False, dtype=torch.float32)
        self.wide = WideWeight()

    def settle(self) -> None:
        """Called once when the weights are in place."""
        self.wide.settle(self.weights_proj.weight)

    def write_keys(self, x: torch.Tensor, turn: torch.Tensor, batch: AttentionBatch, cache: LayerCache) -> None:
        """Cache the index keys of the tokens ``x`` [T, hidden]; ``turn`` [T, rope / 2] is their rotation."""
        assert cache.index is not None
        norm = self.k_norm
        keys = functional.layer_norm(self.wk(x).float(), (self.head_dim,), norm.weight.float(), norm.bias.float(), norm.eps)
        cache.index.write(batch.write_rows, self._rotated(keys, turn, cache))

    def select(self, x: torch.Tensor, q_latent: torch.Tensor, turn: torch.Tensor, batch: AttentionBatch, cache: LayerCache) -> torch.Tensor:
        """Positions int64 [T, topk] of the keys of every token, ascending, -1 at the end of short rows.

        ``x`` [T, hidden], ``q_latent`` [T, q_lora_rank] normed; the tokens' own keys must be in the cache.
        """
        assert cache.index is not None
        queries = self._rotated(self.wq_b(q_latent).view(-1, self.n_heads, self.head_dim), turn, cache) * self.head_dim**-0.5
        weights = self.head_weights(x) * self.n_heads**-0.5
        out: torch.Tensor | None = None
        for group in batch.groups:
            mine, scale = group.pick(queries), group.pick(weights)
            chosen = torch.empty(group.n_tokens, self.topk, dtype=torch.int64, device=x.device)
            for chunk in group.chunks(pair_cost=self.n_heads, key_cost=self.head_dim):
                chunk.store(chosen, select_topk(self._scores(mine, scale, chunk, cache), chunk.limit.reshape(-1), self.topk))
            out = group.put(out, chosen, batch.n_tokens)
        assert out is not None
        return out

    def head_weights(self, x: torch.Tensor) -> torch.Tensor:
        """Weight of every head before scaling, fp32 [T, heads], of ``x`` [T, hidden]."""
        return self.wide.product(x, self.weights_proj.weight)

    def _scores(self, queries: torch.Tensor, weights: torch.Tensor, chunk: Chunk, cache: LayerCache) -> torch.Tensor:
        """Scores fp32 [n * b, L] of a chunk's queries against its keys; not masked."""
        assert cache.index is not None
        n, b = chunk.limit.shape
        if chunk.keys <= self.topk:  # every visible key is kept, whatever its score
            return queries.new_zeros(n * b, chunk.keys)
        keys = cache.index.read(chunk.key_rows)
        mine = queries.index_select(0, chunk.token).view(n, b * self.n_heads, self.head_dim)
        each = torch.bmm(mine, keys.transpose(1, 2)).relu_().view(n * b, self.n_heads, -1)
        return torch.bmm(weights.index_select(0, chunk.token)[:, None], each)[:, 0]

    def _rotated(self, values: torch.Tensor, turn: torch.Tensor, cache: LayerCache) -> torch.Tensor:
        """fp32 queries [T, heads, D] or keys [T, D] after RoPE on their first values, and Hadamard for FP8 keys."""
        values = values.float()
        rope = rotate(values[..., : self.rope_dim], turn, interleaved=self.interleaved)
        values = torch.cat((rope, values[..., self.rope_dim :]), -1)
        return hadamard(values) if cache.rotate_index else values
