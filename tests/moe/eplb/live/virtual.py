"""Ranks of one process: their boundaries take turns, their worker threads talk through queues."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from rorqual.moe.eplb.live.agreement import Table
from rorqual.moe.eplb.live.balancer import LiveBalancer
from rorqual.moe.eplb.live.config import LiveConfig
from rorqual.moe.eplb.live.report import CycleReport
from rorqual.moe.eplb.live.transport import LinkError
from rorqual.moe.eplb.topology import Ints, Topology
from tests.moe.eplb.live.toy import ToyExperts, ToyTables, is_whole, toy_layers


class Wires:
    """Queues between all pairs, and what went through them."""

    def __init__(self, size: int, wait_s: float) -> None:
        self.lines: dict[tuple[int, int], queue.Queue[torch.Tensor]] = {(a, b): queue.Queue() for a in range(size) for b in range(size)}
        self.wait_s = wait_s
        self.sent = 0  # tensors
        self.bytes: list[tuple[int, int]] = []  # (sender, bytes) of pieces of experts
        self.cut: set[int] = set()  # ranks whose connections are gone
        self.corrupt: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor


class VirtualTransport:
    def __init__(self, wires: Wires, rank: int, size: int) -> None:
        self.wires, self.rank, self.size = wires, rank, size

    def exchange(self, send: tuple[torch.Tensor, int] | None, receive: tuple[torch.Tensor, int] | None) -> None:
        failed = None
        for part, work in ((send, self._send), (receive, self._receive)):
            try:
                if part is not None:
                    work(*part)
            except LinkError as error:  # the other is done all the same
                failed = error
        if failed is not None:
            raise failed

    def _check(self, peer: int) -> None:
        if peer in self.wires.cut or self.rank in self.wires.cut:
            raise LinkError(f"connection of ranks {self.rank} and {peer} closed", peer)

    def _send(self, tensor: torch.Tensor, peer: int) -> None:
        self._check(peer)
        self.wires.sent += 1
        if tensor.dtype == torch.uint8:
            self.wires.bytes.append((self.rank, tensor.numel()))
        self.wires.lines[self.rank, peer].put(self.wires.corrupt(tensor.clone()))

    def _receive(self, tensor: torch.Tensor, peer: int) -> None:
        end = time.monotonic() + self.wires.wait_s
        while True:
            self._check(peer)
            try:
                tensor.copy_(self.wires.lines[peer, self.rank].get(timeout=0.02))
                return
            except queue.Empty:
                if time.monotonic() > end:
                    raise LinkError(f"rank {peer} sent nothing to rank {self.rank}", peer) from None

    def aside(self) -> AbstractContextManager[object]:
        return nullcontext()

    def begin(self) -> None:
        pass

    def settle(self) -> None:
        pass

    def committed(self) -> None:
        pass

    def close(self) -> None:
        pass


class Board:
    """Votes of all ranks: those of the boundary before, and those of this one."""

    def __init__(self, size: int) -> None:
        self.read: Table = [None] * size
        self.write: Table = [None] * size

    def turn(self) -> None:
        self.read, self.write = self.write, [None] * len(self.read)


class BoardAgreement:
    always = False

    def __init__(self, board: Board, rank: int) -> None:
        self.board, self.rank = board, rank

    def post(self, words: Sequence[int]) -> None:
        self.board.write[self.rank] = list(words)

    def collect(self) -> Table:
        assert None not in self.board.read, "collected what was not posted on all ranks"
        return self.board.read


@dataclass(kw_only=True)
class Target:
    slot_to_expert: Ints
    reason: str = "a test"


@dataclass(kw_only=True)
class Party:
    """All ranks, in lockstep."""

    topology: Topology
    n_experts: int
    slots: Ints
    config: LiveConfig = field(default_factory=lambda: with_config())
    plan: Callable[[Any, Ints], Any] = lambda load, now: Target(slot_to_expert=now)
    wait_s: float = 5.0
    counts: Callable[[int], Any] | None = None  # rank -> counts
    states: Callable[[list[ToyExperts]], Any] = lambda layers: [layer.state() for layer in layers]
    step: int = 0
    pause: float = 0.001  # seconds of a step

    def __post_init__(self) -> None:
        size = self.topology.n_ranks
        self.wires, self.board = Wires(size, self.wait_s), Board(size)
        self.layers = [toy_layers(self.slots, self.topology, rank) for rank in range(size)]
        self.tables = [ToyTables(self.slots) for _ in range(size)]
        self.faults: list[Callable[[str], None]] = [lambda point: None] * size
        self.reports: list[list[CycleReport]] = [[] for _ in range(size)]
        with ThreadPoolExecutor(size) as pool:
            self.ranks = list(pool.map(self._make, range(size)))

    def _make(self, rank: int) -> LiveBalancer:
        shape = (len(self.slots), self.n_experts)
        counts = (lambda: np.ones(shape, dtype=np.int64)) if self.counts is None else (lambda: self.counts(rank))
        return LiveBalancer(
            config=self.config, rank=rank, topology=self.topology, n_experts=self.n_experts, slot_to_expert=self.slots,
            states=self.states(self.layers[rank]), transport=VirtualTransport(self.wires, rank, self.topology.n_ranks),
            agreement=BoardAgreement(self.board, rank), counts=counts, plan=lambda load, now: self.plan(load, now),
            tables=self.tables[rank], fault=lambda point: self.faults[rank](point),
        )  # fmt: skip

    def boundary(self) -> list[CycleReport | None]:
        """One boundary of all ranks, then a step."""
        self.board.turn()
        found = [rank.boundary(self.step) for rank in self.ranks]
        self.step += 1
        assert len({report is None for report in found}) == 1, "a cycle ended on some ranks only"
        for mine, report in zip(self.reports, found, strict=True):
            if report is not None:
                mine.append(report)
        assert all(np.array_equal(rank.slot_to_expert, self.ranks[0].slot_to_expert) for rank in self.ranks)
        time.sleep(self.pause)
        return found

    def cycle(self, most: int = 20_000, after_step: Callable[[], None] = lambda: None) -> CycleReport:
        """Ask for a cycle, and take steps until it is over."""
        for rank in self.ranks:
            rank.request()
        for _ in range(most):
            found = self.boundary()
            after_step()
            if found[0] is not None:
                assert len({(r.outcome, r.batches, r.layers) for r in found if r is not None}) == 1
                return found[0]
        raise AssertionError(f"no end within {most} boundaries")

    def catch_up(self) -> None:
        """Wait until every rank's thread has done what it was given."""
        for rank in self.ranks:
            assert rank.mover.worker.start(lambda: None).wait(time.monotonic() + 20), "the thread has caught up"

    def is_whole(self, slots: Ints | None = None) -> bool:
        """Whether all ranks' bytes and tables are those of ``slots`` (None: of what they say)."""
        slots = self.ranks[0].slot_to_expert if slots is None else slots
        good = all(is_whole(layers, slots, self.topology, rank) for rank, layers in enumerate(self.layers))
        return good and all(np.array_equal(table.slots, slots) for table in self.tables)

    def bytes(self) -> list[bytes]:
        return [b"".join(layer.bytes() for layer in layers) for layers in self.layers]

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()


def with_config(**changes: Any) -> LiveConfig:
    """Patient: a busy machine must not end a cycle."""
    return replace(LiveConfig(interval=0, staging=2, max_sends=2, patience=10_000), **changes)
