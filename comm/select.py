"""Which backend a grid gets, and why not another."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from ..parallel.grid import Grid
from .base import BaseDispatcher
from .checks import check_agreement, check_caps, check_not_capturing, check_spec
from .dispatcher import Dispatcher, EPSpec
from .heap.shm import ShmHeap, free_bytes
from .heap.symm import SymmHeap, check_places
from .limits import check_room
from .local import LocalDispatcher
from .peer import PeerDispatcher
from .reasons import VERDICTS, n_nodes
from .self_test import self_test
from .torch_flat import TorchDispatcher
from .torch_node import TorchNodeDispatcher
from .torch_static import TorchStaticDispatcher

BACKENDS = ("auto", *VERDICTS)
_CAPS = {
    "local": LocalDispatcher.caps,
    "torch": TorchDispatcher.caps,
    "torch_node": TorchNodeDispatcher.caps,
    "torch_static": TorchStaticDispatcher.caps,
    "symm": PeerDispatcher.caps,
    "shm": PeerDispatcher.caps,
}


def explain(grid: Grid, spec: EPSpec | None = None) -> list[tuple[str, bool, str]]:
    """(backend, usable on this grid and for ``spec``, why) for every backend. Looks at this process only."""
    rows = []
    for name, verdict in VERDICTS.items():
        usable, reason = verdict(grid)
        if usable and spec is not None and name in _CAPS:
            try:
                check_caps(spec, name, _CAPS[name])
            except ValueError as error:
                usable, reason = False, str(error)
        rows.append((name, usable, reason))
    return rows


def choose(backend: str, grid: Grid, spec: EPSpec | None = None) -> str:
    """The name of the backend that ``backend`` means on this grid. ValueError if it is unknown or cannot work here.

    "auto": symm where all GPUs are in one host; else torch_node over several hosts of as many ranks each; else torch.
    """
    if backend not in BACKENDS:
        raise ValueError(f"unknown all-to-all backend {backend!r}; known: {', '.join(BACKENDS)}")
    rows = {name: (usable, reason) for name, usable, reason in explain(grid, spec)}
    if backend == "auto":
        several = "torch_node" if n_nodes(grid) > 1 else "torch"
        backend = next((name for name in ("symm", several) if rows[name][0]), "torch")
    usable, reason = rows[backend]
    if not usable:
        raise ValueError(f"all-to-all backend {backend!r} cannot be used here: {reason}")
    return "local" if grid.ep.size == 1 else backend


def make_dispatcher(backend: str, grid: Grid, spec: EPSpec, *, limit_bytes: int | None = None) -> Dispatcher:
    """The dispatcher of this rank. Collective over the expert group, unless the experts are all on this rank.

    A spec of one rank on a grid of several (experts not spread) takes the local backend. Backends over peer memory send known
    tokens through themselves before they are handed out.

    Args:
        backend: one of ``BACKENDS``, the same on all ranks.
        grid: who is there.
        spec: the same on all ranks.
        limit_bytes: most bytes of workspace, the same on all ranks; None: what memory there is.

    Raises:
        ValueError: an unknown or unusable backend, a spec that does not fit the group or the limit, ranks that differ.
        RuntimeError: the backend works, but not rightly; or a CUDA graph is being captured.
    """
    if spec.n_ranks == 1 and backend in ("local", "auto"):
        return LocalDispatcher(spec)
    check_not_capturing(grid.device)
    check_spec(spec, grid.ep.size)
    name = _agreed(backend, grid, spec)
    if grid.ep.size > 1:
        check_agreement(spec, name, grid.ep)  # before anything that a spec decides on one rank alone
    if limit_bytes is not None and name in _PEERS:
        check_room(spec, limit_bytes, name)
    return _make(name, grid, spec)


def _agreed(backend: str, grid: Grid, spec: EPSpec) -> str:
    """``choose`` on all ranks: one that cannot, or chose another, stops all."""
    if grid.ep.size == 1:
        return choose(backend, grid, spec)
    names = list(VERDICTS)
    try:
        name, problem = choose(backend, grid, spec), None
    except ValueError as error:
        name, problem = "", error
    chosen = [int(n) for n in grid.ep.gather_ints([names.index(name) if name else -1])[:, 0]]
    if problem is not None:
        raise problem
    if -1 in chosen:
        bad = [rank for rank, n in zip(grid.ep.ranks, chosen, strict=True) if n < 0]
        raise ValueError(f"all-to-all backend {backend!r} cannot be used on ranks {bad}; their own errors say why")
    if len(set(chosen)) == 1:
        return _where_mapped(name, grid) if backend == "auto" else name
    if backend == "auto":  # some ranks see less than others: what works everywhere
        return "torch"
    found = ", ".join(f"{names[n]} on rank {rank}" for rank, n in zip(grid.ep.ranks, chosen, strict=True))
    raise ValueError(f"the ranks of the expert group disagree on the all-to-all backend: {found}")


def _where_mapped(name: str, grid: Grid) -> str:
    """``name``, which "auto" means; torch in place of symm if the ranks, all together, find that they cannot map each other's memory."""
    if name == "symm":
        try:
            check_places(grid.ep, grid.device)
        except ValueError as error:
            logging.getLogger("rorqual").warning("%s; auto takes torch", error)
            return "torch"
    return name


