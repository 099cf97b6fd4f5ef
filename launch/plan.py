"""What a model takes on given machines with and without its KV in host memory, and how many requests run at once: nothing is allocated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..attention.kernels.tier_most import MOST_REQUESTS
from ..attention.kv.layout import index_row_bytes, latent_row_bytes
from ..engine.assembly import offload_shape
from ..engine.config import EngineConfig, check_config
from ..engine.eplb.room import expert_room
from ..engine.eplb_settings import uses_placement
from ..engine.expert_settings import exchange_bytes, exchange_spec
from ..engine.hf_config.model_parser import parse_model_config
from ..engine.model_config import ModelConfig
from ..engine.models.skeleton import Place, Skeleton, make_skeleton
from ..engine.offload.host_share import SHARED, HostShare, asked_bytes, check_whole, host_pages, whole_pages
from ..engine.offload.link_load import link_loads
from ..engine.offload.plan_report import Budget, Pools, plan_pools
from ..engine.offload.sizing import OffloadShape
from ..engine.resolved import resolve_dtype
from ..engine.tables import request_table_bytes
from ..engine.weights.hub import resolve_model
from ..parallel.grid import GridSpec

MODES = ("off", "host", "hybrid")
#: device memory beside torch's tensors: the CUDA context, loaded kernels, the allocator's rounding; on an H200 it was 630 to 760 MiB
CONTEXT_BYTES = 768 << 20


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What one rank runs on."""

    gpu_bytes: int  # memory of its GPU
    host_bytes: int  # host memory that the pools of one host may take
    ranks_per_host: int
    link_bytes_per_s: float  # what the link carries of scattered rows


def plan(config: EngineConfig, spec: GridSpec, machine: Machine, *, context: int, max_num_seqs: int | None) -> dict[str, Any]:
    """Bytes by part, capacity and load of the link, for offload off, host and hybrid.

    Args:
        config: settings of the engine; ``max_model_len`` is replaced by ``context``.
        spec: degrees of parallelism.
        machine: memory and link.
        context: tokens of a request, output included.
        max_num_seqs: request slots, None for as many as can be filled.

    Raises:
        ValueError: no such model, a layout that does not fit it, a setting out of range, weights that do not fit.
    """
    config = replace(config, max_model_len=context, kv_host_memory=machine.host_bytes / 2**30)
    if uses_placement(config):
        config = replace(config, data_parallel_size=spec.dp, tensor_parallel_size=spec.tp, pipeline_parallel_size=spec.pp)
    _check(replace(config, pipeline_parallel_size=spec.pp) if config.kv_prefix_directory else config)
    if config.fp8_gemm_backend == "auto":  # on a GPU; the machine that plans need not have one
        config = replace(config, fp8_gemm_backend="triton")
    model = parse_model_config(resolve_model(config.model, config.revision, weights=False))
    if context > model.max_position:
        raise ValueError(f"--context {context} is more than the model's {model.max_position} positions; use at most {model.max_position}")
    dtype = resolve_dtype(config, model)
    ranks = [make_skeleton(model, config, Place.planned(spec, stage), torch.device("cuda"), dtype) for stage in range(spec.pp)]
    shapes = [offload_shape(rank.layers, config, model, dtype, context) for rank in ranks]
    exchange = _exchange(config, machine, model, spec, ranks[0], dtype)
    budgets = [
        _budget(config, machine, shape, rank, stage, spec, model.n_layers, exchange)
        for stage, (rank, shape) in enumerate(zip(ranks, shapes, strict=True))
    ]
    pools, refused = _all_modes(shapes, budgets, context, max_num_seqs)
    tables = {
        mode: request_table_bytes(max_num_seqs=found.max_num_seqs, max_len=context, page_size=config.page_size)
        for mode, found in pools.items()
    }
    return {
        "model": config.model,
        "context": context,
        "layout": {"pp": spec.pp, "dp": spec.dp, "tp": spec.tp, "ep": ranks[0].spread},
        "experts": [expert_room(config, rank, model) for rank in ranks] if model.moe is not None else [],
        "machine": _machine(config, machine),
        "kv": _rows(shapes[0]),
        "stages": [_stage(config, machine, i, rank, pools, tables, exchange) for i, rank in enumerate(ranks)],
        "modes": {mode: _capacity(pools.get(mode), config.page_size, spec.dp) for mode in MODES},
        "refused": refused,
        "link": _link(shapes, machine, pools, context, spec.dp),
    }


