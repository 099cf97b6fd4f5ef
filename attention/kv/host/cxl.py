"""Memory on CXL devices: NUMA nodes without CPUs, or DAX devices; several share the load in turns of 2 MiB."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from .backing import Opened
from .layout import HostLayout, pool_bytes
from .pinned import anonymous, on_nodes
from .region import Region
from .room import check_memory, default_bytes, gib
from .system import BLOCK, blocks
from .throttle import Throttle
from .topology import Topology, read_topology

STAND_IN = "stand-in"
_OTHER_MAPPINGS = 5000  # that a process may have besides the pool's


@dataclass(frozen=True, kw_only=True)
class CxlBacking:
    """``regions``: ``node2`` (the memory of a NUMA node), ``/dev/dax0.0`` (a DAX device, or any file of whole 2 MiB blocks), or
    ``stand-in`` (ordinary memory, where there is no CXL). Nodes and devices do not mix. A device belongs to one process at a time.
    """

    regions: tuple[str, ...]
    throttle_gb_per_s: float | None = None  # for copies that the host starts
    threads: int = 0
    host_memory: int | None = None
    ranks_here: int = 1  # ranks of this host that make such a pool at the same time
    root: Path = Path("/")  # of sysfs

    @property
    def kind(self) -> str:
        """``cxl``."""
        return "cxl"

    @property
    def throttle(self) -> Throttle | None:
        """The link's stand-in, if one was asked for."""
        return None if self.throttle_gb_per_s is None else Throttle(self.throttle_gb_per_s)

    def room(self, share: float) -> int:
        """Bytes of this rank's pool by default: all of devices, which hold nothing else."""
        if self._devices():
            known = {device.name: device.n_bytes for device in read_topology(self.root).dax}
            sizes = [known.get(Path(name).name) or _file_bytes(name) for name in self.regions]
            whole = min(sizes) // BLOCK * BLOCK * len(sizes)
            return whole if len(sizes) == 1 else min(whole, (_most_mappings() - _OTHER_MAPPINGS) * BLOCK)
        return default_bytes(share, nodes=self._nodes(read_topology(self.root))[0], stated=self.host_memory, ranks_here=self.ranks_here)

    def check(self, layout: HostLayout) -> None:
        """Refuse what all ranks take if it is more than there is. ValueError: that, no such region, a device for several ranks."""
        if not self._devices():
            nodes, _ = self._nodes(read_topology(self.root))
            check_memory(pool_bytes(layout, self.kind), nodes=nodes, stated=self.host_memory, ranks_here=self.ranks_here)
        elif self.ranks_here > 1:
            raise ValueError(
                f"{self.regions[0]}: a DAX device belongs to one process, and {self.ranks_here} ranks of this same job would open it; make "
                "it a NUMA node (daxctl reconfigure-device --mode=system-ram) and let the ranks share one pool on it: backing shm, path "
                "@node2 with that node's number"
            )

    def open(self, layout: HostLayout, model: str) -> Opened:
        """The regions' memory. ValueError: too small, no such region, not writable, in use by another process."""
        size = pool_bytes(layout, self.kind)
        limit = "" if self.throttle_gb_per_s is None else f", copies throttled to {self.throttle_gb_per_s:g} GB/s"
        if self._devices():
            return self._on_devices(size, limit)
        nodes, about = self._nodes(read_topology(self.root))
        return Opened(region=anonymous(size, nodes, self.threads), offset=0, about=about + limit)

    def _devices(self) -> bool:
        """Whether the regions are devices. ValueError: regions that do not go together."""
        if not self.regions or len(set(self.regions)) != len(self.regions):
            raise ValueError(f"a CXL pool needs one or more different regions, got {list(self.regions)}")
        devices = [name for name in self.regions if name.startswith("/")]
        if devices and len(devices) != len(self.regions):
            raise ValueError(f"a CXL pool is either on NUMA nodes or on devices, got {list(self.regions)}; name one sort")
        if STAND_IN in self.regions and len(self.regions) > 1:
            raise ValueError(f"{STAND_IN} stands for all of a CXL pool's regions, got {list(self.regions)}; name it alone")
        return bool(devices)

    def _nodes(self, topology: Topology) -> tuple[tuple[int, ...], str]:
        """(nodes, where for people); says so when a node is none of CXL."""
        if self.regions == (STAND_IN,):
            return (), "stand-in for CXL: ordinary memory"
        known = {node.index: node for node in topology.nodes}
        found = []
        for name in self.regions:
            number = name.removeprefix("node")
            if not number.isdigit() or int(number) not in known:
                there = ", ".join(f"node{index}" for index in known) or "none"
                raise ValueError(f"no CXL region {name!r}: use {STAND_IN}, a device such as /dev/dax0.0, or a NUMA node of {there}")
            found.append(int(number))
        ordinary = [index for index in found if not known[index].memory_only]
        note = f"; stand-in for CXL: node {ordinary[0]} has CPUs" if ordinary else ""
        return tuple(found), "CXL memory" + on_nodes(tuple(found)) + note

    def _on_devices(self, size: int, limit: str) -> Opened:
        files: list[int] = []
        try:
            files += _open_all(self.regions)
            aligns = _check_devices(size, self.regions, files, read_topology(self.root))
            step = max(aligns)
            region = Region(size)
            try:
                for offset, length, device, place in interleave(region.n_bytes, len(files), step):
                    region.place(offset, length, fd=files[device], file_offset=place)
                region.after_end.append(partial(_close_all, files))
            except BaseException:
                region.close()
                raise
        except BaseException:
            _close_all(files)
            raise
        turns = f" in turns of {step >> 20} MiB" if len(files) > 1 else ""
        about = f"CXL memory of {', '.join(self.regions)}{turns}{limit}"
        return Opened(region=region, offset=0, about=about, found=True)


