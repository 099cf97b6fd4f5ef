"""Rows of the device tables: one for every request that runs."""

from __future__ import annotations


class SlotPool:
    """Slots ``0 .. n_slots - 1``, last in, first out. Misuse is a bug of ours: AssertionError."""

    def __init__(self, n_slots: int) -> None:
        self.n_slots = n_slots
        self._free = list(range(n_slots - 1, -1, -1))
        self._used = [False] * n_slots

    @property
    def n_free(self) -> int:
        """Slots that nobody holds."""
        return len(self._free)

    def is_free(self, slot: int) -> bool:
        """True when nobody holds ``slot``."""
        return not self._used[slot]

    def take(self) -> int:
        """Hand out a free slot."""
        assert self._free, f"all {self.n_slots} slots are taken"
        slot = self._free.pop()
        self._used[slot] = True
        return slot

    def give(self, slot: int) -> None:
        """Take ``slot`` back."""
        assert self._used[slot], f"slot {slot} is freed twice"
        self._used[slot] = False
        self._free.append(slot)

    def check(self) -> None:
        """AssertionError unless the free list and the marks agree."""
        assert len(set(self._free)) == len(self._free), "a slot is in the free list twice"
        assert sorted(self._free) == [slot for slot, used in enumerate(self._used) if not used], "free slots and marks disagree"