def _check(config: EngineConfig) -> None:
    """Refuse settings out of range. The pool need not be there, and what only offloading refuses is said beside what works without."""
    path = None if config.kv_host_backing == "pinned" else config.kv_host_path or "planned"
    slots = min(config.max_num_seqs, MOST_REQUESTS)
    check_config(replace(config, kv_offload="host", kv_host_path=path, max_num_seqs=slots, enable_two_batch_overlap=False))


def _budget(
    config: EngineConfig, machine: Machine, shape: OffloadShape, rank: Skeleton, stage: int, spec: GridSpec, layers: int, exchange: int
) -> Budget:
    """What the first rank of a stage has for its cache, and of which host pool."""
    weights = rank.n_bytes + rank.copy_bytes + rank.staging
    device = int(machine.gpu_bytes * config.gpu_memory_utilization) - weights - exchange - CONTEXT_BYTES
    if device < 0:
        raise ValueError(
            f"the weights of a rank take {weights / 1e9:.1f} GB, {config.gpu_memory_utilization:.0%} of {machine.gpu_bytes / 1e9:.1f} GB "
            "may be used; use more ranks (pp, tp, or dp for the experts), or a GPU with more memory"
        )
    share = HostShare.at(spec, stage * spec.dp * spec.tp, machine.ranks_per_host, layers)
    check_whole(config, share)
    shared, asked = config.kv_host_backing in SHARED, asked_bytes(machine.host_bytes / 2**30, config.kv_host_backing, share)
    return Budget(
        device=device,
        host_pages=host_pages(shape, config.kv_host_backing, share, asked),
        pool_pages=whole_pages(shape, config.kv_host_backing, share, asked) if shape.directory else 0,
        pool_layers=len(share.layers) if shared else 0,
        pool_parts=share.parts if shared else 1,
        backing=config.kv_host_backing,
    )


def _exchange(config: EngineConfig, machine: Machine, model: ModelConfig, spec: GridSpec, rank: Skeleton, dtype: torch.dtype) -> int:
    """Bytes of the workspace through which a rank's tokens reach experts on other ranks."""
    if model.moe is None or rank.placement is None or rank.spread == 1:
        return 0
    together = spec.dp * spec.tp <= machine.ranks_per_host
    backend = config.moe_a2a_backend if config.moe_a2a_backend != "auto" else "symm" if together else "torch_node"
    terms = exchange_spec(config, model, n_ranks=rank.spread, tp=spec.tp, n_slots=rank.placement.n_slots, dtype=dtype)
    return exchange_bytes(terms, backend)


def _all_modes(
    shapes: Sequence[OffloadShape], budgets: Sequence[Budget], context: int, max_num_seqs: int | None
) -> tuple[dict[str, Pools], dict[str, str]]:
    """Pools by mode, and why there are none for the others."""
    pools: dict[str, Pools] = {}
    refused: dict[str, str] = {}
    for mode in MODES:
        try:
            pools[mode] = plan_pools(mode, shapes, budgets, context, max_num_seqs=max_num_seqs)
        except ValueError as error:
            refused[mode] = str(error)
    return pools, refused


def _machine(config: EngineConfig, machine: Machine) -> dict[str, Any]:
    return {
        "gpu_memory": machine.gpu_bytes,
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "host_memory": machine.host_bytes,
        "ranks_per_host": machine.ranks_per_host,
        "host_backing": config.kv_host_backing,
        "link": machine.link_bytes_per_s,
    }