def interleave(n_bytes: int, n_devices: int, step: int = BLOCK) -> Iterator[tuple[int, int, int, int]]:
    """(offset in the pool, bytes, device, offset in the device): block ``b`` lies on device ``b % n`` as its block ``b // n``."""
    if n_devices == 1:
        yield 0, n_bytes, 0, 0
        return
    for block, offset in enumerate(range(0, n_bytes, step)):
        yield offset, min(step, n_bytes - offset), block % n_devices, block // n_devices * step


def _open_all(names: Sequence[str]) -> list[int]:
    files: list[int] = []
    try:
        for name in names:
            try:
                files.append(os.open(name, os.O_RDWR | os.O_CLOEXEC))
            except OSError as error:
                raise ValueError(f"{name}: the CXL region cannot be opened: {error.strerror}; see `rorqual doctor`") from error
            try:
                fcntl.flock(files[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(f"{name}: the CXL region is locked by another process; wait for its end or name another") from None
    except BaseException:
        _close_all(files)
        raise
    return files


def _check_devices(size: int, names: Sequence[str], files: list[int], topology: Topology) -> list[int]:
    """Alignment of each device; ValueError if one is too small or there are too many pieces for one process."""
    known = {device.name: device for device in topology.dax}
    aligns = []
    share = blocks(-(-size // len(names)))
    for name, fd in zip(names, files, strict=True):
        device = known.get(Path(name).name)
        room = device.n_bytes if device else os.fstat(fd).st_size
        aligns.append(max(BLOCK, device.align if device else BLOCK))
        if blocks(share) > room:
            raise ValueError(f"{gib(share)} of the host pool would lie on {name}, which has {gib(room)}; make the pool smaller")
    pieces = -(-size // max(aligns)) if len(names) > 1 else 1
    most = _most_mappings() - _OTHER_MAPPINGS
    if pieces > most:
        raise ValueError(
            f"{len(names)} interleaved CXL devices need {pieces} mappings, a process may have {most}; "
            f"raise it: sysctl vm.max_map_count={pieces + 2 * _OTHER_MAPPINGS}"
        )
    return aligns


def _file_bytes(name: str) -> int:
    try:
        return os.stat(name).st_size
    except OSError:
        return BLOCK  # is refused when it is opened


def _most_mappings() -> int:
    try:
        return int(Path("/proc/sys/vm/max_map_count").read_text(encoding="ascii"))
    except OSError:
        return 65530


def _close_all(files: list[int]) -> None:
    while files:
        os.close(files.pop())
