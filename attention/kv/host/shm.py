"""One pool file per host, mapped by all of its ranks."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from .backing import Opened
from .file import map_file
from .header import MOST_MEMBERS, PoolHeader
from .layout import HEADER_BYTES, HostLayout, pool_bytes
from .pinned import on_nodes
from .pool_file import PREFIX, PoolFile, sweep
from .room import check_folder, check_memory, default_bytes, default_file_bytes
from .system import in_memory

log = logging.getLogger("rorqual")

#: where Linux has shared memory
SHM = Path("/dev/shm")


@dataclass(frozen=True, kw_only=True)
class ShmBacking:
    """A file in shared memory that the ``members`` ranks of ``job`` on this host share; its name goes once all have joined.

    ``folder`` may be any filesystem that lives in memory, one of huge pages (hugetlbfs) as well. Another one works on CPUs, with a warning.
    """

    job: str  # the same for all members, another for every start
    member: int = 0  # number of this rank on this host
    members: int = 1
    folder: Path = SHM
    nodes: tuple[int, ...] = ()
    threads: int = 0
    host_memory: int | None = None
    deadline_s: float = 300.0  # for the member that makes the file

    @property
    def kind(self) -> str:
        """``shm``."""
        return "shm"

    @property
    def path(self) -> Path:
        """Name of the file until all have joined."""
        return self.folder / (PREFIX + hashlib.sha256(self.job.encode()).hexdigest()[:16])

    def room(self, share: float) -> int:
        """Bytes of the shared pool by default."""
        return min(default_bytes(share, nodes=self.nodes, stated=self.host_memory), default_file_bytes(self.folder))

    def check(self, layout: HostLayout) -> None:
        """Refuse a file that does not fit, unless another member has made it already. ValueError: no room, or not writable."""
        if self.folder.is_dir():
            sweep(self.folder)
        if not self.path.exists():
            self._check_room(layout)

    def _check_room(self, layout: HostLayout) -> None:
        size = pool_bytes(layout, self.kind)
        check_folder(self.folder, size)
        check_memory(size, nodes=self.nodes, stated=self.host_memory)

    def open(self, layout: HostLayout, model: str) -> Opened:
        """The shared memory. ValueError: no room, not writable, or ranks that disagree."""
        if not self.job or not 0 <= self.member < self.members <= MOST_MEMBERS:
            raise ValueError(f"a shared host pool needs a job's name and member < members, got {self.job!r}, {self.member}, {self.members}")
        wanted = PoolHeader(model=model, layout=layout, job=self.job, kept=False)
        file = PoolFile.open(self.path, wanted, check=partial(self._check_room, layout), deadline_s=self.deadline_s)
        if file.fresh and not in_memory(self.folder):
            log.warning(
                "host pool: %s is not a file system in memory: what the pool holds is written to the disk as well, and CUDA may refuse "
                "to register it; use /dev/shm or mount a tmpfs, or backing file for a pool that is to stay", self.folder,
            )  # fmt: skip
        region = map_file(file, nodes=self.nodes, threads=self.threads)
        file.joined(self.member, self.members)
        about = f"{self.folder}, shared by {self.members} rank{'s' if self.members > 1 else ''}{on_nodes(self.nodes)}"
        return Opened(region=region, offset=HEADER_BYTES, about=about, identity=file.wanted.identity)
