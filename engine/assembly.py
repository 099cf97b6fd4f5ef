"""From settings and a checkpoint to the parts of one rank: weights, cache, tables, graphs, scheduler."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from ..attention.kv.cache import KVCache, kv_bytes_per_token
from ..attention.kv.sizes import kv_bytes
from ..attention.mla import layer_has_indexer
from ..parallel.agree import together
from ..parallel.grid import Grid
from ..parallel.store import ranks_of_host
from .config import EngineConfig
from .exchange_watch import ExchangeWatch, Place
from .expert_settings import halves_from
from .graph_batch import decode_batch
from .graph_key import context_classes, graph_sizes
from .graphs import DecodeGraphs
from .memory import free_bytes, size_pool
from .model_config import ModelConfig
from .models.build import Stage
from .models.targets import is_known
from .offload.host_pages import HostPages
from .offload.mover import Mover
from .offload.pools import OffloadPools, make_pools
from .offload.sizing import OffloadShape
from .offload.tier_places import TierPlaces
from .resolved import index_dtype, kv_dtype
from .runner import Runner
from .scheduling.scheduler import Scheduler, SchedulerConfig
from .sharing.prefix_share import PrefixShare
from .tables import DeviceTables
from .weights.dummy import fill_dummy
from .weights.fingerprint import weights_fingerprint
from .weights.loader import LoadReport, load_weights


def fill_weights(stage: Stage, folder: Path, config: EngineConfig, model: ModelConfig, *, progress: bool) -> LoadReport | None:
    """Read this rank's weights, or make them up (then there is no report)."""
    report = None
    if config.load_format == "dummy":
        fill_dummy(stage.targets, config.seed)
    else:
        report = load_weights(stage.targets, folder, model=model, known=lambda name: is_known(name, model), progress=progress)
    stage.model.settle()
    stage.model.fuse(stage.attention_ops, stage.moe_ops)
    if stage.attention_ops is not None or stage.moe_ops is not None:
        stage.targets.clear()  # stacking moved weights; places of the old ones would keep their memory
        torch.cuda.empty_cache()
    return report


def make_cache(grid: Grid, stage: Stage, config: EngineConfig, model: ModelConfig, dtype: torch.dtype, max_len: int) -> KVCache:
    """The paged cache of this rank's layers, with as many pages as the smallest pool of the world has. Collective.

    Raises:
        ValueError: on every rank, when no page fits on one of them, or not what was asked for.
    """
    mla, rows, keys = model.attention, kv_dtype(config, dtype), index_dtype(config, model, dtype)
    has_indexer = [layer_has_indexer(mla, layer) for layer in stage.layers]
    per_token = kv_bytes_per_token(mla, has_indexer, rows, keys)
    local = ranks_of_host(grid.world.size)
    pages = together(grid, lambda: size_pool(config, grid.device, local, max_model_len=max_len, bytes_per_token=per_token))
    pages = int(grid.world.gather_ints([pages]).min())
    cache = KVCache(mla, has_indexer, pages, config.page_size, rows, dtype, grid.device, index_dtype=keys)
    planned = kv_bytes(mla, has_indexer, rows, n_pages=pages, page_size=config.page_size, index_dtype=keys).total
    assert cache.n_bytes == planned, f"planned {planned} bytes on the device, allocated {cache.n_bytes}"
    return cache


def offload_shape(stage_layers: range, config: EngineConfig, model: ModelConfig, dtype: torch.dtype, max_len: int) -> OffloadShape:
    """What the pool sizes of a rank with ``stage_layers`` follow from, with offloading."""
    return OffloadShape(
        mla=model.attention,
        has_indexer=tuple(layer_has_indexer(model.attention, layer) for layer in stage_layers),
        dtype=kv_dtype(config, dtype),
        index_dtype=index_dtype(config, model, dtype),
        page_size=config.page_size,
        policy=config.kv_offload,
        max_num_seqs=config.max_num_seqs,
        max_model_len=max_len,
        step_tokens=config.max_num_batched_tokens,
        hot_slots=config.kv_hot_slots,
        hot_slots_max=config.kv_hot_slots_max,
        tokens=config.max_total_tokens,
        device_tokens=config.kv_device_tokens,
        scored=config.kv_hot_policy == "score",
        directory=config.kv_prefix_directory,
    )


def make_offload(
    grid: Grid, stage: Stage, config: EngineConfig, model: ModelConfig, dtype: torch.dtype, max_len: int, folder: Path
) -> OffloadPools | None:
    """The pools of both tiers, and the part in a prefix directory; None without offloading. ``folder``: of the model. Collective.

    Raises:
        ValueError: on every rank, when the model is dense or memory is short on one of them.
    """
    if config.kv_offload == "off":
        return None
    shape = offload_shape(stage.layers, config, model, dtype, max_len)
    together(grid, lambda: shape.most_hot_pages)
    available = free_bytes(grid.device, config, ranks_of_host(grid.world.size))
    weights = ""
    if config.kv_prefix_directory:
        weights = weights_fingerprint(folder, made_up=config.load_format == "dummy", seed=config.seed)
    return make_pools(
        grid,
        shape,
        config,
        weights=weights,
        n_layers=model.n_layers,
        first_layer=stage.layers.start,
        available=available,
        compute_dtype=dtype,
    )


