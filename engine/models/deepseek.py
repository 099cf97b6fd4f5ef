"""The DeepSeek family as one model: MLA (dense or sparse), dense MLPs or experts, pre-norm residual layers."""

from __future__ import annotations

import torch
from torch import nn

from ...attention.batch import AttentionBatch
from ...attention.indexer import Indexer
from ...attention.kv.cache import KVCache, LayerCache
from ...attention.mla import MLA
from ...attention.norm import RMSNorm
from ...attention.ops import AttentionOps
from ...attention.selection import Selection
from ...moe.layer import MLP, MoE
from ...moe.ops import MoEOps
from ...moe.router import Router
from ..model_config import ModelConfig
from .two_batches import run_halves


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each behind a norm and around a residual."""

    def __init__(self, config: ModelConfig, layer: int, *, n_slots: int, expert_inner: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden, config.rms_norm_eps)
        self.self_attn = MLA(config.attention, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden, config.rms_norm_eps)
        self.mlp: nn.Module
        if config.mlp_types[layer] == "dense":
            self.mlp = MLP(config.hidden, config.intermediate)
        else:
            assert config.moe is not None
            self.mlp = MoE(config.moe, layer, n_slots=n_slots, inner=expert_inner)

    def forward(
        self, x: torch.Tensor, batch: AttentionBatch, cache: LayerCache, shared_topk: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """x [T, hidden] -> ([T, hidden], keys this layer attended to, for layers that share them)."""
        normed, x, topk = self.attend(x, batch, cache, shared_topk)
        return x + (self.mlp(normed, batch.n_valid, batch.most_tokens) if isinstance(self.mlp, MoE) else self.mlp(normed)), topk

    def attend(
        self, x: torch.Tensor, batch: AttentionBatch, cache: LayerCache, shared_topk: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """The part before the feed-forward: its input [T, hidden], what its output is added to, and the keys attended to."""
        attended, topk = self.self_attn(self.input_layernorm(x), batch, cache, shared_topk)
        normed, x = self.post_attention_layernorm.after(attended, x)
        return normed, x, topk


class DeepseekModel(nn.Module):
    """Embedding, the layers of one pipeline stage, final norm. Names follow Hugging Face."""

    def __init__(self, config: ModelConfig, layers: range, *, n_slots: int, expert_inner: int) -> None:
        super().__init__()
        self.layer_range = layers
        # With its weight given, nn.Embedding draws no random numbers, which on the meta device imports half of torch.
        table = torch.empty(config.vocab_size, config.hidden) if layers.start == 0 else None
        self.embed_tokens = None if table is None else nn.Embedding(config.vocab_size, config.hidden, _weight=table)
        self.layers = nn.ModuleDict({str(i): DecoderLayer(config, i, n_slots=n_slots, expert_inner=expert_inner) for i in layers})
        self.norm = RMSNorm(config.hidden, config.rms_norm_eps) if layers.stop == config.n_layers else None


class DeepseekForCausalLM(nn.Module):
    """One pipeline stage of a causal language model; the first stage embeds, the last one scores the vocabulary."""

    def __init__(self, config: ModelConfig, layers: range, *, n_slots: int, expert_inner: int) -> None:
        super().__init__()
        self.config = config
        self.selection: Selection = "indexer"
        self.fused = False  # attention runs on the fused path
        self.model = DeepseekModel(config, layers, n_slots=n_slots, expert_inner=expert_inner)
        last = layers.stop == config.n_layers
        self.lm_head = nn.Linear(config.hidden, config.vocab_size, bias=False) if last else None

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids [T] int64 -> [T, hidden]. First stage only."""
        assert self.model.embed_tokens is not None
        out: torch.Tensor = self.model.embed_tokens(token_ids)
        return out

    def forward(
        self, x: torch.Tensor, batch: AttentionBatch, cache: KVCache, shared_topk: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run the layers of this stage. x [T, hidden] -> ([T, hidden], last selection of keys)."""
        if batch.halves is not None:
            assert shared_topk is None, "halves of a step take no selection from the stage before"
            return run_halves(self.model.layers, x, batch.halves, cache.layers), None
        first = self.model.layer_range.start
        fused = self.fused and self.selection == "indexer"
        if fused and shared_topk is not None:
            shared_topk = shared_topk.int()  # between stages it travels as int64
        for name, layer in self.model.layers.items():
            x, shared_topk = layer(x, batch, cache.layers[int(name) - first], shared_topk)
        if fused and shared_topk is not None and self.lm_head is None:
            shared_topk = shared_topk.long()  # for the next stage
        return x, shared_topk

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """x [n, hidden] of the last layer -> [n, vocab] float32. Last stage only."""
        assert self.model.norm is not None and self.lm_head is not None
        scores: torch.Tensor = self.lm_head(self.model.norm(x))
        return scores.float()

    def settle(self) -> None:
        """Called once when all weights are in place: modules that keep derived copies make them."""
        for module in self.modules():
            if isinstance(module, (Router, Indexer)):
                module.settle()

    def fuse(self, attention: AttentionOps | None, moe: MoEOps | None) -> None:
        """Run attention and experts by these operations from now on; None is the torch path. Called once weights are in place."""
        self.fused = attention is not None
        for module in self.modules():
            if isinstance(module, MLA) and attention is not None:
                module.fuse(attention)
            elif isinstance(module, RMSNorm) and attention is not None:
                module.kernel = attention.rms_norm
            elif isinstance(module, MLP) and moe is not None:
                module.fuse()
            elif isinstance(module, MoE):
                module.exchange.ops = moe
            elif (isinstance(module, Router) and moe is not None) or (isinstance(module, Indexer) and attention is not None):
                module.wide.fuse()

    def moe_layers(self) -> list[MoE]:
        """The sparse layers of this stage."""
        return [module for module in self.model.modules() if isinstance(module, MoE)]

    def plant_selection(self, selection: Selection) -> None:
        """Make every layer choose keys by ``selection``; anything but "indexer" is a known fault, planted for evaluation."""
        for module in self.model.modules():
            if isinstance(module, MLA):
                module.selection = selection
        self.selection = selection
