"""Counters of one rank, for reports."""

from __future__ import annotations

from typing import Any

import torch

from ..moe.placement import Placement
from ..parallel.grid import Grid
from .eplb.steps import ExpertSteps
from .leader import Leader
from .models.build import Stage
from .runner import Runner


def rank_row(grid: Grid, stage: Stage, runner: Runner, leader: Leader | None, experts: ExpertSteps | None) -> dict[str, Any]:
    """What this rank is, holds and has done: numbers, lists and dicts only."""
    stats = runner.stats
    row: dict[str, Any] = {"rank": grid.rank, "pp": grid.pp_rank, "dp": grid.dp_rank, "tp": grid.tp_rank}
    row |= {"layers": [stage.layers.start, stage.layers.stop], "tokens": stats.tokens, "samples": stats.samples}
    row |= {"steps": stats.steps, "idle_steps": stats.idle_steps, "busy_seconds": stats.busy_seconds}
    row["graph_steps"], row["host_waits"] = stats.graph_steps, runner.streams.waits
    if runner.mover is not None:
        row["tiers"] = runner.mover.counts.report()
    if runner.graphs is not None:
        row["graphs"] = vars(runner.graphs.stats)
    row["intervals"] = list(stats.intervals)
    if stage.placement is not None and stage.load is not None:
        row |= _experts(grid, stage, stage.placement, experts)
        row["expert_load"] = stage.load.counts.tolist()
    if stage.dispatcher is not None:
        row["dispatch_bytes"] = stage.dispatcher.bytes_sent()
    if experts is not None:
        row["eplb"] = experts.stats()
    if leader is not None:
        row["scheduler"] = leader.stats()
    return row


def _experts(grid: Grid, stage: Stage, start: Placement, experts: ExpertSteps | None) -> dict[str, Any]:
    """Slots of this rank and, unless they hold the experts in order, what is in them now, layer by layer of this stage."""
    now = start if experts is None else experts.placement(start)
    rank, layers = grid.ep.index if now.n_ranks > 1 else 0, [layer.layer for layer in stage.model.moe_layers()]
    row: dict[str, Any] = {"experts": now.slots_per_rank}
    if now.n_slots != now.n_experts or bool((now.slot_to_expert[layers] != torch.arange(now.n_slots)).any()):  # alike on all ranks
        row["expert_slots"] = {str(layer): now.local_experts(layer, rank) for layer in layers}
    return row
