"""What differs between the model families, beyond the numbers in their ``config.json``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Family:
    """Switches of one Hugging Face ``model_type``. Defaults apply to absent fields and are those of transformers."""

    architecture: str  # the only architectures[0] of this family
    scoring: Literal["sigmoid", "softmax"] = "sigmoid"  # router score function
    methods: tuple[Literal["noaux_tc", "greedy", "group_limited_greedy"], ...] = ("noaux_tc",)  # allowed topk_method, first is the default
    indexer: bool = False  # has the DSA indexer
    indexer_interleaved: bool = False  # indexer RoPE pairs neighbours unless the config says otherwise
    shared_indexers: bool = False  # layers may reuse the keys chosen by an earlier layer
    ignores_norm_topk_prob: bool = False  # weights of the chosen experts are never normalised
    first_dense: int = 3  # first_k_dense_replace
    groups: tuple[int, int] = (8, 4)  # n_group, topk_group
    scaling: float = 2.5  # routed_scaling_factor
    norm_eps: float = 1e-6  # rms_norm_eps


FAMILIES: dict[str, Family] = {
    "deepseek_v2": Family(
        architecture="DeepseekV2ForCausalLM",
        scoring="softmax",
        methods=("greedy", "group_limited_greedy"),
        ignores_norm_topk_prob=True,
        first_dense=0,
        groups=(1, 1),
        scaling=1.0,
    ),
    "deepseek_v3": Family(architecture="DeepseekV3ForCausalLM"),
    "kimi_k2": Family(architecture="DeepseekV3ForCausalLM"),
    "deepseek_v32": Family(architecture="DeepseekV32ForCausalLM", indexer=True),
    "glm_moe_dsa": Family(
        architecture="GlmMoeDsaForCausalLM",
        indexer=True,
        indexer_interleaved=True,
        shared_indexers=True,
        groups=(1, 1),
        norm_eps=1e-5,
    ),
}


def find_family(model_type: object, architecture: object, where: str) -> Family:
    """The family of a config.

    Raises:
        ValueError: unknown, or ``model_type`` and ``architecture`` (None: not given) contradict each other.
    """
    known = ", ".join(f"{name} ({family.architecture})" for name, family in FAMILIES.items())
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise ValueError(f"{where}: model_type {model_type!r} (architecture {architecture!r}) is not supported; supported: {known}")
    if architecture is not None and architecture != family.architecture:
        raise ValueError(f"{where}: architecture {architecture!r} does not belong to model_type '{model_type}'; supported: {known}")
    return family
