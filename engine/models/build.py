"""From configuration and grid to a stage with memory, connected to its expert-parallel group."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...attention.mla import layer_has_indexer
from ...attention.ops import AttentionOps
from ...comm.dispatcher import Dispatcher
from ...comm.select import make_dispatcher
from ...moe.exchange import ExpertExchange
from ...moe.load import ExpertLoad
from ...moe.ops import MoEOps
from ...moe.placement import Placement
from ...moe.track import IN_LINE, Track
from ...moe.ways import Ways
from ...parallel.grid import Grid
from ...parallel.linear import use_fp8_backend
from ...parallel.store import ranks_of_host
from ..config import EngineConfig
from ..expert_settings import check_dispatcher, exchange_spec
from ..memory import check_weights
from ..model_config import ModelConfig
from ..side import SideQueue
from ..weights.target import Target
from .backends import keeps_fp8, pick_ops
from .deepseek import DeepseekForCausalLM
from .skeleton import Place, make_skeleton
from .targets import clear_empty_slots, materialise, weight_targets


@dataclass(kw_only=True)
class Stage:
    """One rank's part of a model, ready for its weights."""

    model: DeepseekForCausalLM  # modules with memory, values not yet loaded
    layers: range  # decoder layers of this stage
    targets: dict[str, list[Target]]  # where each checkpoint tensor goes
    load: ExpertLoad | None  # expert load counts, None without experts
    placement: Placement | None  # physical slots, None without experts
    dispatcher: Dispatcher | None  # all-to-all of this rank, None without experts
    attention_ops: AttentionOps | None = None  # what attention runs by once the weights are in place; None: the torch path
    moe_ops: MoEOps | None = None  # what routing and experts run by
    still: bool = False  # a step of single tokens makes no host sync and has no shape that depends on values

    @property
    def capturable(self) -> bool:
        """Whether a CUDA graph can hold a step of single tokens. A planted selection runs on the torch path, which it cannot."""
        return self.still and self.model.selection == "indexer"


def build_stage(model_config: ModelConfig, config: EngineConfig, grid: Grid, dtype: torch.dtype) -> Stage:
    """Make this rank's stage: modules on the meta device, split, materialised, experts connected.

    Raises:
        ValueError: the layout does not divide the model.
    """
    place = Place(spec=grid.spec, pp_rank=grid.pp_rank, tp=grid.tp)
    skeleton = make_skeleton(model_config, config, place, grid.device, dtype)
    model, placement, spread, moe = skeleton.model, skeleton.placement, skeleton.spread, model_config.moe
    check_weights(skeleton.n_bytes, grid.device, ranks_of_host(grid.world.size), staging=skeleton.staging)
    materialise(model, grid.device)
    model.eval()
    ep_rank = grid.ep.index if spread > 1 else 0
    targets = weight_targets(model, placement, ep_rank=ep_rank, inner=skeleton.inner)
    if placement is not None:
        clear_empty_slots(model, placement, ep_rank=ep_rank)
    load, dispatcher = None, None
    attention_ops, moe_ops = pick_ops(config, model_config, grid)
    if moe is not None and placement is not None:
        load = ExpertLoad(model_config.n_layers, moe.n_experts, grid.device)
        load.enabled = config.enable_expert_load
        dispatcher = _connect(model, model_config, config, grid, placement, load, spread, dtype)
    shares = model_config.attention.indexer is not None and not layer_has_indexer(model_config.attention, skeleton.layers.start)
    check_dispatcher(config, dispatcher, shares_selection=shares)
    if keeps_fp8(config, model_config, grid.device):
        use_fp8_backend(config.fp8_gemm_backend, grid.device)
    exchange = next((layer.exchange for layer in model.moe_layers()), None)
    still = attention_ops is not None and (exchange is None or (moe_ops is not None and exchange.still))
    return Stage(
        model=model,
        layers=skeleton.layers,
        targets=targets,
        load=load,
        placement=placement,
        dispatcher=dispatcher,
        still=still,
        attention_ops=attention_ops,
        moe_ops=moe_ops,
    )


def _connect(
    model: DeepseekForCausalLM,
    model_config: ModelConfig,
    config: EngineConfig,
    grid: Grid,
    placement: Placement,
    load: ExpertLoad,
    spread: int,
    dtype: torch.dtype,
) -> Dispatcher:
    """Make the dispatcher and attach every sparse layer to it."""
    spec = exchange_spec(config, model_config, n_ranks=spread, tp=grid.tp.size, n_slots=placement.n_slots, dtype=dtype)
    dispatcher = make_dispatcher(config.moe_a2a_backend if spread > 1 else "local", grid, spec)
    track = _track(config, grid, dispatcher)
    source, nodes = (grid.ep.index, grid.node_of) if spread > 1 else (0, None)
    ways = Ways.static(placement, source=source, nodes=nodes, device=grid.device)
    exchange = ExpertExchange(
        dispatcher=dispatcher, tp=grid.tp, placement=placement, load=load, spread=spread > 1, track=track, ways=ways
    )  # fmt: skip
    for layer in model.moe_layers():
        layer.attach(exchange)
    return dispatcher


def _track(config: EngineConfig, grid: Grid, dispatcher: Dispatcher) -> Track:
    """The queue that tokens travel on: one of their own in halves, and in graphs where stores do it, beside the shared expert.

    The latter saved up to 0.5% of a decode step with 32 tokens or more a rank on two H200s; launched one by one it cost more than that.
    Where no token travels, the queue takes the shared expert of few tokens.
    """
    if grid.device.type != "cuda" or not dispatcher.caps.graph:
        return IN_LINE
    if config.enable_two_batch_overlap:
        return SideQueue(grid.device)
    return SideQueue(grid.device, captured_only=True) if dispatcher.caps.overlap_without_sm else IN_LINE
