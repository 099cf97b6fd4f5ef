"""Shapes and switches of the mixture of experts of one model family."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Routed experts (DeepSeek-V3 paper, section 2.1.2; HF field names in brackets)."""

    hidden: int  # model width (hidden_size)
    intermediate: int  # width of one routed expert (moe_intermediate_size)
    n_experts: int  # logical routed experts per layer (n_routed_experts)
    top_k: int  # experts per token (num_experts_per_tok)
    n_shared: int = 0  # shared experts, fused into one MLP of n_shared * intermediate (n_shared_experts)
    n_group: int = 1  # expert groups for group-limited routing (n_group)
    topk_group: int = 1  # groups a token may use (topk_group)
    scoring: Literal["sigmoid", "softmax"] = "sigmoid"  # score function (scoring_func)
    method: Literal["noaux_tc", "greedy", "group_limited_greedy"] = "noaux_tc"  # choice rule (topk_method)
    norm_topk_prob: bool = True  # weights of the chosen experts sum to 1 before scaling (norm_topk_prob)
    routed_scaling_factor: float = 1.0  # factor on the weights (routed_scaling_factor)
