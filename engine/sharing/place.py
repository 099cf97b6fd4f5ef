"""Where the directory of a host pool is, what it says of its pages, and joining it. Collective over the ranks of the engine."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ...attention.kv.directory import Companion, Directory, DirectoryLayout, DirectoryLimits, HostPoolBytes, remove_unused
from ...attention.kv.host.pool import HostPool
from ...attention.kv.host.pool_file import PREFIX
from ...parallel.agree import together
from ...parallel.grid import Grid

#: start of the names of the stores of pools that belong to one job; not that of their pools, which go when nobody has locked them
_STORE = "rorqual-prefixes-"
#: ends of what lies beside a store
_BESIDE = ("-live", "-wal", "-shm", "-journal")
#: waits of an engine: a match and its checksums may not outlast the patience of a request (see ask.py)
LIMITS = DirectoryLimits(call=0.25, verify=0.7)
#: the pool has at least so many extents: small pools are handed out in small pieces
_LEAST_EXTENTS = 64


@dataclass(frozen=True, kw_only=True)
class Origin:
    """What decides the bytes of a page, beside its tokens."""

    model: str  # fingerprint of the model, as the pool's header has it
    weights: str  # fingerprint of its weights
    rows: str  # formats that the pool's layout does not tell


def directory_layout(pool: HostPool, origin: Origin) -> DirectoryLayout:
    """What all members of the directory of ``pool`` must agree on."""
    layout = pool.layout
    rows = layout.as_json() | {"formats": origin.rows}
    extent = min(64, layout.extent_pages, max(1, layout.n_pages // _LEAST_EXTENTS))
    return DirectoryLayout(
        model=origin.model,
        revision=origin.weights,
        rows=json.dumps(rows, sort_keys=True),
        page_size=layout.page_size,
        n_pages=layout.n_pages,
        extent_pages=extent,
    )


def store_path(pool: Path, *, kept: bool) -> Path:
    """The store's file, next to the pool's."""
    return pool.with_name(pool.name + "-prefixes" if kept else _STORE + pool.name.removeprefix(PREFIX))


@dataclass(kw_only=True)
class Membership:
    """One rank's part: the leader of a replica is the member, its other ranks use the member's pages."""

    path: Path
    kept: bool  # the store stays when all have left, as the pool does
    directory: Directory | None  # the leader's
    companion: Companion | None  # the others'

    def close(self) -> None:
        """Leave; the device must have finished with the pages. A second call does nothing."""
        for part in (self.directory, self.companion):
            if part is not None:
                part.close()
        if not self.kept:
            remove_unused(self.path, timeout_s=0.1)


def join(grid: Grid, pool: HostPool, pool_path: Path, origin: Origin) -> Membership:
    """Join the directory of ``pool``, which lies at ``pool_path``; collective.

    Raises:
        ValueError: on every rank: the store cannot be used by one of them.
    """
    kept = pool.kind == "file"
    path = store_path(pool_path, kept=kept)
    directory: Directory | None = None

    def lead() -> Directory | None:
        if not grid.is_leader:
            return None
        if not kept:
            sweep(path.parent)
        name = f"rank {grid.rank} of {grid.spec.world}, replica {grid.dp_rank}"
        return Directory.open(path, directory_layout(pool, origin), HostPoolBytes(pool), pool_id=pool.identity, name=name, limits=LIMITS)

    try:
        directory = together(grid, lead)
        member = int(grid.replica.gather_ints([-1 if directory is None else directory.member])[0, 0])
        companion = together(grid, lambda: None if grid.is_leader else Companion(path, member))
    except BaseException:
        if directory is not None:
            directory.close()
        raise
    return Membership(path=path, kept=kept, directory=directory, companion=companion)


def sweep(folder: Path) -> None:
    """Remove the stores of jobs whose processes were all killed."""
    for path in folder.glob(_STORE + "*"):
        if not path.name.endswith(_BESIDE):
            with suppress(OSError, ValueError):
                remove_unused(path, timeout_s=0.0)
        elif path.name.endswith("-live") and not os.path.lexists(str(path).removesuffix("-live")):
            with suppress(OSError, ValueError):
                remove_unused(str(path).removesuffix("-live"), timeout_s=0.0)
