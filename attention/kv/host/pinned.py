"""Private memory of one rank, in huge pages."""

from __future__ import annotations

from dataclasses import dataclass

from .backing import Opened
from .layout import HostLayout, pool_bytes
from .region import Region
from .room import check_memory, default_bytes
from .system import MADV_DONTFORK, MADV_HUGEPAGE, advise, bind
from .touch import touch


@dataclass(frozen=True, kw_only=True)
class PinnedBacking:
    """Anonymous memory: huge pages, first touched by many threads, on the NUMA ``nodes`` named (the GPU's, as a rule)."""

    nodes: tuple[int, ...] = ()  # empty: wherever the kernel likes; several: in turns of 2 MiB
    threads: int = 0  # of the first touch; 0: one a core, 32 at most
    host_memory: int | None = None  # bytes stated to be available; None: as the machine says
    ranks_here: int = 1  # ranks of this host that make such a pool at the same time
    ranks_on_nodes: int = 0  # those of them on the same nodes, 0: all

    @property
    def kind(self) -> str:
        """``pinned``."""
        return "pinned"

    def room(self, share: float) -> int:
        """Bytes of this rank's pool by default."""
        return default_bytes(
            share, nodes=self.nodes, stated=self.host_memory, ranks_here=self.ranks_here, ranks_on_nodes=self.ranks_on_nodes
        )

    def check(self, layout: HostLayout) -> None:
        """Refuse what the pools of all ranks take if it is more than there is. ValueError: that, or no such node."""
        check_memory(
            pool_bytes(layout, self.kind),
            nodes=self.nodes,
            stated=self.host_memory,
            ranks_here=self.ranks_here,
            ranks_on_nodes=self.ranks_on_nodes,
        )

    def open(self, layout: HostLayout, model: str) -> Opened:
        """Zeroed memory. ValueError: it ran out, or no such node."""
        size = pool_bytes(layout, self.kind)
        return Opened(region=anonymous(size, self.nodes, self.threads), offset=0, about="private memory" + on_nodes(self.nodes))


def anonymous(n_bytes: int, nodes: tuple[int, ...], threads: int) -> Region:
    """Zeroed private memory in huge pages, all of it present. ValueError: it ran out, or no such node."""
    region = Region(n_bytes)
    try:
        region.place(0, region.n_bytes)
        if nodes:
            bind(region.address, region.n_bytes, nodes)
        advise(region.address, region.n_bytes, MADV_HUGEPAGE)  # a kernel without them gives small pages
        advise(region.address, region.n_bytes, MADV_DONTFORK)  # a child would copy page tables, and pages at a write
        touch(region, threads)
    except BaseException:
        region.close()
        raise
    return region


def on_nodes(nodes: tuple[int, ...]) -> str:
    """Where, for people."""
    if not nodes:
        return ""
    return f" on NUMA node {nodes[0]}" if len(nodes) == 1 else f" in turns of 2 MiB on NUMA nodes {', '.join(map(str, nodes))}"
