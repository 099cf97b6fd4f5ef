"""Where the machine's memory is, read from sysfs: NUMA nodes, DAX devices, CXL memory devices, and the node of a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

_ROOT = Path("/")


@dataclass(frozen=True, kw_only=True)
class Node:
    """A NUMA node; one without CPUs is memory that was added: CXL, most of the time."""

    index: int
    cpus: tuple[int, ...]
    total_bytes: int
    available_bytes: int  # free, or file cache that can be dropped
    distances: tuple[int, ...]  # to every node, 10 = itself

    @property
    def memory_only(self) -> bool:
        """No CPUs, but memory."""
        return not self.cpus and self.total_bytes > 0


@dataclass(frozen=True, kw_only=True)
class DaxDevice:
    """Memory behind a device: a character device under /dev, or (driver kmem) already a NUMA node."""

    name: str
    n_bytes: int
    align: int  # bytes; mappings start and end at multiples of it
    node: int | None
    driver: str | None  # "device_dax": can be mapped; "kmem": is the memory of ``node``


@dataclass(frozen=True, kw_only=True)
class CxlMemory:
    """A CXL memory device (an endpoint), whether its memory is in use or not."""

    name: str
    volatile_bytes: int
    persistent_bytes: int
    node: int | None


@dataclass(frozen=True, kw_only=True)
class Topology:
    """All of it."""

    nodes: tuple[Node, ...]
    dax: tuple[DaxDevice, ...]
    cxl: tuple[CxlMemory, ...]

    @property
    def memory_only_nodes(self) -> tuple[Node, ...]:
        """Nodes without CPUs."""
        return tuple(node for node in self.nodes if node.memory_only)


def read_topology(root: Path = _ROOT) -> Topology:
    """What sysfs below ``root`` says; what it lacks is empty."""
    nodes = [_node(path) for path in _numbered(root / "sys/devices/system/node", "node")]
    dax = [_dax(path) for path in _numbered(root / "sys/bus/dax/devices", "dax")]
    cxl = [_cxl(path) for path in _numbered(root / "sys/bus/cxl/devices", "mem")]
    return Topology(nodes=tuple(nodes), dax=tuple(dax), cxl=tuple(cxl))


def pci_node(address: str, root: Path = _ROOT) -> int | None:
    """NUMA node of the PCI device ``address`` (dddd:bb:dd.f), None where the machine does not say."""
    return _node_number(root / "sys/bus/pci/devices" / address.lower())


def gpu_node(device: torch.device, root: Path = _ROOT) -> int | None:
    """NUMA node that a GPU is attached to; None for a CPU, on a machine with one node, or where it is not known."""
    if device.type != "cuda" or len(_numbered(root / "sys/devices/system/node", "node")) < 2:
        return None
    props = torch.cuda.get_device_properties(device)
    domain, bus, slot = (getattr(props, f"pci_{part}_id", 0) for part in ("domain", "bus", "device"))
    return pci_node(f"{domain:04x}:{bus:02x}:{slot:02x}.0", root)


def parse_list(text: str) -> tuple[int, ...]:
    """Numbers of a kernel list such as ``0-3,8``."""
    found: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            found += range(int(first), int(last or first) + 1)
    return tuple(found)


def _numbered(folder: Path, prefix: str) -> list[Path]:
    """Entries ``prefix`` + digits (and dots), in the order of their numbers."""
    if not folder.is_dir():
        return []
    found = []
    for path in folder.iterdir():
        numbers = path.name.removeprefix(prefix).split(".")
        if path.name.startswith(prefix) and all(number.isdigit() for number in numbers):
            found.append(([int(number) for number in numbers], path))
    return [path for _, path in sorted(found)]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _number(path: Path) -> int:
    text = _text(path)
    return int(text, 0) if text else 0


def _node_number(device: Path, name: str = "numa_node") -> int | None:
    text = _text(device / name)
    return int(text) if text and int(text) >= 0 else None


def _node(path: Path) -> Node:
    memory: dict[str, int] = {}
    for line in _text(path / "meminfo").splitlines():
        name, _, value = line.partition(":")
        memory[name.split()[-1]] = int(value.split()[0]) * 1024
    cache = memory.get("Active(file)", 0) + memory.get("Inactive(file)", 0)
    return Node(
        index=int(path.name.removeprefix("node")),
        cpus=parse_list(_text(path / "cpulist")),
        total_bytes=memory.get("MemTotal", 0),
        available_bytes=memory.get("MemFree", 0) + cache,
        distances=tuple(int(part) for part in _text(path / "distance").split()),
    )


def _dax(path: Path) -> DaxDevice:
    driver = path / "driver"
    return DaxDevice(
        name=path.name,
        n_bytes=_number(path / "size"),
        align=_number(path / "align") or 2 << 20,
        node=_node_number(path, "target_node"),
        driver=driver.resolve().name if driver.exists() else None,
    )


def _cxl(path: Path) -> CxlMemory:
    volatile, persistent = _number(path / "ram/size"), _number(path / "pmem/size")
    return CxlMemory(name=path.name, volatile_bytes=volatile, persistent_bytes=persistent, node=_node_number(path))
