"""Who keeps what on the device: device pages for what a step writes, drops, hot leases, restores. Lengths and counts decide."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from ..plan import StepPlan
from .host_pages import HostPages
from .leases import Leases
from .page_book import PageBook
from .stay import Stay
from .stay_book import StayBook
from .tier_limits import UNDER_WAY, TierLimits
from .warm_ups import WarmUps

_PATIENCE = 4  # steps until it is worth looking again for someone to spill


class Residency:
    """Device pages of one DP rank. Its calls follow the scheduler's: ``begin`` a step, ``enter``, ``ready``, ``take``, ``finish``.

    Nothing is decided by how far copies are: a page may be dropped two plans after its copy was started, whatever happens.
    Changes are kept until a plan with rows takes them along, since a plan without rows may never be launched.
    """

    def __init__(self, limits: TierLimits, host_pages: HostPages, *, with_keys: bool = False) -> None:
        """``with_keys``: see ``PageBook``."""
        self.limits = limits
        self.book = PageBook(limits, host_pages, with_keys=with_keys)
        self.stays = StayBook(self.book)
        self.leases = Leases(limits, self.book, self.stays)
        self.spills = 0  # running requests that gave up pages for a lease
        self._warm_ups = WarmUps()
        self._held_back = 0  # free device pages that others may not take in this step
        self._taken = self._demand = 0  # device pages taken in this step, and in the busiest of late
        self._look_again = 0  # step from which it is worth looking for someone to spill ahead of time
        self._at_once = limits.policy == "host"
        self._page_bits = limits.page_size.bit_length() - 1

    # ---- a step

    def begin(self, step: int) -> None:
        """Plan ``step`` is made from now on."""
        book, warm_ups = self.book, self._warm_ups
        self._held_back = 0
        warm_ups.stop(self.stays.loosen, book.moves)
        recent = book.begin(step)
        warm_ups.start(recent, step, book.moves)
        if not self._at_once:
            self._foresee(step)
        warm_ups.offload(self._lease, step, book)

    def _foresee(self, step: int) -> None:
        """Policy hybrid: let somebody's hot rows fill before pages run out, while a lease can still be had without taking from others.

        When pages run out all the same, ``_room`` spills without that.
        """
        book, width = self.book, self.limits.hot_pages
        self._demand, self._taken = max(self._taken, self._demand * 7 // 8), 0
        there = len(book.free) + book.droppable + self.stays.spare
        if self._demand and width <= there < width + 2 * self._demand and step >= self._look_again and not self._warm_ups.busy:
            victim = self.stays.victim()
            if victim is None:
                self._look_again = step + _PATIENCE
            else:
                self._warm_ups.want(victim)
                self.spills += 1

    def finish(self, plan: StepPlan, several: Sequence[tuple[int, bool]]) -> None:
        """The rows of ``plan`` stand: note what they write, and put all changes into it.

        ``several``: rows of several tokens, and whether the prompt of each ends with it.
        """
        plan.offloaded = self.stays.leased + self.stays.open > 0
        if not plan.n_rows:
            return
        book, stays = self.book, self.stays
        starts, bits = plan.starts, self._page_bits
        ends = starts + plan.counts
        rows = ((starts ^ ends) >> bits).nonzero()[0]  # those that cross into another page
        if len(rows):
            for slot, start, end in zip(plan.slots[rows].tolist(), starts[rows].tolist(), ends[rows].tolist(), strict=True):
                stay = stays[slot]
                for page in stay.pages[start >> bits : end >> bits]:
                    book.written(page, plan.step, stay)
        if not self._held_back:
            self.leases.level(plan.step)
        if several:
            plan.absent = np.array([row for row, _ in several if stays.misses(stays[int(plan.slots[row])])], dtype=np.int32)
            slots = [int(plan.slots[row]) for row, ends in several if ends]
            book.moves.seeds.extend(slot for slot in slots if stays[slot].lease)
        self._warm_ups.note(plan)
        book.take_moves().write(plan)

    # ---- stays

    def enter(self, *, slot: int, rank: tuple[int, int], pages: list[int], cached: int, total: int, count: int) -> Stay | None:
        """A seat with ``pages`` of the prefix tree comes in; None when the device has no room for it.

        Args:
            slot: its request slot.
            rank: lower runs first.
            pages: its page table, which may grow; all it has comes from the prefix tree.
            cached: positions in these pages.
            total: tokens it has to compute before it decodes.
            count: most tokens of its first row.
        """
        absent = [page for page in pages if self.book.device[page] < 0]
        long = cached >= self.limits.topk
        own = -(-(total + 1) // self.limits.page_size) - len(pages)
        floor = self.stays.cap if absent and long else min(self.limits.hot_pages, own) + UNDER_WAY
        if len(self.stays) and self.stays.floors + floor + self.limits.step_pages > self.limits.n_device_pages:
            return None
        stay = Stay(slot=slot, rank=rank, pages=pages, shared=len(pages), tolerant=long, floor=floor)
        self.stays.add(stay)
        if (long or self._restore(absent)) and self.ready(stay, cached, count, total - cached):
            return stay
        self.leave(stay)
        return None

    def _restore(self, pages: Sequence[int]) -> bool:
        """Bring ``pages`` back to the device, all or none."""
        if self._room(len(pages)) < len(pages):
            return False
        for page in pages:
            self.book.restore(page)
        return True

    def leave(self, stay: Stay) -> None:
        """A stay ends: no later plan has a row of it. What launched steps still read is written again only by later ones."""
        self.stays.remove(stay)
        self._warm_ups.forget(stay, self.book.moves)

    def ready(self, stay: Stay, start: int, count: int, left: int) -> bool:
        """Whether the next row of ``stay`` can be: ``count`` of ``left`` tokens from position ``start`` on. False: it has to wait.

        A row that samples, or is a single token, finds its rows on the device or in hot rows; prompts before that need neither.
        """
        if stay.lease:
            return True
        if count < left and count > 1 and self.limits.page_size > 1:
            large = -(-(start + left) // self.limits.page_size) > self.limits.hot_pages
            if not stay.tolerant and start >= self.limits.topk and large:
                self.stays.loosen(stay)
            return True
        if not stay.tolerant:
            return True
        if (self._at_once and len(stay.pages) > self.limits.hot_pages) or self.stays.misses(stay):
            return self._lease(stay)
        self.stays.tighten(stay)
        return True

    def stuck(self, stay: Stay) -> bool:
        """A row of ``stay`` came out as a single token of its prompt: whether it has neither all pages nor hot rows for that.

        One that has all its pages keeps them, whoever wants some later in this step.
        """
        if stay.lease:
            return False
        if self.stays.misses(stay):
            return True
        if stay.open:
            self.stays.tighten(stay)
        return False

    # ---- device pages

    def room(self, count: int) -> int:
        """How many of ``count`` device pages can be taken now, after dropping what may be dropped."""
        return max(0, min(count, self._room(count + self._held_back) - self._held_back))

    def take(self, stay: Stay, pages: Sequence[int]) -> None:
        """Fresh logical ``pages``, about to be appended to those of ``stay``, get device pages; ``room`` said they can."""
        book, mine = self.book, stay.pages
        book.assign(pages, mine[-1] if mine else -1, int(not stay.tolerant))
        self._taken += len(pages)
        if not stay.tolerant and pages:
            self.stays.raise_floor(stay, len(mine) + len(pages) - stay.shared + 1)
            if self._at_once and len(mine) + len(pages) > self.limits.hot_pages:
                self._warm_ups.want(stay)

    def release(self, pages: Iterable[int]) -> None:
        """Logical ``pages`` are free."""
        for page in pages:
            self.book.release(page)

    def coming(self, stay: Stay) -> bool:
        """Whether ``stay``, which has to wait for device pages, gets them without anybody's doing."""
        need = self._next_need(stay)
        there = len(self.book.free) + self.book.droppable + self.book.coming()
        return there >= need or there + self.stays.to_come() >= need

    def hold_back(self, stay: Stay) -> None:
        """``stay`` waits: lower ranks leave it what it needs, for the rest of this step."""
        self._held_back = max(self._held_back, self._next_need(stay))

    def _next_need(self, stay: Stay) -> int:
        return self.limits.hot_pages if stay.open else 1

    def _room(self, count: int) -> int:
        """Free device pages, after trying to have ``count``: by drops, from leases that grew, then by spilling who has most to give."""
        book, stays = self.book, self.stays
        if len(book.free) < count:
            book.shed(count)
            self.leases.give_back(count)
            if len(book.free) < count:
                self._warm_ups.cut_short(stays.loosen)
            while len(book.free) < count and (victim := stays.victim()) is not None:
                stays.loosen(victim)
                book.shed(self.limits.hot_pages)
                stays.grant(victim)
                self.spills += 1
                book.shed(count)
        return len(book.free)

    def _lease(self, stay: Stay) -> bool:
        """Hot rows for ``stay``; False when there is no room for them."""
        enough = self.room(self.limits.hot_pages) == self.limits.hot_pages
        if enough and not stay.lease:  # it may have been the one to be spilled
            self.stays.grant(stay)
        return bool(stay.lease)

    # ---- state

    @property
    def n_free(self) -> int:
        """Device pages that nobody holds, those still read by a copy included."""
        return len(self.book.free) + len(self.book.cooling)

    @property
    def idle(self) -> bool:
        """Nobody runs; what the device still holds are pages of the prefix tree."""
        return not len(self.stays)

    def stats(self) -> dict[str, int]:
        """Counters since the start, and the pools now."""
        book, limits = self.book, self.limits
        found = {"device_pages": limits.n_device_pages, "device_pages_free": self.n_free, "host_pages": limits.n_host_pages}
        found |= {"mirrored": book.mirrored, "dropped": book.drops, "restored": book.restored, "spilled": self.spills}
        rows = [len(stay.lease) * limits.page_size for stay in self.stays.leasing()] or [0]
        found |= {"offloaded_requests": self.stays.leased, "leases_grown": self.leases.grown, "leases_shrunk": self.leases.shrunk}
        return found | {"hot_rows_least": min(rows), "hot_rows_mean": sum(rows) // len(rows), "hot_rows_most": max(rows)}

    def check(self, in_use: Iterable[int]) -> None:
        """AssertionError unless device pages, stays and logical pages ``in_use`` agree."""
        self.stays.check()
        self.book.check_pages(in_use)
