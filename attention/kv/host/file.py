"""A pool in a file at a given path, which stays."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from .backing import Opened
from .header import PoolHeader
from .layout import HEADER_BYTES, HostLayout, pool_bytes
from .pinned import on_nodes
from .pool_file import PREFIX, PoolFile
from .region import Region
from .room import check_folder, check_memory, default_bytes, default_file_bytes
from .system import MADV_HUGEPAGE, advise, bind
from .touch import touch


@dataclass(frozen=True, kw_only=True)
class FileBacking:
    """Any path; what it holds is there at the next start. CUDA registers files of memory filesystems only."""

    path: Path
    job: str = ""  # one job at a time; empty: everyone with the same model and layout, at the same time
    nodes: tuple[int, ...] = ()
    threads: int = 0
    in_memory: bool = True  # the file's bytes are taken from the machine's memory: check that too
    host_memory: int | None = None
    deadline_s: float = 300.0

    @property
    def kind(self) -> str:
        """``file``."""
        return "file"

    def room(self, share: float) -> int:
        """Bytes of the file by default."""
        found = default_file_bytes(self.path.parent, self.path)
        return min(found, default_bytes(share, nodes=self.nodes, stated=self.host_memory)) if self.in_memory else found

    def check(self, layout: HostLayout) -> None:
        """Refuse a file that does not fit, unless it is there already. ValueError: no room, or not writable."""
        if not self.path.exists():
            self._check_room(layout)

    def _check_room(self, layout: HostLayout) -> None:
        size = pool_bytes(layout, self.kind)
        check_folder(self.path.parent, size)
        if self.in_memory:
            check_memory(size, nodes=self.nodes, stated=self.host_memory)

    def open(self, layout: HostLayout, model: str) -> Opened:
        """The file's memory. ValueError: no room, not writable, another model, layout, version or job, a damaged header."""
        if self.path.name.startswith(PREFIX):
            raise ValueError(f"{self.path}: names that start with {PREFIX} belong to files that are removed by themselves; use another")
        wanted = PoolHeader(model=model, layout=layout, job=self.job, kept=True)
        file = PoolFile.open(self.path, wanted, check=partial(self._check_room, layout), deadline_s=self.deadline_s)
        found = not file.fresh
        region = map_file(file, nodes=self.nodes, threads=self.threads)
        about = f"{self.path}, kept{on_nodes(self.nodes)}"
        return Opened(region=region, offset=HEADER_BYTES, about=about, found=found, identity=file.wanted.identity)


def map_file(file: PoolFile, *, nodes: tuple[int, ...], threads: int) -> Region:
    """All of ``file``; the process that created it touches every page, then lets the others in.

    Raises:
        ValueError: memory ran out, or no such node; a file that was being made is gone.
    """
    region = None
    try:
        region = Region(file.wanted.file_bytes)
        region.place(0, file.wanted.file_bytes, fd=file.fd)
        advise(region.address, region.n_bytes, MADV_HUGEPAGE)  # heeded where shared memory may have huge pages
        if file.fresh:
            if nodes:
                bind(region.address, region.n_bytes, nodes)
            touch(region, threads)
            file.publish()
        region.after_end.append(file.close)
    except BaseException:
        if region is not None:
            region.close()
        file.discard()
        raise
    return region
