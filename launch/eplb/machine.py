"""Flags that several commands share: the load, the machine that experts are placed on, and what its steps cost."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING

from ..flags import Parser
from ..quantities import parse_bytes
from .files import map_of

if TYPE_CHECKING:
    from ...moe.eplb.cost import CostModel
    from ...moe.eplb.topology import Topology
    from ...moe.eplb.trace import LoadTrace


def add_load(parser: Parser, what: str = "Recorded or made load") -> None:
    """The argument ``load``, files for ``files.load_of``."""
    parser.add_argument("load", nargs="+", metavar="LOAD", help=f"{what} (several files: of several ranks).")


def add_coverage(parser: Parser) -> None:
    """The flag ``--coverage``."""
    parser.add_argument(
        "--coverage", choices=("any", "ranks", "nodes"), default="any",
        help="Every expert on two ranks or two nodes where slots allow. (default: any)",
    )  # fmt: skip


def add_machine(parser: Parser) -> None:
    """Flags of ``machine_of``."""
    group = parser.add_argument_group("machine")
    group.add_argument("--ranks", type=int, metavar="N", help="Ranks that experts are spread over; default: as the trace says.")
    group.add_argument("--nodes", type=int, default=1, metavar="N", help="Nodes that the ranks are on, in order. (default: 1)")
    group.add_argument("--slots", type=int, metavar="N", help="Physical slots of a layer over all ranks; default: experts and replicas.")
    group.add_argument(
        "--redundant", "--num-redundant-experts", type=int, metavar="N", help="Slots for replicas: slots = experts + N. (default: 0)"
    )
    group.add_argument("--failed", type=int, nargs="+", default=[], metavar="RANK", help="Ranks that may hold nothing.")
    group.add_argument("--speeds", type=float, nargs="+", metavar="X", help="Relative speed of each rank; default: all the same.")


def machine_of(args: argparse.Namespace, trace: LoadTrace, map_path: str | None = None) -> Topology:
    """The machine of the flags, for a load; what they leave open is as a map has it that is used, or as the load says.

    Raises:
        ValueError: no number of ranks, or slots that do not fit.
    """
    from ...moe.eplb.topology import Topology

    n_experts, ranks, n_slots = trace.n_experts, args.ranks, None
    if map_path is not None:
        held = map_of(map_path, n_experts)
        n_slots = held.n_slots
        if (
            held.topology is not None
            and n_slots == (args.slots or n_slots)
            and args.redundant is None
            and ranks is None
            and args.nodes == 1
        ):
            return _with_state(args, held.topology, n_experts)
    ranks = ranks if ranks is not None else trace.n_ranks
    if ranks is None:
        raise ValueError("the input does not say how many ranks there are; give --ranks N")
    if args.slots is not None and args.redundant is not None:
        raise ValueError("--slots and --redundant say the same thing; give one of them")
    if (args.redundant or 0) < 0:
        raise ValueError(f"--redundant must be 0 or more, found {args.redundant}")
    slots = args.slots if args.slots is not None else n_experts + (args.redundant or 0)
    if n_slots is not None and args.slots is None and args.redundant is None:
        slots = n_slots
    return _with_state(args, Topology.even(n_slots=slots, n_ranks=ranks, n_nodes=args.nodes), n_experts)


def _with_state(args: argparse.Namespace, machine: Topology, n_experts: int) -> Topology:
    """The machine with its failed ranks and speeds. ValueError: the experts do not fit any more."""
    slots = machine.n_slots
    if args.speeds is not None or args.failed:
        machine = replace(machine, speeds=None if args.speeds is None else tuple(args.speeds), failed=frozenset(args.failed))
    usable = int(machine.usable.sum())
    if usable < n_experts:
        lost = f" ({slots - usable} of {slots} are on failed ranks)" if usable < slots else ""
        raise ValueError(f"{n_experts} experts do not fit into {usable} slots{lost}; give --redundant {n_experts - usable} or more")
    return machine


def machine_text(machine: Topology, n_experts: int) -> str:
    """One line about a machine."""
    sizes = sorted(set(machine.slots))
    each = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
    failed = f", failed {sorted(machine.failed)}" if machine.failed else ""
    return (
        f"{machine.n_ranks} ranks on {machine.n_nodes} node{'s' * (machine.n_nodes > 1)}{failed}, {machine.n_slots} slots ({each} a rank): "
        f"{n_experts} experts and {machine.n_slots - n_experts} for replicas"
    )


def add_cost(parser: Parser) -> None:
    """Flags of ``cost_of``."""
    group = parser.add_argument_group("cost of a step (defaults: an expert of DeepSeek-V3 in FP8 on an H200)")
    group.add_argument("--expert-bytes", metavar="SIZE", help="Weights and scales of one expert of one layer, for example 44.05MB.")
    group.add_argument("--token-us", type=float, metavar="X", help="Microseconds to compute one routed token (one choice).")
    group.add_argument("--expert-us", type=float, metavar="X", help="Microseconds to read one expert that has tokens.")
    group.add_argument("--layer-us", type=float, metavar="X", help="Microseconds of a layer that depend on neither.")
    group.add_argument("--copy-gbs", type=float, metavar="X", help="GB/s (10^9) at which a rank receives moved experts.")


def cost_of(args: argparse.Namespace) -> CostModel:
    """The cost of the flags.

    Raises:
        ValueError: a value that is not above 0.
    """
    from ...moe.eplb.cost import CostModel

    given: dict[str, float] = {}
    for flag, field, unit in (
        ("token_us", "token_seconds", 1e-6),
        ("expert_us", "expert_seconds", 1e-6),
        ("layer_us", "fixed_seconds", 1e-6),
        ("copy_gbs", "copy_bytes_per_second", 1e9),
    ):
        value = getattr(args, flag)
        if value is None:
            continue
        if not (0 < value < float("inf") or (value == 0 and flag == "layer_us")):
            raise ValueError(f"--{flag.replace('_', '-')} must be above 0, found {value}; give a finite number")
        given[field] = value * unit
    cost = replace(CostModel(), **given)  # type: ignore[arg-type]
    return cost if args.expert_bytes is None else replace(cost, expert_bytes=parse_bytes(args.expert_bytes))
