"""The stays of one DP rank: who is tolerant, who has a lease, and who has most to give."""

from __future__ import annotations

from .page_book import NOWHERE, PageBook
from .stay import Stay
from .tier_limits import UNDER_WAY


class StayBook:
    """Running seats by slot. Their pages' readers and needs in the page book follow every change."""

    def __init__(self, book: PageBook) -> None:
        self.leased = self.open = 0  # stays with a lease; those that are open
        self.floors = 0  # sum over stays
        self.spare = 0  # pages of leases beyond what is promised
        self._book = book
        self._width = book.limits.hot_pages
        self._by_slot: dict[int, Stay] = {}

    def __len__(self) -> int:
        return len(self._by_slot)

    def __getitem__(self, slot: int) -> Stay:
        """The stay in request slot ``slot``."""
        return self._by_slot[slot]

    @property
    def cap(self) -> int:
        """Device pages of an offloaded stay that nothing takes away."""
        return self._width + UNDER_WAY

    def add(self, stay: Stay) -> None:
        """A stay begins, with the pages that it has from the prefix tree."""
        self._by_slot[stay.slot] = stay
        self.floors += stay.floor
        self.open += stay.open
        for page in stay.pages:
            self._book.readers[page] += 1
            self._book.needs[page] += not stay.tolerant
            self._book.classify(page)

    def remove(self, stay: Stay) -> None:
        """A stay ends; its lease is free."""
        del self._by_slot[stay.slot]
        stay.live = False
        self.floors -= stay.floor
        self.open -= stay.open
        book = self._book
        for page in reversed(stay.pages):  # the end of a sequence is of use to the fewest
            book.readers[page] -= 1
            book.needs[page] -= not stay.tolerant
            book.classify(page)
        if stay.lease:
            self.leased -= 1
            self.spare -= len(stay.lease) - self._width
            self._free_tail(stay, 0)

    def grant(self, stay: Stay) -> None:
        """A lease for ``stay`` from the free pages."""
        width = self._width
        assert not stay.lease
        self._append(stay, width)
        self.leased += 1
        self.open -= stay.tolerant
        self.raise_floor(stay, self.cap)

    def leasing(self) -> list[Stay]:
        """Stays with a lease."""
        return [stay for stay in self._by_slot.values() if stay.lease]

    def grow(self, stay: Stay, count: int) -> None:
        """``count`` more pages for the lease of ``stay`` from the free ones."""
        assert stay.lease and len(stay.lease) + count <= self._book.limits.largest_lease
        self._append(stay, count)
        self.spare += count

    def shrink(self, stay: Stay, count: int) -> None:
        """The last ``count`` pages of the lease of ``stay`` are free; it keeps what is promised."""
        left = len(stay.lease) - count
        assert left >= self._width
        self._free_tail(stay, left)
        self.spare -= count

    def _append(self, stay: Stay, count: int) -> None:
        """``count`` free pages go to the end of the lease of ``stay``."""
        book, lease = self._book, stay.lease
        assert len(book.free) >= count
        for _ in range(count):
            book.moves.hot[stay.slot, len(lease)] = book.free[-1]
            lease.append(book.free.pop())

    def _free_tail(self, stay: Stay, left: int) -> None:
        """The lease of ``stay`` keeps its first ``left`` pages."""
        for index in range(left, len(stay.lease)):
            self._book.vacate(stay.lease[index])
            self._book.moves.hot[stay.slot, index] = NOWHERE
        del stay.lease[left:]

    def raise_floor(self, stay: Stay, floor: int) -> None:
        """``stay`` holds ``floor`` device pages at the least, no more than an offloaded one."""
        floor = min(floor, self.cap)
        if floor > stay.floor:
            self.floors += floor - stay.floor
            stay.floor = floor

    def loosen(self, stay: Stay) -> None:
        """``stay`` can do without some of its pages from now on."""
        assert not stay.tolerant
        stay.tolerant = True
        self.open += not stay.lease
        for page in stay.pages:
            self._book.needs[page] -= 1
            self._book.classify(page)

    def tighten(self, stay: Stay) -> None:
        """``stay`` has all its pages on the device, and they stay there."""
        assert stay.open
        stay.tolerant = False
        self.open -= 1
        for page in stay.pages:
            self._book.needs[page] += 1
            self._book.classify(page)

    def misses(self, stay: Stay) -> bool:
        """Whether some page of ``stay`` is not on the device."""
        device = self._book.device
        return stay.tolerant and any(device[page] < 0 for page in stay.pages)

    def victim(self) -> Stay | None:
        """The stay whose droppable pages exceed a lease by most, lowest ranked on ties; None when there is none."""
        best, most = None, self._width
        for stay in sorted(self._spillable(), key=lambda s: (-len(s.pages), -s.rank[0], -s.rank[1])):
            if len(stay.pages) < most:
                break
            clean = self._clean(stay, ripe=True)
            if clean > most or (best is not None and clean == most and stay.rank > best.rank):
                best, most = stay, clean
        return best

    def to_come(self) -> int:
        """Device pages that spills would give once copies under way are done."""
        return sum(max(0, self._clean(stay, ripe=False) - self._width) for stay in self._spillable())

    def _spillable(self) -> list[Stay]:
        """Stays that need all their pages, which are more than a lease would take."""
        return [stay for stay in self._by_slot.values() if not stay.tolerant and not stay.lease and len(stay.pages) > self._width]

    def _clean(self, stay: Stay, *, ripe: bool) -> int:
        """Pages that could be dropped if ``stay`` were offloaded; with ``ripe`` False, those whose copies are under way included."""
        book = self._book
        return sum(book.needs[page] == 1 and (book.ripe(page) if ripe else book.stamp[page] >= 0) for page in stay.pages)

    def check(self) -> None:
        """AssertionError unless the sums and the pages of stays are right."""
        stays = list(self._by_slot.values())
        self._book.check(stays)
        assert self.leased == sum(bool(stay.lease) for stay in stays), "leases are miscounted"
        assert self.open == sum(stay.open for stay in stays), "open stays are miscounted"
        assert self.floors == sum(stay.floor for stay in stays), "floors are miscounted"
        assert self.spare == sum(len(stay.lease) - self._width for stay in stays if stay.lease), "grown leases are miscounted"
        for stay in stays:
            held, most = len(stay.lease), self._book.limits.largest_lease
            assert held == 0 or self._width <= held <= most, f"slot {stay.slot} leases {held} pages"
            assert stay.tolerant or all(self._book.device[page] >= 0 for page in stay.pages), f"slot {stay.slot} misses pages"
