"""Point-to-point transfers in rounds in which every rank sends at most once and receives at most once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence


def in_rounds(pairs: Sequence[tuple[int, int]]) -> list[int]:
    """The round of each (sender, receiver), with as few rounds as the busiest sender or receiver has transfers.

    An edge colouring of the bipartite graph of senders and receivers (König, by alternating paths). Within a round all
    operations are posted before any is waited for, so no order of ranks can lock: whoever is in the earliest round finds
    its partners there or on their way.
    """
    most = _busiest(pairs)
    of_sender: dict[int, list[int]] = defaultdict(lambda: [-1] * most)  # [round] transfer, by rank
    of_receiver: dict[int, list[int]] = defaultdict(lambda: [-1] * most)
    rounds = [-1] * len(pairs)
    for transfer, (sender, receiver) in enumerate(pairs):
        sends, receives = of_sender[sender], of_receiver[receiver]
        free_there, free_here = sends.index(-1), receives.index(-1)
        if receives[free_there] >= 0:
            _alternate(receiver, free_there, free_here, pairs, rounds, of_sender, of_receiver)
        sends[free_there] = receives[free_there] = transfer
        rounds[transfer] = free_there
    return rounds


def _busiest(pairs: Sequence[tuple[int, int]]) -> int:
    sends: dict[int, int] = defaultdict(int)
    receives: dict[int, int] = defaultdict(int)
    for sender, receiver in pairs:
        sends[sender] += 1
        receives[receiver] += 1
    return max([*sends.values(), *receives.values()], default=0)


def _alternate(
    receiver: int,
    first: int,
    second: int,
    pairs: Sequence[tuple[int, int]],
    rounds: list[int],
    of_sender: dict[int, list[int]],
    of_receiver: dict[int, list[int]],
) -> None:
    """Free round ``first`` at ``receiver``: exchange the rounds ``first`` and ``second`` along the path that begins there."""
    path, at_receiver, rank, wanted = [], True, receiver, first
    while True:
        transfer = (of_receiver if at_receiver else of_sender)[rank][wanted]
        if transfer < 0:
            break
        path.append(transfer)
        rank = pairs[transfer][0 if at_receiver else 1]
        at_receiver, wanted = not at_receiver, second if wanted == first else first
    for transfer in path:
        sender, taker = pairs[transfer]
        of_sender[sender][rounds[transfer]] = of_receiver[taker][rounds[transfer]] = -1
    for transfer in path:
        sender, taker = pairs[transfer]
        rounds[transfer] = second if rounds[transfer] == first else first
        of_sender[sender][rounds[transfer]] = of_receiver[taker][rounds[transfer]] = transfer
