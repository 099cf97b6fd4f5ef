"""Host pages of one replica that come from the directory: handed out without a transaction, returned once nothing touches them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from ...attention.kv.directory import Directory, DirectoryBusy, DirectoryFull
from ...attention.kv.directory.stock import Stock
from ...attention.kv.ids import HostPage
from ..plan import StepPlan

_NEVER = -1


class SharedHostPages:
    """``HostPages`` of the residency over a member of the directory. One thread at a time, but for ``granted`` and ``returned``.

    A page is *owned* until it is published, then *held*, as are those that other members wrote. It goes back to the directory when
    its last user has let go and the copy that wrote it has ended for certain. Misuse is a bug of ours: AssertionError.
    """

    def __init__(
        self, directory: Directory, copies_done: Callable[[int], bool], poison: Callable[[Sequence[int]], None] | None = None
    ) -> None:
        """``copies_done``: whether the copies of a plan and all before it have ended. ``poison``: fills pages that get new rows."""
        self.granted: deque[HostPage] = deque()  # from the clerk, to be handed out
        self.returned: deque[HostPage] = deque()  # for the clerk, one entry for each hold
        self.busy = False  # ``secure`` found the store locked: nobody knows how many pages there are
        self._directory, self._copies_done, self._poison = directory, copies_done, poison
        self._hand = Stock(directory.layout.extent_pages)
        self._users: dict[HostPage, int] = {}
        self._holds: dict[HostPage, int] = {}  # of pages in use: how often the directory counts this member; 0: owned
        self._copied: dict[HostPage, int] = {}  # owned pages in use: plan whose step their copy follows
        self._cooling: dict[HostPage, int] = {}  # free as soon as the copies of a plan have ended

    # ---- as the residency sees it

    def take(self, count: int, after: HostPage | None = None) -> list[HostPage]:
        """``count`` pages to write, each with one user; ``secure`` has them in hand."""
        pages = self._hand.take(count, after)
        for page in pages:
            self._users[page], self._holds[page] = 1, 0
        if self._poison is not None and pages:
            self._poison(pages)
        return pages

    def drop(self, pages: Iterable[HostPage]) -> None:
        """Take one user from each page."""
        for page in pages:
            assert self._users.get(page, 0) > 0, f"host page {page} is freed twice"
            self._users[page] -= 1
            if self._users[page] == 0:
                self._let_go(page)

    def _let_go(self, page: HostPage) -> None:
        plan = self._copied.get(page, _NEVER)
        if plan != _NEVER and not self._copies_done(plan):
            self._cooling[page] = plan
            return
        holds = self._holds.pop(page)
        self._copied.pop(page, None)
        del self._users[page]
        self.returned.extend([page] * max(1, holds))

    # ---- supply

    @property
    def in_hand(self) -> int:
        """Pages that ``take`` has without asking anybody."""
        self._draw()
        return self._hand.n_pages

    @property
    def cooling(self) -> bool:
        """Some pages come back as soon as copies under way have ended."""
        return bool(self._cooling)

    def secure(self, count: int, after: HostPage | None = None) -> int:
        """How many of ``count`` pages ``take`` can have now, after asking the directory for what is not in hand.

        Raises:
            DirectoryError: the directory does not work any more.
        """
        missing, self.busy = count - self.in_hand, False
        if missing > 0:
            self.give_back()
            try:
                self._hand.put(self._directory.allocate(missing, after, least=1))
            except DirectoryFull:
                pass
            except DirectoryBusy:
                self.busy = True
        return min(count, self._hand.n_pages)

    def give_back(self) -> None:
        """Tell the directory now what has been returned so far."""
        pages: list[HostPage] = []
        with suppress(IndexError):
            while True:
                pages.append(self.returned.popleft())
        if pages:
            try:
                self._directory.release(pages)
            except DirectoryBusy:
                self.returned.extend(pages)

    def empty_hand(self) -> None:
        """Others want pages: nothing is kept for later."""
        self._draw()
        self.returned.extend(HostPage(page) for page in self._hand.surplus(0))

    def _draw(self) -> None:
        with suppress(IndexError):
            while True:
                self._hand.put((self.granted.popleft(),))

    def cool(self) -> None:
        """Return pages whose copies have ended."""
        for page in [page for page, plan in self._cooling.items() if self._copies_done(plan)]:
            del self._cooling[page], self._copied[page]
            self._let_go(page)

    # ---- between the members

    def note(self, plan: StepPlan) -> None:
        """``plan`` has its moves: which host pages it copies to."""
        for page in plan.mirrors[:, 1].tolist():
            self._copied[page] = plan.step

    def ripe(self, pages: Sequence[HostPage]) -> bool:
        """Whether the copies that wrote owned ``pages`` have ended."""
        return self._copies_done(max((self._copied[page] for page in pages), default=_NEVER))

    def owned(self, page: HostPage) -> bool:
        """Whether ``page``, which is in use, is this member's own: nobody else can find it."""
        return self._holds[page] == 0

    def share(self, pages: Iterable[HostPage]) -> None:
        """One more user of each page, which all have some."""
        for page in pages:
            assert self._users.get(page, 0) > 0, f"host page {page} is free and cannot be shared"
            self._users[page] += 1

    def published(self, pages: Iterable[HostPage]) -> None:
        """Owned ``pages`` are the directory's now, which counts one hold of this member for that."""
        for page in pages:
            self._holds[page] += 1

    def bring(self, pages: Iterable[HostPage]) -> None:
        """Pages that a match has taken, one hold each, come into use."""
        for page in pages:
            self._holds[page] = self._holds.get(page, 0) + 1
            self._users[page] = self._users.get(page, 0) + 1

    @property
    def n_used(self) -> int:
        """Users of all pages: logical pages, and what is being published."""
        return sum(self._users.values())
