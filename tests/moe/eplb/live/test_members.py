"""All survivors learn of a loss at the same boundary, even if the lost rank had told its words to some of them only."""

from __future__ import annotations

import queue
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from rorqual.moe.eplb.live.members import Members
from rorqual.parallel.failure import CollectiveError

SIZE, VICTIM = 4, 2


class Lines:
    """Queues between ranks; a message that was sent before a rank died still arrives."""

    def __init__(self) -> None:
        self.queues: dict[tuple[int, int], queue.Queue[torch.Tensor]] = {(a, b): queue.Queue() for a in range(SIZE) for b in range(SIZE)}
        self.dead: set[int] = set()


class Pending:
    def __init__(self, work: Any) -> None:
        self.wait = work


class FakeGroup:
    size = SIZE

    def __init__(self, lines: Lines, index: int) -> None:
        self.lines, self.index = lines, index

    def _error(self, peer: int) -> CollectiveError:
        return CollectiveError(f"rank {peer} is gone", op="recv", group="ep", rank=self.index, step=0, deadline_s=1.0, missing={})

    def send_async(self, x: torch.Tensor, peer: int, tag: int = 0) -> Pending:
        self.lines.queues[self.index, peer].put(x.clone())
        return Pending(lambda: None)

    def recv_async(self, x: torch.Tensor, peer: int, tag: int = 0) -> Pending:
        def wait() -> None:
            try:
                x.copy_(self.lines.queues[peer, self.index].get(timeout=0.05 if peer in self.lines.dead else 10))
            except queue.Empty:
                raise self._error(peer) from None

        return Pending(wait)


def meet(members: list[Members], ranks: list[int], active: dict[int, list[bool]]) -> dict[int, list[int]]:
    with ThreadPoolExecutor(len(ranks)) as pool:
        return dict(zip(ranks, pool.map(lambda rank: members[rank].meet(active.get(rank, [True] * SIZE)), ranks), strict=True))


@pytest.mark.parametrize("told", [(), (0,), (0, 1), (0, 1, 3)])
def test_all_survivors_learn_at_the_same_boundary(told: tuple[int, ...]) -> None:
    lines = Lines()
    members = [Members(FakeGroup(lines, rank)) for rank in range(SIZE)]  # type: ignore[arg-type]
    for rank, each in enumerate(members):
        each.post([5, 2, rank, 0])
    assert meet(members, [0, 1, 2, 3], {}) == dict.fromkeys(range(SIZE), [])
    assert members[1].collect() == [[5, 2, rank, 0] for rank in range(SIZE)]
    survivors = [0, 1, 3]
    lines.dead.add(VICTIM)
    for rank in told:  # its last words
        lines.queues[VICTIM, rank].put(torch.tensor([0, 5, 2, 99, 0]))
    assert meet(members, survivors, {}) == dict.fromkeys(survivors, []), "some may not know yet"
    tables = {rank: members[rank].collect() for rank in survivors}
    assert all((tables[rank][VICTIM] is None) == (rank not in told) for rank in survivors)
    missing = [rank != VICTIM for rank in range(SIZE)]  # the dispatchers of those that were told miss it in the next step
    assert meet(members, survivors, dict.fromkeys(told, missing)) == dict.fromkeys(survivors, [VICTIM])
    assert all(members[rank].alive == survivors for rank in survivors)
    assert meet(members, survivors, {}) == dict.fromkeys(survivors, [])
    assert [len(members[rank].collect()) for rank in survivors] == [3, 3, 3]


def test_nothing_is_agreed_before_all_know() -> None:
    lines = Lines()
    members = [Members(FakeGroup(lines, rank)) for rank in range(SIZE)]  # type: ignore[arg-type]
    survivors, missing = [0, 1, 3], [True, True, False, True]
    lines.dead.add(VICTIM)
    for rank in (1, 3):  # it spoke to two of them, and one does not miss it for a step
        lines.queues[VICTIM, rank].put(torch.tensor([0, 0, 0, 0, 0]))
        lines.queues[VICTIM, rank].put(torch.tensor([0, 0, 0, 0, 0]))
    assert meet(members, survivors, {0: missing}) == dict.fromkeys(survivors, [])
    assert meet(members, survivors, {0: missing, 1: missing}) == dict.fromkeys(survivors, [])
    assert meet(members, survivors, dict.fromkeys(survivors, missing)) == dict.fromkeys(survivors, [VICTIM])
