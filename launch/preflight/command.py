"""``doctor --dist`` over all ranks of a job: who is there, can hosts reach one another, how long do messages take."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ...parallel.grid import Grid, GridSpec
from ...parallel.muster import Roll, muster
from ...parallel.store import Rendezvous
from ..console import table
from ..flags import chosen
from ..nodes.settings import NodeSettings
from ..torchrun_exec import needs_ranks, start_ranks
from .links import Link, own_address, probe_links
from .timing import Pair, slow_pairs, time_collectives, time_pairs

_SHOWN = 10  # slow links that are listed


def run_dist(args: argparse.Namespace) -> int:
    """The exit code, 0: everybody is there and reaches the others. Links that are much slower than others are only told.

    Raises:
        ValueError: hosts differ, a clock is off, or hosts cannot reach one another.
    """
    nodes = NodeSettings(**chosen(args, NodeSettings))
    world = (nodes.nproc or 1) * nodes.nnodes
    if needs_ranks(nodes, world):
        return start_ranks(nodes, world, sys.argv[1:])
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        raise ValueError("--dist needs several ranks: add --nproc N (and --nnodes ...), or start it under torchrun")
    return _check(args.dist_timeout, args.max_clock_skew, as_json=args.json)


def _check(timeout_s: float, max_skew_s: float, *, as_json: bool) -> int:
    from ... import __version__
    from ...engine.resolved import resolve_device
    from ..doctor import versions

    meeting = Rendezvous.from_env(timeout_s)
    device = resolve_device("auto")
    facts = {"rorqual": __version__, "device": device.type, "nccl": versions()["nccl"]}
    roll = muster(meeting, "rorqual/preflight", facts, timeout_s, max_skew_s)
    links = probe_links(meeting, "rorqual/preflight", roll, timeout_s)
    grid = Grid.create(GridSpec(dp=meeting.world_size), device, timeout_s)
    collectives, pairs = time_collectives(grid), time_pairs(grid)
    interface = own_address(meeting, roll)
    grid.close()
    slow = slow_pairs(pairs, roll.hosts)
    if meeting.rank == 0:
        if as_json:
            print(json.dumps(_as_json(roll, links, collectives, pairs, slow), indent=2))
        else:
            print(_text(meeting, roll, interface, links, collectives, pairs, slow), flush=True)
    return 0


def _as_json(
    roll: Roll, links: Sequence[Link], collectives: Sequence[dict[str, Any]], pairs: Sequence[Pair], slow: Sequence[tuple[Pair, str]]
) -> dict[str, Any]:
    return {
        "hosts": list(roll.hosts), "clock_skew_s": roll.clock_skew_s, "links": [asdict(link) for link in links],
        "collectives": list(collectives), "pairs": [asdict(pair) for pair in pairs],
        "slow": [{**asdict(pair), "why": why} for pair, why in slow],
    }  # fmt: skip


def _text(
    meeting: Rendezvous, roll: Roll, interface: tuple[str, str], links: Sequence[Link], collectives: Sequence[dict[str, Any]],
    pairs: Sequence[Pair], slow: Sequence[tuple[Pair, str]],
) -> str:  # fmt: skip
    hosts = list(dict.fromkeys(roll.hosts))
    parts = [
        f"{len(roll.hosts)} ranks on {len(hosts)} host(s) met at {meeting.host}:{meeting.port}; rank 0 uses interface {interface[0]} "
        f"({interface[1]}); clocks are within {roll.clock_skew_s:.3f} s"
    ]
    if links:
        rows = [[roll.hosts[k.source], roll.hosts[k.target], k.address, k.interface, f"{k.rtt_us:.0f}"] for k in links]
        parts.append(table(["from", "to", "address", "interface", "TCP round trip us"], rows))
    rows = [[c["op"], f"{c['bytes']:,}", f"{c['us']:.0f}", f"{c['gbytes_s']:.3f}"] for c in collectives]
    parts.append(table(["over all ranks", "bytes", "us", "GB/s a rank"], rows))
    parts.append(table(["pairs", "number", "latency us: median", "worst", "GB/s: median", "worst"], _kinds(pairs, roll.hosts)))
    for pair, why in slow[:_SHOWN]:
        parts.append(f"slow: rank {pair.a} on {roll.hosts[pair.a]} and rank {pair.b} on {roll.hosts[pair.b]}: {why}")
    if len(slow) > _SHOWN:
        parts.append(f"and {len(slow) - _SHOWN} more slow links (--json lists them)")
    return "\n\n".join(parts) + ("" if slow else "\n\nall links work")


def _kinds(pairs: Sequence[Pair], hosts: Sequence[str]) -> list[list[Any]]:
    rows = []
    for name, inside in (("within a host", True), ("between hosts", False)):
        kind = [pair for pair in pairs if (hosts[pair.a] == hosts[pair.b]) == inside]
        if kind:
            latency, speed = [pair.latency_us for pair in kind], [pair.gbytes_s for pair in kind]
            medians = f"{statistics.median(latency):.0f}", f"{statistics.median(speed):.2f}"
            rows.append([name, len(kind), medians[0], f"{max(latency):.0f}", medians[1], f"{min(speed):.2f}"])
    return rows
