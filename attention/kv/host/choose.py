"""A backing by its name on the command line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .backing import Backing
from .cxl import CxlBacking
from .file import FileBacking
from .pinned import PinnedBacking
from .shm import SHM, ShmBacking

#: how backings are written
FORMS = (
    "pinned, shm, shm:FOLDER, shm:FOLDER@node2,node3, file:PATH, cxl:node2,node3, cxl:/dev/dax0.0,/dev/dax1.0, cxl:stand-in "
    "or cxl:REGIONS@GB_PER_S"
)


@dataclass(frozen=True, kw_only=True)
class HostPlace:
    """What a rank knows of its host: the parts of a backing that its name does not say."""

    job: str  # the same for all ranks of a node, another for every start
    member: int = 0  # number of the rank on this host
    members: int = 1  # ranks of this host
    gpu_node: int | None = None  # NUMA node of the rank's GPU
    node_members: int = 0  # ranks of this host with GPUs on that node, 0: all
    host_memory: int | None = None  # bytes stated to be available on the host


def choose_backing(name: str, place: HostPlace) -> Backing:
    """The backing that ``name`` (one of ``FORMS``) stands for.

    Raises:
        ValueError: it stands for none.
    """
    kind, _, rest = name.partition(":")
    make = _KINDS.get(kind)
    if make is None or (kind in ("file", "cxl") and not rest) or (kind == "pinned" and rest):
        raise ValueError(f"unknown backing of the host pool {name!r}; use {FORMS}")
    return make(rest, place)


def _pinned(rest: str, place: HostPlace) -> Backing:
    nodes = () if place.gpu_node is None else (place.gpu_node,)
    return PinnedBacking(nodes=nodes, host_memory=place.host_memory, ranks_here=place.members, ranks_on_nodes=place.node_members)


def _shm(rest: str, place: HostPlace) -> Backing:
    folder, _, names = rest.partition("@")
    numbers = [name.removeprefix("node") for name in names.split(",")] if names else []
    if not all(number.isdigit() for number in numbers):
        raise ValueError(f"the NUMA nodes of a shared host pool are written node2,node3, got {names!r}")
    return ShmBacking(
        job=place.job,
        member=place.member,
        members=place.members,
        folder=Path(folder or SHM),
        nodes=tuple(map(int, numbers)),
        host_memory=place.host_memory,
    )


def _file(rest: str, place: HostPlace) -> Backing:
    return FileBacking(path=Path(rest), job=place.job, host_memory=place.host_memory)


def _cxl(rest: str, place: HostPlace) -> Backing:
    regions, _, rate = rest.partition("@")
    try:
        limit = float(rate) if rate else None
    except ValueError:
        raise ValueError(f"the rate of a CXL stand-in must be a number of GB/s, got {rate!r}") from None
    return CxlBacking(regions=tuple(regions.split(",")), throttle_gb_per_s=limit, host_memory=place.host_memory, ranks_here=place.members)


_KINDS: dict[str, Callable[[str, HostPlace], Backing]] = {"pinned": _pinned, "shm": _shm, "file": _file, "cxl": _cxl}
