"""What each PE does in the tests of dispatch and combine over NVSHMEM."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from rorqual.comm.dispatcher import Dispatcher, EPSpec
from rorqual.comm.fp8 import dequantise, quantise
from rorqual.launch.bench.comm.checks import CORE, Party, applicable, run
from tests.comm.routing import exact, expert, magnitude, make_tokens
from tests.gpu.nvshmem_ranks import start

#: (payload, dtype, deterministic, whether outputs are given unweighted with an index)
WAYS = [
    ("native", "float32", False, False),
    ("native", "float32", False, True),
    ("native", "float32", True, True),
    ("fp8", "bfloat16", False, True),
]


def results_of(routed: Any, spec: EPSpec, rank: int, indexed: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Outputs of the fake experts for the layout "rank": one weighted sum a row, or one row a choice and their index."""
    x = routed.x.float()
    if routed.scales is not None:
        blocks = routed.scales.repeat_interleave(128, dim=1)[:, : spec.hidden]
        x = x * blocks
    x = x.to(getattr(torch, spec.dtype))
    there = routed.slots >= 0
    first = rank * spec.slots_per_rank
    each = [expert(routed.slots[:, j].clamp(min=0) + first, x) for j in range(spec.top_k)]
    if indexed:
        index = torch.arange(there.numel(), dtype=torch.int32, device=x.device).view(there.shape)
        return torch.stack(each, dim=1).reshape(-1, spec.hidden), torch.where(there, index, -1)
    total = torch.zeros_like(x, dtype=torch.float32)
    for j, y in enumerate(each):
        total += torch.where(there[:, j : j + 1], routed.shares[:, j : j + 1] * y.float(), 0.0)
    return total.to(x.dtype), None


def trip(dispatcher: Any, rank: int, indexed: bool, x: torch.Tensor, *more: Any, **named: Any) -> torch.Tensor:
    routed = dispatcher.dispatch(x, *more, layout="rank", **named)
    y, index = results_of(routed, dispatcher.spec, rank, indexed)
    out: torch.Tensor = dispatcher.combine(y, routed, index=index)
    return out


def alike(stored: torch.Tensor, put: torch.Tensor, added: bool) -> bool:
    """The same bits; but two kernels may add the outputs of a rank's experts in another order of lanes (``added``)."""
    step = 2.0**-7 if put.dtype == torch.bfloat16 else 2.0**-21
    return torch.equal(stored, put) if not added else torch.allclose(stored, put, rtol=step, atol=step)


def arrives(x: torch.Tensor, payload: str) -> torch.Tensor:
    """x as it arrives."""
    return dequantise(*quantise(x), x.dtype) if payload == "fp8" else x


def trips() -> list[str]:
    """Mapped and by puts: results right and of the same bits, eagerly, narrowed, with padding, and by replays of a graph."""
    from rorqual.comm.nvshmem.dispatcher import NvshmemDispatcher
    from rorqual.comm.nvshmem.runtime import running, stop

    grid, device = start()
    me, size = grid.ep.index, grid.ep.size
    base = EPSpec(n_ranks=size, n_slots=4 * size, hidden=264, top_k=3, max_tokens=40, timeout_ms=20_000, max_sms=4)
    notes = []
    for number, (payload, dtype, deterministic, indexed) in enumerate(WAYS):
        spec = replace(base, payload=payload, dtype=dtype, deterministic=deterministic)
        stores, puts = NvshmemDispatcher(grid.ep, spec, device), NvshmemDispatcher(grid.ep, spec, device, unmap=range(size))
        assert stores.ops.name == "triton" and puts.ops.name == "nvshmem"
        begin, worst = time.monotonic(), 0.0
        for kind in ("random", "with_none", "same_rank"):
            n = 0 if kind == "with_none" and me == 0 else 11 + me
            x, ids, weights = (t.to(device) for t in make_tokens(me, n, spec, kind, number))
            want, got = trip(stores, me, indexed, x, ids, weights), trip(puts, me, indexed, x, ids, weights, capacity=20)
            for dispatcher in (stores, puts):
                dispatcher.health(wait=True)
            assert alike(want, got, indexed and not deterministic), (payload, kind, (want.float() - got.float()).abs().max().item())
            true = exact(arrives(x, payload), ids, weights)
            error = ((got.double() - true).abs() / (magnitude(arrives(x, payload), ids, weights) + 1e-9)).max().item() if n else 0.0
            worst = max(worst, error)
            assert error < (2e-6 if dtype == "float32" else 2e-2), (payload, kind, error)
        replays(stores, puts, me, indexed, device)
        assert puts.bytes_sent() == stores.bytes_sent(), (puts.bytes_sent(), stores.bytes_sent())
        notes.append(f"{payload} {dtype} deterministic={deterministic}: worst error {worst:.2e}, {time.monotonic() - begin:.1f} s")
        stores.close()
        puts.close()
    runtime = running()
    assert runtime is not None
    notes.append(f"{runtime.made} allocations, kernels {sorted(set(runtime.modules.names))}")
    stop()
    grid.close()
    return notes


