"""Where every logical page of one DP rank is: device page, host page, and whether the device's copy may go."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence

from ...attention.kv.ids import HostPage
from .host_pages import HostPages
from .moves import Moves
from .stay import Stay
from .tier_limits import RIPE_AFTER, TierLimits

NOWHERE = -1


class PageBook:
    """Device and host pages of the logical pages in use.

    A page is *ripe* when its copy to the host was started so many plans ago that the device's copy may go; the runner then
    waits for the copy, which is long done. ``needs`` counts the intolerant stays that read a page, ``readers`` all stays.
    Ripe pages that nobody needs queue to be dropped: first those nobody reads. With policy "host" they are dropped at once, but for
    those whose writer has hot rows, which it moves what it chooses of them to in the plan before.
    """

    def __init__(self, limits: TierLimits, host_pages: HostPages, *, with_keys: bool = False) -> None:
        """``with_keys``: index keys go to the host too, for others that find the page by what is in it."""
        n = limits.n_pages
        self.limits = limits
        self.moves = Moves()
        self.step = -1
        self.device = [NOWHERE] * n  # device page
        self.host = [NOWHERE] * n  # host page reserved for it
        self.stamp = [NOWHERE] * n  # plan that started its copy; -1: not all rows are written
        self.published = [False] * n  # the device tables know its host page
        self.needs = [0] * n
        self.readers = [0] * n
        self.free = list(range(limits.n_device_pages - 1, -1, -1))  # device pages
        self.cooling: deque[tuple[int, int]] = deque()  # (plan from which it is free, device page): a copy may still read it
        self.aging: deque[tuple[int, int, Stay | None]] = deque()  # (plan, page, who wrote it): copies under way
        self.unread: dict[int, None] = {}  # droppable pages that nobody reads, longest unread first
        self.loose: dict[int, None] = {}  # droppable pages that only tolerant stays read, longest droppable first; "host": go next
        self.drops = self.restored = self.mirrored = 0
        self._at_once = limits.policy == "host"
        self._host_pages, self._with_keys = host_pages, with_keys

    def ripe(self, page: int) -> bool:
        """Whether its device page may be dropped as far as its copy is concerned."""
        return 0 <= self.stamp[page] <= self.step - RIPE_AFTER

    # ---- pages come and go

    def assign(self, pages: Sequence[int], after: int, needs: int) -> None:
        """Device and host pages for fresh logical ``pages`` of one reader, which needs them or not (1 or 0).

        Host pages come from behind that of logical page ``after`` if they can; -1: from anywhere.
        """
        behind = None if after < 0 else HostPage(self.host[after])
        moves, free = self.moves.device, self.free
        for page, host in zip(pages, self._host_pages.take(len(pages), behind), strict=True):
            self.host[page] = host
            self.device[page] = moves[page] = free.pop()
            self.readers[page], self.needs[page] = 1, needs
            if self.published[page]:  # of an earlier life
                self.published[page] = False
                self.moves.host[page] = NOWHERE

    def release(self, page: int) -> None:
        """Nobody holds logical ``page`` any more."""
        assert self.readers[page] == self.needs[page] == 0, f"page {page} is freed under a reader"
        self.unread.pop(page, None)
        self._host_pages.drop((HostPage(self.host[page]),))
        device, self.device[page] = self.device[page], NOWHERE
        if device >= 0:
            if self.stamp[page] > self.step - RIPE_AFTER:
                self.cooling.append((self.stamp[page] + RIPE_AFTER, device))
            else:
                self.vacate(device)
        self.host[page] = self.stamp[page] = NOWHERE
        self.moves.restores.pop(page, None)
        self.moves.imports.pop(page, None)

    def bring(self, pages: Sequence[int], hosts: Sequence[int]) -> None:
        """Fresh logical ``pages`` without readers are the finished host pages ``hosts``; nothing of them is on the device."""
        assert self.step >= RIPE_AFTER, "a page comes in before any can be ripe"
        for page, host in zip(pages, hosts, strict=True):
            self.host[page], self.stamp[page], self.published[page] = host, 0, True
            self.moves.device[page], self.moves.host[page], self.moves.imports[page] = NOWHERE, host, host

    def vacate(self, device: int) -> None:
        """Device page ``device`` is free."""
        self.free.append(device)
        self.moves.vacated.append(device)

    def _put(self, page: int, device: int) -> None:
        self.device[page] = self.moves.device[page] = device

    # ---- between the tiers

    def written(self, page: int, step: int, by: Stay | None) -> None:
        """Plan ``step`` writes the last rows of ``page``: copy it to the host afterwards."""
        assert self.device[page] >= 0 and self.stamp[page] < 0, f"page {page} is written twice"
        self.stamp[page] = step
        self.moves.mirrors.append((self.device[page], self.host[page]))
        if self._with_keys:
            self.moves.mirrored.append(page)
        self.aging.append((step, page, by))
        self.mirrored += 1

    def drop(self, page: int) -> None:
        """The host's copy has to do from now on."""
        assert self.ripe(page) and self.needs[page] == 0, f"page {page} may not be dropped"
        self.unread.pop(page, None)
        self.loose.pop(page, None)
        self.vacate(self.device[page])
        self._put(page, NOWHERE)
        self.moves.restores.pop(page, None)
        self._publish(page)
        self.drops += 1

    def _publish(self, page: int) -> None:
        """The ranks learn where the copy is; a page that is published and still on the device can move."""
        if not self.published[page]:
            self.published[page] = True
            self.moves.host[page] = self.host[page]

    def publish(self, pages: Iterable[int]) -> None:
        """A stay that needs ``pages`` will do without: those that nobody else needs may move to its hot rows."""
        for page in pages:
            if self.needs[page] == 1 and self.ripe(page):
                self._publish(page)

    def restore(self, page: int) -> None:
        """Copy ``page`` back to the device before the step."""
        self._put(page, self.free.pop())
        self.moves.restores[page] = (self.host[page], self.device[page])
        self.restored += 1

    def classify(self, page: int) -> None:
        """Where ``page`` belongs now that its readers, or its age, have changed."""
        if self.device[page] < 0:
            return
        if self.needs[page] or not self.ripe(page):
            self.unread.pop(page, None)
            self.loose.pop(page, None)
        elif self._at_once:
            self.drop(page)
        elif self.readers[page]:
            self.unread.pop(page, None)
            self.loose.setdefault(page)
        else:
            self.loose.pop(page, None)
            self.unread.setdefault(page)

    def begin(self, step: int) -> list[Stay]:
        """Plan ``step`` begins: what has aged may go. Returns who has hot rows and loses pages with the next plan."""
        self.step = step
        while self.cooling and self.cooling[0][0] <= step:
            self.vacate(self.cooling.popleft()[1])
        if self._at_once:
            for page in list(self.loose):
                self.drop(page)
        recent: list[Stay] = []
        while self.aging and self.aging[0][0] <= step - RIPE_AFTER:
            stamp, page, by = self.aging.popleft()
            if self._at_once and by is not None and by.live and by.lease and stamp == self.stamp[page]:
                self._linger(page)
                recent.append(by)
            else:
                self.classify(page)
        return recent

    def _linger(self, page: int) -> None:
        """``page`` may go, but its writer has a plan to move what it chooses of it to its hot rows, unless there is pressure."""
        self._publish(page)
        if not self.needs[page]:
            self.loose[page] = None

    def shed(self, count: int) -> None:
        """Drop droppable pages until ``count`` device pages are free or none is left."""
        for queue in (self.unread, self.loose):
            while queue and len(self.free) < count:
                self.drop(next(iter(queue)))

    @property
    def droppable(self) -> int:
        """Device pages that can be had by drops alone, the free ones not counted."""
        return len(self.unread) + len(self.loose)

    def coming(self) -> int:
        """Device pages that will be had without anybody's doing once copies are done."""
        return len(self.cooling) + sum(self.needs[page] == 0 and self.stamp[page] == at for at, page, _ in self.aging)

    def take_moves(self) -> Moves:
        """Changes since the last call."""
        moves, self.moves = self.moves, Moves()
        return moves

    # ---- checking

    def check(self, stays: Sequence[Stay]) -> None:
        """AssertionError unless every device page is free, cooling, leased or held, and ``stays`` are the readers of pages."""
        leased = [page for stay in stays for page in stay.lease]
        held = [device for device in self.device if device >= 0]
        everything = [*self.free, *(device for _, device in self.cooling), *leased, *held]
        assert sorted(everything) == list(range(self.limits.n_device_pages)), (
            f"{len(self.free)} free + {len(self.cooling)} cooling + {len(leased)} leased + {len(held)} holding != "
            f"{self.limits.n_device_pages} device pages, or one is in two places"
        )
        readers = Counter(page for stay in stays for page in stay.pages)
        needs = Counter(page for stay in stays if not stay.tolerant for page in stay.pages)
        for page in range(self.limits.n_pages):
            assert self.readers[page] == readers[page], f"page {page} has {self.readers[page]} readers, {readers[page]} expected"
            assert self.needs[page] == needs[page], f"page {page} is needed by {self.needs[page]} stays, {needs[page]} expected"

    def check_pages(self, in_use: Iterable[int]) -> None:
        """AssertionError unless rows of every logical page ``in_use`` are somewhere, and those of the others nowhere."""
        used = set(in_use)
        for page in range(self.limits.n_pages):
            self._check_page(page, page in used)

    def _check_page(self, page: int, used: bool) -> None:
        device, ripe = self.device[page], self.ripe(page)
        assert used == (self.host[page] >= 0), f"page {page} is {'in use without' if used else 'free with'} a host page"
        assert used or device < 0, f"page {page} is free and has a device page"
        assert not used or device >= 0 or (ripe and self.published[page]), f"rows of page {page} are nowhere"
        assert not self.needs[page] or device >= 0, f"page {page} is needed on the device and is not there"
        queued = (page in self.unread) + 2 * (page in self.loose)
        free_to_go = used and device >= 0 and ripe and not self.needs[page]
        expected = (2 if self.readers[page] else 1) if free_to_go else 0
        assert queued == expected or (self._at_once and not queued), f"page {page} queues wrongly"
