"""What a dispatcher over peer memory promises beyond the checks that all backends share."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch

from rorqual.comm.blocks import Blocks
from rorqual.comm.dispatcher import EPSpec
from rorqual.comm.ops import PeerOps
from rorqual.comm.self_test import self_test
from rorqual.comm.state import Failure, Status
from rorqual.comm.timeout import DispatchTimeout, failure
from rorqual.comm.virtual import VirtualRanks
from rorqual.launch.bench.comm.checks import in_threads
from rorqual.launch.bench.comm.checks.inputs import make_tokens
from rorqual.launch.bench.comm.checks.party import answer, by_rank, trip

SPEC = EPSpec(n_ranks=3, n_slots=12, hidden=40, top_k=3, max_tokens=24, timeout_ms=200)


def steps(group: VirtualRanks, seed: int = 0, ranks: tuple[int, ...] = (0, 1, 2), **more: int) -> list[torch.Tensor]:
    """One dispatch and combine, half by half, of the ranks that take part."""
    spec = group.ranks[0].spec
    tokens = {r: make_tokens(r, 5 + r, spec, "random", seed) for r in ranks}
    tickets = {r: group.ranks[r].dispatch_send(*tokens[r], **more) for r in ranks}
    routed = {r: group.ranks[r].dispatch_recv(tickets[r]) for r in ranks}
    backs = {r: group.ranks[r].combine_send(answer(routed[r], spec, r)[0], routed[r]) for r in ranks}
    return [group.ranks[r].combine_recv(backs[r]) for r in ranks]


def test_rows_of_the_rank_layout_are_the_workspace_and_follow_capacity() -> None:
    group = VirtualRanks.make(SPEC)
    for capacity, height in ((None, 24), (9, 9)):
        tickets = [rank.dispatch_send(*make_tokens(r, 4, SPEC, "random", 1), capacity=capacity) for r, rank in enumerate(group.ranks)]
        routed = [rank.dispatch_recv(ticket, "rank") for rank, ticket in zip(group.ranks, tickets, strict=True)]
        assert routed[0].slots is not None and routed[0].slots.shape == (3 * height, 3) and routed[0].x.shape == (3 * height, 40)
        assert routed[0].x.untyped_storage().data_ptr() == group.ranks[0].peers.own.data_ptr()
        with pytest.raises(RuntimeError, match='the layout "rank" has no counts'):
            routed[0].host_counts()
        group.set_active([True] * 3)
    group.close()


def test_a_fault_tolerant_dispatcher_keeps_its_pitch() -> None:
    group = VirtualRanks.make(replace(SPEC, fault_tolerant=True))
    ticket = group.ranks[0].dispatch_send(*make_tokens(0, 4, SPEC, "random", 1), capacity=4)
    assert ticket.wire.max_tokens == 24
    group.close()


def test_the_first_failure_stands_and_stops_all_that_follows() -> None:
    group = VirtualRanks.make(replace(SPEC, timeout_ms=1000))
    steps(group)
    tokens = make_tokens(0, 4, SPEC, "random", 2)
    ticket = group.ranks[0].dispatch_send(*tokens, tag=17)
    begin = time.monotonic()
    with pytest.raises(
        DispatchTimeout, match=r"rank 0: rank 1 did not come to dispatch 2 of channel 0 \(tag 17\) within 1000 ms; .* is 1"
    ) as caught:
        group.ranks[0].dispatch_recv(ticket)
    assert 0.99 < time.monotonic() - begin < 5
    error = caught.value
    assert (error.rank, error.missing, error.phase, error.epoch, error.seen, error.tag, error.channel) == (0, 1, "dispatch", 2, 1, 17, 0)
    with pytest.raises(DispatchTimeout, match="tag 17"):
        group.ranks[0].health()
    begin, flags = time.monotonic(), Blocks.of(group.ranks[1].wire, group.ranks[1].peers.own, 1).flags
    with pytest.raises(DispatchTimeout, match="tag 17"):
        group.ranks[0].dispatch_send(*tokens)
    assert int(flags[0, 0, 0]) == 0 and time.monotonic() - begin < 0.75, "a failed rank must raise no flag"
    group.set_active([True] * 3)
    assert all(torch.equal(out, by_rank(SPEC, make_tokens(r, 5 + r, SPEC, "random", 4))) for r, out in enumerate(steps(group, 4)))
    group.ranks[0].health()
    group.close()


def test_impossible_counts_and_flags_from_the_future_are_reported() -> None:
    for code, text in (
        (Failure.COUNT, "announced 4000000000 tokens in dispatch 1"),
        (Failure.LEFT_OUT, "the others went on without this rank"),
    ):
        group = VirtualRanks.make(SPEC)
        tickets = [rank.dispatch_send(*make_tokens(r, 4, SPEC, "random", 2)) for r, rank in enumerate(group.ranks)]
        flag = Blocks.of(group.ranks[0].wire, group.ranks[0].peers.own, 0).flags[0, 2]
        flag[1 if code == Failure.COUNT else 0] = 4_000_000_000
        with pytest.raises(DispatchTimeout, match=text):
            group.ranks[0].dispatch_recv(tickets[0])
        assert int(group.ranks[0].state.status[Status.FAILED]) == code
        group.close()


def test_words_without_a_failure_mean_nothing() -> None:
    assert failure([0] * 8, (4, 5), 0, 100) is None
    error = failure([1, 1, 7, 1, 6, 3, 0, 0], (4, 5), 0, 100)
    assert error is not None and (error.rank, error.missing, error.phase) == (4, 5, "combine")


def test_masks_are_checked() -> None:
    group = VirtualRanks.make(SPEC)
    with pytest.raises(ValueError, match="the mask has 2 entries, the expert group 3 ranks"):
        group.ranks[0].set_active([True, True])
    with pytest.raises(ValueError, match="the mask leaves out rank 0, which called it"):
        group.ranks[0].set_active([False, True, True])
    group.set_active([True, False, True])
    outs = steps(group, 3, (0, 2))
    for rank, out in zip((0, 2), outs, strict=True):
        x, ids, weights = make_tokens(rank, 5 + rank, SPEC, "random", 3)
        assert torch.equal(out, by_rank(SPEC, (x, torch.where(ids // 4 == 1, -1, ids), weights)))
    assert group.ranks[0].active_mask() == [True, False, True]
    group.close()


def test_the_self_test_sees_what_moves_wrongly() -> None:
    def work(party, spoil):  # type: ignore[no-untyped-def]
        dispatcher = party.make(party.spec(payload="fp8", dtype="bfloat16"))
        if spoil:
            send = dispatcher.ops.send_tokens

            def wrong(wire, peers, state, x, *args, **more):  # type: ignore[no-untyped-def]
                send(wire, peers, state, x.roll(1, 0), *args, **more)

            dispatcher.ops = replace(dispatcher.ops, send_tokens=wrong)
        return self_test(dispatcher, party.rank, party.device)

    assert in_threads(3, lambda party: work(party, False)) == [None] * 3
    assert all("arrived changed" in text for text in in_threads(3, lambda party: work(party, True)))


def test_operations_by_name() -> None:
    assert PeerOps.load("torch").name == "torch"
    with pytest.raises(ValueError, match="must be torch or triton, found 'cuda'"):
        PeerOps.load("cuda")


def test_who_only_waits_for_the_dead_is_not_given_up() -> None:
    """Rank 2 dies when its flag has reached rank 1 alone: rank 0 is a deadline late for the combine of rank 1, which waits for it."""

    def work(party):  # type: ignore[no-untyped-def]
        dispatcher = party.make(party.spec(timeout_ms=400, fault_tolerant=True))
        tokens = make_tokens(party.rank, 6, dispatcher.spec, "random", 1)
        party.meet()
        if party.rank == 2:
            dispatcher.state.active[0] = 0  # nothing goes to rank 0
            dispatcher.dispatch_send(*tokens)
            party.meet()
            return None
        routed = dispatcher.dispatch(*tokens)
        if party.rank == 0:
            time.sleep(0.15)  # later than the deadline of rank 1
        dispatcher.combine(answer(routed, dispatcher.spec, party.rank)[0], routed)
        x, ids, weights = tokens
        again = trip(dispatcher, party.rank, tokens)
        rest = by_rank(dispatcher.spec, (x, torch.where(ids // 4 == 2, -1, ids), weights))
        party.meet()
        return dispatcher.active_mask(), torch.equal(again, rest)

    assert in_threads(3, work) == [([True, True, False], True)] * 2 + [None]


def test_strided_tensors_and_refusals_of_an_operation() -> None:
    group = VirtualRanks.make(SPEC)
    tokens = [make_tokens(r, 5, SPEC, "random", 8) for r in range(3)]
    wide = [torch.randn(40, 5).t() for _ in tokens]  # columns lie apart
    for x, (source, _, _) in zip(wide, tokens, strict=True):
        x.copy_(source)
    tickets = [rank.dispatch_send(x, *rest) for rank, x, (_, *rest) in zip(group.ranks, wide, tokens, strict=True)]
    routed = [rank.dispatch_recv(ticket) for rank, ticket in zip(group.ranks, tickets, strict=True)]
    backs = [
        d.combine_send(answer(q, SPEC, r)[0].t().contiguous().t(), q) for r, (d, q) in enumerate(zip(group.ranks, routed, strict=True))
    ]
    for rank, back, mine in zip(group.ranks, backs, tokens, strict=True):
        assert torch.equal(rank.combine_recv(back), by_rank(SPEC, mine))
    first = group.ranks[0]

    def refuse(*_: object, **__: object) -> None:
        raise ValueError("no")

    kept, first.ops = first.ops, replace(first.ops, send_tokens=refuse)
    for _ in range(SPEC.depth + 1):
        with pytest.raises(ValueError, match="no"):
            first.dispatch_send(*tokens[0])
    first.ops = kept
    assert len(steps(group)) == 3
    group.close()
