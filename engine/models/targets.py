"""Which checkpoint tensor goes where on this rank."""

from __future__ import annotations

import re

import torch
from torch import nn

from ...moe.layer import MoE
from ...moe.placement import Placement
from ...parallel.linear import BLOCK
from ..model_config import ModelConfig
from ..weights.target import Target
from .deepseek import DeepseekForCausalLM

_EXPERT = re.compile(r"(model\.layers\.\d+)\.mlp\.experts\.(gate_up|down)(_scale_inv)?")


def _target(param: nn.Parameter) -> Target:
    """The target of a parameter: all of the checkpoint tensor, or the part its shard names."""
    shard = getattr(param, "shard", None)
    full = list(param.shape)
    index = [slice(0, n) for n in full]
    tensor = param.data
    if shard is not None:
        full[shard.dim] = shard.full
        index[shard.dim] = slice(shard.start, shard.stop)
        # A padded vocabulary shard is longer than what the checkpoint has for it.
        tensor = tensor.narrow(shard.dim, 0, shard.stop - shard.start)
    return Target(tensor=tensor, index=tuple(index), full_shape=tuple(full))


def _expert_targets(moe: MoE, prefix: str, config: ModelConfig, experts: list[int], inner: slice) -> dict[str, list[Target]]:
    """Targets of one layer's routed experts: slot i holds logical expert ``experts[i]``, -1 for none; ``inner`` is this rank's width.

    An expert in several slots fills each of them.
    """
    assert config.moe is not None
    wide, hidden = config.moe.intermediate, config.moe.hidden
    found: dict[str, list[Target]] = {}
    for slot, expert in enumerate(experts):
        if expert < 0:
            continue
        name = f"{prefix}.mlp.experts.{expert}"
        up_index, up_shape = (inner, slice(0, hidden)), (wide, hidden)
        for part, row in (("gate_proj", 0), ("up_proj", 1)):
            target = Target(tensor=moe.experts.gate_up.data[slot, row], index=up_index, full_shape=up_shape)
            found.setdefault(f"{name}.{part}.weight", []).append(target)
        target = Target(tensor=moe.experts.down.data[slot], index=(slice(0, hidden), inner), full_shape=(hidden, wide))
        found.setdefault(f"{name}.down_proj.weight", []).append(target)
        if moe.experts.fp8:
            for key, targets in _scale_targets(moe, name, slot, wide, hidden, inner).items():
                found.setdefault(key, []).extend(targets)
    return found


def _scale_targets(moe: MoE, name: str, slot: int, wide: int, hidden: int, inner: slice) -> dict[str, list[Target]]:
    """Targets of the block scales of one slot."""
    experts = moe.experts
    assert experts.gate_up_scale_inv is not None and experts.down_scale_inv is not None
    blocks = slice(inner.start // BLOCK, -(-inner.stop // BLOCK))
    n_wide, n_hidden = -(-wide // BLOCK), -(-hidden // BLOCK)
    found = {}
    for part, row in (("gate_proj", 0), ("up_proj", 1)):
        tensor = experts.gate_up_scale_inv.data[slot, row]
        target = Target(tensor=tensor, index=(blocks, slice(0, n_hidden)), full_shape=(n_wide, n_hidden))
        found[f"{name}.{part}.weight_scale_inv"] = [target]
    target = Target(tensor=experts.down_scale_inv.data[slot], index=(slice(0, n_hidden), blocks), full_shape=(n_hidden, n_wide))
    found[f"{name}.down_proj.weight_scale_inv"] = [target]
    return found


def weight_targets(model: DeepseekForCausalLM, placement: Placement | None, *, ep_rank: int, inner: slice) -> dict[str, list[Target]]:
    """Hugging Face tensor name -> the places of this rank that it fills.

    Args:
        model: one materialised stage.
        placement: physical slots; None for a model without experts.
        ep_rank: this rank's place among the ranks that the experts are spread over.
        inner: part of every expert's width this rank holds (all of it under expert parallelism).
    """
    config = model.config
    targets: dict[str, list[Target]] = {}
    for name, param in model.named_parameters():
        if _EXPERT.fullmatch(name):
            continue
        if name == "lm_head.weight" and config.tie_word_embeddings:
            name = "model.embed_tokens.weight"
        targets.setdefault(name, []).append(_target(param))
    for moe in model.moe_layers():
        assert placement is not None
        experts = placement.local_experts(moe.layer, ep_rank)
        targets.update(_expert_targets(moe, f"model.layers.{moe.layer}", config, experts, inner))
    return targets


def clear_empty_slots(model: DeepseekForCausalLM, placement: Placement, *, ep_rank: int) -> None:
    """Zeros in the slots of this rank that hold no expert, so that nothing in its memory is left to chance."""
    for moe in model.moe_layers():
        empty = [slot for slot, expert in enumerate(placement.local_experts(moe.layer, ep_rank)) if expert < 0]
        for param in moe.experts.parameters() if empty else ():
            for slot in empty:
                param.data[slot].view(torch.uint8).zero_()


def is_known(name: str, config: ModelConfig) -> bool:
    """True for tensors of the main model, whether or not this rank holds them, and for FP8 scales of such tensors."""
    name = name.removesuffix("_scale_inv")
    if name in ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"):
        return True
    match = re.match(r"model\.layers\.(\d+)\.(self_attn|mlp|input_layernorm|post_attention_layernorm)\.", name)
    return match is not None and int(match.group(1)) < config.n_layers


def materialise(model: nn.Module, device: torch.device) -> None:
    """Give every meta parameter memory on ``device``, keeping its dtype and the part of the tensor it stands for."""
    for module in model.modules():
        for name, param in list(module.named_parameters(recurse=False)):
            fresh = nn.Parameter(torch.empty_like(param, device=device), requires_grad=False)
            if hasattr(param, "shard"):
                fresh.shard = param.shard  # type: ignore[attr-defined]
            setattr(module, name, fresh)
