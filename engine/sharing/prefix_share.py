"""What the scheduler of one replica has of the prefix directory: pages, answers about prompts, publications, pressure."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from ...attention.kv.directory import Directory, DirectoryBusy
from ...attention.kv.ids import HostPage
from ..plan import I32, StepPlan
from .clerk import Clerk
from .host_pages import SharedHostPages
from .publication import Publication
from .questions import Questions
from .shortage import Shortage

_REST_S = 0.002  # a replica with nothing to run looks again after so long
_STALE_S = 0.02  # how old a count of the directory's free pages may be
_HAND = 2  # extents that the next steps find in hand
_CLOSING_S = 5.0  # to publish what is left


class PrefixShare:
    """One member of the directory, as its scheduler uses it. All calls under ``lock``, which the clerk takes between steps."""

    def __init__(
        self,
        directory: Directory,
        *,
        copies_done: Callable[[int], bool],
        timeout_s: float,
        poison: Callable[[Sequence[int]], None] | None = None,
    ) -> None:
        """``copies_done``, ``poison``: see ``SharedHostPages``. ``timeout_s``: longest wait for pages that others have."""
        self.lock = threading.Lock()
        self.directory = directory
        self.pages = SharedHostPages(directory, copies_done, poison)
        self.relieve: Callable[[int], None] = lambda count: None  # lets go of so many pages that nobody reads; set by the scheduler
        self.imported = self.hits = 0  # pages, and requests that got some
        self.clerk = Clerk(directory, directory.layout.hasher(), self._idle_look)
        self.shortage = Shortage(directory, self.clerk.do, timeout_s)
        self.questions = Questions(self.clerk, self.pages.returned, directory.layout.page_size)
        self._ripening: deque[Publication] = deque()  # until copies have ended
        self._published: deque[Publication] = deque()  # by the clerk
        self._publishing: set[HostPage] = set()
        self._filling = False
        self._relieved = 0  # the clerk's look that was heeded last
        self._room, self._room_at = 0, 0.0

    # ---- a step

    def begin(self) -> None:
        """A step is made from now on.

        Raises:
            RuntimeError: a thread of the share has ended by a fault.
        """
        if self.clerk.fault is not None:
            raise RuntimeError(f"the prefix directory's thread has ended: {self.clerk.fault}") from self.clerk.fault
        self.questions.begin()
        self.shortage.begin()
        self._settle()

    def end(self, plan: StepPlan) -> None:
        """``plan`` stands.

        Raises:
            TimeoutError: nothing has run for too long, because others have all host pages.
        """
        self.pages.note(plan)
        self.shortage.end(runs=plan.n_rows > 0)

    def rest(self) -> None:
        """Nothing runs: wait a moment for what is to come from others, if there is any."""
        if not self.questions.rest(_REST_S) and (self.shortage.now or self.yields):
            time.sleep(_REST_S)

    @property
    def yields(self) -> bool:
        """Another member has lacked pages for longer: it comes first."""
        return self.clerk.wanted.first not in (None, self.directory.member)

    def has(self, count: int, spare: int) -> bool:
        """Whether ``count`` host pages can probably be had, ``spare`` of them from this replica's own prefix tree."""
        missing = count - self.pages.in_hand - spare
        if missing > self._room and time.monotonic() > self._room_at + _STALE_S:
            self.pages.give_back()
            with suppress(DirectoryBusy):
                self._room, self._room_at = self.directory.pressure.available(), time.monotonic()
        return missing <= self._room

    # ---- what prompts begin with

    def bring(self, pages: Sequence[HostPage], unused: Sequence[HostPage]) -> None:
        """Of the pages of an answer ``pages`` come into use and ``unused`` do not."""
        self.pages.bring(pages)
        self.pages.returned.extend(unused)
        self.imported += len(pages)
        self.hits += bool(pages)

    # ---- what others may find

    def publish(self, tokens: I32, pages: Sequence[HostPage], first: int) -> None:
        """Offer host ``pages`` that hold the pages of ``tokens`` from number ``first`` on, as soon as their copies have ended."""
        wanted = [place for place, page in enumerate(pages) if page not in self._publishing and self.pages.owned(page)]
        if not wanted or self.clerk.error is not None:
            return
        chosen = [pages[place] for place in wanted]
        self.pages.share(chosen)
        self._publishing.update(chosen)
        end = (first + wanted[-1] + 1) * self.directory.layout.page_size
        self._ripening.append(Publication(tokens[:end].copy(), [first + place for place in wanted], chosen))

    # ---- between steps

    def _settle(self) -> None:
        """Everything that has become possible since the last time."""
        pages, clerk = self.pages, self.clerk
        while self._ripening and pages.ripe(self._ripening[0].pages):
            clerk.do(partial(self._offer, self._ripening.popleft()))
        while self._published:
            done = self._published.popleft()
            pages.published(done.accepted)
            self._publishing.difference_update(done.pages)
            pages.drop(done.pages)
        pages.cool()
        others = clerk.wanted.pages
        if others and clerk.looks != self._relieved and not (self.shortage.now and not self.yields):
            self._relieved = clerk.looks
            pages.empty_hand()
            self.questions.drop_answers()  # whoever waits here is not admitted now, so nobody would take what they hold
            self.relieve(others)
            clerk.do(self._hand_over)
        elif not others and not self._filling and pages.in_hand < _HAND * self.directory.layout.extent_pages:
            self._filling = True
            clerk.do(self._fill)
        if len(pages.returned) >= self.directory.layout.extent_pages:
            clerk.do(pages.give_back)

    def _offer(self, publication: Publication) -> None:
        try:
            publication.publish(self.directory, self.clerk.hasher)
        finally:
            self._published.append(publication)

    def _fill(self) -> None:
        try:
            size = _HAND * self.directory.layout.extent_pages
            self.pages.granted.extend(self.directory.allocate(size, least=0))
        finally:
            self._filling = False

    def _hand_over(self) -> None:
        """Others want pages: what was let go goes into the store at once, not with the next heartbeat."""
        self.pages.give_back()
        self.directory.renew()
        self.directory.trim()

    def _idle_look(self) -> None:
        """On the clerk's thread: what a step would do, if none is being made."""
        if self.lock.acquire(blocking=False):
            try:
                self._settle()
            finally:
                self.lock.release()
        self.pages.give_back()

    # ---- the end

    @property
    def busy(self) -> bool:
        """Something is being published, or waits for copies."""
        return bool(self._ripening or self._publishing or self.pages.cooling)

    def flush(self, timeout_s: float = _CLOSING_S) -> bool:
        """Wait until nothing is being published; not under ``lock``. False: it takes longer."""
        end = time.monotonic() + timeout_s
        while True:
            with self.lock:
                self._settle()
                if not self.busy:
                    return True
            if time.monotonic() > end:
                return False
            time.sleep(0.002)

    def close(self) -> None:
        """Publish what is left, and end the threads; the device must have done everything."""
        self.flush()
        self.clerk.close(_CLOSING_S)

    def stats(self) -> dict[str, Any]:
        """Counters since the start."""
        counts = self.directory.counts
        found = {"hits": self.hits, "imported_pages": self.imported, "asked_pages": counts.asked, "matched_pages": counts.matched}
        found |= {"published": counts.published, "already_there": counts.present, "withdrawn": counts.withdrawn}
        return found | {"late": self.questions.late, "busy": counts.busy, "waits": self.shortage.waits, "reclaimed": counts.reclaimed}
