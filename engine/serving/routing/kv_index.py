"""Which replicas have which pages, as far as their leaders told."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .kv_events import decode_batch, unpack


class KvIndex:
    """Hashes of cached pages of ``n_ranks`` replicas, at most ``most`` hashes; further ones are ignored and counted."""

    def __init__(self, n_ranks: int, most: int) -> None:
        self.n_ranks = n_ranks
        self.most = most
        self.blocks = [0] * n_ranks  # pages known of each replica
        self.ignored = 0  # pages that found no room
        self.gaps = 0  # times that news were lost
        self._ranks: dict[int, int] = {}  # hash -> bit r: replica r has it
        self._next = [0] * n_ranks  # sequence number that comes next
        self._lost: set[int] = set()  # replicas that must tell everything

    def heard(self, rank: int, data: bytes) -> bool:
        """Take in a message of ``KvLog.take``; False when something before it was lost.

        Then nothing is believed of that replica until it tells everything, which it must be asked for.

        Raises:
            ValueError: bytes that are no such message.
        """
        batch = decode_batch(data)
        stored, removed = unpack(batch.stored), unpack(batch.removed)
        expected, self._next[rank] = self._next[rank], batch.seq + 1
        if batch.whole:
            self._lost.discard(rank)
            self.forget(rank)
        elif batch.seq != expected:
            self.gaps += 1
            self._lost.add(rank)
            self.forget(rank)
            return False
        elif rank in self._lost:
            return True
        self.add(rank, stored)
        self.remove(rank, removed)
        return True

    def add(self, rank: int, hashes: Iterable[int]) -> None:
        """``rank`` has these pages."""
        ranks, bit = self._ranks, 1 << rank
        for value in hashes:
            have = ranks.get(value, 0)
            if have & bit:
                continue
            if not have and len(ranks) >= self.most:
                self.ignored += 1
                continue
            ranks[value] = have | bit
            self.blocks[rank] += 1

    def remove(self, rank: int, hashes: Iterable[int]) -> None:
        """``rank`` has these pages no more; unknown ones are ignored."""
        ranks, bit = self._ranks, 1 << rank
        for value in hashes:
            have = ranks.get(value, 0)
            if not have & bit:
                continue
            self.blocks[rank] -= 1
            if have == bit:
                del ranks[value]
            else:
                ranks[value] = have ^ bit

    def forget(self, rank: int) -> None:
        """``rank`` has nothing, as far as we know."""
        bit = 1 << rank
        self.remove(rank, [value for value, have in self._ranks.items() if have & bit])

    def overlaps(self, hashes: Sequence[int], also: dict[int, int]) -> list[int]:
        """Leading pages of ``hashes`` that each replica has.

        ``also``: hash -> bits of replicas that will have the page soon.
        """
        ranks = self._ranks
        return leading(self.n_ranks, (ranks.get(value, 0) | also.get(value, 0) for value in hashes))


def leading(n_ranks: int, masks: Iterable[int]) -> list[int]:
    """How many of the first masks have bit r, without a break, for every r."""
    found, place, alive = [0] * n_ranks, 0, (1 << n_ranks) - 1
    for place, mask in enumerate(masks, 1):
        still = alive & mask
        if still != alive:
            for rank in _bits(alive & ~still):
                found[rank] = place - 1
            alive = still
            if not alive:
                return found
    for rank in _bits(alive):
        found[rank] = place
    return found


def _bits(mask: int) -> list[int]:
    return [rank for rank in range(mask.bit_length()) if mask >> rank & 1]
