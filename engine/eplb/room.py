"""What balancing takes of a rank's memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from ...moe.eplb.live.config import LiveConfig
from ...moe.eplb.live.layout import padded
from ...moe.experts import Experts
from ..config import EngineConfig
from ..eplb_settings import eplb_settings, uses_placement
from ..model_config import ModelConfig

if TYPE_CHECKING:
    from ..models.build import Stage
    from ..models.skeleton import Skeleton


def expert_bytes(model: nn.Module) -> int:
    """Bytes of one expert of a layer in ``model``, weights and scales; 0 without experts. Modules on the meta device will do."""
    experts = next((m for m in model.modules() if isinstance(m, Experts)), None)
    if experts is None:
        return 0
    return sum(p[0].numel() * p.element_size() for p in experts.parameters())


def staging_bytes(config: EngineConfig, model: nn.Module) -> int:
    """Bytes of the buffers through which moving experts go; 0 where experts do not move."""
    experts = next((m for m in model.modules() if isinstance(m, Experts)), None)
    if experts is None or not config.enable_eplb:
        return 0
    return live_config(config).memory_bytes(sum(padded(p[0].numel() * p.element_size()) for p in experts.parameters()))


def live_config(config: EngineConfig) -> LiveConfig:
    """The settings as the mover takes them."""
    settings = eplb_settings(config)
    return LiveConfig(
        interval=settings.step_interval,
        staging=settings.staging_experts,
        bytes_per_step=settings.bytes_per_step,
        patience=settings.patience_steps,
        max_steps=settings.max_cycle_steps,
    )


def describe_balance(config: EngineConfig, *, layers: Sequence[int], slots_per_rank: int, spare: int, one: int, staging: int) -> str:
    """What balancing is on and what it takes on a rank, in one line.

    Args:
        config: settings.
        layers: numbers of the rank's layers with experts.
        slots_per_rank: of a layer.
        spare: slots of a layer beyond one for every expert, over all ranks.
        one: bytes of one expert.
        staging: bytes of the staging buffers.
    """
    if not uses_placement(config):
        return "EPLB off"
    settings = eplb_settings(config)
    held = slots_per_rank * len(layers) * one
    more = f" ({settings.num_redundant_experts} asked for, rounded up)" if spare != settings.num_redundant_experts else ""
    what = f"{len(layers)} MoE layers ({layers[0]} to {layers[-1]}), {slots_per_rank} slots a rank, {spare} of all ranks' for copies{more}"
    if not config.enable_eplb:
        return f"Experts placed on {what}, {held:,} bytes of slots; they do not move (--enable-eplb)"
    return (
        f"EPLB enabled on {what}, {held + staging:,} bytes: slots {held:,}, staging of {settings.staging_experts} experts {staging:,}; "
        f"a look at the load every {settings.step_interval} steps"
    )


def balance_line(config: EngineConfig, stage: Stage) -> str:
    """What balancing is on and takes on a rank that has been made."""
    layers, placement = [layer.layer for layer in stage.model.moe_layers()], stage.placement
    assert placement is not None
    return describe_balance(
        config, layers=layers, slots_per_rank=placement.slots_per_rank, spare=placement.n_slots - placement.n_experts,
        one=expert_bytes(stage.model), staging=staging_bytes(config, stage.model),
    )  # fmt: skip


def expert_room(config: EngineConfig, rank: Skeleton, model: ModelConfig) -> dict[str, Any]:
    """What experts and their moves take on one rank of a model that has some: numbers, and the line that says it."""
    assert model.moe is not None and rank.placement is not None
    one, layers, slots = expert_bytes(rank.model), rank.expert_layers, rank.placement.slots_per_rank
    spare = rank.placement.n_slots - model.moe.n_experts
    text = "EPLB off" if not layers else describe_balance(
        config, layers=layers, slots_per_rank=slots, spare=spare, one=one, staging=rank.staging
    )  # fmt: skip
    return {
        "layers": len(layers),
        "slots_per_rank": slots,
        "redundant": spare,
        "expert_bytes": one,
        "slot_bytes": one * slots * len(layers),
        "staging_bytes": rank.staging,
        "text": text,
    }
