"""Rows of the device tables: one for every request that runs."""

from __future__ import annotations

from collections import deque


class SlotPool:
    """Slots ``0 .. n_slots - 1``, first in, first out. Misuse is a bug of ours: AssertionError.

    A sampled token enters the token table of the first pipeline stage ``pp`` steps after the step that sampled it. A slot
    is therefore given back with the first step that may use it again; until then it is free, but not handed out.
    """

    def __init__(self, n_slots: int) -> None:
        self.n_slots = n_slots
        self._free: deque[tuple[int, int]] = deque((slot, 0) for slot in range(n_slots))  # slot, first step that may use it
        self._used = [False] * n_slots

    @property
    def n_free(self) -> int:
        """Slots that nobody holds."""
        return len(self._free)

    def is_free(self, slot: int) -> bool:
        """True when nobody holds ``slot``."""
        return not self._used[slot]

    def ready(self, step: int) -> bool:
        """True when ``take`` has a slot for step ``step``."""
        return bool(self._free) and self._free[0][1] <= step

    @property
    def first(self) -> int:
        """The slot that ``take`` hands out next."""
        return self._free[0][0]

    def take(self, step: int) -> int:
        """Hand out a slot from step ``step`` on."""
        assert self.ready(step), f"no slot for step {step}: {self.n_slots - self.n_free} of {self.n_slots} are taken"
        slot, _ = self._free.popleft()
        self._used[slot] = True
        return slot

    def give(self, slot: int, first_step: int) -> None:
        """Take ``slot`` back; step ``first_step`` may use it again."""
        assert self._used[slot], f"slot {slot} is freed twice"
        self._used[slot] = False
        self._free.append((slot, first_step))

    def check(self) -> None:
        """AssertionError unless the free list and the marks agree."""
        free = sorted(slot for slot, _ in self._free)
        assert len(set(free)) == len(free), "a slot is in the free list twice"
        assert free == [slot for slot, used in enumerate(self._used) if not used], "free slots and marks disagree"
