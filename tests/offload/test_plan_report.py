"""Plans are what the engine makes: bytes of every pool are those allocated, the largest batch is what the scheduler reaches."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from rorqual.attention.kv.cache import KVCache
from rorqual.attention.kv.host.allocator import HostPageAllocator
from rorqual.attention.kv.host.pinned import PinnedBacking
from rorqual.attention.kv.host.pool import HostPool
from rorqual.attention.kv.sizes import KVBytes
from rorqual.attention.mla import layer_has_indexer
from rorqual.engine.hf_config.model_parser import parse_model_config
from rorqual.engine.offload.plan_report import Budget, Pools, plan_pools
from rorqual.engine.offload.sizing import OffloadShape, host_pages_of
from rorqual.engine.request import Request
from rorqual.engine.sampling_params import SamplingParams
from rorqual.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from rorqual.engine.tables import DeviceTables, request_table_bytes
from rorqual.engine.weights.hub import embedded_model

CPU = torch.device("cpu")
MIB = 1 << 20


def tiny(layers: range = range(5), **changes) -> OffloadShape:
    """Layers of rorqual-tiny, which chooses 128 keys."""
    mla = parse_model_config(embedded_model()).attention
    base = {"dtype": "bfloat16", "page_size": 16, "policy": "host", "max_num_seqs": 8, "max_model_len": 512, "step_tokens": 64}
    return OffloadShape(mla=mla, has_indexer=tuple(layer_has_indexer(mla, i) for i in layers), **{**base, **changes})


def budget(shape: OffloadShape, *, device: int, host: int) -> Budget:
    """A rank with a host pool of its own."""
    return Budget(device=device, host_pages=host_pages_of(shape, host))


def tensors(thing) -> int:
    """Bytes of all tensors that an object holds directly."""
    return sum(x.untyped_storage().nbytes() for x in vars(thing).values() if isinstance(x, torch.Tensor))


def allocated(cache: KVCache) -> KVBytes:
    """Bytes of a cache, counted on its tensors."""
    latent = sum(layer.latent.pages.untyped_storage().nbytes() for layer in cache.layers)
    index = sum(layer.index.pages.untyped_storage().nbytes() for layer in cache.layers if layer.index is not None)
    if cache.tables is None:
        return KVBytes(latent=latent, index=index, hot=0, tables=0)
    assert cache.hot is not None
    return KVBytes(latent=latent, index=index, hot=tensors(cache.hot), tables=tensors(cache.tables))


@pytest.mark.parametrize(("dtype", "index"), [("bfloat16", None), ("float32", None), ("fp8", None), ("fp8", "fp4"), ("bfloat16", "fp8")])
@pytest.mark.parametrize("layers", [range(5), range(2, 5)], ids=str)
def test_planned_bytes_are_allocated_with_offloading(dtype: str, index: str | None, layers: range) -> None:
    shape = tiny(layers, dtype=dtype, index_dtype=index)
    pools = plan_pools("hybrid", [shape], [budget(shape, device=6 * MIB, host=24 * MIB)], 512, max_num_seqs=8)
    sizes = shape.tiers(pools.n_pages, pools.n_device_pages)
    layout = shape.host_layout(pools.n_pages)
    with HostPool(len(layers), pools.n_pages, shape.page_size, layout.row_bytes, PinnedBacking(host_memory=1 << 30, threads=1)) as host:
        cache = KVCache(
            shape.mla, shape.has_indexer, pools.n_pages, shape.page_size, dtype, torch.float32, CPU,
            tiers=sizes, host=[host.layer(i) for i in range(len(layers))], index_dtype=index,
        )  # fmt: skip
        assert allocated(cache) == pools.device[0]
        assert cache.n_bytes == pools.device[0].total <= 6 * MIB
        assert host.n_bytes == pools.host[0] <= 24 * MIB


@pytest.mark.parametrize(("dtype", "index"), [("bfloat16", None), ("fp8", None), ("bfloat16", "fp4"), ("fp8", "float32")])
def test_planned_bytes_are_allocated_without(dtype: str, index: str | None) -> None:
    shape = tiny(dtype=dtype, index_dtype=index)
    pools = plan_pools("off", [shape], [budget(shape, device=4 * MIB, host=0)], 512, max_num_seqs=8)
    cache = KVCache(shape.mla, shape.has_indexer, pools.n_pages, shape.page_size, dtype, torch.float32, CPU, index_dtype=index)
    assert allocated(cache) == pools.device[0] and cache.n_bytes == pools.device[0].total <= 4 * MIB
    assert pools.n_device_pages == pools.n_pages and pools.host == (0,)


def test_every_rank_has_the_pages_of_the_smallest() -> None:
    shapes = [tiny(range(2)), tiny(range(2, 5))]
    budgets = [budget(shape, device=9 * MIB, host=16 * MIB) for shape in shapes]
    both = plan_pools("host", shapes, budgets, 512, max_num_seqs=8)
    alone = [plan_pools("host", [shape], [mine], 512, max_num_seqs=8) for shape, mine in zip(shapes, budgets, strict=True)]
    assert both.n_pages == min(p.n_pages for p in alone) and both.n_device_pages == min(p.n_device_pages for p in alone)
    assert len(both.device) == len(both.host) == 2
    assert all(part.total <= budget.device for part, budget in zip(both.device, budgets, strict=True))


def test_tables_of_requests() -> None:
    tables = DeviceTables(max_num_seqs=7, max_len=101, page_size=16, dummy_page=3, device=CPU)
    assert request_table_bytes(max_num_seqs=7, max_len=101, page_size=16) == tensors(tables) + tensors_of_sampling(tables)


def tensors_of_sampling(tables: DeviceTables) -> int:
    sampling = tables.sampling
    return sum(x.untyped_storage().nbytes() for x in (sampling._floats, sampling._ints, sampling.ban_ids, sampling.ban_until))


# ---- the largest batch


def reached(pools: Pools, shape: OffloadShape, mode: str, context: int) -> tuple[int, int]:
    """Most requests of ``context`` tokens that decode at once, and preemptions, when twice as many as planned for wait."""
    slots = 2 * pools.batch + 2
    limits = None if mode == "off" else replace(shape, policy=mode).limits(pools.n_pages, pools.n_device_pages)
    layout = shape.host_layout(pools.n_pages)
    scheduler = Scheduler(
        SchedulerConfig(
            max_num_seqs=slots, max_num_batched_tokens=shape.step_tokens, page_size=shape.page_size, n_pages=pools.n_pages,
            max_model_len=context, overlap=False, tier=limits,
        ),
        None if limits is None else HostPageAllocator(pools.n_pages, layout.extent_pages),
    )  # fmt: skip
    for index in range(slots):
        prompt = (1 + np.random.default_rng(index).integers(0, 1 << 30, context - 60)).tolist()
        params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, seed=index)
        scheduler.add(Request(request_id=str(index), index=index, prompt_ids=prompt, params=params))
    most = 0
    while scheduler.has_work:
        plan = scheduler.schedule()
        if not plan.n_rows:
            scheduler.skip(plan.step)
            continue
        most = max(most, scheduler.n_running)
        scheduler.complete(plan.step, [2] * int(plan.samples.sum()))
    scheduler.check()
    return most, scheduler.stats.preemptions


@pytest.mark.parametrize("mode", ["off", "host", "hybrid"])
@pytest.mark.parametrize("context", [1024, 2048])
@pytest.mark.parametrize("host", [24 * MIB, 96 * MIB], ids=["little host memory", "much host memory"])
def test_the_scheduler_reaches_the_planned_batch(mode: str, context: int, host: int) -> None:
    shape = tiny(max_model_len=context, step_tokens=1024, page_size=64)
    pools = plan_pools(mode, [shape], [budget(shape, device=12 * MIB, host=host)], context, max_num_seqs=None)
    assert pools.max_num_seqs == pools.batch
    assert reached(pools, shape, mode, context) == (pools.batch, 0)


def test_slots_are_those_that_fill_and_the_next_one_would_not() -> None:
    shape = tiny(max_model_len=2048)
    budgets = [budget(shape, device=12 * MIB, host=96 * MIB)]
    best = plan_pools("host", [shape], budgets, 2048, max_num_seqs=None)
    assert best.batch == best.max_num_seqs > 1
    more = plan_pools("host", [shape], budgets, 2048, max_num_seqs=best.batch + 1)
    assert more.batch <= best.batch and more.limited_by == best.limited_by
    fewer = plan_pools("host", [shape], budgets, 2048, max_num_seqs=2)
    assert (fewer.batch, fewer.limited_by) == (2, "max_num_seqs")


def test_what_does_not_fit_is_refused_with_the_reason() -> None:
    shape = tiny()
    for mode in ("off", "host"):
        with pytest.raises(ValueError, match="fit"):
            plan_pools(mode, [shape], [budget(shape, device=1000, host=24 * MIB)], 512, max_num_seqs=None)
    with pytest.raises(ValueError, match="no room for one page; raise kv_host_memory"):
        plan_pools("hybrid", [shape], [budget(shape, device=6 * MIB, host=1000)], 512, max_num_seqs=None)
    with pytest.raises(ValueError, match="no request of 512 tokens fits: the pool holds 16"):
        plan_pools("off", [replace(shape, tokens=16)], [budget(shape, device=6 * MIB, host=0)], 512, max_num_seqs=2)
