"""What no placement can better."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..plan import Floats
from ..topology import Topology
from .replicate import share_out
from .seats import Seats


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Lower bounds of the largest rank time over the mean, for loads that are split evenly over replicas."""

    replica: Floats  # [layers] the largest replica, if replicas are shared out as well as can be; at least 1
    partner: Floats  # [layers] the same together with the lightest experts that could share its rank: the tightest, and the plans' bound


def bounds(load: Floats, topology: Topology) -> Bounds:
    """Bounds of each layer: load [layers, experts]. A layer without load has 1.

    Some rank holds the largest replica. With n seats in use that replica has at least the load that the best sharing out of n seats
    leaves. The seats beside it hold the lightest experts, or are among the seats not in use. The bound is the least over how many
    are not in use.
    """
    seats = Seats(topology=topology, n_experts=load.shape[1])
    _, peaks = share_out(load, seats.total, most=seats.n_rows)
    return bounds_from(load, peaks, seats)


def bounds_from(load: Floats, peaks: Floats, seats: Seats) -> Bounds:
    """Bounds of each layer: load [layers, experts], and the peaks [layers, spare + 1] that ``share_out`` returned for all seats."""
    mean = load.sum(1) / seats.n_rows
    mean = np.where(mean > 0, mean, 1.0)
    fastest = seats.speed.max()
    lightest = np.sort(load, axis=1)
    partners = int(seats.capacity.min()) - 1
    spare = peaks.shape[1] - 1
    least = np.full(len(load), np.inf)
    for unused in range(min(spare, partners) + 1):
        beside = lightest[:, : partners - unused].sum(1)
        least = np.minimum(least, peaks[:, spare - unused] + beside)
    return Bounds(replica=np.maximum(1.0, peaks[:, spare] / mean / fastest), partner=np.maximum(1.0, least / mean / fastest))


def bound(load: Floats, topology: Topology) -> Floats:
    """[layers] the tightest of ``bounds``: the least imbalance that any placement of this load can have."""
    return bounds(load, topology).partner
