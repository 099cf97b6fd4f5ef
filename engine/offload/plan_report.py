"""How many requests of one length fit, and what that takes: the pools an engine with the same settings makes, without making them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ...attention.kv.host.layout import pool_bytes
from ...attention.kv.layout import kv_bytes_per_token
from ...attention.kv.sizes import KVBytes, kv_bytes
from ..config import EngineConfig
from ..memory import pool_pages
from .leases import lease_steps
from .sizing import OffloadShape, device_pages_of, offload_sizes
from .tier_limits import UNDER_WAY, TierLimits

_MOST_SEQS = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What one rank may spend on its cache."""

    device: int  # bytes
    host_pages: int  # of its replica, as ``pools.host_pages`` says
    pool_layers: int = 0  # layers in the host pool that the rank maps, 0: its own
    pool_parts: int = 1  # replicas that share that pool
    pool_pages: int = 0  # with a prefix directory: of that pool, whatever its replicas use of it
    backing: str = "pinned"  # kind of the pool, for the header that files have


@dataclass(frozen=True, kw_only=True)
class Pools:
    """Pools of one way of offloading, and how many requests they hold at once."""

    n_pages: int  # logical pages of a replica
    n_device_pages: int  # latent pages on the device, the same number where nothing is offloaded
    max_num_seqs: int  # request slots they are made for
    batch: int  # most requests of the planned length at once
    limited_by: str
    lease_rows: tuple[tuple[int, int], ...] = ()  # (requests, hot rows that each of up to so many has); none where nothing is offloaded
    device: tuple[KVBytes, ...]  # of a rank of each stage
    host: tuple[int, ...]  # bytes of the host pool that a rank of each stage maps


def largest_batch(context: int, *, page_size: int, n_pages: int, max_num_seqs: int, limits: TierLimits | None = None) -> tuple[int, str]:
    """Requests of ``context`` tokens, their output included, that run at once without taking pages from each other, and why no more.

    ``limits`` are those of the residency, None where every page is on the device.
    """
    pages = -(-context // page_size)
    found = [(max_num_seqs, "max_num_seqs"), (n_pages // pages, "pages of the pool")]
    if limits is not None:
        each = min(limits.hot_pages, pages) + UNDER_WAY
        found.append((max(1, (limits.n_device_pages - limits.step_pages) // each), "device pages for hot rows"))
    return min(found, key=lambda limit: limit[0])


def plan_off(shapes: Sequence[OffloadShape], budgets: Sequence[Budget], context: int) -> Pools:
    """Pools without offloading; ``shapes`` and ``budgets`` of a rank of each stage.

    Raises:
        ValueError: not one page fits.
    """
    shape, longest = shapes[0], shapes[0].max_model_len
    config = EngineConfig(page_size=shape.page_size, max_num_seqs=shape.max_num_seqs, max_total_tokens=shape.tokens)
    per_token = [kv_bytes_per_token(s.mla, s.has_indexer, s.dtype, s.index_dtype) for s in shapes]
    size = shape.page_size
    pages = min(
        pool_pages(config, max_model_len=longest, bytes_per_token=each, available=budget.device)
        for each, budget in zip(per_token, budgets, strict=True)
    )
    if any((pages + 1) * size * each > budget.device for each, budget in zip(per_token, budgets, strict=True)):
        raise ValueError(f"max_total_tokens {shape.tokens} does not fit on the device")
    batch, why = largest_batch(context, page_size=size, n_pages=pages, max_num_seqs=shape.max_num_seqs)
    device = tuple(kv_bytes(s.mla, s.has_indexer, s.dtype, n_pages=pages, page_size=size, index_dtype=s.index_dtype) for s in shapes)
    return Pools(
        n_pages=pages,
        n_device_pages=pages,
        max_num_seqs=shape.max_num_seqs,
        batch=batch,
        limited_by="device memory" if why == "pages of the pool" else why,
        device=device,
        host=(0,) * len(shapes),
    )


def plan_tiers(shapes: Sequence[OffloadShape], budgets: Sequence[Budget], context: int) -> Pools:
    """Pools with the offloading that ``shapes`` name.

    Raises:
        ValueError: a dense model, or too little memory on the device or the host.
    """
    shape = shapes[0]
    pairs = list(zip(shapes, budgets, strict=True))
    sizes = device_pages_of([offload_sizes(s, device_bytes=b.device, host_pages=b.host_pages) for s, b in pairs])
    limits = shape.limits(sizes.n_pages, sizes.n_device_pages)
    batch, why = largest_batch(context, page_size=shape.page_size, n_pages=sizes.n_pages, max_num_seqs=shape.max_num_seqs, limits=limits)
    if why == "pages of the pool":
        why = "host memory" if sizes.n_pages >= min(b.host_pages for b in budgets) else "device memory for index keys"
    layouts = [s.host_layout(b.pool_pages if s.directory else sizes.n_pages * b.pool_parts, b.pool_layers or None) for s, b in pairs]
    return Pools(
        n_pages=sizes.n_pages,
        n_device_pages=sizes.n_device_pages,
        max_num_seqs=shape.max_num_seqs,
        batch=batch,
        limited_by=why,
        lease_rows=lease_steps(limits, batch, context) if context > limits.topk else (),
        device=tuple(s.device_bytes(sizes.n_pages, sizes.n_device_pages) for s in shapes),
        host=tuple(pool_bytes(layout, b.backing) for layout, b in zip(layouts, budgets, strict=True)),
    )


def plan_pools(mode: str, shapes: Sequence[OffloadShape], budgets: Sequence[Budget], context: int, *, max_num_seqs: int | None) -> Pools:
    """Pools of ``mode`` (off, host or hybrid); without ``max_num_seqs`` for as many slots as there can be requests.

    Raises:
        ValueError: not one request fits.
    """

    def plan(slots: int) -> Pools:
        made = [replace(shape, policy="host" if mode == "off" else mode, max_num_seqs=slots) for shape in shapes]
        found = plan_off(made, budgets, context) if mode == "off" else plan_tiers(made, budgets, context)
        if found.batch < 1:
            raise ValueError(
                f"no request of {context} tokens fits: the pool holds {found.n_pages * shapes[0].page_size} ({found.limited_by})"
            )
        return found

    return plan(max_num_seqs) if max_num_seqs is not None else _most_slots(plan)


def _most_slots(plan: Callable[[int], Pools]) -> Pools:
    """The pools of the most slots that all fill: more of them take memory from those there are."""

    def full(slots: int) -> Pools | None:
        try:
            found = plan(slots)
        except ValueError:
            return None
        return found if found.batch >= slots else None

    best = full(1) or plan(1)
    good, bad = 1, 2
    while bad < _MOST_SEQS and (found := full(bad)) is not None:
        best, good, bad = found, bad, 2 * bad
    while bad - good > 1:
        middle = (good + bad) // 2
        found = full(middle)
        if found is None:
            bad = middle
        else:
            best, good = found, middle
    limit = _limit_of(plan, good + 1)
    return best if limit is None else replace(best, limited_by=limit)


def _limit_of(plan: Callable[[int], Pools], slots: int) -> str | None:
    """What keeps ``slots`` requests from running."""
    try:
        return plan(slots).limited_by
    except ValueError:
        return None
