"""One rank's part of a model without memory: what it is made of before its weights are given a place, and their bytes."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from ...attention.indexer import Indexer
from ...moe.placement import Placement
from ...moe.router import Router
from ...parallel.grid import GridSpec
from ...parallel.group import Group
from ...parallel.progress import Progress
from ...parallel.shard import shard_model
from ..config import EngineConfig
from ..eplb.location import check_model, initial_placement
from ..eplb.room import staging_bytes
from ..model_config import ModelConfig
from .backends import keeps_fp8, narrow
from .deepseek import DeepseekForCausalLM
from .shards import SHARD_TABLE, stage_layers

#: part of the model -> what names of its parameters have in them; the first that fits
_PARTS: tuple[tuple[str, str], ...] = (
    ("routed experts", r"\.mlp\.experts\."),
    ("shared experts", r"\.shared_experts\."),
    ("router", r"\.mlp\.gate\."),
    ("dense MLP", r"\.mlp\."),
    ("indexer", r"\.indexer\."),
    ("attention", r"\.self_attn\."),
    ("embedding", r"embed_tokens"),
    ("head", r"lm_head"),
    ("norms", r"norm"),
)


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where in the grid a rank is, as far as its weights depend on it."""

    spec: GridSpec
    pp_rank: int
    tp: Group  # ranks that share the stage's attention; no message passes through it here

    @classmethod
    def planned(cls, spec: GridSpec, pp_rank: int) -> Place:
        """The first rank of stage ``pp_rank`` of a grid that need not exist: of all its ranks it holds most."""
        first = pp_rank * spec.dp * spec.tp
        tp = Group("tp", range(first, first + spec.tp), 0, process_group=None, deadline_s=0.0, progress=Progress(rank=first))
        return cls(spec=spec, pp_rank=pp_rank, tp=tp)


@dataclass(frozen=True, kw_only=True)
class Skeleton:
    """Modules on the meta device, split as this rank holds them."""

    model: DeepseekForCausalLM
    layers: range  # decoder layers of this stage
    placement: Placement | None  # physical slots, None without experts
    spread: int  # ranks the experts are spread over
    inner: slice  # part of every expert's width on this rank
    staging: int = 0  # bytes of the buffers through which moving experts go

    @property
    def n_bytes(self) -> int:
        """Bytes of the weights."""
        return sum(p.numel() * p.element_size() for p in self.model.parameters())

    @property
    def copy_bytes(self) -> int:
        """Bytes of the bf16 copies that CUDA ranks keep of the routers' and index heads' fp32 weights, where bf16 holds their values."""
        modules = list(self.model.modules())
        kept = [m.weight for m in modules if isinstance(m, Router)] + [m.weights_proj.weight for m in modules if isinstance(m, Indexer)]
        return sum(2 * weight.numel() for weight in kept)

    @property
    def expert_layers(self) -> list[int]:
        """Numbers of the layers with experts."""
        return [layer.layer for layer in self.model.moe_layers()]

    def part_bytes(self) -> dict[str, int]:
        """Bytes of the weights by part of the model."""
        found: dict[str, int] = {}
        for name, p in self.model.named_parameters():
            part = next(part for part, pattern in _PARTS if re.search(pattern, name))
            found[part] = found.get(part, 0) + p.numel() * p.element_size()
        return found


def expert_ranks(config: EngineConfig, spec: GridSpec) -> int:
    """Ranks the experts are spread over.

    Raises:
        ValueError: a size other than 1 or all dp x tp ranks.
    """
    whole = spec.dp * spec.tp
    asked = config.expert_parallel_size
    if asked is not None and asked not in (1, whole):
        raise ValueError(f"expert_parallel_size {asked} does not fit dp {spec.dp} x tp {spec.tp}; valid sizes: {sorted({1, whole})}")
    return whole if asked is None else asked


def check_layout(model: ModelConfig, tp: int, n_spread: int) -> None:
    """Refuse a layout that does not divide the model.

    Raises:
        ValueError: naming the number, the degree, and the valid degrees.
    """
    wanted = {"num_attention_heads": model.attention.n_heads, "intermediate_size": model.intermediate}
    if model.moe is not None:
        if model.moe.n_shared:
            wanted["shared expert width"] = model.moe.n_shared * model.moe.intermediate
        if n_spread == 1:
            wanted["moe_intermediate_size"] = model.moe.intermediate
    for what, size in wanted.items():
        if size % tp:
            valid = [d for d in range(1, min(size, 256) + 1) if size % d == 0]
            raise ValueError(f"{what} {size} does not divide over tensor_parallel_size {tp}; valid sizes: {valid}")


def make_skeleton(model_config: ModelConfig, config: EngineConfig, place: Place, device: torch.device, dtype: torch.dtype) -> Skeleton:
    """The modules of the rank at ``place``, split, on the meta device; ``device`` is where they will run.

    Raises:
        ValueError: the layout does not divide the model.
    """
    spec = place.spec
    spread = expert_ranks(config, spec)
    check_layout(model_config, spec.tp, spread)
    check_model(config, model_config)
    layers = stage_layers(model_config.n_layers, spec.pp, place.pp_rank)
    moe = model_config.moe
    placement, n_slots, inner = None, 0, slice(0, 0)
    if moe is not None:
        placement = initial_placement(config, model_config, spread)
        n_slots = placement.slots_per_rank
        part = moe.intermediate if spread > 1 else moe.intermediate // spec.tp
        first = 0 if spread > 1 else place.tp.index * part
        inner = slice(first, first + part)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            model = DeepseekForCausalLM(model_config, layers, n_slots=n_slots, expert_inner=inner.stop - inner.start)
            shard_model(model, SHARD_TABLE, place.tp)
            if keeps_fp8(config, model_config, device):
                narrow(model, model_config, inner)
    finally:
        torch.set_default_dtype(before)
    return Skeleton(model=model, layers=layers, placement=placement, spread=spread, inner=inner, staging=staging_bytes(config, model))
