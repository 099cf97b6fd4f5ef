"""In which order a batch is launched beside steps, so that neither reads what the other is writing, nor starves it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rorqual.moe.eplb.live import nccl, side
from rorqual.moe.eplb.live.nccl import NcclTransport
from rorqual.moe.eplb.live.report import Outcome
from rorqual.moe.eplb.live.transport import LinkError
from rorqual.moe.eplb.topology import Topology
from tests.moe.eplb.live.placements import random_placement
from tests.moe.eplb.live.virtual import Party, Target, VirtualTransport, with_config


class Recorded(VirtualTransport):
    """Notes what is asked of it, and that nothing on the device happens outside of ``aside`` in the worker thread."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.log: list[str] = []
        self.inside = False

    def exchange(self, send: Any, receive: Any) -> None:
        data = [part[0] for part in (send, receive) if part is not None and part[0].dtype == torch.uint8]
        if data:
            assert self.inside, "bytes of experts travel on the stream of steps"
            self.log.append("exchange")
        super().exchange(send, receive)

    @contextmanager
    def aside(self) -> Iterator[None]:
        self.inside = True
        self.log.append("aside")
        yield
        self.inside = False
        self.log.append("back")

    def begin(self) -> None:
        self.log.append("begin")

    def settle(self) -> None:
        self.log.append("settle")

    def committed(self) -> None:
        self.log.append("committed")


def test_batches_and_commits_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """begin (behind the last commit) -> exchanges aside -> settled, all before the commit; the next batch begins behind its end."""
    topology = Topology.even(n_slots=12, n_ranks=3)
    rng = np.random.default_rng(0)
    old, new = (random_placement(rng, 2, 9, topology) for _ in range(2))
    monkeypatch.setattr("tests.moe.eplb.live.virtual.VirtualTransport", Recorded)
    made = Party(topology=topology, n_experts=9, slots=old, config=with_config(max_sends=1))
    made.plan = lambda load, now: Target(slot_to_expert=new)
    logs = [rank.mover.transport.log for rank in made.ranks]
    for rank, log in enumerate(logs):
        made.faults[rank] = lambda point, log=log: log.append(point) if point in ("commit-before", "commit-after") else None
    report = made.cycle()
    assert report.outcome is Outcome.ENDED and report.batches > 2
    for log in logs:
        turn = ["begin", "aside", "back", "settle", "commit-before", "commit-after", "committed"]
        assert [word for word in log if word != "exchange"] == turn * report.batches
    made.close()


def test_operations_of_a_batch_are_bounded() -> None:
    """However much there is to move, a rank has two operations under way at most, and a batch has few."""
    topology = Topology.even(n_slots=64, n_ranks=4)
    rng = np.random.default_rng(1)
    old, new = (random_placement(rng, 3, 48, topology) for _ in range(2))
    made = Party(topology=topology, n_experts=48, slots=old, config=with_config(staging=3, max_sends=3))
    made.plan = lambda load, now: Target(slot_to_expert=new)
    report = made.cycle()
    pieces = made.ranks[0].mover.pace.pieces
    for rank in range(4):
        assert sum(sender == rank for sender, _ in made.wires.bytes) <= report.batches * 3 * pieces
    assert report.outcome is Outcome.ENDED and made.is_whole(new)
    made.close()


class FakeGroup:
    """What ``NcclTransport`` needs of a ``Group``."""

    index, size, ranks, deadline_s = 1, 3, (4, 5, 6), 0.05
    process_group = "the group"

    def __init__(self) -> None:
        self.reduced = 0

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self.reduced += 1
        return x


def fake_cuda(monkeypatch: pytest.MonkeyPatch, log: list[Any], done: bool) -> None:
    """Streams and events that note what they are asked."""

    class Stream:
        def __init__(self, device: Any = None) -> None:
            self.name = "aside"

        def wait_event(self, event: Any) -> None:
            log.append(("waits for", event.at))

        def synchronize(self) -> None:
            log.append("synchronised")

    class Event:
        at = ""

        def record(self, stream: Any) -> None:
            self.at = stream if isinstance(stream, str) else stream.name

        def query(self) -> bool:
            return done

    @contextmanager
    def stream(which: Stream) -> Iterator[None]:
        log.append(f"on {which.name}")
        yield
        log.append("off")

    cuda = SimpleNamespace(
        Stream=Stream, Event=Event, stream=stream, current_stream=lambda device: "steps", synchronize=lambda device: None,
        set_device=lambda device: log.append(("device", device.type)),
    )  # fmt: skip
    real = torch.zeros
    monkeypatch.setattr(
        nccl, "torch", SimpleNamespace(cuda=cuda, zeros=lambda *shape, device: real(*shape), Tensor=torch.Tensor, device=torch.device)
    )
    work = SimpleNamespace(wait=lambda: None)
    fake = SimpleNamespace(
        P2POp=lambda op, tensor, group, group_peer: (op, group, group_peer), isend="send", irecv="receive",
        batch_isend_irecv=lambda ops: log.append(ops) or [work],
    )  # fmt: skip
    monkeypatch.setattr(nccl, "dist", fake)


def on_device() -> Any:
    return SimpleNamespace(device=SimpleNamespace(type="cuda"))


def test_nccl_posts_both_operations_of_a_round_as_one_group_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[Any] = []
    fake_cuda(monkeypatch, log, done=True)
    group = FakeGroup()
    transport = NcclTransport(group, torch.device("cpu"))  # type: ignore[arg-type]
    assert group.reduced == 1, "all ranks connect at once, not at the first round that some have a part in"
    transport.exchange((on_device(), 2), (on_device(), 0))
    assert log == ["on aside", [("send", "the group", 2), ("receive", "the group", 0)], "off"]
    transport.committed()
    transport.begin()
    transport.settle()
    assert log[-3:] == [("device", "cpu"), ("waits for", "steps"), "synchronised"], "the thread works on the rank's own device"


def test_nccl_gives_up_at_the_deadline_and_names_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cuda(monkeypatch, [], done=False)
    transport = NcclTransport(FakeGroup(), torch.device("cpu"))  # type: ignore[arg-type]
    with pytest.raises(LinkError, match=r"rank 1: no exchange with ranks \[6\] within 0.05 s"):
        transport.exchange((on_device(), 2), None)


def test_nccl_takes_few_multiprocessors(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    options = SimpleNamespace(config=SimpleNamespace(max_ctas=0, min_ctas=0))
    fake = SimpleNamespace(
        ProcessGroupNCCL=SimpleNamespace(Options=lambda: options),
        new_group=lambda ranks, **more: made.append((list(ranks), more)) or "a group",
    )
    monkeypatch.setattr(side, "dist", fake)
    spec = side.rank_sets.__globals__["GridSpec"](pp=2, dp=2, tp=1)
    ep = SimpleNamespace(size=2, ranks=(2, 3), index=1)
    grid = SimpleNamespace(spec=spec, rank=3, ep=ep, device=SimpleNamespace(type="cuda"))
    group = side.side_group(grid, 30.0, max_ctas=2)  # type: ignore[arg-type]
    assert [ranks for ranks, _ in made] == [[0, 1], [2, 3]], "every rank makes the groups of all stages, in one order"
    assert all(m["pg_options"] is options and m["backend"] == "cpu:gloo,cuda:nccl" for _, m in made) and options.config.max_ctas == 2
    assert group.ranks == (2, 3) and group.index == 1 and group.process_group == "a group"
