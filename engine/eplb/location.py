"""Where experts are when the engine starts: how many slots there are, and what each holds."""

from __future__ import annotations

import os
import zlib

import numpy as np

from ...moe.eplb.topology import Ints, Topology
from ...moe.placement import Placement
from ...parallel.grid import Grid, GridSpec
from ..config import EngineConfig
from ..eplb_settings import eplb_settings, uses_placement
from ..model_config import ModelConfig


def sparse_layers(model: ModelConfig) -> list[int]:
    """Numbers of the layers that have experts; ``m`` below counts them from 0."""
    return [layer for layer, kind in enumerate(model.mlp_types) if kind == "sparse"]


def check_model(config: EngineConfig, model: ModelConfig) -> None:
    """Refuse settings about experts for a model that has none.

    Raises:
        ValueError: naming the setting.
    """
    if model.moe is not None:
        return
    settings = {"enable_eplb": config.enable_eplb, "init_expert_location": config.init_expert_location != "trivial"}
    settings |= {"num_redundant_experts": eplb_settings(config).num_redundant_experts > 0}
    settings |= {"expert_distribution_recorder_mode": config.expert_distribution_recorder_mode is not None}
    found = next((name for name, on in settings.items() if on), None)
    if found is not None:
        raise ValueError(f"{found} is about experts, but no layer of the model has any; leave it out")


def n_slots(config: EngineConfig, model: ModelConfig, n_ranks: int) -> int:
    """Slots of a layer over all ranks: one for every expert and those asked for beyond, rounded up so that all ranks have as many.

    Raises:
        ValueError: more slots than experts on a rank, or slots that no move can better.
    """
    assert model.moe is not None
    experts, spare = model.moe.n_experts, eplb_settings(config).num_redundant_experts
    if not uses_placement(config):
        return experts
    slots = -(-(experts + spare) // n_ranks) * n_ranks
    if slots > experts * n_ranks:
        raise ValueError(
            f"num_redundant_experts {spare} makes {slots // n_ranks} slots a rank, but a layer has {experts} experts and no rank needs one "
            f"twice; use at most {experts * (n_ranks - 1)}"
        )
    if config.enable_eplb and slots == n_ranks:
        raise ValueError(
            f"enable_eplb: with {experts} experts on {n_ranks} ranks each has one slot and there is no spare one, so that no place of the "
            f"experts is better than another; add --num-redundant-experts {n_ranks}, or use fewer ranks"
        )
    return slots


def initial_placement(config: EngineConfig, model: ModelConfig, n_ranks: int) -> Placement:
    """What every slot of every layer holds at the start; the same on all ranks that read the same file.

    Trivial: slot s holds expert s modulo their number.

    Raises:
        ValueError: the experts do not divide over the ranks, or the map does not fit the model.
    """
    assert model.moe is not None
    experts = model.moe.n_experts
    if not uses_placement(config):
        return Placement.identity(n_layers=model.n_layers, n_experts=experts, n_ranks=n_ranks)
    slots = n_slots(config, model, n_ranks)
    table = np.broadcast_to(np.arange(slots) % experts, (model.n_layers, slots)).copy()
    if config.init_expert_location != "trivial":
        filled = config.ep_dispatch_algorithm == "lp"
        table[sparse_layers(model)] = _from_file(config.init_expert_location, model, n_ranks, slots, filled=filled)
    placement = Placement.of(table, n_experts=experts, n_ranks=n_ranks)
    placement.check()
    return placement


def check_file(config: EngineConfig, model: ModelConfig, n_ranks: int) -> None:
    """This rank can read the map that it is to begin with. Before anything that ranks do together, as one may lack the file.

    Raises:
        ValueError: as of ``initial_placement``.
    """
    if model.moe is not None and config.init_expert_location != "trivial":
        initial_placement(config, model, n_ranks)


def check_same(grid: Grid, placement: Placement | None) -> None:
    """All ranks began with the same map. Collective over the world.

    Raises:
        ValueError: on every rank, naming those that differ from rank 0.
    """
    if placement is None or grid.world.size == 1:
        return
    mine = zlib.crc32(placement.slot_to_expert.numpy().tobytes())
    sums = grid.world.gather_ints([mine])[:, 0]
    odd = [rank for rank, found in zip(grid.world.ranks, sums, strict=True) if found != sums[0]]
    if odd:
        raise ValueError(f"init_expert_location: ranks {odd} read another map than rank 0; give all hosts the same file")


def expert_topology(spec: GridSpec, node_of: tuple[int, ...], slots: int) -> Topology:
    """The ranks that experts are placed on."""
    ranks = spec.dp * spec.tp
    return Topology(slots=(slots // ranks,) * ranks, nodes=node_of)


def _from_file(where: str, model: ModelConfig, n_ranks: int, slots: int, *, filled: bool = False) -> Ints:
    """[sparse layers, slots] from a map, or planned for a recorded load; ``filled``: for shares by load."""
    from ...moe.eplb.formats import read_load, read_map, sniff

    name = where if len(where) < 200 else f"{where[:60]} ..."
    inline = where.lstrip().startswith(("{", "["))
    if not inline and not os.path.exists(where):  # also False for what cannot be the name of a file
        raise ValueError(f"init_expert_location {name!r} is neither 'trivial', nor JSON, nor a file that is there")
    assert model.moe is not None
    layers, experts = sparse_layers(model), model.moe.n_experts
    if sniff(where).endswith("map"):
        found = read_map(where, n_experts=experts)
        rows = _rows(found.slot_to_expert, found.layer_ids, layers, model, name)
        if rows.shape[1] != slots:
            raise ValueError(
                f"init_expert_location {name!r} places {rows.shape[1]} slots, but there are {slots}; "
                f"use --num-redundant-experts {rows.shape[1] - experts}, or make a map of {slots}"
            )
        return rows
    from ...moe.eplb.planner.slack import plan_slack
    from ...moe.eplb.planner.static import plan_static

    trace = read_load(where)
    load = _rows(trace.total, trace.layer_ids, layers, model, name)
    if load.shape[1] != experts:
        raise ValueError(f"init_expert_location {name!r} counts {load.shape[1]} experts, the model has {experts}")
    topology = Topology.even(n_slots=slots, n_ranks=n_ranks)
    plan = plan_slack if filled else plan_static
    return plan(load.astype(np.float64), topology).slot_to_expert


def _rows(table: Ints, ids: tuple[int, ...] | None, layers: list[int], model: ModelConfig, name: str) -> Ints:
    """The rows of ``table`` for ``layers``: by their numbers, or as many as the model has layers or sparse layers."""
    if ids is not None and set(layers) <= set(ids):
        return np.asarray(table)[[list(ids).index(layer) for layer in layers]]
    if ids is not None and list(ids) != list(range(len(ids))):  # numbers that the file gives, not those of its rows
        raise ValueError(
            f"init_expert_location {name!r} is about layers {list(ids)}; the layers with experts are {layers}, and each must be in it"
        )
    if len(table) == model.n_layers:
        return np.asarray(table)[layers]
    if len(table) == len(layers):
        return np.asarray(table)
    raise ValueError(
        f"init_expert_location {name!r} has {len(table)} layers; the model has {model.n_layers}, of which {len(layers)} have experts: "
        f"{layers[0]} to {layers[-1]}"
    )