def _check_free(grid: Grid, spec: EPSpec, free: int, name: str) -> None:
    """Refuse, on all ranks, a workspace that does not fit into what the rank with the least memory has free."""
    check_room(spec, int(grid.ep.gather_ints([free]).min()), name)


def _symm(grid: Grid, spec: EPSpec) -> BaseDispatcher:
    heap = SymmHeap(grid.ep, grid.device)
    _check_free(grid, spec, torch.cuda.mem_get_info(grid.device)[0], "symm")
    return PeerDispatcher(grid.ep, spec, heap, device=grid.device)


def _shm(grid: Grid, spec: EPSpec) -> BaseDispatcher:
    _check_free(grid, spec, free_bytes() // grid.ep.size, "shm")
    return PeerDispatcher(grid.ep, spec, ShmHeap(grid.ep))


def _nvshmem(grid: Grid, spec: EPSpec) -> BaseDispatcher:
    from .nvshmem.dispatcher import NvshmemDispatcher

    return NvshmemDispatcher(grid.ep, spec, grid.device)


def _nvshmem_node(grid: Grid, spec: EPSpec) -> BaseDispatcher:
    from .nvshmem.two_level import NvshmemNodeDispatcher

    return NvshmemNodeDispatcher(grid.ep, spec, grid.device, grid.node_of)


def _deep_ep(grid: Grid, spec: EPSpec) -> BaseDispatcher:
    from .deep_ep import make

    return make(grid.ep, spec, grid.device)


def _deep_ep_ll(grid: Grid, spec: EPSpec) -> BaseDispatcher:
    from .deep_ep import make

    return make(grid.ep, spec, grid.device, low_latency=True)


_PEERS: dict[str, Callable[[Grid, EPSpec], BaseDispatcher]] = {
    "symm": _symm,
    "shm": _shm,
    "nvshmem": _nvshmem,
    "nvshmem_node": _nvshmem_node,
    "deep_ep": _deep_ep,
    "deep_ep_ll": _deep_ep_ll,
}


def _make(name: str, grid: Grid, spec: EPSpec) -> Dispatcher:
    if name == "local":
        return LocalDispatcher(spec)
    if name == "torch_node":
        return TorchNodeDispatcher(grid.ep, spec, grid.node_of, grid.device)
    if name in ("torch", "torch_static"):
        return TorchStaticDispatcher(grid.ep, spec) if name == "torch_static" else TorchDispatcher(grid.ep, spec)
    dispatcher = _PEERS[name](grid, spec)
    try:
        problem = self_test(dispatcher, grid.ep.index, grid.device)
    except Exception:
        dispatcher.close()
        raise
    dispatcher.forget_traffic()
    bad = [rank for rank, n in zip(grid.ep.ranks, grid.ep.gather_ints([int(problem is not None)])[:, 0], strict=True) if n]
    if bad:
        dispatcher.close()
        raise RuntimeError(f"all-to-all backend {name!r} moved known tokens wrongly on ranks {bad}; here: {problem}; use torch")
    return dispatcher