def replays(stores: Any, puts: Any, me: int, indexed: bool, device: torch.device) -> None:
    """One graph of a whole trip by puts, replayed with other tokens and counts; mapped and eager in between."""
    spec = puts.spec
    x = torch.zeros((20, spec.hidden), dtype=getattr(torch, spec.dtype), device=device)
    ids = torch.full((20, spec.top_k), -1, dtype=torch.int32, device=device)
    weights = torch.zeros((20, spec.top_k), device=device)
    n_valid = torch.zeros(1, dtype=torch.int32, device=device)
    trip(puts, me, indexed, x, ids, weights, n_valid=n_valid)
    trip(stores, me, indexed, x, ids, weights, n_valid=n_valid)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = trip(puts, me, indexed, x, ids, weights, n_valid=n_valid)
    for turn in range(3):
        tokens = make_tokens(me, 20, spec, ("random", "lognormal")[turn % 2], 70 + turn)
        for ours, new in zip((x, ids, weights), tokens, strict=True):
            ours.copy_(new)
        n_valid.fill_((7 * turn + 5 * me) % 21)
        graph.replay()
        eager = trip(puts, me, indexed, x, ids, weights, n_valid=n_valid)
        want = trip(stores, me, indexed, x, ids, weights, n_valid=n_valid)
        trip(stores, me, indexed, x, ids, weights, n_valid=n_valid)  # as many as puts made, for the count of bytes
        torch.cuda.synchronize()
        puts.health(wait=True)
        assert torch.equal(out, eager) and alike(want, out, indexed and not spec.deterministic), turn


