"""The public functions of expert load balancing under one roof; docs/eplb.md shows them at work.

``from rorqual.moe.eplb.tools import make_plan, simulate`` imports what is asked for and nothing else.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .analysis import analyze
    from .api import make_plan
    from .assess import assess
    from .choice.water import water_fill
    from .cost import CostModel
    from .explain import explain
    from .formats import FORMATS, ExpertMap, problems, read_load, read_map, sniff, write_load, write_map
    from .live.balancer import LiveBalancer
    from .live.config import LiveConfig
    from .load.diagnosis import diagnose
    from .load.ewma import Ewma
    from .load.hash_routed import hash_trace
    from .load.persistence import persistence
    from .load.recorder import LoadRecorder
    from .load.synth import synth
    from .load.synth_config import SynthConfig
    from .locality.coactivation import coactivation
    from .locality.fan_out import choose_even, fan_out
    from .locality.near_plan import plan_near
    from .locality.pareto import pareto
    from .locality.routing import Gate, Routing, fit_router, make_router
    from .locality.soft import plan_local
    from .metrics import balance
    from .plan import Plan, rank_loads, replica_counts
    from .planner.fill import fill
    from .planner.slack import plan_slack
    from .planner.static import plan_static
    from .rebalance_experts import rebalance_experts
    from .replan.advise import advise
    from .replan.coverage import losses
    from .replan.recovery import recover
    from .replan.tradeoff import tradeoff
    from .report.gather import gather
    from .report.page import write_report
    from .simulation.published import published_plan
    from .simulation.replay import simulate
    from .simulation.rules import POLICIES, Rules
    from .topology import Topology
    from .trace import LoadTrace
    from .validate import validate

__all__ = [
    "CostModel",
    "ExpertMap",
    "FORMATS",
    "LoadTrace",
    "POLICIES",
    "Plan",
    "Rules",
    "SynthConfig",
    "Topology",
    "Ewma",
    "Gate",
    "LiveBalancer",
    "LiveConfig",
    "LoadRecorder",
    "Routing",
    "advise",
    "analyze",
    "assess",
    "balance",
    "choose_even",
    "coactivation",
    "diagnose",
    "explain",
    "fan_out",
    "fit_router",
    "fill",
    "gather",
    "hash_trace",
    "losses",
    "make_router",
    "pareto",
    "persistence",
    "plan_local",
    "plan_near",
    "plan_slack",
    "make_plan",
    "plan_static",
    "problems",
    "published_plan",
    "rank_loads",
    "read_load",
    "read_map",
    "rebalance_experts",
    "recover",
    "replica_counts",
    "simulate",
    "sniff",
    "synth",
    "tradeoff",
    "validate",
    "water_fill",
    "write_load",
    "write_map",
    "write_report",
]

#: public name -> its module
_HOMES = {
    "CostModel": "cost",
    "ExpertMap": "formats",
    "FORMATS": "formats",
    "LoadTrace": "trace",
    "POLICIES": "simulation.rules",
    "Plan": "plan",
    "Rules": "simulation.rules",
    "SynthConfig": "load.synth_config",
    "Topology": "topology",
    "Ewma": "load.ewma",
    "Gate": "locality.routing",
    "LiveBalancer": "live.balancer",
    "LiveConfig": "live.config",
    "LoadRecorder": "load.recorder",
    "Routing": "locality.routing",
    "advise": "replan.advise",
    "analyze": "analysis",
    "assess": "assess",
    "balance": "metrics",
    "choose_even": "locality.fan_out",
    "coactivation": "locality.coactivation",
    "diagnose": "load.diagnosis",
    "explain": "explain",
    "fan_out": "locality.fan_out",
    "fit_router": "locality.routing",
    "fill": "planner.fill",
    "gather": "report.gather",
    "hash_trace": "load.hash_routed",
    "losses": "replan.coverage",
    "make_router": "locality.routing",
    "pareto": "locality.pareto",
    "persistence": "load.persistence",
    "plan_local": "locality.soft",
    "plan_near": "locality.near_plan",
    "plan_slack": "planner.slack",
    "make_plan": "api",
    "plan_static": "planner.static",
    "problems": "formats",
    "published_plan": "simulation.published",
    "rank_loads": "plan",
    "read_load": "formats",
    "read_map": "formats",
    "rebalance_experts": "rebalance_experts",
    "recover": "replan.recovery",
    "replica_counts": "plan",
    "simulate": "simulation.replay",
    "sniff": "formats",
    "synth": "load.synth",
    "tradeoff": "replan.tradeoff",
    "validate": "validate",
    "water_fill": "choice.water",
    "write_load": "formats",
    "write_map": "formats",
    "write_report": "report.page",
}


def __getattr__(name: str) -> Any:
    """The public name, imported now."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; its names are: {', '.join(__all__)}")
    return getattr(import_module(f".{_HOMES[name]}", __package__), name)
