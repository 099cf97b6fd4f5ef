"""Memory, descriptors, bytes on the wire, graphs."""

from __future__ import annotations

import gc
import os
from typing import Any

import torch

from .....comm.dispatcher import EPSpec
from .....comm.node.dispatcher import workspace_bytes as two_hops_bytes
from .....comm.peer import PeerDispatcher
from .....comm.rows import RowLayout
from .....comm.wire import Wire, workspace_bytes
from .arrivals import SIZES
from .inputs import make_tokens
from .party import Party, Tokens, require, trip


def traffic(party: Party) -> dict[str, Any]:
    """bytes_sent is the formula from the ids: a row once a (token, rank), or once a (token, node) and then inside the node."""
    for deterministic in party.reach.sums:
        dispatcher = party.make(party.spec(deterministic=deterministic))
        spec = dispatcher.spec
        everybody = [make_tokens(r, SIZES["unequal"](r), spec, "with_none", 77) for r in range(party.size)]
        trip(dispatcher, party.rank, party.here(everybody[party.rank]))
        want = expected_bytes(dispatcher.name, spec, party.rank, party.node_of, everybody)
        require(dispatcher.bytes_sent() == want, "bytes_sent is the formula", dispatcher.bytes_sent(), want)
        dispatcher.close()
        require(dispatcher.bytes_sent() == want, "bytes_sent outlives close")
    return {"bytes": want}


def expected_bytes(backend: str, spec: EPSpec, rank: int, node_of: tuple[int, ...], everybody: list[Tokens]) -> list[int]:
    """Bytes that ``rank`` sends to each rank for one dispatch and combine of ``everybody``'s tokens."""
    world, result = spec.n_ranks, spec.hidden * getattr(torch, spec.dtype).itemsize
    want = [0] * world
    peer, hops = backend not in ("torch", "torch_node", "torch_static", "local"), backend.endswith("_node")
    row = Wire.of(spec).row_bytes if peer else RowLayout(spec=spec).row_bytes
    if backend == "torch_static":
        each = spec.max_tokens * (row + result * (spec.top_k if spec.deterministic else 1))
        return [0 if r == rank else each for r in range(world)]

    def pay(src: int, dst: int, results: int) -> None:
        """src sent a row to dst; dst sent results back."""
        if src == rank != dst:
            want[dst] += row
        if dst == rank != src:
            want[src] += results * result

    for src, (x, ids, _) in enumerate(everybody):
        homes = torch.where(ids >= 0, ids // spec.slots_per_rank, -1)
        if peer:  # everybody is told every choice
            want = [n + len(x) * 8 * spec.top_k * (r in _told(src, rank, hops, node_of)) for r, n in enumerate(want)]
        for token in range(len(x)):
            chosen = [r for r in homes[token].tolist() if r >= 0]
            if not hops:
                for dst in set(chosen):
                    pay(src, dst, chosen.count(dst) if spec.deterministic else 1)
                continue
            place = [r for r in range(world) if node_of[r] == node_of[src]].index(src)
            for node in {node_of[r] for r in chosen}:
                inside = [r for r in chosen if node_of[r] == node]
                forwarder = [r for r in range(world) if node_of[r] == node][place]
                pay(src, forwarder, len(inside) if spec.deterministic else 1)
                for dst in set(inside):
                    pay(forwarder, dst, inside.count(dst) if spec.deterministic else 1)
    return want


def _told(src: int, rank: int, hops: bool, node_of: tuple[int, ...]) -> set[int]:
    """Ranks that ``rank`` tells the choices of ``src``: everybody its own; in two hops its rail, which passes them on in its node."""
    everybody = set(range(len(node_of)))
    if not hops:
        return everybody - {rank} if src == rank else set()
    nodes = [[r for r in everybody if node_of[r] == node] for node in sorted(set(node_of))]
    rail = {ranks[nodes[node_of[src]].index(src)] for ranks in nodes}
    inside = set(nodes[node_of[rank]]) - {rank} if rank in rail else set()
    return inside | (rail - {rank} if src == rank else set())


def memory(party: Party, cycles: int = 50) -> dict[str, Any]:
    """The workspace is what the formula says; steps allocate nothing there; cycles of setup and close leave nothing behind."""
    dispatcher = party.make(party.spec())
    heap = getattr(dispatcher, "heap", None)
    tokens = party.here(make_tokens(party.rank, 9, dispatcher.spec, "random", 1))
    trip(dispatcher, party.rank, tokens)
    if heap is not None:
        hops = dispatcher.name.endswith("_node")
        formula = two_hops_bytes(dispatcher.spec, party.node_of) if hops else workspace_bytes(dispatcher.spec)
        require(heap.allocated_bytes == formula, "the workspace has the size of the formula", heap.allocated_bytes, formula)
    if isinstance(dispatcher, PeerDispatcher):
        places = _addresses(dispatcher)
        for _ in range(3):
            trip(dispatcher, party.rank, tokens, "rank")
        require(places == _addresses(dispatcher), "steps move nothing")
    if party.device.type == "cuda":
        _steady(party, dispatcher, tokens)
    dispatcher.close()
    require(heap is None or heap.allocated_bytes == 0, "close gives all back")
    before = _footprint()
    for _ in range(cycles):
        again = party.make(party.spec(max_tokens=64))
        again.close()
        del again
    after = _footprint()
    slack = party.size + 2  # threads of virtual ranks share a process
    require(after[0] <= before[0] + slack, "cycles leave no descriptor open", before, after)
    require(after[1] <= before[1] + slack, "cycles leave no memory mapped", before, after)
    return {"workspace": workspace_bytes(party.spec())}


def _addresses(dispatcher: PeerDispatcher) -> list[int]:
    state = dispatcher.state
    return [t.data_ptr() for t in (state.epoch, state.arrived, state.active, state.status, state.sent, dispatcher.peers.own)]


def _steady(party: Party, dispatcher: Any, tokens: Tokens) -> None:
    """Steps on CUDA reserve no more memory than the first did."""
    torch.cuda.synchronize(party.device)
    before = torch.cuda.memory_reserved(party.device)
    for _ in range(5):
        trip(dispatcher, party.rank, tokens, "rank")
    torch.cuda.synchronize(party.device)
    require(torch.cuda.memory_reserved(party.device) == before, "steps reserve no memory", before)


def _footprint() -> tuple[int, int]:
    """Open descriptors, and mappings of shared workspaces, of this process."""
    gc.collect()
    with open("/proc/self/maps", encoding="ascii", errors="replace") as maps:
        mapped = sum("rorqual-ep" in line for line in maps)
    return len(os.listdir("/proc/self/fd")), mapped