def hops() -> list[str]:
    """Two hops over two pretended nodes: results right, and by puts between the nodes the same bits as by stores."""
    from rorqual.comm.heap.nvshmem import NvshmemHeap
    from rorqual.comm.node.dispatcher import NodeDispatcher, workspace_bytes
    from rorqual.comm.nvshmem.runtime import stop
    from rorqual.comm.nvshmem.two_level import NvshmemNodeDispatcher

    grid, device = start()
    me, size = grid.ep.index, grid.ep.size
    node_of = tuple(2 * rank // size for rank in range(size))
    notes = []
    for payload, dtype, deterministic, indexed in WAYS:
        spec = EPSpec(
            n_ranks=size,
            n_slots=4 * size,
            hidden=264,
            top_k=3,
            max_tokens=24,
            max_sms=4,
            payload=payload,
            dtype=dtype,
            deterministic=deterministic,
        )
        dispatcher = NodeDispatcher(grid.ep, spec, NvshmemHeap(grid.ep, device), node_of, device=device)
        assert dispatcher.name == "nvshmem_node" and dispatcher.heap.allocated_bytes == workspace_bytes(spec, node_of)
        far = [rank for rank in range(size) if node_of[rank] != node_of[me]]
        puts = NvshmemNodeDispatcher(grid.ep, spec, device, node_of, unmap=far)
        assert puts.ops.name == "nvshmem" and [view is None for view in puts.peers.views] == [r in far for r in range(size)]
        worst = 0.0
        for seed, kind in enumerate(("random", "with_none", "same_rank")):
            x, ids, weights = (t.to(device) for t in make_tokens(me, 9 + me if seed else 5 * me, spec, kind, seed))
            out, across = trip(dispatcher, me, indexed, x, ids, weights), trip(puts, me, indexed, x, ids, weights)
            assert torch.equal(out, across), (payload, kind, (out.float() - across.float()).abs().max().item())
            true = exact(arrives(x, payload), ids, weights)
            if len(x):
                worst = max(worst, ((out.double() - true).abs() / (magnitude(arrives(x, payload), ids, weights) + 1e-9)).max().item())
        assert worst < (2e-6 if dtype == "float32" else 3e-2), worst
        assert puts.bytes_sent() == dispatcher.bytes_sent(), (puts.bytes_sent(), dispatcher.bytes_sent())
        notes.append(f"{payload} {dtype} deterministic={deterministic}: worst error {worst:.2e}")
        dispatcher.close()
        puts.close()
    stop()
    grid.close()
    return notes


def one_dies() -> str:
    """The last PE ends without a word; the others say so, close, and leave without stopping NVSHMEM."""
    from rorqual.comm.nvshmem.dispatcher import NvshmemDispatcher
    from rorqual.comm.timeout import DispatchTimeout

    grid, device = start()
    me, size = grid.ep.index, grid.ep.size
    spec = EPSpec(n_ranks=size, n_slots=4 * size, hidden=264, top_k=3, max_tokens=40, timeout_ms=1500, max_sms=4)
    dispatcher = NvshmemDispatcher(grid.ep, spec, device)
    x, ids, weights = (t.to(device) for t in make_tokens(me, 9, spec, "random", 1))
    trip(dispatcher, me, False, x, ids, weights)
    dispatcher.health(wait=True)
    grid.ep.barrier("all well")
    if me == size - 1:
        os._exit(9)
    ticket = dispatcher.dispatch_send(x, ids, weights, tag=7)
    dispatcher.dispatch_recv(ticket, layout="rank")
    with pytest.raises(DispatchTimeout) as told:
        dispatcher.health(wait=True)
    dispatcher.close()
    grid.close(failed=True)
    return str(told.value)


def conform(kind: str) -> list[str]:
    """The checks of every backend: by "stores", by "puts" to every other rank, or in two "hops" with puts between two nodes."""
    from rorqual.comm.nvshmem.dispatcher import NvshmemDispatcher
    from rorqual.comm.nvshmem.runtime import stop
    from rorqual.comm.nvshmem.two_level import NvshmemNodeDispatcher

    grid, device = start()
    group, size = grid.ep, grid.ep.size
    node_of = tuple(2 * rank // size for rank in range(size)) if kind == "hops" else (0,) * size
    far = [rank for rank in range(size) if kind == "puts" or node_of[rank] != node_of[group.index]]

    def make(spec: EPSpec) -> Dispatcher:
        if kind == "hops":
            return NvshmemNodeDispatcher(group, spec, device, node_of, unmap=far)
        return NvshmemDispatcher(group, spec, device, unmap=far)

    party = Party(
        backend="nvshmem_node" if kind == "hops" else "nvshmem", rank=group.index, size=size, device=device, make=make,
        gather=lambda values: group.gather_ints(values).tolist(), node_of=node_of,
    )  # fmt: skip
    checks = applicable(party, kind == "stores", brief=True)
    if kind != "stores":
        del checks["memory"]  # a ring to put from comes on top of the formula
    if kind == "hops":
        checks = {name: check for name, check in checks.items() if name in CORE}
    done = list(run(party, checks))
    stop()
    grid.close()
    return done
