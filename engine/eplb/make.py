"""From settings to what records and moves the experts of one rank."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ...moe.eplb.cost import CostModel
from ...moe.eplb.live.agreement import GroupAgreement
from ...moe.eplb.live.balancer import LiveBalancer
from ...moe.eplb.live.side import side_group
from ...moe.eplb.live.state import ExpertState
from ...moe.eplb.live.transport import GroupTransport
from ...moe.eplb.load.recorder import LoadRecorder
from ...moe.eplb.load.window import LoadWindow
from ...parallel.agree import together
from ...parallel.grid import Grid
from ..config import EngineConfig
from ..eplb_settings import eplb_settings
from ..model_config import ModelConfig
from ..models.build import Stage
from ..streams import Streams
from .location import check_same, expert_topology
from .planning import Planner
from .refill import WINDOW, ShareRefill
from .room import expert_bytes, live_config, staging_bytes
from .steps import ExpertSteps
from .tables import WaysWriter

if TYPE_CHECKING:
    from ...moe.eplb.live.transport import Transport

#: (FLOP/s of products, bytes/s of reading weights, bytes/s of an expert that moves) by device: an H200 with NVLink, and a CPU core
_RATES = {"cuda": (8e14, 4.2e12, 4e10), "cpu": (2e10, 1e10, 1e9)}


def make_experts(grid: Grid, stage: Stage, config: EngineConfig, model: ModelConfig) -> ExpertSteps | None:
    """What is done for the experts between steps; None where nothing is. Collective over the world; all its memory is taken here.

    Raises:
        ValueError: on every rank; the ranks began with different maps, or experts are not made so that they can move.
    """
    if stage.placement is not None and stage.placement.n_ranks > 1:
        check_same(grid, stage.placement)
        if config.ep_dispatch_algorithm != "static" and _layers(stage):
            _deal_anywhere(grid, stage, config, model)
    fills = config.ep_dispatch_algorithm == "lp"
    if stage.load is None or not (config.enable_eplb or fills or config.expert_distribution_recorder_mode is not None):
        return None
    recorder = together(grid, lambda: _recorder(stage, config, model) if _layers(stage) else None)
    if recorder is None:  # a pipeline stage of dense layers
        return None
    planner = writer = live = refill = slots = None
    if config.enable_eplb:
        planner, writer = _planner(grid, stage, config, recorder), _writer(grid, stage, config, model)
        live = _live(grid, stage, config, recorder, planner, writer)
        grid.before_close.append(live.close)
    if fills and stage.placement is not None:
        slots = stage.placement.slot_to_expert[_layers(stage)].numpy()
        writer = writer or _writer(grid, stage, config, model)
        refill = _refill(grid, stage, config, writer)
    return ExpertSteps(
        recorder=recorder, live=live, planner=planner, writer=writer, ep=grid.ep, counts_tokens=grid.tp_rank == 0,
        slots=slots, refill=refill, stage=f".stage{grid.pp_rank}" if grid.spec.pp > 1 else "",
    )  # fmt: skip


def _deal_anywhere(grid: Grid, stage: Stage, config: EngineConfig, model: ModelConfig) -> None:
    """Tokens of all ranks go to all copies alike; tables were made to prefer near ones."""
    assert stage.placement is not None
    writer, layers = _writer(grid, stage, config, model), range(len(_layers(stage)))
    writer.write(layers, writer.deal(layers, stage.placement.slot_to_expert[_layers(stage)].numpy()))


def expert_cost(stage: Stage, device: torch.device) -> CostModel:
    """Prices of this model's experts on such a device."""
    experts = stage.model.moe_layers()[0].experts
    values, one = experts.gate_up[0].numel() + experts.down[0].numel(), expert_bytes(stage.model)
    flops, reading, copying = _RATES["cuda" if device.type == "cuda" else "cpu"]
    return CostModel(expert_bytes=one, token_seconds=2 * values / flops, expert_seconds=one / reading, copy_bytes_per_second=copying)


def _layers(stage: Stage) -> list[int]:
    return [layer.layer for layer in stage.model.moe_layers()]


