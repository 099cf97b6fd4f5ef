"""The pools of one rank with offloading: the cache on the device and its part of the host pool. Made by all ranks together."""

from __future__ import annotations

import logging
import secrets
from dataclasses import dataclass, replace

import torch

from ...attention.kernels.mirror_pages_torch import PoolPairs
from ...attention.kv.cache import KVCache
from ...attention.kv.host.allocator import HostPageAllocator
from ...attention.kv.host.backing import Backing
from ...attention.kv.host.choose import HostPlace, choose_backing
from ...attention.kv.host.file import FileBacking
from ...attention.kv.host.layout import pool_bytes
from ...attention.kv.host.pool import HostLayer, HostPool
from ...attention.kv.host.shm import ShmBacking
from ...attention.kv.host.topology import gpu_node
from ...parallel.agree import together
from ...parallel.grid import Grid
from ..config import EngineConfig
from ..sharing.place import Membership, Origin, join
from .host_part import HostPart
from .host_share import SHARED, HostShare, check_whole, host_bytes, host_pages, pool_pages
from .index_rows import index_pairs
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
    membership: Membership | None = None  # in the directory of the pool's pages
    keys: PoolPairs | None = None  # with a directory: index keys on the device and in the pool

    def host_pages(self) -> HostPageAllocator:
        """All host pages of a replica, free."""
        return HostPageAllocator(self.limits.n_host_pages, self.host.layout.extent_pages)


def make_pools(
    grid: Grid,
    shape: OffloadShape,
    config: EngineConfig,
    *,
    n_layers: int,
    first_layer: int,
    available: int,
    compute_dtype: torch.dtype,
    weights: str = "",
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
        weights: fingerprint of the model's weights, for a prefix directory.

    Raises:
        ValueError: on every rank, when the model is dense, memory is short on one of them, or the prefix directory cannot be had.
    """
    share = HostShare.among(grid.spec, grid.rank, grid.node_ranks, n_layers)
    place = _place(grid, share)
    if config.kv_prefix_directory and config.kv_host_backing == "file":
        place = replace(place, job="")  # the directory numbers the file's pages for all engines that have it open
    backing = together(grid, lambda: choose_backing(config.kv_host_backing + (f":{path}" if (path := config.kv_host_path) else ""), place))

    def size() -> tuple[OffloadSizes, int]:
        check_whole(config, share)
        n_bytes, kind = host_bytes(config, share, backing, on_cpu=grid.device.type == "cpu"), config.kv_host_backing
        own = offload_sizes(shape, device_bytes=available, host_pages=host_pages(shape, kind, share, n_bytes))
        return own, pool_pages(shape, kind, share, n_bytes, own.n_pages)

    own, n_host = together(grid, size)
    table = grid.world.gather_ints([own.n_pages, own.n_device_pages, n_host])
    sizes = OffloadSizes(n_pages=int(table[:, 0].min()), n_device_pages=int(table[:, 1].min()))
    n_host = int(table[:, 2].min()) if shape.directory else sizes.n_pages
    limits = together(grid, lambda: shape.limits(sizes.n_pages, sizes.n_device_pages, n_host))
    host, mine = _open(grid, shape, config, share, backing, limits, first_layer)
    first = 0 if shape.directory or config.kv_host_backing not in SHARED else share.part * sizes.n_pages
    rows = [HostPart(layer, first, n_host, shape.page_size) for layer in mine]
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
            index_dtype=shape.index_dtype,
        ),
    )
    planned = shape.device_bytes(sizes.n_pages, sizes.n_device_pages).total
    assert cache.n_bytes == planned, f"planned {planned} bytes on the device, allocated {cache.n_bytes}"
    shared = config.kv_host_backing in SHARED
    # Stages hold different layers: their first ranks are not the leader, which could not wait for their copies. Nor do the ranks
    # of another host see what those of this one copy. Several ranks that write the same rows write the same bytes.
    alone = not shared or grid.spec.pp > 1 or not share.whole
    membership = _join(grid, shape, config, host, backing, weights, compute_dtype) if shape.directory else None
    return OffloadPools(
        cache=cache,
        host=host,
        limits=limits,
        shared=not alone and grid.spec.tp > 1,
        writes=alone or grid.tp_rank == 0,
        membership=membership,
        keys=index_pairs(cache, mine) if shape.directory else None,
    )


def _join(
    grid: Grid, shape: OffloadShape, config: EngineConfig, host: HostPool, backing: Backing, weights: str, compute_dtype: torch.dtype
) -> Membership:
    """The part in the directory next to the pool's file. ValueError on every rank: it cannot be used."""
    assert isinstance(backing, ShmBacking | FileBacking)
    # Whatever changes hidden states and not only their order of work: a prefix may not depend on who computed it.
    products = f"{config.moe_payload} payload, {config.fp8_gemm_backend} FP8 products"
    formats = f"{shape.dtype} rows, {shape.index_dtype or shape.dtype} index keys, computed in {str(compute_dtype).removeprefix('torch.')}"
    formats += f", {products}"
    return join(grid, host, backing.path, Origin(model=_model(config, shape), weights=weights, rows=formats))


def _model(config: EngineConfig, shape: OffloadShape) -> str:
    keys = shape.index_dtype or shape.dtype
    return f"{config.model}@{config.revision or ''}:{shape.dtype}" + ("" if keys == shape.dtype else f"+{keys}")


def _place(grid: Grid, share: HostShare) -> HostPlace:
    """What this rank's backing has to know. Collective."""
    node = gpu_node(grid.device)
    job = int(grid.world.gather_ints([secrets.randbits(62)])[0, 0])
    nodes = grid.world.gather_ints([-1 if node is None else node])[share.first : share.first + share.ranks, 0].tolist()
    return HostPlace(
        job=f"{job:x}-{share.first}",  # nodes may share a folder: two agents on one machine, containers with one /dev/shm
        member=share.member,
        members=share.ranks,
        gpu_node=node,
        node_members=0 if node is None else nodes.count(node),
    )


def _open(
    grid: Grid, shape: OffloadShape, config: EngineConfig, share: HostShare, backing: Backing, limits: TierLimits, first_layer: int
) -> tuple[HostPool, list[HostLayer]]:
    """The host pool, and those of its layers that are this rank's. Collective: nobody takes memory before all know that it is there.

    Raises:
        ValueError: on every rank.
    """
    shared = config.kv_host_backing in SHARED
    layers, parts = (len(share.layers), share.parts) if shared else (len(shape.has_indexer), 1)
    layout = shape.host_layout(limits.n_host_pages * (1 if shape.directory else parts), layers)
    together(grid, lambda: backing.check(layout))
    if grid.rank == 0 and not config.disable_log_stats:  # tens of GiB take seconds
        log.info("making host pools of %.1f GiB (%s)", pool_bytes(layout, config.kv_host_backing) / 2**30, config.kv_host_backing)

    def make() -> HostPool:
        return HostPool(
            layers,
            layout.n_pages,
            layout.page_size,
            layout.row_bytes,
            backing,
            index_page_bytes=layout.index_page_bytes,
            model=_model(config, shape),
            device=grid.device,
            checked=True,
        )

    pool = together(grid, make)
    skipped = first_layer - share.layers.start if shared else 0
    return pool, [pool.layer(skipped + i) for i in range(len(shape.has_indexer))]