def _rows(shape: OffloadShape) -> dict[str, Any]:
    sparse, size = shape.mla.indexer is not None, shape.page_size
    return {
        "dtype": shape.dtype,
        "page_size": shape.page_size,
        "latent_row_bytes": latent_row_bytes(shape.mla, shape.dtype),
        "index_dtype": shape.index_dtype or shape.dtype,
        "index_row_bytes": index_row_bytes(shape.mla, shape.index_dtype or shape.dtype),
        "topk": None if shape.mla.indexer is None else shape.topk,
        "hot_rows": shape.hot_pages * size if sparse else None,
        "most_hot_rows": shape.most_hot_pages * size if sparse else None,
    }


def _stage(
    config: EngineConfig,
    machine: Machine,
    place: int,
    rank: Skeleton,
    pools: dict[str, Pools],
    tables: dict[str, int],
    exchange: int,
) -> dict[str, Any]:
    """Bytes of a rank of one stage by part; the parts on the device add up to the GPU's memory."""
    weights = rank.part_bytes() | ({"bf16 copies": rank.copy_bytes} if rank.copy_bytes else {})
    reserve = machine.gpu_bytes - int(machine.gpu_bytes * config.gpu_memory_utilization)
    modes: dict[str, Any] = {}
    for mode in MODES:
        if mode not in pools:
            modes[mode] = None
            continue
        kv = pools[mode].device[place]
        device = {
            "index keys": kv.index,
            "latent rows": kv.latent,
            "hot buffers: what they hold": kv.hot,
            "page tables, scratch": kv.tables,
            "CUDA context (assumed)": CONTEXT_BYTES,
            **({"expert exchange": exchange} if exchange else {}),
            **({"experts on the move": rank.staging} if rank.staging else {}),
            "request tables": tables[mode],
            "reserve: graphs, workspace": reserve - tables[mode],
        }
        device["not used"] = machine.gpu_bytes - sum(weights.values()) - sum(device.values())
        modes[mode] = {"device": device, "device_total": sum(weights.values()) + sum(device.values()), "host_pool": pools[mode].host[place]}
    return {"stage": place, "layers": [rank.layers.start, rank.layers.stop], "weights": weights, "modes": modes}


def _capacity(pools: Pools | None, page_size: int, dp: int) -> dict[str, Any] | None:
    if pools is None:
        return None
    return {
        "pages": pools.n_pages,
        "device_pages": pools.n_device_pages,
        "pool_tokens": pools.n_pages * page_size,
        "device_tokens": pools.n_device_pages * page_size,
        "max_num_seqs": pools.max_num_seqs,
        "largest_batch": pools.batch,
        "largest_batch_all": pools.batch * dp,
        "limited_by": pools.limited_by,
        "hot_rows": [{"requests": requests, "rows": rows} for requests, rows in pools.lease_rows],
    }


def _link(shapes: Sequence[OffloadShape], machine: Machine, pools: dict[str, Pools], context: int, dp: int) -> list[dict[str, float]]:
    """Loads of the link of the stage with the most layers; its requests are all offloaded."""
    if shapes[0].mla.indexer is None or not any(mode in pools for mode in ("host", "hybrid")):
        return []
    layers, batch = max(len(s.has_indexer) for s in shapes), max(pools[mode].batch for mode in ("host", "hybrid") if mode in pools)
    row = latent_row_bytes(shapes[0].mla, shapes[0].dtype)
    found = []
    for load in link_loads(layers=layers, topk=shapes[0].topk, row_bytes=row, link_bytes_per_s=machine.link_bytes_per_s, context=context):
        milliseconds = 1e3 * batch * load.bytes_per_token / machine.link_bytes_per_s
        found.append(vars(load) | {"tokens_per_s_all": load.tokens_per_s * dp, "batch": batch, "batch_ms": milliseconds})
    return found
