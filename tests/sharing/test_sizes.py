"""Pools with a prefix directory: host pages hold index keys too, and all of the memory asked for; planned bytes are allocated bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rorqual.attention.kernels import mirror_pages_torch as copies
from rorqual.attention.kv.cache import KVCache
from rorqual.attention.kv.host.file import FileBacking
from rorqual.attention.kv.host.pool import HostPool
from rorqual.engine.offload.copies_on_host import CopiesOnHost
from rorqual.engine.offload.host_share import HostShare, asked_bytes, host_pages, whole_pages
from rorqual.engine.offload.index_rows import index_pairs
from rorqual.engine.offload.plan_report import Budget, plan_pools
from rorqual.engine.offload.sizing import host_pages_of
from rorqual.parallel.grid import GridSpec
from tests.offload.test_plan_report import CPU, MIB, allocated, tiny


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "fp8"])
def test_planned_bytes_are_allocated(dtype, tmp_path):
    shape = tiny(dtype=dtype, directory=True)
    share = HostShare.at(GridSpec(dp=2), 1, 2, 5)
    n_bytes = asked_bytes(40 / 1024, "file", share)
    whole, mine = whole_pages(shape, "file", share, n_bytes), host_pages(shape, "file", share, n_bytes)
    assert mine == whole // 2
    layout = shape.host_layout(whole)
    assert layout.offsets[-1] <= n_bytes < shape.host_layout(whole + 1).offsets[-1]
    budget = Budget(device=6 * MIB, host_pages=mine, pool_layers=5, pool_parts=2, pool_pages=whole, backing="file")
    pools = plan_pools("hybrid", [shape], [budget], 512, max_num_seqs=8)
    backing = FileBacking(path=tmp_path / "pool", host_memory=1 << 30, threads=1)
    with HostPool(5, whole, shape.page_size, layout.row_bytes, backing, index_page_bytes=layout.index_page_bytes) as host:
        assert host.n_bytes == pools.host[0] == (tmp_path / "pool").stat().st_size
        cache = cache_of(shape, host, pools.n_pages, pools.n_device_pages)
        assert allocated(cache) == pools.device[0]


def cache_of(shape, host, n_pages, n_device_pages) -> KVCache:
    return KVCache(
        shape.mla, shape.has_indexer, n_pages, shape.page_size, shape.dtype, torch.float32, CPU,
        tiers=shape.tiers(n_pages, n_device_pages), host=[host.layer(i) for i in range(host.n_layers)],
    )  # fmt: skip


def test_a_pool_takes_the_memory_asked_for_and_no_page_less():
    for directory in (False, True):
        shape = tiny(directory=directory, page_size=64)
        for n_bytes in (20 * MIB, 50 * MIB + 12345, 300 * MIB):
            pages = host_pages_of(shape, n_bytes)
            assert shape.host_layout(pages).offsets[-1] <= n_bytes < shape.host_layout(pages + 1).offsets[-1] + 5 * 2 * MIB


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8"])
def test_index_keys_of_all_layers_go_to_the_host_and_back(dtype, tmp_path):
    shape = tiny(dtype=dtype, directory=True)
    layout = shape.host_layout(9)
    backing = FileBacking(path=tmp_path / "pool", host_memory=1 << 30, threads=1)
    with HostPool(5, 9, shape.page_size, layout.row_bytes, backing, index_page_bytes=layout.index_page_bytes) as host:
        cache = cache_of(shape, host, 12, 20)
        pairs = index_pairs(cache, [host.layer(i) for i in range(5)])
        assert len(pairs.pools) == sum(shape.has_indexer)
        for layer in cache.layers:
            if layer.index is not None:
                pool = layer.index.pool.reshape(-1).view(torch.uint8)
                pool.copy_(torch.from_numpy(np.random.default_rng(1).integers(0, 255, pool.numel(), dtype=np.uint8)))
        before = [pool.clone() for pool in pairs.pools]
        logical, pages = torch.tensor([3, 11], dtype=torch.int32), torch.tensor([8, 0], dtype=torch.int32)
        copies.mirror_layers(pairs, logical, pages, page_size=1)
        back = torch.tensor([0, 5], dtype=torch.int32)
        copies.restore_layers(pairs, pages, back, page_size=1)
        for pool, old in zip(pairs.pools, before, strict=True):
            assert (pool[[0, 5]] == old[[3, 11]]).all()
            others = [page for page in range(13) if page not in (0, 5)]
            assert (pool[others] == old[others]).all()


class Mark:
    done = False


def test_copies_end_in_their_order():
    copies, first, second = CopiesOnHost(), Mark(), Mark()
    assert copies.done(7) and not copies.involves(np.array([1], dtype=np.int32))
    copies.started(3, first, np.array([1, 2], dtype=np.int32))
    copies.started(5, second, np.array([4], dtype=np.int32))
    assert copies.done(2) and not copies.done(3)
    assert copies.involves(np.array([9, 4], dtype=np.int32)) and not copies.involves(np.array([3], dtype=np.int32))
    second.done = True  # seen before the first: still not for certain
    assert not copies.done(5)
    first.done = True
    assert copies.done(5) and not copies.involves(np.array([4], dtype=np.int32))
