"""The doctor's section on host memory: NUMA nodes and CXL regions with their classes, huge pages, limits."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any

from ..attention.kv.host.cxl import CxlBacking
from ..attention.kv.host.layout import HostLayout
from ..attention.kv.host.pinned import anonymous
from ..attention.kv.host.probe import RegionClass, probe
from ..attention.kv.host.region import Region
from ..attention.kv.host.room import available_bytes
from ..attention.kv.host.shm import SHM
from ..attention.kv.host.topology import DaxDevice, Node, Topology, read_topology

_ROOT = Path("/")
_SAMPLE = 128 << 20  # bytes of a region that are probed
_MOST_PROBES = 8  # regions: a fifth of a second each


def host_memory(root: Path = _ROOT, probing: bool = True) -> list[dict[str, Any]]:
    """Rows of {item, value, note}."""
    topology = read_topology(root)
    probes: dict[str, RegionClass | str] = _probe_all(topology) if probing else {}
    ordinary = [found.latency_ns for name, found in probes.items() if isinstance(found, RegionClass) and name in _ordinary(topology)]
    classes = {
        name: found if isinstance(found, str) else found.describe(min(ordinary, default=found.latency_ns)) for name, found in probes.items()
    }
    rows = [_node_row(node, classes) for node in topology.nodes] + [_dax_row(device, classes) for device in topology.dax]
    rows += [_row(device.name, device.volatile_bytes, f"CXL device on node {device.node}") for device in topology.cxl]
    if not _has_cxl(topology):
        rows.append({"item": "CXL", "value": "none", "note": "cxl:stand-in uses ordinary memory"})
    return rows + _limits(root)


def _has_cxl(topology: Topology) -> bool:
    return bool(topology.memory_only_nodes or topology.dax or topology.cxl)


def _ordinary(topology: Topology) -> set[str]:
    return {f"node{node.index}" for node in topology.nodes if not node.memory_only}


def _probe_all(topology: Topology) -> dict[str, RegionClass | str]:
    """What was measured, or why not, of every region that can be named after ``cxl:``."""
    found: dict[str, RegionClass | str] = {f"node{node.index}": _probe_node(node) for node in topology.nodes[:_MOST_PROBES]}
    return found | {device.name: _probe_dax(device) for device in topology.dax[:_MOST_PROBES] if device.driver == "device_dax"}


def _node_row(node: Node, classes: dict[str, str]) -> dict[str, Any]:
    note = f"cxl:node{node.index}, no CPUs (CXL or other added memory)" if node.memory_only else f"{len(node.cpus)} CPUs"
    return _row(f"NUMA node {node.index}", node.available_bytes, "; ".join([note, *_class(f"node{node.index}", classes)]))


def _class(name: str, classes: dict[str, str]) -> list[str]:
    return [classes[name]] if name in classes else []


def _probe_node(node: Node) -> RegionClass | str:
    if node.available_bytes < 4 * _SAMPLE:
        return "too little is free to probe it"
    try:
        region = anonymous(_SAMPLE, (node.index,), 0)
    except ValueError as error:
        return str(error)
    try:
        return probe(region)
    finally:
        region.close()


def _dax_row(device: DaxDevice, classes: dict[str, str]) -> dict[str, Any]:
    if device.driver != "device_dax":
        use = f"memory of NUMA node {device.node}" if device.driver == "kmem" else "no driver: see daxctl reconfigure-device"
        return _row(device.name, device.n_bytes, use)
    return _row(device.name, device.n_bytes, "; ".join([f"cxl:/dev/{device.name}", *_class(device.name, classes)]))


def _probe_dax(device: DaxDevice) -> RegionClass | str:
    layout = HostLayout(n_layers=1, n_pages=1, page_size=1, row_bytes=min(_SAMPLE, device.n_bytes))
    try:
        opened = CxlBacking(regions=(f"/dev/{device.name}",)).open(layout, "")
    except ValueError as error:
        return str(error)
    region: Region = opened.region
    try:
        return probe(region)
    finally:
        region.close()


def _limits(root: Path) -> list[dict[str, Any]]:
    base = root / "sys/kernel/mm/transparent_hugepage"
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    rows = [
        _row("available memory", available_bytes(root), "what a host pool may take, less 5%"),
        {"item": "huge pages", "value": _chosen(base / "enabled"), "note": "private pools need madvise or always"},
        {"item": "huge pages, shared", "value": _chosen(base / "shmem_enabled"), "note": "shm pools need advise, within_size or always"},
        {"item": "locked memory", "value": "unlimited" if locked < 0 else f"{locked >> 20} MiB", "note": "ulimit -l"},
    ]
    if SHM.is_dir():
        stat = os.statvfs(SHM)
        rows.append(_row(str(SHM), stat.f_bavail * stat.f_frsize, "free for shm pools"))
    return rows


def _chosen(path: Path) -> str:
    """The value in brackets of a kernel setting."""
    try:
        text = path.read_text(encoding="ascii")
    except OSError:
        return "not known"
    return text.partition("[")[2].partition("]")[0] or text.strip()


def _row(item: str, n_bytes: int, note: str) -> dict[str, Any]:
    return {"item": item, "value": _gib(n_bytes), "bytes": n_bytes, "note": note}


def _gib(n_bytes: int) -> str:
    return f"{n_bytes / 2**30:.1f} GiB"