def _recorder(stage: Stage, config: EngineConfig, model: ModelConfig) -> LoadRecorder:
    assert stage.load is not None and model.moe is not None
    mode: Any = config.expert_distribution_recorder_mode
    return LoadRecorder(
        stage.load, layer_ids=_layers(stage), top_k=model.moe.top_k, window=eplb_settings(config).window_size, mode=mode,
        buffer=config.expert_distribution_recorder_buffer_size,
    )  # fmt: skip


def _planner(grid: Grid, stage: Stage, config: EngineConfig, recorder: LoadRecorder) -> Planner:
    assert stage.placement is not None
    topology = expert_topology(grid.spec, grid.node_of, stage.placement.n_slots)
    cost = expert_cost(stage, grid.device)
    return Planner(eplb_settings(config), topology, cost, window_steps=lambda: recorder.window_steps)


def _writer(grid: Grid, stage: Stage, config: EngineConfig, model: ModelConfig) -> WaysWriter:
    assert stage.placement is not None and model.moe is not None
    layers = stage.model.moe_layers()
    return WaysWriter(
        layers[0].exchange.ways,
        expert_topology(grid.spec, grid.node_of, stage.placement.n_slots),
        n_experts=model.moe.n_experts,
        source=grid.ep.index,
        layer_ids=_layers(stage),
        near=config.ep_dispatch_algorithm == "static",
    )


def _refill(grid: Grid, stage: Stage, config: EngineConfig, writer: WaysWriter) -> ShareRefill:
    assert stage.placement is not None and stage.load is not None
    interval = eplb_settings(config).dispatch_interval
    return ShareRefill(
        writer,
        LoadWindow(stage.load.counts, _layers(stage), WINDOW * interval),
        partial(_fetched, Streams(grid.device)),
        expert_topology(grid.spec, grid.node_of, stage.placement.n_slots),
        n_experts=stage.placement.n_experts,
        interval=interval,
    )


def _fetched(streams: Streams, counts: torch.Tensor) -> Callable[[], Any]:
    """Counts that are on their way to the host: a function that waits for them."""
    copy = streams.download(counts)
    return lambda: copy.wait().numpy()


def _live(grid: Grid, stage: Stage, config: EngineConfig, recorder: LoadRecorder, planner: Planner, writer: WaysWriter) -> LiveBalancer:
    """What moves experts. Staging is made here, before the KV pool is sized."""
    placement = stage.placement
    assert placement is not None
    layers = _layers(stage)
    states = together(grid, lambda: _states(stage, placement.slots_per_rank))
    live = LiveBalancer(
        config=live_config(config),
        rank=grid.ep.index,
        topology=expert_topology(grid.spec, grid.node_of, placement.n_slots),
        n_experts=placement.n_experts,
        slot_to_expert=placement.slot_to_expert[layers].numpy(),
        states=states,
        transport=_transport(grid, config),
        agreement=GroupAgreement(grid.ep),
        counts=_counts(recorder, grid.device),
        plan=planner,
        tables=writer,
    )
    planned = staging_bytes(config, stage.model)
    assert live.mover.staging.n_bytes == planned, f"planned {planned} bytes of staging, allocated {live.mover.staging.n_bytes}"
    return live


def _states(stage: Stage, n_slots: int) -> list[ExpertState]:
    """What moves with an expert, layer by layer."""
    return [ExpertState.of_module(moe.experts, n_slots=n_slots, where=f"layer {moe.layer}") for moe in stage.model.moe_layers()]


def _transport(grid: Grid, config: EngineConfig) -> Transport:
    """What carries experts, in a group of its own."""
    group = side_group(grid, config.dist_timeout)
    if grid.device.type != "cuda":
        return GroupTransport(group)
    from ...moe.eplb.live.nccl import NcclTransport

    return NcclTransport(group, grid.device)


def _counts(recorder: LoadRecorder, device: torch.device) -> Callable[[], Any]:
    """This rank's window when called: at once on a CPU, else a function that waits for its way to the host, for another thread."""
    streams = Streams(device)

    def window() -> Any:
        copy = streams.download(recorder.window())
        if not streams.cuda:
            return copy.wait().numpy()

        def arrived() -> np.ndarray:
            found: np.ndarray = copy.wait().numpy()
            return found

        return arrived

    return window
