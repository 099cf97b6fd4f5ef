"""How the DeepSeek family is split over tensor-parallel ranks and pipeline stages."""

from __future__ import annotations

#: module-path suffix -> kind of split (parallel.shard)
SHARD_TABLE: dict[str, str] = {
    "self_attn.q_proj": "column",
    "self_attn.q_b_proj": "column",
    "self_attn.kv_b_proj": "column",
    "self_attn.o_proj": "row",
    "mlp.gate_proj": "column",
    "mlp.up_proj": "column",
    "mlp.down_proj": "row",
    "shared_experts.gate_proj": "column",
    "shared_experts.up_proj": "column",
    "shared_experts.down_proj": "row",
    "model.embed_tokens": "vocab_embedding",
    "lm_head": "vocab_head",
}


#: linears that published FP8 checkpoints quantise and that are multiplied as FP8; ``kv_b_proj`` is not among them: the absorbed
#: form multiplies by parts of it, in the compute dtype
FP8_LINEARS: tuple[str, ...] = (
    "self_attn.q_proj",
    "self_attn.q_a_proj",
    "self_attn.q_b_proj",
    "self_attn.kv_a_proj_with_mqa",
    "self_attn.o_proj",
    "indexer.wq_b",
    "indexer.wk",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
    "shared_experts.gate_proj",
    "shared_experts.up_proj",
    "shared_experts.down_proj",
)


def stage_layers(n_layers: int, n_stages: int, stage: int) -> range:
    """Layers of one pipeline stage: contiguous, as even as possible, later stages take the remainder.

    The first stage also embeds and the last one scores the vocabulary; the head costs more, but so few layers differ
    that the rule stays simple.

    Raises:
        ValueError: more stages than layers.
    """
    if n_stages > n_layers:
        raise ValueError(f"pipeline_parallel_size {n_stages} is more than the model's {n_layers} layers; use at most {n_layers}")
    base, extra = divmod(n_layers, n_stages)
    sizes = [base + (1 if s >= n_stages - extra else 0) for s in range(n_stages)]
    start = sum(sizes[:stage])
    return range(start, start + sizes[stage])
