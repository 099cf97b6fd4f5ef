"""The pools of one rank with offloading: the cache on the device and its part of the host pool. Made by all ranks together."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...attention.kv.cache import KVCache
from ...attention.kv.host.allocator import HostPageAllocator
from ...attention.kv.host.backing import Backing
from ...attention.kv.host.choose import HostPlace, choose_backing
from ...attention.kv.host.layout import pool_bytes
from ...attention.kv.host.pool import HostPool
from ...attention.kv.host.topology import gpu_node
from ...attention.kv.tier import HostRows
from ...parallel.agree import together
from ...parallel.grid import Grid
from ...parallel.store import ranks_of_host
from ..config import EngineConfig
from .host_part import HostPart
from .host_share import SHARED, HostShare, host_bytes, host_pages
from .sizing import OffloadShape, OffloadSizes, offload_sizes
from .tier_limits import TierLimits

log = logging.getLogger("rorqual")


@dataclass(frozen=True, kw_only=True)
class OffloadPools:
    """What offloading adds to a rank."""

    cache: KVCache
    host: HostPool
    limits: TierLimits
    shared: bool  # ranks of the host map one pool
    writes: bool  # this rank copies its rows into it; otherwise another one has the same rows

    def host_pages(self) -> HostPageAllocator:
        """All host pages of a replica, free."""
        return HostPageAllocator(self.limits.n_host_pages, self.host.layout.extent_pages)


def make_pools(
    grid: Grid, shape: OffloadShape, config: EngineConfig, *, n_layers: int, first_layer: int, available: int, compute_dtype: torch.dtype
) -> OffloadPools:
    """Size and allocate. Collective: every rank uses the smallest sizes of all.

    Args:
        grid: this rank's place.
        shape: its part of the model.
        config: settings.
        n_layers: layers of the whole model.
        first_layer: first of this rank.
        available: bytes of device memory to spend.
        compute_dtype: dtype that rows are read as.

    Raises:
        ValueError: on every rank, when the model is dense or memory is short on one of them.
    """
    share = HostShare.at(grid.spec, grid.rank, ranks_of_host(grid.world.size), n_layers)
    place = _place(grid, share)
    backing = together(grid, lambda: choose_backing(config.kv_host_backing + (f":{path}" if (path := config.kv_host_path) else ""), place))

    def size() -> OffloadSizes:
        n_bytes = host_bytes(config, share, backing, on_cpu=grid.device.type == "cpu")
        return offload_sizes(shape, device_bytes=available, host_pages=host_pages(shape, config.kv_host_backing, share, n_bytes))

    own = together(grid, size)
    table = grid.world.gather_ints([own.n_pages, own.n_device_pages])
    sizes = OffloadSizes(n_pages=int(table[:, 0].min()), n_device_pages=int(table[:, 1].min()))
    limits = together(grid, lambda: shape.limits(sizes.n_pages, sizes.n_device_pages))
    host, rows = _open(grid, shape, config, share, backing, sizes.n_pages, first_layer)
    cache = together(
        grid,
        lambda: KVCache(
            shape.mla,
            shape.has_indexer,
            sizes.n_pages,
            shape.page_size,
            shape.dtype,
            compute_dtype,
            grid.device,
            tiers=shape.tiers(sizes.n_pages, sizes.n_device_pages),
            host=rows,
        ),
    )
    planned = shape.device_bytes(sizes.n_pages, sizes.n_device_pages).total
    assert cache.n_bytes == planned, f"planned {planned} bytes on the device, allocated {cache.n_bytes}"
    shared = config.kv_host_backing in SHARED
    # Stages hold different layers: their first ranks are not the leader, which could not wait for their copies. Nor do the ranks
    # of another host see what those of this one copy. Several ranks that write the same rows write the same bytes.
    alone = not shared or grid.spec.pp > 1 or not share.whole
    return OffloadPools(cache=cache, host=host, limits=limits, shared=not alone and grid.spec.tp > 1, writes=alone or grid.tp_rank == 0)


def _place(grid: Grid, share: HostShare) -> HostPlace:
    """What this rank's backing has to know. Collective."""
    node = gpu_node(grid.device)
    job = int(grid.world.gather_ints([secrets.randbits(62)])[0, 0])
    nodes = grid.world.gather_ints([-1 if node is None else node])[share.first : share.first + share.ranks, 0].tolist()
    return HostPlace(
        job=f"{job:x}",
        member=share.member,
        members=share.ranks,
        gpu_node=node,
        node_members=0 if node is None else nodes.count(node),
    )


def _open(
    grid: Grid, shape: OffloadShape, config: EngineConfig, share: HostShare, backing: Backing, n_pages: int, first_layer: int
) -> tuple[HostPool, Sequence[HostRows]]:
    """The host pool, and this rank's rows of it for each of its layers. Collective: nobody takes memory before all know that it is there.

    Raises:
        ValueError: on every rank.
    """
    shared = config.kv_host_backing in SHARED
    layers, parts, first = (len(share.layers), share.parts, share.part) if shared else (len(shape.has_indexer), 1, 0)
    layout = shape.host_layout(n_pages * parts, layers)
    together(grid, lambda: backing.check(layout))
    if grid.rank == 0 and not config.disable_log_stats:  # tens of GiB take seconds
        log.info("making host pools of %.1f GiB (%s)", pool_bytes(layout, config.kv_host_backing) / 2**30, config.kv_host_backing)

    def make() -> HostPool:
        model = f"{config.model}@{config.revision or ''}:{shape.dtype}"
        return HostPool(layers, layout.n_pages, layout.page_size, layout.row_bytes, backing, model=model, device=grid.device, checked=True)

    pool = together(grid, make)
    skipped = first_layer - share.layers.start if shared else 0
    mine = [pool.layer(skipped + i) for i in range(len(shape.has_indexer))]
    return pool, [HostPart(layer, first * n_pages, n_pages, shape.page_size) for layer in mine]
