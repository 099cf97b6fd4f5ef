"""What one rank has of its host: which ranks are on it, and how its memory is divided among their pools."""

from __future__ import annotations

from dataclasses import dataclass

from ...attention.kv.host.backing import Backing
from ...parallel.grid import GridSpec
from ..config import EngineConfig
from ..memory import CPU_SHARE
from ..models.shards import stage_layers
from .sizing import OffloadShape, host_pages_of

#: share of what a host has available that its pools take unless told otherwise
HOST_SHARE = 0.8
#: the same together with the cache on the device, where the device is the host too
BOTH_SHARE = 0.9
#: backings that the ranks of a host map together
SHARED = ("shm", "file")


@dataclass(frozen=True, kw_only=True)
class HostShare:
    """How the ranks of a host divide its pools."""

    first: int  # lowest rank of this host
    ranks: int  # of this host
    member: int  # this one among them
    parts: int  # replicas on this host
    part: int  # that of this rank among them
    layers: range  # of all stages on this host: what a pool that its ranks share holds
    whole: bool  # no rank of this one's replica is on another host

    @classmethod
    def at(cls, spec: GridSpec, rank: int, ranks: int, n_layers: int) -> HostShare:
        """Of rank ``rank`` where every host has ``ranks`` ranks of consecutive numbers (the last one perhaps fewer)."""
        first = rank - rank % ranks
        return cls.among(spec, rank, range(first, min(first + ranks, spec.world)), n_layers)

    @classmethod
    def among(cls, spec: GridSpec, rank: int, here: range, n_layers: int) -> HostShare:
        """Of rank ``rank`` where its host has the ranks ``here``."""
        replicas = sorted({other // spec.tp % spec.dp for other in here})
        replica = rank // spec.tp % spec.dp
        stages = [stage_layers(n_layers, spec.pp, other // (spec.dp * spec.tp)) for other in here]
        return cls(
            first=here.start,
            ranks=len(here),
            member=rank - here.start,
            parts=len(replicas),
            part=replicas.index(replica),
            layers=range(stages[0].start, stages[-1].stop),
            whole=all(other in here for other in range(spec.world) if other // spec.tp % spec.dp == replica),
        )


def host_bytes(config: EngineConfig, share: HostShare, backing: Backing, *, on_cpu: bool) -> int:
    """Bytes of the host pool that one rank maps: its part of what was asked for, or of what the host has available."""
    if config.kv_host_memory is None:
        return backing.room(min(HOST_SHARE, BOTH_SHARE - CPU_SHARE) if on_cpu else HOST_SHARE)
    return asked_bytes(config.kv_host_memory, config.kv_host_backing, share)


def asked_bytes(gib: float, kind: str, share: HostShare) -> int:
    """Bytes of the host pool that one rank maps where those of a host take ``gib`` GiB together."""
    return int(gib * 2**30) // (1 if kind in SHARED else share.ranks)


def host_pages(shape: OffloadShape, kind: str, share: HostShare, n_bytes: int) -> int:
    """Host pages of one replica in a pool of ``n_bytes``."""
    return whole_pages(shape, kind, share, n_bytes) // (share.parts if kind in SHARED else 1)


def whole_pages(shape: OffloadShape, kind: str, share: HostShare, n_bytes: int) -> int:
    """Pages that a pool of ``n_bytes`` has room for, those of all replicas that share it."""
    return host_pages_of(shape, n_bytes, n_layers=len(share.layers) if kind in SHARED else None)


def pool_pages(shape: OffloadShape, kind: str, share: HostShare, n_bytes: int, n_pages: int) -> int:
    """Pages that a pool has: as many as fit where a directory keeps what nobody uses just now, else those of its replicas' ``n_pages``."""
    return whole_pages(shape, kind, share, n_bytes) if shape.directory else n_pages * (share.parts if kind in SHARED else 1)


def check_whole(config: EngineConfig, share: HostShare) -> None:
    """ValueError: a prefix directory is asked for, but a replica's pages are not in the pool of one host."""
    if config.kv_prefix_directory and not share.whole:
        raise ValueError(
            "kv_prefix_directory needs all ranks of a replica on one host, whose pool its pages are in; use smaller replicas "
            "(tensor_parallel_size), or leave it out"
        )