def make_runner(
    grid: Grid,
    stage: Stage,
    cache: KVCache,
    config: EngineConfig,
    dtype: torch.dtype,
    max_len: int,
    *,
    debug: bool,
    pools: OffloadPools | None = None,
) -> Runner:
    """The runner and its device tables; in debug mode the empty cache is poisoned."""
    tables = DeviceTables(
        max_num_seqs=config.max_num_seqs, max_len=max_len, page_size=config.page_size, dummy_page=cache.dummy_page, device=grid.device
    )
    if debug:
        cache.poison(range(cache.n_pages))
    mover = None
    if pools is not None:
        topk = pools.limits.topk
        mover = Mover(
            cache=cache, pool=pools.host, staging=tables.staging, topk=topk, writes=pools.writes, shared=pools.shared, keys=pools.keys,
            debug=debug,
        )  # fmt: skip
    places = None if mover is None else mover.places
    graphs = make_graphs(stage, cache, tables, config, max_len, places) if uses_graphs(config, grid, stage) else None
    grid.before_close.append(tables.staging.streams.release_graphs)
    return Runner(
        grid=grid, stage=stage, cache=cache, tables=tables, dtype=dtype, debug=debug, graphs=graphs, mover=mover,
        halves_from=halves_from(config), watch=make_watch(grid, stage, tables),
    )  # fmt: skip


def make_watch(grid: Grid, stage: Stage, tables: DeviceTables) -> ExchangeWatch | None:
    """What looks after the exchanges of this rank's experts; None where they are not spread."""
    if stage.dispatcher is None or stage.dispatcher.spec.n_ranks == 1:
        return None
    return ExchangeWatch(stage.dispatcher, tables.staging.streams, grid.tp, Place.of(grid))


def uses_graphs(config: EngineConfig, grid: Grid, stage: Stage) -> bool:
    """Whether decode steps of this rank are captured; the same on all ranks, as their settings and devices are."""
    return why_eager(config, grid, stage) is None


def why_eager(config: EngineConfig, grid: Grid, stage: Stage) -> str | None:
    """What keeps decode steps from being captured; None when nothing does."""
    if grid.device.type != "cuda":
        return "there is no CUDA device"
    if config.enforce_eager:
        return "enforce_eager asks for it"
    if grid.spec.pp > 1:
        return "a step of several pipeline stages is no single graph"
    if grid.spec.tp > 1:
        return "collectives of tensor parallelism are not captured"
    if config.expert_distribution_recorder_mode == "per_token":
        return "the choices of every token are recorded, step by step"
    if not stage.capturable:
        return "a kernel backend or the all-to-all waits for the device in every step"
    return None


def make_graphs(
    stage: Stage,
    cache: KVCache,
    tables: DeviceTables,
    config: EngineConfig,
    max_len: int,
    places: TierPlaces | None = None,
) -> DecodeGraphs:
    """The graphs of this rank's decode steps, none captured yet."""
    indexer = stage.model.config.attention.indexer
    return DecodeGraphs(
        model=stage.model,
        cache=cache,
        tables=tables,
        page_size=config.page_size,
        streams=tables.staging.streams,
        sizes=graph_sizes(config.max_num_seqs, config.cuda_graph_max_bs, config.cuda_graph_bs),
        contexts=context_classes(max_len, None if indexer is None else indexer.topk),
        places=places,
        dense=0 if indexer is None else indexer.topk,
        **({} if halves_from(config) is None else {"make_batch": partial(decode_batch, halves_from=halves_from(config))}),
    )


def make_scheduler(
    config: EngineConfig,
    model: ModelConfig,
    *,
    n_pages: int,
    max_len: int,
    pools: OffloadPools | None = None,
    share: PrefixShare | None = None,
) -> Scheduler:
    """The scheduler of one replica."""
    if share is not None:
        host_pages: HostPages | None = share.pages
    else:
        host_pages = None if pools is None else pools.host_pages()
    return Scheduler(
        SchedulerConfig(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            page_size=config.page_size,
            n_pages=n_pages,
            max_model_len=max_len,
            pp=config.pipeline_parallel_size,
            overlap=not config.disable_overlap_schedule,
            prefix_caching=config.enable_prefix_caching,
            eos_token_ids=model.eos_token_ids,
            seed=config.seed,
            tier=None if pools is None else pools.limits,
        ),
        host_pages,
        share,
    )
