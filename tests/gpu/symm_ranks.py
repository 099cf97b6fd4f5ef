"""Ranks that are processes, over torch symmetric memory: on as many GPUs as there are, or all on one."""

from __future__ import annotations

import os
import random
import socket
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from rorqual.comm.blocks import Blocks
from rorqual.comm.dispatcher import EPSpec
from rorqual.comm.heap.peers import Peers
from rorqual.comm.ops import PeerOps
from rorqual.comm.state import PeerState, Status
from rorqual.comm.wire import Wire
from tests.comm.kernels.peer_problem import World, check_arrived, close, make_tokens, outputs

DEADLINE_MS = 20_000


def spawn(work: Callable[..., None], n_ranks: int, n_gpus: int, *args: Any) -> None:
    """Run ``work(rank, n_ranks, *args)`` in ``n_ranks`` processes over ``n_gpus`` GPUs; fails if one of them does."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(_entry, (work, n_ranks, n_gpus, port, args), nprocs=n_ranks)


def _entry(rank: int, work: Callable[..., None], n_ranks: int, n_gpus: int, port: int, args: tuple[Any, ...]) -> None:
    os.environ |= {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    torch.cuda.set_device(rank % n_gpus)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=n_ranks)
    work(rank, n_ranks, *args)


def one_rank(spec: EPSpec, rank: int, programs: int) -> World:
    """A ``World`` of which this process has one rank."""
    import torch.distributed._symmetric_memory as symmetric

    world = World.__new__(World)
    world.spec, world.ops, world.programs, world.wire = spec, PeerOps.load("triton"), programs, Wire.of(spec)
    world.device = torch.device("cuda", torch.cuda.current_device())
    n_bytes = world.wire.total_bytes
    buffer = symmetric.empty(n_bytes, dtype=torch.uint8, device=world.device)
    handle = symmetric.rendezvous(buffer, dist.group.WORLD.group_name)
    buffer.zero_()
    together()
    views = tuple(handle.get_buffer(r, (n_bytes,), torch.uint8) for r in range(spec.n_ranks))
    pointers = torch.tensor(list(handle.buffer_ptrs), dtype=torch.int64, device=world.device)
    world.peers = {rank: Peers(rank=rank, views=views, pointers=pointers)}
    world.states = {rank: PeerState.make(spec.depth, spec.n_ranks, world.device)}
    world.keep = (buffer, handle)  # type: ignore[attr-defined]
    return world


def together() -> None:
    torch.cuda.synchronize()
    dist.barrier()


def small_spec(n_ranks: int, **more: Any) -> EPSpec:
    given = {
        "n_ranks": n_ranks,
        "n_slots": 16 * n_ranks,
        "hidden": 1024,
        "top_k": 8,
        "max_tokens": 64,
        "dtype": "bfloat16",
        "payload": "fp8",
    }
    return EPSpec(**{**given, **more})


def whole_trips(rank: int, n_ranks: int) -> None:
    """Several payloads and routings, checked byte for byte on arrival and against fp64 at the end."""
    for more in (
        {},
        {"payload": "fp8_ue8m0"},
        {"payload": "native", "deterministic": True},
        {"payload": "bf16", "dtype": "float32", "hidden": 200},
    ):
        world = one_rank(small_spec(n_ranks, **more), rank, 8)
        for turn, kind in enumerate(("random", "with_none", "all_none")):
            world.poison()
            together()
            tokens = [make_tokens(world.spec, r, (64, 17, 0, 5)[(r + turn) % 4], kind, turn, world.device) for r in range(n_ranks)]
            world.send(rank, tokens[rank], channel=turn % 2)
            slots, shares = world.receive(rank, channel=turn % 2, timeout_ms=DEADLINE_MS)
            torch.cuda.synchronize()
            check_arrived(world, rank, tokens, slots, shares, channel=turn % 2)
            y, index = outputs(world, rank, slots, turn % 2)
            weighted = {} if world.spec.deterministic else {"shares": shares}
            world.home(rank, y, slots, channel=turn % 2, index=index, **weighted)
            result = world.sum(rank, tokens[rank], channel=turn % 2, timeout_ms=DEADLINE_MS)
            assert not world.states[rank].status.any()
            close(world, result, tokens[rank])
            together()


class Bucket:
    """Static tensors of a step of at most ``size`` tokens, and ``SETS`` inputs for them."""

    SETS = 4

    def __init__(self, world: World, rank: int, size: int) -> None:
        self.world, self.rank, self.size = world, rank, size
        self.wire = world.wire.narrowed(size)
        kinds = ("random", "with_none", "lognormal", "repeated")
        self.sets = [make_tokens(world.spec, rank, size, kinds[s], s + size, world.device) for s in range(self.SETS)]
        for s, t in enumerate(self.sets):
            t.n = size if s == 0 else random.Random(s + rank).randint(0, size)
            t.n_valid = torch.tensor([t.n], dtype=torch.int32, device=world.device)
        first = self.sets[0]
        assert first.n_valid is not None
        self.x, self.ids, self.weights, self.n = first.x.clone(), first.ids.clone(), first.weights.clone(), first.n_valid.clone()
        self.out = torch.zeros(size, world.spec.hidden, dtype=torch.bfloat16, device=world.device)
        self.slots = torch.zeros(world.spec.n_ranks * size, world.spec.top_k, dtype=torch.int32, device=world.device)
        self.shares = torch.zeros(self.slots.shape, device=world.device)

    def load(self, number: int) -> None:
        t = self.sets[number]
        assert t.n_valid is not None
        for static, given in ((self.x, t.x), (self.ids, t.ids), (self.weights, t.weights), (self.n, t.n_valid)):
            static.copy_(given)

    def step(self, channel: int, naps: tuple[int, ...] = (0, 0, 0, 0), timeout_ms: int = DEADLINE_MS, tag: int = 0) -> None:
        """Dispatch, fake experts, combine. ``naps``: cycles that the GPU sleeps before each half."""
        spec, ops, args = self.world.spec, self.world.ops, (self.wire, self.world.peers[self.rank], self.world.states[self.rank])
        waits: dict[str, Any] = {"channel": channel, "timeout_ms": timeout_ms, "fault_tolerant": False, "tag": tag}
        torch.cuda._sleep(naps[0])
        ops.send_tokens(*args, self.x, self.ids, self.weights, channel=channel, n_valid=self.n, programs=self.world.programs)
        torch.cuda._sleep(naps[1])
        ops.receive_tokens(*args, self.slots, self.shares, **waits)
        blocks = Blocks.of(self.wire, args[1].own, channel)
        assert blocks.scales is not None
        factor = 1 + 0.5 * (self.slots + self.rank * spec.slots_per_rank)
        factor = torch.where(self.slots >= 0, self.shares * factor, 0.0).sum(1, keepdim=True)
        y = blocks.values.float() * blocks.scales.repeat_interleave(128, 1)[:, : spec.hidden] * factor
        torch.cuda._sleep(naps[2])
        ops.send_home(*args, y.bfloat16(), self.slots, channel=channel, deterministic=False, programs=self.world.programs)
        torch.cuda._sleep(naps[3])
        ops.sum_home(*args, self.ids, self.weights, self.out, deterministic=False, n_valid=self.n, **waits)


def stress(rank: int, n_ranks: int, replays: int, delays: int) -> None:
    """Graphs of three buckets in any order with eager calls between them, then delays before every half: the same bits always."""
    world = one_rank(small_spec(n_ranks), rank, 8)
    buckets = [Bucket(world, rank, size) for size in (4, 16, 64)]
    expected = []
    for bucket in buckets:
        expected.append([])
        for number, t in enumerate(bucket.sets):
            bucket.load(number)
            bucket.step(0)
            close(world, bucket.out, t)
            expected[-1].append(bucket.out.clone())
    graphs = [torch.cuda.CUDAGraph() for _ in buckets]
    for bucket, graph in zip(buckets, graphs, strict=True):
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            bucket.step(1)
    together()
    wrong = torch.zeros((), dtype=torch.int64, device=world.device)
    shared, own = random.Random(5), random.Random(100 + rank)
    for turn in range(replays + delays):
        which, number = shared.randrange(3), shared.randrange(Bucket.SETS)
        buckets[which].load(number)
        if turn >= replays:
            buckets[which].step(turn % 2, tuple(own.choice((0, 0, 20_000, 200_000)) for _ in range(4)))
        elif shared.random() < 0.2:
            buckets[which].step(0)
        else:
            graphs[which].replay()
        wrong += (buckets[which].out != expected[which][number]).any()
        if turn % 50 == 49:
            torch.cuda.synchronize()
    together()
    assert int(wrong) == 0
    assert not world.states[rank].status.any(), world.states[rank].status.tolist()


def killed(rank: int, n_ranks: int, deadline_ms: int, layers: int) -> None:
    """The last rank leaves without a word; the others report it after one deadline, however many layers they had queued."""
    world = one_rank(small_spec(n_ranks), rank, 8)
    bucket = Bucket(world, rank, 64)
    for _ in range(5):
        bucket.step(0)
    together()
    if rank == n_ranks - 1:
        os._exit(0)
    time.sleep(0.5)
    start = time.monotonic()
    for layer in range(layers):
        bucket.step(0, timeout_ms=deadline_ms, tag=layer)
    torch.cuda.synchronize()
    took = time.monotonic() - start
    status = world.states[rank].status.tolist()
    assert status == [1, 0, 6, n_ranks - 1, 5, 0, 0, 0][: len(Status)], status
    assert took < deadline_ms / 1000 * layers / 4, took  # one deadline for each of them would take four times as long
    os._exit(0)  # a process group without a member cannot be left in order
